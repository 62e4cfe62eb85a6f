"""One partition of a member: a task opens it at its stored position, reads it, and judges its messages.

Partitions do not block each other: one that cannot continue, because its batch is in use, an adopted message cannot be
read yet, or PostgreSQL is unavailable, keeps its events and retries.
"""

import asyncio
import contextlib
import logging
import time
from collections import deque
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Final

from relatum.contexts._entries import Adoption
from relatum.contexts._move_store import lost_controls
from relatum.contexts._partition_following import Following, Opened, Piece
from relatum.errors import OffsetExpired, OffsetNotFound, RelatumError, StreamNotFound, StreamUnavailable
from relatum.following import Attached, Event, Failed, Hole, Records, Replaced
from relatum.reading import Message, StreamReader, ends_of_known
from relatum.waiting import backoff

if TYPE_CHECKING:
    from relatum.contexts._serial_member import Member

logger = logging.getLogger("relatum.serial")

REPEATED_S: Final = 120.0
"""After a stream lost its end, messages are delivered again from so many seconds before the last one read."""

IDLE_S: Final = 10.0
"""Seconds in which a stream with messages must deliver one."""


def reading_of(stream: str) -> str:
    """The name of reading a partition in the log."""
    return f"reading of partition {stream!r}"


class Partition:
    """A partition. Only the loop uses it, except `following`, with which the application's threads commit."""

    def __init__(self, member: "Member", partition_id: int, stream: str) -> None:
        self.partition_id = partition_id
        self.stream = stream
        self.following: Following | None = None
        """Its messages and progress; None before it is opened."""
        self.number = self.served = 0
        """The number of its subscription, 0 to ignore events; and its last turn."""
        self.looks_at = 0.0
        """When the next check is due."""
        self._member = member
        self._store = member.store
        self._events: deque[Event] = deque()
        self._opened: Opened | None = None
        self._pauses = backoff()
        self._changed = asyncio.Event()
        self._task = member.loop.spawn(self._run())

    def receive(self, event: Event) -> None:
        self._events.append(event)
        self._changed.set()

    def wake(self) -> None:
        """Wake the task: there is room for more, or the partition must be reopened."""
        self._changed.set()

    def stop(self) -> None:
        """End the task, and stop handing out batches."""
        self._task.cancel()
        self._forget()
        self._member.follower.leave(self.stream)
        self._member.outages.forget(reading_of(self.stream))

    async def _run(self) -> None:
        while True:
            self._changed.clear()
            try:
                await self._go_on()
            except Exception as error:  # noqa: BLE001 - any failure is retried
                if not isinstance(error, RelatumError):
                    # The failure may have come in the middle of a change.
                    self._forget()
                self._member.outages.failed(reading_of(self.stream), error)
                await asyncio.sleep(next(self._pauses))
            else:
                await self._changed.wait()

    async def _go_on(self) -> None:
        """Open the partition if needed, and handle its events."""
        while True:
            if self._opened is None or (self.following is not None and self.following.is_over):
                self._forget()
                await self._look_up()
            if not self._events or not await self._handle(self._events[0]):
                return
            if self._events:
                self._member.follower.done(self._events.popleft())
            self._pauses = backoff()

    async def _look_up(self) -> None:
        """Read the stored position, and follow the stream from there."""
        opened = await self._member.loop.ask(self._store.open, self.partition_id)
        if opened is None:
            self._member.leave(self)
            return
        self._opened = opened
        self.number = self._member.follower.follow(self.stream, opened.read_from, known=opened.known_by)

    def _forget(self) -> None:
        """Drop the unstored state, and open the partition again."""
        if self.following is not None:
            self.following.is_over = True
        self.following = self._opened = None
        self.number = 0
        self._member.follower.done(*self._events)
        self._events.clear()

    async def _handle(self, event: Event) -> bool:
        """Handle an event; False if it must wait."""
        if isinstance(event, Records):
            return await self._put(event)
        if isinstance(event, Attached):
            self._open()
        elif isinstance(event, Hole):
            await self._pass_hole(event)
        elif isinstance(event, Replaced):
            await self._find_again()
        elif isinstance(event, Failed) and isinstance(event.error, StreamNotFound):
            await self._drain()
        return True

    async def _drain(self) -> None:
        """End a retired partition whose stream was deleted."""
        if await self._member.loop.ask(self._store.drain, self.partition_id):
            logger.info("partition %r drained: its stream is gone", self.stream, extra={"stream": self.stream})
            self._member.leave(self)

    def _open(self) -> None:
        """Start handing out: the stream is the expected one. After a lost connection it is open already."""
        opened = self._opened
        assert opened is not None, "it is followed from there"
        header = self._member.batches.header
        assert header is not None, "it was agreed on at the start"
        if self.following is not None:
            return
        following = Following(
            self.partition_id, self.stream, opened, header=header, options=self._member.options, now=time.monotonic()
        )
        extra = {"stream": self.stream, "position": following.position, "from": following.next_offset}
        logger.info("partition %r opened", self.stream, extra=extra)
        self.following = following

    async def _put(self, event: Records) -> bool:
        following = self.following
        assert following is not None, "it was attached"
        if not following.has_room:
            return False
        piece = Piece.plain(event.batch)
        if piece is None:
            # In a thread: adopted messages are read, and names looked up.
            piece = await self._member.ask_broker(Piece.of, event.batch, self._read_adopted, self._is_partition)
        following.put(piece, time.monotonic())
        self._member.batches.look(following)
        self._member.outages.over(reading_of(self.stream))
        return True

    async def _pass_hole(self, hole: Hole) -> None:
        """Skip messages that retention dropped; their fences and markers in the database still matter."""
        opened, following = self._opened, self.following
        assert opened is not None, "it is followed from there"
        assert following is not None, "it was attached"
        if following.has_read:
            # A partition that is reopened at its stored position meets the same hole.
            self._forget()
            return
        # Dropped fences and markers matter for the messages after them.
        first, of_partition = hole.to_offset, (self._store.database, self.partition_id)
        controls = await self._member.loop.ask(lost_controls, *of_partition, hole.from_offset, first)
        now = time.monotonic()
        for offset, control in controls:
            following.replay(offset, control, now)
        following.lost_to(first, now)
        self._member.batches.look(following)
        if opened.position < first and opened.position > 0:
            extra = {"stream": self.stream, "from": opened.position, "to": first}
            lost = (opened.position, first - 1, self.stream)
            logger.warning("retention dropped offsets %d to %d of %r before they were consumed", *lost, extra=extra)

    async def _find_again(self) -> None:
        """The stream differs from what was read: continue where it agrees with the stored state."""
        if self.following is None:
            assert self._opened is not None, "it is followed from there"
            await self._member.ask_broker(self._go_back, self._opened)
        # Otherwise, perhaps only messages that were read but not stored are missing.
        self._forget()

    # --- called in threads ------------------------------------------------------------------------------------------

    def _go_back(self, opened: Opened) -> None:
        """Resume two minutes before the last message read, if the stream has such messages; else at its beginning."""
        assert opened.known_by is not None, "only a stream that is known can be another one"
        reader = self._member.follower.reader()
        bounds = ends_of_known(reader, self.stream)
        last_ms = opened.known_by.chunk_ms
        at = None if last_ms is None or bounds.last is None else self._first_of_last_minutes(reader, last_ms)
        if at is None:
            logger.warning("stream %r replaced", self.stream, extra={"stream": self.stream})
            self._store.restart(self.partition_id, bounds.first or 0, markers_from=0, fences_from=0)
            return
        at = min(at, opened.position)
        extra = {"stream": self.stream, "from": at}
        logger.warning("stream %r lost its end: read again from %d", self.stream, at, extra=extra)
        self._store.restart(self.partition_id, at, markers_from=at, fences_from=bounds.end)

    def _first_of_last_minutes(self, reader: StreamReader, last_ms: int) -> int | None:
        """Find the first offset written in the two minutes before a moment; None if there is none.

        Messages written after the loss come later in the stream. Their times are later too, or earlier by less than two
        minutes (nodes' clocks differ), so none of them is before that offset. If all of these minutes were lost, the
        result is None, and nothing is skipped.
        """
        since = datetime.fromtimestamp(max(0.0, last_ms / 1_000 - REPEATED_S), UTC)
        found = reader.batches(self.stream, since, follow=False, idle_s=IDLE_S)
        with contextlib.closing(found) as batches:
            batch = next(batches, None)
        if batch is None or batch.chunk_ms is None or batch.chunk_ms > last_ms:
            return None
        return batch.first_offset

    def _is_partition(self, stream: str) -> bool:
        if self._member.is_partition(stream):
            return True
        extra = {"stream": self.stream, "named": stream}
        logger.warning("skipped a control message in %r that names %r, no partition", self.stream, stream, extra=extra)
        return False

    def _read_adopted(self, adoption: Adoption) -> Message | None:
        """Read the message that an adoption names; None if retention dropped it, or its partition was deleted.

        It was confirmed before it was adopted. If it is not visible, the replica lags, and the read is retried; only
        the word of the stream's leader ends that: the stream was declared again.
        """
        try:
            return self._member.follower.reader().read(adoption.stream, adoption.offset)
        except (OffsetExpired, StreamNotFound):
            pass
        except OffsetNotFound as error:
            if not error.is_proven:
                raise StreamUnavailable(
                    f"An adopted message cannot be read yet: {error}", stream=self.stream
                ) from error
        extra = {"stream": adoption.stream, "offset": adoption.offset}
        logger.warning("an adopted message, %r at %d, no longer exists", adoption.stream, adoption.offset, extra=extra)
        return None
