"""Publishing with a receipt through aio-pika."""

import copy
from typing import TYPE_CHECKING, Any

from relatum.errors import ConfigurationError
from relatum.publishing._interception import ATTRIBUTE, Interception
from relatum.publishing._receipt import AsyncReceipt
from relatum.superstreams.targets import TargetExchange

if TYPE_CHECKING:
    from aio_pika.abc import AbstractChannel, AbstractExchange, AbstractMessage
    from faststream.rabbit import RabbitBroker


async def publish_async(
    target: "AbstractExchange | AbstractChannel | TargetExchange | RabbitBroker",
    message: "AbstractMessage | Any",
    routing_key: str = "",
    *,
    mandatory: bool = True,
    **kwargs: Any,
) -> AsyncReceipt:
    """Publish with a confirm and get a receipt, which gives the message's offsets once they are recorded.

    The twin of `relatum.publish` for aio-pika, with its errors; its arguments are those of `Exchange.publish`. With
    FastStream those of `RabbitBroker.publish`.

    Args:
        target: An exchange of an intercepted connection, or a channel, which means its default exchange; or
            `SuperStream.exchange(channel)`. Or an intercepted RabbitBroker of FastStream, which is started.
        message: The client's message, with FastStream whatever it publishes; not changed.
        routing_key: The routing key; with FastStream the stream.
        mandatory: True (default): a message that no queue is bound for is `PublishUnroutable`, whatever the channel's
            `on_return_raises`. False: the broker drops it and confirms.
        kwargs: Further arguments of the client's own method, such as `timeout`; FastStream's `headers`, `exchange`, ….

    Returns:
        The receipt: `await receipt.wait(timeout_s)`.

    Raises:
        ConfigurationError: as for `publish`, or the channel was opened with `publisher_confirms=False`; nothing was
            sent.
        PublishUnroutable, PublishNacked, PublishOutcomeUnknown: see `Receipt.wait`; `await error.settle()`.
    """
    if any(kind.__module__ == "faststream.rabbit.broker.broker" for kind in type(target).__mro__):
        from relatum.publishing import _faststream

        return await _faststream.with_receipt(target, message, routing_key, mandatory=mandatory, **kwargs)
    from relatum.publishing import _aio_pika

    if isinstance(target, TargetExchange):
        channel = target.channel
        name, routing_key = await target.target.destination_async(channel, message, routing_key)
        target = await channel.get_exchange(name, ensure=False)
    exchange, interception = intercepted_exchange(target)
    if not isinstance(getattr(exchange, "name", None), str):
        raise ConfigurationError(
            f"no receipt tells of a {type(exchange).__name__}: publish with it itself; nothing was sent"
        )
    ours: Any = copy.copy(message)

    async def publish(message_id: str, headers: dict[str, Any]) -> Any:
        ours.message_id, ours.headers = message_id, headers
        return await exchange.publish(ours, routing_key, mandatory=mandatory, **kwargs)

    return await _aio_pika.with_receipt(interception, message.message_id, message.headers, publish)


def intercepted_exchange(target: Any) -> tuple[Any, Interception]:
    """The exchange that is meant, and the interception of its connection."""
    exchange: Any = getattr(target, "default_exchange", None) or target
    if not hasattr(exchange, "publish"):
        raise ConfigurationError(
            f"target is an exchange or a channel of an intercepted aio-pika connection, not {type(target).__name__}"
        )
    interception = getattr(getattr(exchange, "channel", None), ATTRIBUTE, None)
    if not isinstance(interception, Interception) or not interception.active:
        raise ConfigurationError("this channel's connection is not intercepted: relatum.intercept(connection, …)")
    return exchange, interception
