"""One followed stream: how far it was read, and whether it is still the known one.

If a message of the stream is known, reading begins at that message, not after it. So usually the first chunk shows
whether the stream is the same: the message is in it, or a different one. The follower queries the stream's leader

- if nothing or only earlier records arrive: the node lags, or the stream lost its end or was declared again;
- if the first chunk begins after the known message, or a later chunk after the next offset: retention dropped records,
  the stream has a gap, or it is a different stream. Records that only this node dropped are read from another node.

Chunks that arrive before the answer are queued.
"""

import asyncio
import logging
import math
import time
from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

from relatum.common.waiting import Pauses, may_repeat
from relatum.errors import ChunkCorrupt, StreamNotFound, StreamNotHere, StreamUnavailable
from relatum.reading import Agreement, Message, NodeAddress, Position, RecordBatch, StreamBounds, position_of
from relatum.reading.following._connection import Interrupted, Subscription
from relatum.reading.following._connections import SETTLED_S
from relatum.reading.following._delivery import Attached, CaughtUp, Event, HeldChunk, Hole, Replaced
from relatum.wire.chunk import Chunk

if TYPE_CHECKING:
    from relatum.reading.following._follower import StreamFollower

logger = logging.getLogger("relatum.follower")

RECORD_KEPT_BYTES: Final = 4 << 10
"""Maximum bytes of a last record that is kept to identify the stream. Of a larger record, only a checksum is kept."""


class Finding(NamedTuple):
    """The leader's answers: whether the known message is unchanged, and the stream's bounds. None: not asked."""

    agreement: Agreement | None
    bounds: StreamBounds | None


class StreamDiffers(Exception):
    """The stream differs from the known one."""


