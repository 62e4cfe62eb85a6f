"""A follower's events, and their delivery to the owner: in order per stream, round robin, with bounded bytes."""

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

# --- events: `stream` is the stream's name, `following` the number that `follow` returned -----------------------------


@dataclass(frozen=True, slots=True)
class Attached:
    """The stream is being read, for the first time or again. It is not another stream of the same name.

    `next_offset`: The next record has this offset or a higher one.
    """

    stream: str
    following: int
    next_offset: int


@dataclass(slots=True, eq=False)
class Records:
    """Consecutive records, each delivered once; offsets have gaps. `held`, `bytes`, `is_done`: for `StreamFollower`."""

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
    """The stream lost its end or was declared again: a message differs, or the leader ends earlier. The last event."""

    stream: str
    following: int


@dataclass(frozen=True, slots=True)
class CaughtUp:
    """All records that the node has were delivered. Reported once after each `Attached`; the node may lag."""

    stream: str
    following: int
    next_offset: int


@dataclass(frozen=True, slots=True)
class Failed:
    """Reading failed, and is retried. `stream` is None if the broker is unreachable or refuses the login."""

    stream: str | None
    following: int
    error: Exception


Event = Attached | Records | Hole | Replaced | CaughtUp | Failed

# --- delivery ---------------------------------------------------------------------------------------------------------

RECORD_BYTES: Final = 64
"""Approximate memory overhead of a record, in bytes."""

PIECE_RECORDS: Final = 1024
"""Maximum records of a piece: a few milliseconds of work in a loop that also serves other streams and renews a lease.
Chunks of publishers that send batches of 1,000 are delivered whole."""

TURN_S: Final = 0.02
"""Seconds after which delivery yields to other work of the loop, such as the renewal of a lease."""

UNRELEASED_BYTES_MAX: Final = 8 << 20
"""Approximate maximum unpacked bytes of one stream that the owner has not released: two large pieces. A chunk may
unpack to a thousand times its size."""

RESUMES_AT: Final = 0.75
"""Fraction of `BYTES_MAX` below which reading resumes after a pause."""

STREAMS: Final = 16
"""Reading pauses if at least this many streams have chunks in one time window: an iteration of the loop and a call of
the owner cost more than a small chunk."""

BYTES_MAX: Final = 64 << 20
"""Maximum bytes of held chunks of all streams. Unpacked records are not included: `UNRELEASED_BYTES_MAX` each."""

BYTES: Final = 1 << 20
"""Reading does not pause if one time window has at least this many bytes: each read is large already."""


class HeldChunk:
    """A chunk that was read. It stays packed until its delivery, which unpacks and splits it piece by piece.

    `next_offset`: The offset of the next record to deliver. `unreleased`: The number of delivered pieces that the owner
    has not released. `is_cut`: All pieces were taken, or the rest was dropped.
    """

    def __init__(self, chunk: Chunk, followed: "Followed", subscription: "Subscription") -> None:
        self._chunk = chunk
        self.followed = followed
        self.subscription = subscription
        self.next_offset = 0
        self.bytes = len(chunk.data)
        self.first_offset = chunk.first_offset
        self.last_offset = chunk.first_offset + chunk.record_count - 1
        self.unreleased = 0
        self.is_cut = self.is_released = False
        self._pieces: Iterator[RecordBatch] | None = None

    def at(self, offset: int) -> Message | None:
        """Return the message at an offset; None if the chunk does not contain it."""
        record = record_at(self._chunk, offset)
        return None if record is None else Message.from_record("", offset, record, self._chunk.time_ms)

    def piece(self) -> tuple[RecordBatch, int] | None:
        """Return the next piece and its approximate bytes in memory; None if there is none. The last sets `is_cut`."""
        if self._pieces is None and self.next_offset <= self.first_offset and self._chunk.record_count <= PIECE_RECORDS:
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
            # Unreadable records take no memory or work, so they need no limit.
            size = len(records) if UnreadableRecord in set(map(type, records)) else PIECE_RECORDS
            for start in range(max(0, self.next_offset - first), len(records), size):
                yield self._batch(first + start, records[start : start + size])

    def _batch(self, first: int, records: list[bytes]) -> RecordBatch:
        chunk, offsets = self._chunk, range(first, first + len(records))
        return RecordBatch(self.followed.stream, first, offsets, records, chunk.time_ms, chunk.epoch)


