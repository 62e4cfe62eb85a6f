"""Lookups by time: beside a moment, and around it. What the indexes name is read and checked."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final

import sqlalchemy as sa

from relatum.errors import AccessRefused, NotFound, StreamUnavailable, TimeNotRecorded
from relatum.ids import MessageId
from relatum.limits import INTEGER_MAX
from relatum.reading import Message, StreamBounds
from relatum.store.coverage import Range, merged
from relatum.store.database import sql
from relatum.store.parts import part_may_hold_values
from relatum_consumer.lookups._answer import Answer
from relatum_consumer.lookups._answering import Find, Found, Gathered, answered
from relatum_consumer.lookups._catalog import PresentStream, Wanted
from relatum_consumer.lookups._limits import ANSWER_MESSAGES_MAX, SCAN_BLOCKS_MAX
from relatum_consumer.lookups._proof import Evidence
from relatum_consumer.lookups._related import Row, verified
from relatum_consumer.lookups._servers import Servers
from relatum_consumer.lookups._stream_states import replaced
from relatum_consumer.lookups._time_index import blocks_beside, blocks_between, blocks_page
from relatum_consumer.lookups._time_search import (
    Block,
    Direction,
    Lost,
    Moment,
    Nearest,
    Place,
    Search,
    Side,
    Window,
    agree,
    in_order,
    joined,
    rank,
    surely_holds,
    time_of,
)

_READ_AT_ONCE: Final = 1_000
"""Messages of a window that are asked for at once: what there are too many of, or too large, is noticed between."""


# --- beside a moment --------------------------------------------------------------------------------------


_VALUE_IN_STREAM: Final = f"""
    SELECT r.stream_offset, r.time_us
    FROM relatum.relationships r
    WHERE r.key_id = :key_id::smallint AND r.value = :value::text AND r.stream_id = :stream_id::int
      AND {part_may_hold_values("r", ":key_id::smallint", ":value::text", ":value::text")}
"""

KEYED_BESIDE: Final[Mapping[Direction, sa.TextClause]] = {
    "after": sql(
        f"""
        {_VALUE_IN_STREAM}
          AND (r.time_us, r.stream_offset) > (:t::bigint, :o::bigint) AND r.stream_offset >= :floor::bigint
        ORDER BY r.time_us, r.stream_offset
        LIMIT :limit::bigint
        """
    ),
    "before": sql(
        f"""
        {_VALUE_IN_STREAM}
          AND (r.time_us, r.stream_offset) < (:t::bigint, :o::bigint) AND r.stream_offset >= :floor::bigint
        ORDER BY r.time_us DESC, r.stream_offset DESC
        LIMIT :limit::bigint
        """
    ),
}
"""Rows of one key value in one stream next to (`t`, `o`) in the order of (time, offset): offset, time."""


def next_by_key(search: Search, stream: PresentStream, edge: Place, direction: Direction, lost: Lost) -> Message | None:
    """The next message of one key value: one row of the index names it."""
    assert search.by is not None, "only look-ups by key come here"
    while True:
        floor = lost.floors.get(stream.name, 0)
        parameters = _value_in(search.by, stream) | {"t": edge[0], "o": edge[1], "floor": floor, "limit": 1}
        rows = search.catalog.servers.rows(KEYED_BESIDE[direction], parameters)
        if not rows:
            return None
        messages = _checked(search, search.by, stream, rows, lost)
        if messages:
            return messages[0]


def _value_in(by: Wanted, stream: PresentStream) -> dict[str, Any]:
    return {"key_id": by.key_id, "value": by.value, "stream_id": stream.stream_id}


def _checked(
    search: Search, by: Wanted, stream: PresentStream, rows: Iterable[tuple[int, int]], lost: Lost
) -> list[Message]:
    """The rows' messages, each checked; those that are gone are left out."""
    places = [Row(MessageId(stream.name, offset), time_us, {by.key_id}) for offset, time_us in rows]
    hits, gone = verified(search.catalog, (by,), places, is_named=True)
    for where, each in gone.items():
        lost.take(where, each.first, is_sure=each.is_sure)
    return [hit.message for hit in hits]


