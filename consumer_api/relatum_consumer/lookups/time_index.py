"""The sparse index of times: blocks of messages in the database, by the times that they span.

A block of class c spans at most 4**c microseconds, so one that holds the moment t begins after t - 4**c: each class is
one short range of the index `time_blocks_lookup`.
"""

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import sqlalchemy as sa

from relatum.errors import StreamUnavailable
from relatum.ids import MessageId
from relatum.limits import INTEGER_MAX
from relatum.reading import Message, StreamBounds
from relatum.store.coverage import Range, merged
from relatum.store.database import sql
from relatum_consumer.lookups.answering import Lost
from relatum_consumer.lookups.catalog import PresentStream
from relatum_consumer.lookups.limits import SCAN_BLOCKS_MAX
from relatum_consumer.lookups.servers import Servers
from relatum_consumer.lookups.stream_states import replaced
from relatum_consumer.lookups.time_search import Block, Direction, Nearest, Place, Search, Window, in_order, joined

WIDTH_CLASSES: Final = tuple(range(31))
"""All width classes of time blocks: 4**30 microseconds span more than the years 1 to 9999."""

WIDTHS_US: Final = tuple(4**width_class for width_class in WIDTH_CLASSES)
"""The widest block of each class, in microseconds."""

BLOCK_PAGE: Final = 16
"""Blocks asked for at once beyond those that hold the moment itself; one is nearly always enough."""

_BLOCK: Final = "b.min_us, b.max_us, b.first_offset, b.last_offset"
_CLASSES: Final = "unnest(:classes::smallint[], :widths::bigint[]) AS classes (width_class, width)"


def _in_class(classes: str, stream_id: str = ":stream_id::int") -> str:
    return f"b.stream_id = {stream_id} AND b.width_class = {classes}.width_class AND b.last_offset >= :floor::bigint"


# --- blocks that reach into a span of time ----------------------------------------------------------------


def _reaching(low: str, high: str, stream_id: str = ":stream_id::int") -> str:
    # Offset 0 keeps PostgreSQL from joining it in another way than class by class.
    return f"""
        {_CLASSES}
        CROSS JOIN LATERAL (
          SELECT {_BLOCK}
          FROM relatum.time_blocks b
          WHERE {_in_class("classes", stream_id)}
            AND b.min_us >= {low} - classes.width AND b.min_us <= {high} AND b.max_us >= {low}
          OFFSET 0
        ) AS reaching
    """


BLOCKS_BETWEEN: Final = sql(
    f"""
    SELECT given.stream_id, reaching.*
    FROM unnest(:stream_ids::int[]) AS given (stream_id)
    CROSS JOIN {_reaching(":low::bigint", ":high::bigint", "given.stream_id")}
    ORDER BY stream_id, first_offset, last_offset
    """
)


def blocks_between(
    servers: Servers, streams: Sequence[PresentStream], low: int, high: int
) -> Mapping[int, list[Block]]:
    """Blocks of streams that have times between two moments, both included, by offsets: by the stream's number."""
    parameters = _CLASS_VALUES | {"stream_ids": [stream.stream_id for stream in streams], "floor": 0}
    rows = servers.rows(BLOCKS_BETWEEN, parameters | {"low": low, "high": high})
    found: dict[int, list[Block]] = defaultdict(list)
    for stream_id, *block in rows:
        found[stream_id].append(Block._make(block))
    return found


BLOCKS_PAGE: Final = sql(
    f"""
    SELECT reaching.*
    FROM {_reaching(":low::bigint", ":high::bigint")}
    ORDER BY first_offset, last_offset
    LIMIT :blocks_max::bigint
    """
)


def blocks_page(servers: Servers, stream: PresentStream, floor: int, low: int, high: int, most: int) -> list[Block]:
    """The first blocks of a stream that have times between two moments, both included, by offsets."""
    parameters = _blocks_of(stream, floor) | {"low": low, "high": high, "blocks_max": most}
    return [Block._make(row) for row in servers.rows(BLOCKS_PAGE, parameters)]


_CLASS_VALUES: Final[dict[str, Any]] = {"classes": list(WIDTH_CLASSES), "widths": list(WIDTHS_US)}


