"""A deadline for a whole call: it applies to all of the call's requests to servers and to its waits together.

The called method sets the deadline once, by `with within(timeout_s):`. Every nested wait in the same thread or task
calls `left_s(its_own_limit)` for its time limit, so no deadline is passed as an argument. A thread that works for the
call gets the deadline by `contextvars.copy_context().run`. `in_thread` does that for tasks.

Another thread may shorten a deadline, so that a cancelled call or a stopping component does not wait for a server
that does not answer. Waits check their deadline every `LOOK_S` seconds.
"""

import asyncio
import math
import threading
import time
from contextvars import ContextVar, Token
from typing import Final

from relatum.common.checks import seconds_text

LOOK_S: Final = 0.1
"""Seconds within which a wait notices that its deadline was shortened."""

LEAST_S: Final = 0.5
"""Minimum seconds for a step that is made even if the call has less time left, or none: a last request, a handshake."""

STOPPED_S: Final = 1.0
"""Seconds that a stopping component waits for a server's answer."""

_current: "ContextVar[Deadline | None]" = ContextVar("relatum_deadline", default=None)


class Deadline:
    """The moment by which work must end: in `seconds` (None: no limit, until `end_in` sets one). Thread-safe.

    `outer` are deadlines that also apply.
    """

    __slots__ = ("_outer", "_until", "seconds")

    def __init__(self, seconds: float | None, *outer: "Deadline | None") -> None:
        self.seconds = seconds
        self._until = math.inf if seconds is None else time.monotonic() + seconds
        self._outer = tuple(each for each in outer if each is not None)

    @property
    def until(self) -> float:
        """The moment, by `time.monotonic`; infinity for no limit."""
        until = self._until
        for outer in self._outer:
            until = min(until, outer.until)
        return until

    def left_s(self) -> float:
        """Return the remaining seconds; negative after the deadline, infinity for no limit."""
        return self.until - time.monotonic()

    @property
    def has_passed(self) -> bool:
        """Whether no time is left."""
        return time.monotonic() >= self.until

    def end_in(self, seconds: float) -> None:
        """Shorten the deadline to `seconds` from now, from any thread. This never extends it."""
        self._until = min(self._until, time.monotonic() + seconds)

    def restart(self) -> None:
        """Set the deadline to its original seconds from now, so that stopped work can start again."""
        self._until = math.inf if self.seconds is None else time.monotonic() + self.seconds

    def __str__(self) -> str:
        """The time limit that ends the work first, its own or an outer one, for errors."""
        earliest = min(self._outer, key=lambda outer: outer.until, default=self)
        if earliest.until < self._until:
            return str(earliest)
        return "the work was ended" if self.seconds is None else seconds_text(self.seconds)


class AfterStop(Deadline):
    """A deadline `STOPPED_S` after a stop was requested, so that a stop does not wait for an unavailable server."""

    __slots__ = ("_stop",)

    def __init__(self, stop: threading.Event | asyncio.Event) -> None:
        super().__init__(None)
        self._stop = stop

    @property
    def until(self) -> float:
        """The moment, counted from the first check after the request to stop; infinity before."""
        if self._stop.is_set():
            self.end_in(STOPPED_S)
        return self._until


class within:  # noqa: N801 - reads as the statement it is: `with within(10.0):`
    """Set the deadline of calls in the block. An outer deadline also applies.

    This is a class because every lookup uses it, and a generator is slower. Do not `yield` to a caller in the block:
    the deadline would apply to the caller's code. `seconds`: None for a deadline without a limit, which can be
    shortened. A `Deadline` replaces the outer deadline.
    """

    __slots__ = ("_seconds", "_token")

    def __init__(self, seconds: "float | Deadline | None") -> None:
        self._seconds = seconds

    def __enter__(self) -> Deadline:
        limit, outer = self._seconds, _current.get()
        if isinstance(limit, Deadline):
            deadline = limit
        elif outer is not None and limit is not None and outer.left_s() <= limit:
            deadline = outer  # the outer deadline ends first
        else:
            deadline = Deadline(limit, outer)
        self._token: Token[Deadline | None] = _current.set(deadline)
        return deadline

    def __exit__(self, *_: object) -> None:
        _current.reset(self._token)


def current() -> Deadline | None:
    """Return the deadline of the current call in this thread or task; None if it has no deadline."""
    return _current.get()


def left_s(most_s: float = math.inf) -> float:
    """Return the seconds that a wait may take: `most_s`, or the call's remaining time if that is less; at least 0."""
    deadline = _current.get()
    return most_s if deadline is None else max(0.0, min(most_s, deadline.left_s()))


def has_passed() -> bool:
    """Whether the current call has no time left."""
    deadline = _current.get()
    return deadline is not None and deadline.has_passed
