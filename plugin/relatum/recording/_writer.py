"""The half of a recorder that writes: while one batch is committed, the next one is filled.

Two batches of a stream exist at most, the one being committed and the one being filled, so memory is bounded at any
backlog. A batch is handed over as soon as a committer is free: a lone message is committed at once, and under load
batches grow to what one transaction's time lets in.
"""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

import sqlalchemy as sa

from relatum.errors import RelatumError
from relatum.reading import RecordBatch
from relatum.recording._batch import Batch
from relatum.recording._commit import CHECKPOINT_OFFSETS, commit_batch
from relatum.recording._extract import Extractor
from relatum.recording._metrics import RecorderMetrics
from relatum.recording._opening import Opened
from relatum.recording._progress import Progress
from relatum.store import CoverageRow, StreamRow

RecordedListener = Callable[[str, list[tuple[str, int]]], None]
"""Called after a commit with the stream's name and the (AMQP `message_id`, offset) pairs somebody waits for."""

_CHECKPOINT_S: Final = 30.0
"""Seconds between two checkpoints of a slow stream."""


class Committers:
    """The threads that commit the batches of all streams of a process: as many as may write at the same time.

    Args:
        threads_max: How many there may be. They are started when there is work for one more.
    """

    def __init__(self, threads_max: int) -> None:
        self._threads_max = threads_max
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._idle = 0
        self._work: queue.SimpleQueue[Writer | None] = queue.SimpleQueue()

    def submit(self, writer: "Writer") -> None:
        """Let the next free thread commit what a writer has."""
        with self._lock:
            if self._idle <= self._work.qsize() and len(self._threads) < self._threads_max:
                name = f"relatum-committer-{len(self._threads)}"
                thread = threading.Thread(target=self._run, name=name, daemon=True)
                self._threads.append(thread)
                thread.start()
        self._work.put(writer)

    def _run(self) -> None:
        while True:
            with self._lock:
                self._idle += 1
            writer = self._work.get()
            with self._lock:
                self._idle -= 1
            if writer is None:
                return
            if writer.commit():
                self._work.put(writer)

    def stop(self, timeout_s: float) -> None:
        """End the threads, when what was submitted is committed."""
        for _ in self._threads:
            self._work.put(None)
        for thread in self._threads:
            thread.join(timeout_s)


class Writer:
    """Takes what the reader of one stream hands it, and has it committed.

    Args:
        engine: The database.
        opened: Where recording goes on.
        committers: Who commits.
        metrics: Where to count.
        progress: Where to tell how far it is.
        on_recorded: Called after each commit that holds receipts.
    """

    def __init__(
        self,
        engine: sa.Engine,
        opened: Opened,
        committers: Committers,
        metrics: RecorderMetrics,
        progress: Progress,
        on_recorded: RecordedListener | None,
    ) -> None:
        self._engine = engine
        self._stream: StreamRow = opened.stream
        self._row: CoverageRow = opened.tail
        self._key_ids = [key.key_id for key in opened.definitions]
        self._high_us = opened.high_us
        self._extractor = Extractor(opened.definitions)
        self._committers = committers
        self._metrics = metrics
        self._progress = progress
        self._on_recorded = on_recorded
        self._changed = threading.Condition()
        self._filling = self._new_batch()
        self._taken: Batch | None = None
        """What is being committed, or could not be."""
        self._is_submitted = self._is_committing = False
        self._error: Exception | None = None
        self._checkpoint_offset = -1
        self._checkpoint_at = 0.0
        self.stream = opened.stream.name
        self.stream_id = opened.stream.stream_id
        self.first_offset = opened.stream.first_offset or 0
        self.must_reopen = False
        self.recorded_to = opened.tail.to_offset - 1

    def _new_batch(self) -> Batch:
        return Batch(self._stream.stream_id, self._extractor, with_time=self._row.with_time)

    def put(self, records: RecordBatch) -> None:
        """Take the records of a chunk; waits while a full batch waits to be committed.

        Raises:
            RelatumError: what went wrong with a commit; nothing after it will be written.
        """
        with self._changed:
            while self._filling.is_full and self._error is None:
                self._changed.wait()
            self._raise_error()
            # Extraction happens under the lock: a committer only takes it for a moment, to swap batches.
            self._filling.add(records)
            is_new, self._is_submitted = not self._is_submitted, True
        if is_new:
            self._committers.submit(self)

    def unwritten(self) -> float | None:
        """When the oldest message was written that was put and is not committed; None where all is. Takes no lock."""
        for batch in (self._taken, self._filling):
            if batch is not None and batch.oldest_at is not None:
                return batch.oldest_at
        return None

    def check(self) -> None:
        """Raise what went wrong with a commit, or what `end` was told."""
        with self._changed:
            self._raise_error()

    def finish(self) -> None:
        """Wait until what was put is committed. Errors of a commit are raised here too."""
        with self._changed:
            while self._is_committing or (self._is_submitted and self._error is None):
                self._changed.wait()
            self._raise_error()

    def end(self, error: RelatumError) -> None:
        """Commit nothing more; the reader meets the error at its next step."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def check_same(self, key_ids: Sequence[int], with_time: bool | None) -> None:
        """Open anew where other keys are in force now, or times are recorded no more, or again."""
        if list(key_ids) != self._key_ids or with_time != self._stream.record_time:
            self.must_reopen = True

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def commit(self) -> bool:
        """Commit what is there, in a committer's thread; True where more has come meanwhile."""
        with self._changed:
            batch = self._filling
            if self._error is not None:
                return False
            self._taken, self._filling = batch, self._new_batch()
            self._is_committing = True
            self._changed.notify_all()
        error: Exception | None = None
        try:
            self._commit(batch)
        except Exception as raised:  # noqa: BLE001 - handed to the reader, which raises it
            error = raised
        with self._changed:
            self._is_committing = False
            self._error = self._error or error
            if self._error is not None:
                self._changed.notify_all()
                return False
            self._is_submitted = bool(self._filling.messages)
            self._changed.notify_all()
            return self._is_submitted

    def _commit(self, batch: Batch) -> None:
        started = time.perf_counter()
        checkpoint = self._checkpoint_due(batch)
        self._row, self._high_us = commit_batch(self._engine, self._row, batch, self._high_us, checkpoint=checkpoint)
        self.recorded_to = batch.last_offset
        self._progress.written(batch.last_offset, batch.newest_at)
        self._taken = None
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
        for (_, reason), count in batch.skips.items():
            self._metrics.skipped.labels(stream, reason).inc(count)
