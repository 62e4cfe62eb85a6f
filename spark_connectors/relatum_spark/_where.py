"""The broker and database of a Spark job: from arguments, else from the environment."""

import gc
import math
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import cache
from typing import TYPE_CHECKING, Any, Final, TypeAlias, TypedDict

import sqlalchemy as sa

from relatum.checks import checked_names
from relatum.errors import ConfigurationError, InvalidInput, KeyNotDefined
from relatum.keys import KeyDefinition
from relatum.limits import TIME_US_MAX
from relatum.reading import Broker, StreamReader
from relatum.store.catalog import key_definitions
from relatum.store.database import as_engine
from relatum.store.translation import translated_errors

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

    from relatum_spark._table import Snapshot

BROKER_VARIABLE: Final = "RELATUM_BROKER_URL"
STREAM_VARIABLE: Final = "RELATUM_STREAM_URL"
DATABASE_VARIABLE: Final = "RELATUM_DATABASE_URL"

TIMEOUT_S: Final = 10.0
"""Seconds a task waits for an answer of the broker."""

_WORKER_REUSED: Final = "SPARK_REUSE_WORKER"
"""The variable that Spark sets in Python workers that run more than one task."""

GivenBroker: TypeAlias = str | Broker | None
"""A broker's URL, a `Broker`, or None for the environment's broker."""


class Where(TypedDict, total=False):
    """The common arguments of all joins: the servers, and how to read the relationship table.

    Attributes:
        database: PostgreSQL's URL. None uses the snapshot's, or else RELATUM_DATABASE_URL.
        broker: The broker, whose virtual host has the streams. None uses RELATUM_BROKER_URL. A join connects to it only
            for payloads, times without a key, and ends of streams. Without a broker the virtual host is `/`.
        partitions: Maximum tasks that read the table at once, 1 to 10,000. None means 8.
        snapshot: The state of the table to read; the action must run inside its block.
    """

    database: str | None
    broker: GivenBroker
    partitions: int | None
    snapshot: "Snapshot | None"


def broker_of(broker: GivenBroker, stream_url: str | None = None) -> Broker:
    """Return the argument's broker, else that of RELATUM_BROKER_URL; raises `ConfigurationError` without either."""
    if isinstance(broker, Broker):
        return broker
    if broker is None:
        broker, stream_url = os.environ.get(BROKER_VARIABLE), stream_url or os.environ.get(STREAM_VARIABLE)
    if not broker:
        raise ConfigurationError(f"which RabbitMQ? Give the broker's URL or set {BROKER_VARIABLE}")
    return Broker(broker, stream_url=stream_url)


def open_reader(broker: Broker, timeout_s: float = TIMEOUT_S) -> StreamReader:
    """Open a connected reader. Errors as of `StreamReader.open`."""
    spare_collections()
    return StreamReader.open(broker, timeout_s=timeout_s)


def database_url(database: str | None) -> str:
    """Return PostgreSQL's URL: the argument, else RELATUM_DATABASE_URL; raises `ConfigurationError` without either."""
    found = database or os.environ.get(DATABASE_VARIABLE)
    if not found:
        raise ConfigurationError(f"which PostgreSQL? Give the database's URL or set {DATABASE_VARIABLE}")
    return found


def names_of(argument: str, given: Any) -> tuple[str, ...]:
    """Return an argument's name or names as a tuple; raises `InvalidInput`."""
    return checked_names(argument, [given] if isinstance(given, str | Mapping) else given, least=1)


def span_us(argument: str, given: Any) -> int:
    """Return a timedelta or seconds in microseconds, capped at the range of valid times."""
    seconds = given.total_seconds() if isinstance(given, timedelta) else given
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 <= seconds < math.inf:
        raise InvalidInput(f"{argument}= takes a timedelta or seconds, 0 or more")
    if isinstance(given, timedelta):  # exact, unlike a float of seconds
        return min(given // timedelta(microseconds=1), 2 * TIME_US_MAX)
    return round(min(seconds, 2 * TIME_US_MAX // 1_000_000) * 1_000_000)


def definitions_of(database: str, names: Collection[str]) -> list[KeyDefinition]:
    """Return the definitions of keys in the order of `names`; without names it does not query the database."""
    if not names:
        return []
    with as_engine(database) as engine, translated_errors(), engine.connect() as connection:
        return definitions_in(connection, names)


def definitions_in(connection: sa.Connection, names: Collection[str] | None) -> list[KeyDefinition]:
    """Return the definitions of keys in the order of `names`, or all keys in force; raises `KeyNotDefined`."""
    in_force = {definition.name: definition for definition in key_definitions(connection)}
    for name in names or ():
        if name not in in_force:
            raise KeyNotDefined(f"no key {name!r} is defined; see `relatum keys list`", key=name)
    return list(in_force.values()) if names is None else [in_force[name] for name in names]


@cache
def spare_collections() -> None:
    """Run `gc.freeze()` once in a Spark worker that is reused; do nothing in other processes.

    Spark collects garbage after each task, before the next one can begin (`pyspark/daemon.py`). With pandas, SQLAlchemy
    and this package, each collection visits 140,000 objects in 60 ms, nearly all of them modules and functions.
    """
    if os.environ.get(_WORKER_REUSED):
        gc.collect()
        gc.freeze()


def in_tasks(
    spark: "SparkSession",
    function: Callable[[Any], Iterable["pa.RecordBatch"]],
    items: Sequence[Any],
    schema: "StructType",
) -> "DataFrame":
    """Return the results of a function of each item, in a task of its own. Without RDDs, for Spark Connect."""

    def mapped(batches: Iterable["pa.RecordBatch"]) -> Iterator["pa.RecordBatch"]:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                yield from function(items[number])

    return spark.range(0, len(items), 1, max(len(items), 1)).mapInArrow(mapped, schema)
