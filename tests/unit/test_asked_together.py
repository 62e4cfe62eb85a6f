"""What is asked once for many, without a server: who takes the steps, who shares what, and who asks for all waits."""

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from relatum.errors import InvalidInput, OffsetExpired, ReadTimeout, RelatumError
from relatum.ids import MessageId
from relatum.steps import run
from relatum.waiting import within
from relatum_consumer._async_together import AsyncFlights
from relatum_consumer.lookups import Breathe, Catalog, Read, Row, Together, Waits, Watch
from relatum_consumer.lookups._limits import SLICE
from relatum_consumer.lookups._related import verified

OTHERS = 5
LIMIT_S = 80.0


class Proof:
    """Steps that ask one thing, and return how often they were begun; the first are held until they may go on."""

    def __init__(self) -> None:
        self.begun = 0
        self.is_under_way, self.go_on = threading.Event(), threading.Event()
        self.error: RelatumError | None = None

    def __call__(self) -> Iterator[Any]:
        """The steps."""
        self.begun += 1
        mine = self.begun
        yield from Breathe()
        return mine

    def perform(self, _: Any) -> None:
        """Hold the first; fail the others, if they are to."""
        if self.begun == 1:
            self.is_under_way.set()
            assert self.go_on.wait(LIMIT_S)
        elif self.error is not None:
            raise self.error

    async def perform_in_task(self, request: Any) -> None:
        """The same, in a task."""
        await asyncio.to_thread(self.perform, request)


async def asked_in_tasks(proof: Proof) -> list[Any]:
    """What one is told who asks first, and then what others are told who ask while that is under way.

    In tasks: threads share by code that is made of this.
    """
    flights, request = AsyncFlights(), Together("it", proof)
    first = asyncio.create_task(flights.run(request, proof.perform_in_task, within_s=LIMIT_S))
    await asyncio.to_thread(proof.is_under_way.wait, LIMIT_S)
    entered = [
        asyncio.create_task(flights.run(request, proof.perform_in_task, within_s=LIMIT_S)) for _ in range(OTHERS)
    ]
    await asyncio.sleep(0)
    proof.go_on.set()
    return await asyncio.gather(first, *entered, return_exceptions=True)


@pytest.mark.parametrize("error", [None, InvalidInput("no")])
def test_who_comes_while_it_is_under_way_shares_the_next(error: RelatumError | None) -> None:
    """What had begun before proves nothing to them; all of them are told what one of them found, or what went wrong.

    Each has an error of its own, so that nobody's traceback grows by another's.
    """
    proof = Proof()
    proof.error = error
    first, *others = asyncio.run(asked_in_tasks(proof))
    assert (first, proof.begun) == (1, 2)
    if error is None:
        assert others == [2] * OTHERS
    else:
        assert [type(other) for other in others] == [InvalidInput] * OTHERS
        assert len({id(other) for other in others}) == OTHERS


async def test_that_the_time_of_one_is_over_is_nothing_to_the_others() -> None:
    """One of them takes the steps anew."""
    flights, begun = AsyncFlights(), []

    def steps() -> Iterator[Any]:
        begun.append(1)
        yield from Breathe()
        return len(begun)

    async def perform(_: Any) -> None:
        if len(begun) == 1:
            await asyncio.sleep(0.01)
            raise ReadTimeout("too late")

    async def in_no_time() -> Any:
        with within(0.0):
            return await flights.run(Together("it", steps), perform, within_s=LIMIT_S)

    served = flights.run(Together("it", steps), perform, within_s=LIMIT_S)
    hurried, patient = await asyncio.gather(in_no_time(), served, return_exceptions=True)
    assert isinstance(hurried, ReadTimeout)
    assert patient == 2


async def test_who_is_cancelled_leaves_the_steps_to_others() -> None:
    """Those who wait for the same are told, and none waits for ever."""
    proof = Proof()
    flights, request = AsyncFlights(), Together("it", proof)
    first = asyncio.create_task(flights.run(request, proof.perform_in_task, within_s=LIMIT_S))
    await asyncio.to_thread(proof.is_under_way.wait, LIMIT_S)
    second = asyncio.create_task(flights.run(request, proof.perform_in_task, within_s=LIMIT_S))
    await asyncio.sleep(0)
    first.cancel()
    proof.go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert await second == 2


def test_who_leads_the_waits_is_followed_by_another() -> None:
    """The first asks for all; when it is done, the one who has waited longest does, and is told."""
    waits: Waits[str] = Waits("/")
    watch = Watch(None, ((1, "a"),), None, 0.0)
    assert waits.enter("first", watch) is None
    assert waits.leads("first")
    assert waits.enter("second", watch) == "first"
    assert waits.enter("third", watch) == "first"
    assert not waits.leads("second")
    assert waits.leave("third") is None
    assert waits.leave("first") == "second"
    assert waits.leads("second")
    assert waits.leave("second") is None
    assert len(waits) == 0


def test_a_large_answer_lets_others_go_on_after_each_slice() -> None:
    """Two hundred messages are checked in four slices."""
    rows = [Row(MessageId("orders", offset), None, {1}) for offset in range(4 * SLICE)]
    answers = [OffsetExpired("gone", stream="orders", offset=row.id.offset, first=1_000) for row in rows]
    asked: list[str] = []

    def perform(request: Any) -> Any:
        asked.append(type(request).__name__)
        return answers if isinstance(request, Read) else None

    hits, gone = run(verified(Catalog("/"), (), rows, is_named=True), perform)
    assert (len(hits), len(gone)) == (0, 4 * SLICE)
    assert asked == ["Read"] + ["Breathe"] * 4
