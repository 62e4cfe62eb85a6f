"""The demo's questions about a flight: timed for one flight, then checked against the rows for many."""

import random
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from statistics import median
from typing import Any, Final, NamedTuple

from relatum.headers import TIME_HEADER
from relatum.reading import Message, StreamReader
from relatum_cli.demo_streams import FLIGHTS, KEYS, PLANES, WEATHER, Data, Row, Servers
from relatum_consumer import Answer, Relations, Status

REPEATS = 20
"""How often Relatum answers a question for the median time; the scan runs once."""

_HEADERS: Final = {key.name: [part.places[0].name for part in key.components] for key in KEYS}
"""The headers of each key."""

Found = str | None
"""The `message_id` of the answer, or None."""


@dataclass(frozen=True)
class Question:
    """A question about a flight: the message of a stream with the same value of a key, or the latest one before it."""

    words: str
    stream: str
    by: str | None
    is_latest: bool

    def ask(self, relations: Relations, flight: Message, stream: str) -> Answer:
        if self.is_latest:
            return relations.before(flight, stream, by=self.by)
        return relations.related(flight, to=stream, by=self.by)

    def answer_among(self, flight: Row, rows: Iterable[Row]) -> Found:
        """Return the right answer, by comparing all rows of the stream in the order of publishing."""
        wanted = self._values(flight)
        found: Found = None
        for row in rows:
            if row.message_id == flight.message_id:
                break
            if wanted <= row.headers.items() and (self._is_before(row, flight) if self.is_latest else found is None):
                found = row.message_id
        return found

    def can_be_asked(self, flight: Row) -> bool:
        """Whether the flight has the values of the key: some have no tail number."""
        return all(value is not None for _, value in self._values(flight))

    def _values(self, flight: Row) -> set[tuple[str, Any]]:
        return {(name, flight.headers.get(name)) for name in _HEADERS.get(self.by or "", ())}

    def _is_before(self, row: Row, flight: Row) -> bool:
        # Flights are published in the order of their times, so all that come before this one are earlier.
        return self.stream == FLIGHTS or row.headers[TIME_HEADER] < flight.headers[TIME_HEADER]


QUESTIONS: Final = (
    Question("Which plane was it?", PLANES, "tailnum", is_latest=False),
    Question("The weather in its hour?", WEATHER, "airport_hour", is_latest=False),
    Question("The last report before it?", WEATHER, None, is_latest=True),
    Question("The last at its airport?", WEATHER, "origin", is_latest=True),
    Question("The plane's flight before?", FLIGHTS, "tailnum", is_latest=True),
)


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
        self._data = data
        self._relations = relations
        self._reader = reader
        self.differences: list[Difference] = []
        # Offsets cannot be computed: RabbitMQ uses some itself.
        self._offsets = {
            message.properties.message_id: message.offset
            for message in reader.iterate(servers.stream(FLIGHTS), "first")
        }

    def flight(self, row: Row) -> Message:
        return self._relations.read(self._servers.stream(FLIGHTS), self._offsets[row.message_id])

    def choose(self) -> Row:
        """Return the latest flight that departed and has all answers: a scan for it reads the most."""

        def has_answers(row: Row) -> bool:
            is_cancelled = b'"dep_time": null' in row.body
            return not is_cancelled and all(self._expected(question, row) for question in QUESTIONS)

        return next(filter(has_answers, self._data[FLIGHTS][::-1]))

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
            scanned = question.answer_among(row, map(_row_of, self._reader.iterate(stream, "first")))
            scan_s = time.perf_counter() - began
            self._check(question, row, _found(answer))
            self._check(question, row, scanned, by="scanning")
            if answer.first is not None:
                yield Timed(question, answer.first, median(took), scan_s)

    def check(self, count: int, seed: int) -> int:
        """Ask this many questions about random flights; return how many were asked."""
        flights = self._data[FLIGHTS]
        asked = 0
        for row in random.Random(seed).sample(flights, len(flights)):  # noqa: S311
            flight = self.flight(row)
            for question in QUESTIONS:
                if asked == count:
                    return asked
                if question.can_be_asked(row):
                    answer = question.ask(self._relations, flight, self._servers.stream(question.stream))
                    self._check(question, row, _found(answer))
                    asked += 1
        return asked

    def _expected(self, question: Question, row: Row) -> Found:
        return question.answer_among(row, self._data[question.stream])

    def _check(self, question: Question, row: Row, answered: Found, by: str = "Relatum") -> None:
        expected = self._expected(question, row)
        if answered != expected:
            self.differences.append(Difference(row.message_id, question.words, expected, answered, by))


def _row_of(message: Message) -> Row:
    return Row(message.properties.message_id or "", message.headers, message.body)


def _found(answer: Answer) -> Found:
    """Return the message of an answer, None if it is absent, or the status if neither is known."""
    if answer.first is not None:
        return answer.first.properties.message_id
    return None if answer.status is Status.ABSENT else f"({answer.status})"
