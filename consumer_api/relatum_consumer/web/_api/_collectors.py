"""Collectors: who collects, how far, what became of the messages, what failed and why."""

import time
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from typing import Annotated, Final, Literal

from relatum.collecting import CollectedAt, CollectorStatus, collected, collector_status
from relatum.errors import InvalidInput, NotFound
from relatum.outcomes import Outcome, Outcomes, OutcomeStatus
from relatum.reading import Message
from relatum_consumer.web._api._cursors import cursor_of, read_cursor
from relatum_consumer.web._endpoint import Endpoint, ms_since
from relatum_consumer.web._parameters import Parameter
from relatum_consumer.web._site import Site

COLLECTORS_KEPT_S: Final = 3.0
"""Seconds for which what is counted is kept."""

_STATES: Final = {
    "unsuccessful": (OutcomeStatus.FAILED, OutcomeStatus.DEAD),
    "waiting": (OutcomeStatus.COLLECTED, OutcomeStatus.FORWARDED),
    "succeeded": (OutcomeStatus.SUCCEEDED,),
}

_State = Literal["unknown", "collected", "forwarded", "succeeded", "failed", "dead"]


@dataclass(frozen=True, slots=True)
class CollectorsAsked:
    """Which collectors, page by page."""

    limit: Annotated[int, Parameter("Collectors of a page.", least=1, most=100)] = 20
    cursor: Annotated[str, Parameter("`next` of the page before.")] = ""


@dataclass(frozen=True, slots=True)
class MessagesByState:
    """How many messages are in a state, and the page that lists them."""

    state: str
    count: int
    href: str


@dataclass(frozen=True, slots=True)
class CollectorMember:
    """A member of a collector: who it is, the types it has executors of, and its lease."""

    holder: str
    types: tuple[str, ...]
    is_alive: bool
    lease_expires_at: datetime


@dataclass(frozen=True, slots=True)
class CollectorSource:
    """A stream that is collected from; `position` and `lag_offsets` are None where it is not followed."""

    stream: str
    href: str
    position: int | None
    lag_offsets: int | None
    follower: str | None
    passed_over: int


@dataclass(frozen=True, slots=True)
class MessagesByType:
    """Messages of a type that no running member has an executor of."""

    type: str
    count: int


@dataclass(frozen=True, slots=True)
class CollectorRow:
    """A collector; finished messages are counted as long as they are kept (`keep_s`), many of them by a sample."""

    name: str
    href: str
    counts: tuple[MessagesByState, ...]
    oldest_unfinished_at: datetime | None
    keep_s: int | None
    members: tuple[CollectorMember, ...]
    sources: tuple[CollectorSource, ...]
    unattended: tuple[MessagesByType, ...]


@dataclass(frozen=True, slots=True)
class CollectorsAnswer:
    """A page of collectors, by name, of `total`."""

    collectors: tuple[CollectorRow, ...]
    total: int
    next: str | None
    next_href: str | None
    took_ms: float


async def collectors(site: Site, asked: CollectorsAsked) -> CollectorsAnswer:
    """Answer one page."""
    began = time.perf_counter()
    after = read_cursor(asked.cursor, str)
    found = await _statuses(site)
    left = [each for each in found if after is None or each.collector > after[0]]
    page = left[: asked.limit]
    cursor = cursor_of(page[-1].collector) if len(left) > len(page) else None
    return CollectorsAnswer(
        collectors=tuple(_collector_row(site, each) for each in page),
        total=len(found),
        next=cursor,
        next_href=cursor and site.links.asked("/collectors", replace(asked, cursor=cursor)),
        took_ms=ms_since(began),
    )


async def _statuses(site: Site, names: tuple[str, ...] | None = None) -> list[CollectorStatus]:
    """The collectors of the virtual host, by name."""
    alone = partial(collector_status, site.database, names)
    both = partial(alone, broker=site.address)
    found = await site.with_broker(("collectors", names), COLLECTORS_KEPT_S, both, alone)
    return [each for each in found if each.vhost == site.address.vhost]


