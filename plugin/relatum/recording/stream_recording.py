"""Records one stream: finds its row, opens its tail once this member holds it, reads it, and commits batch by batch.

Each stream is a coroutine in the recorder's loop. Only the loop's thread changes its state; any thread may read counts.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from relatum.common.waiting import QUESTION_S, backoff, ended
from relatum.errors import AccessRefused, Conflict, NotFound, StreamNotFound
from relatum.otel import Part, is_on
from relatum.reading import RecordBatch
from relatum.reading.following import Attached, CaughtUp, Failed, Hole, Records, Replaced
from relatum.recording.batch import BATCH_BYTES_MAX, Batch
from relatum.recording.commit import CHECKPOINT_OFFSETS, Share, add_links
from relatum.recording.statistics import Progress
from relatum.recording.tails import Opened, add_missing_event, skip_hole, skip_unreadable
from relatum.store.catalog import StreamRow

if TYPE_CHECKING:
    from relatum.recording.recorder_group import RecorderGroup

logger = logging.getLogger("relatum.recorder")

BATCH_BYTES_MIN: Final = 16 << 10
"""Bytes of COPY lines that a stream's batch may always hold, for any number of busy streams."""

_CHECKPOINT_S: Final = 30.0
"""Seconds between two checkpoints of a slow stream."""


