"""What is read of one stream and not recorded yet: while one batch is committed, the next one is filled.

Two batches of a stream exist at most, the one being committed and the one being filled, so memory is bounded at any
backlog. A batch is handed over as soon as the committer is free: a lone message is committed at once, and under load
batches grow to what one transaction's time lets in.
"""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

from relatum.following import Records
from relatum.otel import Part, is_on
from relatum.reading import RecordBatch
from relatum.recording._batch import BATCH_BYTES_MAX, Batch
from relatum.recording._commit import CHECKPOINT_OFFSETS, Share, add_links
from relatum.recording._extract import Extractor
from relatum.recording._opening import Opened
from relatum.recording._statistics import Progress

RecordedListener = Callable[[str, list[tuple[str, int]]], None]
"""Called after a commit with the stream's name and the (AMQP `message_id`, offset) pairs somebody waits for."""

BATCH_BYTES_LEAST: Final = 16 << 10
"""Bytes of COPY lines a stream's batch may have, at least, however many streams are busy."""

_CHECKPOINT_S: Final = 30.0
"""Seconds between two checkpoints of a slow stream."""


class Writer:
    """Takes what is read of one stream, and has it committed."""

    def __init__(
        self,
        opened: Opened,
        *,
        submit: Callable[["Writer"], None],
        done: Callable[..., None],
        ended: Callable[["Writer", Exception | None], None],
        goes_on: Callable[[], None],
        busy: Callable[[], int],
        progress: Progress,
        on_recorded: RecordedListener | None,
    ) -> None:
        self._row = opened.tail
        self._with_time = opened.stream.record_time
        self._key_ids = [key.key_id for key in opened.definitions]
        self._high_us = opened.high_us
        self._extractor = Extractor(opened.definitions)
        self._submit = submit
        self._done = done
        self._ended = ended
        self._goes_on = goes_on
        self._busy = busy
        self._progress = progress
        self._on_recorded = on_recorded
        self._lock = threading.Lock()
        self._filling = self._new_batch()
        self._taken: Batch | None = None
        """What is being committed, or could not be."""
        self._held: list[Records] = []
        """What was put when the batch was full: more of the stream is asked for once there is room again."""
        self._is_submitted = self._is_finishing = self._has_ended = False
        self._checkpoint_offset = -1
        self._checkpoint_at = 0.0
        self.stream = opened.stream.name
        self.started_at = opened.tail.to_offset
        self.first_offset = opened.stream.first_offset or 0
        self.retained_from = 0
        """Before it nothing is retained. Not of a stream of which nothing was recorded when the broker was asked: that
        one may be declared anew, and nobody could tell."""
        self.recorded_to = opened.tail.to_offset - 1
        self._is_known = opened.known is not None

    def _new_batch(self) -> Batch:
        return Batch(self._row.stream_id, self._extractor, with_time=self._row.with_time)

    def put(self, event: Records, parts: Sequence[RecordBatch]) -> bool:
        """Take what came. False where it is full: what came is done with as soon as there is room."""
        is_new, has_room = False, True
        with self._lock:
            if parts and not self._has_ended:
                # Extraction happens under the lock: the committer only takes it for a moment, to swap batches.
                for part in parts:
                    self._filling.add(part)
                if is_on(Part.RECORDER):
                    add_links(self._filling, parts)
                is_new, self._is_submitted = not self._is_submitted, True
                has_room = not self._is_full()
                if not has_room:
                    self._held.append(event)
        if is_new:
            self._submit(self)
        return has_room

    def _is_full(self) -> bool:
        batch = self._filling
        if batch.line_bytes < BATCH_BYTES_LEAST:
            return batch.is_full
        return batch.is_full or batch.line_bytes >= BATCH_BYTES_MAX // max(1, self._busy())

    def unwritten(self) -> float | None:
        """When the oldest message was written that was put and is not committed; None where all is. Takes no lock."""
        for batch in (self._taken, self._filling):
            if batch is not None and batch.oldest_at is not None:
                return batch.oldest_at
        return None

    def finish(self) -> None:
        """Take no more; `ended` is told when what was put is committed, or could not be."""
        with self._lock:
            self._is_finishing = True
            if self._is_submitted or self._has_ended:
                return
            self._has_ended = True
        self._ended(self, None)

    def end(self, error: Exception) -> None:
        """Commit nothing more."""
        with self._lock:
            if self._has_ended:
                return
            self._has_ended = True
            held, self._held = self._held, []
        self._done(*held)
        self._ended(self, error)

    @property
    def is_known(self) -> bool:
        """Whether something was recorded by which the stream is told from another of its name."""
        return self._is_known or self.recorded_to >= self.started_at

    def is_as(self, key_ids: Sequence[int], with_time: bool | None) -> bool:
        """Whether it records by the keys, and the time, that are in force now."""
        return list(key_ids) == self._key_ids and with_time == self._with_time

    # --- the committer's thread -----------------------------------------------------------------------------------

    def take(self) -> Share | None:
        """What is to be committed, the same as the last time where that was held up; None where there is nothing."""
        with self._lock:
            if self._has_ended:
                return None
            if self._taken is None:
                self._taken, self._filling = self._filling, self._new_batch()
            held, self._held = self._held, []
            batch = self._taken
        if held:
            self._done(*held)
        return Share(self._row, batch, self._high_us, checkpoint=self._is_checkpoint_due(batch))

    def committed(self, share: Share) -> bool:
        """Note that a share came through; True where more has come meanwhile."""
        batch = share.batch
        self._row, self._high_us = share.row, share.high_us
        if share.checkpoint:
            self._checkpoint_offset, self._checkpoint_at = batch.last_offset, time.monotonic()
        self._progress.count(batch)
        with self._lock:
            self._taken = None
            if self._has_ended:
                return False
            is_first = self.recorded_to < self.started_at
            self.recorded_to = batch.last_offset
            self._progress.written(batch.last_offset, batch.newest_at)
            self._is_submitted = bool(self._filling.messages)
            is_more = self._is_submitted
            self._has_ended = is_over = self._is_finishing and not is_more
        if is_first:
            self._goes_on()
        if self._on_recorded is not None and batch.receipts:
            self._on_recorded(self.stream, batch.receipts)
        if is_over:
            self._ended(self, None)
        return is_more

    def _is_checkpoint_due(self, batch: Batch) -> bool:
        return (
            batch.last_offset - self._checkpoint_offset >= CHECKPOINT_OFFSETS
            or time.monotonic() - self._checkpoint_at >= _CHECKPOINT_S
        )