def next_by_blocks(
    search: Search, stream: PresentStream, edge: Place, direction: Direction, lost: Lost
) -> Message | None:
    """The next message in time: the blocks that can hold it are read, the most promising first.

    Below, all blocks and places are in the direction's coordinates: see `relatum_consumer.lookups._time_search`.
    """
    nearest = Nearest(search, edge, direction)
    beyond = nearest.beyond
    page_from: Place = (beyond[0], INTEGER_MAX)
    is_first = True
    while True:
        floor, turned = lost.floors.get(stream.name, 0), nearest.turned(page_from)
        blocks = blocks_beside(search.catalog.servers, stream, floor, edge[0], turned, direction, is_first=is_first)
        page = [nearest.turned_block(block) for block in blocks]
        for promise, block in in_order(page, beyond):
            if nearest.place is not None and promise > nearest.place:
                return nearest.message
            had, original = nearest.message, nearest.turned_block(block)
            _read(search.catalog.servers, [original], stream, lost, nearest.consider)
            if nearest.message is had and surely_holds(block, beyond) and _begins_in(original, stream, lost):
                lost.is_sure = True
        following = [(block.min_us, block.first_offset) for block in page if block.min_us > beyond[0]]
        if not following:
            return nearest.message
        page_from, is_first = max(following), False
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
    if agree(block, times):
        return
    bounds: StreamBounds = servers.bounds(stream.name)
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
    if not is_whole and not (bounds.is_sure and (bounds.last is None or bounds.last < block.last_offset)):
        message = (
            f"only a part of {stream.name!r} from {block.first_offset} to {block.last_offset} came: repeat it later"
        )
        raise StreamUnavailable(message, stream=stream.name)
    raise replaced(stream.name, block.first_offset)


# --- around a moment --------------------------------------------------------------------------------------


KEYED_BETWEEN: Final = sql(
    f"""
    {_VALUE_IN_STREAM}
      AND r.time_us >= :low::bigint AND r.time_us <= :high::bigint
    ORDER BY r.time_us, r.stream_offset
    LIMIT :limit::bigint
    """
)


def keyed_within(search: Search, stream: PresentStream, span: Window, lost: Lost, found: Gathered) -> None:
    assert search.by is not None, "only look-ups by key come here"
    parameters = _value_in(search.by, stream)
    parameters |= {"low": span.low, "high": span.high, "limit": ANSWER_MESSAGES_MAX + 2}
    rows = search.catalog.servers.rows(KEYED_BETWEEN, parameters)
    others = [row for row in rows if MessageId(stream.name, row[0]) != span.beside]
    # Expired ones count too: behind them there may be more than the limit let through.
    found.check(len(others))
    for start in range(0, len(others), _READ_AT_ONCE):
        for message in _checked(search, search.by, stream, others[start : start + _READ_AT_ONCE], lost):
            found.take(message)


def blocks_within(search: Search, targets: Sequence[PresentStream], span: Window, lost: Lost, found: Gathered) -> None:
    by_stream = blocks_between(search.catalog.servers, targets, span.low, span.high)
    for stream in targets:
        try:
            _blocks_within(search.catalog.servers, by_stream[stream.stream_id], stream, span, lost, found)
        except (AccessRefused, NotFound) as error:
            if search.names is not None:
                raise
            # It was not asked for by name: what is known of it is that it had such messages.
            where = MessageId(stream.name, by_stream[stream.stream_id][0].first_offset)
            lost.take(where, INTEGER_MAX, is_sure=isinstance(error, NotFound))


def _blocks_within(
    servers: Servers, held: Sequence[Block], stream: PresentStream, span: Window, lost: Lost, found: Gathered
) -> None:
    for _, _, run in joined(held, SCAN_BLOCKS_MAX):
        _read(servers, run, stream, lost, found.consider)
        for block in run:
            is_certain = span.low <= block.min_us <= span.high or span.low <= block.max_us <= span.high
            if is_certain and block.last_offset < lost.floors.get(stream.name, 0):
                lost.is_sure = True


