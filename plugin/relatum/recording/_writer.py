"""What is read of one stream and not recorded yet: while one batch is committed, the next one is filled.

Two batches of a stream exist at most, the one being committed and the one being filled, so memory is bounded at any
backlog. A batch is handed over as soon as the committer is free: a lone message is committed at once, and under load
batches grow to what one transaction's time lets in.
"""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

from relatum.reading import RecordBatch
from relatum.recording._batch import Batch
from relatum.recording._commit import CHECKPOINT_OFFSETS, Share
from relatum.recording._extract import Extractor
from relatum.recording._opening import Opened
from relatum.recording._progress import Progress
from relatum.store import CoverageRow, StreamRow

RecordedListener = Callable[[str, list[tuple[str, int]]], None]
"""Called after a commit with the stream's name and the (AMQP `message_id`, offset) pairs somebody waits for."""

_CHECKPOINT_S: Final = 30.0
"""Seconds between two checkpoints of a slow stream."""


class Writer:
    """Takes what the reader of one stream hands it, and has it committed.

    Args:
        opened: Where recording goes on.
        submit: Has it committed, soon.
        progress: Where to tell how far it is, and to count.
        on_recorded: Called after each commit that holds receipts.
    """

    def __init__(
        self,
        opened: Opened,
        submit: Callable[["Writer"], None],
        progress: Progress,
        on_recorded: RecordedListener | None,
    ) -> None:
        self._stream: StreamRow = opened.stream
        self._row: CoverageRow = opened.tail
        self._key_ids = [key.key_id for key in opened.definitions]
        self._high_us = opened.high_us
        self._extractor = Extractor(opened.definitions)
        self._submit = submit
        self._progress = progress
        self._on_recorded = on_recorded
        self._changed = threading.Condition()
        self._filling = self._new_batch()
        self._taken: Batch | None = None
        """What is being committed, or could not be."""
        self._is_submitted = False
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
            self._submit(self)

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
            while self._is_submitted and self._error is None:
                self._changed.wait()
            self._raise_error()

    def end(self, error: Exception) -> None:
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

    # --- the committer's thread -----------------------------------------------------------------------------------

    def take(self) -> Share | None:
        """What is to be committed, the same as the last time where that was held up; None where there is nothing."""
        with self._changed:
            if self._error is not None:
                self._is_submitted = False
                return None
            if self._taken is None:
                self._taken, self._filling = self._filling, self._new_batch()
                self._changed.notify_all()
            batch = self._taken
        return Share(self._row, batch, self._high_us, checkpoint=self._is_checkpoint_due(batch))

    def committed(self, share: Share) -> bool:
        """Note that a share came through; True where more has come meanwhile."""
        batch = share.batch
        self._row, self._high_us = share.row, share.high_us
        if share.checkpoint:
            self._checkpoint_offset, self._checkpoint_at = batch.last_offset, time.monotonic()
        self.recorded_to = batch.last_offset
        self._progress.written(batch.last_offset, batch.newest_at)
        self._progress.count(batch)
        if self._on_recorded is not None and batch.receipts:
            self._on_recorded(self.stream, batch.receipts)
        with self._changed:
            self._taken = None
            self._is_submitted = bool(self._filling.messages) and self._error is None
            self._changed.notify_all()
            return self._is_submitted

    def _is_checkpoint_due(self, batch: Batch) -> bool:
        return (
            batch.last_offset - self._checkpoint_offset >= CHECKPOINT_OFFSETS
            or time.monotonic() - self._checkpoint_at >= _CHECKPOINT_S
        )