def _blocks_of(stream: PresentStream, floor: int) -> dict[str, Any]:
    return _CLASS_VALUES | {"stream_id": stream.stream_id, "floor": floor}


# --- blocks beside a moment -------------------------------------------------------------------------------

_HOLDING: Final = f"SELECT reaching.* FROM {_reaching(':t::bigint', ':t::bigint')}"

# The first blocks that begin after `t`, by (begin, first offset), beyond the place (`u`, `o`) in that order.
_FOLLOWING: Final = f"""
    SELECT page.*
    FROM (
      SELECT following.*
      FROM {_CLASSES}
      CROSS JOIN LATERAL (
        SELECT {_BLOCK}
        FROM relatum.time_blocks b
        WHERE {_in_class("classes")}
          AND b.min_us > :t::bigint AND (b.min_us, b.first_offset) > (:u::bigint, :o::bigint)
        ORDER BY b.min_us, b.first_offset
        LIMIT {BLOCK_PAGE}
      ) AS following
      ORDER BY following.min_us, following.first_offset
      LIMIT {BLOCK_PAGE}
    ) AS page
"""

# That a block begins before it ends is said so that the index, which has the beginnings, has an upper end too.
_ENDS_BEYOND: Final = """b.min_us < :t::bigint AND b.min_us <= :u::bigint AND b.max_us < :t::bigint
          AND (b.max_us, b.last_offset) < (:u::bigint, :o::bigint)"""

# The last blocks that end before `t`, by (end, last offset) downwards, beyond the place (`u`, `o`) in that order.
#
# The index has the blocks' beginnings. One that ends at or after some end began after that end minus its class's width.
# So: of each class the block that begins last; the latest of their ends; and all blocks that end no earlier, of which
# there is at least one. What is not given ends before all that is given, or is cut off by the page's size.
_BEGUN: Final = f"""
    WITH begun AS (
      SELECT classes.width_class, classes.width, latest.ends
      FROM {_CLASSES}
      CROSS JOIN LATERAL (
        SELECT b.max_us AS ends
        FROM relatum.time_blocks b
        WHERE {_in_class("classes")}
          AND {_ENDS_BEYOND}
        ORDER BY b.min_us DESC
        LIMIT 1
      ) AS latest
    )
"""
_PRECEDING: Final = f"""
    SELECT page.*
    FROM (
      SELECT preceding.*
      FROM begun
      CROSS JOIN LATERAL (
        SELECT {_BLOCK}
        FROM relatum.time_blocks b
        WHERE {_in_class("begun")}
          AND b.min_us >= (SELECT max(ends) FROM begun) - begun.width AND b.max_us >= (SELECT max(ends) FROM begun)
          AND {_ENDS_BEYOND}
        OFFSET 0
      ) AS preceding
      ORDER BY preceding.max_us DESC, preceding.last_offset DESC
      LIMIT {BLOCK_PAGE}
    ) AS page
"""

BLOCKS_BESIDE: Final[Mapping[Direction, sa.TextClause]] = {
    "after": sql(f"{_HOLDING} UNION ALL {_FOLLOWING}"),
    "before": sql(f"{_BEGUN} {_HOLDING} UNION ALL {_PRECEDING}"),
}


def blocks_beside(
    servers: Servers,
    stream: PresentStream,
    floor: int,
    time_us: int,
    beyond: Place,
    direction: Direction,
) -> list[Block]:
    """Blocks beside a moment, in no order: those that hold it, and a page of those beyond a place in their order.

    The page is not empty while there are any, has no gap, and at most `BLOCK_PAGE` blocks.
    """
    parameters = _blocks_of(stream, floor) | {"t": time_us, "u": beyond[0], "o": beyond[1]}
    return [Block._make(row) for row in servers.rows(BLOCKS_BESIDE[direction], parameters)]


# --- reading blocks ---------------------------------------------------------------------------------------