class Gathering:
    """Decides from the chunks of the last time window whether reading pauses until the end of the next one.

    Chunks of many streams are thus read, delivered and committed together. Few streams are read without a pause.
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
        """Return the seconds for which to pause reading. Call this once all chunks are delivered."""
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
    """Holds chunks from reading to release, `count` chunks of `bytes` in all, and delivers them to the owner.

    `counts`: The events delivered so far; of `Records`, the number of records.
    `pause`: Called with True to stop reading, if too much is held or chunks are gathered; with False to resume it.
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
        self._ready: deque[Followed] = deque()
        self._is_scheduled = self._is_full = self._is_gathering = False
        self.bytes = self.count = 0
        self.counts: Counter[type[Event]] = Counter()

    # --- held chunks --------------------------------------------------------------------------------------------------

    def hold(self, held: HeldChunk) -> None:
        self.bytes += held.bytes
        self.count += 1
        self._gathering.note(held.followed, held.bytes)
        if self.bytes >= BYTES_MAX and not self._is_full:
            self._is_full = True
            self._pause(True)

    def drop(self, held: HeldChunk) -> None:
        """Deliver no more of a chunk. It is released once the owner has released its delivered pieces."""
        held.is_cut = True
        self._release_if_done(held)

    def _release_if_done(self, held: HeldChunk) -> None:
        if held.unreleased or not held.is_cut or held.is_released:
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
                self._release_piece(event)
        for followed in touched:
            self._queue(followed)
            followed.grant()

    def _release_piece(self, records: Records) -> None:
        records.is_done = True
        records.held.unreleased -= 1
        records.held.followed.unreleased_bytes -= records.bytes
        self._release_if_done(records.held)

    # --- turns --------------------------------------------------------------------------------------------------------

    def put(self, followed: "Followed", item: Event | HeldChunk) -> None:
        if not followed.is_over:
            followed.items.append(item)
            self._queue(followed)
        elif isinstance(item, HeldChunk):
            self.drop(item)

    def put_for_all(self, event: Event) -> None:
        """Deliver an event that concerns all streams."""
        asyncio.get_running_loop().call_soon(self._emit, event)

    def forget(self, followed: "Followed") -> None:
        items, followed.items = followed.items, deque()
        for item in items:
            if isinstance(item, HeldChunk):
                self.drop(item)

    def _queue(self, followed: "Followed") -> None:
        if followed.items and not followed.is_ready and followed.unreleased_bytes < UNRELEASED_BYTES_MAX:
            followed.is_ready = True
            self._ready.append(followed)
            self._deliver_soon()

    def _deliver_soon(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._deliver)

    def _deliver(self) -> None:
        self._is_scheduled = False
        until = time.monotonic() + TURN_S
        while self._ready:
            followed = self._ready.popleft()
            followed.is_ready = False
            if followed.items:
                self._deliver_next(followed)
                self._queue(followed)
            if time.monotonic() >= until:
                break
        if self._ready:
            self._deliver_soon()
        elif not self._is_gathering and (pause_s := self._gathering.pause_s()):
            self._is_gathering = True
            self._pause(True)
            asyncio.get_running_loop().call_later(pause_s, self._end_gathering)

    def _end_gathering(self) -> None:
        self._is_gathering = False
        self._pause(self._is_full)

    def _deliver_next(self, followed: "Followed") -> None:
        item = followed.items[0]
        if not isinstance(item, HeldChunk):
            followed.items.popleft()
            self._deliver_event(followed, item)
            return
        try:
            piece = item.piece()
        except Exception as error:  # noqa: BLE001 - an error in a chunk fails only its stream
            followed.restart_at(item.next_offset, error)
            return
        if item.is_cut:
            followed.items.popleft()
        if piece is None:
            self.drop(item)
            followed.grant()
            return
        batch, bytes_ = piece
        records = Records(followed.stream, followed.number, batch, item, bytes_)
        item.unreleased += 1
        followed.unreleased_bytes += bytes_
        item.next_offset = batch.last_offset + 1
        error_of_owner = self._emit(records)
        if error_of_owner is None:
            followed.note_delivered(batch)
        else:
            if not records.is_done:
                self._release_piece(records)
            followed.restart_at(batch.first_offset, error_of_owner)

    def _emit(self, event: Event) -> Exception | None:
        """Call the owner with an event. Log and return the exception that it raises, if any."""
        self.counts[type(event)] += len(event.batch) if isinstance(event, Records) else 1
        try:
            self._on_event(event)
        except Exception as error:
            logger.exception("the handler of a follower's event raised an exception; the event will be delivered again")
            return error
        return None

    def _deliver_event(self, followed: "Followed", event: Event) -> None:
        """Deliver an event other than records. If the owner raises, reading restarts, which reports it again."""
        error_of_owner = self._emit(event)
        if error_of_owner is None or isinstance(event, Failed | Records):
            return
        if isinstance(event, Replaced):
            followed.restart_at(followed.next_offset, error_of_owner)
        else:
            followed.restart_at(event.from_offset if isinstance(event, Hole) else event.next_offset, error_of_owner)
