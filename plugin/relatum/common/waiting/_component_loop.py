"""The event loop of a long-running component: one thread with all its state, and a few threads that wait for servers.

Recorders, collectors and serial consumers each own a loop. Only the loop's thread touches their state, so nothing is
locked; calls that wait for PostgreSQL, a broker's answer or an application's function run in `threads`.
See docs/adr/0052.
"""

import asyncio
import logging
import math
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from typing import Any, Final, NamedTuple, TypeVar

from relatum.common.client_logs import own_connection
from relatum.common.processes import after_fork, leave_to_parent
from relatum.common.waiting._deadline import Deadline
from relatum.common.waiting._failures import Outages, Pauses
from relatum.common.waiting._threads import Threads, in_thread

HELPERS_MAX: Final = 3
"""Default number of concurrent requests: one that waits for a frozen node does not stop the others."""

_Result = TypeVar("_Result")


class LoopThread(threading.Thread):
    """A thread that runs a component's loop: nothing in it may block."""


class ComponentLoop:
    """An asyncio loop in its own daemon thread.

    `call`, `run`, `start` and `stop` may be called from any thread, other methods only in the loop's. In a forked child
    nothing runs, and the state is the parent's.

    `logger` gets unexpected errors of callbacks and tasks, which end neither the loop nor another task. `threads` make
    the requests, `helpers_max` at once, within the deadline `ending`, which is moved up when the component ends.
    """

    def __init__(
        self, name: str, logger: logging.Logger, *, helpers_max: int = HELPERS_MAX, ending: Deadline | None = None
    ) -> None:
        self.threads = Threads(helpers_max, f"{name}-asks")
        self._name = name
        self._logger = logger
        self._ending = ending
        # Reentrant: a signal handler may stop what this thread is stopping.
        self._lock = threading.RLock()
        self._loop: asyncio.SelectorEventLoop | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._results: set[Future[Any]] = set()
        self._thread: threading.Thread | None = None
        self._is_stopped = False
        after_fork(self, ComponentLoop._leave)

    def _leave(self) -> None:
        # To close a copied loop would remove the parent's sockets from the epoll that both share.
        leave_to_parent(self._lock, self._loop, self._tasks, self._results, self._thread)
        self._lock = threading.RLock()
        self._is_stopped, self._thread, self._loop = True, None, None

    # --- called from any thread ---------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread; no effect if it runs, or was stopped."""
        with self._lock:
            if self._thread is not None or self._is_stopped:
                return
            # The class is named, because an event loop policy belongs to the application.
            self._loop = loop = asyncio.SelectorEventLoop()
            loop.set_exception_handler(self._failed)
            thread = LoopThread(target=self._run, args=(loop,), name=self._name, daemon=True)
            try:
                thread.start()
            except RuntimeError:
                loop.close()
                raise
            self._thread = thread

    def call(self, function: Callable[..., object], *args: Any) -> bool:
        """Call a function soon in the loop; False if the loop does not run, and never will call it."""
        if self._loop is None:
            return False
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._call, function, args)
            return True
        return False

    def _call(self, function: Callable[..., object], args: tuple[Any, ...]) -> None:
        # Not in the caller's context: its deadline does not apply here.
        self._context.run(function, *args)

    def run(self, function: Callable[..., Coroutine[Any, Any, _Result]], *args: Any) -> "Future[_Result] | None":
        """Call a coroutine function in the loop; None if the loop does not run.

        The future is cancelled if the loop ends first, and cancelling it cancels the call. Do not wait for it in the
        loop's own thread.
        """
        result: Future[_Result] = Future()

        def begin() -> None:
            if self._is_stopped:
                # Its task might be made too late to be cancelled.
                result.cancel()
                return
            task = self.spawn(function(*args), result)
            result.add_done_callback(lambda _: self.call(task.cancel) if result.cancelled() else None)

        # Kept until it is done, because a loop that ends drops its pending calls.
        self._results.add(result)
        result.add_done_callback(self._results.discard)
        if self.call(begin):
            return result
        self._results.discard(result)
        return None

    def stop(self, timeout_s: float) -> bool:
        """Cancel all tasks and end the loop; False if it has not ended after `timeout_s`.

        A call from the loop or one of its threads does not wait, and returns True.
        """
        with self._lock:
            is_first, self._is_stopped = not self._is_stopped, True
            thread, loop = self._thread, self._loop
        if thread is None or loop is None:
            return True
        if is_first:
            # Only once: a second stop would interrupt the cancelling of tasks.
            self.call(loop.stop)
        here = threading.current_thread()
        if here is thread or self.threads.has(here):
            return True
        thread.join(timeout_s)
        return not thread.is_alive()

    # --- called in the loop -------------------------------------------------------------------------------------------

    def spawn(self, made: Coroutine[Any, Any, Any], result: "Future[Any] | None" = None) -> "asyncio.Task[Any]":
        """Run a coroutine as a task. `result` gets its outcome; without it, an error is logged as unexpected."""
        task = asyncio.get_running_loop().create_task(made)
        self._tasks.add(task)
        task.add_done_callback(partial(self._ended, result))
        return task

    def call_later(self, seconds: float, function: Callable[..., object], *args: Any) -> asyncio.TimerHandle:
        """Call a function in the loop after a delay, unless the handle is cancelled."""
        return asyncio.get_running_loop().call_later(seconds, function, *args)

    async def ask(self, function: Callable[..., _Result], *args: Any, threads: Threads | None = None) -> _Result:
        """Call a function that waits for a server in a thread, and wait for its result.

        `threads`: Other threads than the loop's own, for calls that must not queue behind requests.
        """
        return await in_thread(threads or self.threads, function, *args, ending=self._ending)

    def repeat(
        self, call: Callable[[], Awaitable[float]], what: str, outages: Outages, longest_s: float = math.inf
    ) -> "Duty":
        """Call a function repeatedly; `call` returns the seconds until the next time, `math.inf` to wait for `wake`.

        Its errors are reported to `outages` under the name `what`, and it is retried after a pause of at most
        `longest_s`.
        """
        woken = asyncio.Event()

        async def work() -> None:
            pauses = Pauses()
            while True:
                woken.clear()
                try:
                    pause_s = await call()
                except Exception as error:  # noqa: BLE001 - reported once, and retried
                    outages.failed(what, error)
                    pause_s = min(pauses.after(error), longest_s)
                else:
                    outages.over(what)
                    pauses = Pauses()
                with suppress(TimeoutError):
                    await asyncio.wait_for(woken.wait(), None if pause_s == math.inf else pause_s)

        return Duty(woken.set, self.spawn(work()).cancel)

    def _ended(self, result: "Future[Any] | None", task: "asyncio.Task[Any]") -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if result is None:
            if error is not None:
                self._logger.error("%s hit an unexpected error, and continues", self._name, exc_info=error)
        elif task.cancelled():
            result.cancel()
        elif result.set_running_or_notify_cancel():
            result.set_result(task.result()) if error is None else result.set_exception(error)

    def _failed(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error, message = context.get("exception"), context.get("message")
        self._logger.error("%s hit an unexpected error, and continues: %s", self._name, message, exc_info=error)

    async def _cancel_all(self) -> None:
        # In a loop, because new tasks may start during the wait.
        while tasks := list(self._tasks):
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    @own_connection()
    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        asyncio.set_event_loop(loop)
        self._context = copy_context()
        try:
            is_stopped = False
            while not is_stopped:
                try:
                    loop.run_forever()
                    is_stopped = True
                except (SystemExit, KeyboardInterrupt):
                    # A function of the application raised it.
                    self._logger.exception("%s ignored an exit raised by a callback, and continues", self._name)
            loop.run_until_complete(self._cancel_all())
        finally:
            self.threads.shutdown()
            asyncio.set_event_loop(None)
            loop.close()
            for result in list(self._results):
                result.cancel()


class Duty(NamedTuple):
    """Work that a component repeats; see `ComponentLoop.repeat`. `wake` and `cancel` are called in the loop.

    Attributes:
        wake: Runs it now, or once more if it is running.
        cancel: Ends it; a running call is cancelled.
    """

    wake: Callable[[], object]
    cancel: Callable[[], object]
