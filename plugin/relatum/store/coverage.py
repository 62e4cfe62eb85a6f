"""Coverage: the ranges of offsets of a stream that are recorded, and for which keys. Ranges exclude their end.

The range that grows with its stream is the tail. Tails of many streams are advanced, opened and closed in one
statement, with a compare-and-set for each.
"""

import json
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any, Final, NamedTuple

import sqlalchemy as sa

from relatum.common.ids import Position
from relatum.errors import CoverageConflict
from relatum.keys import timestamp_us
from relatum.store.database import sql
from relatum.store.rows import integers_text, known_by

TIME: Final = 0
"""The id that stands for a message's time among ids of keys, which begin at 1."""

Range = tuple[int, int]


class CoverageRow(NamedTuple):
    """A range of offsets, the keys recorded for it, and the last message in it or before it.

    Recorders extend a stream's last range, its tail.
    """

    stream_id: int
    from_offset: int
    to_offset: int
    key_ids: tuple[int, ...] = ()
    with_time: bool = False
    kind: str = "recorded"
    is_tail: bool = False
    over_amqp: bool = False
    """Whether release 0.4 recorded the range over AMQP 0.9.1, which may miss messages: absent rows prove nothing."""
    last_offset: int | None = None
    last_fingerprint: int | None = None
    last_chunk_ms: int | None = None
    coverage_id: int = 0
    """0 for a range that is not written yet."""
    recorded_at: datetime = datetime.min

    @property
    def mark(self) -> int:
        """The last message's fingerprint, or else the time of writing. It distinguishes rows that get the same id.

        A standby that is promoted without the last commits assigns their ids again, also to rows of other streams.
        """
        if self.last_fingerprint is not None:
            return self.last_fingerprint
        return timestamp_us(self.recorded_at)

    @property
    def position(self) -> Position | None:
        """The position of the last message in or before the range; None if there is none yet."""
        if self.last_offset is None or self.last_fingerprint is None:
            return None
        return Position(self.last_offset, self.last_fingerprint, self.last_chunk_ms)

    def known_by(self, last: Position | None) -> "CoverageRow":
        """Return the range with this last message; None for no message."""
        columns: dict[str, Any] = known_by(last)
        return self._replace(**columns)

    def joins(self, row: "CoverageRow") -> bool:
        """Return whether a range can be merged with this one: adjacent, not a tail, and recorded for the same keys."""
        own_columns = (self.kind, self.key_ids, self.with_time, self.over_amqp)
        return (
            not row.is_tail
            and own_columns == (row.kind, row.key_ids, row.with_time, row.over_amqp)
            and (row.to_offset == self.from_offset or row.from_offset == self.to_offset)
        )

    def holds(self, key_id: int) -> bool:
        """Return whether the range is recorded for a key, or for `TIME`."""
        return self.kind == "recorded" and (self.with_time if key_id == TIME else key_id in self.key_ids)

    def proves(self, key_id: int) -> bool:
        """Return whether an absent row of a key, or of `TIME`, proves that the stream has no such value."""
        return not self.over_amqp and self.holds(key_id)


COLUMNS: Final = ", ".join(CoverageRow._fields)

COVERAGE_OF: Final = sql(f"""
    SELECT {COLUMNS} FROM relatum.coverage WHERE stream_id = ANY (:stream_ids::integer[])
    ORDER BY stream_id, from_offset, coverage_id""")
"""Reads all ranges of streams, ordered by stream and offset."""


def row_of(row: sa.Row[tuple[object, ...]]) -> CoverageRow:
    """Return the range in a row with `COLUMNS`."""
    found = CoverageRow._make(row)
    return found._replace(key_ids=tuple(found.key_ids))


def coverage_of(connection: sa.Connection, stream_ids: Sequence[int]) -> list[CoverageRow]:
    """Read all ranges of the streams, ordered by stream and offset."""
    return [row_of(row) for row in connection.execute(COVERAGE_OF, {"stream_ids": list(stream_ids)})]


def coverage_by_stream(connection: sa.Connection, stream_ids: Sequence[int]) -> dict[int, list[CoverageRow]]:
    """Read all ranges of each stream, ordered by offset; an empty list for a stream without ranges."""
    found: dict[int, list[CoverageRow]] = {stream_id: [] for stream_id in stream_ids}
    for row in coverage_of(connection, stream_ids):
        found[row.stream_id].append(row)
    return found


