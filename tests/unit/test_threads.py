"""Blocking calls that tasks make in threads: how many there are, what ends them, and how their results are released."""

import asyncio
import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from queue import Queue
from typing import Any

import pytest

from relatum.common.waiting import Threads, in_thread, left_s, pause, within
from relatum.errors import Transient
from tests.support import LIMIT_S, cancel, wait_until
from tests.support.forking import in_child
from tests.support.standstill import in_time


@pytest.fixture
def gate() -> Iterator[threading.Event]:
    gate = threading.Event()
    yield gate
    gate.set()


def test_threads_are_started_as_needed_and_used_again(gate: threading.Event) -> None:
    """Two at most; and a call after another takes the same thread."""
    threads, begun = Threads(2, "relatum-test"), threading.Semaphore(0)

    def hold() -> threading.Thread:
        begun.release()
        assert gate.wait(LIMIT_S)
        return threading.current_thread()

    first = threads.submit(threading.current_thread).result(LIMIT_S)
    assert first.daemon
    wait_until(lambda: threads._unfinished == 0, what="a thread without work")
    assert threads.submit(threading.current_thread).result(LIMIT_S) is first
    calls = [threads.submit(hold) for _ in range(5)]
    assert begun.acquire(timeout=LIMIT_S)
    assert begun.acquire(timeout=LIMIT_S)
    assert not begun.acquire(timeout=0.05)
    gate.set()
    assert len({call.result(LIMIT_S) for call in calls}) <= 2


def test_what_a_call_raises_comes_back_and_the_thread_goes_on() -> None:
    """A call's error, even SystemExit, is raised to its caller, and the thread continues."""
    threads = Threads(1, "relatum-test")
    for error in (KeyError("no"), SystemExit(1)):

        def fail(error: BaseException = error) -> None:
            raise error

        assert threads.submit(fail).exception(LIMIT_S) is error
    assert threads.submit(abs, -1).result(LIMIT_S) == 1


def test_threads_end_when_they_are_shut_down(gate: threading.Event) -> None:
    """After a shutdown pending calls are made unless cancelled, new ones are refused, and the threads end."""
    threads, thread = Threads(2, "relatum-test"), threading.current_thread
    idle = threads.submit(thread).result(LIMIT_S)
    running, other = threads.submit(gate.wait, LIMIT_S), threads.submit(thread)
    waiting, cancelled = threads.submit(thread), threads.submit(abs, -1)
    wait_until(running.running, what="the first has begun")
    assert cancelled.cancel() or cancelled.result(LIMIT_S)
    threads.shutdown()
    gate.set()
    assert running.result(LIMIT_S)
    ended = {idle, other.result(LIMIT_S), waiting.result(LIMIT_S)}
    with pytest.raises(RuntimeError, match="shut down"):
        threads.submit(abs, -1)
    wait_until(lambda: not any(each.is_alive() for each in ended), what="they end")


async def test_a_cancelled_task_frees_its_thread() -> None:
    """Its deadline has passed for what it called, which looks at it every tenth of a second."""
    threads, began, ended = Threads(1, "relatum-test"), threading.Event(), threading.Event()

    def wait() -> None:
        began.set()
        pause(LIMIT_S)
        ended.set()

    task = asyncio.create_task(in_thread(threads, wait))
    assert await asyncio.to_thread(began.wait, LIMIT_S)
    with in_time(0.1):
        await cancel(task)
        assert await asyncio.to_thread(ended.wait, LIMIT_S)
    assert await in_thread(threads, abs, -1) == 1


async def test_a_cancelled_call_can_be_waited_for_to_its_end(gate: threading.Event) -> None:
    """With `to_end`, a cancelled task ends after its call, however often it is cancelled."""
    threads, begun, ended = Threads(1, "relatum-test"), threading.Event(), threading.Event()

    def hold() -> None:
        begun.set()
        assert gate.wait(LIMIT_S)
        ended.set()

    task = asyncio.ensure_future(in_thread(threads, hold, to_end=True))
    await asyncio.to_thread(begun.wait, LIMIT_S)
    for _ in range(3):
        task.cancel()
        assert not (await asyncio.wait([task], timeout=0.05))[0]
    gate.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()


async def test_what_a_cancelled_call_returns_is_given_back() -> None:
    """A result that a cancelled task does not take is given back, exactly once."""
    threads, numbers, lock = Threads(2, "relatum-test"), iter(range(10**6)), threading.Lock()
    taken: list[int] = []
    got: list[int] = []
    back: list[int] = []

    def take() -> int:
        with lock:
            taken.append(next(numbers))
            return taken[-1]

    for number in range(300):
        task = asyncio.create_task(in_thread(threads, take, returned=back.append))
        for _ in range(number % 4):
            await asyncio.sleep(0)
        time.sleep(number % 3 * 0.0002)  # noqa: ASYNC251 - the loop is to be late
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            got.append(await task)
    await asyncio.to_thread(wait_until, lambda: len(got) + len(back) == len(taken), what="all given back")
    assert sorted(got + back) == taken