def _collector_row(site: Site, status: CollectorStatus) -> CollectorRow:
    pages = {each.value: name for name, states in _STATES.items() for each in states}
    return CollectorRow(
        name=status.collector,
        href=_href(site, CollectorAsked(status.collector)),
        counts=tuple(
            MessagesByState(state, count, _href(site, CollectorAsked(status.collector, pages[state])))
            for state, count in status.counts.items()
        ),
        oldest_unfinished_at=status.oldest_unfinished_at,
        keep_s=status.keep_s,
        members=tuple(
            CollectorMember(each.holder, tuple(each.types), each.is_alive, each.lease_expires_at)
            for each in status.members
        ),
        sources=tuple(
            CollectorSource(
                each.stream,
                site.links.stream(each.stream),
                each.position,
                each.lag_offsets,
                each.follower,
                each.passed_over,
            )
            for each in status.sources
        ),
        unattended=tuple(MessagesByType(*each) for each in sorted(status.unattended.items())),
    )


# --- one collector ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CollectorAsked:
    """Which collector, and its messages of which states."""

    name: Annotated[str, Parameter("The collector's name.")]
    state: Annotated[
        str, Parameter("Failed and dead ones, those that wait, or those that succeeded.", choices=tuple(_STATES))
    ] = "unsuccessful"
    limit: Annotated[int, Parameter("Messages of a page.", least=1, most=1_000)] = 100
    cursor: Annotated[str, Parameter("`next` of the page before.")] = ""


@dataclass(frozen=True, slots=True)
class OutcomeRow:
    """What became of a message, and why the last attempt failed. `href` leads to the message, `outcome_href` to this.

    `message_id` is a digest where a masked key comes from it, and `outcome_href` is None where nothing but the id could
    lead there; `reason` is empty where bodies, or any key, are masked: executors say there what they like.
    """

    message_id: str
    outcome_href: str | None
    state: _State
    collector: str | None
    type: str | None
    stream: str | None
    offset: int | None
    href: str | None
    attempts: int
    reason: str
    collected_at: datetime | None
    forwarded_at: datetime | None
    finished_at: datetime | None


@dataclass(frozen=True, slots=True)
class CollectorAnswer:
    """A collector, and a page of its messages: finished ones the latest first, others by stream and offset.

    `looked_to`: up to when, going back, finished ones were looked through; there may be more in the next page.
    """

    collector: CollectorRow
    state: str
    results: tuple[OutcomeRow, ...]
    looked_to: datetime | None
    next: str | None
    next_href: str | None
    took_ms: float


async def collector(site: Site, asked: CollectorAsked) -> CollectorAnswer:
    """Answer one page."""
    began = time.perf_counter()
    await site.keys()  # which say what is masked
    if not asked.name:
        raise InvalidInput("name is missing: the collector's name")
    ask = partial(
        collected,
        site.database,
        asked.name,
        _STATES[asked.state],
        vhost=site.address.vhost,
        after=_place(asked.cursor),
        limit=asked.limit,
    )
    page = await site.in_thread(ask)
    status = next(iter(await _statuses(site, (asked.name,))), None)
    if status is None:
        raise NotFound(f"there is no collector {asked.name!r} any more")
    cursor = None
    if page.next is not None:
        moment = page.next.finished_at
        cursor = cursor_of("" if moment is None else moment.isoformat(), page.next.source, page.next.offset)
    return CollectorAnswer(
        collector=_collector_row(site, status),
        state=asked.state,
        results=tuple(_outcome_row(site, each) for each in page.outcomes),
        looked_to=page.looked_to,
        next=cursor,
        next_href=cursor and _href(site, replace(asked, cursor=cursor)),
        took_ms=ms_since(began),
    )


