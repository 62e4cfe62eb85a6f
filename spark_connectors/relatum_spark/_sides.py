"""The two sides of a join: what may be given as one, and the relations each has.

Joins work on relations alone: small rows of a key's value and a place, without payloads. A side's relations are a frame
of the columns `key_0`, `key_1`, … (the values of the keys joined on), `stream`, `offset` and `time_us` (the message's
time in microseconds since 1970, null where it has none). Payloads are read at the end, for what is left.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, TypeAlias

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from relatum.errors import InvalidInput
from relatum.limits import TIME_US_MAX

GivenSide: TypeAlias = str | Sequence[str] | DataFrame
"""A stream, a super stream (its partitions), several of them, or a frame with `stream` and `offset` columns."""

GivenKeys: TypeAlias = str | Sequence[str]
"""The name of a key, or of several that must all be equal."""

PLACE: Final = ("stream", "offset")
"""The columns that say where a message lies."""


@dataclass(frozen=True, slots=True)
class Side:
    """One side of a join, checked as far as that goes without a database.

    Attributes:
        argument: The name of the argument it was given as: "left" or "right".
        names: Streams and super streams; none where a frame was given.
        places: The frame that was given, as columns `stream` and `offset`; None where names were.
    """

    argument: str
    names: tuple[str, ...] = ()
    places: DataFrame | None = None


def side_of(argument: str, given: Any) -> Side:
    """A side from an argument.

    Raises:
        InvalidInput: it is neither names nor a frame with `stream` and `offset` (or `stream_offset`).
    """
    if hasattr(given, "columns") and hasattr(given, "select"):  # a frame, of Spark Connect too
        return Side(argument, places=_places(argument, given))
    names = (given,) if isinstance(given, str) else given
    if not isinstance(names, Sequence) or not names or not all(isinstance(name, str) and name for name in names):
        raise InvalidInput(f"{argument}= takes a stream's name, several, or a DataFrame with stream and offset")
    return Side(argument, names=tuple(dict.fromkeys(names)))


def _places(argument: str, frame: DataFrame) -> DataFrame:
    offset = next((name for name in ("offset", "stream_offset") if name in frame.columns), None)
    if "stream" not in frame.columns or offset is None:
        raise InvalidInput(f"the DataFrame of {argument}= needs the columns stream and offset (or stream_offset)")
    return frame.select(F.col("stream").cast("string"), F.col(offset).cast("long").alias("offset"))


def keys_of(on: Any, *, argument: str = "on") -> tuple[str, ...]:
    """The names of the keys joined on.

    Raises:
        InvalidInput: they are no names, or there is none.
    """
    names = (on,) if isinstance(on, str) else on
    if not isinstance(names, Sequence) or not names or not all(isinstance(name, str) and name for name in names):
        raise InvalidInput(f"{argument}= takes the name of a key, or a list of several")
    if len(set(names)) < len(names):
        raise InvalidInput(f"{argument}= names a key twice")
    return tuple(names)


def span_us(argument: str, given: Any) -> int:
    """A span of time in microseconds, from a timedelta or seconds; more than the calendar holds means all of it.

    Raises:
        InvalidInput: it is negative, or no span.
    """
    seconds = given.total_seconds() if isinstance(given, timedelta) else given
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 <= seconds < math.inf:
        raise InvalidInput(f"{argument}= takes a timedelta or seconds, 0 or more")
    if isinstance(given, timedelta):  # exact, where a float of seconds is not
        return min(given // timedelta(microseconds=1), 2 * TIME_US_MAX)
    return round(min(seconds, 2 * TIME_US_MAX // 1_000_000) * 1_000_000)


def key_columns(keys: Sequence[str]) -> list[str]:
    """The columns that hold the values of the keys, in their order."""
    return [f"key_{n}" for n in range(len(keys))]


def keyed(relations: DataFrame, keys: Sequence[str]) -> DataFrame:
    """A side's relations from rows of the table: of the messages that have a value of every one of the keys.

    Args:
        relations: Columns key, value, stream, stream_offset, time.
        keys: Names of keys.
    """
    place = (F.col("stream"), F.col("stream_offset").alias("offset"))
    time_us = F.unix_micros("time").alias("time_us")
    if len(keys) == 1:
        return relations.where(F.col("key") == keys[0]).select(F.col("value").alias("key_0"), *place, time_us)
    rows = relations.where(F.col("key").isin(*keys)).select("key", "value", *place, time_us)
    values = [
        F.collect_set(F.when(F.col("key") == key, F.col("value"))).alias(f"key_{n}") for n, key in enumerate(keys)
    ]
    wide = rows.groupBy(*PLACE).agg(*values, F.max("time_us").alias("time_us"))
    # Of a message with several values each with each; one without any of a key has an empty set, and no row.
    for column in key_columns(keys):
        wide = wide.withColumn(column, F.explode(column))
    return wide.select(*key_columns(keys), *PLACE, "time_us")


def prefixed(relations: DataFrame, keys: Sequence[str], prefix: str) -> DataFrame:
    """A side's relations with the prefix before place and time."""
    columns = [F.col(name).alias(f"{prefix}_{name}") for name in (*PLACE, "time_us")]
    return relations.select(*keys, *columns)


def presented(joined: DataFrame, on: GivenKeys | None, *sides: str, more: Sequence[str] = ()) -> DataFrame:
    """A joined frame as callers see it: `value`, then place and time of each side, then the other columns named.

    `value` is text where one key was named, and an array in the order of the keys where a list was given; it is left
    out where no key was.
    """
    columns: list[Column] = []
    if isinstance(on, str):
        columns.append(F.col("key_0").alias("value"))
    elif on is not None:
        columns.append(F.array(*key_columns(on)).alias("value"))
    for side in sides:
        columns += [F.col(f"{side}_stream"), F.col(f"{side}_offset")]
        columns.append(F.timestamp_micros(f"{side}_time_us").alias(f"{side}_time"))
    return joined.select(*columns, *more)
