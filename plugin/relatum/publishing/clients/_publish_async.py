"""Publishing with a receipt through aio-pika."""

import copy
from typing import TYPE_CHECKING, Any

from relatum.errors import ConfigurationError, PublishUnroutable
from relatum.publishing._interception import Interception
from relatum.publishing._locate import Sent
from relatum.publishing._receipt import AsyncReceipt
from relatum.publishing.clients._publish import receipt_header
from relatum.superstreams import TargetExchange

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
        from relatum.publishing.clients import _faststream as _faststream

        return await _faststream.with_receipt(target, message, routing_key, mandatory=mandatory, **kwargs)
    return await _of_aio_pika(target, message, routing_key, mandatory, kwargs)


async def _of_aio_pika(
    target: Any, message: Any, routing_key: str, mandatory: bool, kwargs: dict[str, Any]
) -> AsyncReceipt:
    from relatum.publishing.clients import _aio_pika as _aio_pika

    if isinstance(target, TargetExchange):
        channel = target.channel
        name, routing_key = await target.target.destination_async(channel, message, routing_key)
        target = await channel.get_exchange(name, ensure=False)
    exchange, interception = intercepted_exchange(target)
    if not isinstance(getattr(exchange, "name", None), str):
        raise ConfigurationError(
            f"no receipt tells of a {type(exchange).__name__}: publish with it itself; nothing was sent"
        )
    interception.require_database()
    channel = exchange.channel
    if not channel.publisher_confirms:
        raise ConfigurationError("a receipt needs confirms: open the channel with publisher_confirms=True")
    underlay = await channel.get_underlay_channel()
    await interception.agreed()
    stamper = _aio_pika.stamper_of(interception, underlay)
    stamp = _aio_pika.stamped(stamper, message.properties, message.body, receipt_header(message.message_id))
    ours: Any = copy.copy(message)
    ours.headers = stamp.headers
    ours.message_id = stamp.message_id
    sent = Sent.of(exchange.name, routing_key, stamp.message_id, stamp.headers, message.body)
    result = await exchange.publish(ours, routing_key, mandatory=mandatory, **kwargs)
    if _aio_pika.came_back(result):
        raise PublishUnroutable(f"message {stamp.message_id} came back: nothing is bound for it", in_stream=False)
    return AsyncReceipt(sent, interception.locator)


def intercepted_exchange(target: Any) -> tuple[Any, Interception]:
    """The exchange that is meant, and the interception of its connection."""
    from relatum.publishing.clients import _aio_pika as _aio_pika

    exchange: Any = getattr(target, "default_exchange", None) or target
    if not hasattr(exchange, "publish"):
        raise ConfigurationError(
            f"target is an exchange or a channel of an intercepted aio-pika connection, not {type(target).__name__}"
        )
    interception = getattr(getattr(exchange, "channel", None), _aio_pika.CHANNEL_ATTRIBUTE, None)
    if not isinstance(interception, Interception) or not interception.active:
        raise ConfigurationError("this channel's connection is not intercepted: relatum.intercept(connection, …)")
    return exchange, interception
