"""One stream as one process records it. All of it is the loop's; counts are read by any thread."""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from enum import Enum, auto
from typing import Final

from relatum.following import Records
from relatum.otel import Part, is_on
from relatum.reading import RecordBatch
from relatum.recording._batch import BATCH_BYTES_MAX, Batch
from relatum.recording._commit import CHECKPOINT_OFFSETS, Share, add_links
from relatum.recording._extract import Extractor
from relatum.recording._statistics import Progress
from relatum.recording._tails import Opened
from relatum.store.catalog import StreamRow
from relatum.waiting import QUESTION_S, backoff

LOOK_S: Final = 30.0
"""How often a stream is asked where it begins and ends: for the metrics, and to prune what retention dropped."""

BATCH_BYTES_LEAST: Final = 16 << 10
"""Bytes of COPY lines a stream's batch may have, at least, however many streams are busy."""

_CHECKPOINT_S: Final = 30.0
"""Seconds between two checkpoints of a slow stream."""


class Phase(Enum):
    """How far a stream has come."""

    SOUGHT = auto()  # whether the broker has it, and it is the one that the database knows
    WANTED = auto()  # it is, and this member does not have it
    HELD = auto()  # this member has it, and opens it next, or after a pause
    OPEN = auto()  # it is read; or no more, and what was read is being committed


class StreamRecording:
    """One stream."""

    def __init__(self, name: str, super_stream: str | None, progress: Progress) -> None:
        self.name = name
        self.super_stream = super_stream
        self.progress = progress
        self.who = f"recording of stream {name!r}"
        self.phase = Phase.SOUGHT
        self.row: StreamRow | None = None
        """The database's, as long as it is known to be this stream's."""
        self.following = 0
        """The follower's number of it; 0 where it is not followed."""
        self.tail: OpenTail | None = None
        self.then: Callable[[StreamRecording], None] | None = None
        """What comes when all that was read is committed, of one that is read no more; None while it is read."""
        self.before_opening: Callable[[], bool | None] | None = None
        """Called before it is opened again; False where it is not the stream of its row any more."""
        self.is_there = False
        """Whether the broker has said that it is a stream, and lets this user read it: only then it gets a row."""
        self.is_refused = False
        """Whether another member has it, or it could not be recorded, the last time that was tried."""
        self.was_missing = False
        self.pruned_to = 0
        self.pauses: Iterator[float] = backoff(QUESTION_S)
        self.due_at = 0.0
        """When it is sought or opened next, by the monotonic clock."""
        self.look_soon()

    def look_soon(self) -> None:
        """Ask for its ends some time later; those of many streams are spread."""
        self.look_at = time.monotonic() + LOOK_S * (0.5 + random.random())  # noqa: S311 - nothing secret

    def lacks(self, offset: int) -> bool:
        """Whether the offset is not recorded yet, and this process is about to do it."""
        tail = self.tail
        return not self.is_refused if tail is None else tail.recorded_to < offset

    @property
    def left(self) -> int | None:
        """Messages that are not recorded, of those that this process knows of; None where it does not know how many.

        0 also where another process records the stream, or there is no such stream.
        """
        if self.progress.is_standby or self.progress.end == -1:
            return 0
        return self.progress.lag_offsets

    @property
    def is_mine(self) -> bool:
        """Whether this member has it."""
        return self.phase in (Phase.HELD, Phase.OPEN)

    @property
    def is_read(self) -> bool:
        """Whether it is read and recorded."""
        return self.phase is Phase.OPEN and self.then is None


class OpenTail:
    """The tail of a stream that is open: while one batch is committed, the next one is filled.

    There are two batches at most, so memory is bounded at any backlog. A lone message is committed at once, and under
    load a batch grows to what one transaction's time lets in.
    """

    def __init__(self, stream: StreamRecording, opened: Opened) -> None:
        self.stream = stream
        self._row = opened.tail
        self._with_time = opened.stream.record_time
        self._key_ids = [key.key_id for key in opened.definitions]
        self._high_us = opened.high_us
        self._extractor = Extractor(opened.definitions)
        self._is_known = opened.known is not None
        self._checkpoint_offset, self._checkpoint_at = -1, 0.0
        self.filling = self._new_batch()
        self.committing: Batch | None = None
        """What is being committed, or was held up."""
        self.held: list[Records] = []
        """What came when the batch was full: more of the stream is asked for once there is room again."""
        self.started_at = opened.tail.to_offset
        self.recorded_to = opened.tail.to_offset - 1
        self.is_contended = False
        """Whether somebody else had its range locked the last time."""
        self.first_offset = opened.stream.first_offset or 0
        """The first that is retained, as it was seen last."""
        self.retained_from = 0
        """Before it nothing is retained. Not of a stream of which nothing was recorded when the broker was asked: that
        one may be declared anew, and nobody could tell."""

    def _new_batch(self) -> Batch:
        return Batch(self._row.stream_id, self._extractor, with_time=self._row.with_time)

    def add(self, parts: Sequence[RecordBatch]) -> None:
        """Take what came."""
        for part in parts:
            self.filling.add(part)
        if is_on(Part.RECORDER):
            add_links(self.filling, parts)

    def is_full(self, busy: int) -> bool:
        """Whether no more should come before it is committed, as so many streams have something to commit."""
        batch = self.filling
        if batch.line_bytes < BATCH_BYTES_LEAST:
            return batch.is_full
        return batch.is_full or batch.line_bytes >= BATCH_BYTES_MAX // max(1, busy)

    @property
    def is_over(self) -> bool:
        """Whether nothing more of it is committed."""
        return self.stream.tail is not self

    @property
    def is_whole(self) -> bool:
        """Whether all that came is committed."""
        return self.committing is None and not self.filling.messages

    def unwritten(self) -> float | None:
        """When the oldest message was written that came and is not committed; None where all is."""
        for batch in (self.committing, self.filling):
            if batch is not None and batch.oldest_at is not None:
                return batch.oldest_at
        return None

    def take(self) -> Share:
        """What is to be committed, the same as the last time where that was held up."""
        if self.committing is None:
            self.committing, self.filling = self.filling, self._new_batch()
        batch = self.committing
        is_due = (
            batch.last_offset - self._checkpoint_offset >= CHECKPOINT_OFFSETS
            or time.monotonic() - self._checkpoint_at >= _CHECKPOINT_S
        )
        return Share(self._row, batch, self._high_us, checkpoint=is_due, is_contended=self.is_contended)

    def committed(self, share: Share) -> None:
        """Note that a share came through."""
        batch, self.committing = share.batch, None
        self._row, self._high_us = share.row, share.high_us
        if share.checkpoint:
            self._checkpoint_offset, self._checkpoint_at = batch.last_offset, time.monotonic()
        self.recorded_to = batch.last_offset
        self.stream.progress.count(batch)
        if not self.is_over:
            self.stream.progress.written(batch.last_offset, batch.newest_at)

    @property
    def is_known(self) -> bool:
        """Whether something was recorded by which the stream is told from another of its name."""
        return self._is_known or self.recorded_to >= self.started_at

    def is_as(self, key_ids: Sequence[int], with_time: bool | None) -> bool:
        """Whether it records by the keys, and the time, that are in force now."""
        return list(key_ids) == self._key_ids and with_time == self._with_time
