"""What a firehose's copies lie in until they are carried, and the way they take into the stream.

The firehose wraps a message's properties into headers that are tables, and a stream keeps no such headers; up to
RabbitMQ 3.10 it does not even take what the firehose publishes. A queue does both.
"""

from typing import Any, Final

from pika import BlockingConnection
from pika.exceptions import ChannelClosedByBroker

from relatum.errors import AccessRefused, Conflict
from relatum.headers import BROKERS_OWN
from relatum.superstreams import exchange_exists, queue_exists
from relatum.tapping._broker_side import MARK, delete_queue
from relatum.tapping._kept_taps import Tap

TRACE: Final = BROKERS_OWN + "trace"
"""The exchange of the firehose."""

PUBLISHED: Final = "publish."
"""The firehose's key of what is published to the default exchange, whose name is empty."""

QUEUE_BYTES_MAX: Final = 500_000_000
"""Bytes that wait to be carried; the oldest are dropped beyond."""

_QUEUE: Final[dict[str, Any]] = {"x-max-length-bytes": QUEUE_BYTES_MAX}
"""A classic queue: the firehose publishes transient messages, and is off anyhow when a broker starts."""

_ACCESS_REFUSED: Final = 403


def queue_of(stream: str) -> str:
    """The queue of the firehose's copies that go into a stream."""
    return f"{stream}.firehose"


def check_free(connection: BlockingConnection, stream: str) -> None:
    """See that what a firehose needs beside the stream is not another's.

    Raises:
        Conflict: there is an exchange or a queue of that name.
    """
    if exchange_exists(connection, stream):
        raise Conflict(f"There is an exchange {stream!r}, and the firehose takes one of its stream's name: --stream.")
    if queue_exists(connection, queue_of(stream)):
        raise Conflict(f"There is a queue {queue_of(stream)!r}, which the firehose would take: --stream.")


def make_way(connection: BlockingConnection, tap: Tap) -> None:
    """Make the queue and the exchange before the stream; what is there stays.

    The exchange is the carrier's own: published there, a copy keeps its routing key, and the firehose tells it from
    what is published to the default exchange.

    Raises:
        AccessRefused: this user lacks a permission.
    """
    queue = queue_of(tap.stream)
    channel = connection.channel()
    try:
        channel.exchange_declare(tap.stream, "fanout", durable=True)
        channel.queue_bind(tap.stream, tap.stream, "", {MARK: "tap"})
        channel.queue_declare(queue, durable=True, arguments=_QUEUE)
        channel.queue_bind(queue, TRACE, tap.binding_key, {MARK: "tap"})
    except ChannelClosedByBroker as error:
        if error.reply_code != _ACCESS_REFUSED:
            raise
        raise AccessRefused(
            f"The broker refuses what the firehose takes: {error.reply_text}. It takes the permission to configure, "
            f"write and read {tap.stream!r} and {queue!r}, and to read from {TRACE!r}"
        ) from error
    channel.close()


def take_away(connection: BlockingConnection, tap: Tap) -> None:
    """Delete the queue and the exchange, with what waits to be carried; where they are not there, nothing happens."""
    delete_queue(connection, queue_of(tap.stream))
    with connection.channel() as channel:
        channel.exchange_delete(tap.stream)
