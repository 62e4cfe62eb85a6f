"""Asking the questions: once with a stop-watch, then many times against the data frames."""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from relatum.reading import Message, StreamReader
from relatum_consumer import Relations
from relatum_consumer.demo._data import FLIGHTS, Dataset
from relatum_consumer.demo._publish import Servers
from relatum_consumer.demo._questions import QUESTIONS, Found, Question, applicable

REPEATS = 20
"""How often a question is asked of Relatum for its time, the median; it is scanned for once."""


@dataclass(frozen=True, slots=True)
class Timed:
    """One question's answer and how long it took each way."""

    question: Question
    answer: Message | None
    relatum_s: float
    scan_s: float
    scanned: Found


@dataclass(frozen=True, slots=True)
class Difference:
    """A question that was answered otherwise than the data frame says."""

    flight: str
    question: str
    expected: Found
    answered: Found
    by: str


class Demonstration:
    """The published data and the means to ask.

    Args:
        servers: Where it lies.
        data: The data frames it came from.
        relations: The consumer.
        reader: The reader that scans; the same class as the consumer reads with.
    """

    def __init__(self, servers: Servers, data: Dataset, relations: Relations, reader: StreamReader) -> None:
        self._servers = servers
        self._data = data
        self._relations = relations
        self._reader = reader
        # Where each flight lies: found out by reading, since offsets cannot be computed.
        self._offsets = {
            message.properties.message_id: message.offset
            for message in reader.iterate(servers.stream(FLIGHTS), "first")
        }

    def flight(self, number: int) -> Message:
        """The message of a row of the data frame of flights."""
        return self._relations.read(self._servers.stream(FLIGHTS), self._offsets[f"{FLIGHTS}-{number}"])

    def choose(self) -> Message:
        """The latest flight that left and has an answer to every question: a scan for it has the most to read."""
        flights, weather = self._data.flights, self._data.weather
        hours = set(zip(weather["origin"], weather["time_hour"], strict=True))
        reported = flights[["origin", "time_hour"]].apply(tuple, axis=1).isin(hours)
        known = flights["tailnum"].isin(self._data.planes["tailnum"])
        flown_before = flights["tailnum"].duplicated()
        return self.flight(int(flights.index[flights["dep_time"].notna() & known & flown_before & reported][-1]))

    def timed(self, flight: Message) -> Iterator[Timed]:
        """Each question about one flight, asked of Relatum `REPEATS` times and scanned for once."""
        for question in QUESTIONS:
            stream = self._servers.stream(question.stream)
            took = []
            for _ in range(REPEATS):
                began = time.perf_counter()
                answer = question.ask(self._relations, flight, stream).first
                took.append(time.perf_counter() - began)
            began = time.perf_counter()
            scanned = question.by_scanning(self._reader, flight, stream)
            yield Timed(question, answer, median(took), time.perf_counter() - began, scanned)

    def check(self, flight: Message, timed: list[Timed]) -> list[Difference]:
        """The answers shown, and those of the scan, against the data frames."""
        row = self._data.flights.loc[self._number(flight)]
        differences = []
        for each in timed:
            expected = each.question.by_frame(self._data, row)
            answered = each.answer.properties.message_id if each.answer else None
            for by, found in (("relatum", answered), ("scanning", each.scanned)):
                if found != expected:
                    differences.append(Difference(str(row["message_id"]), each.question.words, expected, found, by))
        return differences

    def check_many(
        self, numbers: Sequence[int], progress: Callable[[int], None] = lambda _: None
    ) -> tuple[int, list[Difference]]:
        """Ask about many flights, by their rows in the data frame; `progress` is told after each.

        Returns:
            How many questions were asked, and the differences.
        """
        asked, differences = 0, []
        for number in numbers:
            flight = self.flight(number)
            row = self._data.flights.loc[number]
            for question in applicable(flight):
                asked += 1
                expected = question.by_frame(self._data, row)
                answered = question.by_relatum(self._relations, flight, self._servers.stream(question.stream))
                if answered != expected:
                    differences.append(
                        Difference(str(row["message_id"]), question.words, expected, answered, "relatum")
                    )
            progress(1)
        return asked, differences

    def numbers(self, count: int, seed: int) -> list[int]:
        """The rows of random flights, and of every kind of unusual one."""
        flights = self._data.flights
        chosen = set(random.Random(seed).sample(range(len(flights)), min(count, len(flights))))  # noqa: S311
        cancelled = flights.index[flights["dep_time"].isna()]
        unnamed = flights.index[flights["tailnum"].isna()]
        unknown = flights.index[flights["tailnum"].notna() & ~flights["tailnum"].isin(self._data.planes["tailnum"])]
        # A plane that "left" twice at one moment: the offset decides which was the previous flight.
        twice = flights.index[flights.duplicated(["tailnum", "time_us"], keep=False) & flights["tailnum"].notna()]
        on_the_hour = flights.index[flights["time_us"] % 3_600_000_000 == 0]
        for unusual in (cancelled, unnamed, unknown, twice, on_the_hour):
            chosen.update(unusual[:5])
            chosen.update(unusual[-5:])
        return sorted({*chosen, 0, 1, len(flights) - 1})

    def _number(self, flight: Message) -> int:
        assert flight.properties.message_id is not None
        return int(flight.properties.message_id.rpartition("-")[2])
