"""The order in which tasks get the lock of a name."""

import asyncio
import gc

from relatum.contexts._placement_cache import NameLocks


async def turn() -> None:
    """Let all other tasks run until they wait."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_a_names_lock_goes_to_those_who_came_first() -> None:
    """Tasks get a name's lock in the order they asked; other names are free; nothing is kept afterwards."""
    locks, order, may_end = NameLocks(asyncio.Lock), [], asyncio.Event()

    async def hold(name: str, number: int) -> None:
        async with locks(name):
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
    tasks.clear()
    gc.collect()
    assert not len(locks._used)
