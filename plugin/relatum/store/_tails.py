"""The tails of many streams: moved, opened and closed together, each by a compare-and-set of its own."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert

from relatum.errors import CoverageConflict
from relatum.store._arrays import arrays
from relatum.store._coverage import COLUMNS, MARK, CoverageRow, row_of
from relatum.store._tables import coverage
from relatum.wire import Position


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
    moved = set(connection.execute(_ADVANCE_ALL, columns).scalars())
    left = [move for move in moves if move.row.coverage_id not in moved]
    if not left:
        return moved, set()
    ids = sa.literal([move.row.coverage_id for move in left], sa.ARRAY(sa.BigInteger))
    query = sa.select(coverage.c.coverage_id, coverage.c.to_offset, MARK).where(
        coverage.c.coverage_id == sa.any_(ids), coverage.c.is_tail
    )
    now = {tuple(row) for row in connection.execute(query)}
    rows = [move.row for move in left]
    return moved, {row.coverage_id for row in rows if (row.coverage_id, row.to_offset, row.mark) in now}


def _numbers(name: str) -> sa.BindParameter[Any]:
    return sa.bindparam(name, type_=sa.ARRAY(sa.BigInteger))


def _array(values: Iterable[int | None]) -> str:
    """Numbers as PostgreSQL writes an array of them: the driver takes a microsecond for each."""
    return f"{{{','.join(['NULL' if value is None else str(value) for value in values])}}}"


def _written(name: str) -> sa.Cast[Any]:
    # Of no type: PostgreSQL reads it as what it is cast to, once. A text would be cast anew for each row it is compared
    # with, where the statement is not prepared.
    return sa.cast(sa.bindparam(name, type_=sa.types.NullType()), sa.ARRAY(sa.BigInteger))


_moves: Final = arrays(
    "moves",
    id=_written("ids"),
    expected=_written("expected"),
    mark=_written("marks"),
    to_offset=_written("ends"),
    last_offset=_written("offsets"),
    last_fingerprint=_written("fingerprints"),
    last_chunk_ms=_written("chunks_ms"),
)

_free: Final = (
    sa.select(coverage.c.coverage_id)
    .where(coverage.c.coverage_id == sa.any_(_written("ids")))
    .order_by(coverage.c.coverage_id)
    .with_for_update(skip_locked=True)
    .cte("free")
    .prefix_with("MATERIALIZED")
)

_ADVANCE_ALL: Final = (
    sa.update(coverage)
    .where(
        coverage.c.coverage_id == _moves.c.id,
        coverage.c.coverage_id.in_(sa.select(_free.c.coverage_id)),
        coverage.c.to_offset == _moves.c.expected,
        _moves.c.mark == MARK,
        coverage.c.is_tail,
    )
    .values(
        to_offset=_moves.c.to_offset,
        last_offset=_moves.c.last_offset,
        last_fingerprint=_moves.c.last_fingerprint,
        last_chunk_ms=_moves.c.last_chunk_ms,
        recorded_at=sa.func.clock_timestamp(),
    )
    .returning(coverage.c.coverage_id)
)


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


_new: Final = arrays(
    "new_tails",
    stream_id=sa.bindparam("streams", type_=sa.ARRAY(sa.Integer)),
    at=sa.BigInteger,
    with_time=sa.bindparam("timed", type_=sa.ARRAY(sa.Boolean)),
    last_offset=_numbers("offsets"),
    last_fingerprint=_numbers("fingerprints"),
    last_chunk_ms=_numbers("chunks_ms"),
)

_OPEN_TAILS: Final = (
    insert(coverage)
    .from_select(
        [
            "stream_id",
            "from_offset",
            "to_offset",
            "with_time",
            "last_offset",
            "last_fingerprint",
            "last_chunk_ms",
            "key_ids",
            "is_tail",
        ],
        sa.select(
            _new.c.stream_id,
            _new.c.at,
            _new.c.at,
            _new.c.with_time,
            _new.c.last_offset,
            _new.c.last_fingerprint,
            _new.c.last_chunk_ms,
            sa.bindparam("key_ids", type_=sa.ARRAY(sa.SmallInteger)),
            sa.true(),
        ).order_by(_new.c.stream_id),
    )
    .on_conflict_do_nothing()
    .returning(*COLUMNS)
)


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


_left: Final = arrays("left_tails", id=sa.BigInteger, expected=_numbers("expected"), mark=sa.BigInteger)
_as_left: Final = sa.and_(
    coverage.c.coverage_id == _left.c.id,
    coverage.c.to_offset == _left.c.expected,
    _left.c.mark == MARK,
    coverage.c.is_tail,
)
_DROP_EMPTY: Final = (
    sa.delete(coverage).where(_as_left, coverage.c.from_offset == coverage.c.to_offset).returning(coverage.c.stream_id)
)
_CLOSE_TAILS: Final = sa.update(coverage).where(_as_left).values(is_tail=False).returning(coverage.c.stream_id)


def close_tail(connection: sa.Connection, row: CoverageRow) -> None:
    """Make the tail an ordinary range, or drop it where it holds nothing, so that a new tail can follow it.

    Raises:
        CoverageConflict: another recorder moved it meanwhile.
    """
    if not close_tails(connection, [row]):
        raise CoverageConflict("another recorder moved the tail first; nothing was written", stream="")
