"""Targets: given as the exchange of a publish, they decide where the message goes."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from relatum.errors import ConfigurationError


class Target:
    """Something to publish to that chooses the exchange and the routing key of each message.

    On an intercepted pika channel, `channel.basic_publish(target, routing_key, body, properties)` calls `publish`,
    which in the end calls the same channel's `basic_publish` with names; that is where the message is stamped and
    recorded. It works on channels that are not intercepted as well.

    On aio-pika, `target.exchange(channel).publish(message, routing_key)` calls `publish_async`.
    """

    def publish(
        self, channel: Any, body: bytes | str, properties: Any = None, *, routing_key: str = "", mandatory: bool = True
    ) -> Any:
        """Publish one message through a pika channel, to where it belongs.

        Args:
            channel: A pika channel of any kind, intercepted or not.
            body: The body.
            properties: As for `basic_publish`; not changed.
            routing_key: The message's key, where the target goes by one.
            mandatory: True (default): what no partition took comes back; with confirms that is an error, without them
                and on callback channels those are told who listen to returns. False: it is confirmed and dropped.
                A partition takes nothing once it is taken out, nor while RabbitMQ 3.10 starts.

        Returns:
            What `basic_publish` returned.

        Raises:
            InvalidInput: the message has no key; nothing was sent.
            SuperStreamNotFound, NotFound: there is no such super stream or partition; nothing was sent.
            BrokerUnavailable, AccessRefused: the broker could not be asked for the partitions; nothing was sent.
            ConfigurationError: this is no channel of pika.
            Exception: what `basic_publish` raises.
        """
        if not hasattr(channel, "basic_publish"):
            raise ConfigurationError(f"channel= takes a channel of pika, not {type(channel).__name__}")
        exchange, binding_key = self.destination(channel, body, properties, routing_key)
        return channel.basic_publish(exchange, binding_key, body, properties, mandatory)

    async def publish_async(self, channel: Any, message: Any, routing_key: str = "", **kwargs: Any) -> Any:
        """Publish one message through an aio-pika channel, to where it belongs.

        Args:
            channel: An aio-pika channel, or an exchange of one, intercepted or not.
            message: An aio-pika message; not changed.
            routing_key: The message's key, where the target goes by one.
            kwargs: Further arguments of `Exchange.publish`: `mandatory` (default there: True), `timeout`.

        Returns:
            What `Exchange.publish` returned.

        Raises:
            InvalidInput, SuperStreamNotFound, NotFound, BrokerUnavailable, AccessRefused: as `publish`.
            Exception: what `Exchange.publish` raises.
        """
        channel = channel_of(channel)
        exchange_name, binding_key = await self.destination_async(channel, message, routing_key)
        exchange = await channel.get_exchange(exchange_name, ensure=False)
        return await exchange.publish(message, binding_key, **kwargs)

    def destination(self, channel: Any, body: bytes | str, properties: Any, routing_key: str) -> tuple[str, str]:
        """The exchange and the routing key a pika message would be published by; for publishing with a receipt.

        Raises:
            ConfigurationError: this kind of target cannot tell: it does more than to publish one message.
        """
        raise ConfigurationError(f"a {type(self).__name__} gives no receipts: call its own publish(); nothing was sent")

    async def destination_async(self, channel: Any, message: Any, routing_key: str) -> tuple[str, str]:
        """The exchange and the routing key an aio-pika message would be published by; see `destination`."""
        raise ConfigurationError(f"a {type(self).__name__} gives no receipts: call its own publish(); nothing was sent")

    def exchange(self, channel: Any) -> "TargetExchange":
        """What takes this target's place where an aio-pika exchange is wanted: it has `publish`."""
        return TargetExchange(self, channel)


class TargetExchange:
    """A target on one aio-pika channel, in the form of an exchange."""

    def __init__(self, target: Target, channel: Any) -> None:
        self.target = target
        self.channel = channel_of(channel)

    async def publish(self, message: Any, routing_key: str = "", **kwargs: Any) -> Any:
        """Publish as `Exchange.publish` does; the target decides where the message goes."""
        return await self.target.publish_async(self.channel, message, routing_key, **kwargs)


def channel_of(given: Any) -> Any:
    """The aio-pika channel that is meant by it or by one of its exchanges.

    Raises:
        ConfigurationError: it is neither; nothing was sent.
    """
    # Not by the attribute `channel` at once: channels have one too, which warns.
    channel = given if hasattr(given, "get_underlay_channel") else getattr(given, "channel", None)
    if not hasattr(channel, "get_underlay_channel"):
        raise ConfigurationError(
            f"give an aio-pika channel, or an exchange of one, not {type(given).__name__}; nothing was sent"
        )
    return channel


class Outgoing(NamedTuple):
    """A message before it is published, as a function that names its key sees it.

    Attributes:
        body: The body.
        headers: The headers, empty where there are none.
        properties: pika's BasicProperties, None where there are none; an aio-pika message.
    """

    body: bytes
    headers: Mapping[str, Any]
    properties: Any
