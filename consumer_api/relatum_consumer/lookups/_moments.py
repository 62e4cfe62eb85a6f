"""Look-ups by time, as steps: the blocks that can hold the message, read one by one until no other can be nearer."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from relatum.errors import StreamReplaced, StreamUnavailable, TimeNotRecorded
from relatum.ids import MessageId
from relatum.limits import INTEGER_MAX
from relatum.reading import Message, StreamBounds
from relatum.store import TIME
from relatum_consumer.lookups import _blocks as blocks
from relatum_consumer.lookups import _lookup_statements as statements
from relatum_consumer.lookups._answer import Answer, Hit
from relatum_consumer.lookups._blocks import FIRST_OF_ITS_TIME, Block, Place
from relatum_consumer.lookups._catalog import Catalog, PresentStream, Wanted, in_partition_order
from relatum_consumer.lookups._gathered import Gathered
from relatum_consumer.lookups._limits import ANSWER_MESSAGES_MAX, SCAN_BLOCKS_MAX
from relatum_consumer.lookups._lookup_statements import WIDTH_CLASSES, WIDTHS_US, Direction
from relatum_consumer.lookups._proof import Evidence, evidence, replaced
from relatum_consumer.lookups._related import check, concluded, first_retained, is_sure, recorded_answer
from relatum_consumer.lookups._requests import Bounds, Read, Select, Sift, Steps

_READ_AT_ONCE: Final = 1_000
"""Messages of a window that are asked for at once: what there are too many of, or too large, is noticed between."""

Rank = tuple[int, tuple[int, str], int]
"""Where a message stands in time: its time, then its partition, then its offset."""


class Side(NamedTuple):
    """One direction to look in, and whether an equal time in another stream counts as beyond the moment."""

    direction: Direction
    inclusive: bool = False


@dataclass(frozen=True, slots=True)
class Moment:
    """The moment looked from: microseconds since 1970, and the id of the message whose moment it is, if any."""

    time_us: int
    id: MessageId | None = None

    def edge(self, stream: str, among: Collection[str], side: Side) -> Place:
        """The place in a stream beyond which messages are sought.

        Equal times in the message's own stream are ordered by offset; where that is one of several partitions, by
        partition and offset; elsewhere they are beyond if the side includes them.
        """
        if self.id is not None and stream == self.id.stream:
            return self.time_us, self.id.offset
        if self.id is not None and self.id.stream in among:
            comes_later = in_partition_order(stream) > in_partition_order(self.id.stream)
            return self.time_us, FIRST_OF_ITS_TIME if comes_later else INTEGER_MAX
        begins_at_it = side.inclusive == (side.direction == "after")
        return self.time_us, FIRST_OF_ITS_TIME if begins_at_it else INTEGER_MAX


@dataclass(slots=True)
class Lost:
    """What a look-up learns of retention on its way.

    Attributes:
        floors: The first offset retained, by stream, where it mattered.
        ids: Where messages lay that were sought.
        unread: Where messages lie that were sought, that could not be read, and that are not surely gone.
        is_sure: Whether a message that was sought has expired, its id known or not.
    """

    floors: dict[str, int] = field(default_factory=dict)
    ids: dict[MessageId, None] = field(default_factory=dict)
    unread: dict[MessageId, None] = field(default_factory=dict)
    is_sure: bool = False

    def take(self, where: MessageId, first: int, *, is_sure: bool) -> None:
        """Take in that retention took a message, up to the first offset retained; surely, or as this node knows it."""
        self.floors[where.stream] = first
        if is_sure:
            self.ids[where] = None
            self.is_sure = True
        else:
            self.unread[where] = None


@dataclass(frozen=True, slots=True)
class Search:
    """Where to look: a stream or a super stream, and the value of a key that messages must carry, if any."""

    catalog: Catalog
    name: str
    by: Wanted | None = None

    def targets(self) -> Steps[list[PresentStream]]:
        """The recorded streams meant."""
        streams = yield from self.catalog.streams([self.name])
        for stream in streams:
            if not stream.record_time:
                raise TimeNotRecorded(f"times are not recorded for the stream {stream.name!r}", stream=stream.name)
        return streams

    def evidence(self) -> Steps[Evidence]:
        """What is known of the streams, for the times and the key this look-up needs."""
        key_ids = [TIME] if self.by is None else [TIME, self.by.key_id]
        return evidence(self.catalog, [self.name], key_ids)

    def shares_key(self, message: Message) -> bool:
        """Whether a message carries the key's value, where one is asked by."""
        return self.by is None or self.by.is_of(message)

    def recorded_answer(self, messages: Iterable[Message], lost: Lost) -> Steps[Answer]:
        """The answer that messages make which the table knows."""
        return recorded_answer(self.catalog, [self.name], self._hits(messages), tuple(lost.ids), tuple(lost.unread))

    def concluded(self, known: Evidence, messages: Iterable[Message], lost: Lost, *, was_read: bool) -> Steps[Answer]:
        """The answer that evidence and those messages make."""
        expired, unread = tuple(lost.ids), tuple(lost.unread)
        hits = self._hits(messages)
        return concluded(self.catalog, known, hits, expired, unread, was_read=was_read, has_expired=lost.is_sure)

    def _hits(self, messages: Iterable[Message]) -> tuple[Hit, ...]:
        keys = () if self.by is None else (self.by.definition.name,)
        return tuple(Hit(message, keys) for message in messages)


