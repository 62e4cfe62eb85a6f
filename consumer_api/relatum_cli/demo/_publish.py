"""Publishing the data through an intercepted connection, and waiting until it is recorded."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pika
from pika.adapters.blocking_connection import BlockingChannel
from pika.exceptions import AMQPError

import relatum
from relatum.checks import seconds_text
from relatum.errors import BrokerUnavailable, ConfigurationError, NotRecordedInTime
from relatum.reading import BrokerAddress, StreamReader
from relatum.recording import recorded_ends
from relatum.superstreams.streams import queue_exists
from relatum_cli.demo._data import KEYS, STREAMS, Data, Row

SEGMENT_BYTES = 5_000_000
"""Of the demo's streams: RabbitMQ before 3.13 seeks an offset from its segment's beginning (docs/performance.md)."""
PROGRESS_EVERY = 500
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


def publish_and_record(servers: Servers, data: Data, progress: Callable[[str], None]) -> tuple[float, float]:
    """Publish the three streams through one intercepted connection, whose process records them, too.

    Args:
        servers: Where to.
        data: What.
        progress: Called again and again with a text that says how far it is.

    Returns:
        Seconds until all was published, and seconds from then until all was recorded.

    Raises:
        BrokerUnavailable: RabbitMQ refused the connection, or ended it.
    """
    try:
        with pika.BlockingConnection(pika.URLParameters(servers.broker)) as connection:
            _declare(connection, servers)
            relatum.intercept(
                connection, database=servers.database, keys=KEYS, recorder="embedded", stream_url=servers.stream_url
            )
            try:
                began = time.perf_counter()
                for name in STREAMS:
                    _publish(connection.channel(), servers.stream(name), data[name], progress)
                published = time.perf_counter()
                _wait_until_recorded(servers)
                return published - began, time.perf_counter() - published
            finally:
                relatum.release(connection)
    except AMQPError as error:
        raise BrokerUnavailable(f"RabbitMQ could not be reached, or was lost, to publish: {error!r}") from error


def _publish(channel: BlockingChannel, stream: str, rows: Sequence[Row], progress: Callable[[str], None]) -> None:
    for number, row in enumerate(rows, 1):
        if number == len(rows):
            # RabbitMQ keeps a channel's order: the confirm of the last message is one of all before it.
            channel.confirm_delivery()
        properties = pika.BasicProperties(message_id=row.message_id, headers=row.headers)
        channel.basic_publish("", stream, row.body, properties)
        if number % PROGRESS_EVERY == 0:
            progress(f"{stream}: {number:,}")
    channel.close()


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
