"""What routers do differently with threads and with asyncio: how they are called, and who performs their steps."""

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from pika import BasicProperties

from relatum.checks import shown
from relatum.contexts._options import RouterOptions
from relatum.contexts._statistics import RouterStatistics
from relatum.contexts.placement._placement_core import CLOSED, RouterCore
from relatum.contexts.placement._publication_requests import (
    Adopt,
    PublicationRequest,
    ReadGeneration,
    Send,
    Sleep,
    Steps,
    T,
)
from relatum.contexts.placement._sending import AsyncSending, Sending
from relatum.errors import ConfigurationError, UsedAfterClose
from relatum.processes import of_one_process
from relatum.steps import async_run, run
from relatum.store.database import AnyDatabase
from relatum.superstreams import Target
from relatum.waiting import in_thread

if TYPE_CHECKING:
    from aio_pika.abc import AbstractChannel, AbstractExchange, AbstractMessage

THREADS: Final = 8
"""Threads for what blocks: placing, reading what changed, and looking for strays."""


class NameLocks:
    """A lock for each name that is in use."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: dict[str, tuple[threading.Lock, int]] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Hold the name's lock."""
        with self._lock:
            lock, users = self._held.get(name) or (threading.Lock(), 0)
            self._held[name] = (lock, users + 1)
        try:
            with lock:
                yield
        finally:
            with self._lock:
                users = self._held[name][1] - 1
                if users:
                    self._held[name] = (lock, users)
                else:
                    del self._held[name]


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


class _Face:
    """What both are."""

    def __init__(
        self,
        super_stream: str,
        database: "AnyDatabase",
        options: RouterOptions,
        kind: type[RouterOptions],
        *,
        broker: str | None,
        stream_url: str | None,
    ) -> None:
        if not isinstance(options, kind):
            raise ConfigurationError(f"options= takes {kind.__name__}, not {shown(options)}")
        self._core = RouterCore(super_stream, database, options, broker=broker, stream_url=stream_url)
        of_one_process(self, "a router")

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self._core.super_stream!r}>"

    @property
    def session(self) -> str:
        """What this router's messages name it by in their header `relatum_placed`: 16 hexadecimal digits."""
        return self._core.publications.name

    def statistics(self) -> RouterStatistics:
        """What was published, and what is remembered. It asks nobody."""
        return self._core.statistics()


class RouterFace(_Face, Target):
    """A router for pika's channels, used by threads."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._locks = NameLocks()

    def publish(
        self,
        channel: Any,
        body: bytes | str,
        properties: BasicProperties | None = None,
        *,
        routing_key: str = "",
        mandatory: bool = True,
    ) -> Any:
        """Publish a message where its context, or affinity set, is; of a context, return when it is in its order.

        Args:
            channel: A BlockingChannel of pika in confirm mode, intercepted or not. For messages of no context or set
                any channel of pika.
            body: The body.
            properties: The properties; the headers that name the context, or set, are among their headers. Not changed.
            routing_key: Of messages of none: their key, if any, to balance by. None is sent by it.
            mandatory: Of messages of none: whether one that nothing is bound for comes back. The others always do.

        Returns:
            What `basic_publish` returned.

        Raises:
            ConfigurationError: the channel has no confirms, or is in another virtual host, or the router is closed;
                nothing was sent.
            InvalidInput: the headers make no sense, or the name is no text of 1 to 1,024 bytes; nothing was sent.
            PredecessorNotFound: the message that was named is not known, or not yet; nothing was sent.
            ContextMoving: a move did not end within `timeout_s`; nothing was sent, and it may be repeated.
            TooManyOpenSets: nothing was sent; it may be repeated.
            DatabaseUnavailable, BrokerUnavailable: nothing was sent.
            SuperStreamNotFound, SuperStreamConflict: nothing was sent.
            PublishOutcomeUnknown: it may be in its context's order, or in its set. `settle(timeout_s)` finds out, and
                helps it in where a move came between. Nothing else of the name is published by this router before.
            Exception: what `basic_publish` raises.
        """
        return self._publish(Sending(channel, body, properties, routing_key, mandatory))

    def _publish(self, sending: Sending) -> Any:
        raise NotImplementedError

    async def publish_async(self, channel: Any, message: Any, routing_key: str = "", **kwargs: Any) -> Any:
        """Nothing is published with aio-pika here.

        Raises:
            ConfigurationError: always.
        """
        raise ConfigurationError(f"a {type(self).__name__} publishes with pika: use Async{type(self).__name__}")

    def _connect(self, source: Any, *, with_database: bool = True) -> None:
        self._core.open(source, with_database=with_database)

    def _end(self) -> None:
        self._core.close()

    def _run(self, steps: Steps[T], send: Callable[[Send], Any] | None = None) -> T:
        """Perform steps until they return."""
        return run(steps, lambda request: self._perform(request, send))

    def _perform(self, request: PublicationRequest, send: Any) -> Any:
        if isinstance(request, Send):
            return send(request)
        if isinstance(request, Sleep):
            return time.sleep(request.seconds)
        return self._core.perform(request)


class AsyncRouterFace(_Face):
    """A router for aio-pika's channels, used in one event loop. What blocks is done by threads; looks are shared."""

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._locks = AsyncNameLocks()
        self._generation = SharedRead(lambda: self._in_thread(ReadGeneration()))
        self._threads = ThreadPoolExecutor(THREADS, "relatum-router")
        self._has_threads = True

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
        self._threads.shutdown(wait=False)

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


class RouterExchange:
    """An asyncio router on one aio-pika channel, in the form of an exchange."""

    def __init__(self, router: AsyncRouterFace, channel: Any) -> None:
        self.router = router
        self.channel = channel

    async def publish(self, message: "AbstractMessage", routing_key: str = "", **kwargs: Any) -> Any:
        """Publish as the router's own `publish` does."""
        return await self.router.publish(self.channel, message, routing_key, **kwargs)
