"""What threads ask for at the same time, asked once. See docs/adr/0026."""

import threading
import time
from collections.abc import Callable, Hashable
from copy import copy
from typing import Any, TypeVar

from relatum.errors import ReadTimeout, Transient
from relatum.waiting import LOOK_S, has_passed, left_s

_Answer = TypeVar("_Answer")


class Flight:
    """A question that is asked once for all who came before it began.

    Where it ends with neither result nor error, whoever still wants to know asks again.
    """

    def __init__(self) -> None:
        self.has_result = False
        self.result: Any = None
        self.error: Exception | None = None
        self._over = threading.Event()

    def end(self) -> None:
        """Tell all who wait."""
        self._over.set()

    def wait(self, until: float) -> None:
        """Wait until it ended, no longer than to a moment."""
        while not self._over.wait(min(LOOK_S, left := left_s(until - time.monotonic()))):
            if left <= 0:
                raise ReadTimeout("What others ask for as well was not answered in time; it is safe to repeat.")


class Flights:
    """Asks once for many. Threads share it.

    A question that is under way began before a later caller came, and so proves nothing to that one: the caller waits
    for the next, with all others who come meanwhile. The first of them asks it.
    """

    def __init__(self, within_s: float) -> None:
        self._within_s = within_s
        self._next: dict[Hashable, Flight] = {}
        self._under_way: dict[Hashable, Flight] = {}
        self._lock = threading.Lock()

    def run(self, about: Hashable, ask: Callable[[], _Answer]) -> _Answer:
        """What `ask` returns, called here or by another thread that asks `about` the same. Nobody changes it."""
        until = time.monotonic() + self._within_s
        while True:
            with self._lock:
                flight, before = self._next.get(about), self._under_way.get(about)
                if flight is None:
                    mine = self._next[about] = Flight()
            if flight is None:
                return self._take(about, ask, mine, before, until)
            flight.wait(until)
            if flight.error is not None:
                raise copy(flight.error) from flight.error
            if flight.has_result:
                result: _Answer = flight.result
                return result

    def _take(
        self, about: Hashable, ask: Callable[[], _Answer], flight: Flight, before: Flight | None, until: float
    ) -> _Answer:
        try:
            if before is not None:
                before.wait(until)
            with self._lock:
                del self._next[about]
                self._under_way[about] = flight
            result = flight.result = ask()
            flight.has_result = True
        except Exception as error:
            # That the asking thread's own time is over says nothing of the others: one of them asks anew.
            if not (isinstance(error, Transient) and has_passed()):
                flight.error = error
            raise
        else:
            return result
        finally:
            with self._lock:
                for flights in (self._next, self._under_way):
                    if flights.get(about) is flight:
                        del flights[about]
            flight.end()