def offsets_within(
    servers: Servers, stream: PresentStream, low: int, high: int, start: int, *, blocks_max: int
) -> tuple[list[Range], int | None]:
    """Where the messages lie whose times are from `low` to `high`, both included, as the index has it.

    Args:
        servers: Both servers.
        stream: The stream.
        low: Microseconds since 1970.
        high: As `low`.
        start: Only offsets from this one on.
        blocks_max: Blocks of the index that are asked for at once.

    Returns:
        Ranges of offsets in their order, each from one to before another, with others' messages among them; and where
        to go on, None behind the last.
    """
    found = blocks_page(servers, stream, start, low, high, blocks_max)
    following = found[-1].first_offset if len(found) == blocks_max else None
    if following is not None and following <= start:
        return offsets_within(servers, stream, low, high, start, blocks_max=2 * blocks_max)
    stop = INTEGER_MAX if following is None else following
    runs = ((max(first, start), min(last + 1, stop)) for first, last, _ in joined(found, SCAN_BLOCKS_MAX))
    return merged(runs), following


def beside(search: Search, moment: Moment, sides: Sequence[Side], *, complete: bool) -> Answer:
    """The next message on a side of the moment; of two sides the nearer one, and the earlier if equally near."""
    return _answered(search, partial(_nearest, search, moment, sides), complete=complete)


def window(
    search: Search, span: Window, *, complete: bool, nearest: int | None = None, limit: int | None = None
) -> Answer:
    """All messages in a span of time, by time, partition and offset; with a limit those nearest to a time."""
    return _answered(search, partial(_within, search, span, nearest, limit), complete=complete)


def _answered(search: Search, find: Find, *, complete: bool) -> Answer:
    search.catalog.check_names(search.names)
    return answered(search.catalog, search.names, search.key_ids, find, complete=complete)


# --- beside a moment --------------------------------------------------------------------------------------


def _nearest(search: Search, moment: Moment, sides: Sequence[Side], known: Evidence | None) -> Found:
    lost = Lost()
    targets = search.targets()
    among = {stream.name for stream in targets}.union({each.stream for each in known.uncovered} if known else ())
    found: list[Message] = []
    for side in sides:
        candidates: list[Message] = []
        for stream in targets:
            edge = moment.edge(stream.name, among, side)
            look = next_by_blocks if search.by is None else next_by_key
            message = look(search, stream, edge, side.direction, lost)
            candidates += [] if message is None else [message]
        if known:
            candidates += _unrecorded_beside(search, moment, side, known, among)
        if candidates:
            found.append(min(candidates, key=rank) if side.direction == "after" else max(candidates, key=rank))
    nearest = sorted(found, key=lambda message: (abs(time_of(message) - moment.time_us), rank(message)))
    return search.found(nearest[:1], lost)


def _unrecorded_beside(
    search: Search, moment: Moment, side: Side, known: Evidence, among: Collection[str]
) -> list[Message]:
    """The nearest message of each stream, of what is not recorded of it."""
    streams = {each.stream for each in known.uncovered}
    nearest = {stream: Nearest(search, moment.edge(stream, among, side), side.direction) for stream in streams}
    known.scan(search.catalog.servers, lambda message: nearest[message.stream].consider(message))
    return [each.message for each in nearest.values() if each.message is not None]


# --- around a moment --------------------------------------------------------------------------------------


def _within(search: Search, span: Window, nearest: int | None, limit: int | None, known: Evidence | None) -> Found:
    def first(messages: Iterable[Message]) -> list[Message]:
        return sorted(messages, key=lambda message: (abs(time_of(message) - (nearest or 0)), rank(message)))[:limit]

    lost = Lost()
    advice = "ask for a shorter span of time"
    found = Gathered(lambda message: span.holds(search, message), advice, first=first, limit=limit)
    targets = search.targets()
    if search.by is None:
        blocks_within(search, targets, span, lost, found)
    else:
        for stream in targets:
            keyed_within(search, stream, span, lost, found)
    if known:
        known.scan(search.catalog.servers, found.consider)
    messages = found.messages if limit is None else first(found.messages)
    return search.found(sorted(messages, key=rank), lost)
