"""One transaction for one batch: the rows and the coverage move together, or neither does."""

from typing import Final

import sqlalchemy as sa

from relatum.recording._batch import Batch
from relatum.store import (
    CoverageRow,
    Position,
    advance,
    checkpoints,
    copy_lines,
    copy_text,
    count_skips,
    translated_errors,
)

CHECKPOINT_OFFSETS: Final = 10_000
"""Offsets between two checkpoints: how far back, at most, rows are written again after a stream lost its tail."""


def commit_batch(
    engine: sa.Engine, row: CoverageRow, batch: Batch, high_us: int | None, *, checkpoint: bool = False
) -> tuple[CoverageRow, int | None]:
    """Write a batch's rows and move the coverage over them, in one transaction.

    Args:
        engine: The database.
        row: The range the batch continues, as we left it.
        batch: At least one message.
        high_us: The greatest time recorded of the stream before.
        checkpoint: Write down what lies at the batch's end.

    Returns:
        The range as it is now, and the greatest time.

    Raises:
        CoverageConflict: another recorder was first; nothing was written.
        DatabaseUnavailable: the commit's outcome is not known; read the coverage again before going on.
    """
    with translated_errors(), engine.begin() as connection:
        # First, so that a recorder that lost the race has written nothing it must roll back.
        row = advance(connection, row, batch.last_offset + 1, batch.position())
        high_us = write_rows(connection, row.stream_id, batch, high_us=high_us)
        count_skips(connection, row.stream_id, batch.skips)
        if checkpoint:
            add_checkpoint(connection, row.stream_id, batch.position())
    return row, high_us


def write_rows(connection: sa.Connection, stream_id: int, batch: Batch, *, high_us: int | None) -> int | None:
    """Write a batch's rows into their tables, in the caller's transaction; gives the greatest time recorded now.

    Waits for no lock that another's rows take. The counters of what was skipped are the caller's to move: they are
    single rows, and who moves them first makes all others wait until the transaction ends.
    """
    copy_lines(connection, "relationships", batch.lines)
    blocks, high_us = batch.time_blocks(high_us)
    copy_lines(
        connection,
        "time_blocks",
        [
            f"{block.min_us}\t{block.max_us}\t{block.first_offset}\t{block.last_offset}"
            f"\t{stream_id}\t{block.width_class}\n"
            for block in blocks
        ],
    )
    copy_lines(
        connection,
        "receipts",
        [f"{copy_text(message_id)}\t{stream_id}\t{offset}\n" for message_id, offset in batch.receipts],
    )
    return high_us


def add_checkpoint(connection: sa.Connection, stream_id: int, position: Position) -> None:
    """Write down what lies at an offset."""
    connection.execute(
        sa.insert(checkpoints).values(
            stream_id=stream_id,
            last_offset=position.offset,
            fingerprint=position.fingerprint,
            chunk_ms=position.chunk_ms,
        )
    )
