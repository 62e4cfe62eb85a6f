"""The asyncio reader: `StreamReader`, called in threads of its own."""

import asyncio
import sys
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterable
from functools import partial, wraps
from typing import Any, Concatenate, Final, ParamSpec, Self, TypeVar

from relatum.closing import AsyncClosing
from relatum.errors import ReadTimeout, UsedAfterClose
from relatum.processes import of_one_process
from relatum.reading._address import AnyBroker
from relatum.reading._bounds import check_time
from relatum.reading._connecting import HEARTBEAT_S
from relatum.reading._message import Message
from relatum.reading._plan import WINDOW_MESSAGES, Result
from relatum.reading._pool import CONNECTIONS_MAX, ReaderStatistics, Turns, Use
from relatum.reading._reader import StreamReader
from relatum.reading._scan import CREDIT, RecordBatch, Start
from relatum.waiting import NoThreadInTime, Parts, Threads, in_thread, left_s

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
_Taken = TypeVar("_Taken")
_Arguments = ParamSpec("_Arguments")

SLICE: Final = 50
"""Items after which other tasks run: messages are decoded where they are used, and so many take about 3 ms."""

ASIDE_THREADS: Final = 4
"""Threads that close the reader and what iterations hold: closing waits for no question."""


def _called(
    method: Callable[Concatenate[StreamReader, _Arguments], _Result],
) -> Callable[Concatenate["AsyncStreamReader", _Arguments], Coroutine[Any, Any, _Result]]:
    """A method of `StreamReader`, called in a thread in its turn: with its arguments and its documentation."""

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
    """Reads streams with asyncio. An asynchronous context manager; tasks may share one.

    It holds a `StreamReader` and calls it in threads of its own, `broker_connections_max` at most, and one for each
    stream that is followed; what `scan` is given is called there, too. Between two parts of an iteration it uses no
    thread. A cancelled call leaves the reader usable. Use `async with contextlib.aclosing(...)` around iterations that
    end early.

    Every method may raise `StreamNotFound`, `NotAStream`, `AccessRefused`, and, safe to repeat, `StreamUnavailable`,
    `ConnectionLost`, `BrokerUnavailable`, `ReadTimeout` (no answer within `timeout_s`) and `ConnectionsInUse` (all
    `broker_connections_max` were in use all that time).
    """

    def __init__(self, reader: StreamReader, timeout_s: float, broker_connections_max: int = CONNECTIONS_MAX) -> None:
        self._reader = reader
        self._timeout_s = timeout_s
        self._turns = reader.turns_before = Turns(broker_connections_max)
        self._threads = Threads(broker_connections_max, "relatum-reader")
        self._following = Threads(sys.maxsize, "relatum-reader-following")
        self._aside = Threads(ASIDE_THREADS, "relatum-reader-aside")
        self._is_closed = False
        of_one_process(self, "a reader for asyncio")

    @classmethod
    async def open(
        cls,
        broker: AnyBroker,
        *,
        timeout_s: float = 10.0,
        heartbeat_s: int = HEARTBEAT_S,
        broker_connections_max: int = CONNECTIONS_MAX,
    ) -> Self:
        """A reader that is connected; arguments and errors as of `StreamReader.open`."""
        opening = partial(
            StreamReader.open,
            broker,
            timeout_s=timeout_s,
            heartbeat_s=heartbeat_s,
            broker_connections_max=broker_connections_max,
        )
        threads = Threads(1, "relatum-reader-opening")
        try:
            reader = await in_thread(threads, opening, returned=StreamReader.close)
        finally:
            threads.shutdown()
        return cls(reader, timeout_s, broker_connections_max)

    def read_many(
        self, ids: Iterable[tuple[str, int]], *, window: int = WINDOW_MESSAGES
    ) -> AsyncGenerator[Result, None]:
        """The messages of many ids, in the order of the ids; as `StreamReader.read_many`.

        `ids` is iterated in a thread, some way ahead of what was given.
        """
        many = self._reader._many(ids, window)
        return self._in_parts(many.run(), Use.LENT, lambda: many.holds_connections)

    def iterate(
        self,
        stream: str,
        start: Start = "first",
        *,
        stop: int | None = None,
        follow: bool = False,
        idle_timeout_s: float | None = None,
    ) -> AsyncGenerator[Message, None]:
        """The messages of a stream from a point on, ascending; arguments and errors as of `StreamReader.iterate`."""
        parts = self._reader._messages_in_parts(stream, start, stop=stop, follow=follow, idle_timeout_s=idle_timeout_s)
        return self._in_parts(parts, Use.FOLLOW if follow else Use.LENT)

    read = _called(StreamReader.read)
    read_all = _called(StreamReader.read_all)
    scan = _called(StreamReader.scan)
    bounds = _called(StreamReader.bounds)
    all_bounds = _called(StreamReader.all_bounds)
    missing = _called(StreamReader.missing)
    identity = _called(StreamReader.identity)
    partitions = _called(StreamReader.partitions)
    bound = _called(StreamReader.bound)
    routes = _called(StreamReader.routes)

    @property
    def cluster_name(self) -> str | None:
        """The name of the broker's cluster, as it said when the reader was opened; None where it does not say."""
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
        """The stream's records in batches, undecoded; arguments and errors as of `StreamReader.batches`."""
        parts = self._reader._batches_in_parts(stream, start, stop=stop, follow=follow, credit=credit, idle_s=idle_s)
        return self._in_parts(parts, Use.FOLLOW if follow else Use.LENT)

    def statistics(self) -> ReaderStatistics:
        """How many connections to the broker are in use, idle and waited for, and how many there may be."""
        return self._reader.statistics()

    async def close(self) -> None:
        """Close all connections. Calls under way in other tasks may end as `ConnectionLost`."""
        if not self._is_closed:
            self._is_closed = True
            self._threads.shutdown()
            self._following.shutdown()
            # To its end, whatever becomes of this task.
            await asyncio.shield(asyncio.wrap_future(self._aside.submit(self._reader.close)))

    # --- threads ------------------------------------------------------------------------------------------

    async def _enter(self, use: Use) -> None:
        """Wait for a turn, and with it for a thread that is free or about to be.

        An iteration needs a thread to go on and give its connection back. So at most three turns of four are lent to
        iterations, as their connections are.
        """
        check_time()
        turn = self._turns.enter(use)
        if turn is None:
            return
        limit_s = left_s(self._timeout_s)
        try:
            async with asyncio.timeout(limit_s):
                await asyncio.wrap_future(turn)
        except TimeoutError:
            error = self._turns.none_free(limit_s)
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
            raise ReadTimeout(f"The time of the call is over: {error}.") from None

    async def _in_parts(
        self, given: Generator[list[_Item], None, None], use: Use, holds: Callable[[], bool] = lambda: True
    ) -> AsyncGenerator[_Item, None]:
        """What an iteration gives, taken in parts, each by one call; between two no thread is used.

        `holds`: Whether it holds a connection between two parts; if not, others have its turn.
        """
        parts, has_turn, count = Parts(given), False, 0
        threads = self._following if use is Use.FOLLOW else self._threads
        try:
            while True:
                if not has_turn:
                    await self._enter(use)
                    has_turn = True
                part = await self._in_thread(threads, parts.take)
                if part is None:
                    return
                if not holds():
                    self._turns.leave(use)
                    has_turn = False
                for item in part:
                    yield item
                    count += 1
                    if not count % SLICE:
                        await asyncio.sleep(0)
        finally:
            try:
                # To its end, whatever becomes of this task: it gives a connection back.
                await asyncio.shield(asyncio.wrap_future(self._aside.submit(parts.close)))
            finally:
                if has_turn:
                    self._turns.leave(use)
