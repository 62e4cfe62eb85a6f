"""The sparse time index: blocks of messages in the database, searched by the times that they span.

A block spans the time from its earliest to its latest message. A block of class c spans at most 4**c microseconds, so
a block that contains the moment t begins after t - 4**c: one short range of the index `time_blocks_lookup` per class.

A place is a pair (time in microseconds, offset), and messages are ordered by place. A backward search is a forward
search in mirrored coordinates: with the signs of times and offsets changed, the last place before a place becomes the
first place after it. So the search is written once, for `after`.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from typing import Any, Final, Literal, NamedTuple, TypeAlias

import sqlalchemy as sa

from relatum.common.ids import MessageId
from relatum.errors import StreamUnavailable
from relatum.reading import Message, StreamBounds
from relatum.store.coverage import Range
from relatum.store.database import sql
from relatum_consumer.lookups.answer import Status
from relatum_consumer.lookups.answering import LostMessages
from relatum_consumer.lookups.catalog import PresentStream, replaced
from relatum_consumer.lookups.servers import Servers

Place: TypeAlias = tuple[int, int]
Direction: TypeAlias = Literal["after", "before"]

WIDTH_CLASSES: Final = tuple(range(31))
"""All width classes of time blocks: 4**30 microseconds span more than the years 1 to 9999."""

WIDTHS_US: Final = tuple(4**width_class for width_class in WIDTH_CLASSES)
"""The widest block of each class, in microseconds."""

SCAN_BLOCKS_MAX: Final = 16
"""Maximum number of blocks in one read, each with up to 128 messages; this bounds the memory of a read."""

_GAP_OFFSETS: Final = 512
"""A gap between two blocks up to this many offsets is read, not skipped: that takes half as long as a second attach."""


class Block(NamedTuple):
    """A row of the index: messages between two offsets, both included, with their earliest and their latest time."""

    min_us: int
    max_us: int
    first_offset: int
    last_offset: int

    def mirrored(self) -> "Block":
        """Return the block with the signs of times and offsets changed."""
        return Block(-self.max_us, -self.min_us, -self.last_offset, -self.first_offset)


def mirrored(place: Place) -> Place:
    """Return the place with the signs of time and offset changed."""
    return -place[0], -place[1]


def earliest(block: Block, beyond: Place) -> Place | None:
    """Return the earliest place after `beyond` that a message of the block can have; None if there is none."""
    time_us, offset = beyond
    if block.min_us > time_us:
        return block.min_us, block.first_offset
    if block.max_us >= time_us and block.last_offset > offset:
        return time_us, max(block.first_offset, offset + 1)
    if block.max_us > time_us:
        return time_us + 1, block.first_offset
    return None


def runs_of(blocks: Iterable[Block]) -> list[list[Block]]:
    """Group blocks, ordered by offset, into runs, each of which is read as a whole: overlapping and close blocks."""
    runs: list[list[Block]] = []
    end = 0
    for block in blocks:
        gap = block.first_offset - end
        if runs and (gap < 0 or (gap <= _GAP_OFFSETS and len(runs[-1]) < SCAN_BLOCKS_MAX)):
            runs[-1].append(block)
        else:
            runs.append([block])
        end = max(end, block.last_offset + 1)
    return runs


_CLASSES: Final = "unnest(:classes::smallint[], :widths::bigint[]) AS classes (width_class, width)"


def _in_class(stream_id: str = ":stream_id::int") -> str:
    return f"b.stream_id = {stream_id} AND b.width_class = classes.width_class AND b.last_offset >= :floor::bigint"


def _reaching(low: str, high: str, stream_id: str = ":stream_id::int") -> str:
    # OFFSET 0 makes PostgreSQL join class by class, with the index.
    return f"""
        {_CLASSES}
        CROSS JOIN LATERAL (
          SELECT b.min_us, b.max_us, b.first_offset, b.last_offset
          FROM relatum.time_blocks b
          WHERE {_in_class(stream_id)}
            AND b.min_us >= {low} - classes.width AND b.min_us <= {high} AND b.max_us >= {low}
          OFFSET 0
        ) AS reaching
    """


BLOCKS_BETWEEN: Final = sql(f"""
    SELECT given.stream_id, reaching.*
    FROM unnest(:stream_ids::int[]) AS given (stream_id)
    CROSS JOIN {_reaching(":low::bigint", ":high::bigint", "given.stream_id")}
    ORDER BY stream_id, first_offset, last_offset""")

# Each range is longer by the gap while ranges are merged.
OFFSETS_BETWEEN: Final = sql(f"""
    SELECT lower(span), upper(span) - {_GAP_OFFSETS}
    FROM unnest((
      SELECT range_agg(int8range(greatest(first_offset, :floor::bigint), last_offset + 1 + {_GAP_OFFSETS}))
      FROM {_reaching(":low::bigint", ":high::bigint")}
    )) AS span
    ORDER BY 1""")
"""Selects ranges of offsets, from `floor` on, that contain all messages with times from `low` to `high`, inclusive.

