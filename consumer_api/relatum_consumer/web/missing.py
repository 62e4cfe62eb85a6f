"""Expectations with their counts, and the messages that did not meet one expectation."""

from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Final, Literal, TypeAlias

from pydantic import Field

from relatum.common.waiting import within
from relatum.errors import RelatumError, Transient
from relatum_consumer.expectations import Expectation, ExpectationResult, MissingReport, UnmetExpectation
from relatum_consumer.lookups.answering import ANSWER_MESSAGES_MAX
from relatum_consumer.web.endpoint import endpoint, failure_text, gather
from relatum_consumer.web.parameters import Moment, Number, Parameters, cursor_of, read_cursor
from relatum_consumer.web.site import Site

SPANS: Final = {"5m": 300.0, "1h": 3_600.0}
"""How far back due messages are checked, in seconds; `missing` checks a day by default."""

COUNTED_S: Final = 4.0
"""Seconds that a page may spend on the counts of its expectations, for which messages are read."""

COUNTS_CACHE_S: Final = 10.0
"""Seconds for which counts are cached: viewers share one read."""

_STREAMS_LISTED: Final = 100

Span: TypeAlias = Literal["5m", "1h", "1d", "all"]

_SPAN_DESCRIPTION: Final = "Messages due in the last five minutes, hour or day, or at any time."

_COUNT_HINT: Final = "Counting reads about 30,000 messages a second: choose a shorter span."

_FINDINGS: Final = (ExpectationResult.MISSING, ExpectationResult.LATE, ExpectationResult.NOT_KNOWN)


class MissingParameters(Parameters):
    span: Span = Field("1d", description=_SPAN_DESCRIPTION)
    limit: int = Field(50, ge=1, le=500, description="Maximum expectations.")


@dataclass(frozen=True, slots=True)
class Counted:
    """An expectation: a message of `follows` with the same value of `by` follows each message of `of` in time.

    `report` has the counts of the span, without lists; None if counting failed, and `words` says why.
    """

    expectation: Expectation
    report: MissingReport | None
    words: str


@dataclass(frozen=True, slots=True)
class MissingAnswer:
    """The first of `total` expectations, ordered by name."""

    expectations: tuple[Counted, ...]
    total: int


@endpoint(
    "/missing",
    "The expectations, and how many messages did not meet each: missing, late, not known.",
    tool="expectations",
)
async def missing(site: Site, query: MissingParameters) -> MissingAnswer:
    defined = await site.relations.expectations()
    with within(COUNTED_S):
        rows = await gather(partial(_counted, site, each, query.span) for each in defined[: query.limit])
    return MissingAnswer(tuple(rows), len(defined))


async def _counted(site: Site, expectation: Expectation, span: str) -> Counted:
    """Return an expectation with its counts. An error becomes a part of the answer, so others are still counted."""
    load = partial(site.relations.missing, expectation, since=_since(expectation, span), limit=1)
    try:
        report = await site.cached(("missing", expectation, span), COUNTS_CACHE_S, load)
    except RelatumError as error:
        is_late = isinstance(error, Transient) and not site.servers.unavailable
        words = f"not counted in time. {_COUNT_HINT}" if is_late else f"not counted: {failure_text(site, error)}"
        return Counted(expectation, None, words)
    return Counted(expectation, _without_lists(report), report.words)


def _without_lists(report: MissingReport) -> MissingReport:
    """Return the report with fewer streams, and without values, which may be masked."""
    streams, unrecorded = report.streams[:_STREAMS_LISTED], report.unrecorded_streams[:_STREAMS_LISTED]
    return replace(report, missing=(), late=(), not_known=(), streams=streams, unrecorded_streams=unrecorded)


def _since(expectation: Expectation, span: str) -> datetime | None:
    """Return the time of the first message to check; None for a day, the default of `missing`."""
    if span == "all":
        return datetime.fromtimestamp(0, UTC)
    return None if span == "1d" else datetime.now(UTC) - timedelta(seconds=expectation.within_s + SPANS[span])


# --- one expectation --------------------------------------------------------------------------------------


class ExpectationParameters(Parameters):
    name: str = Field(description="The expectation's name.")
    finding: Literal["", "missing", "late", "not_known"] = Field(
        "", description="The finding to list; by default the first of these with messages."
    )
    span: Span = Field("1d", description=_SPAN_DESCRIPTION)
    since: Moment | None = Field(None, description="Instead of a span: only messages of this time or later …")
    until: Moment | None = Field(None, description="… and only before this one.")
    limit: int = Field(100, ge=1, le=1_000, description="Messages on a page.")
    cursor: str = Field("", description="`next` of the previous page.")


@dataclass(frozen=True, slots=True)
class ExpectationAnswer:
    """The `report` on the messages of a span, its summary in `words`, and a page of the messages with one finding."""

    report: MissingReport
    words: str
    finding: ExpectationResult
    results: tuple[UnmetExpectation, ...]
    next: str | None


@endpoint(
    "/missing/expectation",
    "The messages that did not meet one expectation: missing, late, or not known and why.",
    tool="missing",
)
async def expectation(site: Site, query: ExpectationParameters) -> ExpectationAnswer:
    cursor = read_cursor(query.cursor, tuple[ExpectationResult, Moment, Moment, Number])
    since = query.since
    if since is None and query.until is None and cursor is None:
        named = {each.name: each for each in await site.relations.expectations()}.get(query.name)
        since = None if named is None else _since(named, query.span)
    # The cursor holds the span, so that all pages have the same one.
    kind, since, until, shown = cursor or (query.finding, since, query.until, 0)
    stop = shown + query.limit
    report = await site.relations.missing(
        query.name, since=since, until=until, limit=min(stop + 1, ANSWER_MESSAGES_MAX)
    )
    finding = ExpectationResult(kind or next((each for each in _FINDINGS if getattr(report, each)), _FINDINGS[0]))
    rows: tuple[UnmetExpectation, ...] = getattr(report, finding)
    by = report.expectation.by
    return ExpectationAnswer(
        report=_without_lists(report),
        words=report.words,
        finding=finding,
        results=tuple(replace(each, value=site.masking.shown(by, each.value)) for each in rows[shown:stop]),
        next=cursor_of(finding, report.since, report.until, stop) if len(rows) > stop else None,
    )
