"""What a join reads: its sides' relations, all of one state of the table, and in the end the payloads."""

import os
from collections.abc import Container, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import sqlalchemy as sa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from relatum.checks import checked_count
from relatum.errors import StreamNotFound
from relatum.reading import BrokerAddress
from relatum.store import as_engine, streams_named, translated_errors
from relatum_spark._relationships import PARTITIONS_MAX, database_of, relationships
from relatum_spark._resolve import resolve
from relatum_spark._sides import PLACE, Side, key_columns, keyed
from relatum_spark._snapshot import Snapshot
from relatum_spark._where import BROKER_VARIABLE, Broker

PARTITIONS: Final = 8
"""Tasks that read the table at once, where nothing else is asked."""

_RESOLVED: Final = ("value", "headers", "properties", "status")


@dataclass(frozen=True, slots=True)
class Inputs:
    """Where a join reads.

    Attributes:
        database: PostgreSQL's URL.
        broker: Which RabbitMQ; None where none was named, which only payloads need.
        snapshot: The state to read; None for what is recorded now.
        partitions: Tasks that read the table at once.
    """

    database: str
    broker: Broker | None
    snapshot: Snapshot | None
    partitions: int

    @classmethod
    def of(
        cls,
        database: str | None,
        broker: str | BrokerAddress | Broker | None,
        stream_url: str | None,
        snapshot: Snapshot | None,
        partitions: int | None,
        *,
        needs_broker: bool,
    ) -> "Inputs":
        """From the arguments of a public function.

        Raises:
            ConfigurationError: no database is named, or no broker where one is needed, or a URL cannot be read.
            InvalidInput: the snapshot is none, or of another database, or `partitions` is no number of tasks.
        """
        if partitions is not None:
            checked_count("partitions", partitions, most=PARTITIONS_MAX)
        url = database_of(database, snapshot)
        is_named = broker is not None or bool(os.environ.get(BROKER_VARIABLE))
        found = Broker.of(broker, stream_url) if needs_broker or is_named else None
        return cls(url, found, snapshot, PARTITIONS if partitions is None else partitions)

    @property
    def vhost(self) -> str:
        """The virtual host the streams are of: the broker's, `/` where none is named."""
        return "/" if self.broker is None else self.broker.address.vhost

    @contextmanager
    def connect(self) -> Iterator[sa.Connection]:
        """A connection to the database that sees what the join reads."""
        if self.snapshot is not None:
            with self.snapshot.connect() as connection:
                yield connection
            return
        with as_engine(self.database) as engine, translated_errors(), engine.connect() as connection:
            yield connection

    def relations(self, spark: SparkSession, streams: Sequence[str] | None, keys: Sequence[str]) -> DataFrame:
        """Rows of the table; those of one call are of one state, whenever and however often they are used."""
        return relationships(
            spark,
            database=self.database if self.snapshot is None else None,
            streams=streams,
            keys=keys,
            vhost=self.vhost,
            partitions=self.partitions,
            snapshot=self.snapshot,
        )

    def sides(
        self, spark: SparkSession, sides: Sequence[Side], keys: Sequence[str], *, unrecorded: Container[str] = ()
    ) -> list[DataFrame]:
        """The relations of each side, from one read of the table.

        Args:
            spark: The session.
            sides: What was given.
            keys: The keys joined on.
            unrecorded: Arguments whose streams may be unknown to the table; such a stream has no relations.

        Raises:
            StreamNotFound: a stream or super stream was never recorded.
            KeyNotDefined: a key is not in force.
        """
        streams = [self._streams(side, is_known=side.argument not in unrecorded) for side in sides]
        named = None if None in streams else sorted({name for names in streams for name in names or ()})
        table = self.relations(spark, named or None, keys)
        return [_of_side(table, side, names, keys) for side, names in zip(sides, streams, strict=True)]

    def _streams(self, side: Side, *, is_known: bool) -> list[str] | None:
        """The recorded streams of a side given by names; None for a frame."""
        if side.places is not None:
            return None
        with self.connect() as connection:
            rows = streams_named(connection, self.vhost, side.names)
        known = {row.name for row in rows} | {row.super_stream for row in rows}
        for name in side.names:
            if is_known and name not in known:
                raise StreamNotFound(
                    f"no stream {name!r} was recorded: see `relatum record` and `relatum backfill`", stream=name
                )
        return [row.name for row in rows]

    def with_payloads(
        self, joined: DataFrame, keys: Sequence[str], *sides: str, wanted: bool
    ) -> tuple[DataFrame, list[str]]:
        """The joined frame with the messages of each side where they are wanted, and the names of the new columns.

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


def _of_side(table: DataFrame, side: Side, streams: Sequence[str] | None, keys: Sequence[str]) -> DataFrame:
    if streams is not None:
        return keyed(table.where(F.col("stream").isin(*streams)), keys)
    assert side.places is not None, "a side has names or a frame"
    return keyed(table, keys).join(side.places, list(PLACE), "left_semi")
