"""The two sides of a join: what may be given as one, and the relations each has.

Joins work on relations alone: small rows of a key's value and a place, without payloads. A side's relations are a frame
of the columns `key_0`, `key_1`, … (the values of the keys joined on), `stream`, `offset` and `time_us` (the message's
time in microseconds since 1970, null where it has none). Payloads are read at the end, for what is left.
"""

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import pyarrow as pa
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.datasource import InputPartition

from relatum.checks import checked_count
from relatum.errors import InvalidInput
from relatum.reading import Broker
from relatum.store.catalog import streams_named
from relatum_spark._format import BatchReader
from relatum_spark._options import SourceOptions
from relatum_spark._resolve import resolve
from relatum_spark._schema import schema
from relatum_spark._table import PARTITIONS_MAX, Snapshot, check_recorded, connected, database_of, relationships
from relatum_spark._where import BROKER_VARIABLE, GivenBroker, broker_of, names_of, open_reader

GivenSide: TypeAlias = str | Sequence[str] | DataFrame
"""A stream, a super stream (its partitions), several of them, or a frame with `stream` and `offset` columns."""

GivenKeys: TypeAlias = str | Sequence[str]
"""The name of a key, or of several that must all be equal."""

PLACE: Final = ("stream", "offset")
"""The columns that say where a message lies."""

PARTITIONS: Final = 8
"""Tasks that read the table at once, unless another number is given."""

_RESOLVED: Final = ("value", "headers", "properties", "status")


Side: TypeAlias = tuple[str, ...] | DataFrame
"""A side as it is given, checked: names, or a frame of the columns `stream` and `offset`."""


def side_of(argument: str, given: Any) -> Side:
    """Check a side; raises `InvalidInput` where it is neither names nor a frame of places."""
    if not hasattr(given, "schema"):  # no frame, of Spark Connect either
        return tuple(dict.fromkeys(names_of(argument, given)))
    offset = next((name for name in ("offset", "stream_offset") if name in given.columns), None)
    if "stream" not in given.columns or offset is None:
        raise InvalidInput(f"the DataFrame of {argument}= needs the columns stream and offset (or stream_offset)")
    places: DataFrame = given.select(F.col("stream").cast("string"), F.col(offset).cast("long").alias("offset"))
    return places


def keys_of(on: Any, *, argument: str = "on") -> tuple[str, ...]:
    """Check the names of the keys joined on."""
    names = names_of(argument, on)
    if len(set(names)) < len(names):
        raise InvalidInput(f"{argument}= names a key twice")
    return names


@dataclass(frozen=True, slots=True)
class Inputs:
    """Where a join reads: the arguments of `Where`, checked."""

    database: str
    broker: Broker | None
    """None where none is named, and none is needed."""
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
        """The virtual host of the streams: the broker's, `/` where none is named."""
        return "/" if self.broker is None else self.broker.vhost

    def relations(self, spark: SparkSession, streams: Sequence[str] | None, keys: Sequence[str]) -> DataFrame:
        """Return rows of the table, all of one state, whenever and however often they are used."""
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

        Where not `is_right_known`, the right side may name streams that the table does not know: they have none.
        """
        named = [
            self._recorded(side, is_known=known) for side, known in zip(sides, (True, is_right_known), strict=True)
        ]
        streams = None if None in named else sorted({name for found in named for name in found or ()})
        table = self.relations(spark, streams or None, keys)
        return [
            keyed(table.where(F.col("stream").isin(*(found or ()))), keys)
            if isinstance(side, tuple)
            else keyed(table, keys).join(side, list(PLACE), "left_semi")
            for side, found in zip(sides, named, strict=True)
        ]

    def _recorded(self, side: Side, *, is_known: bool) -> list[str] | None:
        """Return the recorded streams of a side given by names; None for a frame."""
        if not isinstance(side, tuple):
            return None
        with connected(self.database, self.snapshot) as connection:
            rows = streams_named(connection, self.vhost, side)
        if is_known:
            check_recorded(side, [name for row in rows for name in (row.name, row.super_stream)])
        return [row.name for row in rows]

    def times(self, spark: SparkSession, side: Side) -> DataFrame:
        """Return the places and times of all messages of a side, read from the streams: `stream`, `offset`, `time_us`.

        Streams given by name are read up to where they end now; messages of a frame that are gone are left out.
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
            source = BatchReader(options, ())
            parts = tuple(source.partitions())
            numbers = spark.range(0, len(parts), 1, max(len(parts), 1))
            messages = numbers.mapInArrow(_TimeReader(source, parts), schema(value=False, headers=False))
        return messages.select(*PLACE, F.unix_micros("timestamp").alias("time_us"))

    def with_payloads(
        self, joined: DataFrame, keys: Sequence[str], *sides: str, wanted: bool
    ) -> tuple[DataFrame, list[str]]:
        """Add the messages of each side where they are wanted, and return the names of the new columns too.

        Each message is checked to carry the values it was joined by.
        """
        more: list[str] = []
        for side in sides if wanted else ():
            joined = resolve(
                joined,
                stream_column=f"{side}_stream",
                offset_column=f"{side}_offset",
                prefix=f"{side}_",
                check=dict(zip(keys, key_columns(keys), strict=True)),
                broker=self.broker,
                database=self.database,
            )
            more += [f"{side}_{name}" for name in _RESOLVED]
        return joined, more


@dataclass(frozen=True, slots=True)
class _TimeReader:
    """What a task that reads times does: a part's number in, places and times out. Can be pickled."""

    source: BatchReader
    parts: tuple[InputPartition, ...]

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                yield from self.source.read(self.parts[number])


def key_columns(keys: Sequence[str]) -> list[str]:
    """Return the columns that hold the values of the keys, in their order."""
    return [f"key_{n}" for n in range(len(keys))]


def keyed(relations: DataFrame, keys: Sequence[str]) -> DataFrame:
    """Make a side's relations out of rows of the table: of the messages that have a value of every one of the keys."""
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
    """Put a prefix before the place and the time of a side's relations."""
    columns = [F.col(name).alias(f"{prefix}_{name}") for name in (*PLACE, "time_us")]
    return relations.select(*keys, *columns)


def presented(joined: DataFrame, on: GivenKeys | None, *sides: str, more: Sequence[str] = ()) -> DataFrame:
    """Return a joined frame as callers see it: `value`, place and time of each side, then the other columns named.

    `value` is text where one key was named, an array in the order of the keys where a list was given, and left out
    where no key was.
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
