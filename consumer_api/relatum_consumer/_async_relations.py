"""The asyncio face of look-ups: `Relations`, called in threads of its own."""

import asyncio
import ssl
import threading
import time
from collections.abc import AsyncGenerator, Callable, Generator, Iterable
from datetime import datetime, timedelta
from functools import partial
from typing import Any, Final, Generic, ParamSpec, Self, TypeVar, Unpack, overload

from relatum.closing import AsyncClosing
from relatum.errors import AccessRefused, ConnectionsInUse, NotFound, UsedAfterClose
from relatum.ids import MessageId
from relatum.keys import KeyDefinition
from relatum.membership import GroupPosition
from relatum.processes import after_fork
from relatum.reading import CONNECTIONS_MAX, AuthMechanism, BrokerAddress, Message
from relatum.store.database import AnyDatabase
from relatum.waiting import Deadline, NoThreadInTime, Threads, in_thread, left_s, within
from relatum_consumer._lookup_statistics import LookupStatistics
from relatum_consumer._relations import Relations
from relatum_consumer.consumed import Consumed
from relatum_consumer.expectations import POLL_S, UNMET_MAX, Expectation, MissingReport, Unmet
from relatum_consumer.groups import (
    AsyncSharedGroups,
    Group,
    GroupArguments,
    GroupConsumer,
    GroupConsumerStatus,
    GroupOrder,
    GroupPage,
    IncompleteGroupReport,
    SharingArguments,
)
from relatum_consumer.lookups import CLOSED, Answer, Health, Names, Order, Rest, Times, look_up, names_of
from relatum_consumer.traces import Start, Trace

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
"""Threads for what must not wait for look-ups: closing, and asking whether the servers are well."""


