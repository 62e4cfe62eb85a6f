"""One stream that is followed, as the reading thread knows it: its course, its credit, and where it is read."""

import time
from typing import Any, Final

from relatum.following._course import Course
from relatum.following._loop import Timer
from relatum.following._shelf import Held, Shelf
from relatum.reading import Broker, Position
from relatum.waiting import Pauses

WINDOW_MAX: Final = 1024
"""Chunks that a stream has under way and held, at most: of one message each where they are published one by one. A
taker who is done with what came five times a second keeps up with 5,000 of them."""

SETTLED_S: Final = 5.0
"""Seconds that a stream is followed, at least, or something came of it, before the pauses after failures begin anew."""


class Followed:
    """A following.

    Args:
        stream: The stream.
        number: The following's number.
        next_offset: Where it begins.
        known: What is known of the stream.
        window_bytes: Bytes of chunks that are under way and held, about.

    Attributes:
        course: How far it is, and whether the stream is known.
        shelf: What waits of it for the taker.
        node: Where to read it; None for the node that is connected first.
        seat: What reads it now: the links' business.
        subscription: Its number there.
        has_come: Whether something came since it was asked for last.
        barrier: What is answered when all that was asked for last has come, where that is known.
        is_attached: Whether it was said, since reading began, that it is the one that is known.
        is_quiet: Whether it was seen to have no more, since reading began.
        round: Grows with each begin: what was held before that gives no credit any more.
        window: The last of `Gathering`'s windows in which something came.
    """

    def __init__(self, stream: str, number: int, next_offset: int, known: Position | None, window_bytes: int) -> None:
        self.stream = stream
        self.number = number
        self.course = Course(next_offset, known)
        self.shelf = Shelf(stream, number)
        self.is_over = False
        self.node: Broker | None = None
        self.seat: Any = None
        self.subscription: int | None = None
        self.barrier: int | None = None
        self.timer: Timer | None = None
        self.has_come = self.is_attached = self.is_quiet = False
        self.round = self.window = 0
        self._under_way = self._held = 0
        self._window = 1
        self._window_bytes = window_bytes
        self._pauses = Pauses()
        self._begun_at = 0.0
        self._has_given = False

    def begin(self) -> None:
        """Reading begins: one chunk is under way."""
        self.round += 1
        self._under_way, self._held, self._window = 1, 0, 1
        self.has_come = self.is_attached = self.is_quiet = self._has_given = False
        self._begun_at = time.monotonic()

    def came(self, held: Held) -> None:
        """Something came that was under way; of what is like it, as many may be at once as fit."""
        held.round = self.round
        self._under_way -= 1
        self._held += 1
        self._window = min(WINDOW_MAX, self._window_bytes // (held.bytes or 1) or 1)

    def gave(self) -> None:
        """Something was given to the taker: the next failure is a new one."""
        self._has_given = True

    def free(self, held: Held) -> None:
        """Something is held no more."""
        if held.round == self.round:
            self._held -= 1

    def credit(self) -> int:
        """How many chunks more may be under way now; they are from now on.

        Of a stream that was seen to have no more, none as long as half of what may be is under way: a credit for each
        chunk costs both sides as much as the chunk. Of others each is asked for, since a barrier goes with it.
        """
        if self.is_quiet and self._under_way * 2 > self._window:
            return 0
        credit = max(0, self._window - self._under_way - self._held)
        self._under_way += credit
        return credit

    @property
    def may_come(self) -> bool:
        """Whether more may come: else that nothing does says nothing."""
        return self._under_way > 0

    @property
    def is_held(self) -> bool:
        """Whether something that came is held for the taker."""
        return self._held > 0

    def pause_after(self, error: Exception) -> float:
        """Seconds to wait before it is tried again."""
        if self._has_given or time.monotonic() - self._begun_at >= SETTLED_S:
            self._pauses = Pauses()
        return self._pauses.after(error)

    def stop_timer(self) -> None:
        """Do not try again by itself."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


STREAMS: Final = 16
"""Streams of which something came in one window, from which on the next one is waited for: each turn of the thread that
reads, and of those behind it, costs more than a small chunk does."""

BYTES: Final = 1 << 20
"""Bytes that came in one window from which on nothing is waited for: those are large turns by themselves."""


class Gathering:
    """Judges, by what came in the last window of time, whether the thread that reads pauses until the next one ends.

    So what many streams bring is read, handed on and taken together. A few streams, and a lone message, are read at
    once.

    Args:
        gather_s: Seconds of a window; 0 for no pause at all.
    """

    def __init__(self, gather_s: float) -> None:
        self._gather_s = gather_s
        self._window = 1
        self._streams = self._bytes = 0
        self._until = 0.0
        self._is_pausing = False

    def came(self, followed: Followed, bytes_: int) -> None:
        """Something came of a stream."""
        self._bytes += bytes_
        if followed.window != self._window:
            followed.window = self._window
            self._streams += 1

    def pause_s(self) -> float:
        """Seconds for which nothing is to be read; asked after each turn."""
        if not self._gather_s:
            return 0.0
        now = time.monotonic()
        if now >= self._until:
            self._is_pausing = self._streams >= STREAMS and self._bytes < BYTES
            self._window += 1
            self._streams = self._bytes = 0
            self._until = now + self._gather_s
        return self._until - now if self._is_pausing else 0.0
