# Generated from _async_watching.py by tools/make-twins: edit that, then "make twins".
"""Those who wait for a message, blocking: one of them asks the index for all."""

import threading
import time
from collections.abc import Callable
from copy import copy
from typing import Any

from relatum.waiting import left_s
from relatum_consumer.lookups import Select, Waits, Watch, is_of_all


class Signal:
    """Tells one thread that something has changed for it."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def set(self) -> None:
        """Tell it."""
        self._event.set()

    def wait(self, most_s: float) -> None:
        """Wait to be told, so many seconds at most and within the deadline of the call; what was told is over then."""
        self._event.wait(left_s(most_s))
        self._event.clear()


class _Waiter:
    """One who waits."""

    def __init__(self) -> None:
        self.signal = Signal()
        self.is_seen = False
        self.error: Exception | None = None

    def see(self) -> None:
        """Tell it that there may be something."""
        self.is_seen = True
        self.signal.set()

    def fail(self, error: Exception) -> None:
        """Tell it what was met by who asked."""
        self.error = error
        self.signal.set()


class Watching:
    """The waits of one object. Threads share it.

    Args:
        vhost: The virtual host of the streams.
    """

    def __init__(self, vhost: str) -> None:
        self._waits: Waits[_Waiter] = Waits(vhost)
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._waits)

    def wait(self, watch: Watch, select: Callable[[Select], list[Any]]) -> bool:
        """Wait until the index may name something; whether it may. `select` runs a statement, maybe for all."""
        waiter = _Waiter()
        with self._lock:
            leader = self._waits.enter(waiter, watch)
        if leader is not None:
            leader.signal.set()
        try:
            while not waiter.is_seen and waiter.error is None:
                left = left_s(watch.until - time.monotonic())
                if left <= 0:
                    break
                with self._lock:
                    leads, next_at = self._waits.leads(waiter), self._waits.pace.next_at
                pause = next_at - time.monotonic()
                if not leads or pause > 0:
                    waiter.signal.wait(min(left, pause) if leads else left)
                else:
                    self._look(select)
        finally:
            with self._lock:
                leader = self._waits.leave(waiter)
            if leader is not None:
                leader.signal.set()
        if waiter.error is not None:
            raise copy(waiter.error) from waiter.error
        return waiter.is_seen

    def _look(self, select: Callable[[Select], list[Any]]) -> None:
        """Ask for all, and tell those for whom there may be something."""
        with self._lock:
            waiters, question = self._waits.question()
        began = time.monotonic()
        try:
            found = {number for (number,) in select(question)}
        except Exception as error:
            # Else another asks.
            if is_of_all(error):
                for each in waiters:
                    each.fail(error)
            raise
        with self._lock:
            self._waits.pace.note(began, has_found=bool(found))
        for number in found:
            waiters[number].see()

    def end(self) -> None:
        """Let all look for themselves: it was closed."""
        with self._lock:
            waiters = list(self._waits)
        for each in waiters:
            each.see()
