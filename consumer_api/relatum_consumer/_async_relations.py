"""Lookups for asyncio: calls a `Relations` in threads."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterable
from contextlib import closing
from functools import partial, wraps
from typing import Any, Concatenate, Final, ParamSpec, Self, TypeVar, Unpack, overload

from relatum.common.closing import AsyncClosing
from relatum.common.ids import MessageId
from relatum.common.waiting import Deadline, NoThreadInTime, Parts, Threads, in_thread, left_s, within
from relatum.errors import AccessRefused, ConnectionsInUse, NotFound, UsedAfterClose
from relatum.reading import CONNECTIONS_MAX, Broker, Message
from relatum.store.database import AnyDatabase
from relatum_consumer._relations import Relations
from relatum_consumer.groups import AsyncSharedGroups, Group, GroupArguments, GroupConsumer, SharingArguments
from relatum_consumer.lookups.answer import Answer
from relatum_consumer.lookups.arguments import Consumed, Names, Order, names_of
from relatum_consumer.lookups.by_key import question_of
from relatum_consumer.lookups.servers import CLOSED, Health
from relatum_consumer.lookups.telemetry import LookupStatistics
from relatum_consumer.lookups.waiting import Pause, Waiting

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
_Arguments = ParamSpec("_Arguments")

PART_S: Final = 0.005
"""Seconds for which a thread gathers one part of an iteration; switching to a thread and back takes about 0.05 ms."""

PART_ITEMS: Final = 100
"""Maximum number of items in one part of an iteration."""

CONTROL_THREADS: Final = 4
"""Threads for calls that must not wait for lookups: `close` and `health`."""


def _called(
    method: Callable[Concatenate[Relations, _Arguments], _Result], *, is_limited: bool = True
) -> Callable[Concatenate["AsyncRelations", _Arguments], Coroutine[Any, Any, _Result]]:
    """Wrap a method of `Relations` to run in a thread, within `timeout_s` if it `is_limited`. Same docstring."""

    @wraps(method)
    async def wrapper(self: "AsyncRelations", /, *args: _Arguments.args, **options: _Arguments.kwargs) -> _Result:
        call = partial(method, self._relations, *args, **options)
        with within(self._timeout_s if is_limited else None):
            return await self._in_thread(call)

    wrapper.__qualname__ = f"AsyncRelations.{method.__name__}"
    return wrapper


class AsyncRelations(AsyncClosing):
    """Finds and reads the messages that belong together, with asyncio.

    An asynchronous context manager. Tasks may share it, even across successive event loops. It calls a `Relations` in
    at most `broker_connections_max` threads, plus half as many for `wait_related`. A task that waits for a message or
    for the next part of an iteration holds no thread. A cancelled call releases its connections and its thread within
    0.1 s.

    Methods, arguments and errors are those of `Relations`. A call also waits up to `timeout_s` for a free thread, and
    raises `ConnectionsInUse` if there is none.
    """

    def __init__(
        self,
        broker: str | Broker,
        database: AnyDatabase,
        *,
        timeout_s: float = 10.0,
        database_connections_max: int | None = None,
        broker_connections_max: int = CONNECTIONS_MAX,
    ) -> None:
        self._relations = Relations(
            broker,
            database,
            timeout_s=timeout_s,
            database_connections_max=database_connections_max,
            broker_connections_max=broker_connections_max,
        )
        self._timeout_s = timeout_s
        self._threads = Threads(broker_connections_max, "relatum-lookups")
        # Separate threads: waiting calls may share a slow proof, which must not delay lookups.
        self._wait_threads = Threads(max(1, broker_connections_max // 2), "relatum-lookups-waits")
        self._control_threads = Threads(CONTROL_THREADS, "relatum-lookups-aside")
        self._ending = Deadline(None)
        self._is_closed = False

    @classmethod
    async def open(cls, broker: str | Broker, database: AnyDatabase, **options: Any) -> Self:
        """Return an open `AsyncRelations` after both servers have answered; see `Relations.open`."""
        relations = cls(broker, database, **options)
        try:
            await relations._check_servers()
        except BaseException:
            await relations.close()
            raise
        return relations

    async def close(self) -> None:
        """Close all connections and release shared groups. Running lookups fail."""
        self._is_closed = True
        await self._end(self._close)

    def _close(self) -> None:
        self._relations._close_shared_groups()
        self._ending.end_in(0)
        self._relations.close()
        self._threads.shutdown()
        self._wait_threads.shutdown()

    def statistics(self) -> LookupStatistics:
        """Return the broker connections in use, idle and waited for, and counts of lookups, without any I/O."""
        return self._relations.statistics()

    async def health(self, *, timeout_s: float = 2.0) -> Health:
        """Return whether both servers answer now; see `Relations.health`. The check does not wait for lookups."""
        return await in_thread(self._control_threads, partial(self._relations.health, timeout_s=timeout_s))

    related = _called(Relations.related)
    find = _called(Relations.find)
    trace = _called(Relations.trace)
    after = _called(Relations.after)
    before = _called(Relations.before)
    nearest = _called(Relations.nearest)
    window = _called(Relations.window)
    around = _called(Relations.around)
    read = _called(Relations.read)
    keys = _called(Relations.keys)
    streams = _called(Relations.streams)
    values = _called(Relations.values)
    group = _called(Relations.group)
    grouped = _called(Relations.grouped)
    group_position = _called(Relations.group_position)
    group_consumers = _called(Relations.group_consumers)
    group_consumer_status = _called(Relations.group_consumer_status)
    incomplete_groups = _called(Relations.incomplete_groups, is_limited=False)
    expectations = _called(Relations.expectations)
    missing = _called(Relations.missing)
    _newest_groups = _called(Relations._newest_groups)
    _check_servers = _called(Relations._check_servers)

    async def wait_related(
        self,
        message: Message | Consumed,
        to: Names = None,
        *,
        by: Names = None,
        timeout_s: float,
        limit: int | None = None,
        order: Order = "oldest",
    ) -> Answer:
        """Wait until there is a related message, and return the same as `related`; see `Relations.wait_related`.

        A waiting task holds no thread, so any number of tasks may wait.
        """
        relations = self._relations
        make_question = partial(question_of, relations._catalog, message, to, by, limit, order)
        waiting = Waiting(relations._catalog, make_question, timeout_s)
        with relations._lookups.counted("wait_related", self._timeout_s + timeout_s) as note:
            while (answer := await self._in_thread(waiting.probe, threads=self._wait_threads)) is None:
                await asyncio.sleep(left_s(waiting.pause_s))
                future = relations._waits.ask(waiting.watch)
                waiting.has_row = bool(await relations._waits.wait_in_task(future, waiting.watch.until))
            note(answer)
            return answer

    def read_many(
        self, ids: Iterable[MessageId | tuple[str, int]]
    ) -> AsyncGenerator[Message | NotFound | AccessRefused, None]:
        """Yield the messages with the given ids, in the order of the ids; see `Relations.read_many`.

        A thread iterates over `ids`, ahead of the messages. Use `contextlib.aclosing` if you leave the iterator early.
        """
        return self._in_parts(lambda: self._relations.read_many(ids))

    @overload
    def groups(
        self, streams: Names = None, *, consumer: None = None, **options: Unpack[GroupArguments]
    ) -> AsyncGenerator[Group, None]: ...
    @overload
    def groups(
        self, streams: Names = None, *, consumer: str | GroupConsumer, **options: Unpack[SharingArguments]
    ) -> AsyncSharedGroups: ...
    def groups(
        self,
        streams: Names = None,
        *,
        consumer: str | GroupConsumer | None = None,
        **options: Any,
    ) -> AsyncGenerator[Group, None] | AsyncSharedGroups:
        """Yield complete groups, one after the other; see `Relations.groups`.

        Some groups are read ahead. Use `contextlib.aclosing` if you leave the iterator early. With a consumer, the
        iterator is an asynchronous context manager, and reads ahead no more than the consumer's `prefetch`.
        """
        if consumer is not None:
            shared = self._relations.groups(streams, consumer=consumer, **options)
            return AsyncSharedGroups(self._in_thread, self._end, shared)
        groups = self._relations._groups(names_of("streams", streams), **options)
        return self._in_parts(lambda: groups)

    async def _in_thread(
        self,
        function: Callable[..., _Result],
        *args: Any,
        returned: Callable[[_Result], object] | None = None,
        threads: Threads | None = None,
    ) -> _Result:
        """Call a function in a thread. `close` ends running calls."""
        if self._is_closed:
            raise UsedAfterClose(CLOSED)
        try:
            return await in_thread(threads or self._threads, function, *args, ending=self._ending, returned=returned)
        except NoThreadInTime as error:
            limit = self._threads.most
            raise ConnectionsInUse(
                f"{error}: make fewer concurrent calls, or raise broker_connections_max= (now {limit})",
                limit=limit,
                waiting=self._threads.waiting,
            ) from None

    async def _in_parts(self, begin: Callable[[], Generator[_Item | Pause, None, None]]) -> AsyncGenerator[_Item, None]:
        """Yield the items of an iteration, fetched in parts; no thread is held between two parts."""
        parts = Parts(_in_lists(begin))
        try:
            while (part := await self._in_thread(parts.take)) is not None:
                for item in part:
                    if isinstance(item, Pause):
                        await asyncio.sleep(item.seconds)
                    else:
                        yield item
        finally:
            await self._end(parts.close)

    async def _end(self, close: Callable[[], object]) -> None:
        """Call `close` in a thread, and wait for it; cancelling this task does not stop the call."""
        await asyncio.shield(asyncio.wrap_future(self._control_threads.submit(close)))


def _in_lists(begin: Callable[[], Generator[_Item | Pause, None, None]]) -> Generator[list[_Item | Pause], None, None]:
    """Yield the items of an iteration in lists. A list ends at a pause, after `PART_ITEMS`, or after `PART_S`."""
    with closing(begin()) as items:
        while True:
            part: list[_Item | Pause] = []
            until = time.monotonic() + PART_S
            try:
                for item in items:
                    part.append(item)
                    if isinstance(item, Pause) or len(part) == PART_ITEMS or time.monotonic() >= until:
                        break
            except Exception:
                # Deliver the items that were read before the error.
                if part:
                    yield part
                raise
            if not part:
                return
            yield part
