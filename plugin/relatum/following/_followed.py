"""One stream that is followed: whether it is still the one that is known, and how far it is.

Where something is known of a stream, reading begins at that message and not behind it: the first thing that is read
says whether it is the same stream, with no question of its own. What is read can prove that it is (the message lies
there) or that it is not (another one does). All else is doubt, and the stream's leader is asked:

- nothing comes, or only what lies before: the node lags behind, or the stream lost its end, or was declared anew;
- it begins behind what is known, or behind what was to be read next: retention took it, or the stream has a gap in
  good health, or is another one.

While an answer is awaited, what comes waits.
"""

import asyncio
import math
import time
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Final, NamedTuple

from relatum.errors import StreamNotHere, StreamUnavailable
from relatum.following._connections import SETTLED_S
from relatum.following._delivery import HeldChunk
from relatum.following._events import Attached, CaughtUp, Event, Hole, Replaced
from relatum.following._subscriptions import Ended, Interrupted, Subscription
from relatum.reading import Agreement, Broker, Message, Position, RecordBatch, StreamBounds, position_of
from relatum.waiting import Pauses, may_repeat
from relatum.wire import Chunk, Code

if TYPE_CHECKING:
    from relatum.following._follower import StreamFollower

RECORD_KEPT_BYTES: Final = 4 << 10
"""Bytes of a stream's last record up to which it is kept, to be known again; of a larger one its sum is."""


class Finding(NamedTuple):
    """How a stream stands to what is known of it, and where it begins and ends, each where it was asked for."""

    agreement: Agreement | None
    bounds: StreamBounds | None


class Differs(Exception):
    """The stream is not the one that is known."""

    def __init__(self, found: Agreement, bounds: StreamBounds | None) -> None:
        super().__init__(found, bounds)
        self.found = found
        self.bounds = bounds


