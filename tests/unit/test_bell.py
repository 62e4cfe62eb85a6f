"""What wakes a task: a call-back, or the end of its time, with one timer for many waits."""

import asyncio

from relatum.waiting import Bell

LONG_S = 90.0


async def test_a_wait_ends_when_it_is_rung_or_its_time_is_over() -> None:
    """Also where an earlier wait has left its timer, and where a later one may end sooner."""
    bell, loop = Bell(), asyncio.get_running_loop()
    bell.ring(5)  # nobody waits
    told = [await bell.wait(0.0)]
    loop.call_soon(bell.ring, 1)
    loop.call_soon(bell.ring, 2)
    told.append(await bell.wait(LONG_S))
    told.append(await bell.wait(0.001))
    loop.call_soon(bell.ring, 3)
    told.append(await bell.wait(0.001))
    told.append(await bell.wait(0.002))
    assert told == [0, 1, 0, 3, 0]


def test_a_bell_serves_one_loop_after_the_other() -> None:
    """The timer of a loop that is no more never goes off; who was cancelled waits no more."""
    bell = Bell()

    async def cancelled() -> None:
        waits = asyncio.create_task(bell.wait(LONG_S))
        await asyncio.sleep(0)
        waits.cancel()
        await asyncio.wait([waits])
        bell.ring(1)

    async def wait() -> int:
        return await bell.wait(0.001)

    asyncio.run(cancelled())
    assert asyncio.run(wait()) == 0
