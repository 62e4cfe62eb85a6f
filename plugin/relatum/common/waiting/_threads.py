"""Blocking calls for tasks: daemon threads that belong to one object, with one switch to a thread and back per call.

`concurrent.futures` joins its threads when the interpreter ends, so a server that does not answer would keep a program
from ending; `asyncio.to_thread` shares one executor with the application. These threads are not joined, and a switch to
a thread and back takes half the time. See docs/adr/0048.
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

IDLE_S: Final = 10.0
"""Seconds after which an idle thread ends."""

LET_GO_S: Final = 2 * LOOK_S
"""The most seconds that a cancelled task waits for its thread to release what it holds."""

LET_GO_LOOK_S: Final = 0.005
"""Seconds between two of its looks."""

_Result = TypeVar("_Result")
_Item = TypeVar("_Item")


class NoThreadInTime(TimeoutError):
    """No thread became free before the call's deadline; the call was not made."""


class Threads:
    """Up to `most` daemon threads for calls, started on demand; idle threads end after a while.

    Calls must check a deadline or be bounded: a call that hangs keeps its thread. A forked child starts without
    threads; the parent's calls stay in the parent.
    """

    def __init__(self, most: int, name: str) -> None:
        self.most = most
        self._name = name
        self._begin()
        after_fork(self, Threads._renew)

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._queue: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._threads: set[threading.Thread] = set()
        self._ending: list[threading.Thread] = []
        self._unfinished = 0
        self._is_shut = False

    def _renew(self) -> None:
        leave_to_parent(self._lock, self._queue, self._threads)
        self._begin()

    def submit(self, function: Callable[..., _Result], /, *args: Any, **options: Any) -> "Future[_Result]":
        """Call a function in a thread, also while the interpreter ends; `RuntimeError` after `shutdown`."""
        future: Future[_Result] = Future()
        call = partial(_run, future, partial(function, *args, **options))
        with self._lock:
            if self._is_shut:
                raise RuntimeError("these threads were shut down")
            self._unfinished += 1
            if self.waiting and len(self._threads) < self.most:
                self._start()
            has_threads = bool(self._threads)
            if has_threads:
                # With the lock held: no thread would take a call queued after `shutdown`.
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
            # No more threads can start. While the interpreter ends none can, from Python 3.12 on.
            self._threads.discard(thread)

    def _work(self) -> None:
        while (call := self._next()) is not None:
            call()
            del call
            with self._lock:
                self._unfinished -= 1

    def _next(self) -> Callable[[], None] | None:
        """Return the next call; None if this thread is to end."""
        while True:
            call, is_over = None, False
            with suppress(Empty):
                call = self._queue.get(timeout=IDLE_S)
                is_over = call is None
            if call is not None:
                return call
            with self._lock:
                if is_over:
                    # Queued again, so that every thread ends.
                    self._queue.put(None)
                if is_over or self._unfinished < len(self._threads):
                    self._threads.discard(threading.current_thread())
                    return None

    @property
    def waiting(self) -> int:
        """The number of calls that wait for a thread."""
        return max(0, self._unfinished - len(self._threads))

    def has(self, thread: threading.Thread) -> bool:
        """Whether a thread is one of these."""
        return thread in self._threads

    def shutdown(self, *, wait: bool = False) -> None:
        """Stop accepting calls. Accepted calls still run; then the threads end. `wait=True` waits for that."""
        with self._lock:
            if not self._is_shut:
                self._is_shut, self._ending = True, list(self._threads)
            self._queue.put(None)
        if wait:
            self.join(None)

    def join(self, timeout_s: float | None) -> None:
        """Wait after `shutdown` until the threads have ended, for `timeout_s` at most; None waits forever."""
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
            # A task's future refuses StopIteration; a generator raises the same RuntimeError.
            error, error.__cause__ = RuntimeError("the call raised StopIteration"), error
        future.set_exception(error)
        # Breaks the cycle of the error and this frame.
        del future, function


_COMMON: Final = Threads(32, "relatum-calls")