class StreamRecording:
    """One stream in this process."""

    def __init__(self, name: str, super_stream: str | None, progress: Progress, group: "RecorderGroup") -> None:
        self.name = name
        self.super_stream = super_stream
        self.progress = progress
        self.log_name = f"recording of stream {name!r}"
        self._group = group
        self.row: StreamRow | None = None
        """The stream's row in `streams`; None while it is unknown, or may be another stream's."""
        self.is_held = False
        """Whether this member holds the stream, and is not about to release it."""
        self.following = 0
        """The number that the follower gave to this following; 0 while the stream is not followed."""
        self.tail: OpenTail | None = None
        self.is_confirmed = False
        """Whether the broker has confirmed that the stream exists and this user may read it. A new row needs this."""
        self.is_refused = False
        """Whether the last attempt failed, or another member holds the stream. A drain then does not wait for it."""
        self.pruned_to = 0
        self._pauses: Iterator[float] = backoff(QUESTION_S)
        self._changed = asyncio.Event()

    def lacks(self, offset: int) -> bool:
        """Return whether this process is expected to record the offset, and has not done so yet."""
        tail = self.tail
        return not self.is_refused if tail is None else tail.recorded_to < offset

    @property
    def is_read(self) -> bool:
        """Whether the stream is being read and recorded."""
        return self.tail is not None and not self.tail.is_closing

    # --- the coroutine ------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Record the stream until the task is cancelled. After an error, start over from the end of its coverage."""
        while True:
            try:
                await self._attempt()
            except Exception as error:  # noqa: BLE001 - reported once, and retried
                self._unfollow()
                self._failed(error)
                await asyncio.sleep(next(self._pauses))

    async def _attempt(self) -> None:
        row = self.row or await self._find()
        await self._until(lambda: self.is_held or self.row is not row)
        if self._holds(row):
            await self._record(row)

    def _holds(self, row: StreamRow) -> bool:
        return self.is_held and self.row is row

    async def _find(self) -> StreamRow:
        """Wait for the stream's row, which is added once the broker has confirmed the stream."""
        row = await self._group.find.answer(self)
        if row is None:
            await self._wait_for_broker()
            row = await self._group.find.answer(self)
        if row is None or self._group.broker.is_other(row.broker_id):
            raise Conflict("another recorder assigned the stream to another broker")
        self.row = row
        self.pruned_to = 0  # It may be a new generation.
        self._group.membership.wake()
        return row

    async def _wait_for_broker(self) -> None:
        if not self.following:
            self.following = self._group.follower.follow(self.name, 0)
        await self._until(lambda: self.is_confirmed)
        self._unfollow()

    async def _record(self, row: StreamRow) -> None:
        """Open the tail, record until it is closed and all that was read is committed, then handle the cause."""
        opened = await self._group.open.answer(self)
        if not self._holds(row):
            return
        tail = self.tail = OpenTail(self, opened)
        self.following = self._group.follower.follow(self.name, opened.tail.to_offset, known=opened.known)
        await self._until(lambda: tail.is_closing and (tail.error is not None or tail.is_all_committed))
        self.progress.stop()
        self.tail = None
        self.grant_credit(tail)
        if tail.has_recorded:
            self._pauses = backoff(QUESTION_S)
        if not self._holds(row):
            self._unfollow()
            self._group.membership.release(row)
        elif tail.error is not None:
            raise tail.error
        elif tail.after is not None:
            # If this fails, the follower reports the same event after the next opening.
            await tail.after()

    async def _until(self, condition: Callable[[], bool]) -> None:
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    def _failed(self, error: Exception) -> None:
        if isinstance(error, Conflict):
            # This is normal: another process was faster.
            logger.info("restarting the recording of stream %r: %s", self.name, ended(error))
        else:
            self._group.outages.failed(self.log_name, error)
            self.is_refused = True
        self.progress.reconnects += 1

    def _unfollow(self) -> None:
        if self.following:
            self._group.follower.leave(self.name)
            self.following = 0

    # --- from the membership ------------------------------------------------------------------------------------------

    def take(self) -> None:
        """Start to record the stream, which this member holds now."""
        if self.tail is None and not self.is_held:
            self.is_held, self.is_refused, self.progress.is_standby = True, False, False
            self._changed.set()

    def give_up(self) -> None:
        """Stop recording the stream: commit the messages that were read, and release it."""
        self.is_held = False
        self.close()

    def drop_row(self) -> None:
        """Drop the row, to look up a new one: the stream was replaced or forgotten, or belongs to another broker."""
        self.row, self.is_confirmed = None, False
        self._changed.set()

    def stand_by(self) -> None:
        """Stand by, since another member records the stream."""
        if not self.progress.is_standby:
            self.is_refused = True
            self.progress.stand_by()
            self._group.outages.over(self.log_name)

    # --- from the follower --------------------------------------------------------------------------------------------

    def on_event(self, event: Attached | CaughtUp | Hole | Replaced | Failed) -> None:
        """Handle an event that holds no records."""
        tail = self.tail
        if isinstance(event, CaughtUp):
            self.progress.show(event.next_offset - 1)
            if tail is not None and tail.is_all_committed:
                self._group.outages.over(self.log_name)
        elif isinstance(event, Failed):
            self.progress.stop()
            self.progress.reconnects += 1
            if isinstance(event.error, NotFound | AccessRefused):
                self._on_inaccessible(event.error)
        elif tail is None or tail.is_closing:
            # Any such event proves that the stream exists.
            self.is_confirmed = True
            self._changed.set()
        elif isinstance(event, Attached):
            self._attached(tail)
        elif isinstance(event, Hole):
            self.close(partial(self._skip_hole, tail.opened.stream, event.to_offset))
        else:
            self.close(partial(self._check_same, tail.opened.stream))

    def _attached(self, tail: "OpenTail") -> None:
        start = tail.recorded_to + 1
        self.progress.begin(start - 1, tail.unwritten)
        self.is_refused = False
        logger.info(
            "recording stream %r from offset %d on", self.name, start, extra={"stream": self.name, "from": start}
        )

    def skip_unreadable(self, row: StreamRow, to_offset: int, reason: str) -> None:
        """Skip messages that cannot be unpacked here."""
        self.close(partial(self._group.loop.ask, skip_unreadable, self._group.engine, row, to_offset, reason))

    def _on_inaccessible(self, error: Exception) -> None:
        """Handle a stream that does not exist, or that this user may not read. The follower keeps trying."""
        self.progress.show(None)
        self.is_refused = True
        if self.tail is not None and self.is_read:
            self.is_confirmed = False
            self.close(partial(self._wait_until_back, self.tail.opened.stream, error), is_followed=True)

    # --- the end of a tail --------------------------------------------------------------------------------------------

    def close(self, after: Callable[[], Awaitable[Any]] | None = None, *, is_followed: bool = False) -> None:
        """Stop reading. Call `after` once all that was read is committed, unless this member gave the stream up."""
        tail = self.tail
        if tail is not None and not tail.is_closing:
            tail.is_closing, tail.after = True, after
            if not is_followed:
                self._unfollow()
            self._changed.set()

    def failed(self, tail: "OpenTail", error: Exception) -> None:
        """Close a tail that cannot be committed: the stream is read again from the end of its coverage."""
        if not tail.is_over:
            tail.is_closing, tail.error = True, error
            self._changed.set()

    def committed(self, tail: "OpenTail") -> None:
        """Handle the commit of a batch."""
        self._group.outages.over(self.log_name)
        if tail.is_closing:
            self._changed.set()

    def grant_credit(self, tail: "OpenTail") -> None:
        """Release the records that filled a batch: the follower then grants the stream credit for more."""
        unreleased, tail.unreleased = tail.unreleased, []
        self._group.follower.done(*unreleased)

    async def _skip_hole(self, row: StreamRow, to_offset: int) -> None:
        self.progress.lost(await self._group.loop.ask(skip_hole, self._group.engine, row, to_offset))

    async def _check_same(self, row: StreamRow) -> None:
        """Cut the table back to where a changed stream agrees with it. If it is another stream, look up its row."""
        if not await self._group.loop.ask(self._group.broker.is_stream_of, row):
            self.row, self.is_held, self.is_confirmed = None, False, True

    async def _wait_until_back(self, row: StreamRow, error: Exception) -> None:
        """Release the stream, and wait until the broker has it again."""
        if isinstance(error, StreamNotFound):
            await self._group.loop.ask(add_missing_event, self._group.engine, row)
        self.row, self.is_held = None, False
        self._group.membership.release(row)
        await self._wait_for_broker()


