"""The event loop of a long-running component: one thread for all its state, and a few threads that wait for servers.

Each recorder, collector and serial consumer owns a loop. Only the loop's thread uses the component's state, so the
state needs no locks. Calls that wait for PostgreSQL, the broker or the application's functions run in `threads`.
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
"""Default maximum of concurrent requests, so that a request to a frozen node does not block all others."""

_Result = TypeVar("_Result")


class LoopThread(threading.Thread):
    """A thread that runs a component's loop. Its code must not block."""


class ComponentLoop:
    """An asyncio loop in its own daemon thread.

    `call`, `run`, `start` and `stop` may be called from any thread, other methods only in the loop's thread. In a
    forked child, the loop does not run, and its state belongs to the parent.

    Unexpected errors of callbacks and tasks are logged to `logger`; they end neither the loop nor other tasks.
    `threads` run at most `helpers_max` requests at a time, within the deadline `ending`, which the component shortens
    when it ends.
    """

    def __init__(
        self, name: str, logger: logging.Logger, *, helpers_max: int = HELPERS_MAX, ending: Deadline | None = None
    ) -> None:
        self.threads = Threads(helpers_max, f"{name}-asks")
        self._name = name
        self._logger = logger
        self._ending = ending
        # Reentrant: a signal handler may call `stop` in a thread that is running `stop`.
        self._lock = threading.RLock()
        self._loop: asyncio.SelectorEventLoop | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._results: set[Future[Any]] = set()
        self._thread: threading.Thread | None = None
        self._is_stopped = False
        after_fork(self, ComponentLoop._forget_in_child)

    def _forget_in_child(self) -> None:
        # Closing the copied loop would remove the parent's sockets from the epoll that both processes share.
        leave_to_parent(self._lock, self._loop, self._tasks, self._results, self._thread)
        self._lock = threading.RLock()
        self._is_stopped, self._thread, self._loop = True, None, None

    # --- called from any thread ---------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the thread. No effect if it was started before, or if the loop was stopped."""
        with self._lock:
            if self._thread is not None or self._is_stopped:
                return
            # An explicit class, because the event loop policy belongs to the application.
            self._loop = loop = asyncio.SelectorEventLoop()
            loop.set_exception_handler(self._log_error)
            thread = LoopThread(target=self._run, args=(loop,), name=self._name, daemon=True)
            try:
                thread.start()
            except RuntimeError:
                loop.close()
                raise
            self._thread = thread

    def call(self, function: Callable[..., object], *args: Any) -> bool:
        """Schedule a call in the loop. Return False if the loop does not run, so that the call will never be made."""
        if self._loop is None:
            return False
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._call, function, args)
            return True
        return False

    def _call(self, function: Callable[..., object], args: tuple[Any, ...]) -> None:
        # In the loop's context, since the caller's deadline does not apply here.
        self._context.run(function, *args)

    def run(self, function: Callable[..., Coroutine[Any, Any, _Result]], *args: Any) -> "Future[_Result] | None":
        """Call a coroutine function in the loop, and return a future of its result; None if the loop does not run.

        The future is cancelled if the loop ends first. Cancelling the future cancels the call. Do not wait for the
        future in the loop's thread.
        """
        result: Future[_Result] = Future()

        def start_task() -> None:
            if self._is_stopped:
                # `stop` cancels the existing tasks, and might miss a new one.
                result.cancel()
                return
            task = self.spawn(function(*args), result)
            result.add_done_callback(lambda _: self.call(task.cancel) if result.cancelled() else None)

        # Referenced until it is done, so that it is cancelled if the loop ends and drops the pending call.
        self._results.add(result)
        result.add_done_callback(self._results.discard)
        if self.call(start_task):
            return result
        self._results.discard(result)
        return None

    def stop(self, timeout_s: float) -> bool:
        """Cancel all tasks and end the loop. Return False if the loop has not ended after `timeout_s` seconds.

        In the loop's thread, or in one of `threads`, it does not wait, and returns True.
        """
        with self._lock:
            is_first, self._is_stopped = not self._is_stopped, True
            thread, loop = self._thread, self._loop
        if thread is None or loop is None:
            return True
        if is_first:
            # Only once: a second `loop.stop` would interrupt the cancellation of tasks.
            self.call(loop.stop)
        caller_thread = threading.current_thread()
        if caller_thread is thread or self.threads.has(caller_thread):
            return True
        thread.join(timeout_s)
        return not thread.is_alive()

    # --- called in the loop -------------------------------------------------------------------------------------------

    def spawn(self, coroutine: Coroutine[Any, Any, Any], result: "Future[Any] | None" = None) -> "asyncio.Task[Any]":
        """Run a coroutine as a task. `result` gets its result or error; if None, an error is logged as unexpected."""
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(partial(self._finish, result))
        return task

    def call_later(self, seconds: float, function: Callable[..., object], *args: Any) -> asyncio.TimerHandle:
        """Call a function in the loop after a delay. Cancelling the returned handle cancels the call."""
        return asyncio.get_running_loop().call_later(seconds, function, *args)

    async def ask(self, function: Callable[..., _Result], *args: Any, threads: Threads | None = None) -> _Result:
        """Call a function that waits for a server in a thread, and return its result.

        `threads`: Threads for calls that must not queue behind requests. None (default): the loop's `threads`.
        """
        return await in_thread(threads or self.threads, function, *args, ending=self._ending)

    def repeat(
        self, call: Callable[[], Awaitable[float]], what: str, outages: Outages, longest_s: float = math.inf
    ) -> "RepeatedTask":
        """Call `call` repeatedly. It returns the seconds until it is next called; `math.inf`: at `RepeatedTask.wake`.

        Errors are reported to `outages` under the name `what`, and `call` is retried after at most `longest_s` seconds.
        """
        wake_event = asyncio.Event()

        async def work() -> None:
            pauses = Pauses()
            while True:
                wake_event.clear()
                try:
                    pause_s = await call()
                except Exception as error:  # noqa: BLE001 - reported once, and retried
                    outages.failed(what, error)
                    pause_s = min(pauses.after(error), longest_s)
                else:
                    outages.over(what)
                    pauses = Pauses()
                with suppress(TimeoutError):
                    await asyncio.wait_for(wake_event.wait(), None if pause_s == math.inf else pause_s)

        return RepeatedTask(wake_event.set, self.spawn(work()).cancel)

    def _finish(self, result: "Future[Any] | None", task: "asyncio.Task[Any]") -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if result is None:
            if error is not None:
                self._logger.error("%s hit an unexpected error, and continues", self._name, exc_info=error)
        elif task.cancelled():
            result.cancel()
        elif result.set_running_or_notify_cancel():
            result.set_result(task.result()) if error is None else result.set_exception(error)

    def _log_error(self, _loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error, message = context.get("exception"), context.get("message")
        self._logger.error("%s hit an unexpected error, and continues: %s", self._name, message, exc_info=error)

    async def _cancel_all(self) -> None:
        # Repeated, because new tasks may start during the wait.
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
                    # One of the application's functions raised the exit.
                    self._logger.exception("%s ignored an exit raised by a callback, and continues", self._name)
            loop.run_until_complete(self._cancel_all())
        finally:
            self.threads.shutdown()
            asyncio.set_event_loop(None)
            loop.close()
            for result in list(self._results):
                result.cancel()


class RepeatedTask(NamedTuple):
    """Work that a component repeats. Call `wake` (run now, or once more) and `cancel` (end it) in the loop."""

    wake: Callable[[], object]
    cancel: Callable[[], object]
