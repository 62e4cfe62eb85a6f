"""Coverage: which offsets of a stream are recorded, for which keys. Offsets in ranges are [from, to).

The range that grows with its stream is its tail. Tails of many streams are moved, opened and closed together, each by a
compare-and-set of its own.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

import sqlalchemy as sa

from relatum.errors import CoverageConflict
from relatum.ids import Position
from relatum.keys import timestamp_us
from relatum.store.database import sql
from relatum.store.tables import coverage

TIME: Final = 0
"""Stands for the message's time among key ids; definitions count from 1."""

Range = tuple[int, int]


@dataclass(frozen=True, slots=True)
class CoverageRow:
    """One range of offsets and what is recorded of it."""

    coverage_id: int
    stream_id: int
    from_offset: int
    to_offset: int
    key_ids: tuple[int, ...]
    with_time: bool
    kind: str
    is_tail: bool
    last_offset: int | None
    last_fingerprint: int | None
    last_chunk_ms: int | None
    recorded_at: datetime
    over_amqp: bool = False
    """Whether release 0.4 recorded it over AMQP 0.9.1, which does not show all: it proves nothing absent."""

    @property
    def mark(self) -> int:
        """What tells it from a row of the same id: what lies at its end, or, where nothing does, when it was written.

        A standby that is promoted without the last commits gives their ids anew, to other streams too.
        """
        if self.last_fingerprint is not None:
            return self.last_fingerprint
        return timestamp_us(self.recorded_at)

    @property
    def position(self) -> Position | None:
        """What lay at the last recorded offset; None where nothing was recorded yet."""
        if self.last_offset is None or self.last_fingerprint is None:
            return None
        return Position(self.last_offset, self.last_fingerprint, self.last_chunk_ms)

    def holds(self, key_id: int) -> bool:
        """Whether the range is recorded for a key, or for `TIME`."""
        return self.kind == "recorded" and (self.with_time if key_id == TIME else key_id in self.key_ids)

    def proves(self, key_id: int) -> bool:
        """Whether what the range does not hold for a key, or for `TIME`, is not in the stream."""
        return not self.over_amqp and self.holds(key_id)


COLUMNS = [coverage.c[name] for name in CoverageRow.__dataclass_fields__]


def row_of(row: sa.Row[tuple[object, ...]]) -> CoverageRow:
    """A range, by the columns of it."""
    values = dict(row._mapping)
    values["key_ids"] = tuple(values["key_ids"])
    return CoverageRow(**values)


def coverage_of(connection: sa.Connection, stream_ids: Sequence[int]) -> list[CoverageRow]:
    """Every range of the streams, by stream and offset."""
    query = sa.select(*COLUMNS).where(
        coverage.c.stream_id == sa.any_(sa.literal(list(stream_ids), sa.ARRAY(sa.Integer)))
    )
    rows = connection.execute(query.order_by(coverage.c.stream_id, coverage.c.from_offset, coverage.c.coverage_id))
    return [row_of(row) for row in rows]


def coverage_by_stream(connection: sa.Connection, stream_ids: Sequence[int]) -> dict[int, list[CoverageRow]]:
    """Every range of each of the streams, by offset; an empty list for a stream without any."""
    found: dict[int, list[CoverageRow]] = {stream_id: [] for stream_id in stream_ids}
    for row in coverage_of(connection, stream_ids):
        found[row.stream_id].append(row)
    return found


def tail_of(connection: sa.Connection, stream_id: int) -> CoverageRow | None:
    """The range that grows as the stream grows; None where the stream was never recorded."""
    row = connection.execute(
        sa.select(*COLUMNS).where(coverage.c.stream_id == stream_id, coverage.c.is_tail)
    ).one_or_none()
    return row_of(row) if row else None


def last_position(rows: Iterable[CoverageRow]) -> Position | None:
    """What was recorded furthest on. A log grows at its end only: where that agrees, all before it does."""
    positions = [row.position for row in rows if row.position is not None]
    return max(positions, key=lambda position: position.offset, default=None)


def add_hole(connection: sa.Connection, stream_id: int, hole: Range) -> None:
    """Write down offsets that retention took before they were recorded."""
    connection.execute(
        sa.insert(coverage).values(
            stream_id=stream_id, from_offset=hole[0], to_offset=hole[1], key_ids=[], with_time=False, kind="hole"
        )
    )


