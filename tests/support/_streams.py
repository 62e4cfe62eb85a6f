"""Streams and messages made with bare pika, so that nothing of Relatum's own is needed to test it."""

import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pika
import pika.exceptions
from pika.adapters.blocking_connection import BlockingConnection

from relatum.local import LocalRabbitMQ
from tests.support._waiting import wait_until

Plain = bytes | tuple[bytes, Mapping[str, Any] | pika.BasicProperties]
"""A body, or a body with its headers or properties."""


def unique_name(prefix: str = "relatum-test") -> str:
    """Return a name no other test uses."""
    return f"{prefix}-{uuid.uuid4().hex[:12]}"


@contextmanager
def broker_connection(amqp_url: str) -> Iterator[BlockingConnection]:
    """Open a bare pika connection, and close it."""
    connection = BlockingConnection(pika.URLParameters(amqp_url))
    try:
        yield connection
    finally:
        if connection.is_open:
            connection.close()


def declare_stream(amqp_url: str, name: str, **arguments: Any) -> None:
    """Declare a stream; underscores in the names of `arguments` stand for dashes (`x_max_length_bytes`)."""
    queue = {"x-queue-type": "stream"} | {key.replace("_", "-"): value for key, value in arguments.items()}
    with broker_connection(amqp_url) as connection:
        connection.channel().queue_declare(name, durable=True, arguments=queue)


def delete_stream(amqp_url: str, name: str) -> None:
    """Delete a stream; one that is not there is no error."""
    with broker_connection(amqp_url) as connection:
        connection.channel().queue_delete(name)


def publish_plain(amqp_url: str, stream: str, messages: Iterable[Plain], *, confirm: bool = True) -> int:
    """Publish messages to a stream one by one; return how many. `confirm` waits for each confirm."""
    count = 0
    with broker_connection(amqp_url) as connection:
        channel = connection.channel()
        if confirm:
            channel.confirm_delivery()
        for message in messages:
            body, more = message if isinstance(message, tuple) else (message, {})
            properties = more if isinstance(more, pika.BasicProperties) else pika.BasicProperties(headers=dict(more))
            channel.basic_publish("", stream, body, properties)
            count += 1
    return count


def server_version(amqp_url: str) -> tuple[int, ...]:
    """Return the broker's version, as (3, 10, 8)."""
    with broker_connection(amqp_url) as connection:
        version: str = connection._impl.server_properties["version"]
    return tuple(int(part) for part in version.split("-")[0].split("+")[0].split(".")[:3])


def read_plain(
    amqp_url: str, stream: str, count: int, *, offset: int | str = "first", limit_s: float = 10.0
) -> list[bytes]:
    """Return the bodies of `count` messages from an offset on, or fewer where no more came for `limit_s` seconds."""
    with broker_connection(amqp_url) as connection:
        channel = connection.channel()
        channel.basic_qos(prefetch_count=100)
        deliveries = channel.consume(stream, arguments={"x-stream-offset": offset}, inactivity_timeout=limit_s)
        bodies: list[bytes] = []
        for method, _, body in deliveries:
            if method is None:
                break
            channel.basic_ack(method.delivery_tag)
            bodies.append(body)
            if len(bodies) == count:
                break
    return bodies


def make_streams_survive(server: LocalRabbitMQ) -> None:
    """Make a new private broker's streams survive SIGKILL.

    The broker starts its stream coordinator at the first stream ever declared, and writes its name to disk about a
    second later only; killed before, it never serves streams again (seen with 3.10.8: names.dets of Ra).
    """
    name = unique_name("first")
    declare_stream(server.broker_url, name)
    delete_stream(server.broker_url, name)
    wait_until(
        lambda: any(b"stream_coordinator" in file.read_bytes() for file in server.data.rglob("names.dets")),
        what="the stream coordinator's name on disk",
    )


NOT_YET = ("is down or inaccessible", "does not have a replica on the local node")
"""What the broker says of its own streams for a moment after its start: 404 on declaring, then 406 on consuming."""


def stream_available(amqp_url: str, stream: str) -> bool:
    """Whether the broker serves the stream to consumers; for a moment after its start it does not."""
    try:
        with broker_connection(amqp_url) as connection:
            channel = connection.channel()
            channel.basic_qos(prefetch_count=1)
            channel.basic_consume(stream, lambda *_: None, arguments={"x-stream-offset": "next"})
    except pika.exceptions.ChannelClosedByBroker as closed:
        if not any(words in closed.reply_text for words in NOT_YET):
            raise
        return False
    except pika.exceptions.AMQPConnectionError:
        # A broker that is still starting may end the connection with an internal error.
        return False
    return True
