"""Blocking calls for tasks: an executor of daemon threads, and one change to a thread and back for each call.

`concurrent.futures` joins its threads as the interpreter ends, so a server that does not answer would keep a program
from ending; `asyncio.to_thread` shares one executor with the application. These threads belong to one object, and are
left where they are at the end. See docs/adr/0048.
"""

import asyncio
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from typing import Any, Final, TypeVar

from relatum.processes import after_fork, leave_to_parent
from relatum.waiting._deadline import LOOK_S, Deadline, current, within

IDLE_S: Final = 10.0
"""Seconds after which a thread without work ends."""

OVERDUE_S: Final = 1.0
"""Seconds after its deadline from which on a call counts as one that never looks at it, and its thread as lost."""

LET_GO_S: Final = 2 * LOOK_S
"""Seconds that a cancelled task waits at most until its thread has let go of what it held."""

_Result = TypeVar("_Result")


class _Call:
    """A call that waits for a thread, or has one."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function
        self._deadline: Deadline | None = current()
        self.future: Future[Any] = Future()

    @property
    def is_overdue(self) -> bool:
        """Whether it should have ended long ago."""
        return self._deadline is not None and self._deadline.left_s() < -OVERDUE_S

    def run(self) -> None:
        """Make it, unless it was cancelled."""
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            self.future.set_result(self._function())
        except BaseException as error:  # noqa: BLE001 - raised where the result is asked for
            self.future.set_exception(error)
            self = None  # type: ignore[assignment]  # else the error holds this frame, which holds the error


class Threads(Executor):
    """An executor of daemon threads, which are started as they are needed and end when they have long had no work.

    A call takes along the deadline that is set where it is submitted. One that is overdue, because it hangs where
    nobody looks at a deadline, no longer counts against the limit: another thread takes its place, once for each place.

    In a child of the process it begins anew; calls of the parent are the parent's.

    Args:
        most: Threads at most.
        name: Of the threads.

    Attributes:
        most: As given.
        replaced: How many threads were lost to overdue calls.
    """

    def __init__(self, most: int, name: str) -> None:
        self.most = most
        self.replaced = 0
        self._name = name
        self._begin()
        after_fork(self, Threads._renew)

    def _begin(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._queue: deque[_Call] = deque()
        self._calls: dict[threading.Thread, _Call | None] = {}
        self._lost: set[threading.Thread] = set()
        self._idle = 0
        self._is_watched = self._is_shut = False

    def _renew(self) -> None:
        leave_to_parent(self._changed, self._queue, self._calls)
        self._begin()

    def submit(self, function: Callable[..., _Result], /, *args: Any, **options: Any) -> "Future[_Result]":
        """Call a function in a thread, also while the interpreter ends.

        Raises:
            RuntimeError: it was shut down.
        """
        call = _Call(partial(function, *args, **options))
        with self._changed:
            if self._is_shut:
                raise RuntimeError("these threads were shut down")
            self._queue.append(call)
            if len(self._queue) <= self._idle:
                self._changed.notify()
            elif len(self._calls) < self.most:
                self._start(self._work)
            elif not self._is_watched:
                self._is_watched = self._start(self._watch)
            has_threads = bool(self._calls)
            if not has_threads:
                self._queue.remove(call)
        if not has_threads:
            call.run()
        return call.future

    def _start(self, target: Callable[[], None]) -> bool:
        thread = threading.Thread(target=target, name=self._name, daemon=True)
        if target == self._work:
            self._calls[thread] = None
        try:
            thread.start()
        except RuntimeError:
            # There can be no more. As the interpreter ends there are none at all, from Python 3.12 on.
            self._calls.pop(thread, None)
            return False
        return True

    def _work(self) -> None:
        thread = threading.current_thread()
        while (call := self._next(thread)) is not None:
            call.run()
            del call

    def _next(self, thread: threading.Thread) -> _Call | None:
        """The next call; None where the thread is to end."""
        with self._changed:
            if thread not in self._calls:
                self._lost.discard(thread)
                return None
            self._calls[thread] = None
            while not self._queue:
                self._idle += 1
                has_come = not self._is_shut and self._changed.wait(IDLE_S)
                self._idle -= 1
                if not has_come and not self._queue:
                    del self._calls[thread]
                    return None
            call = self._calls[thread] = self._queue.popleft()
            return call

    def _watch(self) -> None:
        """While calls wait for a thread, replace those that are lost."""
        while True:
            time.sleep(OVERDUE_S / 4)
            with self._changed:
                if not self._queue:
                    self._is_watched = False
                    return
                overdue = [thread for thread, call in self._calls.items() if call is not None and call.is_overdue]
                for thread in overdue[: max(0, self.most - len(self._lost))]:
                    del self._calls[thread]
                    self._lost.add(thread)
                    self.replaced += 1
                    self._start(self._work)

    @property
    def waiting(self) -> int:
        """Calls that wait for a thread."""
        return len(self._queue)

    def has(self, thread: threading.Thread) -> bool:
        """Whether a thread is one of these."""
        with self._changed:
            return thread in self._calls or thread in self._lost

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more calls. Those under way end by themselves, and threads without work at once."""
        with self._changed:
            self._is_shut = True
            cancelled = list(self._queue) if cancel_futures else []
            threads = list(self._calls)
            self._changed.notify_all()
        for call in cancelled:
            call.future.cancel()
        for thread in threads if wait else []:
            thread.join()


