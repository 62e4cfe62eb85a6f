"""Commits: the follower's records fill batches, and one thread writes the batches of all streams in one transaction."""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, Final

import sqlalchemy as sa

from relatum import otel
from relatum.common.waiting import Threads
from relatum.errors import CoverageConflict, DatabaseUnavailable
from relatum.otel import LINKS_MAX, Description, Part, Span
from relatum.reading import Message, Position, RecordBatch
from relatum.reading.following import Event, Records
from relatum.recording.batch import Batch, readable, time_blocks, width_class
from relatum.store.coverage import CoverageRow, advance_all
from relatum.store.database import transaction
from relatum.store.parts import copy_rows
from relatum.store.rows import copy_lines, copy_number, copy_text, count_skips

if TYPE_CHECKING:
    from relatum.recording.recorder_group import RecorderGroup
    from relatum.recording.stream_recording import OpenTail

logger = logging.getLogger("relatum.recorder")

# --- the transaction --------------------------------------------------------------------------------------------------


def add_links(batch: Batch, part: RecordBatch) -> None:
    """Link a batch to the publishers' spans of its first messages. `part` was added last."""
    left = LINKS_MAX - (batch.messages - len(part.offsets))
    if left > 0:
        records = zip(part.offsets, part.records, strict=True)
        batch.links += otel.links_of((Message.from_record(part.stream, *record) for record in records), left)


