"""The asyncio router: the twin of `_router` for aio-pika. What blocks is done by threads; looks are shared."""

import asyncio
import contextlib
import copy
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

import sqlalchemy as sa

from relatum import publishing
from relatum.checks import checked_seconds
from relatum.contexts.placement._cache import Sent
from relatum.contexts.placement._model import PartitionRow
from relatum.contexts.placement._placement_core import CLOSED, Places, RouterCore, unsettled
from relatum.contexts.placement._placement_router import rejected
from relatum.contexts.placement._publication import Published, Unsettled
from relatum.contexts.placement._publication_requests import (
    Adopt,
    PublicationRequest,
    ReadGeneration,
    Send,
    Sleep,
    Steps,
    T,
)
from relatum.contexts.placement._router_options import RouterOptions
from relatum.contexts.placement._router_statistics import RouterStatistics
from relatum.errors import ConfigurationError, PublishOutcomeUnknown, PublishUnroutable, RelatumError, UsedAfterClose
from relatum.processes import of_one_process
from relatum.steps import async_run
from relatum.superstreams import channel_of, vhost_of
from relatum.waiting import in_thread

if TYPE_CHECKING:
    from aio_pika.abc import AbstractChannel, AbstractExchange, AbstractMessage

THREADS: Final = 8
"""Threads for what blocks: placing, reading what changed, and looking for strays."""


class AsyncNameLocks:
    """A lock for each name that is in use; those who wait get it in the order they came."""

    def __init__(self) -> None:
        self._held: dict[str, tuple[asyncio.Lock, int]] = {}

    @asynccontextmanager
    async def __call__(self, name: str) -> AsyncIterator[None]:
        """Hold the name's lock."""
        lock, users = self._held.get(name) or (asyncio.Lock(), 0)
        self._held[name] = (lock, users + 1)
        try:
            async with lock:
                yield
        finally:
            users = self._held[name][1] - 1
            if users:
                self._held[name] = (lock, users)
            else:
                del self._held[name]


class SharedRead:
    """A read that serves all who asked before it began; one is under way at a time.

    Args:
        read: Reads.
    """

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