def _place(cursor: str) -> CollectedAt | None:
    given = read_cursor(cursor, str, int, int)
    if given is None:
        return None
    moment, source, offset = given
    try:
        return CollectedAt(datetime.fromisoformat(moment).astimezone(UTC) if moment else None, source, offset)
    except (ValueError, OverflowError):
        raise InvalidInput("this cursor is none that a page before gave") from None


def _outcome_row(site: Site, outcome: Outcome) -> OutcomeRow:
    is_masked = site.masking.is_masked_place("property", "message_id")
    is_placed = outcome.stream is not None and outcome.offset is not None
    outcome_href = None if is_masked else site.links.to("/collectors/outcome", id=outcome.message_id)
    if is_masked and is_placed:
        outcome_href = site.links.to("/collectors/outcome", of_stream=outcome.stream, of_offset=str(outcome.offset))
    return OutcomeRow(
        message_id=site.masking.digest(outcome.message_id) if is_masked else outcome.message_id,
        outcome_href=outcome_href,
        state=outcome.status.value,
        collector=outcome.collector,
        type=outcome.type,
        stream=outcome.stream,
        offset=outcome.offset,
        href=site.links.message(outcome.stream or "", outcome.offset or 0) if is_placed else None,
        attempts=outcome.attempts,
        reason="" if site.masking.hides_reasons else outcome.reason or "",
        collected_at=outcome.collected_at,
        forwarded_at=outcome.forwarded_at,
        finished_at=outcome.finished_at,
    )


# --- the outcome of a message -----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OutcomeAsked:
    """Which message."""

    id: Annotated[str, Parameter("The property `message_id`; stream:offset of a message that has none.")] = ""
    of_stream: Annotated[str, Parameter("Instead of an id: the message's stream …")] = ""
    of_offset: Annotated[int | None, Parameter("… and its offset.")] = None


@dataclass(frozen=True, slots=True)
class OutcomeAnswer:
    """What became of the message in each collector: the least advanced first; unknown where none has taken it."""

    message_id: str
    outcomes: tuple[OutcomeRow, ...]
    took_ms: float


async def outcome(site: Site, asked: OutcomeAsked) -> OutcomeAnswer:
    """Answer for one message id."""
    began = time.perf_counter()
    await site.keys()  # which say what is masked
    message_id = asked.id
    if asked.of_offset is not None:
        message_id = message_id_of(await site.relations.read(asked.of_stream, asked.of_offset))
    if not message_id:
        raise InvalidInput("id is missing: the message's property message_id")
    found = await site.in_thread(partial(outcome_of, site, message_id))
    rows = tuple(_outcome_row(site, each) for each in (found, *found.others))
    return OutcomeAnswer(rows[0].message_id, rows, ms_since(began))


def message_id_of(message: Message) -> str:
    """The id by which collectors know a message: where it lies, if it has none."""
    given = message.properties.message_id
    return f"{message.stream}:{message.offset}" if given is None else str(given)


def outcome_of(site: Site, message_id: str) -> Outcome:
    """What became of a message, by its id."""
    with Outcomes(site.database) as outcomes:
        return outcomes.of(message_id)


def _href(site: Site, asked: CollectorAsked) -> str:
    return site.links.asked("/collectors/collector", asked)


COLLECTORS = Endpoint(
    "/collectors",
    "Collectors: messages by state, members, streams.",
    CollectorsAsked,
    CollectorsAnswer,
    collectors,
    template="collectors.html",
    page="collectors",
)

COLLECTOR = Endpoint(
    "/collectors/collector",
    "A collector's messages by state: what failed and why, what waits.",
    CollectorAsked,
    CollectorAnswer,
    collector,
    template="collector.html",
    page="collectors",
)

OUTCOME = Endpoint(
    "/collectors/outcome",
    "What became of a message that collectors took.",
    OutcomeAsked,
    OutcomeAnswer,
    outcome,
    template="outcome.html",
    page="collectors",
)