def recording(named: Sequence[tuple[str, Batch]], name: str = "record") -> AbstractContextManager[Span]:
    """Return the span of a transaction that writes batches; without tracing, a span without effect."""

    def describe() -> Description:
        batches = [batch for _, batch in named]
        links: list[Any] = list(chain.from_iterable(batch.links for batch in batches))
        attributes: dict[str, str | int] = {
            "messaging.system": "rabbitmq",
            "messaging.operation.name": name,
            "messaging.operation.type": "process",
            "messaging.batch.message_count": sum(batch.messages for batch in batches),
            "relatum.rows": sum(len(batch.lines) for batch in batches),
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
"""Offsets after which a commit adds a checkpoint. A stream that lost its tail is recorded again from a checkpoint."""


@dataclass(slots=True, eq=False)
class Share:
    """One stream's part of a commit. A successful commit advances `row` and `high_us`."""

    row: CoverageRow
    batch: Batch
    high_us: int | None = None
    """The greatest time recorded since the tail was opened. Affects the size of the time index, but no result."""
    checkpoint: bool = False
    is_committed: bool = False
    is_blocked: bool = False
    """Whether another session had locked the range at the last commit. The next commit locks it before sending rows."""


class _LostRace(Exception):
    """Rolls the transaction back, since a range could not be advanced."""


def commit_shares(engine: sa.Engine, shares: Sequence[Share]) -> None:
    """Write the rows of many streams' batches and extend their coverage, in one transaction.

    The rows are sent before the ranges are locked: PostgreSQL ends a suspended process's transaction and locks, except
    while it waits for COPY's rows. If a range cannot be advanced, the transaction is rolled back. A second transaction
    advances the ranges first, and then writes only the rows of streams whose ranges it advanced.
    """
    try:
        _commit(engine, shares, rows_first=not any(share.is_blocked for share in shares))
    except _LostRace:
        _commit(engine, shares, rows_first=False)


def _commit(engine: sa.Engine, shares: Sequence[Share], *, rows_first: bool) -> None:
    moves = [(share.row, share.batch.position()) for share in shares]
    with transaction(engine) as connection:
        times = _write(connection, shares) if rows_first else []
        moved, held_up = advance_all(connection, moves)
        advanced = [share for share in shares if share.row.coverage_id in moved]
        if not rows_first:
            times = _write(connection, advanced)
        elif len(advanced) < len(shares):
            raise _LostRace
        # The keys of different batches differ, since they contain the stream.
        count_skips(connection, {key: count for share in advanced for key, count in share.batch.skips.items()})
        marked = {share.row.coverage_id for share in advanced if share.checkpoint}
        add_checkpoints(connection, [(row.stream_id, last) for row, last in moves if row.coverage_id in marked])
    for share, high_us in zip(advanced, times, strict=True):
        share.high_us = high_us
    for (row, last), share in zip(moves, shares, strict=True):
        share.is_blocked = row.coverage_id in held_up
        share.is_committed = row.coverage_id in moved
        if share.is_committed:
            share.row = row._replace(to_offset=last.offset + 1).known_by(last)


def _write(connection: sa.Connection, shares: Sequence[Share]) -> list[int | None]:
    return write_rows(connection, [(share.batch, share.high_us) for share in shares])


def write_rows(connection: sa.Connection, batches: Sequence[tuple[Batch, int | None]]) -> list[int | None]:
    """Write batches' rows in the caller's transaction, and return the greatest time of each stream.

    Never waits for other writers' locks. Therefore the caller updates the counters of skipped values: each is one row,
    so the first transaction that updates it blocks all others that do, until it ends.
    """
    copy_rows(connection, chain.from_iterable(batch.lines for batch, _ in batches))
    blocks: list[str] = []
    receipts: list[str] = []
    highest: list[int | None] = []
    for batch, high_us in batches:
        stream_id = batch.stream_id
        found, high_us = time_blocks(batch.time_offsets, batch.times, high_us)
        highest.append(high_us)
        blocks.extend(
            f"{block.min_us}\t{block.max_us}\t{block.first_offset}\t{block.last_offset}"
            f"\t{stream_id}\t{width_class(block.max_us - block.min_us)}\n"
            for block in found
        )
        receipts.extend(f"{copy_text(message_id)}\t{stream_id}\t{offset}\n" for message_id, offset in batch.receipts)
    copy_lines(connection, "time_blocks", blocks)
    copy_lines(connection, "receipts", receipts)
    return highest


def add_checkpoints(connection: sa.Connection, positions: Sequence[tuple[int, Position]]) -> None:
    """Store checkpoints: the last positions of streams, with the streams' ids."""
    lines = [f"{id_}\t{at.offset}\t{at.fingerprint}\t{copy_number(at.chunk_ms)}\n" for id_, at in positions]
    copy_lines(connection, "checkpoints", lines)


# --- the committer ----------------------------------------------------------------------------------------------------

LOCK_RETRY_S: Final = 0.05
"""Seconds before a stream's commit is retried if another session had locked its range."""


class Committer:
    """Fills batches in the loop, and commits them in a separate thread.

    All batches that are ready when a transaction ends are committed in the next one. With one stream, that is a single
    message or a batch; with a thousand streams, a few hundred small batches, which the follower gathers. If PostgreSQL
    refuses a transaction, each stream is committed separately, so that only the streams at fault fail.

    `on_receipts`: Called after each commit of receipts.
    """

    def __init__(self, group: "RecorderGroup", engine: sa.Engine, on_receipts: Callable[[], None]) -> None:
        self._group = group
        self._loop = group.loop
        self._threads = Threads(1, "relatum-recorder-commits")
        self._engine = engine
        self._on_receipts = on_receipts
        self._ready: dict[OpenTail, None] = {}
        self._committing = 0
        self._task: asyncio.Task[None] | None = None

    # --- events of the follower ---------------------------------------------------------------------------------------

    def on_event(self, event: Event) -> None:
        """Handle an event of the follower. Records of one iteration of the loop are committed together."""
        if self._group.stopping.is_set():
            return
        if isinstance(event, Records):
            self._add_records(event)
        else:
            self._group.on_event(event)

    def _add_records(self, event: Records) -> None:
        stream = self._group.stream_of(event.stream, event.following)
        if stream is None or stream.tail is None or not stream.is_read:
            # Ignore the records: a stream that is not open will be read again from the end of its coverage.
            self._group.follower.done(event)
            return
        tail = stream.tail
        tail.unreleased.append(event)
        try:
            self._extract(tail, event.batch)
        except Exception as error:  # noqa: BLE001 - a defect of one stream stops no other
            stream.failed(tail, error)
        if tail.is_closing or not tail.is_full(self._busy_count):
            stream.grant_credit(tail)

    def _extract(self, tail: "OpenTail", batch: RecordBatch) -> None:
        for part, reason in readable(batch):
            if reason is not None:
                tail.stream.skip_unreadable(tail.opened.stream, part.last_offset + 1, reason)
                return
            tail.add(part)
            tail.stream.progress.read(part.last_offset)
            if tail.committing is None:
                self._commit_soon(tail)

    # --- commits ------------------------------------------------------------------------------------------------------

    def _commit_soon(self, tail: "OpenTail") -> None:
        """Commit a tail's batch in the next transaction. The task that commits is started unless it is running."""
        self._ready[tail] = None
        if self._task is None:
            self._task = self._loop.spawn(self._run())

    @property
    def _busy_count(self) -> int:
        """The number of streams that have something to commit."""
        return len(self._ready) + self._committing

    async def finish(self) -> None:
        """Commit what is ready, then end the thread."""
        if self._task is not None:
            await asyncio.wait([self._task])
        self._threads.shutdown()

    async def _run(self) -> None:
        try:
            while self._ready:
                ready, self._ready = self._ready, {}
                await self._commit([tail for tail in ready if not tail.is_over])
        finally:
            self._task, self._committing = None, 0

    async def _commit(self, tails: "Sequence[OpenTail]") -> None:
        if not tails:
            return
        self._committing = len(tails)
        for tail in tails:
            tail.take()
            # After a lock conflict, the next batch may be full already.
            if not tail.is_full(self._busy_count):
                tail.stream.grant_credit(tail)
        try:
            errors = await self._loop.ask(self._commit_in_thread, tails, threads=self._threads)
        except Exception as error:  # noqa: BLE001 - becomes the error of each stream
            errors = [error] * len(tails)
        has_receipts = False
        for tail, cause in zip(tails, errors, strict=True):
            if cause is not None:
                tail.stream.failed(tail, cause)
            elif tail.is_blocked:
                self._loop.call_later(LOCK_RETRY_S, self._commit_soon, tail)
            else:
                has_receipts |= bool(tail.batch.receipts)
                tail.committed()
                if tail.filling.messages:
                    self._commit_soon(tail)
        if has_receipts:
            # Only now: if a process gets its receipt and closes, `left` must no longer count the message.
            self._on_receipts()

    # --- the thread that commits --------------------------------------------------------------------------------------

    def _commit_in_thread(self, tails: "Sequence[OpenTail]") -> list[Exception | None]:
        """Commit batches; return each stream's error, or None."""
        started_at = time.perf_counter()
        with recording([(tail.stream.name, tail.batch) for tail in tails]) as span:
            errors = self._outcomes(tails, span)
        self._group.batch_s.observe(time.perf_counter() - started_at)
        return errors

    def _outcomes(self, tails: "Sequence[OpenTail]", span: Span) -> list[Exception | None]:
        try:
            commit_shares(self._engine, tails)
        except Exception as error:  # noqa: BLE001 - becomes the error of the streams at fault
            if len(tails) > 1 and not isinstance(error, DatabaseUnavailable):
                return [outcome for tail in tails for outcome in self._outcomes([tail], span)]
            span.failed(error)
            return [error] * len(tails)
        errors: list[Exception | None] = []
        for tail in tails:
            lost = None
            if not tail.is_committed and not tail.is_blocked:
                message = f"another recorder moved the tail from {tail.row.to_offset} first; nothing was written"
                lost = CoverageConflict(message, stream=tail.stream.name)
                span.failed(lost)
            errors.append(lost)
        return errors
