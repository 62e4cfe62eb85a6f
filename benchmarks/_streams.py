"""Streams for the benchmarks, and the ways to write them."""

import asyncio
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Any, Final
from urllib.parse import unquote, urlsplit

import pika
import rstream
from pika.adapters.blocking_connection import BlockingConnection

from relatum import Broker
from relatum.reading import StreamReader

BODY_BYTES: Final = 200
HOSTS: Final = 50
"""Number of values of the second key."""

BATCH_RECORDS: Final = 500
"""Messages passed to rstream at once."""

SETTLE_S: Final = 60.0


def order_id(number: int) -> str:
    """Return the value of the first key, which is unique to a message."""
    return f"o{number}"


def host(number: int) -> str:
    """Return the value of the second key, which many messages share."""
    return f"host-{number % HOSTS}"


def body(number: int) -> bytes:
    """Return a message's body, which identifies the message."""
    return b"%-*d" % (BODY_BYTES, number)


def encoded(number: int, data: bytes | None = None) -> bytes:
    """Encode a message with two headers as rstream does, whose own encoder takes 30 us a message.

    `data`: Its body, `body(number)` by default.
    """
    data = body(number) if data is None else data
    length = b"\xa0%c" % len(data) if len(data) < 256 else b"\xb0" + len(data).to_bytes(4, "big")
    pairs = b""
    for name, value in (("order_id", order_id(number)), ("host", host(number))):
        pairs += b"\xa1%c%b\xa1%c%b" % (len(name), name.encode(), len(value), value.encode())
    return b"\0St\xc1%c\4%b\0Su%b%b" % (len(pairs) + 1, pairs, length, data)


def same_as_rstream(number: int) -> bool:
    """Check that `encoded` returns the same bytes as rstream's own encoder."""
    headers = {"order_id": order_id(number), "host": host(number)}
    message = rstream.AMQPMessage(body=body(number), application_properties=headers)
    return bytes(message) == encoded(number)


def tiny(number: int) -> bytes:
    """Return a message without headers and with a body of a few bytes."""
    data = b"%d" % number
    return b"\0Su\xa0%c%b" % (len(data), data)


@contextmanager
def connected(amqp_url: str) -> Iterator[BlockingConnection]:
    """Open a bare pika connection."""
    connection = BlockingConnection(pika.URLParameters(amqp_url))
    try:
        yield connection
    finally:
        if connection.is_open:
            connection.close()


def declare(amqp_url: str, stream: str, *, is_filtered: bool = False) -> None:
    """Declare a stream; each chunk of a filtered one has a Bloom filter of the maximum size."""
    arguments: dict[str, object] = {"x-queue-type": "stream"}
    if is_filtered:
        arguments["x-stream-filter-size-bytes"] = 255
    with connected(amqp_url) as connection:
        connection.channel().queue_declare(stream, durable=True, arguments=arguments)


def delete(amqp_url: str, stream: str) -> None:
    """Delete a stream."""
    with connected(amqp_url) as connection:
        connection.channel().queue_delete(stream)


def wait_written(broker: Broker, stream: str, messages: int) -> None:
    """Wait until a new stream ends with its last message. Only messages may have used its offsets."""
    limit = time.monotonic() + SETTLE_S
    with StreamReader.open(broker) as reader:
        while (last := reader.bounds(stream).last) != messages - 1:
            assert time.monotonic() < limit, f"{stream} ends at {last} instead of {messages - 1}"
            time.sleep(0.02)


def rstream_options(stream_url: str) -> dict[str, Any]:
    """Return the arguments for rstream's classes by which they find the broker."""
    parts = urlsplit(stream_url)
    return {
        "host": parts.hostname,
        "port": parts.port or 5552,
        "username": unquote(parts.username or "guest"),
        "password": unquote(parts.password or "guest"),
        "vhost": unquote(parts.path[1:]) or "/",
        "load_balancer_mode": True,
    }


def write_in_batches(stream_url: str, stream: str, messages: int) -> None:
    """Write orders with rstream, in batches."""
    assert same_as_rstream(0)
    assert same_as_rstream(messages)
    asyncio.run(_write_in_batches(stream_url, stream, messages))


async def _write_in_batches(stream_url: str, stream: str, messages: int) -> None:
    numbers = iter(range(messages))
    async with rstream.Producer(**rstream_options(stream_url)) as producer:
        while part := list(islice(numbers, BATCH_RECORDS)):
            await producer.send_batch(stream, [encoded(number) for number in part])


def write_one_by_one(amqp_url: str, stream: str, numbers: Iterable[int]) -> None:
    """Write orders with pika, one by one, without waiting for confirms."""
    with connected(amqp_url) as connection:
        channel = connection.channel()
        for number in numbers:
            headers = {"order_id": order_id(number), "host": host(number)}
            channel.basic_publish("", stream, body(number), pika.BasicProperties(headers=headers))
