"""The two sides of a join: the accepted arguments, and the relations of each side.

Joins work only on relations: small rows with a key's value and a place, without payloads. A side's relations are a
frame of the columns `key_0`, `key_1`, … (the values of the join's keys), `stream`, `offset` and `time_us` (its time
in microseconds since 1970, null if it has none). Payloads are read at the end, for the result.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias, TypedDict

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from relatum.common.checks import checked_count
from relatum.errors import InvalidInput
from relatum.reading import Broker
from relatum.store.catalog import check_recorded, streams_named
from relatum_spark._columns import PLACE, schema
from relatum_spark._format import BatchReader
from relatum_spark._options import SourceOptions
from relatum_spark._resolve import resolve
from relatum_spark._servers import BROKER_VARIABLE, GivenBroker, broker_of, in_tasks, names_of, open_reader
from relatum_spark._table import PARTITIONS_MAX, Snapshot, connected, database_of, relationships

GivenSide: TypeAlias = str | Sequence[str] | DataFrame
"""A stream, a super stream (its partitions), several of them, or a frame with `stream` and `offset` columns."""

GivenKeys: TypeAlias = str | Sequence[str]
"""The name of a key, or of several keys that must all be equal."""

PARTITIONS: Final = 8
"""Default number of tasks that read the table concurrently."""

_RESOLVED: Final = ("value", "headers", "properties", "status")


Side: TypeAlias = tuple[str, ...] | DataFrame
"""A checked side: names, or a frame of the columns `stream` and `offset`."""


def side_of(argument: str, given: Any) -> Side:
    """Check a side; raises `InvalidInput` if it is neither names nor a frame of places."""
    if not hasattr(given, "schema"):  # not a frame, not of Spark Connect either
        return tuple(dict.fromkeys(names_of(argument, given)))
    offset = next((name for name in ("offset", "stream_offset") if name in given.columns), None)
    if "stream" not in given.columns or offset is None:
        raise InvalidInput(f"the DataFrame of {argument}= needs the columns stream and offset (or stream_offset)")
    places: DataFrame = given.select(F.col("stream").cast("string"), F.col(offset).cast("long").alias("offset"))
    return places


def keys_of(on: Any, *, argument: str = "on") -> tuple[str, ...]:
    names = names_of(argument, on)
    if len(set(names)) < len(names):
        raise InvalidInput(f"{argument}= names a key twice: leave one out")
    return names


class Where(TypedDict, total=False):
    """The common arguments of all joins: the servers, and how to read the relationship table.

    Attributes:
        database: PostgreSQL's URL. None uses the snapshot's, or else RELATUM_DATABASE_URL.
        broker: The broker, whose virtual host has the streams. None uses RELATUM_BROKER_URL. A join connects to it only
            for payloads, times without a key, and ends of streams. Without a broker the virtual host is `/`.
        partitions: Maximum tasks that read the table concurrently, 1 to 10,000. None means 8.
        snapshot: The state of the table to read; the action must run inside its block.
    """

    database: str | None
    broker: GivenBroker
    partitions: int | None
    snapshot: Snapshot | None


@dataclass(frozen=True, slots=True)
class Inputs:
    """The checked arguments of `Where`."""

    database: str
    broker: Broker | None
    """None if no broker is named or needed."""
    snapshot: Snapshot | None
    partitions: int

    @classmethod
    def of(
        cls,
        *,
        needs_broker: bool,
        database: str | None = None,
        broker: GivenBroker = None,
        partitions: int | None = None,
        snapshot: Snapshot | None = None,
    ) -> "Inputs":
        """Check the arguments of a public function; raises `ConfigurationError` and `InvalidInput`."""
        if partitions is not None:
            checked_count("partitions", partitions, most=PARTITIONS_MAX)
        url = database_of(database, snapshot)
        is_named = broker is not None or bool(os.environ.get(BROKER_VARIABLE))
        found = broker_of(broker) if needs_broker or is_named else None
        return cls(url, found, snapshot, PARTITIONS if partitions is None else partitions)

    @property
    def vhost(self) -> str:
        """The streams' virtual host: the broker's, or `/` if no broker is named."""
        return "/" if self.broker is None else self.broker.vhost

    def relations(self, spark: SparkSession, streams: Sequence[str] | None, keys: Sequence[str]) -> DataFrame:
        """Return rows of the table, in one state for all uses."""
        return relationships(
            spark,
            database=self.database,
            streams=streams,
            keys=keys,
            vhost=self.vhost,
            partitions=self.partitions,
            snapshot=self.snapshot,
        )

    def sides(
        self, spark: SparkSession, sides: Sequence[Side], keys: Sequence[str], *, is_right_known: bool = True
    ) -> list[DataFrame]:
        """Return the relations of each side, from one read of the table.

        Without `is_right_known`, the right side may name streams that were never recorded; they have no relations.
        """
        with connected(self.database, self.snapshot) as connection:
            for side in sides if is_right_known else sides[:1]:
                if isinstance(side, tuple):
                    check_recorded(connection, self.vhost, side)
            named = [
                [row.name for row in streams_named(connection, self.vhost, side)] if isinstance(side, tuple) else None
                for side in sides
            ]
        streams = None if None in named else sorted({name for found in named for name in found or ()})
        table = self.relations(spark, streams or None, keys)
        return [
            keyed(table.where(F.col("stream").isin(*(found or ()))), keys)
            if isinstance(side, tuple)
            else keyed(table, keys).join(side, list(PLACE), "left_semi")
            for side, found in zip(sides, named, strict=True)
        ]

    def times(self, spark: SparkSession, side: Side) -> DataFrame:
        """Return the places and times of a side's messages, read from the streams: `stream`, `offset`, `time_us`.

        Streams given by name are read up to their current ends; messages of a frame that no longer exist are omitted.
        """
        assert self.broker is not None, "reading streams needs a broker"
        if not isinstance(side, tuple):
            found = resolve(side.dropna().distinct(), value=False, headers=False, broker=self.broker)
            messages = found.where(F.col("status") == "found")
        else:
            with open_reader(self.broker) as reader:
                streams = dict.fromkeys(stream for name in side for stream in reader.partitions(name) or [name])
            options = SourceOptions(
                broker=self.broker, streams=tuple(streams), include_value=False, include_headers=False
            )
            source = BatchReader(options)
            messages = in_tasks(spark, source.read, source.partitions(), schema(value=False, headers=False))
        return messages.select(*PLACE, F.unix_micros("timestamp").alias("time_us"))

    def result(
        self, joined: DataFrame, on: GivenKeys | None, *sides: str, payloads: bool, more: Sequence[str] = ()
    ) -> DataFrame:
        """Return a joined frame in its public form: `value`, the place and time of each side, then the columns `more`.

        `value` is text if `on` is a name, an array in the order of the keys if it is a list, and omitted if it is None.
        With `payloads`, the messages of each side follow, each checked to have the values that joined it.
        """
        keys = () if on is None else keys_of(on)
        columns: list[Column] = []
        if isinstance(on, str):
            columns.append(F.col("key_0").alias("value"))
        elif on is not None:
            columns.append(F.array(*key_columns(on)).alias("value"))
        for side in sides:
            columns += [F.col(f"{side}_stream"), F.col(f"{side}_offset")]
            columns.append(F.timestamp_micros(f"{side}_time_us").alias(f"{side}_time"))
        added = list(more)
        for side in sides if payloads else ():
            joined = resolve(
                joined,
                stream_column=f"{side}_stream",
                offset_column=f"{side}_offset",
                prefix=f"{side}_",
                check=dict(zip(keys, key_columns(keys), strict=True)),
                broker=self.broker,
                database=self.database,
            )
            added += [f"{side}_{name}" for name in _RESOLVED]
        return joined.select(*columns, *added)


def key_columns(keys: Sequence[str]) -> list[str]:
    """Return the columns of the keys' values, in order."""
    return [f"key_{n}" for n in range(len(keys))]


