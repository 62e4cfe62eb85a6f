"""One partition of a member: a task opens it at its stored position, reads it, and judges its messages.

Partitions do not block each other. A partition keeps its events and retries while its batch is not acknowledged, an
adopted message cannot be read yet, or PostgreSQL is unavailable.

The loop hands out steps, and the application's threads commit them. PostgreSQL refuses the commit of a lost partition;
the thread reports other commits to the loop. After any failure in the loop, the partition reopens at its stored state.
"""

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

import sqlalchemy as sa

from relatum.common.waiting import Pauses, backoff
from relatum.contexts._move_store import lost_controls
from relatum.contexts._partition_following import Following, Opened, Piece, Step
from relatum.contexts._partition_log import Adoption
from relatum.contexts._serial_store import lost
from relatum.errors import (
    OffsetExpired,
    OffsetNotFound,
    PartitionLost,
    RelatumError,
    StreamNotFound,
    StreamUnavailable,
)
from relatum.reading import Message, StreamReader, leaders_bounds
from relatum.reading.following import Attached, Event, Failed, Hole, Records, Replaced
from relatum.store.settling import CommitInDoubt

if TYPE_CHECKING:
    from relatum.contexts._serial_member import Member

logger = logging.getLogger("relatum.serial")

REPEATED_S: Final = 120.0
"""If a stream has lost its tail, delivery resumes this many seconds before the last message read."""

IDLE_S: Final = 10.0
"""Seconds within which a stream that has messages must deliver one."""


def reading_of(stream: str) -> str:
    return f"reading of partition {stream!r}"


