"""One followed stream: how far it was read, and whether it is still the known one.

If a message of the stream is known, reading begins at that message, not after it. So the first chunk shows without a
query whether the stream is the same: it contains the message, or a different one. Otherwise the follower queries
the stream's leader:

- if nothing arrives, or only earlier records: the node lags, or the stream lost its end or was declared again;
- if reading begins after the known message, or after the next one: retention dropped it, the stream has a gap, or it
  is a different stream.

Until the answer, arriving chunks are queued.
"""

import asyncio
import math
import time
from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

from relatum.common.waiting import Pauses, may_repeat
from relatum.errors import StreamNotFound, StreamNotHere, StreamUnavailable
from relatum.reading import Agreement, Message, NodeAddress, Position, RecordBatch, StreamBounds, position_of
from relatum.reading.following._connection import Interrupted, Subscription
from relatum.reading.following._connections import SETTLED_S
from relatum.reading.following._delivery import Attached, CaughtUp, Event, HeldChunk, Hole, Replaced
from relatum.wire.chunk import Chunk

if TYPE_CHECKING:
    from relatum.reading.following._follower import StreamFollower

RECORD_KEPT_BYTES: Final = 4 << 10
"""A last record of up to this many bytes is kept to recognise the stream; of a larger one, only a checksum."""


class Finding(NamedTuple):
    """Whether a stream agrees with the known message, and the stream's bounds; each None if not queried."""

    agreement: Agreement | None
    bounds: StreamBounds | None


class StreamDiffers(Exception):
    """Raised if the stream differs from the known one."""


