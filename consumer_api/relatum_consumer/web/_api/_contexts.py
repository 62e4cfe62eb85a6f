"""Contexts: over which partitions they are placed, the moves under way, who consumes and what is held back."""

import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from itertools import islice
from typing import Annotated, Final, Literal

from relatum.contexts import (
    Assignment,
    ContextsStatus,
    Move,
    SerializationContexts,
    SerialStatus,
    consumers,
    placed_super_streams,
)
from relatum.errors import InvalidInput, PlacementNotFound
from relatum_consumer.web._api._cursors import cursor_of, read_cursor
from relatum_consumer.web._endpoint import Endpoint, ms_since
from relatum_consumer.web._parameters import Parameter
from relatum_consumer.web._site import Site

CONTEXTS_KEPT_S: Final = 1.0
"""Seconds for which what is told of a super stream is kept."""

MOVES_LISTED: Final = 50

_STATES: Final = {
    "fencing": "its contexts stand still: the fence is on its way to the source",
    "fenced": "its contexts stand still: the marker is on its way to the target",
    "switched": "ended: they go on in the target",
    "aborted": "ended: they go on in the source",
}


@dataclass(frozen=True, slots=True)
class ContextsAsked:
    """Which super streams, page by page."""

    limit: Annotated[int, Parameter("Super streams of a page.", least=1, most=50)] = 10
    cursor: Annotated[str, Parameter("`next` of the page before.")] = ""


@dataclass(frozen=True, slots=True)
class PartitionPlaced:
    """A partition, and how many contexts live there. `href` leads to these, `stream_href` to the stream."""

    stream: str
    href: str
    stream_href: str
    contexts: int
    is_retired: bool
    weight: float


@dataclass(frozen=True, slots=True)
class MoveRow:
    """A move of contexts from one partition to another.

    `words` says what is true and whom it waits for; `holder` is who goes on with it, None for nobody now. `pause_s` is
    how long its contexts stood still, None while they do.
    """

    move_id: int
    contexts: int
    source: str
    target: str
    state: Literal["fencing", "fenced", "switched", "aborted"]
    words: str
    is_ended: bool
    holder: str | None
    started_at: datetime
    ended_at: datetime | None
    pause_s: float | None
    reason: str


@dataclass(frozen=True, slots=True)
class SuperStreamRow:
    """A super stream whose messages are placed by the names in a header, and its moves that have not ended."""

    name: str
    href: str
    header: str
    contexts: int
    partitions: tuple[PartitionPlaced, ...]
    moves: tuple[MoveRow, ...]
    moves_count: int


@dataclass(frozen=True, slots=True)
class ContextsAnswer:
    """A page of super streams, by name, of `total`."""

    super_streams: tuple[SuperStreamRow, ...]
    total: int
    next: str | None
    next_href: str | None
    took_ms: float


async def contexts(site: Site, asked: ContextsAsked) -> ContextsAnswer:
    """Answer one page."""
    began = time.perf_counter()
    after = read_cursor(asked.cursor, str)
    names = await site.in_thread(partial(placed_super_streams, site.database, vhost=site.address.vhost))
    left = [each for each in names if after is None or each > after[0]]
    page = left[: asked.limit]
    cursor = cursor_of(page[-1]) if len(left) > len(page) else None
    return ContextsAnswer(
        super_streams=tuple([_super_stream_row(site, await _status(site, name)) for name in page]),
        total=len(names),
        next=cursor,
        next_href=cursor and site.links.asked("/contexts", replace(asked, cursor=cursor)),
        took_ms=ms_since(began),
    )


async def _status(site: Site, name: str) -> ContextsStatus:
    def ask() -> ContextsStatus:
        with _opened(site, name) as opened:
            return opened.status()

    return await site.lately(("contexts", name), CONTEXTS_KEPT_S, partial(site.in_thread, ask))


def _opened(site: Site, name: str) -> SerializationContexts:
    """What is stored of a super stream; without the broker, nothing is made."""
    return SerializationContexts(name, site.database, vhost=site.address.vhost)


def _super_stream_row(site: Site, status: ContextsStatus) -> SuperStreamRow:
    return SuperStreamRow(
        name=status.super_stream,
        href=_href(site, SuperStreamAsked(status.super_stream)),
        header=status.header,
        contexts=sum(each.open_sets for each in status.partitions),
        partitions=tuple(
            PartitionPlaced(
                each.stream,
                _href(site, SuperStreamAsked(status.super_stream, each.stream)),
                site.links.stream(each.stream),
                each.open_sets,
                each.state == "retired",
                each.weight,
            )
            for each in status.partitions
        ),
        moves=_move_rows(status.moves[:MOVES_LISTED]),
        moves_count=len(status.moves),
    )


def _move_rows(moves: Iterable[Move]) -> tuple[MoveRow, ...]:
    return tuple(
        MoveRow(
            move_id=each.move_id,
            contexts=each.contexts,
            source=each.source,
            target=each.target,
            state=each.state.value,
            words=_words(each),
            is_ended=each.state.is_ended,
            holder=each.holder if each.is_attended else None,
            started_at=each.started_at,
            ended_at=each.ended_at,
            pause_s=each.pause_s,
            reason=each.reason or "",
        )
        for each in moves
    )


def _words(move: Move) -> str:
    words = _STATES[move.state.value]
    if move.aborting and not move.state.is_ended:
        words = f"taken back; {words}"
    return f"{words}; it waits for {', '.join(move.waits_for)}" if move.waits_for else words


