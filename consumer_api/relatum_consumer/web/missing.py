"""What is missing: expectations with their counts, and of one the messages that nothing has followed in time."""

from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Annotated, Any, Final, Literal, TypeAlias

from relatum.errors import InvalidInput, RelatumError, Transient
from relatum.ids import MessageId
from relatum.waiting import within
from relatum_consumer import Status
from relatum_consumer.expectations import Expectation, ExpectationResult, MissingReport, Reason, UnmetExpectation
from relatum_consumer.web.cursors import WRONG_CURSOR, cursor_of, page_of_list, read_cursor
from relatum_consumer.web.endpoint import endpoint, gathered, words_of
from relatum_consumer.web.messages import KeyValue, key_value
from relatum_consumer.web.parameters import Parameter
from relatum_consumer.web.rendering import span_text
from relatum_consumer.web.site import Site

SPANS: Final = {"5m": 300.0, "1h": 3_600.0, "1d": None, "all": None}
"""Seconds of what fell due that are looked at; a day is what `missing` looks at by itself."""

COUNTED_S: Final = 4.0
"""Seconds for the counts of all expectations on a page together: messages are read for them."""

COUNTS_KEPT_S: Final = 10.0
"""Seconds for which counts are kept: many who look at them have the messages read once."""

_AT_ONCE: Final = 3
_STREAMS_LISTED: Final = 100

Span: TypeAlias = Annotated[
    Literal["5m", "1h", "1d", "all"], Parameter("What fell due in the last five minutes, hour or day, or ever.")
]

_TOO_LONG: Final = "Messages are read for it, some 30,000 a second. Ask for a shorter span."

_FINDINGS: Final = (ExpectationResult.MISSING, ExpectationResult.LATE, ExpectationResult.NOT_KNOWN)

_WHY: Final = {
    Reason.NOT_DUE: "not known yet: it is not due, there is time left",
    Reason.BEHIND: "not known yet: a recorder is behind with what came until it was due",
    Reason.UNPROVEN: "not known: what came in that time is lost (a hole, retention), or a leader cannot be reached",
}


@dataclass(frozen=True, slots=True)
class MissingAsked:
    span: Span = "1d"
    limit: Annotated[int, Parameter("Expectations of a page.", least=1, most=50)] = 20
    cursor: Annotated[str, Parameter("`next` of the page before.")] = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpectationRow(Expectation):
    """An expectation: each message of `of` is followed by one of `follows` with the same value of `by`, in time.

    `status` is of its span: found (something is missing or late), absent (nothing is, proven), not_recorded_yet,
    unproven; or failed, where nobody could say, and `words` says why: then counts are None. `is_early`: absent, since
    none is due yet.
    """

    status: Status | Literal["failed"]
    words: str
    is_early: bool
    checked: int | None
    missing: int | None
    late: int | None
    not_known: int | None


@dataclass(frozen=True, slots=True)
class MissingAnswer:
    """A page of expectations, by name, of `total`."""

    expectations: tuple[ExpectationRow, ...]
    total: int
    span: str
    next: str | None


@endpoint(
    "/missing",
    "The expectations, and how many messages were not followed as they say.",
    template="missing.html",
    page="missing",
)
async def missing(site: Site, asked: MissingAsked) -> MissingAnswer:
    defined = await site.relations.expectations()
    page, cursor = page_of_list(defined, asked.cursor, asked.limit)
    with within(COUNTED_S):
        rows = await gathered((partial(_counted, site, each, asked.span) for each in page), _AT_ONCE)
    return MissingAnswer(tuple(rows), len(defined), asked.span, cursor)


async def _counted(site: Site, expectation: Expectation, span: str) -> ExpectationRow:
    """An expectation with its counts; that they could not be had spoils no other's."""
    ask = partial(site.relations.missing, expectation, since=_since(expectation, span), limit=1)
    try:
        report = await site.lately(("missing", expectation, span), COUNTS_KEPT_S, ask)
    except RelatumError as error:
        is_late = isinstance(error, Transient) and not site.servers.away
        words = f"not counted in time. {_TOO_LONG}" if is_late else f"not counted: {words_of(site, error)}"
        return _row(expectation, None, words)
    return _row(expectation, report, report.words)


