"""The half of a recorder that writes: while one batch is committed, the next one is filled.

Two batches exist at most, the one being committed and the one being filled, so memory is bounded at any backlog. A
batch is handed over as soon as the writer is free: a lone message is committed at once, and under load batches grow
to what one transaction's time lets in.
"""

import logging
import threading
import time
from collections.abc import Callable
from typing import Final

import sqlalchemy as sa

from relatum.errors import StreamReplaced
from relatum.reading import RecordBatch
from relatum.recording._batch import Batch
from relatum.recording._commit import CHECKPOINT_OFFSETS, commit_batch
from relatum.recording._extract import Extractor
from relatum.recording._lease import RENEW_S, take
from relatum.recording._metrics import RecorderMetrics
from relatum.recording._opening import Opened
from relatum.recording._prune import prune_expired, prune_receipts
from relatum.store import CoverageRow, StreamRow, current_stream, key_definitions, translated_errors

logger = logging.getLogger("relatum.recorder")

RecordedListener = Callable[[str, list[tuple[str, int]]], None]
"""Called after a commit with the stream's name and the (AMQP `message_id`, offset) pairs somebody waits for."""

PRUNE_S: Final = 10.0
"""Seconds between looks for rows to prune; while there are some, a batch a second is deleted."""

_CHECKPOINT_S: Final = 30.0
"""Seconds between two checkpoints of a slow stream."""


class Writer:
    """Commits what the reader hands it, in a thread of its own, and keeps the lease and the definitions fresh.

    Args:
        engine: The database.
        opened: Where recording goes on.
        holder: Who holds the lease.
        metrics: Where to count.
        on_recorded: Called after each commit that holds receipts.
    """

    def __init__(
        self,
        engine: sa.Engine,
        opened: Opened,
        holder: str,
        metrics: RecorderMetrics,
        on_recorded: RecordedListener | None,
    ) -> None:
        self._engine = engine
        self._stream: StreamRow = opened.stream
        self._row: CoverageRow = opened.tail
        self._definitions = opened.definitions
        self._high_us = opened.high_us
        self._extractor = Extractor(opened.definitions)
        self._holder = holder
        self._metrics = metrics
        self._on_recorded = on_recorded
        self._changed = threading.Condition()
        self._filling = self._new_batch()
        self._finishing = False
        self._error: Exception | None = None
        self._checkpoint_offset = -1
        self._checkpoint_at = 0.0
        self._renewed_at = self._pruned_at = time.monotonic()
        self._pruned_to = 0
        self.first_offset = opened.stream.first_offset or 0
        self.must_reopen = False
        self.recorded_to = opened.tail.to_offset - 1
        self._thread = threading.Thread(target=self._run, name=f"relatum-writer-{self._stream.name}", daemon=True)
        self._thread.start()

    def _new_batch(self) -> Batch:
        return Batch(self._stream.stream_id, self._extractor, with_time=self._row.with_time)

    def put(self, records: RecordBatch) -> None:
        """Take the records of a chunk; waits while a full batch waits to be committed.

        Raises:
            RelatumError: what went wrong with a commit; nothing after it will be written.
        """
        with self._changed:
            while self._filling.is_full and self._error is None:
                self._changed.wait(1.0)
            self._raise_error()
            # Extraction happens under the lock: the writer only takes it for a moment, to swap batches.
            self._filling.add(records)
            self._changed.notify_all()

    def check(self) -> None:
        """Raise what went wrong with a commit, if anything did."""
        with self._changed:
            self._raise_error()

    def finish(self) -> None:
        """Commit what was put and end the thread. Errors of a commit are raised here too."""
        with self._changed:
            self._finishing = True
            self._changed.notify_all()
        self._thread.join()
        self._raise_error()

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            while (batch := self._next_batch()) is not None:
                if batch.messages:
                    self._commit(batch)
                if time.monotonic() - self._renewed_at >= RENEW_S:
                    self._housekeeping()
        except Exception as error:  # noqa: BLE001 - handed to the reader, which raises it
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _next_batch(self) -> Batch | None:
        """The batch to commit now, an empty one when it is time for housekeeping, None at the end."""
        with self._changed:
            if not self._filling.messages and not self._finishing:
                self._changed.wait(RENEW_S / 2)
            batch = self._filling
            if batch.messages:
                self._filling = self._new_batch()
                self._changed.notify_all()
                return batch
            return None if self._finishing else batch

    def _commit(self, batch: Batch) -> None:
        started = time.perf_counter()
        checkpoint = self._checkpoint_due(batch)
        self._row, self._high_us = commit_batch(self._engine, self._row, batch, self._high_us, checkpoint=checkpoint)
        self.recorded_to = batch.last_offset
        self._count(batch, time.perf_counter() - started)
        if self._on_recorded is not None and batch.receipts:
            self._on_recorded(self._stream.name, batch.receipts)

    def _checkpoint_due(self, batch: Batch) -> bool:
        now = time.monotonic()
        due = (
            batch.last_offset - self._checkpoint_offset >= CHECKPOINT_OFFSETS
            or now - self._checkpoint_at >= _CHECKPOINT_S
        )
        if due:
            self._checkpoint_offset, self._checkpoint_at = batch.last_offset, now
        return due

    def _count(self, batch: Batch, seconds: float) -> None:
        stream = self._stream.name
        self._metrics.batch_s.labels(stream).observe(seconds)
        self._metrics.messages.labels(stream).inc(batch.messages)
        self._metrics.rows.labels(stream).inc(batch.rows)
        self._metrics.recorded.labels(stream).set(batch.last_offset)
        for (_, reason), count in batch.skips.items():
            self._metrics.skipped.labels(stream, reason).inc(count)
        if batch.last_chunk_ms is not None:
            with self._changed:
                idle = not self._filling.messages
            self._metrics.lag_s.labels(stream).set(0.0 if idle else max(0.0, time.time() - batch.last_chunk_ms / 1000))

    def _housekeeping(self) -> None:
        """Renew the lease; see whether the keys, or what is recorded of this stream, changed."""
        self._renewed_at = time.monotonic()
        if not take(self._engine, self._stream.stream_id, self._holder):
            raise StreamReplaced(
                f"stream {self._stream.name!r} is recorded by another process now", stream=self._stream.name
            )
        with translated_errors(), self._engine.connect() as connection:
            definitions = tuple(key_definitions(connection))
            stream = current_stream(connection, self._stream.vhost, self._stream.name)
        if [key.key_id for key in definitions] != [key.key_id for key in self._definitions]:
            self.must_reopen = True
        if stream is None or stream.record_time != self._stream.record_time:
            self.must_reopen = True
        if time.monotonic() - self._pruned_at >= PRUNE_S:
            self._prune()

    def _prune(self) -> None:
        """Delete one batch of rows of dropped messages, so that recording never waits long for it."""
        prune_receipts(self._engine)
        if self.first_offset > self._pruned_to:
            first = self.first_offset
            if prune_expired(self._engine, self._stream, first) == 0:
                self._pruned_to, self._pruned_at = first, time.monotonic()
        else:
            self._pruned_at = time.monotonic()
