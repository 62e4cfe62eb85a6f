"""The asyncio face of lookups: `Relations`, called in threads of its own."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterable
from contextlib import closing
from datetime import datetime
from functools import partial, wraps
from typing import Any, Concatenate, Final, ParamSpec, Self, TypeVar, Unpack, overload

from relatum.closing import AsyncClosing
from relatum.errors import AccessRefused, ConnectionsInUse, NotFound, UsedAfterClose
from relatum.ids import MessageId
from relatum.processes import after_fork
from relatum.reading import CONNECTIONS_MAX, Broker, Message
from relatum.store.database import AnyDatabase
from relatum.waiting import Deadline, NoThreadInTime, Parts, Threads, in_thread, left_s, within
from relatum_consumer._relations import Relations
from relatum_consumer.expectations import POLL_S, Expectation, UnmetExpectation
from relatum_consumer.groups import (
    AsyncSharedGroups,
    Group,
    GroupArguments,
    GroupConsumer,
    SharingArguments,
)
from relatum_consumer.lookups.answer import Answer
from relatum_consumer.lookups.arguments import Names, Order, names_of
from relatum_consumer.lookups.consumed import Consumed
from relatum_consumer.lookups.servers import CLOSED, Health
from relatum_consumer.lookups.telemetry import LookupStatistics, look_up
from relatum_consumer.lookups.waiting import Rest, wait_related

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")
_Arguments = ParamSpec("_Arguments")

PART_S: Final = 0.005
"""Seconds after which a part of an iteration is given: a change to a thread and back takes a hundredth of it."""

PART_ITEMS: Final = 100
"""What a part of an iteration has at most."""

TURN_S: Final = 0.01
"""Seconds between two looks whether an iteration may begin, where as many have begun as may."""

ASIDE_THREADS: Final = 4
"""Threads for what must not wait for lookups: closing, and asking whether the servers are well."""


def _called(
    method: Callable[Concatenate[Relations, _Arguments], _Result],
    *,
    is_limited: bool = True,
    reads_many: bool = False,
) -> Callable[Concatenate["AsyncRelations", _Arguments], Coroutine[Any, Any, _Result]]:
    """A method of `Relations`, called in a thread: with its arguments and its documentation.

    Args:
        method: The method.
        is_limited: It ends within `timeout_s`, the wait for a thread included.
        reads_many: It holds a connection to the broker while it asks for others.
    """

    @wraps(method)
    async def called(self: "AsyncRelations", /, *args: _Arguments.args, **options: _Arguments.kwargs) -> _Result:
        call = partial(method, self._relations, *args, **options)
        with within(self._timeout_s if is_limited else None):
            return await (self._lent_once if reads_many else self._in_thread)(call)

    called.__qualname__ = f"AsyncRelations.{method.__name__}"
    return called


class AsyncRelations(AsyncClosing):
    """Finds the messages that belong together, and reads them, with asyncio.

    An asynchronous context manager; tasks may share one, also those of one event loop after another. It holds a
    `Relations` and calls it in threads of its own, `broker_connections_max` at most. A task that waits for a message
    (`wait_related`) or for the next part of an iteration holds none. A call that is cancelled lets go of its server and
    its thread within 0.1 s.

    Arguments and errors are those of `Relations`, and so are the methods. What is asked waits for a thread within
    `timeout_s`, too, and ends as `ConnectionsInUse` where none became free.
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
        # What waits may have to share a proof that takes long: lookups do not wait for that.
        self._for_waits = Threads(max(1, broker_connections_max // 2), "relatum-lookups-waits")
        self._aside = Threads(ASIDE_THREADS, "relatum-lookups-aside")
        self._lent_max = max(1, broker_connections_max * 3 // 4)
        self._lent = 0
        self._ending = Deadline(None)
        self._is_closed = False
        after_fork(self, AsyncRelations._renew)

    def _renew(self) -> None:
        """In a child: iterations under way are the parent's."""
        self._lent = 0

    @classmethod
    async def open(cls, broker: str | Broker, database: AnyDatabase, **options: Any) -> Self:
        """The same as the constructor, once both servers have answered; as `Relations.open`."""
        relations = cls(broker, database, **options)
        try:
            await relations._reach()
        except BaseException:
            await relations.close()
            raise
        return relations

    async def close(self) -> None:
        """Close all connections; shared groups are given back. Lookups under way are ended, and fail."""
        self._is_closed = True
        await in_thread(self._aside, self._relations._end_sharing)
        self._ending.end_in(0)
        await in_thread(self._aside, self._relations.close)
        self._threads.shutdown()
        self._for_waits.shutdown()

    def statistics(self) -> LookupStatistics:
        """The connections to the broker that are in use, idle and waited for, and what was asked. It asks nobody."""
        return self._relations.statistics()

    async def health(self, *, timeout_s: float = 2.0) -> Health:
        """Whether both servers answer now; as `Relations.health`. It waits for no lookup's thread."""
        return await in_thread(self._aside, partial(self._relations.health, timeout_s=timeout_s))

    # --- what is asked as of `Relations` ---------------------------------------------------------------------

    related = _called(Relations.related)
    find = _called(Relations.find)
    times = _called(Relations.times)
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
    group = _called(Relations.group, reads_many=True)
    grouped = _called(Relations.grouped, reads_many=True)
    group_position = _called(Relations.group_position)
    group_consumers = _called(Relations.group_consumers)
    group_consumer_status = _called(Relations.group_consumer_status)
    incomplete_groups = _called(Relations.incomplete_groups, is_limited=False)
    expectations = _called(Relations.expectations)
    missing = _called(Relations.missing)
    _newest_groups = _called(Relations._newest_groups)
    _reach = _called(Relations._reach)

    # --- what waits, or comes in parts ----------------------------------------------------------------------

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
        """The same as `related`, waiting until there is at least one message; as `Relations.wait_related`.

        A task that waits holds no thread: any number may.
        """
        relations = self._relations
        waiting = wait_related(relations._catalog, message, to, by, limit, order, timeout_s)
        with within(self._timeout_s + timeout_s), look_up("wait_related") as told, relations._counts.counted():
            while (answer := await self._in_thread(waiting.look, threads=self._for_waits)) is None:
                with relations._counts.awaiting():
                    await asyncio.sleep(left_s(waiting.pause_s))
                    waiting.is_seen = bool(await relations._waits.wait_in_task(waiting.watch, waiting.watch.until))
            told(answer)
            return answer

    def read_many(
        self, ids: Iterable[MessageId | tuple[str, int]]
    ) -> AsyncGenerator[Message | NotFound | AccessRefused, None]:
        """The messages of many ids, in the order of the ids, memory bounded; as `Relations.read_many`.

        `ids` is iterated in a thread, some way ahead of what was given. Close what is left early
        (`contextlib.aclosing`).
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
        """Whole groups, one after the other; as `Relations.groups`.

        Some are read ahead of what was given. Close what is left early (`contextlib.aclosing`). With a consumer it is
        an asynchronous context manager, and nothing is read ahead but what the consumer's `prefetch` says.
        """
        if consumer is not None:
            shared = self._relations.groups(streams, consumer=consumer, **options)
            return AsyncSharedGroups(self._in_thread, self._lent_once, self._end, shared)
        given = self._relations._groups(names_of("streams", streams), **options)
        return self._in_parts(lambda: given)

    def watch_missing(
        self, expectation: str | Expectation, *, since: datetime | None = None, poll_s: float = POLL_S
    ) -> AsyncGenerator[UnmetExpectation, None]:
        """The messages that nothing has followed in time, each as soon as that is known; as `Relations.watch_missing`.

        Close it where it is left early (`contextlib.aclosing`).
        """
        given = self._relations._watch_missing(expectation, since, poll_s)
        return self._in_parts(lambda: given)

    # --- threads ------------------------------------------------------------------------------------------

    async def _in_thread(
        self,
        function: Callable[..., _Result],
        *args: Any,
        returned: Callable[[_Result], object] | None = None,
        threads: Threads | None = None,
    ) -> _Result:
        """Call a function in a thread. Closing ends what is under way."""
        if self._is_closed:
            raise UsedAfterClose(CLOSED)
        try:
            return await in_thread(threads or self._threads, function, *args, ending=self._ending, returned=returned)
        except NoThreadInTime as error:
            most = self._threads.most
            raise ConnectionsInUse(
                f"{error}: ask less at once, or set broker_connections_max= (now {most}) higher",
                limit=most,
                waiting=self._threads.waiting,
            ) from None

    async def _in_parts(self, begin: Callable[[], Generator[_Item | Rest, None, None]]) -> AsyncGenerator[_Item, None]:
        """What an iteration gives, taken in parts, each by one call; between two no thread is held."""
        parts, has_turn = Parts(_in_lists(begin)), False
        try:
            while True:
                if not has_turn:
                    await self._lend()
                    has_turn = True
                part = await self._in_thread(parts.take)
                if part is None:
                    return
                for item in part:
                    if not isinstance(item, Rest):
                        yield item
                        continue
                    self._lent, has_turn = self._lent - 1, False
                    await asyncio.sleep(item.seconds)
        finally:
            try:
                await self._end(parts.close)
            finally:
                self._lent -= has_turn

    async def _lend(self) -> None:
        """Wait for a turn to have a connection that may be held without a thread.

        What has one needs a thread to go on and give it back. So there are less of them than threads: else all threads
        could wait for connections that are held so.
        """
        until = time.monotonic() + left_s(self._timeout_s)
        while self._lent >= self._lent_max:
            if time.monotonic() >= until:
                raise ConnectionsInUse(
                    f"{self._lent_max} iterations have a connection to the broker, and none of them went on in time: "
                    "close those that are left early, or set broker_connections_max= higher",
                    limit=self._threads.most,
                    waiting=0,
                )
            await asyncio.sleep(TURN_S)
        self._lent += 1

    async def _lent_once(
        self, function: Callable[..., _Result], *args: Any, returned: Callable[[_Result], object] | None = None
    ) -> _Result:
        """As `_in_thread`, for a call that reads many messages."""
        await self._lend()
        try:
            return await self._in_thread(function, *args, returned=returned)
        finally:
            self._lent -= 1

    async def _end(self, close: Callable[[], object]) -> None:
        """Close something in a thread, to its end, whatever becomes of this task."""
        await asyncio.shield(asyncio.wrap_future(self._aside.submit(close)))


def _in_lists(begin: Callable[[], Generator[_Item | Rest, None, None]]) -> Generator[list[_Item | Rest], None, None]:
    """What an iteration gives, as lists: up to a rest, or as much as comes in a moment."""
    with closing(begin()) as given:
        while True:
            taken: list[_Item | Rest] = []
            until = time.monotonic() + PART_S
            try:
                for item in given:
                    taken.append(item)
                    if isinstance(item, Rest) or len(taken) == PART_ITEMS or time.monotonic() >= until:
                        break
            except Exception:
                # What came before it is given first.
                if taken:
                    yield taken
                raise
            if not taken:
                return
            yield taken
