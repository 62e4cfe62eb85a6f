"""Publishing the data through an intercepted connection, and waiting until it is recorded."""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pika
import sqlalchemy as sa
from pika.exceptions import AMQPError

import relatum
from relatum.checks import seconds_text
from relatum.errors import BrokerUnavailable, ConfigurationError, NotRecordedInTime
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
    """Where the demo runs, and what is put before its streams' names. `directory` is of private servers that stay."""

    broker: str
    stream_url: str | None
    database: str
    prefix: str = ""
    directory: Path | None = None

    @property
    def address(self) -> BrokerAddress:
        """The broker's address."""
        return BrokerAddress.parse(self.broker, self.stream_url)

    def stream(self, name: str) -> str:
        """The full name of one of the demo's streams."""
        return self.prefix + name

    def taken(self, what: str) -> ConfigurationError:
        """The error where a name is in use, which says what to do."""
        there = f"there is {what} already: choose other names with --prefix"
        if self.directory is None:
            return ConfigurationError(f"{there}, or delete it")
        return ConfigurationError(
            f"{there}, or another --directory. To look at what an earlier demo left there: "
            f"relatum up --web --directory {self.directory}"
        )


Progress = Callable[[str, int], None]
"""Told the stream and how many more of its messages are done."""


def publish_and_record(servers: Servers, engine: sa.Engine, data: Dataset, progress: Progress) -> tuple[float, float]:
    """Publish the three streams through one intercepted connection, whose process records them, too.

    Returns:
        Seconds until all was published, and seconds from then until all was recorded.

    Raises:
        BrokerUnavailable: RabbitMQ ended the connection.
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
    except AMQPError as error:
        raise BrokerUnavailable(f"RabbitMQ was lost while messages were published: {error!r}") from error
    finally:
        relatum.release(connection)
        if connection.is_open:
            connection.close()


def _declare(connection: pika.BlockingConnection, servers: Servers) -> None:
    for name in map(servers.stream, STREAMS):
        if queue_exists(connection, name):
            raise servers.taken(f"a queue or stream {name!r}")
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
            raise NotRecordedInTime(f"after {seconds_text(timeout_s)} not recorded to the end: {', '.join(behind)}")
        time.sleep(POLL_S)


def _behind(servers: Servers, ends: Mapping[str, int | None]) -> list[str]:
    recorded = {each.stream: each.next_offset for each in recorded_ends(servers.database, servers.address.vhost, ends)}
    return [name for name, last in ends.items() if last is not None and recorded.get(name, 0) <= last]


def totals(data: Dataset) -> Iterable[tuple[str, int]]:
    """How many messages each stream gets."""
    return [(name, len(data.frame(name))) for name in STREAMS]
