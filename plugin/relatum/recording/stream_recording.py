"""The state of one stream in this process. Only the loop's thread changes it; any thread may read the counts."""

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
"""Mean seconds between two queries of a stream's ends: for metrics, and to prune what retention dropped."""

BATCH_BYTES_LEAST: Final = 16 << 10
"""Bytes of COPY lines that a stream's batch may always hold, however many streams are busy."""

_CHECKPOINT_S: Final = 30.0
"""Seconds between two checkpoints of a slow stream."""


class Phase(Enum):
    """The phase of a stream in this process."""

    SOUGHT = auto()  # its existence on the broker and its row are being looked up
    WANTED = auto()  # it has a row, and this member does not hold it
    HELD = auto()  # this member holds it, and opens it next, or after a pause
    OPEN = auto()  # it is being read, or its last batches are being committed


class StreamRecording:
    """One stream in this process."""

    def __init__(self, name: str, super_stream: str | None, progress: Progress) -> None:
        self.name = name
        self.super_stream = super_stream
        self.progress = progress
        self.log_name = f"recording of stream {name!r}"
        self.phase = Phase.SOUGHT
        self.row: StreamRow | None = None
        """Its row in `streams`, as long as the row is known to be this stream's."""
        self.following = 0
        """The follower's number for it; 0 while it is not followed."""
        self.tail: OpenTail | None = None
        self.after_commit: Callable[[StreamRecording], None] | None = None
        """Set when the stream is no longer read: called once everything that was read is committed."""
        self.before_opening: Callable[[], bool | None] | None = None
        """Called before it is opened again. Returns False if the row is not this stream's any more."""
        self.is_there = False
        """Whether the broker has the stream and lets this user read it. Only then does it get a row."""
        self.is_refused = False
        """Whether the last attempt failed, or another member holds it. A drain then does not wait for it."""
        self.was_missing = False
        self.pruned_to = 0
        self.pauses: Iterator[float] = backoff(QUESTION_S)
        self.due_at = 0.0
        """When it is looked up or opened next, by the monotonic clock."""
        self.look_soon()

    def look_soon(self) -> None:
        """Schedule the next query of its ends, with jitter."""
        self.look_at = time.monotonic() + LOOK_S * (0.5 + random.random())  # noqa: S311 - nothing secret

    def lacks(self, offset: int) -> bool:
        """Return whether this process will record the offset and has not yet."""
        tail = self.tail
        return not self.is_refused if tail is None else tail.recorded_to < offset

    @property
    def left(self) -> int | None:
        """The number of messages that this process has not recorded yet; None if unknown.

        Also 0 if another process records the stream, or the stream is empty or missing.
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

    There are at most two batches, so memory is bounded at any backlog. A lone message is committed at once; under load,
    a batch grows while the previous one is being committed.
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
        """What is being committed, or was committed last."""
        self.committing: Batch | None = None
        """The batch that is being committed, or was held up."""
        self.held: list[Records] = []
        """Records that filled the batch: the follower gets credit for more once there is room again."""
        self.started_at = opened.tail.to_offset
        self.recorded_to = opened.tail.to_offset - 1
        self.first_offset = opened.stream.first_offset or 0
        """The first retained offset when last asked."""
        self.retained_from = 0
        """Rows below this offset may be pruned. Not raised while nothing is recorded: the stream could be a different
        one of the same name."""

    def add(self, parts: Sequence[RecordBatch]) -> None:
        """Add records."""
        for part in parts:
            self.filling.add(part)
        if is_on(Part.RECORDER):
            add_links(self.filling, parts)

    def is_full(self, busy: int) -> bool:
        """Return whether the batch must be committed before more is read; `busy` streams have something to commit."""
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
        """Return when the oldest uncommitted message was written; None if there is none."""
        for batch in (self.committing, self.filling):
            if batch is not None and batch.oldest_at is not None:
                return batch.oldest_at
        return None

    def take(self) -> None:
        """Hand the filled batch to the share; if the last batch was held up, hand it over again."""
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
        self.share.batch = self.filling  # frees the lines
        if self.share.checkpoint:
            self._checkpoint_offset, self._checkpoint_at = batch.last_offset, time.monotonic()
        self.recorded_to = batch.last_offset
        self.stream.progress.count(batch)
        if not self.is_over:
            self.stream.progress.written(batch.last_offset, batch.newest_at)

    @property
    def is_known(self) -> bool:
        """Whether a recorded message distinguishes the stream from another of its name."""
        return self._is_known or self.recorded_to >= self.started_at

    def records_by(self, key_ids: Sequence[int], with_time: bool | None) -> bool:
        """Return whether it records exactly these keys, and the time as given."""
        return list(key_ids) == self._key_ids and with_time == self._with_time