The ranges are in order and exclude their end. They contain other messages, too.
"""


def _beside(witness: str, found: str, low: str, high: str) -> sa.TextClause:
    """Select the blocks that overlap the time from `t` to a witness: `found` over the next block of each class."""
    return sql(f"""
        WITH witness AS (
          SELECT {found} AS time_us
          FROM {_CLASSES}
          CROSS JOIN LATERAL (
            SELECT b.min_us, b.max_us
            FROM relatum.time_blocks b
            WHERE {_in_class()} AND {witness}
            LIMIT 1
          ) AS beyond
        )
        SELECT reaching.*
        FROM witness
        CROSS JOIN {_reaching(low, high)}""")


# Backwards, the index has no order of the blocks' latest times. So the query takes the block of each class that begins
# last, and the latest time of these blocks: a message has that time, but perhaps not the nearest one. The redundant
# `b.min_us < t` lets PostgreSQL use the index.
_T: Final = ":t::bigint"
_WITNESS: Final = f"coalesce(witness.time_us, {_T})"
BLOCKS_NEIGHBOUR: Final[Mapping[Direction, sa.TextClause]] = {
    "after": _beside(f"b.min_us > {_T} ORDER BY b.min_us", "min(beyond.min_us)", _T, _WITNESS),
    "before": _beside(
        f"b.min_us < {_T} AND b.max_us < {_T} ORDER BY b.min_us DESC", "max(beyond.max_us)", _WITNESS, _T
    ),
}
"""Selects the blocks that overlap the time from `t` to a message beyond it; without one, blocks that contain `t`."""

_CLASS_VALUES: Final[dict[str, Any]] = {"classes": list(WIDTH_CLASSES), "widths": list(WIDTHS_US)}


def blocks_between(
    servers: Servers, streams: Sequence[PresentStream], low: int, high: int
) -> Mapping[int, list[Block]]:
    """Read the blocks with times from `low` to `high`, inclusive: by stream id, ordered by offset."""
    given = {"stream_ids": [stream.stream_id for stream in streams], "low": low, "high": high, "floor": 0}
    rows = servers.rows(BLOCKS_BETWEEN, _CLASS_VALUES | given)
    return {stream_id: [Block(*row[1:]) for row in of_stream] for stream_id, of_stream in groupby(rows, itemgetter(0))}


class Nearest:
    """Collects the nearest message beyond an edge. Places are mirrored if the direction is "before"."""

    def __init__(self, edge: Place, direction: Direction, is_meant: Callable[[Message], bool] = lambda _: True) -> None:
        self._is_meant = is_meant
        self.edge = edge
        self.direction: Direction = direction
        self.beyond = edge if direction == "after" else mirrored(edge)
        self.message: Message | None = None
        self.place: Place | None = None
        """The place of the nearest message; None while there is none."""

    def oriented(self, block: Block) -> Block:
        """Return the block, mirrored if the direction is "before". Its own inverse."""
        return block if self.direction == "after" else block.mirrored()

    def consider(self, message: Message) -> None:
        """Make a message the nearest one, if it is."""
        if message.time_us is not None and self._is_meant(message):
            place = message.time_us, message.offset
            place = place if self.direction == "after" else mirrored(place)
            if place > self.beyond and (self.place is None or place < self.place):
                self.message, self.place = message, place


def next_by_blocks(servers: Servers, stream: PresentStream, nearest: Nearest, lost: LostMessages) -> None:
    """Pass to `nearest` the messages of all blocks that can contain the next one in time, the most promising first."""
    read: set[Block] = set()
    reached = nearest.beyond[0]
    while True:
        t = reached if nearest.direction == "after" else -reached
        given = {"stream_id": stream.stream_id, "floor": _floor(stream, lost), "t": t}
        found = servers.rows(BLOCKS_NEIGHBOUR[nearest.direction], _CLASS_VALUES | given)
        blocks = [nearest.oriented(Block._make(row)) for row in found]
        places = ((earliest(block, nearest.beyond), block) for block in blocks if block not in read)
        for first_place, block in sorted((place, block) for place, block in places if place is not None):
            if nearest.place is not None and first_place > nearest.place:
                break
            before, original = nearest.message, nearest.oriented(block)
            _read(servers, [original], stream, lost, nearest.consider)
            is_cut = original.first_offset < _floor(stream, lost)
            has_unread = any(where.stream == stream.name for where in lost.ids(Status.UNPROVEN))
            if nearest.message is before and block.max_us > nearest.beyond[0] and is_cut and not has_unread:
                lost.is_sure = True
        read.update(blocks)
        # Continue from the last witness: retention may have dropped its message, or there are nearer blocks beyond.
        beyond = [block.min_us for block in blocks if block.min_us > reached]
        if not beyond or (nearest.place is not None and nearest.place[0] <= max(beyond)):
            return
        reached = max(beyond)


def _floor(stream: PresentStream, lost: LostMessages) -> int:
    """Return the stream's first retained offset, as far as known."""
    return lost.floors.get(stream.name, 0)


