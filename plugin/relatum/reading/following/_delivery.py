"""A follower's events, and their delivery to the owner: in order per stream, streams in turn, with bounded bytes."""

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from relatum.reading import Message, RecordBatch, UnreadableRecord
from relatum.wire.chunk import Chunk, record_at, split, whole_records

if TYPE_CHECKING:
    from relatum.reading.following._connection import Subscription
    from relatum.reading.following._followed import Followed

logger = logging.getLogger("relatum.follower")

# --- events: the stream's name, and the number that `follow` returned -------------------------------------------------


@dataclass(frozen=True, slots=True)
class Attached:
    """The stream is being read, for the first time or again, and is the known one.

    `next_offset`: The next record's offset, or a smaller offset.
    """

    stream: str
    following: int
    next_offset: int


@dataclass(slots=True, eq=False)
class Records:
    """Consecutive records that were not delivered before. The last three attributes are for `StreamFollower.done`."""

    stream: str
    following: int
    batch: RecordBatch
    held: "HeldChunk" = field(repr=False)
    bytes: int
    is_done: bool = False


@dataclass(frozen=True, slots=True)
class Hole:
    """Retention dropped the records in [from_offset, to_offset) before they were read, as the broker confirmed."""

    stream: str
    following: int
    from_offset: int
    to_offset: int


@dataclass(frozen=True, slots=True)
class Replaced:
    """The stream provably differs from what was read: it lost its end, or was declared again. The last event."""

    stream: str
    following: int


@dataclass(frozen=True, slots=True)
class CaughtUp:
    """All records of a node were delivered; once after each `Attached`. The node may lag behind the stream's end."""

    stream: str
    following: int
    next_offset: int


@dataclass(frozen=True, slots=True)
class Failed:
    """Reading failed, and is retried. `stream` is None if no stream can be read: no broker, or no login."""

    stream: str | None
    following: int
    error: Exception


Event = Attached | Records | Hole | Replaced | CaughtUp | Failed

# --- delivery ---------------------------------------------------------------------------------------------------------

RECORD_BYTES: Final = 64
"""Approximate memory overhead of a record, in bytes."""

PIECE_RECORDS: Final = 1024
"""Maximum records of a piece: a few milliseconds of work in a loop with other streams, and a lease to renew. The chunks
of publishers that batch by 1,000 are handed over whole."""

TURN_S: Final = 0.02
"""Seconds after which delivery yields to other work of the loop, such as renewing a lease."""

GIVEN_BYTES: Final = 8 << 20
"""Approximate maximum of unpacked bytes of one stream that the owner has at once: two large pieces. A chunk may unpack
to a thousand times its size."""

RESUMES_AT: Final = 0.75
"""Fraction of `BYTES_MAX` below which reading resumes after a pause."""

STREAMS: Final = 16
"""Reading pauses if at least this many streams have chunks in one window: a turn of the loop and of the owner costs
more than a small chunk."""

BYTES_MAX: Final = 64 << 20
"""Maximum bytes held for all streams. Unpacked records come on top: `GIVEN_BYTES` for each stream."""

BYTES: Final = 1 << 20
"""Reading does not pause if one window has at least this many bytes, since turns are already large."""


