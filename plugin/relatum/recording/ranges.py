"""Finds offsets that are not recorded for some keys, and removes offsets from the table to record them again.

If the table and the stream differ, the stream is right. So repairs, lost tails, and offsets that release 0.4 recorded
over AMQP 0.9.1 begin with the same step: one transaction turns the offsets into a gap, which a filler or the recorder
closes. See docs/adr/0002.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import sqlalchemy as sa

from relatum.common.limits import INTEGER_MAX
from relatum.reading import Position, StreamReader, position_of
from relatum.store.catalog import StreamRow, lock_stream
from relatum.store.coverage import (
    COLUMNS,
    CoverageRow,
    Range,
    add_ranges,
    coverage_of,
    covered,
    merged,
    missing,
    row_of,
)
from relatum.store.database import sql

# --- finding ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Segment:
    """Offsets [from_offset, to_offset) that lack the same keys. The ids are those of coverage, including `TIME`."""

    from_offset: int
    to_offset: int
    key_ids: frozenset[int]


def unrecorded(rows: Sequence[CoverageRow], within: Range, key_ids: Iterable[int]) -> list[Segment]:
    """Return the parts of a range that lack some of the keys, in order, each as long as possible."""
    lacking = [(key_id, gap) for key_id in key_ids for gap in missing(within, covered(rows, key_id))]
    # At each edge, some key's gap begins or ends, so neighbouring segments differ.
    edges = sorted({edge for _, gap in lacking for edge in gap})
    segments = (
        Segment(start, end, frozenset(key_id for key_id, gap in lacking if gap[0] <= start and end <= gap[1]))
        for start, end in pairwise(edges)
    )
    return [segment for segment in segments if segment.key_ids]


def gaps(rows: Sequence[CoverageRow], first: int) -> list[Range]:
    """Return the retained offsets before the tail's end for which no key is recorded.

    A key that was defined later causes no gap, but needs a back-fill. A hole is not a gap either: messages that
    retention dropped cannot be recorded.
    """
    ends = [row.to_offset for row in rows if row.is_tail]
    if not ends or first >= ends[0]:
        return []
    return missing((first, ends[0]), merged((row.from_offset, row.to_offset) for row in rows))


# --- removing ---------------------------------------------------------------------------------------------------------

WINDOW_OFFSETS: Final = 20_000
"""Offsets that are compared or recorded again at a time. Limits memory to a few MB, and the size of a gap."""

_CROSSING_BLOCKS: Final = sql("""
    SELECT min(first_offset), max(last_offset) FROM relatum.time_blocks
    WHERE stream_id = :stream_id::integer AND first_offset < :stop::bigint AND last_offset >= :start::bigint
        AND last_offset::double precision - first_offset < :most::double precision""")

_TAKE_RANGES: Final = sql(f"""
    DELETE FROM relatum.coverage
    WHERE stream_id = :stream_id::integer AND from_offset < :stop::bigint AND to_offset > :start::bigint
    RETURNING {COLUMNS}""")

_DELETE_ROWS: Final = sql("""
    DELETE FROM relatum.relationships
    WHERE stream_id = :stream_id::integer AND stream_offset >= :start::bigint AND stream_offset < :stop::bigint""")

_CUT_BLOCKS: Final = sql("""
    WITH gone AS (
        DELETE FROM relatum.time_blocks
        WHERE stream_id = :stream_id::integer AND first_offset < :stop::bigint
            AND greatest(first_offset, last_offset) >= :start::bigint
        RETURNING *)
    INSERT INTO relatum.time_blocks (min_us, max_us, first_offset, last_offset, stream_id, width_class)
    SELECT min_us, max_us, first_offset, :start::bigint - 1, stream_id, width_class
    FROM gone WHERE first_offset < :start::bigint AND :start::bigint > 0
    UNION ALL
    SELECT min_us, max_us, :stop::bigint, last_offset, stream_id, width_class
    FROM gone WHERE last_offset >= :stop::bigint""")

_LOCK_SCANS: Final = sql("LOCK TABLE relatum.group_scans IN SHARE ROW EXCLUSIVE MODE")

_CUT_SCANS: Final = sql("""
    WITH gone AS (
        DELETE FROM relatum.group_scans
        WHERE stream_id = :stream_id::integer AND from_offset < :stop::bigint AND to_offset > :start::bigint
        RETURNING *)
    INSERT INTO relatum.group_scans (from_offset, to_offset, consumer_id, stream_id)
    SELECT from_offset, :start::bigint, consumer_id, stream_id FROM gone WHERE from_offset < :start::bigint
    UNION ALL
    SELECT :stop::bigint, to_offset, consumer_id, stream_id FROM gone WHERE to_offset > :stop::bigint""")


_LOCK_RANGES: Final = sql("""
    SELECT FROM relatum.coverage
    WHERE stream_id = :stream_id::integer AND from_offset <= :stop::bigint AND to_offset >= :start::bigint
    ORDER BY coverage_id FOR UPDATE""")


def lock_ranges(connection: sa.Connection, stream_id: int, part: Range) -> list[CoverageRow]:
    """Lock the coverage of some offsets until the transaction ends, and return all ranges of the stream."""
    # `key_share` lets other sessions add ranges of the stream: a recorder that adds one has already locked another.
    lock_stream(connection, stream_id, key_share=True)
    connection.execute(_LOCK_RANGES, {"stream_id": stream_id, "start": part[0], "stop": part[1]})
    return coverage_of(connection, [stream_id])


def uncover(connection: sa.Connection, reader: StreamReader, stream: StreamRow, part: Range, first: int) -> Range:
    """Remove all rows and coverage of some offsets, and return the range of offsets removed.

    The range may be larger than `part`, since blocks of the time index are removed whole. Receipts and checkpoints
    stay. Offsets below `first`, the first retained one, are not changed.

    `reader` reads the message before the part: its position is stored with the range that ends there. So the caller
    must check, before it commits, that the stream is still the recorded one.
    """
    lock_ranges(connection, stream.stream_id, part)
    start, stop = widened(connection, stream.stream_id, part, first)
    if start >= stop:
        return start, start
    values = {"stream_id": stream.stream_id, "start": start, "stop": stop}
    taken = [row_of(row) for row in connection.execute(_TAKE_RANGES, values)]
    lowest = min((row.from_offset for row in taken if not _ends_before(row, start)), default=start)
    before = position_before(reader, stream.name, start, max(first, lowest))
    add_ranges(connection, [left for row in taken for left in _remainders(row, start, stop, before)])
    connection.execute(_DELETE_ROWS, values)
    connection.execute(_CUT_BLOCKS, values)
    # Under this lock, a group consumer has stored its scan before, or will see the new coverage.
    connection.execute(_LOCK_SCANS)
    connection.execute(_CUT_SCANS, values)
    return start, stop


def _remainders(row: CoverageRow, start: int, stop: int, before: Position | None) -> Iterator[CoverageRow]:
    """Yield the rest of a range, with new ids, so that a group consumer's scan of the old range is refused."""
    if row.from_offset < start:
        is_in = before is not None and before.offset >= row.from_offset and row.kind == "recorded"
        known = row.position if _ends_before(row, start) else before if is_in else None
        yield row._replace(to_offset=start, is_tail=False).known_by(known)
    # The tail keeps its end, even if the range becomes empty, and the position that identifies the stream.
    if row.is_tail or row.to_offset > stop:
        is_known = row.is_tail or (row.last_offset is not None and row.last_offset >= stop)
        yield row._replace(from_offset=min(stop, row.to_offset)).known_by(row.position if is_known else None)


def _ends_before(row: CoverageRow, offset: int) -> bool:
    return row.last_offset is not None and row.last_offset < offset


def widened(connection: sa.Connection, stream_id: int, part: Range, first: int) -> Range:
    """Return a part without offsets below `first`, widened until no block of the time index crosses its edges.

    A block as wide as a window is corrupt: it does not widen the part, but is cut at the edge.
    """
    part = max(first, part[0]), part[1]
    while part[0] < part[1]:
        start, stop = part
        values = {"stream_id": stream_id, "start": start, "stop": stop, "most": WINDOW_OFFSETS}
        low, high = connection.execute(_CROSSING_BLOCKS, values).one()
        if low is not None:
            part = max(first, min(start, low)), min(INTEGER_MAX, max(stop, high + 1))
        if part == (start, stop):
            break
    return part


def position_before(reader: StreamReader, stream: str, offset: int, least: int) -> Position | None:
    """Return the last position in [least, offset); None if there is none. Reads backwards, in growing steps."""
    step = 1
    while least < offset:
        start = max(least, offset - step)
        if last := deque(reader.iterate(stream, start, stop=offset), maxlen=1):
            return position_of(last[0])
        if start == least:
            return None
        step *= 100
    return None