async def in_thread(
    threads: Threads | None,
    function: Callable[..., _Result],
    *args: Any,
    ending: Deadline | None = None,
    returned: Callable[[_Result], object] | None = None,
    to_end: bool = False,
) -> _Result:
    """Call a function in a thread, within the task's deadline. If the task is cancelled, the thread stops waiting.

    A cancelled task ends after `LET_GO_S` at most: by then the call has released what it held, unless it hangs in code
    that ignores deadlines.

    Args:
        threads: The threads to use; None for the threads that all rare calls of this process share.
        function: The function to call.
        args: Its arguments.
        ending: A further deadline of the call; None for none.
        returned: Called in a thread with the result of a call that was cancelled, to release it; None if there is
            nothing to release.
        to_end: True waits for a cancelled call until it has ended, however long that takes, because the following work
            must not overtake it. Default False.

    Raises:
        NoThreadInTime: no thread became free before the deadline; the function was not called.
        RuntimeError: the caller is one of these threads, which would wait for itself.
    """
    deadline = Deadline(None, current(), ending)
    with within(deadline):
        context = copy_context()
    threads = threads or _COMMON
    if threads.has(threading.current_thread()):
        raise RuntimeError("a call in a thread waits for another of the same threads: make both in one call")
    call: Future[_Result] = threads.submit(context.run, function, *args)
    came = asyncio.wrap_future(call)
    try:
        if threads.waiting and (left_s := deadline.left_s()) < math.inf:
            await asyncio.wait([came], timeout=max(0.0, left_s))
            if call.cancel():
                raise NoThreadInTime(f"no thread became free in time ({deadline})")
        return await came
    except (asyncio.CancelledError, GeneratorExit) as ended:
        if not call.cancel():
            deadline.end_in(0)
            until = time.monotonic() + (math.inf if to_end else LET_GO_S)
            while isinstance(ended, asyncio.CancelledError) and not call.done() and time.monotonic() < until:
                # The task may be cancelled again.
                with suppress(asyncio.CancelledError):
                    await asyncio.sleep(LET_GO_LOOK_S)
            call.add_done_callback(partial(_give_back, returned))
        raise
    finally:
        deadline.end_in(0)
        if not came.cancel() and not came.cancelled():
            # Otherwise asyncio would log the error of a call whose task was cancelled.
            came.exception()
        # An error's traceback refers to this frame.
        del call, came


_CONNECTING: Final = Threads(256, "relatum-connecting")
"""For calls that ignore deadlines. A hung one keeps its thread, so there are enough for all that connect."""


def call_in_time(
    deadline: Deadline, function: Callable[..., _Result], *args: Any, unwanted: Callable[[_Result], object]
) -> _Result:
    """Call a function that ignores deadlines, such as a resolver, in a thread; `TimeoutError` after the deadline.

    `unwanted` gets a result that comes too late, to release it.
    """
    call: Future[_Result] = _CONNECTING.submit(copy_context().run, function, *args)
    try:
        while not call.done():
            if deadline.has_passed:
                raise TimeoutError("timed out")  # noqa: TRY301 - as any error, it ends the waiting
            wait([call], min(LOOK_S, deadline.left_s()))
        return call.result()
    except BaseException:
        call.add_done_callback(partial(_give_back, unwanted))
        raise
    finally:
        # An error's traceback refers to this frame.
        del call


def _give_back(returned: Callable[[Any], object] | None, call: "Future[Any]") -> None:
    """Release an unwanted result in a new thread, because that may block, and the others may have been shut down."""
    if returned is not None and call.exception() is None:
        threading.Thread(target=returned, args=(call.result(),), name="relatum-given-back", daemon=True).start()


class Parts(Generic[_Item]):
    """The parts of a blocking iteration, taken by one thread at a time."""

    def __init__(self, given: Generator[list[_Item], None, None]) -> None:
        self._given = given
        self._lock = threading.Lock()
        self._is_ended = False

    def take(self) -> list[_Item] | None:
        """Return the next part; None at the end."""
        try:
            with self._lock:
                return next(self._given, None)
        finally:
            if self._is_ended:
                self.close()

    def close(self) -> None:
        """End the iteration. A thread that takes a part now does it, because a source of ids may block for long."""
        self._is_ended = True
        if self._lock.acquire(blocking=False):
            try:
                self._given.close()
            finally:
                self._lock.release()


def pause(seconds: float) -> None:
    """Sleep, but no longer than the call has left, even if its deadline is moved up during the sleep."""
    until = time.monotonic() + seconds
    deadline = current()
    while (left := until - time.monotonic()) > 0:
        if deadline is None:
            time.sleep(left)
        elif deadline.has_passed:
            return
        else:
            time.sleep(max(0.0, min(left, LOOK_S, deadline.left_s())))