class AsyncRelations(AsyncClosing):
    """Finds the messages that belong together, and reads them, with asyncio.

    An asynchronous context manager; tasks may share one, also those of one event loop after another. It holds a
    `Relations` and calls it in threads of its own, `connections_max` at most. A task that waits for a message
    (`wait_related`) or for the next part of an iteration holds none. A call that is cancelled lets go of its server and
    its thread within 0.1 s.

    Arguments and errors are those of `Relations`, and so are the methods. What is asked waits for a thread within
    `timeout_s`, too, and ends as `ConnectionsInUse` where none became free.
    """

    def __init__(
        self,
        broker: str | BrokerAddress,
        database: AnyDatabase,
        *,
        stream_url: str | None = None,
        timeout_s: float = 10.0,
        pool_size: int = 5,
        max_connections: int | None = None,
        connections_max: int = CONNECTIONS_MAX,
        ssl_context: ssl.SSLContext | None = None,
        auth_mechanism: AuthMechanism | None = None,
    ) -> None:
        self._relations = Relations(
            broker,
            database,
            stream_url=stream_url,
            timeout_s=timeout_s,
            pool_size=pool_size,
            max_connections=max_connections,
            connections_max=connections_max,
            ssl_context=ssl_context,
            auth_mechanism=auth_mechanism,
        )
        self._timeout_s = timeout_s
        self._threads = Threads(connections_max, "relatum-lookups")
        # What waits may have to share a proof that takes long: look-ups do not wait for that.
        self._for_waits = Threads(max(1, connections_max // 2), "relatum-lookups-waits")
        self._aside = Threads(ASIDE_THREADS, "relatum-lookups-aside")
        self._lent_max = max(1, connections_max * 3 // 4)
        self._lent = 0
        self._ending = Deadline(None)
        self._is_closed = False
        after_fork(self, AsyncRelations._renew)

    def _renew(self) -> None:
        """In a child: iterations under way are the parent's."""
        self._lent = 0

    @classmethod
    async def open(cls, broker: str | BrokerAddress, database: AnyDatabase, **options: Any) -> Self:
        """The same as the constructor, once both servers have answered; as `Relations.open`."""
        relations = cls(broker, database, **options)
        try:
            await relations._call(relations._relations._reach)
        except BaseException:
            await relations.close()
            raise
        return relations

    async def close(self) -> None:
        """Close all connections; shared groups are given back. Look-ups under way are ended, and fail."""
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
        """Whether both servers answer now; as `Relations.health`. It waits for no look-up's thread."""
        return await in_thread(self._aside, partial(self._relations.health, timeout_s=timeout_s))

    # --- by key -------------------------------------------------------------------------------------------

    async def related(
        self,
        message: Message | Consumed,
        to: Names = None,
        *,
        by: Names = None,
        limit: int | None = None,
        order: Order = "oldest",
        complete: bool = False,
    ) -> Answer:
        """The messages that share a key's value with a message, never the message itself; as `Relations.related`."""
        return await self._call(
            self._relations.related, message, to, by=by, limit=limit, order=order, complete=complete
        )

    async def find(
        self,
        key: str,
        value: Any,
        *,
        streams: Names = None,
        since: datetime | None = None,
        until: datetime | None = None,
        limit: int | None = None,
        order: Order = "oldest",
        complete: bool = False,
    ) -> Answer:
        """The messages that carry a key's value; as `Relations.find`."""
        return await self._call(
            self._relations.find,
            key,
            value,
            streams=streams,
            since=since,
            until=until,
            limit=limit,
            order=order,
            complete=complete,
        )

    async def times(
        self,
        key: str,
        value: Any,
        *,
        streams: Names = None,
        since: datetime | None = None,
        until: datetime | None = None,
        spans: int = 60,
        order: Order = "oldest",
    ) -> Times:
        """When messages carry a key's value; as `Relations.times`."""
        return await self._call(
            self._relations.times, key, value, streams=streams, since=since, until=until, spans=spans, order=order
        )

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
        waiting = relations._lookups.wait_related(message, to, by, limit, order, timeout_s)
        with (
            within(self._timeout_s + timeout_s),
            look_up("wait_related") as told,
            relations._counts.counted(),
        ):
            while (answer := await self._in_thread(waiting.look, threads=self._for_waits)) is None:
                with relations._counts.awaiting():
                    await asyncio.sleep(left_s(waiting.pause_s))
                    waiting.is_seen = bool(await relations._waits.wait_in_task(waiting.watch, waiting.watch.until))
            told(answer)
            return answer

    # --- what is connected ---------------------------------------------------------------------------------

    async def trace(
        self,
        start: Start,
        *,
        by: Names = None,
        streams: Names = None,
        hops: int = 8,
        limit: int = 1_000,
        fan_out: int = 200,
        since: datetime | None = None,
        until: datetime | None = None,
        complete: bool = False,
    ) -> Trace:
        """All messages that are connected with one, over one key or several; as `Relations.trace`."""
        return await self._call(
            self._relations.trace,
            start,
            by=by,
            streams=streams,
            hops=hops,
            limit=limit,
            fan_out=fan_out,
            since=since,
            until=until,
            complete=complete,
        )

    # --- by time ------------------------------------------------------------------------------------------

    async def after(
        self,
        moment: Message | Consumed | datetime,
        stream: str,
        *,
        by: str | None = None,
        inclusive: bool = False,
        complete: bool = False,
    ) -> Answer:
        """The next message in time in a stream; as `Relations.after`."""
        return await self._call(self._relations.after, moment, stream, by=by, inclusive=inclusive, complete=complete)

    async def before(
        self,
        moment: Message | Consumed | datetime,
        stream: str,
        *,
        by: str | None = None,
        inclusive: bool = False,
        complete: bool = False,
    ) -> Answer:
        """The previous message in time in a stream; as `Relations.before`."""
        return await self._call(self._relations.before, moment, stream, by=by, inclusive=inclusive, complete=complete)

    async def nearest(
        self, moment: Message | Consumed | datetime, stream: str, *, by: str | None = None, complete: bool = False
    ) -> Answer:
        """The message nearest in time in a stream, never the message itself; as `Relations.nearest`."""
        return await self._call(self._relations.nearest, moment, stream, by=by, complete=complete)

    async def window(
        self,
        moment: Message | Consumed | datetime,
        stream: str,
        *,
        before_s: float = 0.0,
        after_s: float = 0.0,
        by: str | None = None,
        complete: bool = False,
    ) -> Answer:
        """All messages of a stream around a moment, but not the message itself; as `Relations.window`."""
        return await self._call(
            self._relations.window, moment, stream, before_s=before_s, after_s=after_s, by=by, complete=complete
        )

    async def around(
        self,
        moment: Message | Consumed | datetime,
        streams: Names = None,
        *,
        before_s: float = 0.0,
        after_s: float = 0.0,
        limit: int | None = None,
        complete: bool = False,
    ) -> Answer:
        """All messages of several streams around a moment, merged by time; as `Relations.around`."""
        return await self._call(
            self._relations.around,
            moment,
            streams,
            before_s=before_s,
            after_s=after_s,
            limit=limit,
            complete=complete,
        )

    # --- what there is ------------------------------------------------------------------------------------

    async def read(self, stream: str, offset: int) -> Message:
        """The message at an offset of a stream; as `Relations.read`."""
        return await self._call(self._relations.read, stream, offset)

    def read_many(
        self, ids: Iterable[MessageId | tuple[str, int]]
    ) -> AsyncGenerator[Message | NotFound | AccessRefused, None]:
        """The messages of many ids, in the order of the ids, memory bounded; as `Relations.read_many`.

        `ids` is iterated in a thread, some way ahead of what was given. Close what is left early
        (`contextlib.aclosing`).
        """
        return self._in_parts(lambda: self._relations.read_many(ids))

    async def keys(self) -> tuple[KeyDefinition, ...]:
        """The key definitions in force, by name, as they were known within the last second."""
        return await self._call(self._relations.keys)

    async def streams(self) -> tuple[str, ...]:
        """The names of the streams that are recorded, in order; as `Relations.streams`."""
        return await self._call(self._relations.streams)

    async def values(self, key: str, prefix: str = "", *, limit: int = 10) -> tuple[str, ...]:
        """The first recorded values of a key that begin with a prefix, in order; as `Relations.values`."""
        return await self._call(self._relations.values, key, prefix, limit=limit)

    # --- groups -------------------------------------------------------------------------------------------

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

    async def incomplete_groups(
        self, streams: Names = None, *, older_than: timedelta | float, complete: bool = True
    ) -> list[IncompleteGroupReport]:
        """The groups that are not complete, or contradict themselves; as `Relations.incomplete_groups`."""
        method = self._relations.incomplete_groups
        return await self._in_thread(partial(method, streams, older_than=older_than, complete=complete))

    async def group(
        self, group_id: str, *, streams: Names = None, order: GroupOrder = "logical", complete: bool = True
    ) -> Group:
        """What there is of one group, complete or not; as `Relations.group`."""
        method = partial(self._relations.group, group_id, streams=streams, order=order, complete=complete)
        with within(self._timeout_s):
            return await self._lent_once(method)

    async def grouped(self, group_id: str, sequence: int, *, streams: Names = None, complete: bool = False) -> Answer:
        """The messages of one number of a group; as `Relations.grouped`."""
        method = partial(self._relations.grouped, group_id, sequence, streams=streams, complete=complete)
        with within(self._timeout_s):
            return await self._lent_once(method)

    async def group_position(self, group_id: str, *, streams: Names = None, complete: bool = True) -> GroupPosition:
        """How far a group is: what a publisher needs to go on with it; as `Relations.group_position`."""
        return await self._call(self._relations.group_position, group_id, streams=streams, complete=complete)

    async def group_consumers(self) -> tuple[str, ...]:
        """The names of the consumers that share groups in this virtual host, in order."""
        return await self._call(self._relations.group_consumers)

    async def group_consumer_status(self, name: str) -> GroupConsumerStatus:
        """What is known of a consumer that shares groups; as `Relations.group_consumer_status`."""
        return await self._call(self._relations.group_consumer_status, name)

    async def _newest_groups(self, streams: Names = None, *, before: str | None = None, limit: int = 100) -> GroupPage:
        return await self._call(self._relations._newest_groups, streams, before=before, limit=limit)

    # --- what is missing ----------------------------------------------------------------------------------

    async def expectations(self) -> tuple[Expectation, ...]:
        """The expectations that are defined for this virtual host, in the order of their names."""
        return await self._call(self._relations.expectations)

    async def missing(
        self,
        expectation: str | Expectation,
        *,
        since: datetime | None = None,
        until: datetime | None = None,
        limit: int = UNMET_MAX,
    ) -> MissingReport:
        """The messages of a span of time that nothing has followed in time; as `Relations.missing`."""
        return await self._call(self._relations.missing, expectation, since=since, until=until, limit=limit)

    def watch_missing(
        self, expectation: str | Expectation, *, since: datetime | None = None, poll_s: float = POLL_S
    ) -> AsyncGenerator[Unmet, None]:
        """The messages that nothing has followed in time, each as soon as that is known; as `Relations.watch_missing`.

        Close it where it is left early (`contextlib.aclosing`).
        """
        given = self._relations._watch_missing(expectation, since, poll_s)
        return self._in_parts(lambda: given)

    # --- threads ------------------------------------------------------------------------------------------

    async def _call(
        self, method: Callable[_Arguments, _Result], *args: _Arguments.args, **options: _Arguments.kwargs
    ) -> _Result:
        """One call that ends within `timeout_s`, the wait for a thread included."""
        with within(self._timeout_s):
            return await self._in_thread(partial(method, *args, **options))

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
                f"{error}: ask less at once, or set connections_max= (now {most}) higher",
                limit=most,
                waiting=self._threads.waiting,
            ) from None

    async def _in_parts(self, begin: Callable[[], Generator[_Item | Rest, None, None]]) -> AsyncGenerator[_Item, None]:
        """What an iteration gives, taken in parts, each by one call; between two no thread is held."""
        parts, has_turn = _Parts(begin), False
        try:
            while True:
                if not has_turn:
                    await self._lend()
                    has_turn = True
                part = await self._in_thread(parts.take)
                if not part:
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
                    "close those that are left early, or set connections_max= higher",
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


class _Parts(Generic[_Item]):
    """A blocking iteration, in parts, taken by one thread at a time."""

    def __init__(self, begin: Callable[[], Generator[_Item | Rest, None, None]]) -> None:
        self._begin = begin
        self._items: Generator[_Item | Rest, None, None] | None = None
        self._error: Exception | None = None
        self._lock = threading.Lock()
        self._is_ended = False

    def take(self) -> list[_Item | Rest]:
        """What comes next, up to a rest; nothing at the end."""
        try:
            return self._take()
        finally:
            if self._is_ended:
                self.close()

    def _take(self) -> list[_Item | Rest]:
        with self._lock:
            if self._error is not None:
                raise self._error
            taken: list[_Item | Rest] = []
            if self._items is None:
                self._items = self._begin()
            until = time.monotonic() + PART_S
            try:
                for item in self._items:
                    taken.append(item)
                    if isinstance(item, Rest) or len(taken) == PART_ITEMS or time.monotonic() >= until:
                        break
            except Exception as error:
                if not taken:
                    raise
                # What came before it is given first.
                self._error = error
            return taken

    def close(self) -> None:
        """End it: by the thread that takes a part now, where one does, since a source of ids may hold that for long."""
        self._is_ended = True
        if self._lock.acquire(blocking=False):
            try:
                if self._items is not None:
                    self._items.close()
            finally:
                self._lock.release()
