"""Many waits are polled together, by one thread; each ends at its own time, and none is overlooked."""

import asyncio
import random
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from relatum.common.waiting import SharedWait, pause, within
from relatum.errors import AccessRefused, DatabaseUnavailable
from tests.support import LIMIT_S, wait_until
from tests.support.forking import in_child

SOON_S = 15.0


class Table:
    """What is asked: the values that are there by now."""

    def __init__(self) -> None:
        self.there: set[int] = set()
        self.polls: list[int] = []
        self.error: Exception | None = None
        self.takes_s = 0.0

    def poll(self, questions: Sequence[int]) -> Iterable[tuple[int, str]]:
        self.polls.append(len(questions))
        if self.takes_s:
            pause(self.takes_s)
        if self.error is not None:
            raise self.error
        return [(place, f"v{value}") for place, value in enumerate(questions) if value in self.there]


@pytest.fixture
def table() -> Table:
    return Table()


@pytest.fixture
def waits(table: Table) -> SharedWait[int, str]:
    return SharedWait(table.poll)


def in_time(seconds: float) -> float:
    return time.monotonic() + seconds


def polling(name: str = "relatum-waits") -> bool:
    return any(each.name == name for each in threading.enumerate())


def test_one_thread_asks_for_all_and_ends_with_them(table: Table, waits: SharedWait[int, str]) -> None:
    """One thread polls for twenty waiting threads, each gets its own answer, and the thread ends."""
    with ThreadPoolExecutor(20) as threads:
        answers = [threads.submit(waits.wait, waits.ask(value), in_time(LIMIT_S)) for value in range(20)]
        wait_until(lambda: 20 in table.polls, what="a question for all")
        table.there.update(range(20))
        assert [answer.result(LIMIT_S) for answer in answers] == [f"v{value}" for value in range(20)]
    assert len(waits) == 0
    wait_until(lambda: not polling(), what="the thread's end")


def test_each_ends_by_its_own_time_while_the_server_stands_still(table: Table, waits: SharedWait[int, str]) -> None:
    """A poll that hangs ends as well, and is not an error of the waiting callers."""
    table.takes_s = LIMIT_S
    table.error = DatabaseUnavailable("no answer in time", reason="timeout")
    began = time.monotonic()
    with ThreadPoolExecutor(2) as threads:
        short = threads.submit(waits.wait, waits.ask(1), in_time(0.1))
        long = threads.submit(waits.wait, waits.ask(2), in_time(LIMIT_S))
        assert short.result(LIMIT_S) is None
        assert time.monotonic() - began < SOON_S
        wait_until(lambda: table.polls, what="a poll")
        table.takes_s, table.error = 0.0, None
        table.there.add(2)
        assert long.result(LIMIT_S) == "v2"


async def test_no_thread_is_held_by_tasks_that_wait(table: Table, waits: SharedWait[int, str]) -> None:
    """Five hundred waiting tasks take one thread together."""
    await asyncio.to_thread(int)
    before = threading.active_count()
    tasks = [asyncio.create_task(waits.wait_in_task(waits.ask(value), in_time(LIMIT_S))) for value in range(500)]
    await asyncio.to_thread(wait_until, lambda: 500 in table.polls, what="a question for all")
    # The asking thread, and a second one of asyncio's if the first had not finished its call.
    assert threading.active_count() <= before + 2
    table.there.update(range(500))
    assert await asyncio.gather(*tasks) == [f"v{value}" for value in range(500)]
    assert await waits.wait_in_task(waits.ask(1_000), in_time(0.01)) is None


async def test_who_is_cancelled_is_nobody_elses_business(table: Table, waits: SharedWait[int, str]) -> None:
    """Cancelling thousands of waits loses no other wait's answer and leaves none behind."""
    chance = random.Random(1)
    kept = asyncio.create_task(waits.wait_in_task(waits.ask(-1), in_time(LIMIT_S)))
    for _ in range(50):
        asked = [waits.ask(chance.randrange(50)) for _ in range(100)]
        tasks = [asyncio.create_task(waits.wait_in_task(each, in_time(LIMIT_S))) for each in asked]
        table.there = {chance.randrange(50) for _ in range(25)}
        await asyncio.sleep(chance.random() * 0.01)
        for task in tasks:
            task.cancel()
        for answer in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(answer, str | asyncio.CancelledError)
    assert len(waits) == 1
    table.there.add(-1)
    assert await kept == "v-1"


def test_two_who_wait_for_the_same_are_told_by_themselves(table: Table, waits: SharedWait[int, str]) -> None:
    """Of two waits for one value, cancelling one leaves the other its answer."""
    gone, stays = waits.ask(1), waits.ask(1)
    assert gone.cancel()
    table.there.add(1)
    assert stays.result(LIMIT_S) == "v1"


