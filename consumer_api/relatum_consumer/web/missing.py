"""What is missing: expectations with their counts, and of one the messages that nothing has followed in time."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Annotated, Final, Literal, NamedTuple

import anyio

from relatum.errors import InvalidInput, RelatumError, Transient
from relatum.ids import MessageId
from relatum.keys import KeyDefinition
from relatum.waiting import within
from relatum_consumer.expectations import Expectation, Finding, MissingReport, Unmet, Why
from relatum_consumer.web.cursors import WRONG_CURSOR, cursor_of, read_cursor
from relatum_consumer.web.documents import copied
from relatum_consumer.web.endpoint import endpoint, words_of
from relatum_consumer.web.messages import KeyValue, key_value
from relatum_consumer.web.parameters import Parameter
from relatum_consumer.web.site import Site
from relatum_consumer.web.timeline import span_text

SPANS: Final = {"5m": 300.0, "1h": 3_600.0, "1d": None, "all": None}
"""Seconds of what fell due that are looked at; a day is what `missing` looks at by itself."""

COUNTED_S: Final = 4.0
"""Seconds for the counts of all expectations on a page together: messages are read for them."""

COUNTS_KEPT_S: Final = 10.0
"""Seconds for which counts are kept: many who look at them have the messages read once."""

_AT_ONCE: Final = 3
_STREAMS_LISTED: Final = 100

_SPAN: Final = Parameter("What fell due in the last five minutes, hour or day, or ever.", choices=tuple(SPANS))

_TOO_LONG: Final = "Messages are read for it, some 30,000 a second. Ask for a shorter span."

_FINDINGS: Final = (Finding.MISSING, Finding.LATE, Finding.NOT_KNOWN)

_WHY: Final = {
    Why.NOT_DUE: "not known yet: it is not due, there is time left",
    Why.BEHIND: "not known yet: a recorder is behind with what came until it was due",
    Why.UNPROVEN: "not known: what came in that time is lost (a hole, retention), or a leader cannot be reached",
}


@dataclass(frozen=True, slots=True)
class MissingAsked:
    """Which expectations, page by page, and of which time."""

    span: Annotated[str, _SPAN] = "1d"
    limit: Annotated[int, Parameter("Expectations of a page.", least=1, most=50)] = 20
    cursor: Annotated[str, Parameter("`next` of the page before.")] = ""


@dataclass(frozen=True, slots=True)
class ExpectationRow:
    """An expectation: each message of `of` is followed by one of `follows` with the same value of `by`, in time.

    `status` is of its span: found (something is missing or late), absent (nothing is, proven), not_recorded_yet,
    unproven; or failed, where nobody could say, and `words` says why: then counts are None. `is_early`: absent, since
    none is due yet.
    """

    name: str
    of: str
    by: str
    follows: str
    within_s: float
    grace_s: float
    status: Literal["found", "absent", "not_recorded_yet", "unproven", "failed"]
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
    """Answer one page, with counts as far as they are had in time."""
    after = read_cursor(asked.cursor, str)
    defined = await site.relations.expectations()
    following = [each for each in defined if after is None or each.name > after[0]]
    page = following[: asked.limit]
    rows: list[ExpectationRow | None] = [None] * len(page)
    limiter = anyio.CapacityLimiter(_AT_ONCE)

    async def count(place: int) -> None:
        async with limiter:
            rows[place] = await _counted(site, page[place], asked.span)

    with within(COUNTED_S):
        async with anyio.create_task_group() as group:
            for place in range(len(page)):
                group.start_soon(count, place)
    return MissingAnswer(
        expectations=tuple(row for row in rows if row is not None),
        total=len(defined),
        span=asked.span,
        next=cursor_of(page[-1].name) if len(following) > len(page) else None,
    )


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
    counts = {each: None if report is None else getattr(report, f"{each}_count") for each in _FINDINGS}
    return copied(
        ExpectationRow,
        expectation,
        status="failed" if report is None else report.status.value,
        words=words,
        is_early=report is not None and report.is_early,
        checked=None if report is None else report.checked,
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
    """Which expectation, of which time, and which of three findings."""

    name: Annotated[str, Parameter("The expectation's name.")]
    finding: Annotated[
        str,
        Parameter("What is listed; where left out, the first of these that there is.", choices=tuple(_FINDINGS)),
    ] = ""
    span: Annotated[str, _SPAN] = "1d"
    since: Annotated[datetime | None, Parameter("Instead of a span: only messages of this time or later …")] = None
    until: Annotated[datetime | None, Parameter("… and only before this one.")] = None
    limit: Annotated[int, Parameter("Messages of a page.", least=1, most=1_000)] = 100
    cursor: Annotated[str, Parameter("`next` of the page before.")] = ""


@dataclass(frozen=True, slots=True)
class UnmetRow:
    """A message that, as far as is known, nothing has followed in time; `why` says why that is not known."""

    finding: Finding
    why: Why | None
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
    """An expectation, what is known of the messages from `since` to before `until`, and those of one finding by time.

    A later page is of the time from its first message on, and so are its counts.
    """

    expectation: ExpectationRow
    since: datetime
    until: datetime
    finding: Finding
    without_value: int
    unreadable: int
    unattended: tuple[str, ...]
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
    """Answer one page."""
    if not asked.name:
        raise InvalidInput("name is missing: the name of the expectation")
    after = _cursor(asked.cursor)
    definitions = await site.keys()
    report = await _report(site, asked, after)
    finding = Finding(after.finding if after else asked.finding or _first(report))
    shown = [each for each in getattr(report, finding) if after is None or (each.time, *each.id) > after[2:5]]
    page = shown[: asked.limit]
    cursor = None
    if len(shown) > asked.limit:
        same = sum(each.time == page[-1].time for each in page)
        same += after.same if after is not None and after.time == page[-1].time else 0
        cursor = cursor_of(finding, report.until, page[-1].time, *page[-1].id, same)
    return ExpectationAnswer(
        expectation=_row(report.expectation, report, report.words),
        since=report.since,
        until=report.until,
        finding=finding,
        without_value=report.without_value,
        unreadable=report.unreadable,
        unattended=report.unattended[:_STREAMS_LISTED],
        results=tuple(_unmet_row(site, definitions, report.expectation, each) for each in page),
        next=cursor,
    )


class _Cursor(NamedTuple):
    """Where a page ended: of what, in which span, behind which message, and how many shown ones have its time."""

    finding: str
    until: datetime
    time: datetime
    stream: str
    offset: int
    same: int


def _cursor(text: str) -> _Cursor | None:
    given = read_cursor(text, str, datetime, datetime, str, int, int)
    if given is None:
        return None
    if given[0] not in _FINDINGS or None in given:
        raise InvalidInput(WRONG_CURSOR)
    return _Cursor(*given)


async def _report(site: Site, asked: ExpectationAsked, after: _Cursor | None) -> MissingReport:
    """What there is from the page's beginning on: what was shown of its first moment, the page, and one more."""
    if after is not None:
        most = after.same + asked.limit + 1
        return await site.relations.missing(asked.name, since=after.time, until=after.until, limit=most)
    since = asked.since
    if since is None and asked.until is None:
        named = {each.name: each for each in await site.relations.expectations()}.get(asked.name)
        since = None if named is None else _since(named, asked.span)
    return await site.relations.missing(asked.name, since=since, until=asked.until, limit=asked.limit + 1)


def _first(report: MissingReport) -> Finding:
    return next((each for each in _FINDINGS if getattr(report, each)), Finding.MISSING)


def _unmet_row(site: Site, definitions: Sequence[KeyDefinition], expected: Expectation, unmet: Unmet) -> UnmetRow:
    definition = next(each for each in definitions if each.name == expected.by)
    if unmet.why is not None:
        words = _WHY[unmet.why]
    elif unmet.came_at is None:
        words = "missing: none has come"
    else:
        words = f"late by {span_text((unmet.came_at - unmet.due).total_seconds())}"
    stream, offset = unmet.id
    key = key_value(site, definitions, definition, unmet.value, unmet.id)
    return copied(UnmetRow, unmet, words=words, key=key, stream=stream, offset=offset)
