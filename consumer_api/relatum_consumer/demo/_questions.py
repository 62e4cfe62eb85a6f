"""The questions about a flight, each asked of Relatum and by scanning a stream."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from relatum.keys import KeyDefinition
from relatum.reading import Message, StreamReader
from relatum_consumer import Answer, Relations, Status
from relatum_consumer.demo._data import FLIGHTS, PLANES, WEATHER, Expected, Row

KEYS: Final = (
    KeyDefinition("tailnum"),
    KeyDefinition("origin"),
    KeyDefinition("airport_hour", source=("header:origin", "header:time_hour")),
)
"""The demo's relationship keys: two headers, and a composite of two headers."""

_HEADERS: Final = {"tailnum": ("tailnum",), "origin": ("origin",), "airport_hour": ("origin", "time_hour")}

Found = str | None
"""The `message_id` of the answer; None where there is none."""


@dataclass(frozen=True)
class Question:
    """A question about a flight: which message of a stream has the same value of a key, or is the latest before it."""

    words: str
    stream: str
    by: str | None
    is_latest: bool
    expected: Callable[[Expected, Row], Row | None]

    def ask(self, relations: Relations, flight: Message, stream: str) -> Answer:
        """Ask Relatum."""
        if self.is_latest:
            return relations.before(flight, stream, by=self.by)
        assert self.by is not None
        return relations.related(flight, to=stream, by=self.by)

    def by_scanning(self, reader: StreamReader, flight: Message, stream: str) -> Found:
        """Look at each message of the stream."""
        found: Message | None = None
        for message in reader.iterate(stream, "first"):
            if self._matches(flight, message) and (found is None or (self.is_latest and _at(message) > _at(found))):
                found = message
        return found.properties.message_id if found else None

    def can_be_asked(self, flight: Message) -> bool:
        """Whether it has a value to ask by: a flight without a tail number has no plane."""
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
    """What an answer says: a message, that there is none, or the status where neither is known."""
    if answer.first is not None:
        return answer.first.properties.message_id
    return None if answer.status is Status.ABSENT else f"({answer.status})"
