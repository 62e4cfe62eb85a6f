"""The questions about a flight: timed for one flight, then checked against the rows for many."""

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import Final, NamedTuple

from relatum.reading import Message, StreamReader
from relatum_cli.demo._data import FLIGHTS, PLANES, WEATHER, Data, Expected, Row
from relatum_cli.demo._publish import Servers
from relatum_consumer import Answer, Relations, Status

REPEATS = 20
"""How often Relatum answers a question for the median time; the scan runs once."""

_HEADERS: Final = {"tailnum": ("tailnum",), "origin": ("origin",), "airport_hour": ("origin", "time_hour")}

Found = str | None
"""The `message_id` of the answer, or None."""


@dataclass(frozen=True)
class Question:
    """A question about a flight: the message of a stream with the same value of a key, or the latest one before it."""

    words: str
    stream: str
    by: str | None
    is_latest: bool
    expected: Callable[[Expected, Row], Row | None]

    def ask(self, relations: Relations, flight: Message, stream: str) -> Answer:
        """Return Relatum's answer."""
        if self.is_latest:
            return relations.before(flight, stream, by=self.by)
        assert self.by is not None
        return relations.related(flight, to=stream, by=self.by)

    def by_scanning(self, reader: StreamReader, flight: Message, stream: str) -> Found:
        """Return the answer of a scan over all messages of the stream."""
        found: Message | None = None
        for message in reader.iterate(stream, "first"):
            if self._matches(flight, message) and (found is None or (self.is_latest and _at(message) > _at(found))):
                found = message
        return found.properties.message_id if found else None

    def can_be_asked(self, flight: Message) -> bool:
        """Whether the flight has the values of the key: some have no tail number."""
        return all(name in flight.headers for name in _HEADERS.get(self.by or "", ()))

    def _matches(self, flight: Message, other: Message) -> bool:
        if any(flight.headers[name] != other.headers.get(name) for name in _HEADERS.get(self.by or "", ())):
            return False
        if not self.is_latest:
            return True
        return _at(other) < _at(flight) if other.stream == flight.stream else _at(other)[0] < _at(flight)[0]


def _at(message: Message) -> tuple[int, int]:
    assert message.time_us is not None, "flights and reports have a time"
    return message.time_us, message.offset


QUESTIONS: Final = (
    Question("Which plane was it?", PLANES, "tailnum", False, Expected.plane),
    Question("The weather in its hour?", WEATHER, "airport_hour", False, Expected.report_of_its_hour),
    Question("The last report before it?", WEATHER, None, True, Expected.report_before),
    Question("The last at its airport?", WEATHER, "origin", True, Expected.airport_report_before),
    Question("The plane's flight before?", FLIGHTS, "tailnum", True, Expected.previous_flight),
)


def said(answer: Answer) -> Found:
    """Return the message of an answer, None if it is absent, or the status if neither is known."""
    if answer.first is not None:
        return answer.first.properties.message_id
    return None if answer.status is Status.ABSENT else f"({answer.status})"


class Timed(NamedTuple):
    """The answer to a question, and how long Relatum and the scan took."""

    question: Question
    answer: Message
    relatum_s: float
    scan_s: float


class Difference(NamedTuple):
    """An answer that differs from the rows."""

    message: str
    question: str
    expected: Found
    answered: Found
    by: str


class Asking:
    """Asks the questions, and collects the answers that differ from the rows.

    Args:
        servers: The servers with the streams.
        data: The published rows.
        relations: The lookups.
        reader: The reader for scans, of the class that lookups use, too.
    """

    def __init__(self, servers: Servers, data: Data, relations: Relations, reader: StreamReader) -> None:
        self._servers = servers
        self._flights = data[FLIGHTS]
        self._expected = Expected(data)
        self._relations = relations
        self._reader = reader
        self.differences: list[Difference] = []
        # Offsets cannot be computed: RabbitMQ uses some itself.
        self._offsets = {
            message.properties.message_id: message.offset
            for message in reader.iterate(servers.stream(FLIGHTS), "first")
        }

    def flight(self, row: Row) -> Message:
        """Read the message of a row."""
        return self._relations.read(self._servers.stream(FLIGHTS), self._offsets[row.message_id])

    def choose(self) -> Row:
        """Return the latest flight that departed and has all answers: a scan for it reads the most."""

        def has_answers(row: Row) -> bool:
            is_cancelled = b'"dep_time": null' in row.body
            return not is_cancelled and all(each.expected(self._expected, row) for each in QUESTIONS)

        return next(filter(has_answers, self._flights[::-1]))

    def timed(self, row: Row) -> Iterator[Timed]:
        """Time each question about one flight: `REPEATS` times with Relatum, once by scanning."""
        flight = self.flight(row)
        for question in QUESTIONS:
            stream = self._servers.stream(question.stream)
            took = []
            for _ in range(REPEATS):
                began = time.perf_counter()
                answer = question.ask(self._relations, flight, stream)
                took.append(time.perf_counter() - began)
            began = time.perf_counter()
            scanned = question.by_scanning(self._reader, flight, stream)
            scan_s = time.perf_counter() - began
            self._check(question, row, said(answer))
            self._check(question, row, scanned, by="scanning")
            if answer.first is not None:
                yield Timed(question, answer.first, median(took), scan_s)

    def check(self, count: int, seed: int) -> int:
        """Ask this many questions about random flights; return how many were asked."""
        asked = 0
        for row in random.Random(seed).sample(self._flights, len(self._flights)):  # noqa: S311
            flight = self.flight(row)
            for question in QUESTIONS:
                if asked == count:
                    return asked
                if question.can_be_asked(flight):
                    answer = question.ask(self._relations, flight, self._servers.stream(question.stream))
                    self._check(question, row, said(answer))
                    asked += 1
        return asked

    def _check(self, question: Question, row: Row, answered: Found, by: str = "Relatum") -> None:
        row_expected = question.expected(self._expected, row)
        expected = row_expected and row_expected.message_id
        if answered != expected:
            self.differences.append(Difference(row.message_id, question.words, expected, answered, by))