def tail_of(connection: sa.Connection, stream_id: int) -> CoverageRow | None:
    """Read the stream's tail; None if the stream was never recorded."""
    return next((row for row in coverage_of(connection, [stream_id]) if row.is_tail), None)


def last_position(rows: Iterable[CoverageRow]) -> Position | None:
    """Return the last recorded position. A stream only grows at its end: if this message agrees, all before it do."""
    positions = [row.position for row in rows if row.position is not None]
    return max(positions, key=lambda position: position.offset, default=None)


def above(rows: Iterable[CoverageRow], floor: int | None) -> list[CoverageRow]:
    """Return the ranges without the offsets below a stream's `retained_from`.

    Their rows may have been pruned by a former leader's first offset, and the present leader may retain the messages.
    """
    return [row._replace(from_offset=max(row.from_offset, floor or 0)) for row in rows]


def covered(rows: Iterable[CoverageRow], key_id: int) -> list[Range]:
    """Return the offsets recorded for a key, or for `TIME`, as disjoint ranges in order, without empty ranges."""
    return merged((row.from_offset, row.to_offset) for row in rows if row.holds(key_id))


def proven(rows: Iterable[CoverageRow], key_id: int) -> list[Range]:
    """Return the ranges in which absent rows of a key, or of `TIME`, prove that there are no values; see `proves`."""
    return merged((row.from_offset, row.to_offset) for row in rows if row.proves(key_id))


def merged(ranges: Iterable[Range]) -> list[Range]:
    """Return the union of ranges: disjoint, in order, without empty ranges."""
    result: list[Range] = []
    for start, end in sorted(ranges):
        if start >= end:
            continue
        if result and start <= result[-1][1]:
            result[-1] = (result[-1][0], max(result[-1][1], end))
        else:
            result.append((start, end))
    return result


def missing(within: Range, ranges: Sequence[Range]) -> list[Range]:
    """Return the parts of the range `within` that are in none of the ranges, which are disjoint and in order."""
    gaps: list[Range] = []
    position, end = within
    for start, stop in ranges:
        if start >= end:
            break
        if start > position:
            gaps.append((position, start))
        position = max(position, stop)
    if position < end:
        gaps.append((position, end))
    return gaps


# --- writing ----------------------------------------------------------------------------------------------------------


def new_tail(
    stream_id: int, start: int, key_ids: Iterable[int], *, with_time: bool, position: Position | None = None
) -> CoverageRow:
    """Return an empty tail that begins at offset `start`; `position` is the message before it."""
    return CoverageRow(stream_id, start, start, tuple(sorted(key_ids)), with_time, is_tail=True).known_by(position)


_NEW_FIELDS: Final = CoverageRow._fields[: CoverageRow._fields.index("coverage_id")]
_NEW_COLUMNS: Final = ", ".join(_NEW_FIELDS)

# The rows are one JSON parameter, so that one statement can open 2,000 tails.
_ADD_RANGES: Final = sql(f"""
    INSERT INTO relatum.coverage ({_NEW_COLUMNS})
    SELECT {_NEW_COLUMNS} FROM jsonb_populate_recordset(NULL::relatum.coverage, :new::jsonb)
    ORDER BY stream_id, from_offset
    ON CONFLICT DO NOTHING
    RETURNING {COLUMNS}""")


def add_ranges(connection: sa.Connection, new: Sequence[CoverageRow]) -> list[CoverageRow]:
    """Write ranges, and return them; tails of streams that already have a tail are left out."""
    if not new:
        return []
    rows = [dict(zip(_NEW_FIELDS, each, strict=False)) for each in new]
    return [row_of(row) for row in connection.execute(_ADD_RANGES, {"new": json.dumps(rows)})]


_DELETE: Final = sql("DELETE FROM relatum.coverage WHERE coverage_id = ANY (:ids::bigint[])")


def join_range(connection: sa.Connection, rows: Iterable[CoverageRow], new: CoverageRow) -> None:
    """Write a range, merged with those of `rows` that it joins: every lookup reads the coverage, which must stay short.

    The caller holds `lock_stream`, so that no other transaction merges ranges at the same time.
    """
    joined = [row for row in rows if new.joins(row)]
    if joined:
        deleted = connection.execute(_DELETE, {"ids": [row.coverage_id for row in joined]})
        if deleted.rowcount != len(joined):
            message = f"a range of the stream with the id {new.stream_id} was pruned; nothing was written"
            raise CoverageConflict(message, stream="")
    parts = [new, *joined]
    start, end = min(part.from_offset for part in parts), max(part.to_offset for part in parts)
    add_ranges(connection, [new._replace(from_offset=start, to_offset=end).known_by(last_position(parts))])


