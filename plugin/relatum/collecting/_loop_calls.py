"""What a collector's threads have done in an event loop: executors and handlers that are coroutine functions."""

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from relatum.collecting._bulk import Answer, Bulk
from relatum.collecting._ports import Abandoned

T = TypeVar("T")

AsyncExecutor = Callable[[Bulk], Answer | Awaitable[Answer]]
"""A coroutine function is awaited in the collector's loop; any other is called in a thread."""


def is_coroutine_function(called: Callable[..., Any]) -> bool:
    """Whether calling it gives a coroutine; also where it is an object with such a `__call__`."""
    of_type = getattr(called, "__call__", None)  # noqa: B004 - asked what kind it is, not whether it can be called
    return inspect.iscoroutinefunction(called) or inspect.iscoroutinefunction(of_type)


class LoopCalls:
    """Calls of coroutine functions in the running loop, for threads, which wait for them."""

    def __init__(self, ended: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._ended = ended
        self._callers: dict[asyncio.Task[Any], threading.Thread] = {}
        # Whoever ends a loop cancels its tasks: this one too, and what it cancels says nothing of a message.
        self._presence = asyncio.create_task(self._be_there(), name="relatum-collector")

    async def _be_there(self) -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            self._ended()

    def call(self, function: Callable[..., Awaitable[T]], *arguments: Any) -> T:
        """Run a coroutine function in the loop and wait in the calling thread until it has ended."""
        done: Future[T] = Future()
        caller = threading.current_thread()
        if not self._soon(lambda: self._loop.create_task(self._call(function, arguments, caller, done))):
            self._ended()
            raise Abandoned
        return done.result()

    def _soon(self, call: Callable[[], object]) -> bool:
        """Have something done in the loop; False where that was closed."""
        try:
            self._loop.call_soon_threadsafe(call)
        except RuntimeError:
            return False
        return True

    async def _call(
        self,
        function: Callable[..., Awaitable[T]],
        arguments: tuple[Any, ...],
        caller: threading.Thread,
        done: "Future[T]",
    ) -> None:
        task = asyncio.current_task()
        assert task is not None, "a task runs this"
        self._callers[task] = caller
        try:
            if self._is_over():
                done.set_exception(Abandoned())
            else:
                done.set_result(await function(*arguments))
        except asyncio.CancelledError as error:
            done.set_exception(Abandoned() if self._is_over() else error)
        except BaseException as error:
            done.set_exception(error)
            if not isinstance(error, Exception):
                raise
        finally:
            del self._callers[task]

    def _is_over(self) -> bool:
        return self._presence.done() or self._presence.cancelling() > 0

    def caller(self) -> threading.Thread | None:
        """The thread for which the running task does something; None where that is none."""
        task = asyncio.current_task()
        return None if task is None else self._callers.get(task)

    def cancel_soon(self) -> None:
        """Cancel what is under way, and call nothing more; from any thread."""
        self._soon(self.cancel)

    def cancel(self) -> None:
        """As `cancel_soon`, in the loop."""
        self._presence.cancel()
        for task in list(self._callers):
            task.cancel()

    async def end(self) -> None:
        """Leave nothing in the loop."""
        self.cancel()
        await asyncio.wait([self._presence])
