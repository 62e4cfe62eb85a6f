"""One deadline for a whole call: what it asks of the database and of the broker, and what it waits for, together.

Who is called says `with within(timeout_s):` once. Whatever waits further down, in the same thread or task,
asks `left_s(its_own_limit)` how long it may: nothing has to be handed through. A thread that works for the call takes
the deadline with it by `contextvars.copy_context().run`; `in_thread` does so for tasks, and is ended with them.

A deadline may be brought forward by another thread: that is how a call that was cancelled, or a component that is to
stop, lets go of a server that does not answer. Who waits looks every `LOOK_S` seconds.
"""

import asyncio
import math
import threading
import time
from contextvars import ContextVar, Token
from typing import Final

from relatum.checks import seconds_text

LOOK_S: Final = 0.1
"""Seconds within which a wait notices that its deadline was brought forward."""

LEAST_S: Final = 0.5
"""Seconds for one question, at least, of who has less time or none: it is asked once all the same."""

STOPPED_S: Final = 1.0
"""Seconds a server has to answer what is to stop."""

_current: "ContextVar[Deadline | None]" = ContextVar("relatum_deadline", default=None)


class Deadline:
    """A moment by which something must have ended. Threads may share it.

    Args:
        seconds: From now on; None for no end, until one is set by `end_in`.
        outer: Deadlines that end this one as well.

    Attributes:
        seconds: As given.
    """

    __slots__ = ("_outer", "_until", "seconds")

    def __init__(self, seconds: float | None, *outer: "Deadline") -> None:
        self.seconds = seconds
        self._until = math.inf if seconds is None else time.monotonic() + seconds
        self._outer = outer

    @property
    def until(self) -> float:
        """The moment, as `time.monotonic` counts; infinity for none."""
        until = self._until
        for outer in self._outer:
            until = min(until, outer.until)
        return until

    def left_s(self) -> float:
        """Seconds left; below 0 once it has passed, infinity for no end."""
        return self.until - time.monotonic()

    @property
    def has_passed(self) -> bool:
        """Whether no time is left."""
        return self.left_s() <= 0

    def end_in(self, seconds: float) -> None:
        """Bring it forward, also from another thread; it is never put off."""
        self._until = min(self._until, time.monotonic() + seconds)

    def begin_anew(self) -> None:
        """Take back what `end_in` has set: what had stopped starts again."""
        self._until = math.inf if self.seconds is None else time.monotonic() + self.seconds

    def __str__(self) -> str:
        """What has run out, for errors: its own time or that of the one around it."""
        first = min(self._outer, key=lambda outer: outer.until, default=self)
        if first.until < self._until:
            return str(first)
        return "the work was ended" if self.seconds is None else seconds_text(self.seconds)


class AfterStop(Deadline):
    """The moment `STOPPED_S` after something was told to stop: it is no time to wait for a server that is away.

    Args:
        stop: Says so.
    """

    __slots__ = ("_stop",)

    def __init__(self, stop: threading.Event | asyncio.Event) -> None:
        super().__init__(None)
        self._stop = stop

    @property
    def until(self) -> float:
        """The moment, from when it is seen that it is to stop; infinity before."""
        if self._stop.is_set():
            self.end_in(STOPPED_S)
        return self._until


class within:  # noqa: N801 - reads as the statement it is: `with within(10.0):`
    """Set the deadline of what is called in the block; one that is set around it holds as well.

    A class and not a generator: it stands on the path of every look-up. Not around a `yield` to a caller: the deadline
    would hold for what the caller does meanwhile.

    Args:
        seconds: From now on; None for no end of its own, which may be brought forward alone. A `Deadline` is taken as
            it is, without one around it.
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
            deadline = outer  # it comes first in any case
        else:
            deadline = Deadline(given, outer)
        self._token: Token[Deadline | None] = _current.set(deadline)
        return deadline

    def __exit__(self, *_: object) -> None:
        _current.reset(self._token)


def current() -> Deadline | None:
    """The deadline of the call under way in this thread or task; None for none."""
    return _current.get()


def left_s(most_s: float = math.inf) -> float:
    """Seconds that a wait may take: its own limit, or what the call has left if that is less, and never below 0."""
    deadline = _current.get()
    return most_s if deadline is None else max(0.0, min(most_s, deadline.left_s()))


def has_passed() -> bool:
    """Whether the call under way has no time left."""
    deadline = _current.get()
    return deadline is not None and deadline.has_passed
