"""The public routers, for pika and aio-pika: each message goes to the partition of its context or affinity set."""

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from pika import BasicProperties

from relatum.common.closing import AsyncClosing, Closing
from relatum.common.waiting import Threads, in_thread
from relatum.contexts._context_options import AffinityOptions, ContextOptions
from relatum.contexts._placement_cache import NameLocks
from relatum.contexts._router_flow import (
    AffinityFlow,
    AioPikaCall,
    ContextFlow,
    Options,
    PikaCall,
    RouterBase,
    T,
    run_blocking,
)
from relatum.superstreams import Target
from relatum.superstreams.targets import TargetExchange, aiormq_connection

if TYPE_CHECKING:
    from aio_pika.abc import AbstractChannel, AbstractExchange, AbstractMessage

THREADS: Final = 32
"""The most threads for blocking calls of an asyncio router: placements, refreshes, waits for moves."""


class Router(RouterBase[Options], Target, Closing):
    """Publishes messages with pika, to the partition of their context or set, or by the balance rule. Thread-safe."""

    def open(self, source: Any = None) -> None:
        """Connect before the first message. Idempotent.

        Args:
            source: A URL, or a channel or connection of the client. Not used if the router has a `broker`.

        Raises:
            ConfigurationError: the router has no broker, or is closed.
            SuperStreamNotFound: the broker has no such super stream.
            SuperStreamConflict: another header names the super stream's contexts or sets, or the sets have another
                `idle_s`.
            BrokerUnavailable, DatabaseUnavailable, AccessRefused, SchemaMissing: a server cannot be used.
        """
        self._core.open(source)

    def check(self, timeout_s: float | None = None) -> None:
        """Wait until every message published so far is known to be in order.

        Args:
            timeout_s: Seconds for each context or set with unchecked messages. None (default): the option `timeout_s`.

        Raises:
            ContextMoving: a move did not end in time.
            DatabaseUnavailable, BrokerUnavailable: some messages are not checked yet; call `check` again.
        """
        run_blocking(self._check, timeout_s)

    def close(self) -> None:
        """Call `check`, and close the connections. An affinity router first closes the sets that have ended.

        Raises:
            ContextMoving, DatabaseUnavailable, BrokerUnavailable: see `check`; the connections are closed.
        """
        run_blocking(self._close)

    def publish(
        self,
        channel: Any,
        body: bytes | str,
        properties: BasicProperties | None = None,
        *,
        routing_key: str = "",
        mandatory: bool = True,
    ) -> Any:
        """Publish a message to the partition of its context or affinity set.

        For a context, the call returns when the message is known to be in order.

        Args:
            channel: A pika BlockingChannel in confirm mode, intercepted or not. Messages without a context or set may
                use any pika channel.
            body: The body.
            properties: The properties, whose headers name the context or set. They are not changed.
            routing_key: For messages without a context or set: a key for the balance rule, or "" (default).
            mandatory: For messages without a context or set: whether the broker returns them if they are unroutable.
                Default: True. Messages with a context or set are always mandatory.

        Returns:
            The result of `basic_publish`.

        Raises:
            ConfigurationError: the channel has no confirms or another virtual host, or the router is closed; nothing
                was sent.
            InvalidInput: the headers contradict each other, or the name is not text of 1 to 1,024 bytes; nothing was
                sent.
            PredecessorNotFound: the predecessor is unknown, or not recorded yet; nothing was sent.
            ContextMoving: a move did not end within `timeout_s`; nothing was sent; safe to repeat.
            TooManyOpenSets: `open_sets_max` sets are open; nothing was sent; safe to repeat.
            DatabaseUnavailable, BrokerUnavailable: a server does not answer; nothing was sent; safe to repeat.
            SuperStreamNotFound, SuperStreamConflict: see `open`; nothing was sent.
            PublishOutcomeUnknown: the message may be in its context or set. `error.settle(timeout_s)` finds the
                outcome. If the broker confirmed the message, `settle` adopts it if a move overtook it; until then, this
                router publishes nothing else of that context or set. Otherwise, publish a rejected message again.
            Exception: errors of `basic_publish`.
        """
        return run_blocking(self._publish, PikaCall(channel, body, properties, routing_key, mandatory))


class ContextRouter(ContextFlow, Router[ContextOptions]):
    """Publishes messages to the partitions of their serialization contexts.

    A context manager; threads may share one.

        with relatum.ContextRouter("orders", DATABASE_URL) as router:
            router.publish(channel, body, BasicProperties(headers={"serialization_context": account}))

    When `publish` returns, the message is in its context's order, after all earlier messages. Every serial consumer
    gets it in that order, wherever the context moves, even if this process was suspended during the call. While
    messages are published, a thread refreshes the cached placements from the database. A refresh validates the messages
    confirmed within 0.2 s after its start. Without a recent refresh, the router refreshes after the broker's confirm,
    which costs a round trip to PostgreSQL.

    On an intercepted channel, a router can replace the exchange: `channel.basic_publish(router, "", body, ...)`. The
    router publishes messages of one context one at a time. Threads with their own channels publish different contexts
    at the same time. The balance rule places a message without the header; this needs no database.

    Args:
        super_stream: The super stream's name.
        database: PostgreSQL's URL, or a `Database`, which the caller closes.
        options: A `ContextOptions`. None (default): the default options.
        broker: The broker's URL, or a `Broker`. None (default): the broker of the first channel published on.

    Raises:
        ConfigurationError: an option or a URL is invalid.
        InvalidInput: the super stream's name is invalid.
    """


