"""What waits for the taker, of many streams: in order for each stream, in turn among them, bounded in bytes.

The reading thread puts, one thread takes, any thread says what is done. A chunk is counted from when it was read until
the taker is done with all its pieces.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from relatum.errors import DataError
from relatum.following._events import Event, Records
from relatum.following._held import Held
from relatum.reading import Message, Position, RecordBatch, position_of

TAKE_BYTES: Final = 4 << 20
"""Bytes of records that are given at once, about."""

TAKE_EVENTS: Final = 4096
"""Events that are given at once at most."""

RECORD_KEPT_BYTES: Final = 4 << 10
"""Bytes of a stream's last record up to which it is kept, to be known again; of a larger one its sum is."""


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
        self._last: Message | Position | None = None

    def note_last(self, batch: RecordBatch) -> None:
        """Keep what the last message given is known by."""
        if batch.messages is not None:
            self._last = position_of(batch.messages[-1])
            return
        record = batch.records[-1]
        message = Message.from_record(self.stream, batch.offsets[-1], record, batch.chunk_ms)
        self._last = message if len(record) <= RECORD_KEPT_BYTES else position_of(message)

    def last(self) -> Position | None:
        """What the last message of all that was put here is known by; None where there was none."""
        newest = next((item for item in reversed(self.items) if isinstance(item, Held)), None)
        if newest is not None:
            message = newest.at(newest.last_offset)
            return None if message is None else position_of(message)
        return position_of(self._last) if isinstance(self._last, Message) else self._last


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
        self._is_closed = False
        self.bytes = self.count = 0

    @property
    def is_full(self) -> bool:
        """Whether no more is to be read until the taker is done with some."""
        return self.bytes >= self._bytes_max

    # --- the reading thread -------------------------------------------------------------------------------------------

    def put(self, shelf: Shelf, item: "Event | Held") -> None:
        """Add something for the taker; what was read is counted before, by `hold`."""
        with self._lock:
            if shelf.is_over:
                if isinstance(item, Held):
                    self._release(item)
                return
            shelf.items.append(item)
            was_empty = not self._turns
            if not shelf.is_waiting:
                shelf.is_waiting = True
                self._turns.append(shelf)
                self._came.notify()
        if was_empty and self._ready is not None:
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
                shelf = self._next_turn(0.0 if taken else max(0.0, deadline - time.monotonic()))
                if shelf is None:
                    if taken or self._is_closed or time.monotonic() >= deadline:
                        break
                    continue
                event = self._event(shelf)
                if event is not None:
                    taken.append(event)
                    if isinstance(event, Records):
                        bytes_ += _bytes_of(event.batch)
        return taken

    def _next_turn(self, timeout_s: float) -> Shelf | None:
        with self._lock:
            if not self._turns and timeout_s > 0 and not self._is_closed:
                self._came.wait(timeout_s)
            return self._turns.popleft() if self._turns else None

    def _event(self, shelf: Shelf) -> Event | None:
        """The next event of a stream, which has another turn behind all others then."""
        with self._lock:
            item = shelf.items[0] if shelf.items else None
            if item is None:
                shelf.is_waiting = False
                return None
            if not isinstance(item, Held):
                shelf.items.popleft()
                self._line_up(shelf)
                return item
            item.out += 1
        # Unpacked without the lock: it may take long, and others go on meanwhile.
        try:
            batch = item.piece(shelf.stream)
        except DataError as error:
            self._break(shelf, item, error)
            return None
        with self._lock:
            if batch is not None:
                shelf.note_last(batch)
                item.begin = batch.last_offset + 1
            if shelf.items and shelf.items[0] is item and item.is_cut:
                shelf.items.popleft()
            is_over = shelf.is_over
            if not is_over:
                self._line_up(shelf)
        if batch is None or is_over:
            self._done(shelf, item)
            return None
        return Records(shelf.stream, shelf.number, batch, (shelf, item))

    def _line_up(self, shelf: Shelf) -> None:
        shelf.is_waiting = bool(shelf.items)
        if shelf.is_waiting:
            self._turns.append(shelf)

    def _break(self, shelf: Shelf, item: Held, error: DataError) -> None:
        with self._lock:
            item.out -= 1
            shelf.broken = (item.begin, error)
            shelf.is_waiting = False
            self._clear(shelf)
            if not item.out:
                self._release(item)
            is_first = not self._touched
            self._touched[shelf] = None
        if is_first:
            self._changed()

    def done(self, events: tuple[Event, ...]) -> None:
        """See `Follower.done`."""
        for event in events:
            if isinstance(event, Records):
                self._done(*event.held)

    def _done(self, shelf: Shelf, item: Held) -> None:
        with self._lock:
            item.out -= 1
            if item.out or not item.is_cut or item.is_done:
                return
            self._release(item)
            shelf.done.append(item)
            is_first = not self._touched
            self._touched[shelf] = None
        if is_first:
            self._changed()


def _bytes_of(batch: RecordBatch) -> int:
    if batch.messages is not None:
        return sum(len(message.body) for message in batch.messages)
    return sum(map(len, batch.records))
