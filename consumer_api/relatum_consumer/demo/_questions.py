"""The questions, each asked in three ways: of Relatum, by scanning the stream, and of the data frame."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import pandas as pd

from relatum.keys import KeyDefinition
from relatum.reading import Message, StreamReader
from relatum_consumer import Answer, Relations, Status
from relatum_consumer.demo._data import FLIGHTS, PLANES, WEATHER, Dataset

KEYS: Final = (
    KeyDefinition("tailnum"),
    KeyDefinition("origin"),
    KeyDefinition("airport_hour", source=("header:origin", "header:time_hour")),
)
"""The demo's relationship keys: two headers, and a composite of two headers."""

Found = str | None
"""The `message_id` of the answer; None where there is none."""


@dataclass(frozen=True)
class Question:
    """One question about a flight."""

    words: str
    how: str
    stream: str
    ask: Callable[[Relations, Message, str], Answer]
    matches: Callable[[Message, Message], bool]
    is_latest: bool
    rows: Callable[[Dataset, Any], pd.DataFrame]

    def by_relatum(self, relations: Relations, flight: Message, stream: str) -> Found:
        """What Relatum answers; the status where it does not know, which is no data frame's answer."""
        return said(self.ask(relations, flight, stream))

    def by_scanning(self, reader: StreamReader, flight: Message, stream: str) -> Found:
        """What a reader finds that looks at each message of the stream."""
        found: Message | None = None
        for message in reader.iterate(stream, "first"):
            if not self.matches(flight, message):
                continue
            if found is None or (self.is_latest and _at(message) > _at(found)):
                found = message
        return found.properties.message_id if found else None

    def by_frame(self, data: Dataset, flight: Any) -> Found:
        """What the data frame says."""
        rows = self.rows(data, flight)
        if rows.empty:
            return None
        row = rows.sort_values("time_us", kind="stable").iloc[-1] if self.is_latest else rows.iloc[0]
        return str(row["message_id"])


def said(answer: Answer) -> Found:
    """What an answer says: a message, that there is none, or the status where neither is known."""
    if answer.first is not None:
        return answer.first.properties.message_id
    return None if answer.status is Status.ABSENT else f"({answer.status})"


def _at(message: Message) -> tuple[int, int]:
    assert message.time_us is not None, "every message of the demo has a time"
    return message.time_us, message.offset


def _same(*headers: str) -> Callable[[Message, Message], bool]:
    def matches(flight: Message, other: Message) -> bool:
        return all(name in flight.headers and flight.headers[name] == other.headers.get(name) for name in headers)

    return matches


def _earlier(flight: Message, other: Message) -> bool:
    assert flight.time_us is not None
    assert other.time_us is not None
    if flight.stream == other.stream:
        return _at(other) < _at(flight)
    return other.time_us < flight.time_us


def _plane_rows(data: Dataset, flight: Any) -> pd.DataFrame:
    return data.planes[data.planes["tailnum"] == flight["tailnum"]]


def _hour_rows(data: Dataset, flight: Any) -> pd.DataFrame:
    frame = data.weather
    return frame[(frame["origin"] == flight["origin"]) & (frame["time_hour"] == flight["time_hour"])]


def _report_rows(data: Dataset, flight: Any) -> pd.DataFrame:
    return data.weather[data.weather["time_us"] < flight["time_us"]]


def _airport_report_rows(data: Dataset, flight: Any) -> pd.DataFrame:
    rows = _report_rows(data, flight)
    return rows[rows["origin"] == flight["origin"]]


def _previous_rows(data: Dataset, flight: Any) -> pd.DataFrame:
    # The frame is in order of time: what stands above the row is earlier, or of the same time and published before.
    rows = data.flights.loc[: flight.name - 1] if flight.name else data.flights.iloc[:0]
    return rows[rows["tailnum"] == flight["tailnum"]]


QUESTIONS: Final = (
    Question(
        "Which plane was it?",
        "equal tail number",
        PLANES,
        lambda relations, flight, stream: relations.related(flight, to=stream, by="tailnum"),
        _same("tailnum"),
        False,
        _plane_rows,
    ),
    Question(
        "What was the weather at its airport in its hour?",
        "equal airport and hour",
        WEATHER,
        lambda relations, flight, stream: relations.related(flight, to=stream, by="airport_hour"),
        _same("origin", "time_hour"),
        False,
        _hour_rows,
    ),
    Question(
        "Which weather report was the last before it left?",
        "time",
        WEATHER,
        lambda relations, flight, stream: relations.before(flight, stream),
        _earlier,
        True,
        _report_rows,
    ),
    Question(
        "And which was the last at its airport?",
        "time and airport",
        WEATHER,
        lambda relations, flight, stream: relations.before(flight, stream, by="origin"),
        lambda flight, other: _same("origin")(flight, other) and _earlier(flight, other),
        True,
        _airport_report_rows,
    ),
    Question(
        "Which was this plane's previous flight?",
        "time and tail number",
        FLIGHTS,
        lambda relations, flight, stream: relations.before(flight, stream, by="tailnum"),
        lambda flight, other: _same("tailnum")(flight, other) and _earlier(flight, other),
        True,
        _previous_rows,
    ),
)


def applicable(flight: Message) -> Iterator[Question]:
    """The questions that can be asked of a flight: one without a tail number has no plane to ask for."""
    for question in QUESTIONS:
        if "tail number" not in question.how or "tailnum" in flight.headers:
            yield question
