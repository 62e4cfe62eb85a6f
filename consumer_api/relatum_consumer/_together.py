"""What threads ask for at the same time, asked once."""

import threading
import time
from collections.abc import Callable, Hashable
from copy import copy
from typing import Any

from relatum.errors import ReadTimeout
from relatum.steps import run
from relatum.waiting import LOOK_S, left_s
from relatum_consumer.lookups import LookupRequest, Together, is_of_all


class Flight:
    """Steps that are taken once for all who have asked before they began.

    Where they end with neither result nor error, whoever still wants to know asks again.
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
        """Wait until they ended, no longer than to a moment."""
        while not self._over.wait(min(LOOK_S, left := left_s(until - time.monotonic()))):
            if left <= 0:
                raise ReadTimeout("What others ask for as well was not answered in time; it is safe to repeat.")


class Flights:
    """Takes steps once for many. Threads share it.

    What is under way has begun before one asks who comes now, and so proves nothing to him: he waits for the next, with
    all others who come meanwhile. The first of them takes the steps.
    """

    def __init__(self) -> None:
        self._next: dict[Hashable, Flight] = {}
        self._under_way: dict[Hashable, Flight] = {}
        self._lock = threading.Lock()

    def run(self, request: Together, perform: Callable[[LookupRequest], Any], *, within_s: float) -> Any:
        """What the steps return, taken here or by another."""
        about, until = request.about, time.monotonic() + within_s
        while True:
            with self._lock:
                flight, before = self._next.get(about), self._under_way.get(about)
                if flight is None:
                    mine = self._next[about] = Flight()
            if flight is None:
                return self._take(request, mine, before, perform, until)
            flight.wait(until)
            if flight.error is not None:
                raise copy(flight.error) from flight.error
            if flight.has_result:
                return flight.result

    def _take(
        self,
        request: Together,
        flight: Flight,
        before: Flight | None,
        perform: Callable[[LookupRequest], Any],
        until: float,
    ) -> Any:
        about = request.about
        try:
            if before is not None:
                before.wait(until)
            with self._lock:
                del self._next[about]
                self._under_way[about] = flight
            flight.result = run(request.begin(), perform)
            flight.has_result = True
        except Exception as error:
            # Else one of the others takes the steps anew.
            if is_of_all(error):
                flight.error = error
            raise
        else:
            return flight.result
        finally:
            with self._lock:
                for flights in (self._next, self._under_way):
                    if flights.get(about) is flight:
                        del flights[about]
            flight.end()
