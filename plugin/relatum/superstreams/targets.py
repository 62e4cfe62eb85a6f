"""Targets: objects to which you publish in place of an exchange, and which route each message."""

import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

from relatum.errors import ConfigurationError


class Target:
    """A destination that chooses the exchange and the routing key of each message.

    On an intercepted pika channel, `channel.basic_publish(target, routing_key, body, properties)` calls `publish`. That
    calls the channel's `basic_publish` again, with the chosen exchange and routing key, as for any intercepted message.
    You can also call `publish` with channels that are not intercepted.

    On aio-pika, `target.exchange(channel).publish(message, routing_key)` calls `publish_async`.
    """

    def publish(
        self, channel: Any, body: bytes | str, properties: Any = None, *, routing_key: str = "", mandatory: bool = True
    ) -> Any:
        """Publish one message over a pika channel.

        Args:
            channel: A pika channel of any kind, intercepted or not.
            body: The body.
            properties: As for `basic_publish`; not changed.
            routing_key: The message's key, if the target routes by keys.
            mandatory: True (default): the broker returns a message that it cannot route to a partition. With confirms
                this is an error; without confirms, and on callback channels, the return callbacks get the message.
                False: the broker confirms and drops it. A partition is not routable once it is unbound, or while
                RabbitMQ 3.10 starts.

        Returns:
            The result of `basic_publish`.

        Raises:
            InvalidInput: The message has no valid key; nothing was sent.
            SuperStreamNotFound, SuperStreamConflict: See `describe_super_stream`; nothing was sent.
            BrokerUnavailable, AccessRefused: The broker could not be queried for the partitions; nothing was sent.
            ConfigurationError: The channel is not a pika channel; nothing was sent.
            Exception: Any error of `basic_publish`.
        """
        if not hasattr(channel, "basic_publish"):
            raise ConfigurationError(f"channel= takes a pika channel, not {type(channel).__name__}; nothing was sent")
        exchange, binding_key = self.destination(channel, body, properties, routing_key)
        return channel.basic_publish(exchange, binding_key, body, properties, mandatory)

    async def publish_async(self, channel: Any, message: Any, routing_key: str = "", **kwargs: Any) -> Any:
        """Publish one message over an aio-pika channel.

        Args:
            channel: An aio-pika channel, or an exchange of one, intercepted or not.
            message: An aio-pika message; not changed.
            routing_key: The message's key, if the target routes by keys.
            kwargs: Other arguments of `Exchange.publish`: `mandatory` (its default: True), `timeout`.

        Returns:
            The result of `Exchange.publish`.

        Raises:
            InvalidInput, SuperStreamNotFound, SuperStreamConflict, BrokerUnavailable, AccessRefused: As `publish`.
            Exception: Any error of `Exchange.publish`.
        """
        channel = channel_of(channel)
        exchange_name, binding_key = await self.destination_async(channel, message, routing_key)
        exchange = await channel.get_exchange(exchange_name, ensure=False)
        return await exchange.publish(message, binding_key, **kwargs)

    def destination(self, channel: Any, body: bytes | str, properties: Any, routing_key: str) -> tuple[str, str]:
        """Return the exchange and the routing key for a pika message, to publish it with a receipt.

        Raises:
            ConfigurationError: This type of target gives no receipts, because it does more than publish one message.
        """
        raise ConfigurationError(f"a {type(self).__name__} gives no receipts: call its publish(); nothing was sent")

    async def destination_async(self, channel: Any, message: Any, routing_key: str) -> tuple[str, str]:
        """Return the exchange and the routing key for an aio-pika message; see `destination`."""
        raise ConfigurationError(f"a {type(self).__name__} gives no receipts: call its publish(); nothing was sent")

    def exchange(self, channel: Any) -> "TargetExchange":
        """Return an object with the `publish` of an aio-pika exchange, which publishes to this target."""
        return TargetExchange(self, channel)


class TargetExchange:
    """Publishes to a target or an asyncio router over one aio-pika channel, by the same `publish` as an exchange."""

    def __init__(self, target: Any, channel: Any) -> None:
        self.target = target
        self.channel = channel_of(channel)

    async def publish(self, message: Any, routing_key: str = "", **kwargs: Any) -> Any:
        """Publish one message, which the target routes. Returns and raises as `Target.publish_async`."""
        return await self.target.publish_async(self.channel, message, routing_key, **kwargs)


def channel_of(given: Any) -> Any:
    """Return an aio-pika channel: the given one, or that of the given exchange."""
    # The attribute `channel` comes second, because channels have it, too, with a deprecation warning.
    channel = given if hasattr(given, "get_underlay_channel") else getattr(given, "channel", None)
    if not hasattr(channel, "get_underlay_channel"):
        raise ConfigurationError(f"pass an aio-pika channel or exchange, not {type(given).__name__}; nothing was sent")
    return channel


async def aiormq_connection(channel: Any) -> Any:
    """Return the aiormq connection of an aio-pika channel. If it is lost, raise at once, as aio-pika's `publish`."""
    if channel.is_closed:
        from aio_pika.exceptions import ChannelInvalidStateError  # aio-pika is optional

        raise ChannelInvalidStateError(f"{channel!r} is closed; nothing was sent")
    # This waits, without a limit, until a lost connection is open again.
    return (await channel.get_underlay_channel()).connection


def was_returned(result: Any) -> bool:
    """Return whether the result of an aio-pika publish is a message that the broker returned."""
    aiormq = sys.modules.get("aiormq.abc")  # Optional. A caller that has such a result has imported it.
    return aiormq is not None and isinstance(result, aiormq.DeliveredMessage)


class Outgoing(NamedTuple):
    """A message to publish, as passed to the function `route_by`.

    Attributes:
        body: The body.
        headers: The headers; empty if there are none.
        properties: pika's BasicProperties, or None; with aio-pika, the message.
    """

    body: bytes
    headers: Mapping[str, Any]
    properties: Any