class HeldChunk:
    """A chunk that was read. Delivery splits and unpacks it piece by piece; until then it takes its size on the wire.

    `begin`: The first record to deliver. `out`: Delivered pieces that the owner has not released. `is_cut`: No
    piece is left.
    """

    def __init__(self, chunk: Chunk, followed: "Followed", subscription: "Subscription") -> None:
        self._chunk = chunk
        self.followed = followed
        self.subscription = subscription
        self.begin = 0
        self.bytes = len(chunk.data)
        self.first_offset = chunk.first_offset
        self.last_offset = chunk.first_offset + chunk.record_count - 1
        self.out = 0
        self.is_cut = self.is_released = False
        self._pieces: Iterator[RecordBatch] | None = None

    def at(self, offset: int) -> Message | None:
        """Return the message at an offset; None if the chunk does not contain it."""
        record = record_at(self._chunk, offset)
        return None if record is None else Message.from_record("", offset, record, self._chunk.time_ms)

    def piece(self) -> tuple[RecordBatch, int] | None:
        """Return the next piece, and the bytes it takes; None if there is none. The last piece sets `is_cut`."""
        if self._pieces is None and self.begin <= self.first_offset and self._chunk.record_count <= PIECE_RECORDS:
            records = whole_records(self._chunk)
            if records is not None:
                self.is_cut = True
                return self._batch(self.first_offset, records), self.bytes + RECORD_BYTES * len(records)
        if self._pieces is None:
            self._pieces = self._cut()
        piece = next(self._pieces, None)
        self.is_cut = piece is None or piece.last_offset >= self.last_offset
        return None if piece is None else (piece, sum(map(len, piece.records)) + RECORD_BYTES * len(piece))

    def _cut(self) -> Iterator[RecordBatch]:
        for first, records in split(self._chunk):
            # Unreadable records cost nothing, and are passed on as a whole.
            most = len(records) if UnreadableRecord in set(map(type, records)) else PIECE_RECORDS
            start = max(0, self.begin - first)
            while start < len(records):
                yield self._batch(first + start, records[start : start + most])
                start += most

    def _batch(self, first: int, records: list[bytes]) -> RecordBatch:
        chunk, offsets = self._chunk, range(first, first + len(records))
        return RecordBatch(self.followed.stream, first, offsets, records, chunk.time_ms, chunk.epoch)


class Gathering:
    """Decides from the chunks in the last time window whether reading pauses until the end of the next one.

    So chunks of many streams are read, delivered and committed together; chunks of few streams are read at once.
    """

    def __init__(self, gather_s: float) -> None:
        self._gather_s = gather_s
        self._streams: set[Followed] = set()
        self._bytes = 0
        self._until = 0.0
        self._is_pausing = False

    def note(self, followed: "Followed", bytes_: int) -> None:
        if self._gather_s:
            self._bytes += bytes_
            self._streams.add(followed)

    def pause_s(self) -> float:
        """Return the seconds to pause reading. Call this after each turn."""
        if not self._gather_s:
            return 0.0
        now = time.monotonic()
        if now >= self._until:
            self._is_pausing = len(self._streams) >= STREAMS and self._bytes < BYTES
            self._streams.clear()
            self._bytes = 0
            self._until = now + self._gather_s
        return self._until - now if self._is_pausing else 0.0


