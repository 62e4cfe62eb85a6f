"""Spark's access to PostgreSQL: the JDBC driver's jar, URL and properties.

Spark takes a JDBC URL and properties; the rest of Relatum takes a libpq URL. This module converts the libpq URL. User
and password are properties, which Spark hides when it shows options; the JDBC URL holds no credentials.
"""

import os
from pathlib import Path
from typing import Final
from urllib.parse import quote

import psycopg
from pyspark.errors import AnalysisException
from pyspark.sql import SparkSession

from relatum.errors import ConfigurationError
from relatum.store.address import parse_database

JAR_VARIABLE: Final = "RELATUM_JDBC_JAR"
DRIVER: Final = "org.postgresql.Driver"
COORDINATES: Final = "org.postgresql:postgresql:42.7.7"

FETCH_ROWS: Final = 10_000
"""Rows in a round trip. 0, Spark's default, would hold a partition's whole result in memory; more is not faster."""

_JARS: Final = (
    Path("/usr/share/java/postgresql.jar"),  # Debian, Ubuntu: libpostgresql-jdbc-java
    Path("/usr/share/java/postgresql-jdbc.jar"),  # Red Hat, Fedora, SUSE: postgresql-jdbc
    Path("/usr/share/java/postgresql-jdbc/postgresql.jar"),
)

_WAYS: Final = (
    f"start the session with spark.jars.packages={COORDINATES}, or with spark.jars=<path of the jar> "
    f"(`relatum_spark.jdbc_jar()` finds the one of the system's package, or of {JAR_VARIABLE}), "
    "or put the jar into the folder jars of every node's Spark"
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

_PASSED_OVER: Final = frozenset(
    {
        # Already in the URL or among the properties.
        *("dbname", "host", "hostaddr", "password", "port", "user"),
        # Only for libpq's sockets: the driver uses UTF-8, and TCP keep-alive is always on.
        *("client_encoding", "keepalives", "keepalives_idle", "keepalives_interval", "keepalives_count"),
        "tcp_user_timeout",
    }
)


def jdbc_jar() -> str:
    """Return the path of PostgreSQL's JDBC driver on this machine, for `spark.jars` when you build a session.

    The path is RELATUM_JDBC_JAR, else that of the system's package (Debian: libpostgresql-jdbc-java, Red Hat:
    postgresql-jdbc).

    Raises:
        ConfigurationError: no driver is installed, or RELATUM_JDBC_JAR names a missing file.
    """
    named = os.environ.get(JAR_VARIABLE)
    if named:
        if not Path(named).is_file():
            raise ConfigurationError(f"{JAR_VARIABLE} names {named}, which does not exist")
        return named
    for jar in _JARS:
        if jar.is_file():
            return str(jar)
    raise ConfigurationError(
        f"no JDBC driver of PostgreSQL is installed here: set {JAR_VARIABLE} to its jar, install the system's package "
        f"(libpostgresql-jdbc-java, postgresql-jdbc), or let Spark fetch it: spark.jars.packages={COORDINATES}"
    )


def require_driver(spark: SparkSession) -> None:
    """Raise `ConfigurationError` if the session has no JDBC driver of PostgreSQL.

    The check runs in SQL, so it works over Spark Connect. If SQL may not call Java, a driver is assumed.
    """
    try:
        _ = spark.sql(f"SELECT java_method('{DRIVER}', 'isRegistered')").schema
    except AnalysisException as error:
        if f"class {DRIVER} not found" not in str(error):
            return
        raise ConfigurationError(f"this Spark session has no JDBC driver of PostgreSQL: {_WAYS}") from None


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
                "the JDBC driver cannot use a Unix socket: give the database's URL a host "
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
    if password := given.get("password", defaults["password"]):
        options["password"] = password
    for name, text in given.items():
        if name in _PROPERTIES:
            options[_PROPERTIES[name]] = text
        elif name == "target_session_attrs" and text in _SERVER_TYPES:
            options["targetServerType"] = _SERVER_TYPES[text]
        elif name not in _PASSED_OVER:
            raise ConfigurationError(f"the JDBC driver has no option for {name!r} of the database's URL; leave it out")
    return options
