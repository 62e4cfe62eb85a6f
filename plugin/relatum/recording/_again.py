"""Reading again by the stream protocol what AMQP 0.9.1 recorded, which does not show compressed batches or times.

A part's rows are replaced and its coverage changes hands in one transaction: no look-up ever sees them missing or
doubled, and whoever is killed leaves things as they were.
"""

from collections.abc import Sequence
from typing import Final

import sqlalchemy as sa

from relatum.errors import CoverageConflict
from relatum.recording._batch import Batch
from relatum.recording._commit import write_rows
from relatum.store import (
    CoverageRow,
    Filled,
    add_filled,
    coverage,
    coverage_of,
    group_scans,
    lock_stream,
    relationships,
    translated_errors,
)

_SCANS: Final = sa.text("LOCK TABLE relatum.group_scans IN SHARE ROW EXCLUSIVE MODE")


def replace_rows(
    engine: sa.Engine, row: CoverageRow, batch: Batch, to_offset: int, key_ids: Sequence[int], *, with_time: bool
) -> CoverageRow | None:
    """Put what the stream protocol showed in the place of what AMQP 0.9.1 did, from a range's begin up to an offset."""
    stream_id = row.stream_id
    with translated_errors(), engine.begin() as connection:
        lock_stream(connection, stream_id)
        rows = coverage_of(connection, [stream_id])
        if row not in rows or row.is_tail:
            raise CoverageConflict("another recorder changed the range first; nothing was written", stream="")
        of_part = (
            (relationships.c.stream_id == stream_id)
            & (relationships.c.stream_offset >= row.from_offset)
            & (relationships.c.stream_offset < to_offset)
        )
        mine = relationships.c.key_id == sa.any_(sa.literal(list(row.key_ids), sa.ARRAY(sa.SmallInteger)))
        before = connection.execute(sa.delete(relationships).where(of_part, mine)).rowcount
        write_rows(connection, [(batch, None)])
        if batch.rows != before:
            _scan_again(connection, stream_id, row.from_offset, to_offset)
        left = _carve(connection, row, to_offset)
        position = batch.position() if batch.messages else None
        others = [each for each in rows if each.coverage_id != row.coverage_id]
        filled = Filled(row.from_offset, to_offset, tuple(sorted(key_ids)), with_time, position)
        add_filled(connection, stream_id, others, filled)
    return left


def _carve(connection: sa.Connection, row: CoverageRow, to_offset: int) -> CoverageRow | None:
    """Leave of the range what lies behind an offset."""
    this = coverage.c.coverage_id == row.coverage_id
    if to_offset >= row.to_offset:
        connection.execute(sa.delete(coverage).where(this))
        return None
    connection.execute(sa.update(coverage).where(this).values(from_offset=to_offset))
    rows = coverage_of(connection, [row.stream_id])
    return next(each for each in rows if each.coverage_id == row.coverage_id)


def _scan_again(connection: sa.Connection, stream_id: int, start: int, end: int) -> None:
    """Let consumers of groups look again at what they went through without the messages that came to light."""
    connection.execute(_SCANS)
    scanned = (
        (group_scans.c.stream_id == stream_id) & (group_scans.c.from_offset < end) & (group_scans.c.to_offset > start)
    )
    connection.execute(sa.delete(group_scans).where(scanned))