def keyed(relations: DataFrame, keys: Sequence[str]) -> DataFrame:
    """Convert rows of the table to a side's relations, for messages that have a value of every key."""
    place = (F.col("stream"), F.col("stream_offset").alias("offset"))
    time_us = F.unix_micros("time").alias("time_us")
    if len(keys) == 1:
        return relations.where(F.col("key") == keys[0]).select(F.col("value").alias("key_0"), *place, time_us)
    rows = relations.where(F.col("key").isin(*keys)).select("key", "value", *place, time_us)
    values = [
        F.collect_set(F.when(F.col("key") == key, F.col("value"))).alias(f"key_{n}") for n, key in enumerate(keys)
    ]
    by_message = rows.groupBy(*PLACE).agg(*values, F.max("time_us").alias("time_us"))
    # All combinations of a message's values. A message without a value of a key has an empty set, so no row.
    for column in key_columns(keys):
        by_message = by_message.withColumn(column, F.explode(column))
    return by_message.select(*key_columns(keys), *PLACE, "time_us")


def prefixed(relations: DataFrame, keys: Sequence[str], prefix: str) -> DataFrame:
    """Prefix the columns of the place and time of a side's relations."""
    columns = [F.col(name).alias(f"{prefix}_{name}") for name in (*PLACE, "time_us")]
    return relations.select(*keys, *columns)