class Followed:
    """A following: what was read and put in order ends before `next_offset`, and `known` is the last known message.

    `node` is where it is read (None: the node that is connected first), `is_attached` whether that was told since
    reading began. `items`, `has_turn`, `given_bytes` and `window` are for `Delivery`.
    """

    def __init__(
        self, follower: "StreamFollower", stream: str, number: int, next_offset: int, known: Position | None
    ) -> None:
        self._follower = follower
        self.stream = stream
        self.number = number
        self.next_offset = next_offset
        self.known = known
        self.node: Broker | None = None
        self.items: deque[Event | HeldChunk] = deque()
        self.has_turn = self.is_over = self.is_attached = False
        self.given_bytes = self.window = 0
        self._inbox: deque[HeldChunk | Exception | None] = deque()
        """What came and is to be judged: chunks, None for that there are no more at present, and what ends reading."""
        self._came = asyncio.Event()
        self._subscription: Subscription | None = None
        self._is_agreed = self._is_vouched = self._has_given = False
        self._last: tuple[int, bytes, int | None] | Position | None = None
        self._begun_at = math.inf
        self._pauses = Pauses()
        self.task: asyncio.Task[None] | None = None

    @property
    def is_read(self) -> bool:
        """Whether it is subscribed to."""
        return self._subscription is not None

    async def run(self) -> None:
        """Follow it for ever; once it proved to be another stream, until it is left."""
        while True:
            try:
                await self._attempt()
            except Interrupted:
                pass
            except Differs as differs:
                assert self.known is not None, "else nothing can differ"
                self._put(Replaced(self.stream, self.number, self.known, differs.found, differs.bounds))
                # Left soon; else what is before that could not be given, and it is found again.
                with suppress(Exception):
                    await self._first()
            except Exception as error:  # noqa: BLE001 - told, and tried again
                await self._pause(error)

    async def _attempt(self) -> None:
        try:
            ended = await self._read()
        finally:
            self.stop_reading()
        if ended is None:
            return
        if isinstance(ended.error, StreamNotHere) and self.node is None:
            self.node = await self._follower.connections.other_node(self.stream)
        elif ended.code == Code.STREAM_DOES_NOT_EXIST:
            await self._ask_why()
        else:
            raise ended.error

    async def _ask_why(self) -> None:
        error = await self._follower.why_missing(self.stream)
        if error is not None:
            raise error
        # It was declared just now.
        await asyncio.sleep(self._pauses.after(StreamUnavailable("", stream=self.stream)))

    async def _pause(self, error: Exception) -> None:
        """Say that it cannot be read now, and wait before the next try."""
        if self._has_given or time.monotonic() - self._begun_at >= SETTLED_S:
            self._pauses = Pauses()
        self.node, self._has_given, self._begun_at = None, False, math.inf
        # While the broker is away, which was told, each question fails by that.
        if not (self._follower.connections.is_away and may_repeat(error)):
            self._follower.on_failed(self, error)
        await asyncio.sleep(self._pauses.after(error))

    # --- one reading --------------------------------------------------------------------------------------------------

    async def _read(self) -> Ended | None:
        """Read over one subscription; gives what ended it, None where it is to begin again, elsewhere in the stream."""
        self._subscription = await self._follower.connections.subscribe(self)
        try:
            while await self._judge():
                pass
        except Ended as ended:
            return ended
        return None

    def begin(self) -> int:
        """Reading begins, for the first time or after a break: at which offset."""
        self.known = self._last_known() or self.known
        self._is_agreed, self._is_vouched, self.is_attached = self.known is None, False, False
        self._has_given, self._begun_at = False, time.monotonic()
        return self.next_offset if self.known is None else self.known.offset

    def stop_reading(self) -> None:
        """End the subscription; what came and was not judged is read again. Idempotent."""
        subscription, self._subscription = self._subscription, None
        self._is_agreed = False
        if subscription is not None:
            self._follower.connections.unsubscribe(subscription)
        self._clear_inbox()

    def end(self) -> None:
        """Follow it no more: nothing of it is given from now on."""
        self.is_over = True
        self.stop_reading()
        self._follower.delivery.forget(self)
        if self.task is not None:
            self.task.cancel()

    def begin_anew(self, offset: int, error: Exception) -> None:
        """Read again from an offset on, since what was read from there on could not be given."""
        self.next_offset = offset
        self._follower.delivery.forget(self)
        self._clear_inbox()
        self._tell(error)

    def _clear_inbox(self) -> None:
        inbox, self._inbox = self._inbox, deque()
        for held in inbox:
            if isinstance(held, HeldChunk):
                self._follower.delivery.drop(held)

    # --- what the connection tells ------------------------------------------------------------------------------------

    def on_chunk(self, chunk: Chunk) -> None:
        """A chunk came. Nearly always it is just what comes next, and there is nothing to judge."""
        assert self._subscription is not None, "it came by that"
        held = HeldChunk(chunk, self, self._subscription)
        self._follower.delivery.hold(held)
        if self._is_agreed and not self._inbox and held.first_offset == self.next_offset:
            self._give(held)
        else:
            self._tell(held)
        self.grant()

    def on_drained(self) -> None:
        """The node has no more of it at present."""
        if self._is_agreed and not self._inbox:
            self._caught_up()
        else:
            self._tell(None)

    def on_ended(self, why: Exception) -> None:
        """The subscription is no more."""
        self._tell(why)

    def _tell(self, what: HeldChunk | Exception | None) -> None:
        self._inbox.append(what)
        self._came.set()

    def grant(self) -> None:
        """Grant the credit that there is now."""
        if self._subscription is not None:
            self._follower.connections.grant(self._subscription)

    # --- judging ------------------------------------------------------------------------------------------------------

    async def _judge(self) -> bool:
        """Judge what came first; False where reading is to begin again."""
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
        """What came first, which stays in the inbox until it is judged."""
        while not self._inbox:
            self._came.clear()
            await self._came.wait()
        first = self._inbox[0]
        if isinstance(first, Exception):
            raise first
        return first

    async def _recognise(self, held: HeldChunk | None) -> bool:
        """Compare what came with what is known, or have the leader do so; False where reading is to begin again."""
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
            # It begins behind what is known.
            finding = await self._look(held, known, is_end=False)
            self._is_agreed = True
            self._pass_gap(held, finding)
            return True
        found = position_of(message)
        if not known.agrees(found.fingerprint, found.chunk_ms):
            raise Differs(Agreement.OTHER, None)
        if known.offset >= self.next_offset:
            # It is known by a message behind what is wanted.
            self.known = None
            return False
        self._is_agreed = True
        self._attached()
        return True

    async def _look(self, held: HeldChunk | None, known: Position | None, *, is_end: bool) -> Finding:
        """Ask the leader about what came; see `StreamFollower.look`."""
        follower = self._follower
        try:
            finding = await follower.look(self.stream, known, is_end)
        except Exception as error:
            if any(isinstance(each, Interrupted) for each in self._inbox):
                raise Interrupted from error
            raise
        first = self._inbox[0]
        if isinstance(first, Exception):
            # It is to begin anew.
            raise first
        assert first is held, "nothing else is judged before it"
        if finding.agreement in (Agreement.OTHER, Agreement.ENDS_BEFORE):
            raise Differs(finding.agreement, finding.bounds)
        return finding

    def _pass_gap(self, held: HeldChunk, finding: Finding) -> None:
        """Go on with what lies behind a gap: it is a hole where the stream begins behind what was wanted."""
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

    # --- what is given ------------------------------------------------------------------------------------------------

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
        """Keep what the last message that was given is known by."""
        self._has_given = True
        # Not a message yet: this is done for each chunk, and asked for after a break.
        self._last = batch.offsets[-1], batch.records[-1], batch.chunk_ms
        if len(batch.records[-1]) > RECORD_KEPT_BYTES:
            self._last = self._position()

    def _position(self) -> Position | None:
        if not isinstance(self._last, tuple):
            return self._last
        return position_of(Message.from_record(self.stream, *self._last))

    def _last_known(self) -> Position | None:
        """What the last message of all that was put in order is known by; None where there was none."""
        newest = next((item for item in reversed(self.items) if isinstance(item, HeldChunk)), None)
        if newest is None:
            return self._position()
        message = newest.at(newest.last_offset)
        return None if message is None else position_of(message)
