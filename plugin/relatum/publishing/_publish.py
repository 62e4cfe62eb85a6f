"""Publishing with a receipt, through pika or aio-pika."""

import copy
from collections.abc import Mapping
from time import time_ns
from typing import TYPE_CHECKING, Any

from pika import BasicProperties
from pika.adapters.blocking_connection import BlockingChannel
from pika.channel import Channel
from pika.exceptions import ChannelClosedByBroker
from pika.frame import Method
from pika.spec import Basic

from relatum.common.checks import checked_body
from relatum.common.headers import RECEIPT_HEADER, TIME_HEADER
from relatum.common.uuid7 import uuid7
from relatum.errors import (
    ConfigurationError,
    PublishError,
    PublishNacked,
    PublishOutcomeUnknown,
    PublishRejected,
    PublishUnroutable,
)
from relatum.publishing._interception import ATTRIBUTE, Interception
from relatum.publishing._locate import SentMessage
from relatum.publishing._pika import PUBLISHER, Publisher, copy_with
from relatum.publishing._publish_outcome import refuses_publish
from relatum.publishing._receipt import AsyncReceipt, Receipt
from relatum.superstreams import Target
from relatum.superstreams.targets import TargetExchange, was_returned

if TYPE_CHECKING:
    from aio_pika.abc import AbstractChannel, AbstractExchange, AbstractMessage


def publish(
    channel: "BlockingChannel | Channel",
    exchange: "str | Target",
    routing_key: str,
    body: bytes | str,
    properties: BasicProperties | None = None,
    *,
    mandatory: bool = True,
    **kwargs: Any,
) -> Receipt:
    """Publish with a confirm and return a receipt, which can wait for the message's offsets.

    Puts the channel into confirm mode if necessary. On a BlockingConnection, the call returns when the broker has
    confirmed the message. On a callback connection, it returns immediately; call it on the connection's thread.

    Args:
        channel: A channel of an intercepted pika connection.
        exchange: The exchange; "" is the default exchange, which routes to the queue named by the routing key. Or a
            `SuperStream`, which chooses the partition; for its errors, see `Target.publish`.
        routing_key: The routing key.
        body: The body; not changed.
        properties: As for `basic_publish`; not changed. None (default): no properties.
        mandatory: True (default): a message routed to no queue raises `PublishUnroutable`. False: the broker drops and
            confirms such a message.
        kwargs: Further arguments of the client's `basic_publish`.

    Returns:
        The receipt: `receipt.wait(timeout_s)`.

    Raises:
        ConfigurationError: the connection is not intercepted, or has no database; nothing was sent.
        InvalidInput: the body is neither bytes nor text; nothing was sent.
        InvalidRelationshipKey, InvalidGroup, HeadersRefused: a key's value or a header is invalid; nothing was sent.
        KeyDefinitionConflict, InvalidKeyDefinition: the database defines the keys differently; nothing was sent.
        PublishUnroutable, PublishNacked, PublishRejected, PublishOutcomeUnknown: see `Receipt.wait`. This call raises
            them on a blocking connection; on a callback connection, the receipt does.
    """
    publisher = publisher_of(channel)
    interception = publisher.interception
    interception.check_receipts()
    checked_body(body)
    if isinstance(exchange, Target):
        exchange, routing_key = exchange.destination(channel, body, properties, routing_key)
    given = properties or BasicProperties()
    headers, message_id = _with_receipt_request(given.headers, given.message_id, given.timestamp)
    sent = SentMessage.of(exchange, routing_key, message_id, headers, body)
    confirms: _Confirms | None = None
    if isinstance(publisher.channel, Channel):
        confirms = publisher.confirms = publisher.confirms or _Confirms(publisher.channel, publisher)
        publisher.begin_confirms()
    elif not publisher.channel._delivery_confirmation:
        publisher.channel.confirm_delivery()
    # Create the receipt before sending: the locator may refuse the connection's credentials.
    receipt = Receipt(sent, interception.locator, pending=confirms is not None)
    channel.basic_publish(exchange, routing_key, body, copy_with(given, headers, message_id), mandatory, **kwargs)
    if confirms is not None:
        confirms.add(receipt)
    return receipt


async def publish_async(
    target: "AbstractExchange | AbstractChannel | TargetExchange",
    message: "AbstractMessage",
    routing_key: str = "",
    *,
    mandatory: bool = True,
    **kwargs: Any,
) -> AsyncReceipt:
    """Publish with a confirm and return a receipt, which can wait for the message's offsets.

    Like `relatum.publish`, but for aio-pika, with the arguments of `Exchange.publish`.

    Args:
        target: An exchange of an intercepted connection; a channel, for its default exchange; or
            `SuperStream.exchange(channel)`.
        message: The client's message; not changed.
        routing_key: The routing key.
        mandatory: True (default): a message routed to no queue raises `PublishUnroutable`, regardless of the channel's
            `on_return_raises`. False: the broker drops and confirms such a message.
        kwargs: Further arguments of the client's method, such as `timeout`.

    Returns:
        The receipt: `await receipt.wait(timeout_s)`.

    Raises:
        ConfigurationError: as for `publish`, or the channel was opened with `publisher_confirms=False`; nothing was
            sent.
        RelatumError: the other errors of `publish`. After `PublishOutcomeUnknown`, `await error.settle()`.
    """
    if isinstance(target, TargetExchange):
        channel = target.channel
        name, routing_key = await target.target.destination_async(channel, message, routing_key)
        target = await channel.get_exchange(name, ensure=False)
    exchange, interception = intercepted_exchange(target)
    if not exchange.channel.publisher_confirms:
        raise ConfigurationError("a receipt needs publisher confirms: open the channel with publisher_confirms=True")
    await interception.wait_for_definitions()
    interception.check_receipts()
    copied: Any = copy.copy(message)
    copied.headers, copied.message_id = _with_receipt_request(message.headers, message.message_id, message.timestamp)
    sent = SentMessage.of(exchange.name, routing_key, copied.message_id, copied.headers, message.body)
    receipt = AsyncReceipt(sent, interception.locator)
    if was_returned(await exchange.publish(copied, routing_key, mandatory=mandatory, **kwargs)):
        why = f"message {sent.message_id} was returned: no queue is bound for it; bind one, then publish it again"
        raise PublishUnroutable(why)
    return receipt


