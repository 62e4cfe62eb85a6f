"""Waiting on a condition, with a limit."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from contextlib import suppress
from contextvars import copy_context
from inspect import isasyncgen, isawaitable
from typing import Any, Final, TypeVar

from relatum.errors import Transient

T = TypeVar("T")

LIMIT_S: Final = 90.0
"""What nothing here takes, however busy the machine is: only a test that fails waits for so long."""

START_S: Final = 300.0
"""What no server takes to start, of however many at once."""


def wait_until(condition: Callable[[], T], limit_s: float = LIMIT_S, *, what: str = "", every_s: float = 0.02) -> T:
    """Return the first true answer of `condition`; fail with `what` and the last answer after `limit_s` seconds."""
    began_s = time.monotonic()
    while True:
        answer = condition()
        if answer:
            return answer
        waited_s = time.monotonic() - began_s
        if waited_s > limit_s:
            raise AssertionError(f"{what or 'the condition'} did not come true in {limit_s:g} s; last: {answer!r}")
        # Most become true at once; the longer one takes, the less it matters how soon that is noticed.
        time.sleep(max(every_s, min(waited_s / 8, 0.25)))


def until_answered(ask: Callable[[], T]) -> T:
    """Return the first answer: what has a short time-out may come too late on a busy machine, and is asked again."""
    answers: list[T] = []

    def is_answered() -> bool:
        with suppress(Transient):
            answers.append(ask())
        return bool(answers)

    wait_until(is_answered, what="an answer")
    return answers[0]


def in_a_try(is_kept: Callable[[], bool], tries: int = 5, *, what: str) -> None:
    """Fail where a bound on time is kept in no try: a busy machine is late at times, what counts wrongly always."""
    assert any(is_kept() for _ in range(tries)), f"{what} in none of {tries} tries"


def in_a_loop(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end in an event loop of its own, with a limit."""

    async def limited() -> T:
        async with asyncio.timeout(240):
            return await coroutine

    return asyncio.run(limited())


async def cancel(task: "asyncio.Task[Any]") -> None:
    """Cancel a task, which must end by that."""
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()


def result_of(runner: asyncio.Runner, given: Any) -> Any:
    """What a call gave, or what it gives on the runner's loop, of an iteration all of it: in the caller's context."""

    async def result() -> Any:
        return [each async for each in given] if isasyncgen(given) else await given

    is_to_come = isasyncgen(given) or isawaitable(given)
    return runner.run(result(), context=copy_context()) if is_to_come else given