class OpenTail(Share):
    """The tail of an open stream: while one batch is committed, the next one is filled.

    There are at most two batches, so memory is bounded for any backlog. A single message is committed immediately;
    under load, a batch grows while the previous one is being committed.
    """

    def __init__(self, stream: StreamRecording, opened: Opened) -> None:
        self.stream = stream
        self.opened = opened
        self._new_batch = partial(Batch, opened.tail.stream_id, opened.extractor, with_time=opened.tail.with_time)
        self._checkpoint_offset, self._checkpoint_at = -1, 0.0
        self.filling = self._new_batch()
        super().__init__(opened.tail, self.filling)
        self.committing: Batch | None = None
        """The batch that is being committed, or waits for a retry because its range was locked."""
        self.unreleased: list[Records] = []
        """Records that filled the batch. They are released once there is room, and the follower then grants credit."""
        self.is_closing = False
        """Whether reading has stopped. The tail ends once all that was read is committed, or with an error."""
        self.after: Callable[[], Awaitable[Any]] | None = None
        """Called at the end of the tail."""
        self.error: Exception | None = None
        self.recorded_to = opened.tail.to_offset - 1
        self.first_offset = opened.stream.first_offset or 0
        """The first retained offset, as last queried after a message was recorded. Rows below it may be pruned."""

    def add(self, part: RecordBatch) -> None:
        """Add records to the batch that is being filled."""
        self.filling.add(part)
        if is_on(Part.RECORDER):
            add_links(self.filling, part)

    def is_full(self, busy: int) -> bool:
        """Return whether the batch must be committed before more is read; `busy` streams have something to commit."""
        bytes_max = max(BATCH_BYTES_MIN, BATCH_BYTES_MAX // max(1, busy))
        return self.filling.is_full or self.filling.line_bytes >= bytes_max

    @property
    def is_over(self) -> bool:
        """Whether the tail has ended."""
        return self.stream.tail is not self or self.error is not None

    @property
    def is_all_committed(self) -> bool:
        """Whether everything that was read is committed."""
        return self.committing is None and not self.filling.messages

    @property
    def has_recorded(self) -> bool:
        """Whether anything was committed since the tail was opened."""
        return self.recorded_to >= self.opened.tail.to_offset

    @property
    def is_known(self) -> bool:
        """Whether a recorded message distinguishes the stream from another of the same name."""
        return self.opened.known is not None or self.has_recorded

    def unwritten(self) -> float | None:
        """Return when the oldest uncommitted message was written; None if there is none."""
        for batch in (self.committing, self.filling):
            if batch is not None and batch.oldest_at is not None:
                return batch.oldest_at
        return None

    def take(self) -> None:
        """Take the filled batch for the next commit; if the last batch was not committed, take it again."""
        if self.committing is None:
            self.committing = self.batch = self.filling
            self.filling = self._new_batch()
        self.is_committed = False
        self.checkpoint = (
            self.batch.last_offset - self._checkpoint_offset >= CHECKPOINT_OFFSETS
            or time.monotonic() - self._checkpoint_at >= _CHECKPOINT_S
        )

    def committed(self) -> None:
        """Handle the commit of the batch."""
        batch, self.committing = self.batch, None
        self.batch = self.filling  # frees the lines
        if self.checkpoint:
            self._checkpoint_offset, self._checkpoint_at = batch.last_offset, time.monotonic()
        self.recorded_to = batch.last_offset
        self.stream.progress.count(batch)
        if not self.is_over:
            self.stream.progress.written(batch.last_offset, batch.newest_at)
        self.stream.committed(self)
