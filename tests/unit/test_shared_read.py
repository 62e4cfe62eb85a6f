"""Reads that tasks share, and the order in which they get the lock of a name."""

import asyncio
import threading

import pytest

from relatum.contexts._async_routers import SharedRead
from relatum.contexts.placement._name_locks import NameLocks
from relatum.errors import DatabaseUnavailable
from tests.support import in_a_loop


class _Read:
    """A read that takes as long as the test wants; gives how many there were."""

    def __init__(self) -> None:
        self.begun = 0
        self.may_end = asyncio.Event()

    async def __call__(self) -> int:
        self.begun += 1
        number = self.begun
        await self.may_end.wait()
        return number


async def turn() -> None:
    """Let all other tasks run until they wait."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_read_serves_those_who_asked_before_it_began() -> None:
    """Who asks while a read is under way is served by the next one, which all of them share."""
    read = _Read()
    shared = SharedRead(read)
    early = [asyncio.create_task(shared()) for _ in range(3)]
    await turn()
    late = [asyncio.create_task(shared()) for _ in range(50)]
    await turn()
    assert read.begun == 1
    read.may_end.set()
    assert await asyncio.gather(*early) == [1] * 3
    assert await asyncio.gather(*late) == [2] * 50
    assert await shared() == 3


def test_one_who_is_cancelled_takes_nothing_from_the_others() -> None:
    """A read goes on for those who still wait for it; an error is for each of them, and the next read is new."""

    async def scenario() -> None:
        read = _Read()
        shared = SharedRead(read)
        tasks = [asyncio.create_task(shared()) for _ in range(3)]
        await turn()
        tasks[0].cancel()
        read.may_end.set()
        assert await asyncio.gather(*tasks[1:]) == [1, 1]
        assert tasks[0].cancelled()

    async def failing() -> int:
        raise DatabaseUnavailable("away")

    async def all_fail() -> None:
        shared = SharedRead(failing)
        found = await asyncio.gather(*[shared() for _ in range(3)], return_exceptions=True)
        assert [type(each) for each in found] == [DatabaseUnavailable] * 3
        with pytest.raises(DatabaseUnavailable):
            await shared()

    in_a_loop(scenario())
    in_a_loop(all_fail())


async def test_a_names_lock_goes_to_those_who_came_first() -> None:
    """Tasks get a name's lock in the order they asked; other names are free; nothing is kept afterwards."""
    locks, order, may_end = NameLocks(asyncio.Lock), [], asyncio.Event()

    async def hold(name: str, number: int) -> None:
        with locks(name) as lock:
            async with lock:
                order.append((name, number))
                await may_end.wait()

    tasks = [asyncio.create_task(hold("x", number)) for number in range(5)]
    tasks.append(asyncio.create_task(hold("y", 0)))
    await turn()
    assert order == [("x", 0), ("y", 0)]
    tasks[2].cancel()
    may_end.set()
    await asyncio.wait(tasks)
    assert order == [("x", 0), ("y", 0), ("x", 1), ("x", 3), ("x", 4)]
    assert not locks._used


def test_a_names_lock_is_let_go_with_an_error() -> None:
    """An error inside leaves the lock free, and nothing of the name is kept."""
    locks = NameLocks(threading.Lock)
    for _ in range(2):
        with pytest.raises(KeyError), locks("x") as lock, lock:
            raise KeyError
    assert not locks._used
