"""The message collector for asyncio: executors and handlers run in the application's event loop."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import CancelledError, Future, wait
from contextlib import suppress
from typing import Any, Final, Self, TypeVar, cast

from relatum.collecting._bulk import AnyExecutor, Bulk, Executor
from relatum.collecting._collector import CLOSE_S, JOIN_S, Collector
from relatum.collecting._collector_core import Abandoned
from relatum.collecting._collector_loop import END_S
from relatum.collecting._handlers import current_call
from relatum.common.checks import checked_event, checked_name, checked_seconds, is_coroutine_function
from relatum.common.closing import AsyncClosing
from relatum.common.waiting import AfterStop, backoff, in_thread, within
from relatum.errors import Transient
from relatum.outcomes import Outcome
from relatum.reading import Message

LOOP_CHECK_S: Final = 1.0
"""Seconds between two checks whether the application closed its loop without cancelling the tasks."""

T = TypeVar("T")


class ApplicationLoop:
    """Runs coroutine functions in the running loop, for threads that wait. Calls `ended` when the loop cancels it."""

    def __init__(self, ended: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._ended = ended
        self._tasks: set[asyncio.Task[Any]] = set()
        # `asyncio.run` cancels all tasks when it ends. This task detects that: a cancelled executor sets no result.
        self._end_detector = asyncio.create_task(self._detect_end(), name="relatum-collector")

    async def _detect_end(self) -> None:
        try:
            await asyncio.get_running_loop().create_future()
        finally:
            self._ended()

    def call(self, function: Callable[..., Awaitable[T]], *arguments: Any) -> T:
        """Run a coroutine function in the loop, and wait in this thread. Raises `Abandoned` if the loop ends first."""
        called, done = self._called(function, arguments), Future[T]()
        # Raised by a closed loop.
        with suppress(RuntimeError):
            done = asyncio.run_coroutine_threadsafe(called, self._loop)
        while not wait([done], LOOP_CHECK_S).done:
            if self._loop.is_closed():
                with suppress(RuntimeError):
                    called.close()
                self._ended()
                raise Abandoned
        try:
            return done.result()
        except CancelledError:
            raise (Abandoned if self._is_over() else asyncio.CancelledError)() from None

    async def _called(self, function: Callable[..., Awaitable[T]], arguments: Sequence[Any]) -> T:
        task = asyncio.current_task()
        assert task is not None, "a task runs this"
        if self._is_over():
            raise Abandoned
        self._tasks.add(task)
        try:
            return await function(*arguments)
        finally:
            self._tasks.discard(task)

    def _is_over(self) -> bool:
        return self._end_detector.done() or self._end_detector.cancelling() > 0

    def cancel_soon(self) -> None:
        """Cancel all calls, and refuse new ones. Thread-safe."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        self._end_detector.cancel()
        for task in list(self._tasks):
            task.cancel()

    async def end(self) -> None:
        """Cancel all calls, and wait until they have ended, for at most `END_S`."""
        self._cancel()
        await asyncio.wait([self._end_detector, *self._tasks], timeout=END_S)


