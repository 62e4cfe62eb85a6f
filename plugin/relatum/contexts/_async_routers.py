"""Routers in an event loop: aio-pika's own publishing, and threads for what asks PostgreSQL or reads streams."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from relatum.checks import checked_seconds
from relatum.closing import AsyncClosing
from relatum.contexts._options import AffinityOptions, ContextOptions
from relatum.contexts._routers import Options, RouterBase
from relatum.contexts.affinity._predecessors import NO_WISH, Found, Predecessors, wish_of
from relatum.contexts.affinity._set_keeping import SetKeeper
from relatum.contexts.placement._model import PartitionRow
from relatum.contexts.placement._name_locks import NameLocks
from relatum.contexts.placement._placement_core import CLOSED, Places, rejected, unsettled
from relatum.contexts.placement._publication import Published, Unsettled
from relatum.contexts.placement._publication_requests import (
    Adopt,
    PublicationRequest,
    ReadGeneration,
    Send,
    Sent,
    Sleep,
    Steps,
    T,
)
from relatum.contexts.placement._sending import AsyncSending
from relatum.contexts.steps import async_run
from relatum.errors import PublishOutcomeUnknown, RelatumError, UsedAfterClose
from relatum.waiting import Threads, in_thread

if TYPE_CHECKING:
    from aio_pika.abc import AbstractChannel, AbstractExchange, AbstractMessage

THREADS: Final = 8
"""Threads for what blocks: placing, reading what changed, and looking for strays."""


class SharedRead:
    """A read that serves all who asked before it began; one is under way at a time."""

    def __init__(self, read: Callable[[], Awaitable[int]]) -> None:
        self._read = read
        self._running: asyncio.Task[int] | None = None
        self._waiting: asyncio.Task[int] | None = None

    async def __call__(self) -> int:
        """What a read gave that began after this was called."""
        if self._waiting is None:
            self._waiting = asyncio.create_task(self._begin(self._running))
            # Its error is for those who wait; were all of them cancelled, it is for nobody.
            self._waiting.add_done_callback(lambda task: task.cancelled() or task.exception())
        # Shielded: the others wait for it as well.
        return await asyncio.shield(self._waiting)

    async def _begin(self, earlier: "asyncio.Task[int] | None") -> int:
        if earlier is not None:
            await asyncio.wait([earlier])
        self._running, self._waiting = self._waiting, None
        return await self._read()


class AsyncRouter(RouterBase[Options], AsyncClosing):
    """`Router` for aio-pika's channels, used in one event loop. What blocks is done by threads; looks are shared."""

    def _set_up(self) -> None:
        self._locks = NameLocks(asyncio.Lock)
        self._generation = SharedRead(lambda: self._in_thread(ReadGeneration()))
        self._threads = Threads(THREADS, "relatum-router")
        self._has_threads = True

    async def open(self, source: Any = None) -> None:
        """Connect eagerly; as `ContextRouter.open`. `source` may be a connection or channel of aio-pika. Idempotent."""
        await self._connect(source)

    async def check(self, timeout_s: float | None = None) -> None:
        """Wait until every message published so far is known to be in its order; as `ContextRouter.check`."""
        if timeout_s is not None:
            checked_seconds("timeout_s", timeout_s)
        for name in self._core.publications.unchecked.names():
            await self._settle_name(name, timeout_s)

    async def close(self) -> None:
        """Wait as `check` does, and give the connections back; as `ContextRouter.close`."""
        try:
            if self._core.is_open:
                await self.check()
        finally:
            await self._end()

    async def publish(
        self,
        channel: "AbstractChannel | AbstractExchange",
        message: "AbstractMessage",
        routing_key: str = "",
        **kwargs: Any,
    ) -> Any:
        """Publish a message where its context, or affinity set, is; of a context, return when it is in its order.

        Cancelling it leaves open whether the message was published.

        Args:
            channel: An aio-pika channel with publisher confirms, or an exchange of one; intercepted or not.
            message: The message; the headers that name the context, or set, are among its headers. Not changed.
            routing_key: Of messages of none: their key, if any, to balance by. None is sent by it.
            kwargs: Further arguments of `Exchange.publish`, such as `timeout`.

        Returns:
            What `Exchange.publish` returned.

        Raises:
            ConfigurationError, InvalidInput, PredecessorNotFound, ContextMoving, TooManyOpenSets, DatabaseUnavailable,
            BrokerUnavailable, SuperStreamNotFound, SuperStreamConflict: nothing was sent; as of the blocking router.
            PublishUnroutable: the partition is not bound any more; it is in no stream.
            PublishOutcomeUnknown: it may be in its context's order, or in its set: `await error.settle()`.
            Exception: what `Exchange.publish` raises.
        """
        return await self._publish(AsyncSending(channel, message, routing_key, kwargs))

    async def _publish(self, sending: AsyncSending) -> Any:
        raise NotImplementedError

    def exchange(self, channel: "AbstractChannel") -> "RouterExchange":
        """This router on one channel, in the form of an exchange: it has `publish(message, routing_key)`."""
        return RouterExchange(self, channel)

    # --- for routers of contexts and of sets ----------------------------------------------------------------------

    async def _publish_locked(self, sending: AsyncSending, name: str, *, stream: str | None = None) -> Published:
        """Publish a message of a name whose lock is held; a stream: where to place it, if it is not placed yet."""
        sending.require_confirms()
        core = self._core
        if not core.is_open:
            await self._connect(await sending.source())
        core.check_vhost(await sending.vhost())
        try:
            published = await self._run(core.publications.publish(name, stream=stream), partial(self._send, sending))
        except Unsettled as error:
            raise unsettled(name, error.__cause__, partial(self._settle, name)) from error.__cause__
        core.published()
        return published

    async def _unnamed_partition(self, sending: AsyncSending) -> PartitionRow:
        """Where a message of no name goes, by the rule; it never waits for the database."""
        core = self._core
        if not core.has_layout:
            await self._connect(await sending.source(), with_database=False)
        core.check_vhost(await sending.vhost())
        return core.unnamed(sending.routing_key)

    # --- steps ----------------------------------------------------------------------------------------------------

    async def _send(self, sending: AsyncSending, request: Send) -> Any:
        placement = request.placement
        headers = self._core.headers_for(request, sending.headers)
        try:
            return await sending.send_named(self._core, placement, headers)
        except PublishOutcomeUnknown as error:
            sent = Sent(placement.name, placement.stream, request.placed, request.as_of)
            error.settle = partial(self._settle_unknown, error.settle, sent)
            raise

    async def _settle_name(self, name: str, timeout_s: float | None = None) -> None:
        with self._locks(name) as lock:
            async with lock:
                await self._run(self._core.publications.settle(name, timeout_s))

    async def _settle(self, name: str, timeout_s: float | None = None, *, streams: tuple[str, ...] = ()) -> Places:
        """Wait until a message counts that the broker has; gives no places, the name's partition has it.

        Raises:
            PublishOutcomeUnknown: it is still not known.
        """
        try:
            await self._settle_name(name, timeout_s)
        except RelatumError as error:
            raise unsettled(name, error, partial(self._settle, name)) from error
        return ()

    async def _settle_unknown(
        self, found: Any, sent: Sent, timeout_s: float | None = None, *, streams: tuple[str, ...] = ()
    ) -> Places:
        """Find out about a message whose confirm did not come: it must be in a stream, and count there.

        Raises:
            PublishRejected: it is nowhere, or where its context is not any more: nobody reads it there.
            PublishOutcomeUnknown: it is still not known.
            BrokerUnavailable: the broker did not answer until the end.
        """
        places: Places = await found(timeout_s, streams=streams or (sent.stream,))
        if await self._run(self._core.publications.counts(sent)):
            return places
        raise rejected(sent)

    async def _connect(self, source: Any, *, with_database: bool = True) -> None:
        if hasattr(source, "get_underlay_channel"):
            source = (await source.get_underlay_channel()).connection
        elif getattr(source, "transport", None) is not None:
            source = source.transport.connection
        await in_thread(None, partial(self._core.open, source, with_database=with_database))

    async def _end(self) -> None:
        await asyncio.to_thread(self._core.close)
        self._has_threads = False
        # What waits for a thread is still done: it finds the router closed, and says so.
        self._threads.shutdown()

    async def _run(self, steps: Steps[T], send: Callable[[Send], Awaitable[Any]] | None = None) -> T:
        """Perform steps until they return."""
        return await async_run(steps, lambda request: self._perform(request, send))

    async def _perform(self, request: PublicationRequest, send: Any) -> Any:
        if isinstance(request, Send):
            return await send(request)
        if isinstance(request, Sleep):
            return await asyncio.sleep(request.seconds)
        if isinstance(request, ReadGeneration):
            return await self._generation()
        if isinstance(request, Adopt):
            return await self._to_the_end(self._in_thread(request))
        return await self._in_thread(request)

    async def _in_thread(self, request: PublicationRequest) -> Any:
        if not self._has_threads:
            raise UsedAfterClose(CLOSED)
        return await in_thread(self._threads, self._core.perform, request)

    async def _to_the_end(self, step: Awaitable[Any]) -> Any:
        """Wait for a step even where this is cancelled: what follows of the name must not overtake it."""
        task = asyncio.ensure_future(step)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            while not task.done():
                # Nor is it left under way where this is cancelled once more.
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait([task])
            # Retrieve the exception so that asyncio does not log it.
            _ = task.cancelled() or task.exception()
            raise


