"""Publishing to serialization contexts: each message goes to the partition its context is in."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

import sqlalchemy as sa
from pika import BasicProperties

from relatum.checks import as_options, checked_choice, checked_count
from relatum.contexts.placement._async_placement_router import AsyncRouter
from relatum.contexts.placement._placement_router import Router
from relatum.contexts.placement._router_options import RouterOptions
from relatum.contexts.serial.moving._abandoned import attend_for
from relatum.headers import CONTEXT_HEADER
from relatum.limits import INTEGER_MAX
from relatum.superstreams import Balance, BalanceName

if TYPE_CHECKING:
    from aio_pika.abc import AbstractChannel, AbstractExchange, AbstractMessage


class ContextRouter(Router):
    """Publishes messages to the partitions their serialization contexts are in.

    A context manager; threads may share one.

        with relatum.ContextRouter("orders", DATABASE_URL) as router:
            router.publish(channel, body, BasicProperties(headers={"serialization_context": account}))

    When `publish` returns, the message is in its context's order, behind all that was published before it, and every
    serial consumer sees it there once, wherever the context is moved, and however long this process slept in between.
    That needs a look at the database after the broker's confirm, so that costs a round trip to PostgreSQL.

    It can be given as the exchange on an intercepted channel: `channel.basic_publish(router, "", body, properties)`.
    One message of a context is under way at a time; threads with channels of their own publish different contexts side
    by side. A message without the header is published to any partition and waits for no database.

    Args:
        super_stream: The super stream's name.
        database: PostgreSQL's URL, or an engine, which stays the caller's.
        broker: The broker's URL. None (default): that of the channel first published on.
        stream_url: Where the stream protocol answers, if not 120 ports below AMQP's.
        header: The header that names a message's context. All who use the super stream must agree.
        balance: Where a context is placed by its first message. "hash" (default): by its name, as RabbitMQ's stream
            clients route keys; or "round_robin", "least_loaded", "weighted" or a function. Partitions that are added
            later move no context.
        check_s: Seconds for which one look at the database serves the confirms after it. 0 (default): each message is
            checked before `publish` returns. Above, up to 0.04: `publish` mostly returns at once with the confirm.
            Should this process die then, while the clock of its machine stood still across a move, a message told of
            as published may be in no consumer's order.
        timeout_s: Seconds to wait for a move to end, and for the database where it is away. 0: not at all.
        contexts_max: Contexts whose partitions are remembered; others are read again when they are used.
        when_database_away: "wait" (default): up to `timeout_s` for a database that is away. "fail": not at all.

    Raises:
        ConfigurationError: an option cannot be one.
        InvalidInput: the super stream's name cannot be one.
    """

    def __init__(
        self,
        super_stream: str,
        database: "str | sa.URL | sa.Engine",
        *,
        broker: str | None = None,
        stream_url: str | None = None,
        header: str = CONTEXT_HEADER,
        balance: BalanceName | Balance = "hash",
        check_s: float = 0.0,
        timeout_s: float = 10.0,
        contexts_max: int = 100_000,
        when_database_away: Literal["wait", "fail"] = "wait",
    ) -> None:
        options = _options(header, balance, check_s, timeout_s, contexts_max, when_database_away)
        super().__init__(super_stream, database, options, broker=broker, stream_url=stream_url)
        attend_for(self._core)

    def publish(
        self,
        channel: Any,
        body: bytes | str,
        properties: BasicProperties | None = None,
        *,
        routing_key: str = "",
        mandatory: bool = True,
    ) -> Any:
        """Publish a message where its context is, and return when it is in its context's order.

        Args:
            channel: A BlockingChannel of pika in confirm mode, intercepted or not. For messages without a context any
                channel of pika.
            body: The body.
            properties: The properties; the header that names the context is among their headers. Not changed.
            routing_key: Of messages without a context: their key, if any, to balance by.
            mandatory: Of messages without a context: whether one that nothing is bound for comes back. The others
                always do.

        Returns:
            What `basic_publish` returned.

        Raises:
            ConfigurationError: the channel has no confirms, or is in another virtual host, or the router is closed;
                nothing was sent.
            InvalidInput: the context's name is no text of 1 to 1,024 bytes; nothing was sent.
            ContextMoving: a move of the context did not end within `timeout_s`; nothing was sent.
            DatabaseUnavailable, BrokerUnavailable: nothing was sent.
            SuperStreamNotFound, SuperStreamConflict: nothing was sent.
            PublishOutcomeUnknown: it may be in its context's order. `settle(timeout_s)` finds out, and helps it in
                where a move came between. Nothing else of the context is published by this router before.
            Exception: what `basic_publish` raises.
        """
        name = self._core.name_of(properties.headers if properties else None)
        if name is None:
            return self._publish_unnamed(channel, body, properties, routing_key=routing_key, mandatory=mandatory)
        return self._publish_named(channel, name, body, properties).result


class AsyncContextRouter(AsyncRouter):
    """Publishes messages to the partitions their serialization contexts are in: the twin of `ContextRouter`.

        async with relatum.AsyncContextRouter("orders", DATABASE_URL) as router:
            await router.publish(channel, Message(body, headers={"serialization_context": account}))

    Tasks publish side by side; those of one context go one after the other, in the order they called. One look at the
    database serves all whose confirms came before it. Arguments are as of `ContextRouter`.
    """

    def __init__(
        self,
        super_stream: str,
        database: "str | sa.URL | sa.Engine",
        *,
        broker: str | None = None,
        stream_url: str | None = None,
        header: str = CONTEXT_HEADER,
        balance: BalanceName | Balance = "hash",
        check_s: float = 0.0,
        timeout_s: float = 10.0,
        contexts_max: int = 100_000,
        when_database_away: Literal["wait", "fail"] = "wait",
    ) -> None:
        options = _options(header, balance, check_s, timeout_s, contexts_max, when_database_away)
        super().__init__(super_stream, database, options, broker=broker, stream_url=stream_url)
        attend_for(self._core)

    async def publish(
        self,
        channel: "AbstractChannel | AbstractExchange",
        message: "AbstractMessage",
        routing_key: str = "",
        **kwargs: Any,
    ) -> Any:
        """Publish a message where its context is, and return when it is in its context's order.

        Cancelling it leaves open whether the message was published.

        Args:
            channel: An aio-pika channel with publisher confirms, or an exchange of one; intercepted or not.
            message: The message; the header that names the context is among its headers. Not changed.
            routing_key: Of messages without a context: their key, if any, to balance by.
            kwargs: Further arguments of `Exchange.publish`, such as `timeout`.

        Returns:
            What `Exchange.publish` returned.

        Raises:
            ConfigurationError, InvalidInput, ContextMoving, DatabaseUnavailable, BrokerUnavailable,
            SuperStreamNotFound, SuperStreamConflict: nothing was sent; see `ContextRouter.publish`.
            PublishUnroutable: the partition is not bound any more; it is in no stream.
            PublishOutcomeUnknown: it may be in its context's order: `await error.settle()`.
            Exception: what `Exchange.publish` raises.
        """
        headers: Mapping[str, Any] | None = message.headers
        name = self._core.name_of(headers)
        if name is None:
            return await self._publish_unnamed(channel, message, routing_key=routing_key, **kwargs)
        return (await self._publish_named(channel, name, message, **kwargs)).result


def _options(
    header: str, balance: BalanceName | Balance, check_s: float, timeout_s: float, contexts_max: int, away: Any
) -> RouterOptions:
    with as_options():
        checked_choice("when_database_away", away, ("wait", "fail"))
        checked_count("contexts_max", contexts_max, most=INTEGER_MAX)
    return RouterOptions(
        kind="context",
        header=header,
        balance=balance,
        check_s=check_s,
        timeout_s=timeout_s,
        names_max=contexts_max,
        when_database_away=away,
    )
