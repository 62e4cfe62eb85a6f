"""PostgreSQL as Spark reaches it: the driver's jar, its URL and its properties.

Spark takes a JDBC URL and properties, everything else of Relatum a libpq URL; here the one becomes the other. User and
password travel as properties, which Spark hides wherever it shows options; the URL holds no credentials.
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
"""Rows a round trip. 0, Spark's default, would hold a partition's whole result in memory; more gains nothing."""

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
"""libpq's name of an option, and that of the JDBC driver; the values are the same."""

_SERVER_TYPES: Final = {
    "any": "any",
    "read-write": "primary",
    "read-only": "secondary",
    "primary": "primary",
    "standby": "secondary",
    "prefer-standby": "preferSecondary",
}
"""libpq's `target_session_attrs`, and the driver's `targetServerType`."""

_PASSED_OVER: Final = frozenset(
    {
        # They have their place in the URL, or among the properties, already.
        *("dbname", "host", "hostaddr", "password", "port", "user"),
        # libpq's own sockets: the driver speaks UTF-8 and always keeps alive.
        *("client_encoding", "keepalives", "keepalives_idle", "keepalives_interval", "keepalives_count"),
        "tcp_user_timeout",
    }
)


def jdbc_jar() -> str:
    """The path of PostgreSQL's JDBC driver on this machine, for `spark.jars` when a session is built.

    It is the file named by RELATUM_JDBC_JAR, else the one of the system's package (Debian: libpostgresql-jdbc-java,
    Red Hat: postgresql-jdbc).

    Raises:
        ConfigurationError: There is none.
    """
    named = os.environ.get(JAR_VARIABLE)
    if named:
        if not Path(named).is_file():
            raise ConfigurationError(f"{JAR_VARIABLE} names {named}, and there is no such file")
        return named
    for jar in _JARS:
        if jar.is_file():
            return str(jar)
    raise ConfigurationError(
        f"no JDBC driver of PostgreSQL is installed here: set {JAR_VARIABLE} to its jar, install the system's package "
        f"(libpostgresql-jdbc-java, postgresql-jdbc), or let Spark fetch it: spark.jars.packages={COORDINATES}"
    )


def require_driver(spark: SparkSession) -> None:
    """Raise `ConfigurationError` where the session has no JDBC driver of PostgreSQL.

    Asked in SQL, so that it holds for Spark Connect too. A session in which SQL may not call Java is taken to have it.
    """
    try:
        _ = spark.sql(f"SELECT java_method('{DRIVER}', 'isRegistered')").schema
    except AnalysisException as error:
        if f"class {DRIVER} not found" not in str(error):
            return
        raise ConfigurationError(f"this Spark session has no JDBC driver of PostgreSQL: {_WAYS}") from None


def jdbc_options(database: str) -> dict[str, str]:
    """The options of Spark's JDBC source for a libpq URL: `url`, `driver`, `fetchsize`, user, password and the rest.

    User and password may come from PGUSER and PGPASSWORD, as with libpq. A URL that cannot be read, that names a Unix
    socket or has an option the driver lacks, is a `ConfigurationError`.
    """
    address = parse_database(database)
    given = address.parameters
    # What libpq would take: from the environment, and as user the name of the system's.
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
        # A pooler that hands out sessions by transaction would give a prepared statement to another session. Spark runs
        # each statement once on a connection, so nothing is lost by it.
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