class AsyncMessageCollector(Collector, AsyncClosing):
    """`MessageCollector` for asyncio, with the same names, options and guarantees.

    Executors that are coroutine functions are awaited in the running loop; others are called in threads. With
    `joins_transaction`, `bulk.connection` is a blocking connection: a coroutine function uses it in threads (`await
    asyncio.to_thread(bulk.connection.execute, statement)`). Handlers are called in the loop; coroutine functions are
    awaited.

    An async context manager: entering starts the collector, leaving closes it. Cancelling `close` cancels executors and
    handlers; another member, or the next start, takes over their messages.

    Args: as for `MessageCollector`.
    """

    _awaits = True
    _application: ApplicationLoop | None = None

    def _called_in_thread(self, executor: AnyExecutor) -> Executor:
        if not is_coroutine_function(executor):
            return super()._called_in_thread(executor)

        def call(bulk: Bulk) -> object:
            assert self._application is not None, "only a running collector has bulks"
            return self._application.call(cast("Callable[..., asyncio.Future[object]]", executor), bulk)

        return cast("Executor", call)

    def _notify_handlers(self, outcomes: Sequence[Outcome]) -> None:
        if outcomes and self._application is not None:
            # A cancelled handler has not failed. An exit ends the application's loop, and with it the collector.
            with suppress(Abandoned, asyncio.CancelledError, SystemExit, KeyboardInterrupt):
                self._application.call(self._shared.handlers.notify_async, outcomes)

    # --- messages in --------------------------------------------------------------------------------------------------

    async def collect(self, message: Message, *, timeout_s: float | None = None) -> bool:
        """Collect a message; see `MessageCollector.collect`. A call that is cancelled during its wait takes nothing."""
        return (await self.collect_many([message], timeout_s=timeout_s))[0]

    async def collect_many(self, messages: Iterable[Message], *, timeout_s: float | None = None) -> list[bool]:
        """Collect messages; see `MessageCollector.collect_many`. A cancelled call may have taken some of them."""
        described = self._described(messages, timeout_s)
        wait_s = 0.0 if self._is_storer else timeout_s
        taken: list[bool] | None = await self._awaited(self._shared.collect, described, wait_s)
        return taken or [False] * len(described)

    async def flush(self, type: str | None = None) -> None:  # noqa: A002 - RabbitMQ's word for it
        """Close the bulks that are being filled, of one type or of all; see `MessageCollector.flush`."""
        self._check_flushed(type)
        await self._awaited(self._shared.flush, type, not self._is_storer)

    async def _awaited(self, function: Callable[..., Any], *args: Any) -> Any:
        """Like `_result_of`, but for a task; cancelling the task cancels the call."""
        result = self._shared.loop.run(function, *args)
        if result is None:
            return None
        try:
            return await asyncio.wrap_future(result)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # The collector's loop has ended.
            return None

    async def outcome(self, message_id: str) -> Outcome:
        """Return a message's outcome in this collector, whichever member stored it."""
        checked_name("message_id", message_id)
        return (await in_thread(None, self._shared.store.outcomes_of, [message_id]))[message_id]

    # --- start and end ------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Join as a member, and start to collect; see `MessageCollector.start`. A cancelled call starts nothing."""
        names = await in_thread(None, self._join_members, returned=lambda _names: self._shared.leave())
        self._application = ApplicationLoop(self._loop_ended)
        self._shared.notify_handlers = self._notify_handlers
        self._shared.on_abandon = self._application.cancel_soon
        self._begin(names)

    def _loop_ended(self) -> None:
        """Leave all messages to other members: the application's loop ends, and the collector is not closed yet."""
        self._shared.loop.call(self._shared.abandon)
        self._shared.loop.run(self._shared.close, 0.0)

    async def close(self, timeout_s: float = CLOSE_S) -> bool:
        """Close the collector; see `MessageCollector.close`. A cancelled call stops waiting for executors.

        Executors that do not finish in time are cancelled, and have five seconds to end.
        """
        checked_seconds("timeout_s", timeout_s)
        if self._application is None:
            return True
        if current_call(self._shared) is not None:
            self._shared.loop.run(self._shared.close, timeout_s)
            return False
        shared = self._shared
        closing = asyncio.create_task(self._close_in_task(timeout_s))
        try:
            await asyncio.shield(closing)
        except asyncio.CancelledError:
            shared.loop.call(shared.abandon)
            await asyncio.shield(closing)
            raise
        finally:
            await self._application.end()
        return shared.in_time

    async def _close_in_task(self, timeout_s: float) -> None:
        await self._awaited(self._shared.close, timeout_s)
        await in_thread(None, self._shared.joined, JOIN_S)

    async def run(self, stop: asyncio.Event) -> None:
        """Start, retrying while a server is unreachable; wait until `stop` is set or the task is cancelled; then close.

        Raises:
            RelatumError: An error that no retry can cure; see `start`.
        """
        checked_event("stop", stop)
        label = self._shared.label("starting")
        for pause in backoff():
            try:
                with within(AfterStop(stop)):
                    await self.start()
                break
            except Transient as error:
                self._shared.outages.failed(label, error)
            with suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), pause)
                return
        self._shared.outages.over(label)
        try:
            await stop.wait()
        finally:
            await self.close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self