def rank(message: Message) -> Rank:
    """Where a message that has a time stands."""
    return time_of(message), in_partition_order(message.stream), message.offset


def time_of(message: Message) -> int:
    """The time of a message that has one."""
    assert message.time_us is not None, "messages without a time were left out"
    return message.time_us


# --- beside a moment --------------------------------------------------------------------------------------


def beside(search: Search, moment: Moment, sides: Sequence[Side], *, complete: bool) -> Steps[Answer]:
    """The next message on a side of the moment; of two sides the nearer one, and the earlier if equally near.

    It is looked up once more where the recorder replaced the stream under our hands.
    """
    yield from search.catalog.check_names([search.name])
    try:
        return (yield from _beside(search, moment, sides, complete=complete))
    except StreamReplaced:
        return (yield from _beside(search, moment, sides, complete=complete))


def _beside(search: Search, moment: Moment, sides: Sequence[Side], *, complete: bool) -> Steps[Answer]:
    if not complete:
        lost = Lost()
        nearest = yield from _nearest(search, moment, sides, None, lost)
        if nearest is not None:
            return (yield from search.recorded_answer([nearest], lost))
    known = yield from search.evidence()
    lost = Lost()
    nearest = yield from _nearest(search, moment, sides, known if complete else None, lost)
    return (yield from search.concluded(known, [] if nearest is None else [nearest], lost, was_read=complete))


def _nearest(
    search: Search, moment: Moment, sides: Sequence[Side], known: Evidence | None, lost: Lost
) -> Steps[Message | None]:
    """The nearest message: of those recorded and, where evidence is given, of those that are not."""
    targets = yield from search.targets()
    among = {stream.name for stream in targets}.union({each.stream for each in known.uncovered} if known else ())
    found: list[Message] = []
    for side in sides:
        candidates: list[Message] = []
        for stream in targets:
            edge = moment.edge(stream.name, among, side)
            look = _by_blocks if search.by is None else _by_key
            message = yield from look(search, stream, edge, side.direction, lost)
            candidates += [] if message is None else [message]
        if known:
            candidates += yield from _unrecorded_beside(search, moment, side, known, among)
        if candidates:
            found.append(min(candidates, key=rank) if side.direction == "after" else max(candidates, key=rank))
    return min(found, key=lambda message: (abs(time_of(message) - moment.time_us), rank(message)), default=None)


def _unrecorded_beside(
    search: Search, moment: Moment, side: Side, known: Evidence, among: Collection[str]
) -> Steps[list[Message]]:
    """The nearest message of each stream, of what is not recorded of it."""
    streams = {each.stream for each in known.uncovered}
    nearest = {stream: Nearest(search, moment.edge(stream, among, side), side.direction) for stream in streams}
    yield from known.scan(lambda message: nearest[message.stream].consider(message))
    return [each.message for each in nearest.values() if each.message is not None]


@dataclass(slots=True)
class Nearest:
    """Keeps the nearest of the messages it is shown."""

    search: Search
    edge: Place
    direction: Direction
    message: Message | None = None

    @property
    def place(self) -> Place | None:
        """Where the nearest stands in time."""
        return None if self.message is None else (time_of(self.message), self.message.offset)

    def consider(self, message: Message) -> None:
        """Look at one message."""
        time_us = message.time_us
        if time_us is not None and self.search.shares_key(message):
            place, best = (time_us, message.offset), self.place
            if self.direction == "after":
                is_nearer = place > self.edge and (best is None or place < best)
            else:
                is_nearer = place < self.edge and (best is None or place > best)
            if is_nearer:
                self.message = message


