"""Streams to measure with, each written in the way its row of the table says."""

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
"""How many values the second key has."""

BATCH_RECORDS: Final = 500
"""Messages given to rstream at once."""

SETTLE_S: Final = 60.0


def order_id(number: int) -> str:
    """The value of the first key: each message has its own."""
    return f"o{number}"


def host(number: int) -> str:
    """The value of the second key, which many messages share."""
    return f"host-{number % HOSTS}"


def body(number: int) -> bytes:
    """A message's body, which says which one it is."""
    return b"%-*d" % (BODY_BYTES, number)


def encoded(number: int) -> bytes:
    """The bytes rstream makes of a message with two headers; its own encoder takes 30 us a message."""
    pairs = b""
    for name, value in (("order_id", order_id(number)), ("host", host(number))):
        pairs += b"\xa1%c%b\xa1%c%b" % (len(name), name.encode(), len(value), value.encode())
    return b"\0St\xc1%c\4%b\0Su\xa0%c%b" % (len(pairs) + 1, pairs, BODY_BYTES, body(number))


def same_as_rstream(number: int) -> bool:
    """Whether `encoded` gives what rstream's own encoder gives."""
    headers = {"order_id": order_id(number), "host": host(number)}
    message = rstream.AMQPMessage(body=body(number), application_properties=headers)
    return bytes(message) == encoded(number)


def tiny(number: int) -> bytes:
    """A message without headers and with a body of a few bytes."""
    data = b"%d" % number
    return b"\0Su\xa0%c%b" % (len(data), data)


@contextmanager
def connected(amqp_url: str) -> Iterator[BlockingConnection]:
    """A bare pika connection."""
    connection = BlockingConnection(pika.URLParameters(amqp_url))
    try:
        yield connection
    finally:
        if connection.is_open:
            connection.close()


def declare(amqp_url: str, stream: str, *, is_filtered: bool = False) -> None:
    """Declare a stream; a filtered one has a Bloom filter of the largest size with each chunk."""
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
    """Wait until the broker shows the last of a new stream's messages; nothing else may have used its offsets."""
    limit = time.monotonic() + SETTLE_S
    with StreamReader.open(broker) as reader:
        while (last := reader.bounds(stream).last) != messages - 1:
            assert time.monotonic() < limit, f"{stream} ends at {last} instead of {messages - 1}"
            time.sleep(0.02)


def rstream_options(stream_url: str) -> dict[str, Any]:
    """How rstream's classes are told where the broker is."""
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
    """Write orders by rstream, in batches."""
    assert same_as_rstream(0)
    assert same_as_rstream(messages)
    asyncio.run(_write_in_batches(stream_url, stream, messages))


async def _write_in_batches(stream_url: str, stream: str, messages: int) -> None:
    numbers = iter(range(messages))
    async with rstream.Producer(**rstream_options(stream_url)) as producer:
        while part := list(islice(numbers, BATCH_RECORDS)):
            await producer.send_batch(stream, [encoded(number) for number in part])


def write_one_by_one(amqp_url: str, stream: str, numbers: Iterable[int]) -> None:
    """Write orders by pika, one by one, without waiting for confirms."""
    with connected(amqp_url) as connection:
        channel = connection.channel()
        for number in numbers:
            headers = {"order_id": order_id(number), "host": host(number)}
            channel.basic_publish("", stream, body(number), pika.BasicProperties(headers=headers))