def _with_receipt_request(
    headers: Mapping[str, Any] | None, message_id: str | None, timestamp: Any
) -> tuple[dict[str, Any], str]:
    """Return the headers and the id of a message that requests a receipt.

    With a new id, the recorder stores the receipt under the id. A caller's id may not be unique: the receipt then gets
    its own name.
    """
    now_ns = time_ns()
    out = {**(headers or {}), RECEIPT_HEADER: True if message_id is None else uuid7(now_ns)}
    if timestamp is None:
        out.setdefault(TIME_HEADER, now_ns // 1000)
    return out, message_id or uuid7(now_ns)


def publisher_of(channel: Any) -> Publisher:
    if not isinstance(channel, BlockingChannel | Channel):
        raise ConfigurationError(
            f"channel= takes a channel of an intercepted pika connection, not {type(channel).__name__} of "
            f"{type(channel).__module__}; with aio-pika: await relatum.publish_async(exchange, message, routing_key)"
        )
    publisher = vars(channel).get(PUBLISHER)
    if not isinstance(publisher, Publisher) or not publisher.interception.active:
        raise ConfigurationError("this channel's connection is not intercepted: call relatum.intercept(connection, …)")
    return publisher


def intercepted_exchange(target: Any) -> tuple[Any, Interception]:
    exchange: Any = getattr(target, "default_exchange", None) or target
    if not hasattr(exchange, "publish"):
        raise ConfigurationError(
            f"target= takes an exchange or a channel of an intercepted aio-pika connection, not {type(target).__name__}"
        )
    interception = getattr(getattr(exchange, "channel", None), ATTRIBUTE, None)
    if not isinstance(interception, Interception) or not interception.active:
        raise ConfigurationError("this channel's connection is not intercepted: call relatum.intercept(connection, …)")
    return exchange, interception


class _Confirms:
    """The receipts of a callback channel that wait for confirms. Used only on the connection's thread."""

    def __init__(self, channel: Channel, publisher: Publisher) -> None:
        self._publisher = publisher
        self._pending: dict[int, Receipt] = {}
        number = channel.channel_number
        if publisher.delivery_tag is None:
            if channel.callbacks.pending(number, Basic.Ack):
                raise ConfigurationError(
                    "the channel entered confirm mode before its connection was intercepted, so its delivery tags are "
                    "unknown: open another channel, or intercept the connection first"
                )
            channel.confirm_delivery(self._on_answer)
        else:
            channel.callbacks.add(number, Basic.Ack, self._on_answer, False)
            channel.callbacks.add(number, Basic.Nack, self._on_answer, False)
        channel.add_on_return_callback(self._on_return)
        channel.add_on_close_callback(self._on_close)

    def add(self, receipt: Receipt) -> None:
        """Add the receipt of the last sent message."""
        tag = self._publisher.delivery_tag
        assert tag is not None
        self._pending[tag] = receipt

    def _on_answer(self, frame: "Method[Any]") -> None:
        answer, last = frame.method, frame.method.delivery_tag
        for tag in [tag for tag in self._pending if tag <= last] if answer.multiple else [last]:
            receipt = self._pending.pop(tag, None)
            if receipt is None:
                continue
            if isinstance(answer, Basic.Ack):
                receipt._set_answer(None)
            else:
                routed = None if receipt._sent.exchange else False
                hint = "publish it again" if routed is False else "another queue may have accepted it"
                why = f"the broker refused message {receipt.message_id}: {hint}"
                self._fail(receipt, PublishNacked(why, in_stream=routed))

    def _on_return(self, _channel: Channel, method: Basic.Return, properties: BasicProperties, _body: bytes) -> None:
        """Fail the receipt of a returned message, found by the receipt's name or the id. The broker's ack follows."""
        names = ((properties.headers or {}).get(RECEIPT_HEADER), properties.message_id)
        # The broker answers in order, so the receipt is one of the first.
        receipt = next((receipt for receipt in self._pending.values() if receipt._sent.receipt in names), None)
        if receipt is not None:
            why = f"message {receipt.message_id} was returned: {method.reply_code} {method.reply_text}"
            self._fail(receipt, PublishUnroutable(why))

    def _fail(self, receipt: Receipt, error: PublishError, until: float | None = None) -> None:
        self._publisher.interception.counts.failed(error)
        receipt._set_answer(error, until)

    def _on_close(self, _channel: Channel, reason: Exception) -> None:
        until = self._publisher.final_at(reason)
        pending, self._pending = self._pending, {}
        for tag, receipt in pending.items():
            text = reason.reply_text if isinstance(reason, ChannelClosedByBroker) else ""
            error: PublishError
            # After a release, `delivery_tag` no longer counts messages.
            is_last = tag == self._publisher.delivery_tag and self._publisher.interception.active
            if is_last and refuses_publish(text, receipt._sent.exchange):
                error = PublishRejected(f"the broker refused message {receipt.message_id}: {reason}")
            else:
                error = PublishOutcomeUnknown(
                    f"the channel closed before message {receipt.message_id} was confirmed, so settle the message: "
                    f"{reason!r}",
                    settle=receipt.settle,
                )
            error.__cause__ = reason
            self._fail(receipt, error, until)