class Followed:
    """A stream being followed. All records before `next_offset` were read; `known` is the last known message.

    `node`: The node to read from; None: the home node.
    `is_attached`: Whether `Attached` was reported since reading began.
    `items`, `is_ready` and `unreleased_bytes` belong to `Delivery`.
    """

    def __init__(
        self, follower: "StreamFollower", stream: str, number: int, next_offset: int, known: Position | None
    ) -> None:
        self._follower = follower
        self.stream = stream
        self.number = number
        self.next_offset = next_offset
        self.known = known
        self.node: NodeAddress | None = None
        self.items: deque[Event | HeldChunk] = deque()
        self.is_ready = self.is_over = self.is_attached = False
        self.unreleased_bytes = 0
        self._inbox: deque[HeldChunk | Exception | None] = deque()
        """Unprocessed items: chunks, None for "the node has no more now", and exceptions that end the reading."""
        self._arrival = asyncio.Event()
        self._subscription: Subscription | None = None
        self._is_agreed = self._is_confirmed = self._has_delivered = False
        self._last_delivered: tuple[int, bytes, int | None] | Position | None = None
        self._started_at = math.inf
        self._pauses = Pauses()
        self.task: asyncio.Task[None] | None = None

    @property
    def is_read(self) -> bool:
        return self._subscription is not None

    async def run(self) -> None:
        """Follow the stream until the task is cancelled."""
        while True:
            try:
                await self._attempt()
            except Interrupted:
                pass
            except Exception as error:  # noqa: BLE001 - reported, and retried
                await self._pause(error)

    async def _attempt(self) -> None:
        """Read over one subscription, until reading must restart at another offset or on another node."""
        try:
            try:
                self._subscription = await self._follower.connections.subscribe(self)
                while await self._process_next():
                    pass
            finally:
                self.stop_reading()
        except StreamDiffers:
            self._put(Replaced(self.stream, self.number))
            # The owner now ends the following. If it raised instead, its error arrives here and reading restarts.
            try:
                await self._next_item()
            finally:
                self._inbox.clear()
        except (StreamNotHere, ChunkCorrupt) as refused:
            # Each node has its own files: another one may have what this one lacks or has damaged.
            tried, self.node = self.node, None
            try:
                self.node = await self._follower.connections.other_node(self.stream, tried)
            except StreamNotHere as none_left:
                raise (refused if isinstance(refused, ChunkCorrupt) else none_left) from None
            if isinstance(refused, ChunkCorrupt):
                logger.warning("reading stream %r from another node: %s", self.stream, refused)
        except StreamNotFound as missing:
            if error := await self._follower.missing_error(self.stream):
                raise error from missing
            # The stream exists now: it was declared in the meantime.
            await asyncio.sleep(self._pauses.after(StreamUnavailable("", stream=self.stream)))

    async def _pause(self, error: Exception) -> None:
        """Report that the stream cannot be read now, and wait before the next attempt."""
        if self._has_delivered or time.monotonic() - self._started_at >= SETTLED_S:
            self._pauses = Pauses()
        self.node, self._has_delivered, self._started_at = None, False, math.inf
        # An unreachable broker was reported already, and makes all queries fail.
        if not (self._follower.connections.is_away and may_repeat(error)):
            self._follower.on_failed(self, error)
        await asyncio.sleep(self._pauses.after(error))

    # --- one reading --------------------------------------------------------------------------------------------------

    def begin(self) -> int:
        """Prepare for a new subscription, and return the offset to start at."""
        self.known = self._last_known() or self.known
        self._is_agreed, self._is_confirmed, self.is_attached = self.known is None, False, False
        self._has_delivered, self._started_at = False, time.monotonic()
        return self.next_offset if self.known is None else self.known.offset

    def stop_reading(self) -> None:
        """End the subscription, and drop unprocessed chunks. Idempotent."""
        subscription, self._subscription = self._subscription, None
        self._is_agreed = False
        if subscription is not None:
            subscription.end()
        self._clear_inbox()

    def end(self) -> None:
        """Stop following: no more events are delivered."""
        self.is_over = True
        self.stop_reading()
        self._follower.delivery.forget(self)
        if self.task is not None:
            self.task.cancel()

    def restart_at(self, offset: int, error: Exception) -> None:
        """Restart reading at an offset, because delivery failed there."""
        self.next_offset = offset
        self._follower.delivery.forget(self)
        self._clear_inbox()
        self._enqueue(error)

    def _clear_inbox(self) -> None:
        inbox, self._inbox = self._inbox, deque()
        for held in inbox:
            if isinstance(held, HeldChunk):
                self._follower.delivery.drop(held)

    # --- from the connection ------------------------------------------------------------------------------------------

    def on_chunk(self, chunk: Chunk) -> None:
        """Receive a chunk. Nearly always, it continues the last one and is delivered directly."""
        assert self._subscription is not None, "chunks arrive by a subscription"
        held = HeldChunk(chunk, self, self._subscription)
        self._follower.delivery.hold(held)
        if self._is_agreed and not self._inbox and held.first_offset == self.next_offset:
            self._deliver(held)
        else:
            self._enqueue(held)
        self.grant()

    def on_drained(self) -> None:
        """Note that the node has no more records now."""
        if self._is_agreed and not self._inbox:
            self._caught_up()
        else:
            self._enqueue(None)

    def on_ended(self, why: Exception) -> None:
        self._enqueue(why)

    def _enqueue(self, item: HeldChunk | Exception | None) -> None:
        self._inbox.append(item)
        self._arrival.set()

    def grant(self) -> None:
        if self._subscription is not None:
            self._subscription.grant()

    # --- the inbox ----------------------------------------------------------------------------------------------------

    async def _process_next(self) -> bool:
        """Process the first item of the inbox; return False if reading must restart."""
        held = await self._next_item()
        if not self._is_agreed:
            return await self._identify(held)
        if held is None:
            self._caught_up()
        elif held.last_offset < self.next_offset:
            self._drop(held)
        else:
            if held.first_offset > self.next_offset:
                self._skip_gap(held, await self._query_leader(held, None, is_end=False))
            self._deliver(held)
        self._inbox.popleft()
        return True

    async def _next_item(self) -> HeldChunk | None:
        """Wait for the first item of the inbox, and return it, or raise an exception. It stays in the inbox."""
        while not self._inbox:
            self._arrival.clear()
            await self._arrival.wait()
        first = self._inbox[0]
        if isinstance(first, Exception):
            raise first
        return first

    async def _identify(self, held: HeldChunk | None) -> bool:
        """Compare a chunk with the known message, or query the leader; return False if reading must restart."""
        known = self.known
        assert known is not None, "without a known message, any stream is accepted"
        if held is None or held.last_offset < known.offset:
            if not self._is_confirmed:
                finding = await self._query_leader(held, known, is_end=True)
                self._is_confirmed = True
                self._is_agreed = finding.agreement is Agreement.EXPIRED
                self._attached()
            if held is not None:
                self._drop(held)
            elif self._is_agreed:
                self._caught_up()
            self._inbox.popleft()
            return True
        message = held.at(known.offset)
        if message is None:
            # The chunk begins after the known message.
            finding = await self._query_leader(held, known, is_end=False)
            self._is_agreed = True
            self._skip_gap(held, finding)
            return True
        found = position_of(message)
        if not known.agrees(found.fingerprint, found.chunk_ms):
            raise StreamDiffers
        if known.offset >= self.next_offset:
            # The owner wants the known message or earlier ones, too.
            self.known = None
            return False
        self._is_agreed = True
        self._attached()
        return True

    async def _query_leader(self, held: HeldChunk | None, known: Position | None, *, is_end: bool) -> Finding:
        """Query the leader; see `StreamFollower.look`. With `is_end` False, the chunk `held` begins after a gap."""
        follower = self._follower
        gap = None if is_end or held is None else (self.next_offset, held.first_offset)
        try:
            finding = await follower.look(self.stream, known, gap)
        except Exception as error:
            if any(isinstance(each, Interrupted) for each in self._inbox):
                raise Interrupted from error
            raise
        first = self._inbox[0]
        if isinstance(first, Exception):
            # It arrived during the query, and ends this reading.
            raise first
        assert first is held, "the inbox is processed in order"
        if finding.agreement is Agreement.OTHER:
            raise StreamDiffers
        return finding

    def _skip_gap(self, held: HeldChunk, finding: Finding) -> None:
        """Continue after a gap. If the stream now begins after the next offset, retention made it: report a hole.

        An empty stream had the chunk a moment ago, so retention has dropped all messages up to it.
        """
        self._attached()
        assert finding.bounds is not None, "they are queried for a gap"
        first = finding.bounds.first
        if (first is None or first > self.next_offset) and held.first_offset > self.next_offset:
            self._put(Hole(self.stream, self.number, self.next_offset, held.first_offset))
        self.next_offset = max(self.next_offset, held.first_offset)

    def _attached(self) -> None:
        if not self.is_attached:
            self.is_attached = True
            self._follower.on_attached(self)
            self._put(Attached(self.stream, self.number, self.next_offset))

    def _caught_up(self) -> None:
        subscription = self._subscription
        has_more = any(isinstance(each, HeldChunk) for each in self._inbox)
        if subscription is not None and not subscription.is_quiet and not has_more:
            subscription.is_quiet = True
            self._attached()
            self._put(CaughtUp(self.stream, self.number, self.next_offset))

    # --- delivering ---------------------------------------------------------------------------------------------------

    def _deliver(self, held: HeldChunk) -> None:
        self._attached()
        held.next_offset, self.next_offset = self.next_offset, held.last_offset + 1
        self._put(held)

    def _drop(self, held: HeldChunk) -> None:
        self._follower.delivery.drop(held)
        self.grant()

    def _put(self, item: Event | HeldChunk) -> None:
        self._follower.delivery.put(self, item)

    def note_delivered(self, batch: RecordBatch) -> None:
        """Remember the last delivered record, which identifies the stream."""
        self._has_delivered = True
        # It is not decoded here: this runs for each chunk, and the record is needed only after an interruption.
        self._last_delivered = batch.offsets[-1], batch.records[-1], batch.chunk_ms
        if len(batch.records[-1]) > RECORD_KEPT_BYTES:
            self._last_delivered = self._position()

    def _position(self) -> Position | None:
        if not isinstance(self._last_delivered, tuple):
            return self._last_delivered
        return position_of(Message.from_record(self.stream, *self._last_delivered))

    def _last_known(self) -> Position | None:
        """Return the position of the last message queued or delivered; None if there was none."""
        newest = next((item for item in reversed(self.items) if isinstance(item, HeldChunk)), None)
        if newest is None:
            return self._position()
        message = newest.at(newest.last_offset)
        return None if message is None else position_of(message)