@dataclass(frozen=True, slots=True)
class Filled:
    """Offsets [from_offset, to_offset) that a back-fill has dealt with, and what is recorded of them."""

    from_offset: int
    to_offset: int
    key_ids: tuple[int, ...]
    with_time: bool
    position: Position | None = None
    kind: str = "recorded"

    def joins(self, row: CoverageRow) -> bool:
        """Whether a range that somebody finished says the same of the offsets just before or behind."""
        mine = (self.kind, self.key_ids, self.with_time, False)
        return (
            not row.is_tail
            and mine == (row.kind, row.key_ids, row.with_time, row.over_amqp)
            and (row.to_offset == self.from_offset or row.from_offset == self.to_offset)
        )


def add_filled(connection: sa.Connection, stream_id: int, rows: Sequence[CoverageRow], filled: Filled) -> None:
    """Write down a range, as one with those it joins: each look-up reads the coverage, so it is kept short.

    The caller holds `lock_stream`, so that nobody else joins ranges meanwhile.

    Raises:
        CoverageConflict: a range it joins was pruned meanwhile; roll the transaction back.
    """
    joined = [row for row in rows if filled.joins(row)]
    positions = [row.position for row in joined] + [filled.position]
    position = max((one for one in positions if one), key=lambda one: one.offset, default=None)
    if joined:
        ids = sa.literal([row.coverage_id for row in joined], sa.ARRAY(sa.BigInteger))
        gone = connection.execute(sa.delete(coverage).where(coverage.c.coverage_id == sa.any_(ids)))
        if gone.rowcount != len(joined):
            raise CoverageConflict("a range was pruned meanwhile; nothing was written", stream="")
    connection.execute(
        sa.insert(coverage).values(
            stream_id=stream_id,
            from_offset=min([filled.from_offset, *(row.from_offset for row in joined)]),
            to_offset=max([filled.to_offset, *(row.to_offset for row in joined)]),
            key_ids=list(filled.key_ids),
            with_time=filled.with_time,
            kind=filled.kind,
            last_offset=position and position.offset,
            last_fingerprint=position and position.fingerprint,
            last_chunk_ms=position and position.chunk_ms,
        )
    )


def covered(rows: Iterable[CoverageRow], key_id: int) -> list[Range]:
    """The offsets recorded for a key (or `TIME`), as disjoint ranges in order. Empty ranges are left out."""
    return merged((row.from_offset, row.to_offset) for row in rows if row.holds(key_id))


def proven(rows: Iterable[CoverageRow], key_id: int) -> list[Range]:
    """The offsets of which it is known what they hold for a key (or `TIME`): those of `covered` but AMQP 0.9.1's."""
    return merged((row.from_offset, row.to_offset) for row in rows if row.proves(key_id))


def merged(ranges: Iterable[Range]) -> list[Range]:
    """Ranges joined where they touch or overlap, in order, empty ones left out."""
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
    """The parts of one range that disjoint, ordered ranges leave out."""
    gaps: list[Range] = []
    at, end = within
    for start, stop in ranges:
        if stop <= at:
            continue
        if start >= end:
            break
        if start > at:
            gaps.append((at, start))
        at = max(at, stop)
    if at < end:
        gaps.append((at, end))
    return gaps


# --- tails

_MARK: Final = "coalesce(c.last_fingerprint, (extract(epoch FROM c.recorded_at) * 1000000)::bigint)"
"""`CoverageRow.mark` in PostgreSQL."""

# The arrays come as texts, which PostgreSQL reads as what they are cast to, once.
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

_NOW: Final = sql(f"""
    SELECT c.coverage_id, c.to_offset, {_MARK} FROM relatum.coverage c
    WHERE c.coverage_id = ANY (:ids::bigint[]) AND c.is_tail""")

_OPEN_TAILS: Final = sql(f"""
    INSERT INTO relatum.coverage (stream_id, from_offset, to_offset, with_time, last_offset, last_fingerprint,
        last_chunk_ms, key_ids, is_tail)
    SELECT stream_id, at, at, with_time, last_offset, last_fingerprint, last_chunk_ms, :key_ids::smallint[], true
    FROM unnest(:streams::integer[], :ats::bigint[], :timed::boolean[], :offsets::bigint[], :fingerprints::bigint[],
        :chunks_ms::bigint[]) AS new(stream_id, at, with_time, last_offset, last_fingerprint, last_chunk_ms)
    ORDER BY stream_id
    ON CONFLICT DO NOTHING
    RETURNING {", ".join(CoverageRow.__dataclass_fields__)}""")

_AS_LEFT: Final = f"""unnest(:ids::bigint[], :expected::bigint[], :marks::bigint[]) AS tail(id, expected, mark)
    WHERE c.coverage_id = tail.id AND c.to_offset = tail.expected AND tail.mark = {_MARK} AND c.is_tail"""

_DROP_EMPTY: Final = sql(f"""
    DELETE FROM relatum.coverage c USING {_AS_LEFT} AND c.from_offset = c.to_offset
    RETURNING c.stream_id""")