def _by_key(
    search: Search, stream: PresentStream, edge: Place, direction: Direction, lost: Lost
) -> Steps[Message | None]:
    """The next message of one key value: one row of the index names it."""
    assert search.by is not None, "only look-ups by key come here"
    while True:
        floor = lost.floors.get(stream.name, 0)
        parameters = _value_in(search.by, stream) | {"t": edge[0], "o": edge[1], "floor": floor, "limit": 1}
        rows = yield from Select(statements.keyed_beside(direction), parameters)
        if not rows:
            return None
        (message,) = yield from _checked(search.by, stream, rows, lost)
        if message is not None:
            return message


def _value_in(by: Wanted, stream: PresentStream) -> dict[str, Any]:
    return {"key_id": by.key_id, "value": by.value, "stream_id": stream.stream_id}


def _checked(
    by: Wanted, stream: PresentStream, rows: Iterable[tuple[int, int]], lost: Lost
) -> Steps[list[Message | None]]:
    """The rows' messages, each checked; None for those that have expired."""
    places = {MessageId(stream.name, offset): time_us for offset, time_us in rows}
    messages: list[Message | None] = []
    for (where, time_us), message in zip(places.items(), (yield from Read(list(places))), strict=True):
        if isinstance(message, Message):
            messages.append(check((by,), where, time_us, (by.key_id,), message).message)
        else:
            lost.take(where, first_retained(where, message, is_named=True), is_sure=is_sure(message))
            messages.append(None)
    return messages


def _by_blocks(
    search: Search, stream: PresentStream, edge: Place, direction: Direction, lost: Lost
) -> Steps[Message | None]:
    """The next message in time: the blocks that can hold it are read, the most promising first.

    Below, all blocks and places are in the direction's coordinates: see `relatum_consumer.lookups._blocks`.
    """
    nearest = Nearest(search, edge, direction)
    is_after = direction == "after"
    start = edge if is_after else blocks.mirrored(edge)
    page_from: Place = (start[0], INTEGER_MAX)
    sql = statements.blocks_beside(direction)
    while True:
        u, o = page_from if is_after else blocks.mirrored(page_from)
        floor = lost.floors.get(stream.name, 0)
        rows = yield from Select(sql, _blocks_of(stream, floor) | {"t": edge[0], "u": u, "o": o})
        page = [Block(*row) if is_after else Block(*row).mirrored() for row in rows]
        for promise, block in blocks.in_order(page, start):
            best = nearest.place
            if best is not None and promise > (best if is_after else blocks.mirrored(best)):
                return nearest.message
            original = block if is_after else block.mirrored()
            had = nearest.message
            yield from _read([original], stream, lost, nearest.consider)
            if nearest.message is had and blocks.surely_holds(block, start) and _begins_in(original, stream, lost):
                lost.is_sure = True
        following = [(block.min_us, block.first_offset) for block in page if block.min_us > start[0]]
        if not following:
            return nearest.message
        page_from, sql = max(following), statements.blocks_beyond(direction)
        best = nearest.place
        if best is not None and (best if is_after else blocks.mirrored(best)) <= page_from:
            return nearest.message


def _blocks_of(stream: PresentStream, floor: int) -> dict[str, Any]:
    return {"stream_id": stream.stream_id, "floor": floor, "classes": list(WIDTH_CLASSES), "widths": list(WIDTHS_US)}


def _begins_in(block: Block, stream: PresentStream, lost: Lost) -> bool:
    """Whether retention has surely taken a part of the block."""
    doubted = any(where.stream == stream.name for where in lost.unread)
    return block.first_offset < lost.floors.get(stream.name, 0) and not doubted


def _read(
    run: Sequence[Block], stream: PresentStream, lost: Lost, consider: Callable[[Message], object]
) -> Steps[None]:
    """Read the messages between the offsets of blocks, and see that they agree with each; the rest of what expired."""
    start, stop = min(block.first_offset for block in run), max(block.last_offset for block in run) + 1
    floor = lost.floors.get(stream.name, 0)
    if stop <= floor:
        return
    offsets: list[int] = []
    times: list[int | None] = []

    def look(message: Message) -> None:
        offsets.append(message.offset)
        times.append(message.time_us)
        consider(message)

    yield from Sift(stream.name, max(start, floor), stop, look)
    for block in run:
        inside = slice(bisect_left(offsets, block.first_offset), bisect_right(offsets, block.last_offset))
        if block.first_offset >= lost.floors.get(stream.name, 0):
            yield from _check_block(block, offsets[inside], times[inside], stream, lost)