# --- tails ------------------------------------------------------------------------------------------------------------

_MARK: Final = "coalesce(c.last_fingerprint, (extract(epoch FROM c.recorded_at) * 1000000)::bigint)"
"""`CoverageRow.mark` in SQL."""

# Arrays are sent as text, which PostgreSQL casts once.
ADVANCE_ALL: Final = sql(f"""
    WITH free AS MATERIALIZED (
        SELECT coverage_id FROM relatum.coverage
        WHERE coverage_id = ANY (:ids::bigint[])
        ORDER BY coverage_id FOR UPDATE SKIP LOCKED)
    UPDATE relatum.coverage c
    SET to_offset = m.to_offset, last_offset = m.last_offset, last_fingerprint = m.last_fingerprint,
        last_chunk_ms = m.last_chunk_ms, recorded_at = clock_timestamp()
    FROM unnest(:ids::bigint[], :expected::bigint[], :marks::bigint[], :ends::bigint[], :offsets::bigint[],
        :fingerprints::bigint[], :chunks_ms::bigint[])
        AS m(id, expected, mark, to_offset, last_offset, last_fingerprint, last_chunk_ms)
    WHERE c.coverage_id = m.id AND c.coverage_id IN (SELECT coverage_id FROM free)
        AND c.to_offset = m.expected AND m.mark = {_MARK} AND c.is_tail
    RETURNING c.coverage_id""")

_CURRENT: Final = sql(f"""
    SELECT c.coverage_id, c.to_offset, {_MARK} FROM relatum.coverage c
    WHERE c.coverage_id = ANY (:ids::bigint[]) AND c.is_tail""")

_UNCHANGED: Final = f"""unnest(:ids::bigint[], :expected::bigint[], :marks::bigint[]) AS tail(id, expected, mark)
    WHERE c.coverage_id = tail.id AND c.to_offset = tail.expected AND tail.mark = {_MARK} AND c.is_tail"""

_DROP_EMPTY: Final = sql(f"""
    DELETE FROM relatum.coverage c USING {_UNCHANGED} AND c.from_offset = c.to_offset
    RETURNING c.stream_id""")

_CLOSE_TAILS: Final = sql(f"""
    UPDATE relatum.coverage c SET is_tail = false FROM {_UNCHANGED}
    RETURNING c.stream_id""")


def advance_all(connection: sa.Connection, moves: Sequence[tuple[CoverageRow, Position]]) -> tuple[set[int], set[int]]:
    """Advance many tails, with a compare-and-set for each. See docs/adr/0002.

    Rows are locked in the order of ids, and rows that another session has locked are skipped: recorders that compete
    for streams do not wait for each other, and a long transaction for one stream delays no other stream.

    `moves` are tails as last read, each with its new last message. Returns the ids of the advanced tails, for which
    alone rows may be written, and the ids of unchanged tails that are locked. Another recorder has advanced, closed or
    replaced all other tails.
    """
    columns = {
        "ids": integers_text(row.coverage_id for row, _ in moves),
        "expected": integers_text(row.to_offset for row, _ in moves),
        "marks": integers_text(row.mark for row, _ in moves),
        "ends": integers_text(last.offset + 1 for _, last in moves),
        "offsets": integers_text(last.offset for _, last in moves),
        "fingerprints": integers_text(last.fingerprint for _, last in moves),
        "chunks_ms": integers_text(last.chunk_ms for _, last in moves),
    }
    advanced = set(connection.execute(ADVANCE_ALL, columns).scalars())
    skipped = {row.coverage_id: (row.to_offset, row.mark) for row, _ in moves if row.coverage_id not in advanced}
    if not skipped:
        return advanced, set()
    current = connection.execute(_CURRENT, {"ids": list(skipped)})
    return advanced, {coverage_id for coverage_id, *state in current if skipped[coverage_id] == tuple(state)}


def close_tails(connection: sa.Connection, rows: Sequence[CoverageRow]) -> set[int]:
    """Make tails ordinary ranges, and delete empty tails; return the ids of the streams whose tails were closed.

    Another recorder has changed the other tails.
    """
    if not rows:
        return set()
    values = {
        "ids": [row.coverage_id for row in rows],
        "expected": [row.to_offset for row in rows],
        "marks": [row.mark for row in rows],
    }
    closed = set(connection.execute(_DROP_EMPTY, values).scalars())
    return closed | set(connection.execute(_CLOSE_TAILS, values).scalars())
