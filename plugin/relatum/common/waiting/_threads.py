"""Daemon threads that belong to one object and run blocking calls, also for tasks.

`concurrent.futures` joins its threads at interpreter shutdown, so a server that does not answer would keep a program
from ending; `asyncio.to_thread` shares its executor with the application. These threads are not joined, and switching
to a thread and back takes half the time. See docs/adr/0048.
"""

import asyncio
import math
import threading
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future, wait
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Final, Generic, TypeVar

from relatum.common.processes import after_fork, leave_to_parent
from relatum.common.waiting._deadline import LOOK_S, Deadline, current, within
from relatum.errors import Transient

IDLE_S: Final = 10.0
"""Seconds after which an idle thread ends."""

CANCELLED_WAIT_S: Final = 2 * LOOK_S
"""Maximum seconds that a cancelled task waits for its thread, which has to release connections and locks."""

CANCELLED_POLL_S: Final = 0.005
"""Seconds between two checks during that wait."""

_Result = TypeVar("_Result")
_Item = TypeVar("_Item")


class NoThreadInTime(Transient, TimeoutError):
    """No thread became free before the call's deadline; the call was not made."""


class Threads:
    """Up to `most` daemon threads for calls, started on demand. Idle threads end after `IDLE_S`.

    A call that hangs occupies its thread. A forked child starts without threads and calls.
    """

    def __init__(self, most: int, name: str) -> None:
        self.most = most
        self._name = name
        self._reset()
        after_fork(self, Threads._renew)

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._threads: set[threading.Thread] = set()
        self._ending: list[threading.Thread] = []
        self._unfinished = 0
        self._is_shut = False

    def _renew(self) -> None:
        leave_to_parent(self._lock, self._queue, self._threads)
        self._reset()

    def submit(self, function: Callable[..., _Result], /, *args: Any, **options: Any) -> "Future[_Result]":
        """Call a function in a thread, or here if no thread can start. Raises `RuntimeError` after `shutdown`."""
        future: Future[_Result] = Future()
        call = partial(_run, future, partial(function, *args, **options))
        with self._lock:
            if self._is_shut:
                raise RuntimeError("cannot run the call: the thread pool was shut down")
            self._unfinished += 1
            if self.waiting and len(self._threads) < self.most:
                self._start()
            has_threads = bool(self._threads)
            if has_threads:
                # With the lock held, because no thread would take a call that is queued after `shutdown`.
                self._queue.put(call)
            else:
                self._unfinished -= 1
        if not has_threads:
            call()
        return future

    def _start(self) -> None:
        thread = threading.Thread(target=self._work, name=self._name, daemon=True)
        self._threads.add(thread)
        try:
            thread.start()
        except RuntimeError:
            # No more threads can start. From Python 3.12 on, none can start at interpreter shutdown.
            self._threads.discard(thread)

    def _work(self) -> None:
        while (call := self._next()) is not None:
            call()
            del call
            with self._lock:
                self._unfinished -= 1

    def _next(self) -> Callable[[], None] | None:
        """Return the next call; None if this thread must end."""
        while True:
            call, is_over = None, False
            with suppress(Empty):
                call = self._queue.get(timeout=IDLE_S)
                is_over = call is None
            if call is not None:
                return call
            with self._lock:
                if is_over:
                    # Queued again for the next thread, so that all threads end.
                    self._queue.put(None)
                if is_over or self._unfinished < len(self._threads):
                    self._threads.discard(threading.current_thread())
                    return None

    @property
    def waiting(self) -> int:
        """The number of calls that wait for a thread."""
        return max(0, self._unfinished - len(self._threads))

    def has(self, thread: threading.Thread) -> bool:
        """Whether a thread is one of these threads."""
        return thread in self._threads

    def shutdown(self, *, wait: bool = False) -> None:
        """Refuse further calls. The threads end after the accepted calls; `wait=True` waits for their end."""
        with self._lock:
            if not self._is_shut:
                self._is_shut, self._ending = True, list(self._threads)
            self._queue.put(None)
        if wait:
            self.join(None)

    def join(self, timeout_s: float | None) -> None:
        """Wait after `shutdown` until the threads have ended, at most `timeout_s` seconds; None: without limit."""
        until = math.inf if timeout_s is None else time.monotonic() + timeout_s
        for thread in self._ending:
            left_s = until - time.monotonic()
            thread.join(None if left_s == math.inf else max(0.0, left_s))


