"""Routers in an event loop: aio-pika's own publishing, and threads for what asks PostgreSQL or reads streams."""

import asyncio
import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from relatum import publishing
from relatum.checks import checked_seconds
from relatum.closing import AsyncClosing
from relatum.contexts._context_options import AffinityOptions, ContextOptions
from relatum.contexts._placement_cache import NameLocks, Sent
from relatum.contexts._placements import PartitionRow, Placement
from relatum.contexts._predecessors import NO_SET, Found, Predecessors, set_request_of
from relatum.contexts._router_core import CLOSED, Places, RouterCore, rejected, unsettled
from relatum.contexts._routers import Options, RouterBase
from relatum.contexts._set_keeper import SetKeeper
from relatum.errors import ConfigurationError, PublishOutcomeUnknown, PublishUnroutable, RelatumError, UsedAfterClose
from relatum.superstreams.connections import vhost_of
from relatum.superstreams.targets import channel_of
from relatum.waiting import Threads, in_thread

if TYPE_CHECKING:
    from aio_pika.abc import AbstractChannel, AbstractExchange, AbstractMessage

T = TypeVar("T")

THREADS: Final = 32
"""Threads for what blocks: placing, looking, and waiting for moves. They are started as they are needed."""


@dataclass(frozen=True, slots=True)
class AsyncSending:
    """A message, as `publish` of aio-pika's exchange takes it; its methods are as of `Sending`."""

    target: "AbstractChannel | AbstractExchange"
    message: "AbstractMessage"
    routing_key: str
    kwargs: dict[str, Any]

    @property
    def headers(self) -> Mapping[str, Any] | None:
        return self.message.headers

    @property
    def message_id(self) -> str | None:
        return self.message.message_id

    def require_confirms(self) -> None:
        if not channel_of(self.target).publisher_confirms:
            raise ConfigurationError(
                "messages of a context or an affinity set need confirms: open the channel with "
                "publisher_confirms=True; nothing was sent"
            )

    async def source(self) -> Any:
        return (await channel_of(self.target).get_underlay_channel()).connection

    async def vhost(self) -> str:
        return vhost_of(await self.source())

    async def send_named(self, core: RouterCore, placement: Placement, headers: dict[str, Any]) -> Any:
        own: Any = copy.copy(self.message)
        own.headers = headers
        result = await self._publish(core, own, placement.binding_key, {**self.kwargs, "mandatory": True})
        if publishing.came_back(result):
            raise PublishUnroutable(
                f"the message of {placement.name!r} came back: {placement.stream!r} is not bound any more",
                in_stream=False,
            )
        return result

    async def send_unnamed(self, core: RouterCore, partition: PartitionRow) -> Any:
        result = await self._publish(core, self.message, partition.binding_key, self.kwargs)
        if publishing.came_back(result):
            core.forget_layout()
        else:
            core.published_unnamed()
        return result

    async def _publish(self, core: RouterCore, message: Any, binding_key: str, kwargs: dict[str, Any]) -> Any:
        exchange = await channel_of(self.target).get_exchange(core.super_stream, ensure=False)
        return await exchange.publish(message, binding_key, **kwargs)


class AsyncRouter(RouterBase[Options], AsyncClosing):
    """`Router` for aio-pika's channels, used in one event loop. What blocks is done by threads; looks are shared."""

    def _set_up(self) -> None:
        self._locks = NameLocks(asyncio.Lock)
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

        Raises: the errors of `ContextRouter.publish`. Of `PublishOutcomeUnknown`, `await error.settle()`.
        """
        return await self._publish(AsyncSending(channel, message, routing_key, kwargs))

    async def _publish(self, sending: AsyncSending) -> Any:
        raise NotImplementedError

    def exchange(self, channel: "AbstractChannel") -> "RouterExchange":
        """This router on one channel, in the form of an exchange: it has `publish(message, routing_key)`."""
        return RouterExchange(self, channel)

    # --- for routers of contexts and of sets ----------------------------------------------------------------------

    async def _publish_locked(
        self, sending: AsyncSending, name: str, *, stream: str | None = None
    ) -> tuple[Placement, Any]:
        """Publish a message of a name whose lock is held; gives its placement, and what the client gave.

        - `stream`: Where to place the name, if it is not placed yet.
        """
        sending.require_confirms()
        core, publications = self._core, self._core.publications
        if not core.is_open:
            await self._connect(await sending.source())
        core.check_vhost(await sending.vhost())
        known = publications.at_hand(name)
        if known is None:
            known = await self._in_thread(publications.place, name, stream)
        sent = publications.next_of(known)
        try:
            result = await sending.send_named(core, known.placement, core.headers_for(sent, sending.headers))
        except PublishOutcomeUnknown as error:
            error.settle = partial(self._settle_unknown, error.settle, sent)
            raise
        try:
            if not publications.counts_at_once(sent):
                await self._in_thread(partial(publications.settle, name, must=False))
        except RelatumError as error:
            raise unsettled(name, error, partial(self._settle, name)) from error
        core.published()
        return known.placement, result

    async def _unnamed_partition(self, sending: AsyncSending) -> PartitionRow:
        """Where a message of no name goes, by the rule; it never waits for the database."""
        core = self._core
        if not core.has_layout:
            await self._connect(await sending.source(), with_database=False)
        core.check_vhost(await sending.vhost())
        return core.unnamed(sending.routing_key)

    async def _settle_name(self, name: str, timeout_s: float | None = None) -> None:
        with self._locks(name) as lock:
            async with lock:
                await self._in_thread(self._core.publications.settle, name, timeout_s)

    async def _settle(self, name: str, timeout_s: float | None = None, *, streams: tuple[str, ...] = ()) -> Places:
        """Wait until a message counts that the broker has; gives no places, the name's partition has it."""
        try:
            await self._settle_name(name, timeout_s)
        except RelatumError as error:
            raise unsettled(name, error, partial(self._settle, name)) from error
        return ()

    async def _settle_unknown(
        self, found: Any, sent: Sent, timeout_s: float | None = None, *, streams: tuple[str, ...] = ()
    ) -> Places:
        """Find out about a message whose confirm did not come: it must be in a stream, and count there."""
        places: Places = await found(timeout_s, streams=streams or (sent.stream,))
        if await self._in_thread(self._core.publications.counts, sent):
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

    async def _in_thread(self, function: Callable[..., T], *args: Any) -> T:
        """Call what blocks; to its end also where this is cancelled: what follows of the name must not overtake it."""
        if not self._has_threads:
            raise UsedAfterClose(CLOSED)
        return await in_thread(self._threads, function, *args, to_end=True)


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
                return (await self._publish_locked(sending, name))[1]


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
        request = set_request_of(sending.headers, core.options.header)
        if request is NO_SET:
            return await self._publish_of_none(sending)
        self._loop = asyncio.get_running_loop()
        if predecessors.knows(request):
            # Nothing is awaited before the set's lock: tasks queue in the order they called.
            place = predecessors.place_of(request)
        else:
            await self._connect(await sending.source())
            place = await asyncio.to_thread(predecessors.place_of, request)
        if place.name is None:
            return await self._publish_of_none(sending, core.active(place.stream or ""))
        with self._locks(place.name) as lock:
            async with lock:
                if sets.is_ending(place.name):
                    await self._in_thread(core.publications.settle, place.name)
                    await asyncio.to_thread(sets.end_now, place.name)
                placement, result = await self._publish_locked(sending, place.name, stream=place.stream)
                predecessors.published(Found(placement.name, placement.stream), sending.message_id)
                sets.used(placement.name, placement.epoch, is_last=request.is_last)
        return result

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