def _row(expectation: Expectation, report: MissingReport | None, words: str) -> ExpectationRow:
    counts: dict[str, Any] = {
        each.value: None if report is None else getattr(report, f"{each}_count") for each in _FINDINGS
    }
    return ExpectationRow(
        **asdict(expectation),
        status="failed" if report is None else report.status,
        words=words,
        is_early=report is not None and report.is_early,
        checked=getattr(report, "checked", None),
        **counts,
    )


def _since(expectation: Expectation, span: str) -> datetime | None:
    """The time of the first message that is looked at; None for what `missing` says of a day."""
    if span == "all":
        return datetime.fromtimestamp(0, UTC)
    seconds = SPANS[span]
    if seconds is None:
        return None
    return datetime.now(UTC) - timedelta(seconds=expectation.within_s + seconds)


# --- one expectation --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ExpectationAsked:
    name: Annotated[str, Parameter("The expectation's name.")]
    finding: Annotated[
        Literal["", "missing", "late", "not_known"],
        Parameter("What is listed; where left out, the first of these that there is."),
    ] = ""
    span: Span = "1d"
    since: Annotated[datetime | None, Parameter("Instead of a span: only messages of this time or later …")] = None
    until: Annotated[datetime | None, Parameter("… and only before this one.")] = None
    limit: Annotated[int, Parameter("Messages of a page.", least=1, most=1_000)] = 100
    cursor: Annotated[str, Parameter("`next` of the page before.")] = ""


@dataclass(frozen=True, slots=True)
class UnmetRow:
    """A message that, as far as is known, nothing has followed in time; `why` says why that is not known."""

    finding: ExpectationResult
    why: Reason | None
    words: str
    key: KeyValue
    stream: str
    offset: int
    time: datetime
    due: datetime
    came: MessageId | None
    came_at: datetime | None


@dataclass(frozen=True, slots=True)
class ExpectationAnswer:
    """An expectation, what is known of the messages from `since` to before `until`, and a page of one finding."""

    expectation: ExpectationRow
    since: datetime
    until: datetime
    finding: ExpectationResult
    without_value: int
    unreadable: int
    unrecorded_streams: tuple[str, ...]
    results: tuple[UnmetRow, ...]
    next: str | None


@endpoint(
    "/missing/expectation",
    "The messages that nothing has followed in time: missing, late, or not known.",
    template="expectation.html",
    page="missing",
    narrower=_TOO_LONG,
)
async def expectation(site: Site, asked: ExpectationAsked) -> ExpectationAnswer:
    if not asked.name:
        raise InvalidInput("name is missing: the name of the expectation")
    await site.keys()
    given = read_cursor(asked.cursor, str, datetime, datetime, int)
    if given is not None and (given[0] not in _FINDINGS or None in given):
        raise InvalidInput(WRONG_CURSOR)
    since = asked.since
    if since is None and asked.until is None and given is None:
        named = {each.name: each for each in await site.relations.expectations()}.get(asked.name)
        since = None if named is None else _since(named, asked.span)
    # All pages are of the same span, whatever time it is by then.
    listed, since, until, shown = given or (asked.finding, since, asked.until, 0)
    report = await site.relations.missing(asked.name, since=since, until=until, limit=shown + asked.limit + 1)
    first = next((each for each in _FINDINGS if getattr(report, each)), ExpectationResult.MISSING)
    finding = ExpectationResult(listed or first)
    rows = getattr(report, finding)[shown:]
    page = rows[: asked.limit]
    has_more = len(rows) > asked.limit
    cursor = cursor_of(finding, report.since, report.until, shown + asked.limit) if has_more else None
    definition = site.definitions[report.expectation.by]
    return ExpectationAnswer(
        expectation=_row(report.expectation, report, report.words),
        since=report.since,
        until=report.until,
        finding=finding,
        without_value=report.without_value,
        unreadable=report.unreadable,
        unrecorded_streams=report.unrecorded_streams[:_STREAMS_LISTED],
        results=tuple(
            UnmetRow(
                finding=each.finding,
                why=each.why,
                words=_unmet_words(each),
                key=key_value(site, definition, each.value),
                stream=each.id.stream,
                offset=each.id.offset,
                time=each.time,
                due=each.due,
                came=each.came,
                came_at=each.came_at,
            )
            for each in page
        ),
        next=cursor,
    )


def _unmet_words(unmet: UnmetExpectation) -> str:
    if unmet.why is not None:
        return _WHY[unmet.why]
    if unmet.came_at is None:
        return "missing: none has come"
    return f"late by {span_text((unmet.came_at - unmet.due).total_seconds())}"
