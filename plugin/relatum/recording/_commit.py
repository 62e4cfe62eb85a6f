"""One transaction for the batches of many streams: a stream's rows and its coverage move together, or neither does.

Each stream's coverage moves by a compare-and-set of its own, and only the rows of those that moved are written. See
docs/adr/0015.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import sqlalchemy as sa

from relatum.recording._batch import Batch
from relatum.store import (
    CoverageRow,
    TailMove,
    advance_all,
    copy_lines,
    copy_number,
    copy_rows,
    copy_text,
    count_skips,
    translated_errors,
)

CHECKPOINT_OFFSETS: Final = 10_000
"""Offsets between two checkpoints: how far back, at most, rows are written again after a stream lost its tail."""


@dataclass(slots=True)
class Share:
    """What one stream has in a commit."""

    row: CoverageRow
    batch: Batch
    high_us: int | None
    checkpoint: bool = False
    is_committed: bool = field(default=False, init=False)
    is_held_up: bool = field(default=False, init=False)


def commit_shares(engine: sa.Engine, shares: Sequence[Share]) -> None:
    """Write the rows of many streams' batches and move their coverage over them, in one transaction."""
    moves = [TailMove(share.row, share.batch.last_offset + 1, share.batch.position()) for share in shares]
    with translated_errors(), engine.begin() as connection:
        # First, so that of a stream whose race is lost nothing is written.
        moved, held_up = advance_all(connection, moves)
        won = [share for share in shares if share.row.coverage_id in moved]
        times = write_rows(connection, [(share.batch, share.high_us) for share in won])
        skips: Counter[tuple[int, int, str]] = Counter()
        for share in won:
            if share.batch.skips:
                skips.update(share.batch.skips)
        count_skips(connection, skips)
        marked = {share.row.coverage_id for share in won if share.checkpoint}
        add_checkpoints(connection, [move for move in moves if move.row.coverage_id in marked])
    for share, high_us in zip(won, times, strict=True):
        share.high_us = high_us
    for move, share in zip(moves, shares, strict=True):
        share.is_held_up = move.row.coverage_id in held_up
        share.is_committed = move.row.coverage_id in moved
        if share.is_committed:
            share.row = move.moved


def write_rows(connection: sa.Connection, batches: Sequence[tuple[Batch, int | None]]) -> list[int | None]:
    """Write batches' rows into their tables, in the caller's transaction.

    Waits for no lock that another's rows take. The counters of what was skipped are the caller's to move: they are
    single rows, and who moves them first makes all others wait until the transaction ends.
    """
    copy_rows(connection, Batch.lines([batch for batch, _ in batches]))
    blocks: list[str] = []
    receipts: list[str] = []
    highest: list[int | None] = []
    for batch, high_us in batches:
        stream_id = batch.stream_id
        found, high_us = batch.time_blocks(high_us)
        highest.append(high_us)
        blocks.extend(
            f"{block.min_us}\t{block.max_us}\t{block.first_offset}\t{block.last_offset}"
            f"\t{stream_id}\t{block.width_class}\n"
            for block in found
        )
        receipts.extend(f"{copy_text(message_id)}\t{stream_id}\t{offset}\n" for message_id, offset in batch.receipts)
    copy_lines(connection, "time_blocks", blocks)
    copy_lines(connection, "receipts", receipts)
    return highest


def add_checkpoints(connection: sa.Connection, moves: Sequence[TailMove]) -> None:
    """Write down what lies at the ends of some tails."""
    places = [(move.row.stream_id, move.position) for move in moves]
    lines = [f"{id_}\t{at.offset}\t{at.fingerprint}\t{copy_number(at.chunk_ms)}\n" for id_, at in places]
    copy_lines(connection, "checkpoints", lines)
