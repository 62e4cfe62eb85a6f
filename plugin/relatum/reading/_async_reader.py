"""`AsyncStreamReader`: reads streams in asyncio tasks."""

import asyncio
import sys
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterable
from functools import partial, wraps
from typing import Any, Concatenate, Final, ParamSpec, Self, TypeVar, Unpack

from relatum.common.closing import AsyncClosing
from relatum.common.processes import refuse_in_child
from relatum.common.waiting import NoThreadInTime, Parts, Threads, in_thread
from relatum.errors import ReadTimeout, UsedAfterClose
from relatum.reading._address import AnyBroker
from relatum.reading._bounds import check_time
from relatum.reading._message import Message
from relatum.reading._plan import WINDOW_MESSAGES, Result
from relatum.reading._pool import ReaderStatistics, Turns, Use
from relatum.reading._reader import ReaderOptions, StreamReader
from relatum.reading._scan import CREDIT, RecordBatch, Start

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
_Taken = TypeVar("_Taken")
_Arguments = ParamSpec("_Arguments")

ITEMS_PER_SWITCH: Final = 50
"""Items after which an iteration lets other tasks run. Decoding this many messages takes about 3 ms."""


def _in_thread_method(
    method: Callable[Concatenate[StreamReader, _Arguments], _Result],
) -> Callable[Concatenate["AsyncStreamReader", _Arguments], Coroutine[Any, Any, _Result]]:
    """Return a method that waits for a turn, then calls a method of `StreamReader` in a thread. Same docstring."""

    @wraps(method)
    async def called(self: "AsyncStreamReader", /, *args: _Arguments.args, **options: _Arguments.kwargs) -> _Result:
        await self._enter(Use.ANSWER)
        try:
            return await self._in_thread(self._threads, partial(method, self._reader, *args, **options))
        finally:
            self._turns.leave(Use.ANSWER)

    called.__qualname__ = f"AsyncStreamReader.{method.__name__}"
    return called


