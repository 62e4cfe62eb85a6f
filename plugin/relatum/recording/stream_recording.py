"""One stream as this process records it. Only the loop's thread changes it; any thread may read the counts."""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from enum import Enum, auto
from typing import Final

from relatum.following import Records
from relatum.otel import Part, is_on
from relatum.reading import RecordBatch
from relatum.recording.batch import BATCH_BYTES_MAX, Batch
from relatum.recording.commit import CHECKPOINT_OFFSETS, Share, add_links
from relatum.recording.extractor import Extractor
from relatum.recording.statistics import Progress
from relatum.recording.tails import Opened
from relatum.store.catalog import StreamRow
from relatum.waiting import QUESTION_S, backoff

LOOK_S: Final = 30.0
"""How often we ask where a stream begins and ends: for metrics, and to prune what retention dropped."""

BATCH_BYTES_LEAST: Final = 16 << 10
"""Bytes of COPY lines that a stream's batch may always have, however many streams are busy."""

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
        self.log_name = f"recording of stream {name!r}"
        self.phase = Phase.SOUGHT
        self.row: StreamRow | None = None
        """Its row in `streams`, while that is known to be this stream's."""
        self.following = 0
        """The number that the follower gave it; 0 while it is not followed."""
        self.tail: OpenTail | None = None
        self.after_commit: Callable[[StreamRecording], None] | None = None
        """Of a stream that is not read any more: called once all that was read is committed."""
        self.before_opening: Callable[[], bool | None] | None = None
        """Called before it is opened again. It returns False if this is not the stream of its row any more."""
        self.is_there = False
        """Whether the broker has confirmed the stream, and lets this user read it: only then it gets a row."""
        self.is_refused = False
        """Whether the last attempt failed, or another member has it: a drain does not wait for it."""
        self.was_missing = False
        self.pruned_to = 0
        self.pauses: Iterator[float] = backoff(QUESTION_S)
        self.due_at = 0.0
        """When it is sought or opened next, by the monotonic clock."""
        self.look_soon()

    def look_soon(self) -> None:
        """Schedule the next look at its ends, spread over time."""
        self.look_at = time.monotonic() + LOOK_S * (0.5 + random.random())  # noqa: S311 - nothing secret

    def lacks(self, offset: int) -> bool:
        """Whether this process is about to record the offset, and has not yet."""
        tail = self.tail
        return not self.is_refused if tail is None else tail.recorded_to < offset

    @property
    def left(self) -> int | None:
        """Messages known to this process that are not recorded; None if unknown.

        0 as well if another process records the stream, or it does not exist.
        """
        if self.progress.is_standby or self.progress.end == -1:
            return 0
        return self.progress.lag_offsets

    @property
    def is_mine(self) -> bool:
        """Whether this member holds it."""
        return self.phase in (Phase.HELD, Phase.OPEN)

    @property
    def is_read(self) -> bool:
        """Whether it is being read and recorded."""
        return self.phase is Phase.OPEN and self.after_commit is None


class OpenTail:
    """The tail of an open stream: while one batch is committed, the next one is filled.

    There are two batches at most, so memory is bounded at any backlog. A lone message is committed at once, and under
    load a batch grows to what one transaction's time lets in.
    """

    def __init__(self, stream: StreamRecording, opened: Opened) -> None:
        self.stream = stream
        self._with_time = opened.stream.record_time
        self._key_ids = [key.key_id for key in opened.definitions]
        self._extractor = Extractor(opened.definitions)
        self._is_known = opened.known is not None
        self._checkpoint_offset, self._checkpoint_at = -1, 0.0
        self.filling = Batch(opened.tail.stream_id, self._extractor, with_time=opened.tail.with_time)
        self.share = Share(opened.tail, self.filling, opened.high_us)
        """What is committed, or was last."""
        self.committing: Batch | None = None
        """The batch that is being committed, or was held up."""
        self.held: list[Records] = []
        """Records that filled the batch: more is asked for once there is room again."""
        self.started_at = opened.tail.to_offset
        self.recorded_to = opened.tail.to_offset - 1
        self.first_offset = opened.stream.first_offset or 0
        """The first retained offset, as seen last."""
        self.retained_from = 0
        """Before it nothing is retained. Not of a stream of which nothing was recorded when the broker was asked: that
        one may be declared anew, and nobody could tell."""

    def add(self, parts: Sequence[RecordBatch]) -> None:
        """Add records."""
        for part in parts:
            self.filling.add(part)
        if is_on(Part.RECORDER):
            add_links(self.filling, parts)

    def is_full(self, busy: int) -> bool:
        """Whether the batch must be committed before more is read, while `busy` streams have something to commit."""
        batch = self.filling
        if batch.line_bytes < BATCH_BYTES_LEAST:
            return batch.is_full
        return batch.is_full or batch.line_bytes >= BATCH_BYTES_MAX // max(1, busy)

    @property
    def is_over(self) -> bool:
        """Whether the stream has been closed."""
        return self.stream.tail is not self

    @property
    def is_whole(self) -> bool:
        """Whether everything that was read is committed."""
        return self.committing is None and not self.filling.messages

    def unwritten(self) -> float | None:
        """When the oldest message was written that is not committed yet; None if there is none."""
        for batch in (self.committing, self.filling):
            if batch is not None and batch.oldest_at is not None:
                return batch.oldest_at
        return None

    def take(self) -> None:
        """Have the share commit what was filled; the same batch as the last time if that was held up."""
        share = self.share
        if self.committing is None:
            self.committing = share.batch = self.filling
            self.filling = Batch(share.row.stream_id, self._extractor, with_time=share.row.with_time)
        share.is_committed = False
        share.checkpoint = (
            share.batch.last_offset - self._checkpoint_offset >= CHECKPOINT_OFFSETS
            or time.monotonic() - self._checkpoint_at >= _CHECKPOINT_S
        )

    def committed(self) -> None:
        """Note that the share was committed."""
        batch, self.committing = self.share.batch, None
        self.share.batch = self.filling  # its lines are not needed any more
        if self.share.checkpoint:
            self._checkpoint_offset, self._checkpoint_at = batch.last_offset, time.monotonic()
        self.recorded_to = batch.last_offset
        self.stream.progress.count(batch)
        if not self.is_over:
            self.stream.progress.written(batch.last_offset, batch.newest_at)

    @property
    def is_known(self) -> bool:
        """Whether something was recorded that tells the stream from another of its name."""
        return self._is_known or self.recorded_to >= self.started_at

    def records_by(self, key_ids: Sequence[int], with_time: bool | None) -> bool:
        """Whether it records these keys, and the time or not."""
        return list(key_ids) == self._key_ids and with_time == self._with_time
