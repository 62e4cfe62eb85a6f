"""Streams and messages made with bare pika, so that nothing of Relatum's own is needed to test it."""

import time
import uuid
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import pika
import pika.exceptions
from pika.adapters.blocking_connection import BlockingConnection

from relatum.local import LocalRabbitMQ
from tests.support._recording import reader_of
from tests.support._waiting import LIMIT_S, wait_until

_INTERNAL_ERROR = 541
"""The code with which RabbitMQ 3.10 closes a connection whose channel's first publish to a stream finds its coordinator
without a leader, as after the death of the node that led it. Nothing was written then."""

UNACKNOWLEDGED = 500


class Delivered(NamedTuple):
    """A message of a stream, as AMQP 0.9.1 delivers it."""

    offset: int
    properties: pika.BasicProperties
    body: bytes

    @property
    def headers(self) -> dict[str, Any]:
        return self.properties.headers or {}


Plain = bytes | tuple[bytes, Mapping[str, Any] | pika.BasicProperties]
"""A body, or a body with its headers or properties."""


def unique_name(prefix: str = "relatum-test") -> str:
    return f"{prefix}-{uuid.uuid4().hex[:12]}"


@contextmanager
def broker_connection(amqp_url: str) -> Iterator[BlockingConnection]:
    connection = BlockingConnection(pika.URLParameters(amqp_url))
    try:
        yield connection
    finally:
        if connection.is_open:
            connection.close()


def declare_stream(amqp_url: str, name: str, **arguments: Any) -> None:
    """Declare a stream; underscores in the names of `arguments` mean dashes (`x_max_length_bytes`)."""
    queue = {"x-queue-type": "stream"} | {key.replace("_", "-"): value for key, value in arguments.items()}
    with broker_connection(amqp_url) as connection:
        connection.channel().queue_declare(name, durable=True, arguments=queue)


def delete_stream(amqp_url: str, name: str) -> None:
    with broker_connection(amqp_url) as connection:
        connection.channel().queue_delete(name)


@contextmanager
def new_streams(url: str, count: int, **arguments: Any) -> Iterator[list[str]]:
    """The names of new streams, ascending; they go at the end."""
    names = sorted(unique_name() for _ in range(count))
    for name in names:
        declare_stream(url, name, **arguments)
    yield names
    for name in names:
        delete_stream(url, name)


def publish_plain(
    amqp_url: str, stream: str, messages: Iterable[Plain], *, confirm: bool = True, exchange: str = ""
) -> int:
    """Publish messages one by one, again while the coordinator of streams has no leader; return how many."""
    waiting = [message if isinstance(message, tuple) else (message, {}) for message in messages]
    end = time.monotonic() + LIMIT_S
    while True:
        count = 0
        try:
            with broker_connection(amqp_url) as connection:
                channel = connection.channel()
                if confirm:
                    channel.confirm_delivery()
                for body, more in waiting:
                    properties = (
                        more if isinstance(more, pika.BasicProperties) else pika.BasicProperties(headers=dict(more))
                    )
                    channel.basic_publish(exchange, stream, body, properties)
                    count += 1
            return count
        except pika.exceptions.ConnectionClosedByBroker as error:
            if count or error.reply_code != _INTERNAL_ERROR or time.monotonic() > end:
                raise


def server_version(amqp_url: str) -> tuple[int, ...]:
    with broker_connection(amqp_url) as connection:
        version: str = connection._impl.server_properties["version"]
    return tuple(int(part) for part in version.split("-")[0].split("+")[0].split(".")[:3])


def read_plain(
    amqp_url: str, stream: str, count: int, *, offset: int | str = "first", more_s: float = LIMIT_S
) -> list[bytes]:
    """The bodies of `count` messages from an offset on, or fewer where behind the first none came for `more_s` s."""
    bodies: list[bytes] = []
    for _, _, body in _deliveries(amqp_url, stream, offset, more_s):
        bodies.append(body)
        if len(bodies) == count:
            break
    return bodies


def all_plain(amqp_url: str, stream: str) -> list[Delivered]:
    found: list[Delivered] = []
    with reader_of(amqp_url) as reader:
        last = reader.bounds(stream).last
    if last is not None:
        for each in _deliveries(amqp_url, stream, "first", LIMIT_S):
            found.append(each)
            if each.offset >= last:
                return found
        raise AssertionError(f"{stream} was read to {found[-1].offset} and not to {last}")
    return found


def read_stream(amqp_url: str, stream: str) -> Iterator[Delivered]:
    """All messages of a stream, without a question by Relatum: up to one that this publishes and does not give."""
    end = unique_name("end")
    publish_plain(amqp_url, stream, [(b"", pika.BasicProperties(message_id=end))])
    for each in _deliveries(amqp_url, stream, "first", LIMIT_S):
        if each.properties.message_id == end:
            return
        yield each
    raise AssertionError(f"{stream} was not read to its end")


def _deliveries(amqp_url: str, stream: str, offset: int | str, more_s: float) -> Iterator[Delivered]:
    with broker_connection(amqp_url) as connection:
        channel = connection.channel()
        channel.basic_qos(prefetch_count=UNACKNOWLEDGED)
        limit = time.monotonic() + LIMIT_S
        arguments = {"x-stream-offset": offset}
        for method, properties, body in channel.consume(stream, arguments=arguments, inactivity_timeout=more_s):
            if method is None:
                if time.monotonic() > limit:
                    return
                continue
            limit = 0.0
            if method.delivery_tag % (UNACKNOWLEDGED // 4) == 0:
                channel.basic_ack(method.delivery_tag, multiple=True)
            yield Delivered(int(properties.headers["x-stream-offset"]), properties, body)


def make_streams_survive(server: LocalRabbitMQ) -> None:
    """Make a new broker's streams survive SIGKILL: their coordinator's name is on disk a second after the first."""
    name = unique_name("first")
    declare_stream(server.broker_url, name)
    delete_stream(server.broker_url, name)
    wait_until(
        lambda: any(b"stream_coordinator" in file.read_bytes() for file in server.data.rglob("names.dets")),
        what="the stream coordinator's name on disk",
    )


NOT_YET = (
    "is down or inaccessible",
    "does not have a replica on the local node",
    "does not have a running replica on the local node",
)
"""What the broker says of its own streams for a moment after its start: 404 on declaring, then 406 on consuming, before
and since RabbitMQ 4."""


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
