"""Rows that can only be wrong: of a stream id that no stream has, or outside of what is covered of a stream."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, Final

import sqlalchemy as sa

from relatum.limits import INTEGER_MAX, INTEGER_MIN
from relatum.recording._compare import DIFFERENCES_MAX, Difference, StreamVerified
from relatum.recording._prune import BATCH_ROWS, delete_batch
from relatum.store.catalog import key_definitions
from relatum.store.database import at_one_moment
from relatum.store.parts import may_hold_offsets
from relatum.store.tables import (
    checkpoints,
    coverage,
    group_scans,
    receipts,
    relationships,
    skips,
    streams,
    time_blocks,
)
from relatum.store.translation import translated_errors

_PLACES: Final[tuple[tuple[sa.Table, Any], ...]] = (
    (relationships, relationships.c.stream_offset),
    (time_blocks, time_blocks.c.first_offset),
    (checkpoints, checkpoints.c.last_offset),
    (receipts, receipts.c.stream_offset),
    (skips, sa.literal(0)),
    (group_scans, group_scans.c.from_offset),
)
"""Tables that name streams without a foreign key, and the offset shown. Coverage has one."""


def _unknown(table: sa.Table, known: Sequence[int]) -> sa.ColumnElement[bool]:
    """Ids between those that are known: ranges, so that an index by blocks finds them without reading the table."""
    column = table.c.stream_id
    if not known:
        return sa.true()
    gaps = [(column > low) & (column < high) for low, high in pairwise(known) if high > low + 1]
    return sa.or_(column < known[0], column > known[-1], *gaps)


def _known(connection: sa.Connection) -> list[int]:
    return list(connection.execute(sa.select(streams.c.stream_id).order_by(streams.c.stream_id)).scalars())


def find_strays(engine: sa.Engine) -> Iterator[Difference]:
    """One difference for each table and unknown stream."""
    # One moment: a stream's row is there before its other rows.
    with at_one_moment(engine) as connection:
        known = _known(connection)
        for table, place in _PLACES:
            query = sa.select(table.c.stream_id, sa.func.min(place), sa.func.max(place), sa.func.count())
            query = query.where(_unknown(table, known)).group_by(table.c.stream_id).order_by(table.c.stream_id)
            for stream_id, first, last, count in connection.execute(query):
                detail = f"{count:,} rows of the stream id {stream_id}"
                yield Difference("unknown_stream", first, table=table.name, to_offset=last + 1, detail=detail)


def verify_strays(engine: sa.Engine) -> list[StreamVerified]:
    """What belongs to no stream, as one more result; none where there is nothing."""
    result = StreamVerified("")
    for difference in find_strays(engine):
        result.add(difference)
    return [result] if result.difference_count else []


def delete_strays(engine: sa.Engine) -> None:
    """Delete them, in bounded transactions."""
    with translated_errors(), engine.connect() as connection:
        known = _known(connection)
    for table, _ in _PLACES:
        # Asked again of each row: those of a stream that was taken up since are no strays.
        gone = _unknown(table, known) & ~sa.exists().where(streams.c.stream_id == table.c.stream_id)
        while delete_batch(engine, table, gone, BATCH_ROWS) >= BATCH_ROWS:
            pass


def rows_behind(engine: sa.Engine, stream_id: int, end: int) -> Iterator[Difference]:
    """Rows behind the coverage's end and behind what was compared, or before offset 0, can only be wrong.

    A recorder may have moved the coverage since: rows and end are of one statement.
    """
    covered = sa.select(sa.func.coalesce(sa.func.max(coverage.c.to_offset), 0)).where(coverage.c.stream_id == stream_id)
    stop = sa.func.greatest(covered.scalar_subquery(), end)
    held = may_hold_offsets(stream_id, INTEGER_MIN, -1) | may_hold_offsets(stream_id, stop, INTEGER_MAX)
    for table, place in _BEHIND:
        outside = (place < 0) | (place >= stop)
        behind = [table.c.stream_id == stream_id, outside, held if table is relationships else sa.true()]
        columns = [relationships.c[name] for name in ("key_id", "value", "time_us")] if table is relationships else []
        query = sa.select(place, *columns).where(*behind).order_by(place).limit(DIFFERENCES_MAX)
        with translated_errors(), engine.connect() as connection:
            rows = connection.execute(query).all()
            names = {definition.key_id: definition.name for definition in key_definitions(connection)}
        for offset, *more in rows:
            if not more:
                yield Difference("time_wrong", offset, table="time_blocks")
            else:
                key_id, value, time_us = more
                yield Difference("unsound", offset, names.get(key_id, f"#{key_id}"), value, time_us)


_BEHIND: Final[tuple[tuple[sa.Table, Any], ...]] = (
    (relationships, relationships.c.stream_offset),
    (time_blocks, time_blocks.c.first_offset),
)


def delete_behind(connection: sa.Connection, stream_id: int, end: int) -> None:
    """Delete what `rows_behind` finds. The caller holds the stream's locks, so nothing moves that end."""
    for table, place in _BEHIND:
        connection.execute(sa.delete(table).where(table.c.stream_id == stream_id, (place < 0) | (place >= end)))
