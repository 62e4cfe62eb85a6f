"""Which broker and which database a Spark job uses: from arguments, else from the environment."""

import gc
import math
import os
from collections.abc import Collection, Mapping
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
    from relatum_spark._table import Snapshot

BROKER_VARIABLE: Final = "RELATUM_BROKER_URL"
STREAM_VARIABLE: Final = "RELATUM_STREAM_URL"
DATABASE_VARIABLE: Final = "RELATUM_DATABASE_URL"

TIMEOUT_S: Final = 10.0
"""Seconds a task waits for one answer of the broker."""

_WORKER_REUSED: Final = "SPARK_REUSE_WORKER"
"""Spark sets this variable in Python workers that run more than one task."""

GivenBroker: TypeAlias = str | Broker | None
"""A broker's URL, a `Broker`, or None for that of the environment."""


class Where(TypedDict, total=False):
    """The arguments that every join takes: which servers, and how to read the relationship table.

    Attributes:
        database: PostgreSQL's URL; None for RELATUM_DATABASE_URL, or for the snapshot's database.
        broker: The broker, whose virtual host the streams belong to; None for RELATUM_BROKER_URL. A join reads it only
            for payloads, for times without a key, and for the ends of streams; without one the virtual host is `/`.
        partitions: Tasks that read the table at once, 1 to 10,000; None for 8.
        snapshot: The state of the table to read; the action must run inside its block.
    """

    database: str | None
    broker: GivenBroker
    partitions: int | None
    snapshot: "Snapshot | None"


def broker_of(broker: GivenBroker, stream_url: str | None = None) -> Broker:
    """Return the broker that an argument names, else that of RELATUM_BROKER_URL, or raise `ConfigurationError`."""
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
    """Return PostgreSQL's URL: the argument, else RELATUM_DATABASE_URL, else raise `ConfigurationError`."""
    found = database or os.environ.get(DATABASE_VARIABLE)
    if not found:
        raise ConfigurationError(f"which PostgreSQL? Give the database's URL or set {DATABASE_VARIABLE}")
    return found


def names_of(argument: str, given: Any) -> tuple[str, ...]:
    """Return the name or names that an argument gives; raises `InvalidInput`."""
    return checked_names(argument, [given] if isinstance(given, str | Mapping) else given, least=1)


def span_us(argument: str, given: Any) -> int:
    """Return a span of time in microseconds, from a timedelta or seconds; at most what the calendar holds."""
    seconds = given.total_seconds() if isinstance(given, timedelta) else given
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 <= seconds < math.inf:
        raise InvalidInput(f"{argument}= takes a timedelta or seconds, 0 or more")
    if isinstance(given, timedelta):  # exact, where a float of seconds is not
        return min(given // timedelta(microseconds=1), 2 * TIME_US_MAX)
    return round(min(seconds, 2 * TIME_US_MAX // 1_000_000) * 1_000_000)


def definitions_of(database: str, names: Collection[str]) -> list[KeyDefinition]:
    """Return the definitions of keys in the order of their names; the database is asked only for some."""
    if not names:
        return []
    with as_engine(database) as engine, translated_errors(), engine.connect() as connection:
        return definitions_in(connection, names)


def definitions_in(connection: sa.Connection, names: Collection[str] | None) -> list[KeyDefinition]:
    """Return the definitions of keys in the order of their names, all in force for None; raises `KeyNotDefined`."""
    in_force = {definition.name: definition for definition in key_definitions(connection)}
    for name in names or ():
        if name not in in_force:
            raise KeyNotDefined(f"no key {name!r} is defined; see `relatum keys list`", key=name)
    return list(in_force.values()) if names is None else [in_force[name] for name in names]


@cache
def spare_collections() -> None:
    """Run `gc.freeze()` once in a Spark worker that is used again; does nothing in other processes.

    Spark collects all garbage after each task, before the next one may begin (`pyspark/daemon.py`). With pandas,
    SQLAlchemy and this package that looks at 140,000 objects for 60 ms, nearly all of them modules and functions.
    """
    if os.environ.get(_WORKER_REUSED):
        gc.collect()
        gc.freeze()
