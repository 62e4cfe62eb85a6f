"""What waits for the taker, of many streams: in order for each stream, in turn among them, bounded in bytes.

The reading thread puts, one thread takes, any thread says what is done. A chunk is counted from when it was read until
the taker is done with all its pieces.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final

from relatum.errors import DataError
from relatum.following._events import Event, Records
from relatum.reading import Message, Position, RecordBatch, position_of
from relatum.wire import Chunk, record_at, small_records, split

TAKE_BYTES: Final = 4 << 20
"""Bytes of records that are given at once, about."""

TAKE_EVENTS: Final = 4096
"""Events that are given at once at most."""

RECORD_KEPT_BYTES: Final = 4 << 10
"""Bytes of a stream's last record up to which it is kept, to be known again; of a larger one its sum is."""


class Held:
    """A chunk that was read, given in pieces, and done when all of them are.

    It stays as it came, and is split and unpacked piece by piece when its turn to be taken comes: what is held has the
    size that was sent, whatever it unpacks to.

    Attributes:
        begin: Records before that offset are not given.
        bytes: Its bytes, as long as it is held.
        out: Pieces that were given and are not done.
        is_cut: Whether all were given.
        is_done: Whether it is held no more.
        round: See `Followed.round`.
    """

    __slots__ = (
        "_chunk",
        "_pieces",
        "begin",
        "bytes",
        "first_offset",
        "is_cut",
        "is_done",
        "last_offset",
        "out",
        "round",
    )

    def __init__(self, chunk: Chunk) -> None:
        self._chunk = chunk
        self.begin = 0
        self.bytes = len(chunk.data)
        self.first_offset = chunk.first_offset
        self.last_offset = chunk.first_offset + chunk.record_count - 1
        self.out = self.round = 0
        self.is_cut = self.is_done = False
        self._pieces: Iterator[RecordBatch] | None = None

    def at(self, offset: int) -> Message | None:
        """The message at an offset; None where none is held."""
        record = record_at(self._chunk, offset)
        return None if record is None else Message.from_record("", offset, record, self._chunk.time_ms)

    def piece(self, stream: str) -> RecordBatch | None:
        """The next piece; None where there is no other, which `is_cut` says after the last one already.

        Raises:
            ChunkCorrupt: lengths inside it are wrong.
        """
        if self._pieces is None and self.begin <= self.first_offset:
            chunk = self._chunk
            records = small_records(chunk)
            if records is not None:
                self.is_cut, self._pieces = True, iter(())
                first = self.first_offset
                return RecordBatch(
                    stream, first, range(first, first + len(records)), records, chunk.time_ms, chunk.epoch
                )
        if self._pieces is None:
            self._pieces = self._cut(stream)
        piece = next(self._pieces, None)
        self.is_cut = piece is None or piece.last_offset >= self.last_offset
        return piece

    def _cut(self, stream: str) -> Iterator[RecordBatch]:
        chunk, begin = self._chunk, self.begin
        for first, records in split(chunk):
            end = first + len(records)
            if first < begin:
                records, first = records[begin - first :], begin
            if records:
                yield RecordBatch(stream, first, range(first, end), records, chunk.time_ms, chunk.epoch)


class Shelf:
    """What waits of one following.

    Args:
        stream: The stream.
        number: The following's number.

    Attributes:
        is_over: Whether nothing more of it is wanted.
        done: What the taker was done with since the reading thread looked: what was read at once, and is free now.
        broken: An error of the data that came up while it was cut, and the offset where.
    """

    def __init__(self, stream: str, number: int) -> None:
        self.stream = stream
        self.number = number
        self.is_over = False
        self.is_waiting = False
        self.items: deque[Event | Held] = deque()
        self.done: list[Held] = []
        self.broken: tuple[int, DataError] | None = None
        self._last: tuple[int, bytes, int | None] | Position | None = None

    def note_last(self, batch: RecordBatch) -> None:
        """Keep what the last message given is known by."""
        # Not a message yet: this is done for each chunk, and asked for after a break.
        self._last = batch.offsets[-1], batch.records[-1], batch.chunk_ms
        if len(batch.records[-1]) > RECORD_KEPT_BYTES:
            self._last = self._position()

    def _position(self) -> Position | None:
        if not isinstance(self._last, tuple):
            return self._last
        return position_of(Message.from_record(self.stream, *self._last))

    def last(self) -> Position | None:
        """What the last message of all that was put here is known by; None where there was none."""
        newest = next((item for item in reversed(self.items) if isinstance(item, Held)), None)
        if newest is not None:
            message = newest.at(newest.last_offset)
            return None if message is None else position_of(message)
        return self._position()


