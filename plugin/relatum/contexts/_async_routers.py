"""Routers for asyncio: they publish with aio-pika, and use threads for PostgreSQL and for reading streams."""

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
from relatum.contexts._router_core import CLOSED, Places, RouterCore, rejected, unsettled
from relatum.contexts._router_sets import NO_SET, Found, Predecessors, SetKeeper, set_request_of
from relatum.contexts._routers import Options, RouterBase
from relatum.errors import ConfigurationError, PublishOutcomeUnknown, PublishUnroutable, UsedAfterClose
from relatum.superstreams.connections import vhost_of
from relatum.superstreams.targets import channel_of
from relatum.waiting import Threads, in_thread

if TYPE_CHECKING:
    from aio_pika.abc import AbstractChannel, AbstractExchange, AbstractMessage

T = TypeVar("T")

THREADS: Final = 32
"""The most threads for blocking calls: placing, querying, waiting for moves. Started on demand."""


@dataclass(frozen=True, slots=True)
class AsyncSending:
    """The arguments of aio-pika's `Exchange.publish`; the methods are those of `Sending`."""

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
        if publishing.was_returned(result):
            raise PublishUnroutable(
                f"the message of {placement.name!r} came back: {placement.stream!r} is not bound any more",
                in_stream=False,
            )
        return result

    async def send_unnamed(self, core: RouterCore, partition: PartitionRow) -> Any:
        result = await self._publish(core, self.message, partition.binding_key, self.kwargs)
        if publishing.was_returned(result):
            core.forget_layout()
        else:
            core.published_unnamed()
        return result

    async def _publish(self, core: RouterCore, message: Any, binding_key: str, kwargs: dict[str, Any]) -> Any:
        exchange = await channel_of(self.target).get_exchange(core.super_stream, ensure=False)
        return await exchange.publish(message, binding_key, **kwargs)


class AsyncRouter(RouterBase[Options], AsyncClosing):
    """`Router` for aio-pika's channels, used in one event loop. Blocking calls run in threads; queries are shared."""

    def _set_up(self) -> None:
        self._locks = NameLocks(asyncio.Lock)
        self._threads = Threads(THREADS, "relatum-router")
        # Closing does not queue behind messages that wait for moves.
        self._closing_thread = Threads(1, "relatum-router-close")
        self._has_threads = True

    async def open(self, source: Any = None) -> None:
        """Connect eagerly; see `ContextRouter.open`. `source` may be an aio-pika connection or channel. Idempotent."""
        await self._connect(source)

    async def check(self, timeout_s: float | None = None) -> None:
        """Wait until every message published so far is known to be in order; see `ContextRouter.check`."""
        if timeout_s is not None:
            checked_seconds("timeout_s", timeout_s)
        for name in self._core.publications.unchecked.names():
            await self._settle_name(name, timeout_s)

    async def close(self) -> None:
        """Call `check`, and close the connections; see `ContextRouter.close`."""
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
        """Publish a message to the partition of its context or affinity set.

        For a context, return once the message is known to be in order. If the call is cancelled, the message may or may
        not have been published.

        Args:
            channel: An aio-pika channel with publisher confirms, or an exchange of one; intercepted or not.
            message: The message, whose headers name the context or set. It is not changed.
            routing_key: For messages without a context or set: a key to balance by, or "".
            kwargs: Further arguments of `Exchange.publish`, such as `timeout`.

        Returns:
            The result of `Exchange.publish`.

        Raises: the errors of `ContextRouter.publish`. After `PublishOutcomeUnknown`, `await error.settle()`.
        """
        return await self._publish(AsyncSending(channel, message, routing_key, kwargs))

    async def _publish(self, sending: AsyncSending) -> Any:
        raise NotImplementedError

    def exchange(self, channel: "AbstractChannel") -> "RouterExchange":
        """Return an exchange-like object for one channel: it has `publish(message, routing_key)`."""
        return RouterExchange(self, channel)

    async def _publish_locked(
        self, sending: AsyncSending, name: str, *, stream: str | None = None
    ) -> tuple[Placement, Any]:
        """Publish a message while the name's lock is held; return its placement and the client's result.

        - `stream`: Where to place the name if it has no placement yet.
        """
        sending.require_confirms()
        core, publications = self._core, self._core.publications
        if not core.is_open:
            await self._connect(await sending.source())
        core.check_vhost(await sending.vhost())
        placement = publications.at_hand(name)
        if placement is None:
            placement = await self._in_thread(publications.place, name, stream)
        sent = publications.next_of(placement)
        try:
            result = await sending.send_named(core, placement, core.headers_for(sent, sending.headers))
        except PublishOutcomeUnknown as error:
            error.settle = partial(self._settle_unknown, error.settle, sent)
            raise
        with unsettled(name, partial(self._settle, name)):
            if not publications.counts_at_once(sent):
                await self._in_thread(partial(publications.settle, name, must=False))
        core.published()
        return placement, result

    async def _unnamed_partition(self, sending: AsyncSending) -> PartitionRow:
        """Choose the partition of a message without a name, without waiting for the database."""
        core = self._core
        if not core.has_layout:
            await self._connect(await sending.source(), with_database=False)
        core.check_vhost(await sending.vhost())
        return core.unnamed(sending.routing_key)

    async def _settle_name(self, name: str, timeout_s: float | None = None) -> None:
        async with self._locks(name):
            await self._in_thread(self._core.publications.settle, name, timeout_s)

    async def _settle(self, name: str, timeout_s: float | None = None, *, streams: tuple[str, ...] = ()) -> Places:
        """Wait until a confirmed message is valid; return no places, since its partition is known."""
        with unsettled(name, partial(self._settle, name)):
            await self._settle_name(name, timeout_s)
        return ()

    async def _settle_unknown(
        self, found: Any, sent: Sent, timeout_s: float | None = None, *, streams: tuple[str, ...] = ()
    ) -> Places:
        """Settle a message without a confirm: it must be in a stream, and be valid there."""
        places: Places = await found(timeout_s, streams=streams or (sent.stream,))
        if await self._in_thread(self._core.publications.counts, sent):
            return places
        raise rejected(sent)

    async def _connect(self, source: Any, *, with_database: bool = True) -> None:
        if hasattr(source, "get_underlay_channel"):
            source = (await source.get_underlay_channel()).connection
        elif getattr(source, "transport", None) is not None:
            source = source.transport.connection
        await self._in_thread(partial(self._core.open, source, with_database=with_database), to_end=False)

    async def _end(self) -> None:
        if not self._has_threads:
            return
        self._has_threads = False
        await in_thread(self._closing_thread, self._core.close)
        self._closing_thread.shutdown()
        # Calls that still wait for a thread run, and raise because the router is closed.
        self._threads.shutdown()

    async def _in_thread(self, function: Callable[..., T], *args: Any, to_end: bool = True) -> T:
        """Run a blocking call; to its end, even if cancelled, if later messages of the name must not overtake it."""
        if not self._has_threads:
            raise UsedAfterClose(CLOSED)
        return await in_thread(self._threads, function, *args, to_end=to_end)


