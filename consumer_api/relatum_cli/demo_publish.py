"""Publishes the data through an intercepted connection, and waits until it is recorded."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pika
from pika.adapters.blocking_connection import BlockingChannel
from pika.exceptions import AMQPError

import relatum
from relatum.errors import BrokerUnavailable, ConfigurationError
from relatum.reading import Broker
from relatum.superstreams.streams import queue_exists
from relatum_cli.demo._data import KEYS, STREAMS, Data, Row

SEGMENT_BYTES = 5_000_000
"""The streams' segment size: RabbitMQ before 3.13 seeks an offset from its segment's start (docs/performance.md)."""
PROGRESS_EVERY = 500
RECORDED_S = 600.0
"""How long recording a stream may take after all was published, in seconds."""


@dataclass(frozen=True, slots=True)
class Servers:
    """The servers, and the prefix of the streams' names. `directory`: the data of private servers, if it is kept."""

    broker: Broker
    database: str
    prefix: str = ""
    directory: Path | None = None

    def stream(self, name: str) -> str:
        """Return the full name of one of the demo's streams."""
        return self.prefix + name

    def taken(self, what: str) -> ConfigurationError:
        """Return the error for a name in use, which says what to do."""
        there = f"there is {what} already: choose other names with --prefix"
        if self.directory is None:
            return ConfigurationError(f"{there}, or delete it")
        return ConfigurationError(
            f"{there}, or another --directory. To look at what an earlier demo left there: "
            f"relatum up --web --directory {self.directory}"
        )


def publish_and_record(servers: Servers, data: Data, progress: Callable[[str], None]) -> tuple[float, float]:
    """Publish the three streams through one intercepted connection, whose process also records them.

    Args:
        servers: The servers.
        data: The rows to publish.
        progress: Called often with the progress as text.

    Returns:
        Seconds until all was published, and seconds from then until all was recorded.

    Raises:
        ConfigurationError: a stream's name is in use; nothing was published.
        BrokerUnavailable: RabbitMQ refused or closed the connection.
        NotRecordedInTime: a stream was not recorded in time.
    """
    try:
        with pika.BlockingConnection(pika.URLParameters(servers.broker.url)) as connection:
            _declare(connection, servers)
            relatum.intercept(
                connection, database=servers.database, keys=KEYS, recorder="embedded", broker=servers.broker
            )
            try:
                began = time.perf_counter()
                last = [_publish(connection.channel(), servers.stream(name), data[name], progress) for name in STREAMS]
                published = time.perf_counter()
                for receipt in last:
                    receipt.wait(RECORDED_S)
                return published - began, time.perf_counter() - published
            finally:
                relatum.release(connection)
    except AMQPError as error:
        raise BrokerUnavailable(f"RabbitMQ could not be reached, or was lost, to publish: {error!r}") from error


def _publish(
    channel: BlockingChannel, stream: str, rows: Sequence[Row], progress: Callable[[str], None]
) -> relatum.Receipt:
    """Publish rows in order, which is also the order of recording, and return the last row's receipt."""
    for number, row in enumerate(rows[:-1], 1):
        properties = pika.BasicProperties(message_id=row.message_id, headers=row.headers)
        channel.basic_publish("", stream, row.body, properties)
        if number % PROGRESS_EVERY == 0:
            progress(f"{stream}: {number:,}")
    row = rows[-1]
    properties = pika.BasicProperties(message_id=row.message_id, headers=row.headers)
    return relatum.publish(channel, "", stream, row.body, properties)


def _declare(connection: pika.BlockingConnection, servers: Servers) -> None:
    for name in map(servers.stream, STREAMS):
        if queue_exists(connection, name):
            raise servers.taken(f"a queue or stream {name!r}")
    channel = connection.channel()
    arguments = {"x-queue-type": "stream", "x-stream-max-segment-size-bytes": SEGMENT_BYTES}
    for name in map(servers.stream, STREAMS):
        channel.queue_declare(name, durable=True, arguments=arguments)
    channel.close()