class Delivery:
    """The chunks that were read and are not released, delivered or not: `bytes` in `count` chunks.

    `pause`: Called to stop and resume reading, if too much is held, and while chunks are gathered.
    """

    def __init__(
        self,
        on_event: Callable[[Event], object],
        gathering: Gathering,
        pause: Callable[[bool], None],
    ) -> None:
        self._on_event = on_event
        self._gathering = gathering
        self._pause = pause
        self._turns: deque[Followed] = deque()
        self._is_due = self._is_full = self._is_gathering = False
        self.bytes = self.count = self.records = 0
        self.told: Counter[type[Event]] = Counter()

    # --- held chunks --------------------------------------------------------------------------------------------------

    def hold(self, held: HeldChunk) -> None:
        self.bytes += held.bytes
        self.count += 1
        self._gathering.note(held.followed, held.bytes)
        if self.bytes >= BYTES_MAX and not self._is_full:
            self._is_full = True
            self._pause(True)

    def drop(self, held: HeldChunk) -> None:
        """Deliver no more of a chunk, and release it when the owner has released its delivered pieces."""
        held.is_cut = True
        self._let_go(held)

    def _let_go(self, held: HeldChunk) -> None:
        if held.out or not held.is_cut or held.is_released:
            return
        held.is_released = True
        held.subscription.free()
        self.bytes -= held.bytes
        self.count -= 1
        if self._is_full and self.bytes < BYTES_MAX * RESUMES_AT:
            self._is_full = False
            self._pause(self._is_gathering)

    def done(self, events: Iterable[Event]) -> None:
        touched: dict[Followed, None] = {}
        for event in events:
            if isinstance(event, Records) and not event.is_done:
                touched[event.held.followed] = None
                self._end_given(event)
        for followed in touched:
            self._queue(followed)
            followed.grant()

    def _end_given(self, given: Records) -> None:
        given.is_done = True
        given.held.out -= 1
        given.held.followed.given_bytes -= given.bytes
        self._let_go(given.held)

    # --- turns --------------------------------------------------------------------------------------------------------

    def put(self, followed: "Followed", item: Event | HeldChunk) -> None:
        if not followed.is_over:
            followed.items.append(item)
            self._queue(followed)
        elif isinstance(item, HeldChunk):
            self.drop(item)

    def put_for_all(self, event: Event) -> None:
        """Deliver an event that names no stream."""
        asyncio.get_running_loop().call_soon(self._tell, event)

    def forget(self, followed: "Followed") -> None:
        items, followed.items = followed.items, deque()
        for item in items:
            if isinstance(item, HeldChunk):
                self.drop(item)

    def _queue(self, followed: "Followed") -> None:
        if followed.items and not followed.has_turn and followed.given_bytes < GIVEN_BYTES:
            followed.has_turn = True
            self._turns.append(followed)
            self._give_soon()

    def _give_soon(self) -> None:
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._give)

    def _give(self) -> None:
        self._is_due = False
        until = time.monotonic() + TURN_S
        while self._turns:
            followed = self._turns.popleft()
            followed.has_turn = False
            if followed.items:
                self._give_next(followed)
                self._queue(followed)
            if time.monotonic() >= until:
                break
        if self._turns:
            self._give_soon()
        elif not self._is_gathering and (pause_s := self._gathering.pause_s()):
            self._is_gathering = True
            self._pause(True)
            asyncio.get_running_loop().call_later(pause_s, self._end_gathering)

    def _end_gathering(self) -> None:
        self._is_gathering = False
        self._pause(self._is_full)

    def _give_next(self, followed: "Followed") -> None:
        item = followed.items[0]
        if not isinstance(item, HeldChunk):
            followed.items.popleft()
            self._give_event(followed, item)
            return
        try:
            piece = item.piece()
        except Exception as error:  # noqa: BLE001 - a chunk that cannot be split fails its stream
            followed.begin_anew(item.begin, error)
            return
        if item.is_cut:
            followed.items.popleft()
        if piece is None:
            self.drop(item)
            followed.grant()
            return
        batch, bytes_ = piece
        given = Records(followed.stream, followed.number, batch, item, bytes_)
        item.out += 1
        followed.given_bytes += bytes_
        item.begin = batch.last_offset + 1
        defect = self._tell(given)
        if defect is None:
            followed.note_delivered(batch)
        else:
            if not given.is_done:
                self._end_given(given)
            followed.begin_anew(batch.first_offset, defect)

    def _tell(self, event: Event) -> Exception | None:
        """Call the owner with an event; log and return its exception."""
        if isinstance(event, Records):
            self.records += len(event.batch)
        else:
            self.told[type(event)] += 1
        try:
            self._on_event(event)
        except Exception as error:
            logger.exception("a follower's owner raised an exception at an event, which will be delivered again")
            return error
        return None

    def _give_event(self, followed: "Followed", event: Event) -> None:
        """Deliver an event other than records; deliver it again if the owner raises."""
        defect = self._tell(event)
        if defect is None or isinstance(event, Failed | Records):
            return
        if isinstance(event, Replaced):
            followed.begin_anew(followed.next_offset, defect)
        else:
            followed.begin_anew(event.from_offset if isinstance(event, Hole) else event.next_offset, defect)