class AffinityRouter(AffinityFlow, Router[AffinityOptions]):
    """Publishes all messages of an affinity set to the partition of its first message.

    A context manager; threads may share one, each with its own channel.

        with relatum.AffinityRouter("invoices", DATABASE_URL, AffinityOptions(balance="least_loaded")) as router:
            router.publish(channel, body, BasicProperties(headers={"affinity_set": "invoice 17"}))

    A header names the set. The balance rule chooses the partition of the set's first message, and the database stores
    the choice atomically, so that all publishers agree. Later messages use the cached partition. A message with the
    header `affinity_last: True` ends its set. A message with `affinity_predecessor` joins the set of another message.
    The balance rule places messages without these headers; they never wait for PostgreSQL.

    On an intercepted channel, a router can replace the exchange: `channel.basic_publish(router, "", body, ...)`.
    Arguments and errors are those of `ContextRouter`; `options` are `AffinityOptions`.
    """


class AsyncRouter(RouterBase[Options], AsyncClosing):
    """`Router` for aio-pika's channels, for one event loop. Blocking calls run in threads; messages share refreshes."""

    def _create_parts(self) -> None:
        self._locks = NameLocks(asyncio.Lock)
        self._threads = Threads(THREADS, "relatum-router")
        self._loop: asyncio.AbstractEventLoop | None = None

    async def _call(self, function: Callable[..., T], *args: Any, to_end: bool = True) -> T:
        return await in_thread(self._threads, function, *args, to_end=to_end)

    async def _end(self, function: Callable[[], None]) -> None:
        # Use other threads than `_call`: closing must not queue behind messages that wait for moves.
        await in_thread(None, function)

    def _for_application(self, flow: Callable[..., Coroutine[Any, Any, Any]], *args: Any) -> Callable[..., Any]:
        return partial(flow, *args)

    def _settle_set(self, name: str) -> None:
        # Only the loop can take the locks of names.
        if self._loop is not None:
            asyncio.run_coroutine_threadsafe(self._settle_name(name), self._loop).result()

    async def open(self, source: Any = None) -> None:
        """Connect before the first message; see `ContextRouter.open`.

        `source` is a URL, or an aio-pika connection or channel.
        """
        if hasattr(source, "get_underlay_channel"):
            source = await aiormq_connection(source)
        elif getattr(source, "transport", None) is not None:
            source = source.transport.connection
        await self._call(self._core.open, source, to_end=False)

    async def check(self, timeout_s: float | None = None) -> None:
        """Wait until every message published so far is known to be in order; see `ContextRouter.check`."""
        await self._check(timeout_s)

    async def close(self) -> None:
        """Call `check`, and close the connections; see `ContextRouter.close`."""
        await self._close()

    async def publish(
        self,
        channel: "AbstractChannel | AbstractExchange",
        message: "AbstractMessage",
        routing_key: str = "",
        **kwargs: Any,
    ) -> Any:
        """Publish a message to the partition of its context or affinity set.

        For a context, the call returns when the message is known to be in order. If the call is cancelled, the message
        may or may not have been published.

        Args:
            channel: An aio-pika channel with publisher confirms, or an exchange of one; intercepted or not.
            message: The message, whose headers name the context or set. It is not changed.
            routing_key: For messages without a context or set: a key for the balance rule, or "" (default).
            kwargs: Further arguments of `Exchange.publish`, such as `timeout`.

        Returns:
            The result of `Exchange.publish`.

        Raises: the errors of `ContextRouter.publish`. After `PublishOutcomeUnknown`, `await error.settle()`.
        """
        self._loop = asyncio.get_running_loop()
        return await self._publish(AioPikaCall(channel, message, routing_key, kwargs))

    publish_async = publish
    destination_async = Target.destination_async

    def exchange(self, channel: "AbstractChannel") -> TargetExchange:
        """Return an object with an exchange's `publish(message, routing_key)`, which publishes to this router."""
        return TargetExchange(self, channel)


class AsyncContextRouter(ContextFlow, AsyncRouter[ContextOptions]):
    """Publishes messages to the partitions of their serialization contexts: `ContextRouter` for asyncio.

        async with relatum.AsyncContextRouter("orders", DATABASE_URL) as router:
            await router.publish(channel, Message(body, headers={"serialization_context": account}))

    Tasks publish at the same time; the router publishes messages of one context one at a time, in the order of the
    calls. Arguments and guarantees are those of `ContextRouter`.
    """


class AsyncAffinityRouter(AffinityFlow, AsyncRouter[AffinityOptions]):
    """Publishes all messages of an affinity set to one partition: `AffinityRouter` for asyncio.

        async with relatum.AsyncAffinityRouter("invoices", DATABASE_URL) as router:
            await router.publish(channel, Message(body, headers={"affinity_set": "invoice 17"}))

    Tasks publish at the same time; the router publishes messages of one set one at a time, in the order of the calls.
    The arguments are those of `AffinityRouter`.
    """