def next_by_blocks(
    search: Search, stream: PresentStream, edge: Place, direction: Direction, lost: Lost
) -> Message | None:
    """The next message in time: the blocks that can hold it are read, the most promising first.

    All blocks and places are in the direction's coordinates: see `relatum_consumer.lookups.time_search`.
    """
    nearest = Nearest(search, edge, direction)
    beyond = nearest.beyond
    page_from: Place = (beyond[0], INTEGER_MAX)
    read: set[Block] = set()
    while True:
        floor, turned = lost.floors.get(stream.name, 0), nearest.turned(page_from)
        blocks = blocks_beside(search.catalog.servers, stream, floor, edge[0], turned, direction)
        page = [nearest.turned_block(block) for block in blocks if block not in read]
        read.update(blocks)
        for promise, block in in_order(page, beyond):
            if nearest.place is not None and promise > nearest.place:
                return nearest.message
            had, original = nearest.message, nearest.turned_block(block)
            _read(search.catalog.servers, [original], stream, lost, nearest.consider)
            if nearest.message is had and block.max_us > beyond[0] and _begins_in(original, stream, lost):
                lost.is_sure = True
        following = [(block.min_us, block.first_offset) for block in page if block.min_us > beyond[0]]
        if not following:
            return nearest.message
        page_from = max(following)
        if nearest.place is not None and nearest.place <= page_from:
            return nearest.message


def _begins_in(block: Block, stream: PresentStream, lost: Lost) -> bool:
    """Whether retention has surely taken a part of the block."""
    doubted = any(where.stream == stream.name for where in lost.unread)
    return block.first_offset < lost.floors.get(stream.name, 0) and not doubted


def _read(
    servers: Servers, run: Sequence[Block], stream: PresentStream, lost: Lost, consider: Callable[[Message], object]
) -> None:
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

    servers.scan(stream.name, max(start, floor), stop, look)
    for block in run:
        inside = slice(bisect_left(offsets, block.first_offset), bisect_right(offsets, block.last_offset))
        if block.first_offset >= lost.floors.get(stream.name, 0):
            _check_block(servers, block, offsets[inside], times[inside], stream, lost)


def _check_block(
    servers: Servers,
    block: Block,
    inside: Sequence[int],
    times: Sequence[int | None],
    stream: PresentStream,
    lost: Lost,
) -> None:
    """See that what was read between a block's ends, the offsets and the times of messages, is what the block says."""
    if block.min_us in times and block.max_us in times:
        return
    bounds: StreamBounds = servers.bounds(stream.name)
    if bounds.first is not None and bounds.first > block.first_offset:
        lost.floors[stream.name] = bounds.first
        if not bounds.is_proven:
            lost.unread[MessageId(stream.name, block.first_offset)] = None
        return
    is_whole = bool(inside) and (inside[0], inside[-1]) == (block.first_offset, block.last_offset)
    if not is_whole and not (bounds.is_sure and (bounds.last is None or bounds.last < block.last_offset)):
        message = (
            f"only a part of {stream.name!r} from {block.first_offset} to {block.last_offset} came: repeat it later"
        )
        raise StreamUnavailable(message, stream=stream.name)
    raise replaced(stream.name, block.first_offset)


def read_within(
    servers: Servers,
    held: Sequence[Block],
    stream: PresentStream,
    span: Window,
    lost: Lost,
    consider: Callable[[Message], object],
) -> None:
    """Read the messages of blocks that reach into a span of time."""
    for _, _, run in joined(held, SCAN_BLOCKS_MAX):
        _read(servers, run, stream, lost, consider)
        for block in run:
            is_certain = span.low <= block.min_us <= span.high or span.low <= block.max_us <= span.high
            if is_certain and block.last_offset < lost.floors.get(stream.name, 0):
                lost.is_sure = True


def offsets_within(
    servers: Servers, stream: PresentStream, low: int, high: int, start: int, *, blocks_max: int
) -> tuple[list[Range], int | None]:
    """Where the messages lie from `start` on whose times are from `low` to `high`, both included, as the index has it.

    Ranges of offsets in their order, with others' messages among them; and where to go on, None behind the last.
    """
    found = blocks_page(servers, stream, start, low, high, blocks_max)
    following = found[-1].first_offset if len(found) == blocks_max else None
    if following is not None and following <= start:
        return offsets_within(servers, stream, low, high, start, blocks_max=2 * blocks_max)
    stop = INTEGER_MAX if following is None else following
    runs = ((max(first, start), min(last + 1, stop)) for first, last, _ in joined(found, SCAN_BLOCKS_MAX))
    return merged(runs), following