class Partition:
    """One partition. Not thread-safe, except for commits and `give_back`: only the loop calls it."""

    _opened: Opened
    """The stored state, as of the subscription."""

    def __init__(self, member: "Member", partition_id: int, stream: str) -> None:
        self.member = member
        self.partition_id = partition_id
        self.stream = stream
        self.following: Following | None = None
        """The partition's messages and progress; None before it is opened."""
        self.subscription = self.served = 0
        """The number of the subscription, 0 for none; and the partition's last turn."""
        self._store = member.store
        self._events: deque[Event] = deque()
        self._pauses = backoff()
        self._changed = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._task = member.loop.spawn(self._run())

    def receive(self, event: Event) -> None:
        self._events.append(event)
        self._changed.set()

    def stop(self) -> None:
        self._task.cancel()
        self._forget()
        self.member.follower.leave(self.stream)
        self.member.outages.forget(reading_of(self.stream))

    # --- reading ----------------------------------------------------------------------------------------------------

    async def _run(self) -> None:
        while True:
            self._changed.clear()
            try:
                await self._process_events()
            except Exception as error:  # noqa: BLE001 - any failure is retried
                if not isinstance(error, RelatumError):
                    # The failure may have interrupted a change.
                    self._forget()
                self.member.outages.failed(reading_of(self.stream), error)
                await asyncio.sleep(next(self._pauses))
            else:
                await self._changed.wait()

    async def _process_events(self) -> None:
        """Open the partition at its stored position if needed, and handle the events received."""
        while True:
            if not self.subscription or (self.following is not None and self.following.is_over):
                self._forget()
                opened = await self.member.loop.ask(self._store.open, self.partition_id)
                if opened is None:
                    return self.member.leave(self)
                self._opened = opened
                self.subscription = self.member.follower.follow(self.stream, opened.read_from, known=opened.known_by)
            if not self._events or not await self._handle(self._events[0]):
                return
            if self._events:
                self.member.follower.done(self._events.popleft())
            self._pauses = backoff()

    def _forget(self) -> None:
        """Drop the unstored state and the events. The task then opens the partition again."""
        if self.following is not None:
            self.following.is_over = True
        self.following = None
        self.subscription = 0
        self.member.follower.done(*self._events)
        self._events.clear()

    async def _handle(self, event: Event) -> bool:
        """Handle an event. Returns False if the event must wait."""
        if isinstance(event, Records):
            return await self._add_records(event)
        if isinstance(event, Attached):
            self._open()
        elif isinstance(event, Hole):
            await self._skip_hole(event)
        elif isinstance(event, Replaced):
            # If the partition was open, only messages that were read but not stored may be missing: just reopen it.
            if self.following is None:
                await self.member.ask_broker(self._move_position_back)
            self._forget()
        elif isinstance(event, Failed) and isinstance(event.error, StreamNotFound):
            await self._drain()
        return True

    async def _drain(self) -> None:
        """End a retired partition whose stream was deleted."""
        if await self.member.loop.ask(self._store.drain, self.partition_id):
            logger.info("partition %r drained: its stream was deleted", self.stream, extra={"stream": self.stream})
            self.member.leave(self)

    def _open(self) -> None:
        """Start delivery: the follower has checked the stream. After a lost connection, the partition is still open."""
        if self.following is not None:
            return
        opened, member = self._opened, self.member
        extra = {"stream": self.stream, "position": opened.position, "from": opened.read_from}
        logger.info("partition %r opened", self.stream, extra=extra)
        self.following = Following(
            self.partition_id, self.stream, opened, header=member.header, options=member.options, now=time.monotonic()
        )

    async def _add_records(self, event: Records) -> bool:
        following = self.following
        assert following is not None, "records follow the attachment"
        if not following.has_room:
            return False
        piece = Piece.plain(event.batch)
        if piece is None:
            # This reads adopted messages and looks up names, so it needs a thread.
            piece = await self.member.ask_broker(Piece.of, event.batch, self._read_adopted, self._is_partition)
        following.put(piece, time.monotonic())
        self._look()
        self.member.outages.over(reading_of(self.stream))
        return True

    async def _skip_hole(self, hole: Hole) -> None:
        """Skip messages that retention dropped. Read their fences and markers from the database."""
        opened, following = self._opened, self.following
        assert following is not None, "holes follow the attachment"
        if following.has_read:
            # Reopened at its stored position, the partition gets the same hole again.
            return self._forget()
        # Dropped fences and markers decide about the messages behind them.
        first, of_partition = hole.to_offset, (self._store.database, self.partition_id)
        controls = await self.member.loop.ask(lost_controls, *of_partition, hole.from_offset, first)
        now = time.monotonic()
        for offset, control in controls:
            following.replay(offset, control, now)
        following.lost_to(first, now)
        self._look()
        if opened.position < first and opened.position > 0:
            extra = {"stream": self.stream, "from": opened.position, "to": first}
            dropped = opened.position, first - 1, self.stream
            logger.warning("retention dropped offsets %d to %d of %r before they were consumed", *dropped, extra=extra)

    # --- delivery, and the changes after commits --------------------------------------------------------------------

    def is_due(self, now: float) -> bool:
        at = None if self.following is None else self.following.due_at()
        return at is not None and at <= now

    def take(self) -> Step:
        """Return the step that is due."""
        assert self.following is not None, "only an open partition is due"
        with self._reopen_on_error():
            step = self.following.take(time.monotonic())
        self._changed.set()
        return step

    def change(self, change: Callable[..., object] | None = None, *args: Any) -> None:
        """Change the open partition, then deliver or store the step that is due."""
        following = self.following
        if following is None:
            return
        with self._reopen_on_error():
            if change is not None:
                change(following, *args)
            self._look()
        self._changed.set()
        if following.is_leaving:
            self.member.surplus.wake()

    def _look(self) -> None:
        """Hand out a batch or store the position, now if it is due, otherwise by a timer."""
        following, now = self.following, time.monotonic()
        if following is None:
            return
        silent_at = following.silent_due_at()
        if silent_at is not None and silent_at <= now:
            self.member.loop.spawn(self._store_silent(self.take()))
            silent_at = None
        due_at = following.due_at()
        if due_at is not None and due_at <= now:
            self.member.hand_out()
            due_at = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        at = min((at for at in (silent_at, due_at) if at is not None), default=None)
        if at is not None:
            self._timer = self.member.loop.call_later(at - now, self.change)

    @contextlib.contextmanager
    def _reopen_on_error(self) -> Iterator[None]:
        following = self.following
        try:
            yield
        except Exception:
            if following is not None:
                following.is_over = True
            self._changed.set()
            raise

    def _committed(self, following: Following, step: Step) -> None:
        for pause_s in following.committed(step, time.monotonic()):
            self.member.pause_s.observe(pause_s)
        if step.is_closed:
            self.member.holds.wake()

    async def _store_silent(self, step: Step) -> None:
        task, pauses = f"storing the position in {self.stream!r}", Pauses()
        while True:
            try:
                await self.member.loop.ask(self.commit, step)
            except PartitionLost:
                return self.member.outages.forget(task)  # The partition is read from its stored position again.
            except Exception as error:  # noqa: BLE001 - any failure is retried
                self.member.outages.failed(task, error)
                await asyncio.sleep(pauses.after(error))
            else:
                return self.member.outages.over(task)

    # --- commits, in the application's threads ----------------------------------------------------------------------

    def give_back(self, step: Step) -> None:
        self.member.loop.call(self.change, Following.give_back, step)

    def check(self, step: Step) -> Following:
        """Return the open partition, or raise `PartitionLost` if the step can no longer be committed."""
        following = self.following
        if following is None or following.is_over or following.outstanding is not step:
            raise lost(self.stream, self._store.name)
        return following

    def commit(self, step: Step) -> None:
        """Store a step that was handed out. After `DatabaseUnavailable`, repeat the call."""
        following = self.check(step)
        if self._was_committed(following, step):
            return
        # Without an answer, the commit stays in doubt.
        following.in_doubt = token = self._store.tokens.new()
        is_stored = self._store.commit(following, step, token)
        # While this commit had no answer, the step may have been given back and committed again.
        if following.in_doubt is token:
            following.in_doubt = None
        if not is_stored:
            self._drop(following)
            raise lost(self.stream, self._store.name)
        self._store.tokens.committed(token)
        self._report_commit(step)

    def _was_committed(self, following: Following, step: Step) -> bool:
        """Return whether an earlier commit without an answer took effect. False: there was no such commit."""
        token = following.in_doubt
        if token is None:
            return False
        was_committed = self._store.tokens.was_committed(self._store.database.engine, token)
        following.in_doubt = None
        if was_committed:
            self._report_commit(step)
        return was_committed

    @contextlib.contextmanager
    def transaction(self, step: Step) -> Iterator[sa.Connection]:
        """Open a transaction that stores a step when it commits; see `SerialBatch.transaction`."""
        following = self.check(step)
        if self._was_committed(following, step):
            raise lost(self.stream, self._store.name)
        try:
            with self._store.joined(following, step, stop=self.member.stopping) as connection:
                yield connection
        except (PartitionLost, CommitInDoubt):
            # After a commit with an unknown outcome, the partition reopens at PostgreSQL's position: this member or
            # another one delivers uncommitted messages again.
            self._drop(following)
            raise
        self._report_commit(step)

    def _drop(self, following: Following) -> None:
        following.is_over = True
        self.member.loop.call(self.change)

    def _report_commit(self, step: Step) -> None:
        self.member.acknowledged(step)
        self.member.loop.call(self.change, self._committed, step)

    # --- calls in threads of the loop -------------------------------------------------------------------------------

    def _move_position_back(self) -> None:
        """Move the position to two minutes before the last message read, or to the start if the stream lost those."""
        opened = self._opened
        assert opened.known_by is not None, "only a stream that was read before can be replaced"
        reader = self.member.follower.reader
        bounds = leaders_bounds(reader, self.stream)
        last_ms = opened.known_by.chunk_ms
        at = None if last_ms is None or bounds.last is None else self._first_recent_offset(reader, last_ms)
        if at is None:
            logger.warning("stream %r replaced: read from its start", self.stream, extra={"stream": self.stream})
            self._store.restart(self.partition_id, bounds.first or 0, markers_from=0, fences_from=0)
            return
        at = min(at, opened.position)
        extra = {"stream": self.stream, "from": at}
        logger.warning("stream %r lost its end: read again from %d", self.stream, at, extra=extra)
        self._store.restart(self.partition_id, at, markers_from=at, fences_from=bounds.end)

    def _first_recent_offset(self, reader: StreamReader, last_ms: int) -> int | None:
        """Return the first offset written in the two minutes before a time; None if there is none.

        No message written after the loss is before that offset: its time is later, or earlier by less than two minutes
        (nodes' clocks differ). None means that all messages of these minutes were lost; then nothing is skipped.
        """
        since = datetime.fromtimestamp(max(0.0, last_ms / 1_000 - REPEATED_S), UTC)
        with contextlib.closing(reader.batches(self.stream, since, follow=False, idle_s=IDLE_S)) as batches:
            batch = next(batches, None)
        if batch is None or batch.chunk_ms is None or batch.chunk_ms > last_ms:
            return None
        return batch.first_offset

    def _is_partition(self, stream: str) -> bool:
        if self.member.is_partition(stream):
            return True
        extra = {"stream": self.stream, "named": stream}
        text = "skipped a control message in %r: it names %r, which is not a partition of the super stream"
        logger.warning(text, self.stream, stream, extra=extra)
        return False

    def _read_adopted(self, adoption: Adoption) -> Message | None:
        """Read the message that an adoption names. None: it was dropped by retention, or deleted with its stream.

        The message was confirmed before its adoption. If it is not visible, the replica lags: the read is retried until
        the stream's leader reports that it has no such message, because the stream was declared again.
        """
        try:
            found = self.member.follower.reader.read(adoption.stream, adoption.offset)
            if found.headers.get(self.member.header) == adoption.context:
                return found
        except (OffsetExpired, StreamNotFound):
            pass
        except OffsetNotFound as error:
            if not error.is_proven:
                raise StreamUnavailable(
                    f"an adopted message cannot be read yet: {error}", stream=self.stream
                ) from error
        extra = {"stream": adoption.stream, "offset": adoption.offset}
        logger.warning("an adopted message, %r at %d, no longer exists", adoption.stream, adoption.offset, extra=extra)
        return None
