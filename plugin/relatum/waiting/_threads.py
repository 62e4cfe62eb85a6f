"""Blocking calls for tasks: daemon threads that belong to one object, one change to a thread and back for each call.

`concurrent.futures` joins its threads as the interpreter ends, so a server that does not answer would keep a program
from ending; `asyncio.to_thread` shares one executor with the application. These threads are left where they are at the
end, and a change to one and back takes half the time. See docs/adr/0048.
"""

import asyncio
import math
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Final, Generic, Protocol, TypeVar

from relatum.processes import after_fork, leave_to_parent
from relatum.waiting._deadline import LOOK_S, Deadline, current, within

IDLE_S: Final = 10.0
"""Seconds after which a thread without work ends."""

OVERDUE_S: Final = 1.0
"""Seconds after its deadline from which on a call counts as one that never looks at it, and its thread as lost."""

LET_GO_S: Final = 2 * LOOK_S
"""Seconds that a cancelled task waits at most until its thread has let go of what it held."""

_Result = TypeVar("_Result")
_Item = TypeVar("_Item")


class NoThreadInTime(TimeoutError):
    """No thread became free before the deadline of the call, which was not made."""


class _Call(Protocol):
    """A call that waits for a thread, or has one."""

    @property
    def deadline(self) -> Deadline | None:
        """When it should have ended; None for no such moment."""

    def run(self) -> None:
        """Make it, unless it was cancelled; it raises nothing."""


class Threads:
    """At most so many daemon threads for calls, started as they are needed; they end when they have long had no work.

    A call takes along the deadline that is set where it is submitted. One that is overdue, because it hangs where
    nobody looks at a deadline, no longer counts against the limit: another thread takes its place, once for each place.
    `replaced` counts the threads that were lost so.

    In a child of the process it begins anew; calls of the parent are the parent's.
    """

    def __init__(self, most: int, name: str) -> None:
        self.most = most
        self.replaced = 0
        self._name = name
        self._begin()
        after_fork(self, Threads._renew)

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._queue: SimpleQueue[_Call | None] = SimpleQueue()
        self._calls: dict[threading.Thread, _Call | None] = {}
        self._lost: set[threading.Thread] = set()
        self._ending: list[threading.Thread] = []
        self._watcher: threading.Thread | None = None
        self._unfinished = 0
        self._is_watched = self._is_shut = False

    def _renew(self) -> None:
        leave_to_parent(self._lock, self._queue, self._calls)
        self._begin()

    def submit(self, function: Callable[..., _Result], /, *args: Any, **options: Any) -> "Future[_Result]":
        """Call a function in a thread, also while the interpreter ends; `RuntimeError` after `shutdown`."""
        call = _Submitted(partial(function, *args, **options))
        self._take(call)
        return call.future

    def _take(self, call: _Call) -> bool:
        """Have a call made; whether it waits until a thread is free."""
        with self._lock:
            if self._is_shut:
                raise RuntimeError("these threads were shut down")
            self._unfinished += 1
            if self.waiting and len(self._calls) < self.most:
                self._start(self._work)
            has_threads, is_waiting = bool(self._calls), bool(self.waiting)
            if not has_threads:
                self._unfinished -= 1
            else:
                # With the lock held: behind what `shutdown` puts there nobody would come to it.
                self._queue.put(call)
                if is_waiting and not self._is_watched:
                    self._is_watched = self._start(self._watch)
        if not has_threads:
            call.run()
        return has_threads and is_waiting

    def _start(self, target: Callable[[], None]) -> bool:
        thread = threading.Thread(target=target, name=self._name, daemon=True)
        if target == self._work:
            self._calls[thread] = None
        else:
            self._watcher = thread
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
            self._calls[thread] = call
            call.run()
            del call
            with self._lock:
                if thread not in self._calls:
                    self._lost.discard(thread)
                    return
                self._calls[thread] = None
                self._unfinished -= 1

    def _next(self, thread: threading.Thread) -> _Call | None:
        """The next call; None where the thread is to end."""
        while True:
            call, is_over = None, False
            with suppress(Empty):
                call = self._queue.get(timeout=IDLE_S)
                is_over = call is None
            if call is not None:
                return call
            with self._lock:
                if is_over:
                    # For all: each thread that comes to it ends.
                    self._queue.put(None)
                if is_over or self._unfinished < len(self._calls):
                    del self._calls[thread]
                    return None

    def _watch(self) -> None:
        """While calls wait for a thread, replace those that are lost."""
        while True:
            time.sleep(OVERDUE_S / 4)
            with self._lock:
                if not self.waiting:
                    self._is_watched = False
                    return
                overdue = [thread for thread, call in self._calls.items() if _is_overdue(call)]
                for thread in overdue[: max(0, self.most - len(self._lost))]:
                    del self._calls[thread]
                    self._lost.add(thread)
                    self._unfinished -= 1
                    self.replaced += 1
                while self.waiting and len(self._calls) < self.most and self._start(self._work):
                    pass

    @property
    def waiting(self) -> int:
        """Calls that wait for a thread."""
        return max(0, self._unfinished - len(self._calls))

    def has(self, thread: threading.Thread) -> bool:
        """Whether a thread is one of these."""
        return thread in self._calls or thread in self._lost

    def shutdown(self, *, wait: bool = False) -> None:
        """Take no more calls. Those that were taken are made, and then the threads end; True waits for that."""
        with self._lock:
            if not self._is_shut:
                self._is_shut, self._ending = True, list(self._calls)
                if self._is_watched and self._watcher is not None:
                    self._ending.append(self._watcher)
            self._queue.put(None)
        if wait:
            self.join(None)

    def join(self, timeout_s: float | None) -> None:
        """Wait until the threads have ended, once they are shut down: so many seconds at most, None for any number."""
        until = math.inf if timeout_s is None else time.monotonic() + timeout_s
        for thread in self._ending:
            left_s = until - time.monotonic()
            thread.join(None if left_s == math.inf else max(0.0, left_s))


