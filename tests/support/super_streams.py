"""Super streams of the tests, and where their messages are."""

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pika
from pika.adapters.blocking_connection import BlockingConnection

from relatum import Broker
from relatum.errors import SuperStreamNotFound
from relatum.reading import StreamReader
from relatum.superstreams import Layout, declare_super_stream, delete_super_stream
from tests.support import broker_connection, unique_name


@contextmanager
def super_stream(broker: str | Broker, partitions: int | None = None, **options: Any) -> Iterator[Layout]:
    name = unique_name("relatum-super")
    layout = declare_super_stream(broker, name, partitions, **options)
    try:
        yield layout
    finally:
        with contextlib.suppress(SuperStreamNotFound):
            delete_super_stream(broker, name)


def declare_by_hand(connection: BlockingConnection, name: str, keys: list[str], streams: list[str]) -> None:
    """Make a super stream with bare pika, as an application may have done."""
    channel = connection.channel()
    channel.exchange_declare(name, "direct", durable=True, arguments={"x-super-stream": True})
    for order, (key, stream) in enumerate(zip(keys, streams, strict=True)):
        channel.queue_declare(stream, durable=True, arguments={"x-queue-type": "stream"})
        channel.queue_bind(stream, name, key, {"x-stream-partition-order": order})


def delete_by_hand(amqp_url: str, exchange: str, *streams: str) -> None:
    with broker_connection(amqp_url) as connection:
        channel = connection.channel()
        channel.exchange_delete(exchange)
        for stream in streams:
            channel.queue_delete(stream)


def bodies(stream_url: str, layout: Layout) -> dict[str, list[bytes]]:
    with StreamReader.open(stream_url) as reader:
        return {each.stream: [message.body for message in reader.iterate(each.stream)] for each in layout}


def tail(number: str, **properties: Any) -> pika.BasicProperties:
    return pika.BasicProperties(headers={"tail": number}, **properties)