def _read(
    servers: Servers,
    run: Sequence[Block],
    stream: PresentStream,
    lost: LostMessages,
    consider: Callable[[Message], object],
) -> None:
    """Read the retained messages of blocks, and check that they agree with each block."""
    start, stop = min(block.first_offset for block in run), max(block.last_offset for block in run) + 1
    floor = _floor(stream, lost)
    if stop <= floor:
        return
    offsets: list[int] = []
    times: list[int | None] = []

    def collect(message: Message) -> None:
        offsets.append(message.offset)
        times.append(message.time_us)
        consider(message)

    servers.scan(stream.name, max(start, floor), stop, collect)
    for block in run:
        inside = slice(bisect_left(offsets, block.first_offset), bisect_right(offsets, block.last_offset))
        if block.first_offset >= _floor(stream, lost):
            _check_block(servers, block, offsets[inside], times[inside], stream, lost)


def _check_block(
    servers: Servers,
    block: Block,
    inside: Sequence[int],
    times: Sequence[int | None],
    stream: PresentStream,
    lost: LostMessages,
) -> None:
    """Check that the offsets and times of the messages that were read between a block's ends agree with the block."""
    if block.min_us in times and block.max_us in times:
        return
    bounds: StreamBounds = servers.bounds(stream.name)
    if bounds.first is not None and bounds.first > block.first_offset:
        lost.floors[stream.name] = bounds.first
        if not bounds.is_proven:
            lost.statuses[MessageId(stream.name, block.first_offset)] = Status.UNPROVEN
        return
    is_whole = bool(inside) and (inside[0], inside[-1]) == (block.first_offset, block.last_offset)
    if not is_whole and not (bounds.is_sure and (bounds.last is None or bounds.last < block.last_offset)):
        message = (
            f"the broker delivered only a part of the offsets {block.first_offset} to {block.last_offset} of the "
            f"stream {stream.name!r}: retry later"
        )
        raise StreamUnavailable(message, stream=stream.name)
    raise replaced(stream.name, block.first_offset)


def read_within(
    servers: Servers,
    blocks: Iterable[Block],
    stream: PresentStream,
    low: int,
    high: int,
    lost: LostMessages,
    consider: Callable[[Message], object],
) -> None:
    """Read the messages of blocks, ordered by offset, that overlap a time span."""
    for run in runs_of(blocks):
        _read(servers, run, stream, lost, consider)
        for block in run:
            has_match = low <= block.min_us <= high or low <= block.max_us <= high
            if has_match and block.last_offset < _floor(stream, lost):
                lost.is_sure = True


def offsets_between(servers: Servers, stream: PresentStream, low: int, high: int, floor: int) -> list[Range]:
    """Return the ranges of `OFFSETS_BETWEEN`."""
    given = {"stream_id": stream.stream_id, "low": low, "high": high, "floor": floor}
    return servers.rows(OFFSETS_BETWEEN, _CLASS_VALUES | given)
