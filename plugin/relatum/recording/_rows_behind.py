"""Rows of messages that are not there: behind the coverage's end, or before the first offset."""

from collections.abc import Iterator
from typing import Any, Final

import sqlalchemy as sa

from relatum.limits import INTEGER_MAX, INTEGER_MIN
from relatum.recording._compare import DIFFERENCES_MAX, Difference
from relatum.store import (
    coverage,
    key_definitions,
    may_hold_offsets,
    relationships,
    time_blocks,
    translated_errors,
)


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
