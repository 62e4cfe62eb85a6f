"""The loop of a component: what it runs and where, what a defect ends, how it stops, and what a fork leaves of it."""

import asyncio
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError

import pytest

from relatum.errors import BrokerUnavailable
from relatum.waiting import ComponentLoop, Deadline, LoopThread, Outages, pause
from tests.support import wait_until
from tests.support.forking import in_child
from tests.support.loop_guard import BlockedLoop, blocked

LIMIT_S = 60.0

logger = logging.getLogger("relatum.test-loop")


@pytest.fixture
def loop() -> Iterator[ComponentLoop]:
    loop = ComponentLoop("relatum-test", logger)
    loop.start()
    yield loop
    assert loop.stop(LIMIT_S)


def test_calls_and_coroutines_run_in_its_thread(loop: ComponentLoop) -> None:
    """And questions in others, with their results back in the loop."""

    async def where() -> tuple[threading.Thread, threading.Thread]:
        return threading.current_thread(), await loop.ask(threading.current_thread)

    future = loop.run(where)
    assert future is not None
    here, there = future.result(LIMIT_S)
    assert isinstance(here, LoopThread)
    assert not isinstance(there, LoopThread)
    assert here.daemon
    assert there.daemon


def test_what_a_coroutine_raises_comes_back(loop: ComponentLoop) -> None:
    """To who waits for it."""

    async def fail() -> None:
        raise KeyError("no")

    future = loop.run(fail)
    assert future is not None
    with pytest.raises(KeyError):
        future.result(LIMIT_S)


def test_a_defect_ends_nothing_else(loop: ComponentLoop, caplog: pytest.LogCaptureFixture) -> None:
    """It is logged on the component's logger, whether of a call or of a task."""

    async def fail() -> None:
        raise KeyError("in a task")

    def fail_at_once() -> None:
        raise KeyError("in a call")

    loop.call(lambda: loop.spawn(fail()))
    loop.call(fail_at_once)
    wait_until(lambda: len(caplog.records) == 2, what="both defects told")
    assert {record.name for record in caplog.records} == {logger.name}
    came = threading.Event()
    loop.call(came.set)
    assert came.wait(LIMIT_S)


def test_a_duty_is_done_when_due_and_when_woken(loop: ComponentLoop) -> None:
    """And tried again after what it raises, of which its outages are told."""
    outages, calls, errors = Outages(logger), list[int](), [BrokerUnavailable("away")]

    async def call() -> float:
        calls.append(len(calls))
        if errors:
            raise errors.pop()
        return 0.01 if len(calls) < 4 else math.inf

    duties = list[object]()
    loop.call(lambda: duties.append(loop.repeat(call, "a duty", outages)))
    wait_until(lambda: len(calls) == 4, what="what is due")
    time.sleep(0.05)
    assert len(calls) == 4
    loop.call(lambda: duties[0].wake())  # type: ignore[attr-defined]
    wait_until(lambda: len(calls) == 5, what="what was woken")


def test_stopping_cancels_tasks_and_lets_questions_go() -> None:
    """Nobody waits for a server that does not answer; who waits for a coroutine is told."""
    ending = Deadline(None)
    loop = ComponentLoop("relatum-test", logger, ending=ending)
    loop.start()

    async def wait() -> None:
        await loop.ask(pause, LIMIT_S)

    future = loop.run(wait)
    assert future is not None
    wait_until(lambda: loop.threads._unfinished == 1, what="the question under way")
    begun = time.monotonic()
    ending.end_in(0.0)
    assert loop.stop(LIMIT_S)
    assert time.monotonic() - begun < LIMIT_S / 4
    with pytest.raises(CancelledError):
        future.result(0)
    assert not loop.call(print)
    assert loop.run(wait) is None


def test_it_is_stopped_from_its_own_threads() -> None:
    """Which do not wait for themselves."""
    for where in ("loop", "helper"):
        loop = ComponentLoop("relatum-test", logger)
        loop.start()
        ended = threading.Event()

        async def stop(loop: ComponentLoop = loop, where: str = where, ended: threading.Event = ended) -> None:
            stopping: Callable[[], object] = lambda: (loop.stop(LIMIT_S), ended.set())  # noqa: E731
            if where == "loop":
                stopping()
            else:
                await loop.ask(stopping)

        loop.run(stop)
        assert ended.wait(LIMIT_S)
        assert loop.stop(LIMIT_S)


def test_a_child_leaves_it_to_the_parent(loop: ComponentLoop) -> None:
    """Whatever the child closes, the parent's loop is still woken."""
    report = in_child(lambda: [loop.call(print), loop.stop(LIMIT_S)])
    assert report[1]
    came = threading.Event()
    assert loop.call(came.set)
    assert came.wait(LIMIT_S)


def test_what_blocks_is_refused_in_it(loop: ComponentLoop) -> None:
    """In all tests: this is the guard's own."""

    async def call(function: Callable[[], object]) -> None:
        function()

    for function in (lambda: time.sleep(0.001), lambda: threading.Event().wait(0.001), lambda: asyncio.run(None)):  # type: ignore[arg-type]
        future = loop.run(call, function)
        assert future is not None
        with pytest.raises((BlockedLoop, RuntimeError, ValueError)):
            future.result(LIMIT_S)
    assert len(blocked) == 2
    blocked.clear()


def test_other_threads_block_as_they_like() -> None:
    """The guard is for loops alone."""
    time.sleep(0)
    assert not threading.Event().wait(0.001)
    assert not blocked


def test_a_call_that_is_cancelled_is_cancelled_in_the_loop(loop: ComponentLoop) -> None:
    """Whoever asked for it has gone."""
    begun, ended = threading.Event(), threading.Event()

    async def wait() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    future = loop.run(wait)
    assert future is not None
    assert begun.wait(LIMIT_S)
    assert future.cancel()
    assert ended.wait(LIMIT_S)


def test_a_call_that_a_loop_never_comes_to_is_cancelled() -> None:
    """Nobody waits for ever who called while it ended."""
    loop = ComponentLoop("relatum-test", logger)
    loop.start()
    futures = []

    async def nothing() -> None:
        pass

    stopping = threading.Thread(target=loop.stop, args=(LIMIT_S,))
    stopping.start()
    while (future := loop.run(nothing)) is not None:
        futures.append(future)
    stopping.join(LIMIT_S)
    wait_until(lambda: all(future.done() for future in futures), what="all done, or cancelled")


def test_an_exit_ends_nothing_else(loop: ComponentLoop, caplog: pytest.LogCaptureFixture) -> None:
    """An application's function may raise one, and the loop would be gone."""

    async def leave() -> None:
        raise SystemExit(3)

    loop.call(lambda: loop.spawn(leave()))
    wait_until(lambda: caplog.records, what="the exit told")
    came = threading.Event()
    loop.call(came.set)
    assert came.wait(LIMIT_S)
