"""The questions about a flight, and what each answer must be: from Relatum, by scanning, and from the rows."""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from relatum.keys import KeyDefinition
from relatum.reading import Message, StreamReader
from relatum_consumer import Answer, Relations, Status
from relatum_consumer.demo._data import FLIGHTS, PLANES, WEATHER, Data, Row

KEYS: Final = (
    KeyDefinition("tailnum"),
    KeyDefinition("origin"),
    KeyDefinition("airport_hour", source=("header:origin", "header:time_hour")),
)
"""The demo's relationship keys: two headers, and a composite of two headers."""

_HEADERS: Final = {"tailnum": ("tailnum",), "origin": ("origin",), "airport_hour": ("origin", "time_hour")}

WITHIN_S: Final = 3_600.0
"""Seconds within which a flight is expected to leave, after the weather report of its airport and hour."""

Found = str | None
"""The `message_id` of the answer; None where there is none."""


class Expected:
    """What the answers must be: looked up in dictionaries of the rows, without Relatum."""

    def __init__(self, data: Data) -> None:
        self._flights = data[FLIGHTS]
        self._planes = {row.headers["tailnum"]: row for row in data[PLANES]}
        self._reports = data[WEATHER]
        self._reports_of: dict[str, list[Row]] = defaultdict(list)
        self._report_in: dict[tuple[str, str], Row] = {}
        for row in self._reports:
            self._reports_of[row.headers["origin"]].append(row)
            self._report_in.setdefault((row.headers["origin"], row.headers["time_hour"]), row)
        self._previous: dict[str, Row | None] = {}
        latest: dict[str | None, Row] = {}
        for row in self._flights:
            tail_number = row.headers.get("tailnum")
            self._previous[row.message_id] = latest.get(tail_number)
            latest[tail_number] = row

    def plane(self, flight: Row) -> Row | None:
        return self._planes.get(flight.headers.get("tailnum"))

    def report_of_its_hour(self, flight: Row) -> Row | None:
        return self._report_in.get((flight.headers["origin"], flight.headers["time_hour"]))

    def report_before(self, flight: Row) -> Row | None:
        return _last_before(self._reports, flight)

    def airport_report_before(self, flight: Row) -> Row | None:
        return _last_before(self._reports_of[flight.headers["origin"]], flight)

    def previous_flight(self, flight: Row) -> Row | None:
        return self._previous[flight.message_id]

    def unmet(self, since: int, until: int) -> dict[str, str]:
        """The reports of a span, by `message_id`, that a flight of their hour left after too late, or none did."""
        reports = [row for row in self._reports if since <= row.headers["relatum_time"] < until]
        waiting = {(row.headers["origin"], row.headers["time_hour"]): row for row in reports}
        unmet = {row.message_id: "missing" for row in reports}
        # In the order of their times: the first flight that is not before its report decides.
        for flight in self._flights:
            hour = flight.headers["origin"], flight.headers["time_hour"]
            report = waiting.get(hour)
            if report is None or flight.headers["relatum_time"] < report.headers["relatum_time"]:
                continue
            del waiting[hour]
            if flight.headers["relatum_time"] - report.headers["relatum_time"] <= WITHIN_S * 1e6:
                del unmet[report.message_id]
            else:
                unmet[report.message_id] = "late"
        return unmet


def _last_before(rows: Sequence[Row], flight: Row) -> Row | None:
    count = bisect_left(rows, flight.headers["relatum_time"], key=lambda row: row.headers["relatum_time"])
    return rows[count - 1] if count else None


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