_CLOSE_TAILS: Final = sql(f"""
    UPDATE relatum.coverage c SET is_tail = false FROM {_AS_LEFT}
    RETURNING c.stream_id""")


@dataclass(frozen=True, slots=True)
class TailMove:
    """One stream's part of a commit of many: its tail, as it was left, grows up to an offset."""

    row: CoverageRow
    to_offset: int
    position: Position

    @property
    def moved(self) -> CoverageRow:
        """The tail once it has grown."""
        row, at = self.row, self.position
        # Not by `replace`, which takes as long as all else of a commit that is done for each stream.
        return CoverageRow(
            row.coverage_id,
            row.stream_id,
            row.from_offset,
            self.to_offset,
            row.key_ids,
            row.with_time,
            row.kind,
            row.is_tail,
            at.offset,
            at.fingerprint,
            at.chunk_ms,
            row.recorded_at,
            row.over_amqp,
        )


def advance_all(connection: sa.Connection, moves: Sequence[TailMove]) -> tuple[set[int], set[int]]:
    """Move the ends of many tails, each by a compare-and-set of its own: the heart of promise 2.

    Who loses one race loses nothing else.

    Rows are locked in one order, and those that somebody else has locked are left for the next time: two recorders that
    fight over the same streams do not wait for each other, and a long transaction about one stream holds up no other.

    Args:
        connection: The transaction that then writes the rows of those that were moved, and of no others.
        moves: At most one for each tail.

    Returns:
        The ids of the tails that were moved; and of those that stand where they stood, and are locked just now. All
        others were moved, closed or replaced by another recorder.
    """
    columns = {
        "ids": _array([move.row.coverage_id for move in moves]),
        "expected": _array([move.row.to_offset for move in moves]),
        "marks": _array([move.row.mark for move in moves]),
        "ends": _array([move.to_offset for move in moves]),
        "offsets": _array([move.position.offset for move in moves]),
        "fingerprints": _array([move.position.fingerprint for move in moves]),
        "chunks_ms": _array([move.position.chunk_ms for move in moves]),
    }
    moved = set(connection.execute(ADVANCE_ALL, columns).scalars())
    left = [move for move in moves if move.row.coverage_id not in moved]
    if not left:
        return moved, set()
    ids = {"ids": [move.row.coverage_id for move in left]}
    now = {tuple(row) for row in connection.execute(_NOW, ids)}
    rows = [move.row for move in left]
    return moved, {row.coverage_id for row in rows if (row.coverage_id, row.to_offset, row.mark) in now}


def _array(values: Iterable[int | None]) -> str:
    """Numbers as PostgreSQL writes an array of them: the driver takes a microsecond for each."""
    return f"{{{','.join(['NULL' if value is None else str(value) for value in values])}}}"


def open_tails(connection: sa.Connection, tails: Sequence["NewTail"], key_ids: Iterable[int]) -> list[CoverageRow]:
    """New tails of many streams in one statement; those of streams that have one already are left out."""
    if not tails:
        return []
    positions = [tail.position for tail in tails]
    values = {
        "streams": [tail.stream_id for tail in tails],
        "ats": [tail.at for tail in tails],
        "timed": [tail.with_time for tail in tails],
        "offsets": [at and at.offset for at in positions],
        "fingerprints": [at and at.fingerprint for at in positions],
        "chunks_ms": [at and at.chunk_ms for at in positions],
        "key_ids": sorted(key_ids),
    }
    return [row_of(row) for row in connection.execute(_OPEN_TAILS, values)]


def open_tail(connection: sa.Connection, tail: "NewTail", key_ids: Iterable[int]) -> CoverageRow:
    """One new tail.

    Raises:
        CoverageConflict: the stream has one already.
    """
    opened = open_tails(connection, [tail], key_ids)
    if not opened:
        raise CoverageConflict("another recorder opened the stream's tail first", stream="")
    return opened[0]


@dataclass(frozen=True, slots=True)
class NewTail:
    """A tail to be opened at an offset; `position` is what lies before it."""

    stream_id: int
    at: int
    with_time: bool
    position: Position | None = None


def close_tails(connection: sa.Connection, rows: Sequence[CoverageRow]) -> set[int]:
    """Make tails ordinary ranges, or drop those that hold nothing; gives the streams of those that were closed.

    The others were moved by another recorder meanwhile.
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


def close_tail(connection: sa.Connection, row: CoverageRow) -> None:
    """Make the tail an ordinary range, or drop it where it holds nothing, so that a new tail can follow it.

    Raises:
        CoverageConflict: another recorder moved it meanwhile.
    """
    if not close_tails(connection, [row]):
        raise CoverageConflict("another recorder moved the tail first; nothing was written", stream="")
