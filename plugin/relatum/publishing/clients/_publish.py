"""Publishing with a receipt."""

import time
from typing import TYPE_CHECKING, Any

from pika import BasicProperties
from pika.adapters.blocking_connection import BlockingChannel
from pika.channel import Channel

from relatum.checks import checked_body
from relatum.errors import ConfigurationError
from relatum.publishing._locate import Sent
from relatum.publishing._receipt import Receipt
from relatum.publishing.clients._pika import PUBLISHER, CountingPublisher, Publisher
from relatum.publishing.clients._pika_confirms import Confirms
from relatum.superstreams import Target
from relatum.uuid7 import uuid7

if TYPE_CHECKING:
    pass


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
    """Publish with a confirm and get a receipt, which gives the message's offsets once they are recorded.

    Confirm mode is switched on where the channel is not in it. On a BlockingConnection this returns when the broker
    has confirmed; on a callback connection it returns at once and must be called on the connection's thread.

    Args:
        channel: A channel of an intercepted pika connection.
        exchange: The exchange; "" for the default one, which routes to the queue named by the routing key. Or a
            `SuperStream`, which chooses the partition.
        routing_key: The routing key.
        body: The body; not changed.
        properties: As for `basic_publish`; not changed.
        mandatory: True (default): a message that no queue is bound for is `PublishUnroutable`. False: the broker
            drops it and confirms.
        kwargs: Further arguments of the client's own `basic_publish`.

    Returns:
        The receipt: `receipt.wait(timeout_s)`.

    Raises:
        ConfigurationError: the connection is not intercepted, or without a database; nothing was sent.
        InvalidInput: the body is neither bytes nor text; nothing was sent.
        InvalidRelationshipKey, HeadersRefused: nothing was sent.
        KeyDefinitionConflict, InvalidKeyDefinition: the database defines the keys otherwise; nothing was sent.
        PublishUnroutable, PublishNacked, PublishOutcomeUnknown: see `Receipt.wait`; from here over a blocking
            connection, from the receipt over a callback connection.
    """
    publisher = publisher_of(channel)
    interception = publisher.interception
    interception.require_database()
    checked_body(body)
    if isinstance(exchange, Target):
        exchange, routing_key = exchange.destination(channel, body, properties, routing_key)
    asked = receipt_header(properties.message_id if properties is not None else None)
    stamped, stamp = publisher.stamp(properties, body, asked)
    sent = Sent.of(exchange, routing_key, stamp.message_id, stamp.headers, body)

    def send() -> None:
        channel.basic_publish(exchange, routing_key, body, stamped, mandatory, **kwargs)

    if isinstance(publisher, CountingPublisher):
        return Confirms.of(publisher.channel, publisher).publish(sent, send)
    if not publisher.channel._delivery_confirmation:
        publisher.channel.confirm_delivery()
    send()
    return Receipt(sent, interception.locator)


def receipt_header(message_id: str | None) -> str | bool:
    """The header by which the recorder is asked for a receipt.

    A `message_id` of ours is unique, so the header need only be True, and the receipt goes by that id. The caller's
    own may have been used before: then the header holds a name of the receipt's own.
    """
    return True if message_id is None else uuid7(time.time_ns())


def publisher_of(channel: Any) -> Publisher:
    """What publishes on a channel of an intercepted pika connection."""
    if not isinstance(channel, BlockingChannel | Channel):
        raise ConfigurationError(
            f"channel is a channel of an intercepted pika connection, not {type(channel).__name__} of "
            f"{type(channel).__module__}; with aio-pika: await relatum.publish_async(exchange, message, routing_key), "
            "with FastStream publish_async(broker, message, stream)"
        )
    publisher = vars(channel).get("basic_publish")
    if not isinstance(publisher, Publisher):
        publisher = vars(channel).get(PUBLISHER)
    if not isinstance(publisher, Publisher) or not publisher.interception.active:
        raise ConfigurationError("this channel's connection is not intercepted: relatum.intercept(connection, …)")
    return publisher