class Taking:
    """A call that looks at no deadline and takes a connection when it may continue; `back` has what is given back."""

    def __init__(self) -> None:
        self.begun, self.go_on, self.back = threading.Event(), threading.Event(), Queue[bool]()

    def __call__(self) -> bool:
        self.begun.set()
        return self.go_on.wait(LIMIT_S)

    async def begun_in(self, threads: Threads) -> asyncio.Task[bool]:
        """A task whose call is under way."""
        task = asyncio.create_task(in_thread(threads, self, returned=self.back.put))
        assert await asyncio.to_thread(self.begun.wait, LIMIT_S)
        return task


async def test_what_comes_after_threads_were_shut_down_is_given_back() -> None:
    """A call that looks at no deadline, and returns when its task is long gone."""
    threads, taking = Threads(1, "relatum-test"), Taking()
    task = await taking.begun_in(threads)
    await cancel(task)
    threads.shutdown()
    taking.go_on.set()
    assert await asyncio.to_thread(taking.back.get, timeout=LIMIT_S)


def test_what_comes_after_the_loop_has_ended_is_given_back() -> None:
    """Its task is gone as well."""
    threads, taking = Threads(1, "relatum-test"), Taking()

    async def leave() -> None:
        (await taking.begun_in(threads)).cancel()

    asyncio.run(leave())
    taking.go_on.set()
    assert taking.back.get(timeout=LIMIT_S)


def test_what_comes_between_the_last_turn_of_a_loop_and_its_end_is_given_back() -> None:
    """The loop takes calls of other threads until it is closed, and makes them no more."""
    threads, taking = Threads(1, "relatum-test"), Taking()

    async def leave() -> None:
        task = await taking.begun_in(threads)
        task.cancel()
        await asyncio.wait([task])

    loop = asyncio.new_event_loop()
    with contextlib.closing(loop):
        loop.run_until_complete(leave())
        taking.go_on.set()
        assert taking.back.get(timeout=LIMIT_S)


async def test_a_call_may_raise_what_futures_do_not_take() -> None:
    """A StopIteration of a call is raised as a RuntimeError."""
    with pytest.raises(RuntimeError, match="StopIteration"):
        await in_thread(Threads(1, "relatum-test"), next, iter(()))


def test_what_is_taken_while_threads_are_shut_down_is_made() -> None:
    """A call during a shutdown is made or refused, and never left waiting."""
    for _ in range(100):
        threads, calls, began = Threads(2, "relatum-test"), list[Future[int]](), threading.Event()

        def submit(threads: Threads = threads, calls: list[Future[int]] = calls, began: Any = began) -> None:
            with contextlib.suppress(RuntimeError):
                while True:
                    calls.append(threads.submit(abs, -1))
                    began.set()

        submitting = threading.Thread(target=submit)
        submitting.start()
        assert began.wait(LIMIT_S)
        threads.shutdown()
        submitting.join(LIMIT_S)
        assert {call.result(LIMIT_S) for call in calls} == {1}


async def test_the_deadline_of_a_task_holds_for_its_call(gate: threading.Event) -> None:
    """A call sees its task's deadline, and is not made if no thread becomes free before it."""
    threads = Threads(1, "relatum-test")
    made: list[int] = []
    with within(LIMIT_S):
        assert 0 < await in_thread(threads, left_s) <= LIMIT_S
    threads.submit(gate.wait, LIMIT_S)
    with within(0.05), pytest.raises(TimeoutError) as caught:
        await in_thread(threads, made.append, 1)
    assert isinstance(caught.value, Transient), "a loop that retries does not log it as unexpected"
    gate.set()
    assert await in_thread(threads, abs, -1) == 1
    assert made == []


def test_a_thread_that_would_wait_for_itself_is_refused() -> None:
    """A call from a thread that waits for the same threads is refused."""
    threads = Threads(1, "relatum-test")

    def nested() -> None:
        asyncio.run(in_thread(threads, abs, -1))

    with pytest.raises(RuntimeError, match="same threads"):
        threads.submit(nested).result(LIMIT_S)


def test_a_child_has_threads_of_its_own(gate: threading.Event) -> None:
    """Those of the parent are not there, and continue in the parent."""
    threads = Threads(1, "relatum-test")
    held = threads.submit(gate.wait, LIMIT_S)
    threads.submit(abs, -2)
    assert in_child(lambda: threads.submit(abs, -1).result(LIMIT_S)) == 1
    gate.set()
    assert held.result(LIMIT_S)


AT_EXIT = """
import asyncio, atexit, threading, time
from relatum.common.waiting import Threads, in_thread

threads, other = Threads(2, "used"), Threads(2, "new")

def at_exit():
    for each in (threads, other):
        print(each.submit(abs, -1).result(20), asyncio.run(in_thread(each, abs, -2)), flush=True)

atexit.register(at_exit)
threads.submit(abs, -1).result()
threads.submit(time.sleep, 60)
threads.submit(print, "begun", flush=True).result()
"""


def test_threads_work_as_the_interpreter_ends_and_do_not_hold_it() -> None:
    """One hangs; handlers of `atexit` submit; the program ends anyway."""
    done = subprocess.run([sys.executable, "-c", AT_EXIT], capture_output=True, text=True, timeout=40, check=False)
    assert (done.stdout, done.stderr, done.returncode) == ("begun\n1 2\n1 2\n", "", 0)