class Followed:
    """A stream being followed: everything before `next_offset` was read, and `known` is the last known message.

    `node`: The node to read from; None: the home node.
    `is_attached`: Whether `Attached` was reported since reading began.
    `items`, `has_turn` and `given_bytes` belong to `Delivery`.
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
        self.has_turn = self.is_over = self.is_attached = False
        self.given_bytes = 0
        self._inbox: deque[HeldChunk | Exception | None] = deque()
        """Items to judge: chunks, None for "no more now", and exceptions that end reading."""
        self._came = asyncio.Event()
        self._subscription: Subscription | None = None
        self._is_agreed = self._is_vouched = self._has_given = False
        self._last: tuple[int, bytes, int | None] | Position | None = None
        self._begun_at = math.inf
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
        """Read over one subscription, until reading must start at another offset or on another node."""
        try:
            try:
                self._subscription = await self._follower.connections.subscribe(self)
                while await self._judge():
                    pass
            finally:
                self.stop_reading()
        except StreamDiffers:
            self._put(Replaced(self.stream, self.number))
            # The owner leaves soon. Otherwise an event was not delivered, which is raised: this will be found again.
            try:
                await self._first()
            finally:
                self._inbox.clear()
        except StreamNotHere:
            if self.node is not None:
                raise
            self.node = await self._follower.connections.other_node(self.stream)
        except StreamNotFound as missing:
            if error := await self._follower.why_missing(self.stream):
                raise error from missing
            # The stream was declared just now.
            await asyncio.sleep(self._pauses.after(StreamUnavailable("", stream=self.stream)))

    async def _pause(self, error: Exception) -> None:
        """Report that the stream cannot be read now, and wait before the next attempt."""
        if self._has_given or time.monotonic() - self._begun_at >= SETTLED_S:
            self._pauses = Pauses()
        self.node, self._has_given, self._begun_at = None, False, math.inf
        # While the broker is unreachable, which was reported already, all queries fail.
        if not (self._follower.connections.is_away and may_repeat(error)):
            self._follower.on_failed(self, error)
        await asyncio.sleep(self._pauses.after(error))

    # --- one reading --------------------------------------------------------------------------------------------------

    def begin(self) -> int:
        """Prepare to read, for the first time or again; return the offset to start at."""
        self.known = self._last_known() or self.known
        self._is_agreed, self._is_vouched, self.is_attached = self.known is None, False, False
        self._has_given, self._begun_at = False, time.monotonic()
        return self.next_offset if self.known is None else self.known.offset

    def stop_reading(self) -> None:
        """End the subscription, and drop the chunks not judged yet. Idempotent."""
        subscription, self._subscription = self._subscription, None
        self._is_agreed = False
        if subscription is not None:
            self._follower.connections.unsubscribe(subscription)
        self._clear_inbox()

    def end(self) -> None:
        """Stop following: no more events are delivered."""
        self.is_over = True
        self.stop_reading()
        self._follower.delivery.forget(self)
        if self.task is not None:
            self.task.cancel()

    def begin_anew(self, offset: int, error: Exception) -> None:
        """Read again from an offset, since records from there on could not be delivered."""
        self.next_offset = offset
        self._follower.delivery.forget(self)
        self._clear_inbox()
        self._tell(error)

    def _clear_inbox(self) -> None:
        inbox, self._inbox = self._inbox, deque()
        for held in inbox:
            if isinstance(held, HeldChunk):
                self._follower.delivery.drop(held)

    # --- from the connection ------------------------------------------------------------------------------------------

    def on_chunk(self, chunk: Chunk) -> None:
        """Take a chunk. Nearly always it is the next one, and is delivered without judging."""
        assert self._subscription is not None, "chunks arrive by a subscription"
        held = HeldChunk(chunk, self, self._subscription)
        self._follower.delivery.hold(held)
        if self._is_agreed and not self._inbox and held.first_offset == self.next_offset:
            self._give(held)
        else:
            self._tell(held)
        self.grant()

    def on_drained(self) -> None:
        """Note that the node has no more records now."""
        if self._is_agreed and not self._inbox:
            self._caught_up()
        else:
            self._tell(None)

    def on_ended(self, why: Exception) -> None:
        self._tell(why)

    def _tell(self, what: HeldChunk | Exception | None) -> None:
        self._inbox.append(what)
        self._came.set()

    def grant(self) -> None:
        if self._subscription is not None:
            self._follower.connections.grant(self._subscription)

    # --- judging ------------------------------------------------------------------------------------------------------

    async def _judge(self) -> bool:
        """Judge the first item of the inbox; return False if reading must start again."""
        held = await self._first()
        if not self._is_agreed:
            return await self._recognise(held)
        if held is None:
            self._caught_up()
        elif held.last_offset < self.next_offset:
            self._drop(held)
        else:
            if held.first_offset > self.next_offset:
                self._pass_gap(held, await self._look(held, None, is_end=False))
            self._give(held)
        self._inbox.popleft()
        return True

    async def _first(self) -> HeldChunk | None:
        """Return the first item of the inbox, or raise it if it is an exception. It stays there until it was judged."""
        while not self._inbox:
            self._came.clear()
            await self._came.wait()
        first = self._inbox[0]
        if isinstance(first, Exception):
            raise first
        return first

    async def _recognise(self, held: HeldChunk | None) -> bool:
        """Compare a chunk with the known message, or query the leader; return False if reading must start again."""
        known = self.known
        assert known is not None, "else it is agreed"
        if held is None or held.last_offset < known.offset:
            if not self._is_vouched:
                finding = await self._look(held, known, is_end=True)
                self._is_vouched = True
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
            finding = await self._look(held, known, is_end=False)
            self._is_agreed = True
            self._pass_gap(held, finding)
            return True
        found = position_of(message)
        if not known.agrees(found.fingerprint, found.chunk_ms):
            raise StreamDiffers
        if known.offset >= self.next_offset:
            # The known message is at or after the wanted offset.
            self.known = None
            return False
        self._is_agreed = True
        self._attached()
        return True

    async def _look(self, held: HeldChunk | None, known: Position | None, *, is_end: bool) -> Finding:
        """Query the leader; see `StreamFollower.look`."""
        follower = self._follower
        try:
            finding = await follower.look(self.stream, known, is_end)
        except Exception as error:
            if any(isinstance(each, Interrupted) for each in self._inbox):
                raise Interrupted from error
            raise
        first = self._inbox[0]
        if isinstance(first, Exception):
            # Reading must start again.
            raise first
        assert first is held, "nothing else is judged before it"
        if finding.agreement in (Agreement.OTHER, Agreement.ENDS_BEFORE):
            raise StreamDiffers
        return finding

    def _pass_gap(self, held: HeldChunk, finding: Finding) -> None:
        """Continue after a gap: a hole if the stream begins after the wanted offset."""
        self._attached()
        begin = None if finding.bounds is None else finding.bounds.first
        if begin is not None and begin > self.next_offset and held.first_offset > self.next_offset:
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

    def _give(self, held: HeldChunk) -> None:
        self._attached()
        held.begin, self.next_offset = self.next_offset, held.last_offset + 1
        self._put(held)

    def _drop(self, held: HeldChunk) -> None:
        self._follower.delivery.drop(held)
        self.grant()

    def _put(self, item: Event | HeldChunk) -> None:
        self._follower.delivery.put(self, item)

    def note_delivered(self, batch: RecordBatch) -> None:
        """Remember the last delivered record, which identifies the stream."""
        self._has_given = True
        # Undecoded: this runs for each chunk, and is needed only after an interruption.
        self._last = batch.offsets[-1], batch.records[-1], batch.chunk_ms
        if len(batch.records[-1]) > RECORD_KEPT_BYTES:
            self._last = self._position()

    def _position(self) -> Position | None:
        if not isinstance(self._last, tuple):
            return self._last
        return position_of(Message.from_record(self.stream, *self._last))

    def _last_known(self) -> Position | None:
        """Return the position of the last message queued or delivered; None if there was none."""
        newest = next((item for item in reversed(self.items) if isinstance(item, HeldChunk)), None)
        if newest is None:
            return self._position()
        message = newest.at(newest.last_offset)
        return None if message is None else position_of(message)