class AsyncContextRouter(AsyncRouter[ContextOptions]):
    """Publishes messages to the partitions their serialization contexts are in: the twin of `ContextRouter`.

        async with relatum.AsyncContextRouter("orders", DATABASE_URL) as router:
            await router.publish(channel, Message(body, headers={"serialization_context": account}))

    Tasks publish side by side; those of one context go one after the other, in the order they called. One look at the
    database serves all whose confirms came before it. Arguments are as of `ContextRouter`.
    """

    _options_class = ContextOptions

    async def _publish(self, sending: AsyncSending) -> Any:
        name = self._core.name_of(sending.headers)
        if name is None:
            return await sending.send_unnamed(self._core, await self._unnamed_partition(sending))
        # Nothing is awaited before: tasks of a name queue in the order they called.
        with self._locks(name) as lock:
            async with lock:
                return (await self._publish_locked(sending, name)).result


class AsyncAffinityRouter(AsyncRouter[AffinityOptions]):
    """Publishes all messages of an affinity set to the partition where its first one went: `AffinityRouter`'s twin.

        async with relatum.AsyncAffinityRouter("invoices", DATABASE_URL) as router:
            await router.publish(channel, Message(body, headers={"affinity_set": "invoice 17"}))

    Tasks publish side by side; those of one set go one after the other, in the order they called. Arguments are as of
    `AffinityRouter`.
    """

    _options_class = AffinityOptions

    def _set_up(self) -> None:
        super()._set_up()
        self._predecessors = Predecessors(self._core, self._options.predecessors_max)
        self._sets = SetKeeper(self._core, self._settle_set)
        self._loop: asyncio.AbstractEventLoop | None = None

    async def _publish(self, sending: AsyncSending) -> Any:
        core, sets, predecessors = self._core, self._sets, self._predecessors
        wish = wish_of(sending.headers, core.options.header)
        if wish is NO_WISH:
            return await self._publish_of_none(sending)
        self._loop = asyncio.get_running_loop()
        if predecessors.knows(wish):
            # Nothing is awaited before the set's lock: tasks queue in the order they called.
            place = predecessors.place_of(wish)
        else:
            await self._connect(await sending.source())
            place = await asyncio.to_thread(predecessors.place_of, wish)
        if place.name is None:
            return await self._publish_of_none(sending, core.active(place.stream or ""))
        with self._locks(place.name) as lock:
            async with lock:
                if sets.is_ending(place.name):
                    await self._run(core.publications.settle(place.name))
                    await asyncio.to_thread(sets.end_now, place.name)
                published = await self._publish_locked(sending, place.name, stream=place.stream)
                placement = published.placement
                predecessors.published(Found(placement.name, placement.stream), sending.message_id)
                sets.used(placement.name, placement.epoch, is_last=wish.is_last)
        return published.result

    async def _publish_of_none(self, sending: AsyncSending, partition: PartitionRow | None = None) -> Any:
        """Publish a message of no set, where its predecessor went or by the rule."""
        partition = partition or await self._unnamed_partition(sending)
        result = await sending.send_unnamed(self._core, partition)
        self._predecessors.published(Found(None, partition.stream), sending.message_id)
        return result

    async def close(self) -> None:
        """Close the sets that have ended, and go on as `AsyncContextRouter.close`. Others stay open."""
        try:
            await asyncio.to_thread(self._sets.close)
        finally:
            await super().close()

    def _settle_set(self, name: str) -> None:
        """Settle in the loop, whose locks the names have; called in another thread."""
        if self._loop is not None:
            asyncio.run_coroutine_threadsafe(self._settle_name(name), self._loop).result()


class RouterExchange:
    """An asyncio router on one aio-pika channel, in the form of an exchange."""

    def __init__(self, router: "AsyncRouter[Any]", channel: Any) -> None:
        self.router = router
        self.channel = channel

    async def publish(self, message: "AbstractMessage", routing_key: str = "", **kwargs: Any) -> Any:
        """Publish as the router's own `publish` does."""
        return await self.router.publish(self.channel, message, routing_key, **kwargs)