def _is_overdue(call: _Call | None) -> bool:
    """Whether a call should have ended long ago."""
    return call is not None and call.deadline is not None and call.deadline.left_s() < -OVERDUE_S


class _Submitted:
    """A call of which a thread may wait for the result."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self.deadline = current()
        self.future: Future[Any] = Future()
        self._function = function

    def run(self) -> None:
        if not self.future.set_running_or_notify_cancel():
            return
        try:
            self.future.set_result(self._function())
        except BaseException as error:  # noqa: BLE001 - raised where the result is asked for
            self.future.set_exception(error)
            self = None  # type: ignore[assignment]  # else the error holds this frame, which holds the error


class _Awaited(Generic[_Result]):
    """A call of which a task waits for the result."""

    def __init__(
        self,
        threads: Threads,
        function: Callable[[], _Result],
        deadline: Deadline,
        returned: Callable[[_Result], object] | None,
        *,
        to_end: bool,
    ) -> None:
        self.deadline = deadline
        self._to_end = to_end
        self._threads = threads
        self._function = function
        self._returned = returned
        self._loop = asyncio.get_running_loop()
        self._came: asyncio.Future[_Result] = self._loop.create_future()
        self._left: asyncio.Future[None] | None = None
        self._has_ended = False
        self._begun = threading.Lock()

    async def result(self) -> _Result:
        timer, came = None, self._came
        if self._threads._take(self) and (left_s := self.deadline.left_s()) < math.inf:
            timer = self._loop.call_later(max(0.0, left_s), self._end)
        try:
            return await came
        except asyncio.CancelledError:
            if not self._begins():
                await self._let_go()
            raise
        finally:
            if timer is not None:
                timer.cancel()

    async def _let_go(self) -> None:
        """The task was cancelled: wait until the call has ended, for a moment or for as long as it takes."""
        if not self._came.cancelled():
            if self._came.exception() is None:
                self._give_back(self._came.result())
        elif not self._has_ended:
            self.deadline.end_in(0)
            self._left = self._loop.create_future()
            if not self._to_end:
                await asyncio.wait([self._left], timeout=LET_GO_S)
            while self._to_end and not self._has_ended:
                # The call goes on also where the task is cancelled once more.
                with suppress(asyncio.CancelledError):
                    await asyncio.wait([self._left])

    def run(self) -> None:
        if not self._begins():
            return
        try:
            result = self._function()
        except BaseException as error:  # noqa: BLE001 - raised where the result is asked for
            self._tell(self._fail, error)
        else:
            self._tell(self._succeed, result)

    def _begins(self) -> bool:
        """Whether this is the first to begin it, or to see that it never begins."""
        return self._begun.acquire(blocking=False)

    def _end(self) -> None:
        if not self._came.done() and self._begins():
            self._came.set_exception(NoThreadInTime(f"no thread became free in time ({self.deadline})"))

    def _tell(self, tell: Callable[[Any], None], what: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(tell, what)
        except RuntimeError:
            # The loop has ended.
            if tell == self._succeed:
                self._give_back(what)

    def _succeed(self, result: _Result) -> None:
        if self._is_awaited():
            self._came.set_result(result)
        else:
            self._give_back(result)

    def _fail(self, error: BaseException) -> None:
        if self._is_awaited():
            if isinstance(error, StopIteration):
                # A future takes none; a generator would say the same of one.
                error, error.__cause__ = RuntimeError("the call raised StopIteration"), error
            self._came.set_exception(error)

    def _is_awaited(self) -> bool:
        """Whether the task still waits, as the call has ended; one that was cancelled is told."""
        self._has_ended = True
        if self._left is not None and not self._left.done():
            self._left.set_result(None)
        return not self._came.done()

    def _give_back(self, result: _Result) -> None:
        """Nobody takes the result. In a thread: what takes it back may wait, and these may have been shut down."""
        if self._returned is not None:
            threading.Thread(target=self._returned, args=(result,), name="relatum-given-back", daemon=True).start()


async def in_thread(
    threads: Threads | None,
    function: Callable[..., _Result],
    *args: Any,
    ending: Deadline | None = None,
    returned: Callable[[_Result], object] | None = None,
    to_end: bool = False,
) -> _Result:
    """Call a function in a thread, within the deadline of the task; cancelled, the thread lets go of what it waits for.

    So a task that is cancelled ends `LET_GO_S` later at most: what its call held has been given back by then, unless it
    hangs where nobody looks at a deadline.

    Args:
        threads: Where to call it; None for the event loop's own threads.
        function: What to call.
        args: With what.
        ending: A further deadline of the call; None for none.
        returned: Takes back, in a thread, what a call returned that was cancelled, if it is one of `threads`; None
            where it took nothing.
        to_end: True: a cancelled call in `threads` is waited for until it has ended, however long that takes, since
            what follows must not overtake it. Default False.

    Raises:
        NoThreadInTime: no thread became free before the deadline; the function was not called.
        RuntimeError: this is one of those very threads, which would wait for itself.
    """
    deadline = Deadline(None, *(outer for outer in (current(), ending) if outer is not None))
    with within(deadline):
        context = copy_context()
    call = partial(context.run, function, *args)
    try:
        if threads is None:
            return await asyncio.get_running_loop().run_in_executor(None, call)
        if threads.has(threading.current_thread()):
            raise RuntimeError("a call in a thread waits for another of the same threads: make that in the same call")
        return await _Awaited(threads, call, deadline, returned, to_end=to_end).result()
    finally:
        deadline.end_in(0)


class Parts(Generic[_Item]):
    """The parts of a blocking iteration, taken by one thread at a time."""

    def __init__(self, given: Generator[list[_Item], None, None]) -> None:
        self._given = given
        self._lock = threading.Lock()
        self._is_ended = False

    def take(self) -> list[_Item] | None:
        """The next part; None at the end."""
        try:
            with self._lock:
                return next(self._given, None)
        finally:
            if self._is_ended:
                self.close()

    def close(self) -> None:
        """End it: by the thread that takes a part now, where one does, since a source of ids may hold that for long."""
        self._is_ended = True
        if self._lock.acquire(blocking=False):
            try:
                self._given.close()
            finally:
                self._lock.release()


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
