"""Coverage: which offsets of a stream are recorded, for which keys. Offsets in ranges are [from, to)."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

import sqlalchemy as sa

from relatum.errors import CoverageConflict
from relatum.keys import timestamp_us
from relatum.store._tables import coverage
from relatum.wire import Position

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
