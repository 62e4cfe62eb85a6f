"""Commits: one thread writes the batches of all streams of a process in one transaction."""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final

import sqlalchemy as sa

from relatum import otel
from relatum.otel import LINKS_MAX, Description, Part, Span
from relatum.reading import Message, Position, RecordBatch
from relatum.recording.batch import Batch
from relatum.store.coverage import CoverageRow, advance_all
from relatum.store.database import transaction
from relatum.store.parts import copy_rows
from relatum.store.rows import copy_lines, copy_number, copy_text, count_skips


def add_links(batch: Batch, parts: Sequence[RecordBatch]) -> None:
    """Add links to the spans that sent a batch's first messages."""
    left = LINKS_MAX - (batch.messages - sum(len(part.offsets) for part in parts))
    if left > 0:
        batch.links += otel.links_of(chain.from_iterable(map(_messages_of, parts)), left)


def _messages_of(part: RecordBatch) -> Iterator[Message]:
    for offset, raw in zip(part.offsets, part.records, strict=True):
        if isinstance(raw, bytes):
            yield Message.from_record(part.stream, offset, raw)


def recording(named: Sequence[tuple[str, Batch]], name: str = "record") -> AbstractContextManager[Span]:
    """Return a span around the transaction that writes batches; it does nothing without tracing."""

    def describe() -> Description:
        batches = [batch for _, batch in named]
        links: list[Any] = list(chain.from_iterable(batch.links for batch in batches))
        attributes: dict[str, str | int] = {
            "messaging.system": "rabbitmq",
            "messaging.operation.name": name,
            "messaging.operation.type": "process",
            "messaging.batch.message_count": sum(batch.messages for batch in batches),
            "relatum.rows": sum(batch.rows for batch in batches),
            "relatum.stream_count": len(named),
            "db.system.name": "postgresql",
            "db.operation.name": "COPY",
        }
        if len(named) > 1:
            return Description(name, attributes, "consumer", links[:LINKS_MAX])
        stream = named[0][0]
        attributes["messaging.destination.name"] = stream
        return Description(f"{name} {stream}", attributes, "consumer", links)

    return otel.span(Part.RECORDER, describe)


CHECKPOINT_OFFSETS: Final = 10_000
"""Offsets between two checkpoints: at most so many are recorded again after a stream lost its tail."""


@dataclass(slots=True)
class Share:
    """One stream's part of a commit, which advances `row` and `high_us` if it succeeds."""

    row: CoverageRow
    batch: Batch
    high_us: int | None
    """The greatest time recorded so far."""
    checkpoint: bool = False
    is_committed: bool = False
    is_held_up: bool = False
    """Whether another session held the range's lock at the last commit: then rows are sent after it is locked."""


class _Raced(Exception):
    """Some range could not be advanced: roll back."""


def commit_shares(engine: sa.Engine, shares: Sequence[Share]) -> None:
    """Write the rows of many streams' batches and extend their coverage, in one transaction.

    The rows are sent before the ranges are locked: PostgreSQL ends the transaction of a suspended process, but not
    while it waits for rows of COPY. If a range cannot be advanced, all is rolled back and committed again with the
    ranges first; streams that lost the race are then left out.
    """
    try:
        _commit(engine, shares, rows_first=not any(share.is_held_up for share in shares))
    except _Raced:
        _commit(engine, shares, rows_first=False)


def _commit(engine: sa.Engine, shares: Sequence[Share], *, rows_first: bool) -> None:
    moves = [(share.row, share.batch.position()) for share in shares]
    with transaction(engine) as connection:
        times = _write(connection, shares) if rows_first else []
        moved, held_up = advance_all(connection, moves)
        won = [share for share in shares if share.row.coverage_id in moved]
        if not rows_first:
            times = _write(connection, won)
        elif len(won) < len(shares):
            raise _Raced
        skips: Counter[tuple[int, int, str]] = Counter()
        for share in won:
            if share.batch.skips:
                skips.update(share.batch.skips)
        count_skips(connection, skips)
        marked = {share.row.coverage_id for share in won if share.checkpoint}
        add_checkpoints(connection, [(row.stream_id, last) for row, last in moves if row.coverage_id in marked])
    for share, high_us in zip(won, times, strict=True):
        share.high_us = high_us
    for (row, last), share in zip(moves, shares, strict=True):
        share.is_held_up = row.coverage_id in held_up
        share.is_committed = row.coverage_id in moved
        if share.is_committed:
            share.row = row.up_to(last)


def _write(connection: sa.Connection, shares: Sequence[Share]) -> list[int | None]:
    return write_rows(connection, [(share.batch, share.high_us) for share in shares])


def write_rows(connection: sa.Connection, batches: Sequence[tuple[Batch, int | None]]) -> list[int | None]:
    """Write batches' rows into their tables, in the caller's transaction.

    Never waits for other writers' locks. The caller updates the counters of skipped values: they are single rows, and
    the first transaction to update them blocks all others until it ends.
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


def add_checkpoints(connection: sa.Connection, places: Sequence[tuple[int, Position]]) -> None:
    """Store the last positions of some streams, by stream id."""
    lines = [f"{id_}\t{at.offset}\t{at.fingerprint}\t{copy_number(at.chunk_ms)}\n" for id_, at in places]
    copy_lines(connection, "checkpoints", lines)
