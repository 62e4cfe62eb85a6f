"""What is asked once for many, without a server: who asks, and who shares what."""

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from relatum.errors import InvalidInput, ReadTimeout, RelatumError
from relatum.waiting import Deadline, within
from relatum_consumer.lookups.servers import Flight, Flights
from tests.support import wait_until

OTHERS = 5
LIMIT_S = 80.0


@pytest.fixture
def waiting(monkeypatch: pytest.MonkeyPatch) -> list[Flight]:
    """What is waited for, once for each who has begun to wait."""
    begun: list[Flight] = []
    wait = Flight.wait

    def waits(flight: Flight, until: float) -> None:
        begun.append(flight)
        wait(flight, until)

    monkeypatch.setattr(Flight, "wait", waits)
    return begun


class Proof:
    """Returns how often it was asked for; the first is held until it may go on."""

    def __init__(self) -> None:
        self.begun = 0
        self.is_under_way, self.go_on = threading.Event(), threading.Event()
        self.error: RelatumError | None = None

    def __call__(self) -> int:
        """Hold the first; fail the others, if they are to."""
        self.begun += 1
        mine = self.begun
        if mine == 1:
            self.is_under_way.set()
            assert self.go_on.wait(LIMIT_S)
        elif self.error is not None:
            raise self.error
        return mine


class Entered:
    """Flights, and the threads that ask for the same."""

    def __init__(self, proof: Proof, threads: ThreadPoolExecutor) -> None:
        self.flights = Flights(LIMIT_S)
        self._proof, self._threads = proof, threads

    def ask(self) -> "Future[Any]":
        return self._threads.submit(self.flights.run, "it", self._proof)

    def first(self) -> "Future[Any]":
        first = self.ask()
        assert self._proof.is_under_way.wait(LIMIT_S)
        return first


@pytest.mark.parametrize("error", [None, InvalidInput("no")])
def test_who_comes_while_it_is_under_way_shares_the_next(error: RelatumError | None, waiting: list[Flight]) -> None:
    """What had begun before proves nothing to them; all of them are told what one of them found, or what went wrong.

    Each has an error of its own, so that nobody's traceback grows by another's.
    """
    proof = Proof()
    proof.error = error
    with ThreadPoolExecutor(1 + OTHERS) as threads:
        entered = Entered(proof, threads)
        first = entered.first()
        others = [entered.ask() for _ in range(OTHERS)]
        wait_until(lambda: len(waiting) == OTHERS, what="all others")
        proof.go_on.set()
        assert first.result(LIMIT_S) == 1
        if error is None:
            assert [other.result(LIMIT_S) for other in others] == [2] * OTHERS
        else:
            errors = [other.exception(LIMIT_S) for other in others]
            assert [type(each) for each in errors] == [InvalidInput] * OTHERS
            assert len({id(each) for each in errors}) == OTHERS
    assert proof.begun == 2


def test_that_the_time_of_one_is_over_is_nothing_to_the_others(waiting: list[Flight]) -> None:
    """One of them asks anew."""
    flights, goes_on = Flights(LIMIT_S), threading.Event()
    begun: list[int] = []

    def ask() -> int:
        begun.append(1)
        if len(begun) == 1:
            assert goes_on.wait(LIMIT_S)
            raise ReadTimeout("too late")
        return len(begun)

    def in_no_time() -> int:
        with within(0.0):
            return flights.run("it", ask)

    with ThreadPoolExecutor(2) as threads:
        hurried = threads.submit(in_no_time)
        wait_until(lambda: begun, what="the first")
        patient = threads.submit(flights.run, "it", ask)
        wait_until(lambda: len(waiting) == 1, what="the second")
        goes_on.set()
        assert isinstance(hurried.exception(LIMIT_S), ReadTimeout)
        assert patient.result(LIMIT_S) == 2


def test_who_waits_for_anothers_proof_lets_go_at_its_deadline(waiting: list[Flight]) -> None:
    """Also where that is brought forward: a task that is cancelled frees its thread."""
    proof, deadline = Proof(), Deadline(LIMIT_S)
    with ThreadPoolExecutor(3) as threads:
        entered = Entered(proof, threads)
        first = entered.first()
        second = entered.ask()  # it waits for the first, to begin after it

        def third() -> int:
            with within(deadline):
                return entered.flights.run("it", proof)

        hurried = threads.submit(third)
        wait_until(lambda: len(waiting) == 2, what="both")
        ended_at = time.monotonic()
        deadline.end_in(0)
        assert isinstance(hurried.exception(LIMIT_S), ReadTimeout)
        assert time.monotonic() - ended_at < 1.0
        proof.go_on.set()
        assert (first.result(LIMIT_S), second.result(LIMIT_S)) == (1, 2)
