"""A Spark job's broker and database, from arguments or else from the environment; and Spark's access to PostgreSQL.

Spark takes a JDBC URL and properties; the rest of Relatum takes a libpq URL, which `jdbc_options` converts. User and
password are properties, which Spark hides when it shows options; the JDBC URL holds no credentials.
"""

import gc
import math
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any, Final, TypeAlias
from urllib.parse import quote

import psycopg
import pyarrow as pa
import sqlalchemy as sa
from pyspark.errors import AnalysisException
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.types import StructType

from relatum.common.checks import checked_names, shown
from relatum.common.limits import TIME_US_MAX
from relatum.errors import ConfigurationError, InvalidInput, KeyNotDefined
from relatum.keys import KeyDefinition
from relatum.reading import Broker, StreamReader
from relatum.store.address import parse_database
from relatum.store.catalog import key_definitions
from relatum.store.database import as_engine, transaction

BROKER_VARIABLE: Final = "RELATUM_BROKER_URL"
STREAM_VARIABLE: Final = "RELATUM_STREAM_URL"
DATABASE_VARIABLE: Final = "RELATUM_DATABASE_URL"

TIMEOUT_S: Final = 10.0
"""Seconds that a task waits for an answer of the broker."""

_WORKER_REUSED: Final = "SPARK_REUSE_WORKER"
"""The variable that Spark sets in Python workers that run more than one task."""

JAR_VARIABLE: Final = "RELATUM_JDBC_JAR"
DRIVER: Final = "org.postgresql.Driver"
COORDINATES: Final = "org.postgresql:postgresql:42.7.7"

FETCH_ROWS: Final = 10_000
"""Rows per round trip. 0, Spark's default, would hold a partition's whole result in memory; more is not faster."""

_JARS: Final = (
    Path("/usr/share/java/postgresql.jar"),  # Debian, Ubuntu: libpostgresql-jdbc-java
    Path("/usr/share/java/postgresql-jdbc.jar"),  # Red Hat, Fedora, SUSE: postgresql-jdbc
    Path("/usr/share/java/postgresql-jdbc/postgresql.jar"),
)

_DRIVER_HINT: Final = (
    f"start the session with spark.jars.packages={COORDINATES}, or with spark.jars=<path of the jar> "
    f"(`relatum_spark.jdbc_jar()` returns the jar that {JAR_VARIABLE} names, or else the system package's), "
    "or put the jar into Spark's folder `jars` on every node"
)

_PROPERTIES: Final = {
    "application_name": "ApplicationName",
    "channel_binding": "channelBinding",
    "connect_timeout": "connectTimeout",
    "gssencmode": "gssEncMode",
    **{name: name for name in ("options", "sslcert", "sslkey", "sslmode", "sslpassword", "sslrootcert")},
}
"""The JDBC driver's names of libpq's options; the values are the same."""

_SERVER_TYPES: Final = {
    "any": "any",
    "read-write": "primary",
    "read-only": "secondary",
    "primary": "primary",
    "standby": "secondary",
    "prefer-standby": "preferSecondary",
}
"""The driver's `targetServerType` by libpq's `target_session_attrs`."""

_IGNORED_OPTIONS: Final = frozenset(
    {
        # Already in the URL or among the properties.
        *("dbname", "host", "hostaddr", "password", "port", "user"),
        # Only for libpq's sockets: the driver uses UTF-8, and TCP keep-alive is always on.
        *("client_encoding", "keepalives", "keepalives_idle", "keepalives_interval", "keepalives_count"),
        "tcp_user_timeout",
    }
)

GivenBroker: TypeAlias = str | Broker | None
"""A broker's URL, a `Broker`, or None for the environment's broker."""


def broker_of(broker: GivenBroker, stream_url: str | None = None) -> Broker:
    """Return the broker of the argument, else of RELATUM_BROKER_URL; raises `ConfigurationError` without either."""
    if isinstance(broker, Broker):
        return broker
    if broker is None:
        broker, stream_url = os.environ.get(BROKER_VARIABLE), stream_url or os.environ.get(STREAM_VARIABLE)
    if not broker:
        raise ConfigurationError(f"no broker is named: give the broker's URL or set {BROKER_VARIABLE}")
    return Broker(broker, stream_url=stream_url)


def open_reader(broker: Broker, timeout_s: float = TIMEOUT_S) -> StreamReader:
    """Open a connected reader. Raises the errors of `StreamReader.open`."""
    freeze_gc()
    return StreamReader.open(broker, timeout_s=timeout_s)


def database_url(database: str | None) -> str:
    """Return PostgreSQL's URL: the argument, else RELATUM_DATABASE_URL; raises `ConfigurationError` without either."""
    found = database or os.environ.get(DATABASE_VARIABLE)
    if not found:
        raise ConfigurationError(f"no database is named: give the database's URL or set {DATABASE_VARIABLE}")
    return found


def names_of(argument: str, given: Any) -> tuple[str, ...]:
    """Return an argument's name or names as a tuple; raises `InvalidInput`."""
    return checked_names(argument, [given] if isinstance(given, str | Mapping) else given, least=1)