def _run(future: "Future[Any]", function: Callable[[], Any]) -> None:
    """Make a call, unless it was cancelled. Never raises."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(function())
    except BaseException as error:  # noqa: BLE001 - raised to the caller by the future
        if isinstance(error, StopIteration):
            # A task's future refuses StopIteration. Generators raise RuntimeError for it, too.
            error, error.__cause__ = RuntimeError("the call raised StopIteration"), error
        future.set_exception(error)
        # Breaks the reference cycle of the error and this frame.
        del future, function


_SHARED: Final = Threads(32, "relatum-calls")


async def in_thread(
    threads: Threads | None,
    function: Callable[..., _Result],
    *args: Any,
    ending: Deadline | None = None,
    returned: Callable[[_Result], object] | None = None,
    to_end: bool = False,
) -> _Result:
    """Call a function in a thread, within the task's deadline, and return its result.

    When the task is cancelled, the call's deadline ends, and the task waits `CANCELLED_WAIT_S` at most for the call
    (`to_end`: without limit, because following work must not overtake it). By then, the call has released its
    connections and locks, unless it hangs in code that ignores deadlines.

    - `threads`: None: 32 threads that the whole process shares, for occasional calls.
    - `ending`: A further deadline of the call.
    - `returned`: Called in a thread with the result of a cancelled call, to release it.

    Raises `NoThreadInTime` if no thread became free before the deadline, so that the function was not called, and
    `RuntimeError` in one of these threads, which would wait for itself.
    """
    deadline = Deadline(None, current(), ending)
    with within(deadline):
        context = copy_context()
    threads = threads or _SHARED
    if threads.has(threading.current_thread()):
        raise RuntimeError("a call in a thread waits for another call in the same threads: make both in one call")
    call: Future[_Result] = threads.submit(context.run, function, *args)
    result_future = asyncio.wrap_future(call)
    try:
        if threads.waiting and (left_s := deadline.left_s()) < math.inf:
            await asyncio.wait([result_future], timeout=max(0.0, left_s))
            if call.cancel():
                raise NoThreadInTime(f"no thread became free in time ({deadline})")
        return await result_future
    except (asyncio.CancelledError, GeneratorExit) as error:
        if not call.cancel():
            deadline.end_in(0)
            until = time.monotonic() + (math.inf if to_end else CANCELLED_WAIT_S)
            while isinstance(error, asyncio.CancelledError) and not call.done() and time.monotonic() < until:
                # The task may be cancelled again during the wait.
                with suppress(asyncio.CancelledError):
                    await asyncio.sleep(CANCELLED_POLL_S)
            call.add_done_callback(partial(_release_result, returned))
        raise
    finally:
        deadline.end_in(0)
        if not result_future.cancel() and not result_future.cancelled():
            # Retrieves the error, which asyncio would otherwise log after the task was cancelled.
            result_future.exception()
        # An error's traceback refers to this frame.
        del call, result_future


_CONNECTING: Final = Threads(256, "relatum-connecting")
"""Threads for calls that ignore deadlines. A hung call occupies its thread, so there are many."""


def call_in_time(
    deadline: Deadline, function: Callable[..., _Result], *args: Any, unwanted: Callable[[_Result], object]
) -> _Result:
    """Call a function that ignores deadlines, such as a resolver, in a thread. Raises `TimeoutError` at the deadline.

    `unwanted` is called with a result that comes too late, to release it.
    """
    call: Future[_Result] = _CONNECTING.submit(copy_context().run, function, *args)
    try:
        while not call.done():
            if deadline.has_passed:
                raise TimeoutError("timed out")  # noqa: TRY301 - handled below like each error of the call
            wait([call], min(LOOK_S, deadline.left_s()))
        return call.result()
    except BaseException:
        call.add_done_callback(partial(_release_result, unwanted))
        raise
    finally:
        # An error's traceback refers to this frame.
        del call


def _release_result(returned: Callable[[Any], object] | None, call: "Future[Any]") -> None:
    """Release an unwanted result in a new thread: that may block, and the other threads may have been shut down."""
    if returned is not None and call.exception() is None:
        threading.Thread(target=returned, args=(call.result(),), name="relatum-given-back", daemon=True).start()


class Parts(Generic[_Item]):
    """The parts of a blocking iteration. One thread at a time takes a part."""

    def __init__(self, generator: Generator[list[_Item], None, None]) -> None:
        self._generator = generator
        self._lock = threading.Lock()
        self._is_ended = False

    def take(self) -> list[_Item] | None:
        """Return the next part; None at the end."""
        try:
            with self._lock:
                return next(self._generator, None)
        finally:
            if self._is_ended:
                self.close()

    def close(self) -> None:
        """End the iteration. If a thread is taking a part, which may block for long, that thread ends it afterwards."""
        self._is_ended = True
        if self._lock.acquire(blocking=False):
            try:
                self._generator.close()
            finally:
                self._lock.release()


def pause(seconds: float) -> None:
    """Sleep, but only up to the call's deadline, even if the deadline is shortened during the sleep."""
    until = time.monotonic() + seconds
    deadline = current()
    while (remaining_s := until - time.monotonic()) > 0:
        if deadline is None:
            time.sleep(remaining_s)
        elif deadline.has_passed:
            return
        else:
            time.sleep(max(0.0, min(remaining_s, LOOK_S, deadline.left_s())))