class AsyncStreamReader(AsyncClosing):
    """Reads streams with asyncio. An asynchronous context manager that tasks may share.

    It calls a `StreamReader` in threads of its own: at most `broker_connections_max`, and one for each followed stream.
    The function passed to `scan` runs there, too. An iteration needs a thread only while it fetches messages. A
    cancelled call leaves the reader usable. Use `contextlib.aclosing(...)` around iterations that you leave early.

    Methods, arguments and errors are those of `StreamReader`.
    """

    def __init__(self, broker: AnyBroker, **options: Unpack[ReaderOptions]) -> None:
        self._reader = reader = StreamReader(broker, **options)
        limit = reader.statistics().limit
        self._turns = reader.outer_turns = Turns(limit)
        self._threads = Threads(limit, "relatum-reader")
        # These threads follow streams, and close iterations and the reader without waiting for running requests.
        self._unlimited_threads = Threads(sys.maxsize, "relatum-reader-extra")
        self._is_closed = False
        refuse_in_child(self, "a reader for asyncio")

    @classmethod
    async def open(cls, broker: AnyBroker, **options: Unpack[ReaderOptions]) -> Self:
        """Return a connected reader; see `StreamReader.open`."""
        reader = cls(broker, **options)
        try:
            await reader.missing([])
        except BaseException:
            await reader.close()
            raise
        return reader

    def read_many(
        self, ids: Iterable[tuple[str, int]], *, window: int = WINDOW_MESSAGES
    ) -> AsyncGenerator[Result, None]:
        """Yield the messages of many ids, in the order of the ids; see `StreamReader.read_many`.

        A thread iterates over `ids`, ahead of the messages that are yielded.
        """
        return self._in_parts(self._reader._many(ids, window), Use.ANSWER)

    def iterate(
        self,
        stream: str,
        start: Start = "first",
        *,
        stop: int | None = None,
        follow: bool = False,
        idle_timeout_s: float | None = None,
    ) -> AsyncGenerator[Message, None]:
        """Yield the messages of a stream from a start on, ascending; see `StreamReader.iterate`."""
        parts = self._reader._messages_in_parts(stream, start, stop=stop, follow=follow, idle_timeout_s=idle_timeout_s)
        return self._in_parts(parts, Use.FOLLOW if follow else Use.LENT)

    read = _in_thread_method(StreamReader.read)
    read_all = _in_thread_method(StreamReader.read_all)
    scan = _in_thread_method(StreamReader.scan)
    bounds = _in_thread_method(StreamReader.bounds)
    all_bounds = _in_thread_method(StreamReader.all_bounds)
    missing = _in_thread_method(StreamReader.missing)
    identity = _in_thread_method(StreamReader.identity)
    partitions = _in_thread_method(StreamReader.partitions)
    bound = _in_thread_method(StreamReader.bound)
    routes = _in_thread_method(StreamReader.routes)

    @property
    def cluster_name(self) -> str | None:
        """The name of the broker's cluster; None before the first request, and if the broker does not name it."""
        return self._reader.cluster_name

    def batches(
        self,
        stream: str,
        start: Start = "first",
        *,
        stop: int | None = None,
        follow: bool = True,
        credit: int = CREDIT,
        idle_s: float = 1.0,
    ) -> AsyncGenerator[RecordBatch | None, None]:
        """Yield a stream's records in batches, not decoded; see `StreamReader.batches`."""
        parts = self._reader._batches_in_parts(stream, start, stop=stop, follow=follow, credit=credit, idle_s=idle_s)
        return self._in_parts(parts, Use.FOLLOW if follow else Use.LENT)

    def statistics(self) -> ReaderStatistics:
        """Return the numbers of connections to the broker and of calls that wait for one."""
        return self._reader.statistics()

    async def close(self) -> None:
        """Close all connections. Other tasks' running calls may raise `ConnectionLost`. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self._threads.shutdown()
            await self._close_in_thread(self._reader.close)

    async def _enter(self, use: Use) -> None:
        """Wait for a turn; a thread for it is free now or soon.

        An iteration needs a thread to continue and to return its connection. So iterations get at most three quarters
        of the turns, and of the connections.
        """
        check_time()
        turn = self._turns.enter(use)
        if turn.done():
            return
        limit_s = self._reader._nodes.limit_s
        try:
            async with asyncio.timeout(limit_s):
                await asyncio.wrap_future(turn)
        except TimeoutError:
            error = self._turns.no_turn_error(limit_s)
            self._turns.withdraw(use, turn)
            raise error from None
        except BaseException:
            self._turns.withdraw(use, turn)
            raise

    async def _in_thread(self, threads: Threads, function: Callable[[], _Result]) -> _Result:
        if self._is_closed:
            raise UsedAfterClose("the reader was closed: open another one")
        try:
            return await in_thread(threads, function)
        except NoThreadInTime as error:
            raise ReadTimeout(f"The call has timed out: {error}. Try again.") from None

    async def _close_in_thread(self, close: Callable[[], None]) -> None:
        """Call `close` in a thread, even if this task is cancelled, so that its connection is returned."""
        await asyncio.shield(asyncio.wrap_future(self._unlimited_threads.submit(close)))

    async def _in_parts(self, given: Generator[list[_Item], None, None], use: Use) -> AsyncGenerator[_Item, None]:
        """Yield the items of an iteration. A thread fetches them in parts; between two parts, it is free.

        With `Use.ANSWER`, the iteration has no connection between two parts, so it returns its turn, too.
        """
        parts, has_turn, count = Parts(given), False, 0
        threads = self._unlimited_threads if use is Use.FOLLOW else self._threads
        try:
            while True:
                if not has_turn:
                    await self._enter(use)
                    has_turn = True
                part = await self._in_thread(threads, parts.take)
                if part is None:
                    return
                if use is Use.ANSWER:
                    self._turns.leave(use)
                    has_turn = False
                for item in part:
                    yield item
                    count += 1
                    if not count % ITEMS_PER_SWITCH:
                        await asyncio.sleep(0)
        finally:
            try:
                await self._close_in_thread(parts.close)
            finally:
                if has_turn:
                    self._turns.leave(use)