class AsyncRouter:
    """Publishes messages with a name where that is placed, others by a rule. An async context manager.

    Arguments are as of `Router`. It is used in one event loop.
    """

    def __init__(
        self,
        super_stream: str,
        database: "str | sa.URL | sa.Engine",
        options: RouterOptions,
        *,
        broker: str | None = None,
        stream_url: str | None = None,
    ) -> None:
        self._core = RouterCore(super_stream, database, options, broker=broker, stream_url=stream_url)
        of_one_process(self, "a router")
        self._locks = AsyncNameLocks()
        self._generation = SharedRead(lambda: self._in_thread(ReadGeneration()))
        self._threads = ThreadPoolExecutor(THREADS, "relatum-router")
        self._has_threads = True

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._core.super_stream!r}>"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def session(self) -> str:
        """What this router's messages name it by in their header `relatum_placed`: 16 hexadecimal digits."""
        return self._core.publications.session

    def statistics(self) -> RouterStatistics:
        """What was published, and what is remembered. It asks nobody."""
        return self._core.statistics()

    async def open(self, source: Any = None) -> None:
        """Connect now, and not with the first message; see `Router.open`.

        Args:
            source: A URL or an aio-pika connection, where the router was given no URL.
        """
        await self._open(source, with_database=True)

    async def check(self, timeout_s: float | None = None) -> None:
        """See to it that all messages told of as published are in their order; see `Router.check`."""
        if timeout_s is not None:
            checked_seconds("timeout_s", timeout_s)
        for name in self._core.publications.unchecked.names():
            async with self._locks(name):
                await self._run(self._core.publications.settle(name, timeout_s))

    async def close(self) -> None:
        """Check what is not checked yet, and give the connections back; see `Router.close`."""
        try:
            if self._core.is_open:
                await self.check()
        finally:
            await asyncio.to_thread(self._core.close)
            self._has_threads = False
            # What waits for a thread is still done: it finds the router closed, and says so.
            self._threads.shutdown(wait=False)

    async def publish(
        self,
        channel: "AbstractChannel | AbstractExchange",
        message: "AbstractMessage",
        routing_key: str = "",
        **kwargs: Any,
    ) -> Any:
        """Publish a message; what that means is for routers of contexts and of sets to say."""
        raise NotImplementedError

    def exchange(self, channel: "AbstractChannel") -> "RouterExchange":
        """This router on one channel, in the form of an exchange: it has `publish(message, routing_key)`."""
        return RouterExchange(self, channel)

    # --- for routers of contexts and of sets ----------------------------------------------------------------------

    async def _publish_named(
        self,
        target: "AbstractChannel | AbstractExchange",
        name: str,
        message: "AbstractMessage",
        *,
        stream: str | None = None,
        **kwargs: Any,
    ) -> Published:
        """Publish a message of a name; see `Router._publish_named`.

        Args:
            target: An aio-pika channel with publisher confirms, or an exchange of one.
            name: The name.
            message: The message; not changed.
            stream: Where to place the name, if it is not placed yet.
            kwargs: Further arguments of `Exchange.publish`.
        """
        # Nothing is awaited before: tasks of a name queue in the order they called.
        async with self._locks(name):
            return await self._publish_locked(target, name, message, stream=stream, **kwargs)

    async def _publish_locked(
        self,
        target: "AbstractChannel | AbstractExchange",
        name: str,
        message: "AbstractMessage",
        *,
        stream: str | None = None,
        **kwargs: Any,
    ) -> Published:
        """Publish a message of a name whose lock is held; see `_publish_named`."""
        channel = channel_of(target)
        if not channel.publisher_confirms:
            raise ConfigurationError(
                "messages of a context or an affinity set need confirms: open the channel with "
                "publisher_confirms=True; nothing was sent"
            )
        if not self._core.is_open:
            await self._open(channel, with_database=True)
        await self._check_vhost(channel)
        exchange = await channel.get_exchange(self._core.super_stream, ensure=False)
        try:
            published = await self._run(
                self._core.publications.publish(name, stream=stream),
                partial(self._send, exchange, message, kwargs),
            )
        except Unsettled as error:
            raise unsettled(name, error.__cause__, partial(self._settle, name)) from error.__cause__
        self._core.published()
        return published

    async def _publish_unnamed(
        self,
        target: "AbstractChannel | AbstractExchange",
        message: "AbstractMessage",
        *,
        routing_key: str,
        **kwargs: Any,
    ) -> Any:
        """Publish a message of no name, by the rule; it never waits for the database."""
        partition = await self._unnamed_partition(target, routing_key)
        return await self._publish_to(partition, target, message, **kwargs)

    async def _unnamed_partition(self, target: "AbstractChannel | AbstractExchange", routing_key: str) -> PartitionRow:
        """Where a message of no name goes, by the rule."""
        channel = channel_of(target)
        if not self._core.has_layout:
            await self._open(channel, with_database=False)
        await self._check_vhost(channel)
        return self._core.unnamed(routing_key)

    async def _publish_to(
        self,
        partition: PartitionRow,
        target: "AbstractChannel | AbstractExchange",
        message: "AbstractMessage",
        **kwargs: Any,
    ) -> Any:
        """Publish a message of no name to a partition."""
        exchange = await channel_of(target).get_exchange(self._core.super_stream, ensure=False)
        result = await exchange.publish(message, partition.binding_key, **kwargs)
        if publishing.came_back(result):
            self._core.forget_layout()
        else:
            self._core.published_unnamed()
        return result

    async def _open(self, source: Any, *, with_database: bool) -> None:
        if hasattr(source, "get_underlay_channel"):
            source = (await source.get_underlay_channel()).connection
        elif hasattr(source, "transport") and source.transport is not None:
            source = source.transport.connection
        await in_thread(None, partial(self._core.open, source, with_database=with_database))

    async def _check_vhost(self, channel: Any) -> None:
        self._core.check_vhost(vhost_of((await channel.get_underlay_channel()).connection))

    # --- steps ----------------------------------------------------------------------------------------------------

    async def _run(self, steps: Steps[T], send: Any = None) -> T:
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
            with contextlib.suppress(Exception):
                await task
            raise

    async def _send(self, exchange: Any, message: "AbstractMessage", kwargs: dict[str, Any], request: Send) -> Any:
        own: Any = copy.copy(message)
        own.headers = self._core.headers_for(request, message.headers)
        placement = request.placement
        try:
            result = await exchange.publish(own, placement.binding_key, **{**kwargs, "mandatory": True})
        except PublishOutcomeUnknown as error:
            sent = Sent(placement.name, placement.stream, request.placed, request.as_of)
            error.settle = partial(self._settle_unknown, error.settle, sent)
            raise
        if publishing.came_back(result):
            raise PublishUnroutable(
                f"the message of {placement.name!r} came back: {placement.stream!r} is not bound any more",
                in_stream=False,
            )
        return result

    async def _settle(self, name: str, timeout_s: float | None = None, *, streams: tuple[str, ...] = ()) -> Places:
        """Wait until a message counts that the broker has; see `Router._settle`."""
        async with self._locks(name):
            try:
                await self._run(self._core.publications.settle(name, timeout_s))
            except RelatumError as error:
                raise unsettled(name, error, partial(self._settle, name)) from error
        return ()

    async def _settle_unknown(
        self, found: Any, sent: Sent, timeout_s: float | None = None, *, streams: tuple[str, ...] = ()
    ) -> Places:
        """Find out about a message whose confirm did not come; see `Router._settle_unknown`."""
        places: Places = await found(timeout_s, streams=streams or (sent.stream,))
        if await self._run(self._core.publications.counts(sent)):
            return places
        raise rejected(sent)


class RouterExchange:
    """An asyncio router on one aio-pika channel, in the form of an exchange."""

    def __init__(self, router: AsyncRouter, channel: Any) -> None:
        self.router = router
        self.channel = channel

    async def publish(self, message: "AbstractMessage", routing_key: str = "", **kwargs: Any) -> Any:
        """Publish as the router's own `publish` does."""
        return await self.router.publish(self.channel, message, routing_key, **kwargs)