Turn = tuple[Shelf, "Event | Held"]
"""A stream that has a turn, and what it has next."""


class Shelves:
    """All that waits.

    Args:
        bytes_max: See `is_full`.
        changed: Called when the taker is done with something, or found something broken: at most once until `collect`.
        ready: Called when something can be taken after nothing could.
    """

    def __init__(self, bytes_max: int, changed: Callable[[], None], ready: Callable[[], None] | None) -> None:
        self._bytes_max = bytes_max
        self._changed = changed
        self._ready = ready
        self._lock = threading.Lock()
        self._came = threading.Condition(self._lock)
        self._taking = threading.Lock()
        self._turns: deque[Shelf] = deque()
        self._touched: dict[Shelf, None] = {}
        self._is_closed = self._has_news = False
        self.bytes = self.count = 0

    @property
    def is_full(self) -> bool:
        """Whether no more is to be read until the taker is done with some."""
        return self.bytes >= self._bytes_max

    # --- the reading thread -------------------------------------------------------------------------------------------

    def put(self, shelf: Shelf, item: "Event | Held", *, is_new: bool = False) -> None:
        """Add something for the taker, who hears of it by `announce`.

        Args:
            shelf: The stream's.
            item: An event, or what was read.
            is_new: Whether what was read is counted now; else it was before, by `hold`.
        """
        with self._lock:
            if is_new and isinstance(item, Held):
                self.bytes += item.bytes
                self.count += 1
            if shelf.is_over:
                if isinstance(item, Held):
                    self._release(item)
                return
            shelf.items.append(item)
            if not shelf.is_waiting:
                shelf.is_waiting = True
                self._has_news = self._has_news or not self._turns
                self._turns.append(shelf)

    def announce(self) -> None:
        """Wake the taker where something can be taken after nothing could: once for all that one turn brought."""
        if self._has_news:
            with self._lock:
                self._has_news = False
                self._came.notify()
            if self._ready is not None:
                self._ready()

    def hold(self, held: Held) -> None:
        """Count what was read; it is put, or released, later."""
        with self._lock:
            self.bytes += held.bytes
            self.count += 1

    def release(self, held: Held) -> None:
        """Count it no more."""
        with self._lock:
            self._release(held)

    def _release(self, held: Held) -> None:
        if not held.is_done:
            held.is_done = True
            self.bytes -= held.bytes
            self.count -= 1

    def end(self, shelf: Shelf) -> None:
        """Forget what waits: nothing of it is given any more. What was taken is counted until it is done."""
        with self._lock:
            shelf.is_over = True
            self._clear(shelf)

    def _clear(self, shelf: Shelf) -> None:
        for item in shelf.items:
            if isinstance(item, Held) and not item.out:
                self._release(item)
            elif isinstance(item, Held):
                item.is_cut = True
        shelf.items.clear()

    def collect(self) -> list[tuple[Shelf, list[Held], tuple[int, DataError] | None]]:
        """What the taker was done with since the last time, by stream, and what broke: at which offset, and why."""
        found = []
        with self._lock:
            for shelf in self._touched:
                found.append((shelf, shelf.done, shelf.broken))
                shelf.done, shelf.broken = [], None
            self._touched.clear()
        return found

    def is_below(self, part: float) -> bool:
        """Whether less is held than a part of what may be."""
        return self.bytes < self._bytes_max * part

    def last_of(self, shelf: Shelf) -> Position | None:
        """See `Shelf.last`."""
        with self._lock:
            return shelf.last()

    def close(self) -> None:
        """Let the taker go."""
        with self._lock:
            self._is_closed = True
            self._came.notify_all()
        if self._ready is not None:
            self._ready()

    # --- the taker ----------------------------------------------------------------------------------------------------

    def take(self, timeout_s: float) -> list[Event]:
        """See `Follower.take`."""
        deadline, taken, bytes_ = time.monotonic() + timeout_s, list[Event](), 0
        with self._taking:
            while bytes_ < TAKE_BYTES and len(taken) < TAKE_EVENTS:
                turns = self._next_turns(
                    0.0 if taken else max(0.0, deadline - time.monotonic()), TAKE_EVENTS - len(taken)
                )
                if turns:
                    bytes_ += self._take_turns(turns, taken, TAKE_BYTES - bytes_)
                elif taken or self._is_closed or time.monotonic() >= deadline:
                    break
        return taken

    def _next_turns(self, timeout_s: float, most: int) -> list[Turn]:
        """Streams that have a turn, each with what it has next, of which nothing is released until `_end_turns`."""
        with self._lock:
            if not self._turns and timeout_s > 0 and not self._is_closed:
                self._came.wait(timeout_s)
            found = []
            for _ in range(min(most, len(self._turns))):
                shelf = self._turns.popleft()
                if not shelf.items:
                    shelf.is_waiting = False
                    continue
                item = shelf.items[0]
                if isinstance(item, Held):
                    item.out += 1
                found.append((shelf, item))
            return found

    def _take_turns(self, turns: list[Turn], taken: list[Event], bytes_max: int) -> int:
        """Take what streams have next, until it is so many bytes; gives their number."""
        bytes_, given = 0, list[tuple[Shelf, Event | Held, RecordBatch | DataError | None]]()
        for shelf, item in turns:
            batch: RecordBatch | DataError | None = None
            if isinstance(item, Held):
                # Unpacked without the lock: it may take long, and others go on meanwhile.
                try:
                    batch = item.piece(shelf.stream)
                except DataError as error:
                    batch = error
                else:
                    bytes_ += 0 if batch is None else _bytes_of(batch)
            given.append((shelf, item, batch))
            if bytes_ >= bytes_max:
                break
        with self._lock:
            was_touched = bool(self._touched)
            for shelf, item, batch in given:
                self._end_turn(shelf, item, batch, taken)
            for shelf, item in reversed(turns[len(given) :]):
                if isinstance(item, Held):
                    self._let_go(shelf, item)
                self._turns.appendleft(shelf)
            is_first = bool(self._touched) and not was_touched
        if is_first:
            self._changed()
        return bytes_

    def _end_turn(
        self, shelf: Shelf, item: "Event | Held", batch: RecordBatch | DataError | None, taken: list[Event]
    ) -> None:
        """Give what was taken, and let its stream have another turn behind all others; the lock is held."""
        if isinstance(batch, DataError):
            self._break(shelf, item, batch)
            return
        is_over = shelf.is_over
        if not isinstance(item, Held):
            if not is_over:
                shelf.items.popleft()
                taken.append(item)
        else:
            if batch is not None:
                shelf.note_last(batch)
                item.begin = batch.last_offset + 1
            if item.is_cut and not is_over:
                shelf.items.popleft()
            if batch is None or is_over:
                self._let_go(shelf, item)
            else:
                taken.append(Records(shelf.stream, shelf.number, batch, (shelf, item)))
        shelf.is_waiting = bool(shelf.items)
        if shelf.is_waiting:
            self._turns.append(shelf)

    def _break(self, shelf: Shelf, item: "Event | Held", error: DataError) -> None:
        assert isinstance(item, Held), "what breaks was read"
        item.out -= 1
        shelf.broken = (item.begin, error)
        shelf.is_waiting = False
        self._clear(shelf)
        if not item.out:
            self._release(item)
        self._touched[shelf] = None

    def done(self, events: tuple[Event, ...]) -> None:
        """See `Follower.done`."""
        with self._lock:
            was_touched = bool(self._touched)
            for event in events:
                if isinstance(event, Records):
                    self._let_go(*event.held)
            is_first = bool(self._touched) and not was_touched
        if is_first:
            self._changed()

    def _let_go(self, shelf: Shelf, item: Held) -> None:
        item.out -= 1
        if item.out or not item.is_cut or item.is_done:
            return
        self._release(item)
        shelf.done.append(item)
        self._touched[shelf] = None


def _bytes_of(batch: RecordBatch) -> int:
    return sum(map(len, batch.records))