def span_us(argument: str, given: Any) -> int:
    """Return a timedelta or seconds in microseconds, capped at the range of valid times."""
    seconds = given.total_seconds() if isinstance(given, timedelta) else given
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 <= seconds < math.inf:
        raise InvalidInput(f"{argument}= takes a timedelta or seconds, 0 or more, not {shown(given)}")
    return round(min(seconds, 2 * TIME_US_MAX // 1_000_000) * 1_000_000)


def definitions_of(database: str, names: Collection[str] | None) -> list[KeyDefinition]:
    """Like `definitions_in`, but without names it does not query the database."""
    if names is not None and not names:
        return []
    with as_engine(database) as engine, transaction(engine) as connection:
        return definitions_in(connection, names)


def definitions_in(connection: sa.Connection, names: Collection[str] | None) -> list[KeyDefinition]:
    """Return the definitions of keys in the order of `names`, or all keys in force; raises `KeyNotDefined`."""
    in_force = {definition.name: definition for definition in key_definitions(connection)}
    for name in names or ():
        if name not in in_force:
            raise KeyNotDefined(f"no key {name!r} is defined: `relatum keys list` shows the keys", key=name)
    return list(in_force.values()) if names is None else [in_force[name] for name in names]


@cache
def freeze_gc() -> None:
    """Run `gc.freeze()` once in a Spark worker that is reused; do nothing in other processes.

    Spark collects garbage after each task, before the next one can begin (`pyspark/daemon.py`). With pandas, SQLAlchemy
    and this package, each collection visits 140,000 objects in 60 ms, nearly all of them modules and functions.
    """
    if os.environ.get(_WORKER_REUSED):
        gc.collect()
        gc.freeze()


def in_tasks(
    spark: SparkSession,
    function: Callable[[Any], Iterable[pa.RecordBatch]],
    items: Sequence[Any],
    schema: StructType | str,
) -> DataFrame:
    """Return a function's results for the items, each from its own task. Uses no RDDs, for Spark Connect."""

    def mapped(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                yield from function(items[number])

    return spark.range(0, len(items), 1, max(len(items), 1)).mapInArrow(mapped, schema)


def jdbc_jar() -> str:
    """Return the path of PostgreSQL's JDBC driver on this machine, for `spark.jars` when you build a session.

    The path is RELATUM_JDBC_JAR, else the path of the system's package (Debian: libpostgresql-jdbc-java, Red Hat:
    postgresql-jdbc).

    Raises:
        ConfigurationError: no driver is installed, or RELATUM_JDBC_JAR names a missing file.
    """
    named = os.environ.get(JAR_VARIABLE)
    if named:
        if not Path(named).is_file():
            raise ConfigurationError(f"{JAR_VARIABLE} names {named}, which is not a file: correct or unset it")
        return named
    if found := next(filter(Path.is_file, _JARS), None):
        return str(found)
    raise ConfigurationError(
        f"no PostgreSQL JDBC driver is installed here: set {JAR_VARIABLE} to its jar, install the system's package "
        f"(libpostgresql-jdbc-java, postgresql-jdbc), or let Spark fetch it: spark.jars.packages={COORDINATES}"
    )


def require_driver(spark: SparkSession) -> None:
    """Raise `ConfigurationError` if the session has no PostgreSQL JDBC driver.

    The check runs in SQL, so it works over Spark Connect. If SQL may not call Java, a driver is assumed.
    """
    try:
        _ = spark.sql(f"SELECT java_method('{DRIVER}', 'isRegistered')").schema
    except AnalysisException as error:
        if f"class {DRIVER} not found" not in str(error):
            return
        raise ConfigurationError(f"this Spark session has no PostgreSQL JDBC driver: {_DRIVER_HINT}") from None


def jdbc_options(database: str) -> dict[str, str]:
    """Return the options of Spark's JDBC source for a libpq URL: `url`, `driver`, `fetchsize`, credentials and others.

    User and password may come from PGUSER and PGPASSWORD, as with libpq. Raises `ConfigurationError` if the URL is
    invalid, names a Unix socket, or has an option that the driver lacks.
    """
    address = parse_database(database)
    given = address.parameters
    # libpq's defaults: from the environment, and the system user's name.
    defaults = {each.keyword.decode(): (each.val or b"").decode() for each in psycopg.pq.Conninfo.get_defaults()}
    user = given.get("user") or defaults["user"]
    hosts = []
    for host, port in address.hosts():
        if not host or host.startswith(("/", "@")):
            raise ConfigurationError(
                "the JDBC driver cannot use a Unix socket: add a host to the database's URL "
                "(postgresql://user@localhost/…)"
            )
        hosts.append(f"{f'[{host}]' if ':' in host else host}:{port or defaults['port'] or '5432'}")
    options = {
        "url": f"jdbc:postgresql://{','.join(hosts)}/{quote(given.get('dbname') or user, safe='')}",
        "driver": DRIVER,
        "fetchsize": str(FETCH_ROWS),
        "tcpKeepAlive": "true",
        "ApplicationName": "relatum_spark",
        # A pooler in transaction mode cannot keep prepared statements. Spark runs each statement once on a connection,
        # so it loses nothing without them.
        "prepareThreshold": "0",
        "user": user,
    }
    if len(hosts) > 1:
        # As Relatum's own connections: a standby may lag behind the coverage that the primary names.
        options["targetServerType"] = "primary"
    if password := given.get("password", defaults["password"]):
        options["password"] = password
    for name, text in given.items():
        if name in _PROPERTIES:
            options[_PROPERTIES[name]] = text
        elif name == "target_session_attrs" and text in _SERVER_TYPES:
            options["targetServerType"] = _SERVER_TYPES[text]
        elif name not in _IGNORED_OPTIONS:
            raise ConfigurationError(f"the JDBC driver has no option for {name!r} of the database's URL; leave it out")
    return options
