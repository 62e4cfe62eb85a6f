"""Publishing the data through an intercepted connection, and waiting until it is recorded."""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import pika
import sqlalchemy as sa

import relatum
from relatum.errors import ConfigurationError, NotRecordedInTime
from relatum.reading import BrokerAddress, StreamReader
from relatum.recording import recorded_ends
from relatum.superstreams import queue_exists
from relatum_consumer.demo._data import FLIGHTS, PLANES, WEATHER, Dataset
from relatum_consumer.demo._questions import KEYS

STREAMS = (PLANES, WEATHER, FLIGHTS)
SEGMENT_BYTES = 5_000_000
"""Of the demo's streams: RabbitMQ before 3.13 looks for an offset from its segment's beginning (docs/scale.md)."""
POLL_S = 0.02
"""Seconds between two looks at how far the recorder is."""


@dataclass(frozen=True, slots=True)
class Servers:
    """Where the demo runs; `prefix` is put before its streams' names."""

    broker: str
    stream_url: str | None
    database: str
    prefix: str = ""

    @property
    def address(self) -> BrokerAddress:
        """The broker's address."""
        return BrokerAddress.parse(self.broker, self.stream_url)

    def stream(self, name: str) -> str:
        """The full name of one of the demo's streams."""
        return self.prefix + name


Progress = Callable[[str, int], None]
"""Told the stream and how many more of its messages are done."""


def publish_and_record(servers: Servers, engine: sa.Engine, data: Dataset, progress: Progress) -> tuple[float, float]:
    """Publish the three streams through one intercepted connection, whose process records them, too.

    Returns:
        Seconds until all was published, and seconds from then until all was recorded.
    """
    connection = pika.BlockingConnection(pika.URLParameters(servers.broker))
    try:
        _declare(connection, servers)
        relatum.intercept(
            connection, database=servers.database, keys=KEYS, recorder="embedded", stream_url=servers.stream_url
        )
        began = time.perf_counter()
        for name in STREAMS:
            channel = connection.channel()
            for message in data.messages(name):
                properties = pika.BasicProperties(message_id=message.message_id, headers=message.headers)
                channel.basic_publish("", servers.stream(name), message.body, properties)
                progress(name, 1)
            # Without confirms, the answer to closing the channel is what says that the broker took them all.
            channel.close()
        published = time.perf_counter()
        _wait_until_recorded(servers)
        return published - began, time.perf_counter() - published
    finally:
        relatum.release(connection)
        connection.close()


def _declare(connection: pika.BlockingConnection, servers: Servers) -> None:
    for name in map(servers.stream, STREAMS):
        if queue_exists(connection, name):
            raise ConfigurationError(
                f"there is a queue or stream {name!r} already: choose other names with --prefix, or delete it"
            )
    channel = connection.channel()
    arguments = {"x-queue-type": "stream", "x-stream-max-segment-size-bytes": SEGMENT_BYTES}
    for name in map(servers.stream, STREAMS):
        channel.queue_declare(name, durable=True, arguments=arguments)
    channel.close()


def _wait_until_recorded(servers: Servers, *, timeout_s: float = 600.0) -> None:
    with StreamReader.open(servers.address) as reader:
        ends = {name: reader.bounds(name).last for name in map(servers.stream, STREAMS)}
    deadline = time.monotonic() + timeout_s
    while behind := _behind(servers, ends):
        if time.monotonic() > deadline:
            raise NotRecordedInTime(f"after {timeout_s:.0f} s not recorded to the end: {', '.join(behind)}")
        time.sleep(POLL_S)


def _behind(servers: Servers, ends: Mapping[str, int | None]) -> list[str]:
    recorded = {each.stream: each.next_offset for each in recorded_ends(servers.database, servers.address.vhost, ends)}
    return [name for name, last in ends.items() if last is not None and recorded.get(name, 0) <= last]


def totals(data: Dataset) -> Iterable[tuple[str, int]]:
    """How many messages each stream gets."""
    return [(name, len(data.frame(name))) for name in STREAMS]