# --- one super stream -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SuperStreamAsked:
    """Which super stream, and which of its contexts."""

    name: Annotated[str, Parameter("The super stream's name.")]
    partition: Annotated[str, Parameter("Only contexts that live in this partition.")] = ""
    context: Annotated[str, Parameter("Only this context.")] = ""
    limit: Annotated[int, Parameter("Contexts of a page.", least=1, most=1_000)] = 100
    cursor: Annotated[str, Parameter("`next` of the page before.")] = ""


@dataclass(frozen=True, slots=True)
class ContextRow:
    """Where a context lives; while it moves, the partition it leaves. Its name is a digest where a masked key is it.

    `search_href` leads to its messages, where a key comes from the header that names contexts.
    """

    context: str
    is_masked: bool
    partition: str
    partition_href: str
    epoch: int
    move_id: int | None
    search_href: str | None


@dataclass(frozen=True, slots=True)
class HeldBack:
    """What a consumer holds back: messages that a move brought wait until its source is consumed past the fence.

    `is_over`: it is; they go on as soon as a member consumes the partition.
    """

    move_id: int
    source: str
    fence_offset: int
    messages: int
    seconds: float
    is_over: bool


@dataclass(frozen=True, slots=True)
class PartitionConsumed:
    """How far a consumer is in a partition; `holder` is the member that has it, None for nobody."""

    stream: str
    is_retired: bool
    position: int | None
    lag: int
    holder: str | None
    held: tuple[HeldBack, ...]


@dataclass(frozen=True, slots=True)
class SerialConsumerRow:
    """A name that consumes the super stream in order."""

    name: str
    lag: int
    partitions: tuple[PartitionConsumed, ...]


@dataclass(frozen=True, slots=True)
class SuperStreamAnswer:
    """A super stream, a page of its contexts by name, its latest moves, and who consumes it in order.

    `consumers` is None while the broker, which has the streams' ends, does not answer.
    """

    super_stream: SuperStreamRow
    contexts: tuple[ContextRow, ...]
    latest: tuple[MoveRow, ...]
    consumers: tuple[SerialConsumerRow, ...] | None
    next: str | None
    next_href: str | None
    took_ms: float


async def super_stream(site: Site, asked: SuperStreamAsked) -> SuperStreamAnswer:
    """Answer one page."""
    began = time.perf_counter()
    if not asked.name:
        raise InvalidInput("name is missing: the super stream's name")
    after, shown = read_cursor(asked.cursor, str, int) or ("", 0)
    status = await _status(site, asked.name)
    definitions = await site.keys()
    is_masked = site.masking.is_masked_place("header", status.header)
    found, latest = await site.in_thread(partial(_contexts_of, site, asked, after, shown))
    page = found[: asked.limit]
    ask = partial(consumers, asked.name, database=site.database, broker=site.address)
    consumed = await site.with_broker(("consumers", asked.name), CONTEXTS_KEPT_S, ask, lambda: None)
    key = next((each.name for each in definitions if list(each.sources) == [f"header:{status.header}"]), None)
    cursor = None
    if len(found) > len(page):
        # A name that is masked does not stand in a link: then those that were shown are passed over.
        cursor = cursor_of("" if is_masked else page[-1].context, shown + len(page))
    return SuperStreamAnswer(
        super_stream=_super_stream_row(site, status),
        contexts=tuple(_context_row(site, each, key, is_masked=is_masked) for each in page),
        latest=_move_rows(latest),
        consumers=None if consumed is None else tuple(_consumer_row(*each) for each in sorted(consumed.items())),
        next=cursor,
        next_href=cursor and _href(site, replace(asked, cursor=cursor)),
        took_ms=ms_since(began),
    )


def _contexts_of(site: Site, asked: SuperStreamAsked, after: str, shown: int) -> tuple[list[Assignment], list[Move]]:
    """A page of contexts and one more, and the latest moves."""
    with _opened(site, asked.name) as opened:
        latest = opened.moves(latest=MOVES_LISTED)
        if asked.context:
            try:
                return [opened.assignment_of(asked.context)], latest
            except PlacementNotFound:
                return [], latest
        listed = opened.assignments(asked.partition or None, after=after or None)
        start = 0 if after else shown
        return list(islice(listed, start, start + asked.limit + 1)), latest


def _context_row(site: Site, placed: Assignment, key: str | None, *, is_masked: bool) -> ContextRow:
    return ContextRow(
        context=site.masking.digest(placed.context) if is_masked else placed.context,
        is_masked=is_masked,
        partition=placed.partition,
        partition_href=site.links.stream(placed.partition),
        epoch=placed.epoch,
        move_id=placed.move_id,
        search_href=None if key is None or is_masked else site.links.search(key=key, value=placed.context),
    )


def _consumer_row(name: str, status: SerialStatus) -> SerialConsumerRow:
    return SerialConsumerRow(
        name,
        status.lag,
        tuple(
            PartitionConsumed(
                each.stream,
                each.is_retired,
                each.position,
                each.lag,
                each.holder,
                tuple(
                    HeldBack(
                        hold.move_id, hold.source, hold.fence_offset, hold.held, round(hold.seconds, 1), hold.is_over
                    )
                    for hold in each.holds
                ),
            )
            for each in status.partitions
        ),
    )


def _href(site: Site, asked: SuperStreamAsked) -> str:
    return site.links.asked("/contexts/super-stream", asked)


CONTEXTS = Endpoint(
    "/contexts",
    "Super streams whose contexts are placed: partitions with their contexts, and moves under way.",
    ContextsAsked,
    ContextsAnswer,
    contexts,
    template="contexts.html",
    page="contexts",
)

SUPER_STREAM = Endpoint(
    "/contexts/super-stream",
    "The contexts of a super stream and where they live, its latest moves, and who consumes it in order.",
    SuperStreamAsked,
    SuperStreamAnswer,
    super_stream,
    template="super_stream.html",
    page="contexts",
)