async def in_thread(
    threads: Executor | None,
    function: Callable[..., _Result],
    *args: Any,
    returned: Callable[[_Result], object] | None = None,
) -> _Result:
    """Call a function in a thread, within the deadline of the task; cancelled, the thread lets go of what it waits for.

    So a task that is cancelled ends `LET_GO_S` later at most: what its call held has been given back by then, unless it
    hangs where nobody looks at a deadline.

    Args:
        threads: Where to call it; None for the event loop's own threads.
        function: What to call.
        args: With what.
        returned: Takes back, in a thread, what a call returned that was cancelled; None where it took nothing.

    Raises:
        TimeoutError: no thread became free before the deadline; the function was not called.
        RuntimeError: this is one of those very threads, which would wait for itself.
    """
    if isinstance(threads, Threads) and threads.has(threading.current_thread()):
        raise RuntimeError("a call in a thread waits for another of the same threads: make that in the same call")
    loop = asyncio.get_running_loop()
    with within(None) as deadline:
        call = partial(copy_context().run, function, *args)
        if threads is None:
            try:
                return await loop.run_in_executor(None, call)
            finally:
                deadline.end_in(0)
        future = threads.submit(call)
        left_s = deadline.left_s()
        timer = loop.call_later(max(0.0, left_s), future.cancel) if left_s < math.inf else None
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if future.cancelled() and task is not None and not task.cancelling():
                raise TimeoutError(f"no thread became free in time ({deadline})") from None
            if returned is not None:
                future.add_done_callback(partial(_give_back, threads, returned))
            deadline.end_in(0)
            await _let_go(future)
            raise
        finally:
            if timer is not None:
                timer.cancel()
            deadline.end_in(0)


async def _let_go(future: "Future[Any]") -> None:
    """Wait until a call that was cancelled has ended."""
    if not future.done():
        ended = asyncio.get_running_loop().create_future()

        def end() -> None:
            if not ended.done():
                ended.set_result(None)

        future.add_done_callback(lambda _: _in_loop(ended.get_loop(), end))
        await asyncio.wait([ended], timeout=LET_GO_S)


def _in_loop(loop: asyncio.AbstractEventLoop, call: Callable[[], None]) -> None:
    # The loop may have ended before the call.
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(call)


def _give_back(threads: Executor, returned: Callable[[Any], object], future: "Future[Any]") -> None:
    if not future.cancelled() and future.exception() is None:
        # The loop may be what calls this, and `returned` may wait.
        threads.submit(returned, future.result())


def pause(seconds: float) -> None:
    """Sleep, no longer than the call has left: also where its deadline is brought forward meanwhile."""
    until = time.monotonic() + seconds
    deadline = current()
    while (left := until - time.monotonic()) > 0:
        if deadline is None:
            time.sleep(left)
        elif deadline.has_passed:
            return
        else:
            time.sleep(max(0.0, min(left, LOOK_S, deadline.left_s())))