class AsyncContextRouter(AsyncRouter[ContextOptions]):
    """Publishes messages to the partitions of their serialization contexts: `ContextRouter` for asyncio.

        async with relatum.AsyncContextRouter("orders", DATABASE_URL) as router:
            await router.publish(channel, Message(body, headers={"serialization_context": account}))

    Tasks publish at the same time; messages of one context are published one at a time, in the order of the calls. One
    query of the database validates all messages confirmed before it. The arguments are those of `ContextRouter`.
    """

    _options_class = ContextOptions

    async def _publish(self, sending: AsyncSending) -> Any:
        name = self._core.name_of(sending.headers)
        if name is None:
            return await sending.send_unnamed(self._core, await self._unnamed_partition(sending))
        # Nothing is awaited before the lock: tasks with the same name publish in the order of their calls.
        async with self._locks(name):
            return (await self._publish_locked(sending, name))[1]


class AsyncAffinityRouter(AsyncRouter[AffinityOptions]):
    """Publishes all messages of an affinity set to the partition of its first one: `AffinityRouter` for asyncio.

        async with relatum.AsyncAffinityRouter("invoices", DATABASE_URL) as router:
            await router.publish(channel, Message(body, headers={"affinity_set": "invoice 17"}))

    Tasks publish at the same time; messages of one set are published one at a time, in the order of the calls. The
    arguments are those of `AffinityRouter`.
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
            # Nothing is awaited before the set's lock: tasks publish in the order of their calls.
            place = predecessors.place_of(request)
        else:
            await self._connect(await sending.source())
            place = await self._in_thread(predecessors.place_of, request, to_end=False)
        if place.name is None:
            return await self._publish_of_none(sending, core.active(place.stream or ""))
        async with self._locks(place.name):
            if sets.is_ending(place.name):
                await self._in_thread(sets.end_now, place.name)
            placement, result = await self._publish_locked(sending, place.name, stream=place.stream)
            predecessors.published(Found(placement.name, placement.stream), sending.message_id)
            sets.used(placement.name, placement.epoch, is_last=request.is_last)
        return result

    async def _publish_of_none(self, sending: AsyncSending, partition: PartitionRow | None = None) -> Any:
        """Publish a message without a set to its predecessor's partition, or by the balance rule."""
        partition = partition or await self._unnamed_partition(sending)
        result = await sending.send_unnamed(self._core, partition)
        self._predecessors.published(Found(None, partition.stream), sending.message_id)
        return result

    async def close(self) -> None:
        """Close the sets that have ended, and then the router; see `AffinityRouter.close`."""
        try:
            if self._has_threads:
                await in_thread(self._closing_thread, self._sets.close)
        finally:
            await super().close()

    def _settle_set(self, name: str) -> None:
        """Settle a name from another thread, in the loop that has the names' locks."""
        if self._loop is not None:
            asyncio.run_coroutine_threadsafe(self._settle_name(name), self._loop).result()


class RouterExchange:
    """An asyncio router on one aio-pika channel, which looks like an exchange."""

    def __init__(self, router: "AsyncRouter[Any]", channel: Any) -> None:
        self.router = router
        self.channel = channel

    async def publish(self, message: "AbstractMessage", routing_key: str = "", **kwargs: Any) -> Any:
        """Publish a message through the router; see `AsyncContextRouter.publish`."""
        return await self.router.publish(self.channel, message, routing_key, **kwargs)