def test_none_is_missed_who_comes_as_the_last_one_leaves(table: Table, waits: SharedWait[int, str]) -> None:
    """No wait is missed that begins as the last one ends."""
    table.there.add(1)
    until = in_time(3.0)

    def come_and_go(number: int) -> int:
        count, chance = 0, random.Random(number)
        # A busy machine has time for few of them.
        while time.monotonic() < until or count < 20:
            if chance.random() < 0.5:
                waits.ask(2).cancel()
            assert waits.wait(waits.ask(1), in_time(LIMIT_S)) == "v1"
            count += 1
        return count

    with ThreadPoolExecutor(8) as threads:
        assert sum(threads.map(come_and_go, range(8))) > 100
    assert len(waits) == 0


def test_an_error_is_raised_to_each_who_waits(table: Table, waits: SharedWait[int, str]) -> None:
    """Each gets its own error; the next caller is asked for again."""
    table.error = AccessRefused("no")
    with ThreadPoolExecutor(3) as threads:
        errors = [threads.submit(waits.wait, waits.ask(1), in_time(LIMIT_S)) for _ in range(3)]
        found = [error.exception(LIMIT_S) for error in errors]
    assert [type(error) for error in found] == [AccessRefused] * 3
    assert len(set(map(id, found))) == 3
    table.error = None
    table.there.add(1)
    assert waits.wait(waits.ask(1), in_time(LIMIT_S)) == "v1"


def test_pauses_grow_to_a_limit_and_leave_a_slow_server_to_others(table: Table, waits: SharedWait[int, str]) -> None:
    """20 polls a second at most after the first few, and no more than a third of the time where a poll takes long."""
    begun = time.monotonic()
    assert waits.wait(waits.ask(1), in_time(1.0)) is None
    assert len(table.polls) <= 5 + 20 * (time.monotonic() - begun)
    table.polls.clear()
    table.takes_s = 0.2
    begun = time.monotonic()
    assert waits.wait(waits.ask(1), in_time(1.5)) is None
    assert len(table.polls) <= 1 + (time.monotonic() - begun) / (3 * table.takes_s)


def test_a_process_that_was_suspended_during_a_poll_polls_again_soon(
    table: Table, waits: SharedWait[int, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The time in which it did not run does not count as a slow server."""
    suspended_s = 0.0
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + suspended_s)
    monkeypatch.setattr("relatum.common.waiting._shared_wait.time", clock)
    table.takes_s = 0.5
    answer = waits.ask(1)
    wait_until(lambda: table.polls, what="a poll")
    suspended_s = 600.0
    wait_until(lambda: len(table.polls) > 1, what="another poll")
    answer.cancel()


def test_a_wait_ends_at_the_calls_deadline_or_when_all_end(table: Table, waits: SharedWait[int, str]) -> None:
    """A wait returns None once the deadline of its call has passed, or once all waits are ended."""
    with within(0.05):
        assert waits.wait(waits.ask(1), in_time(LIMIT_S)) is None
    with ThreadPoolExecutor(1) as threads:
        answer = threads.submit(waits.wait, waits.ask(1), in_time(LIMIT_S))
        wait_until(lambda: len(waits) == 1, what="a wait")
        waits.end()
        assert answer.result(LIMIT_S) is None


def test_an_answer_that_is_announced_is_asked_for_soon(table: Table) -> None:
    """The wait does not last until its next poll is due."""
    waits = SharedWait(table.poll, first_s=LIMIT_S)
    table.there.add(1)
    answer = waits.ask(1)
    waits.poll_soon()
    assert answer.result(SOON_S) == "v1"


def test_the_poll_that_nobody_waits_for_can_be_waited_for(table: Table) -> None:
    """Afterwards there is no thread; while somebody waits there is nothing to wait for."""
    waits = SharedWait(table.poll, "joined", first_s=0)
    waits.join()
    table.takes_s = 0.2
    one, other = waits.ask(1), waits.ask(2)
    wait_until(lambda: table.polls, what="a poll")
    one.cancel()
    waits.join()
    assert polling("joined")
    other.cancel()
    waits.join()
    assert not polling("joined")


def test_ended_loops_get_nothing(table: Table, waits: SharedWait[int, str], caplog: pytest.LogCaptureFixture) -> None:
    """The thread continues for others, and nothing is logged."""
    loop = asyncio.new_event_loop()
    task = loop.create_task(waits.wait_in_task(waits.ask(1), in_time(LIMIT_S)))
    loop.run_until_complete(asyncio.sleep(0))
    other = waits.ask(2)
    loop.close()
    table.there.update((1, 2))
    assert other.result(LIMIT_S) == "v2"
    wait_until(lambda: len(waits) == 0, what="both told")
    assert caplog.text == ""
    task.get_coro().close()  # type: ignore[union-attr]
    task._log_destroy_pending = False  # type: ignore[attr-defined]


def test_a_child_waits_by_a_thread_of_its_own(table: Table, waits: SharedWait[int, str]) -> None:
    """A forked child polls by its own thread, and the parent's waits continue in the parent."""
    answer = waits.ask(1)
    wait_until(lambda: table.polls, what="a poll")

    def in_the_child() -> tuple[int, str | None]:
        table.there.add(2)
        return len(waits), waits.wait(waits.ask(2), in_time(LIMIT_S))

    assert in_child(in_the_child) == (0, "v2")
    table.there.add(1)
    assert answer.result(LIMIT_S) == "v1"
