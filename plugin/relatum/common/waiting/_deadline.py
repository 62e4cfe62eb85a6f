"""One deadline for a whole call: for its requests to the database and the broker, and its waits, together.

The called method sets `with within(timeout_s):` once. Every wait further down, in the same thread or task, asks
`left_s(its_own_limit)` how long it may take: nothing has to be passed on. A thread that works for the call takes the
deadline along with `contextvars.copy_context().run`; `in_thread` does so for tasks, and ends with them.

Another thread may move a deadline up, so that a cancelled call, or a component that stops, lets go of a server that
does not answer. Waits check their deadline every `LOOK_S` seconds.
"""

import asyncio
import math
import threading
import time
from contextvars import ContextVar, Token
from typing import Final

from relatum.common.checks import seconds_text

LOOK_S: Final = 0.1
"""Seconds within which a wait notices that its deadline was moved up."""

LEAST_S: Final = 0.5
"""Minimum seconds for a request that has less time or none left: it is still made once."""

STOPPED_S: Final = 1.0
"""Seconds for a server to answer a component that stops."""

_current: "ContextVar[Deadline | None]" = ContextVar("relatum_deadline", default=None)


class Deadline:
    """A moment by which something must have ended. Thread-safe.

    Args:
        seconds: Seconds from now on; None for no end, until `end_in` sets one.
        outer: Deadlines that also apply; None for none.

    Attributes:
        seconds: As given.
    """

    __slots__ = ("_outer", "_until", "seconds")

    def __init__(self, seconds: float | None, *outer: "Deadline | None") -> None:
        self.seconds = seconds
        self._until = math.inf if seconds is None else time.monotonic() + seconds
        self._outer = tuple(each for each in outer if each is not None)

    @property
    def until(self) -> float:
        """The moment, by `time.monotonic`; infinity for none."""
        until = self._until
        for outer in self._outer:
            until = min(until, outer.until)
        return until

    def left_s(self) -> float:
        """Return the remaining seconds; below 0 once it has passed, infinity for no end."""
        return self.until - time.monotonic()

    @property
    def has_passed(self) -> bool:
        """Whether no time is left."""
        return self.left_s() <= 0

    def end_in(self, seconds: float) -> None:
        """Move it up, from any thread; it is never postponed."""
        self._until = min(self._until, time.monotonic() + seconds)

    def begin_anew(self) -> None:
        """Undo `end_in`, so that stopped work can start again."""
        self._until = math.inf if self.seconds is None else time.monotonic() + self.seconds

    def __str__(self) -> str:
        """The time limit that ended the work, for errors: its own or an outer one."""
        first = min(self._outer, key=lambda outer: outer.until, default=self)
        if first.until < self._until:
            return str(first)
        return "the work was ended" if self.seconds is None else seconds_text(self.seconds)


class AfterStop(Deadline):
    """The moment `STOPPED_S` after a stop was requested: a stop must not wait for an unavailable server.

    Args:
        stop: The event that requests it.
    """

    __slots__ = ("_stop",)

    def __init__(self, stop: threading.Event | asyncio.Event) -> None:
        super().__init__(None)
        self._stop = stop

    @property
    def until(self) -> float:
        """The moment, counted from when the stop is noticed; infinity before."""
        if self._stop.is_set():
            self.end_in(STOPPED_S)
        return self._until


class within:  # noqa: N801 - reads as the statement it is: `with within(10.0):`
    """Set the deadline of calls in the block; an outer deadline applies as well.

    A class, because every lookup passes through it and a generator is slower. Do not put it around a `yield` to a
    caller: the deadline would apply to the caller's code.

    Args:
        seconds: Seconds from now on; None for a deadline without a limit, which can be moved up. A `Deadline` is used
            as it is, without the outer one.
    """

    __slots__ = ("_seconds", "_token")

    def __init__(self, seconds: "float | Deadline | None") -> None:
        self._seconds = seconds

    def __enter__(self) -> Deadline:
        given, outer = self._seconds, _current.get()
        if isinstance(given, Deadline):
            deadline = given
        elif outer is None:
            deadline = Deadline(given)
        elif given is not None and outer.left_s() <= given:
            deadline = outer  # it ends first in any case
        else:
            deadline = Deadline(given, outer)
        self._token: Token[Deadline | None] = _current.set(deadline)
        return deadline

    def __exit__(self, *_: object) -> None:
        _current.reset(self._token)


def current() -> Deadline | None:
    """Return the deadline of the current call in this thread or task; None for none."""
    return _current.get()


def left_s(most_s: float = math.inf) -> float:
    """Return how many seconds a wait may take: its own limit, or what the call has left, if less; never below 0."""
    deadline = _current.get()
    return most_s if deadline is None else max(0.0, min(most_s, deadline.left_s()))


def has_passed() -> bool:
    """Whether the current call has no time left."""
    deadline = _current.get()
    return deadline is not None and deadline.has_passed