def _check_block(
    block: Block, inside: Sequence[int], times: Sequence[int | None], stream: PresentStream, lost: Lost
) -> Steps[None]:
    """See that what was read between a block's ends, the offsets and the times of messages, is what the block says."""
    if blocks.agree(block, times):
        return
    bounds: StreamBounds = yield from Bounds(stream.name)
    if bounds.first is not None and bounds.first > block.first_offset:
        lost.floors[stream.name] = bounds.first
        if not bounds.is_proven:
            lost.unread[MessageId(stream.name, block.first_offset)] = None
        return
    if None in times:
        message = (
            f"the times of {stream.name!r} are its chunks', which AMQP 0.9.1 does not show: use the stream protocol"
        )
        raise TimeNotRecorded(message, stream=stream.name)
    is_whole = bool(inside) and (inside[0], inside[-1]) == (block.first_offset, block.last_offset)
    if not is_whole and not (bounds.is_proven and (bounds.last is None or bounds.last < block.last_offset)):
        message = (
            f"only a part of {stream.name!r} from {block.first_offset} to {block.last_offset} came: repeat it later"
        )
        raise StreamUnavailable(message, stream=stream.name)
    raise replaced(stream.name, block.first_offset)


# --- around a moment --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Window:
    """A span of time, both ends included, and the message in it that is not meant."""

    low: int
    high: int
    beside: MessageId | None

    def holds(self, search: Search, message: Message) -> bool:
        """Whether a message is meant."""
        time_us = message.time_us
        if time_us is None or not self.low <= time_us <= self.high:
            return False
        return message.id != self.beside and search.shares_key(message)


def window(search: Search, span: Window, *, complete: bool) -> Steps[Answer]:
    """All messages in a span of time, by time, partition and offset."""
    yield from search.catalog.check_names([search.name])
    try:
        return (yield from _window(search, span, complete=complete))
    except StreamReplaced:
        return (yield from _window(search, span, complete=complete))


def _window(search: Search, span: Window, *, complete: bool) -> Steps[Answer]:
    if not complete:
        lost = Lost()
        found = yield from _recorded_within(search, span, lost)
        if found.messages:
            return (yield from search.recorded_answer(_ordered(found), lost))
    known = yield from search.evidence()
    lost = Lost()
    found = yield from _recorded_within(search, span, lost)
    if complete:
        yield from known.scan(found.consider)
    return (yield from search.concluded(known, _ordered(found), lost, was_read=complete))


def _ordered(found: Gathered) -> list[Message]:
    return sorted(found.messages, key=rank)


def _recorded_within(search: Search, span: Window, lost: Lost) -> Steps[Gathered]:
    found = Gathered(lambda message: span.holds(search, message), "ask for a shorter span of time")
    for stream in (yield from search.targets()):
        look = _blocks_within if search.by is None else _keyed_within
        yield from look(search, stream, span, lost, found)
    return found


def _keyed_within(search: Search, stream: PresentStream, span: Window, lost: Lost, found: Gathered) -> Steps[None]:
    assert search.by is not None, "only look-ups by key come here"
    parameters = _value_in(search.by, stream)
    parameters |= {"low": span.low, "high": span.high, "limit": ANSWER_MESSAGES_MAX + 2}
    rows = yield from Select(statements.keyed_between(), parameters)
    others = [row for row in rows if MessageId(stream.name, row[0]) != span.beside]
    # Expired ones count too: behind them there may be more than the limit let through.
    found.check(len(others))
    for start in range(0, len(others), _READ_AT_ONCE):
        for message in (yield from _checked(search.by, stream, others[start : start + _READ_AT_ONCE], lost)):
            if message is not None:
                found.take(message)


def _blocks_within(search: Search, stream: PresentStream, span: Window, lost: Lost, found: Gathered) -> Steps[None]:
    rows = yield from Select(statements.blocks_between(), _blocks_of(stream, 0) | {"low": span.low, "high": span.high})
    for _, _, run in blocks.joined(map(Block._make, rows), SCAN_BLOCKS_MAX):
        yield from _read(run, stream, lost, found.consider)
        for block in run:
            is_certain = span.low <= block.min_us <= span.high or span.low <= block.max_us <= span.high
            if is_certain and block.last_offset < lost.floors.get(stream.name, 0):
                lost.is_sure = True
