"""Calling executors from a loop: coroutine functions in it, all others in threads; also from a joined transaction."""

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import CancelledError, Future
from functools import partial
from typing import Any

from relatum.collecting._async_shared import AsyncShared
from relatum.collecting._bulk import Answer, Bulk
from relatum.collecting._bulk_steps import Executed
from relatum.collecting._joined import call

AsyncExecutor = Callable[[Bulk], Answer | Awaitable[Answer]]
"""A coroutine function is awaited in the collector's loop; any other is called in a thread."""


def is_coroutine_function(executor: Callable[..., Any]) -> bool:
    """Whether calling it gives a coroutine; also where it is an object with such a `__call__`."""
    of_type = getattr(executor, "__call__", None)  # noqa: B004 - asked what kind it is, not whether it can be called
    return inspect.iscoroutinefunction(executor) or inspect.iscoroutinefunction(of_type)


async def call_executor(shared: AsyncShared, executor: AsyncExecutor, bulk: Bulk) -> Executed:
    """Call an executor; whatever it raises is its answer, but for the cancellation of the task that calls it."""
    if not is_coroutine_function(executor):
        return await shared.in_thread(partial(call, executor, bulk))  # type: ignore[arg-type]
    try:
        return Executed(await executor(bulk))  # type: ignore[misc]
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        return Executed(raised=error)
    except Exception as error:  # noqa: BLE001 - it becomes the result of each message
        return Executed(raised=error)


class FromThread:
    """An executor as the thread of a joined transaction calls it: one of a loop runs there, and the thread waits.

    Args:
        executor: The executor.
    """

    def __init__(self, executor: AsyncExecutor) -> None:
        self._executor = executor
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._is_cancelled = False
        self._running: Future[Any] | None = None

    def __call__(self, bulk: Bulk) -> Any:
        """Call it.

        Raises:
            CancelledError: `cancel` was called: the transaction is rolled back.
        """
        with self._lock:
            if self._is_cancelled:
                raise CancelledError
            if not is_coroutine_function(self._executor):
                self._running = None
            else:
                self._running = asyncio.run_coroutine_threadsafe(self._executor(bulk), self._loop)  # type: ignore[arg-type]
            running = self._running
        return self._executor(bulk) if running is None else running.result()

    def cancel(self) -> None:
        """Cancel it where it runs in the loop, and let it not be called again."""
        with self._lock:
            self._is_cancelled = True
            if self._running is not None:
                self._running.cancel()
