"""Wrong arguments of Spark's functions, each one error that names it, and what its JDBC reads make of URLs and jars."""

import math
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest

from relatum.errors import ConfigurationError, InvalidInput

pytest.importorskip("pyspark")

import relatum_spark

DATABASE = "postgresql://127.0.0.1:1/x"
BROKER = "amqp://127.0.0.1:1"
"""Nobody listens there; nothing that is refused gets so far."""


class Session:
    """A session that must not be asked."""

    def __getattr__(self, name: str) -> NoReturn:
        raise AssertionError(f"{name} was asked of the session")


SIDES = {"spark": Session(), "left": "a", "right": "b", "on": "k", "database": DATABASE, "broker": BROKER}
STREAMS = {"spark": Session(), "streams": "a", "partitions": 1, "database": DATABASE, "broker": BROKER}
TABLE = {"spark": Session(), "database": DATABASE}
NAMES: list[Any] = [True, 1.5, b"x", [], [1], [""], "", object()]
COUNTS: list[Any] = ["1", True, 1.5, math.nan, 0, -1, [], object()]
OTHERS: list[Any] = ["x", True, 1.5, [], object()]

SPANS: list[Any] = [-1, -1e-9, timedelta(microseconds=-1), math.nan, math.inf, True, "1"]
NO_SIDES: list[Any] = ["", [], [""], None, 7, ["orders", None], {"orders": 1}]
NO_KEYS: list[Any] = ["", [], [""], 7, ["a", "a"]]

JOINS = (relatum_spark.related_pairs, relatum_spark.as_of, relatum_spark.unmatched)
CONVERSATIONS = {"spark": Session(), "keys": "k", "database": DATABASE}
ENRICHMENT = {"to": "a", "on": "b", "pending": "c", "broker": BROKER, "database": DATABASE}

CASES: list[tuple[Callable[..., Any], dict[str, Any], str, list[Any]]] = [
    *((join, SIDES, side, NO_SIDES) for join in JOINS for side in ("left", "right")),
    *((join, SIDES, "on", NO_KEYS) for join in JOINS),
    *((join, SIDES, "partitions", COUNTS) for join in JOINS),
    *((join, SIDES, "snapshot", OTHERS) for join in JOINS),
    *((join, SIDES, span, SPANS) for join in (JOINS[0], JOINS[2]) for span in ("within", "before", "after")),
    (relatum_spark.related_pairs, SIDES | {"before": 1}, "within", [1]),
    (relatum_spark.unmatched, SIDES, "older_than", SPANS),
    (relatum_spark.as_of, SIDES, "tolerance", SPANS),
    (relatum_spark.as_of, SIDES, "direction", ["sideways", None]),
    (relatum_spark.conversations, CONVERSATIONS, "keys", [*NO_KEYS, None]),
    (relatum_spark.conversations, CONVERSATIONS, "streams", ["", [], [1]]),
    (relatum_spark.conversations, CONVERSATIONS, "max_value_size", [0, -1, 1.5, True]),
    (relatum_spark.backfill, STREAMS, "streams", NAMES),
    (relatum_spark.backfill, STREAMS, "keys", [each for each in NAMES if each != []]),
    (relatum_spark.backfill, STREAMS, "partitions", COUNTS),
    (relatum_spark.backfill, STREAMS, "slice_offsets", COUNTS),
    (relatum_spark.backfill, STREAMS, "messages_per_s", [each for each in COUNTS if each != 1.5]),
    (relatum_spark.relationships, TABLE, "streams", NAMES),
    (relatum_spark.relationships, TABLE, "keys", NAMES),
    (relatum_spark.relationships, TABLE, "vhost", [True, 1.5, b"x", "", []]),
    (relatum_spark.relationships, TABLE, "partitions", COUNTS),
    (relatum_spark.relationships, TABLE, "snapshot", OTHERS),
    (relatum_spark.resolve, {"df": None, "broker": BROKER}, "df", [None, *OTHERS]),
    (relatum_spark.Enrichment, ENRICHMENT, "to", [[], [1]]),
    (relatum_spark.Enrichment, ENRICHMENT, "how", ["outer"]),
    (relatum_spark.Enrichment, ENRICHMENT, "retries", [-1, "1"]),
    (relatum_spark.Enrichment, ENRICHMENT, "limit", [0]),
    (relatum_spark.Enrichment, ENRICHMENT, "within", SPANS),
    (relatum_spark.Enrichment, ENRICHMENT, "wait", SPANS),
]


@pytest.mark.parametrize(
    ("function", "given", "argument", "refused"), CASES, ids=lambda each: getattr(each, "__name__", None)
)
def test_wrong_arguments_are_named(function: Any, given: dict[str, Any], argument: str, refused: list[Any]) -> None:
    """Neither Python's own errors, nor a question to a server."""
    for value in refused:
        with pytest.raises(InvalidInput, match=argument):
            function(**(given | {argument: value}))


@pytest.mark.parametrize("join", JOINS)
def test_a_misspelt_argument_of_a_join_is_refused(join: Callable[..., Any]) -> None:
    """What all joins take is checked by name, too."""
    with pytest.raises(TypeError, match="databse"):
        join(**SIDES, databse=DATABASE)


def jdbc_options(url: str) -> dict[str, str]:
    settings: dict[str, str] = {}
    conf = SimpleNamespace(get=settings.get, set=settings.__setitem__)
    session: Any = SimpleNamespace(schema=None, conf=conf, sql=lambda _query: session)  # it has the driver
    relatum_spark.catalog(session, "c", database=url)
    prefix = "spark.sql.catalog.c."
    return {name.removeprefix(prefix): value for name, value in settings.items() if name.startswith(prefix)}


@pytest.mark.parametrize(
    ("url", "place"),
    [
        ("postgresql://user:pw@db:5433/name", "db:5433/name"),
        ("postgresql+psycopg://user@db/name", "db:5432/name"),
        ("postgres://user@db/na%20me", "db:5432/na%20me"),
        ("postgresql://user@db", "db:5432/user"),
        ("postgresql://user@[::1]:5433/name", "[::1]:5433/name"),
        ("postgresql://user:pw@h1:5433,h2/name?sslmode=require", "h1:5433,h2:5432/name"),
        ("postgresql://user@h1,[::1]:5433/name", "h1:5432,[::1]:5433/name"),
        ("postgresql://user@/name?host=h1,h2&port=1,2", "h1:1,h2:2/name"),
    ],
)
def test_a_url_becomes_the_drivers(url: str, place: str) -> None:
    """Hosts, ports and the database's name go into the JDBC URL; no credentials do."""
    options = jdbc_options(url)
    assert options["url"] == f"jdbc:postgresql://{place}"
    assert options["user"] == "user"
    assert options["driver"] == "org.postgresql.Driver"
    assert int(options["fetchsize"]) > 0


VERIFIED = "sslmode=verify-full&sslrootcert=/ca.pem&sslcert=/c.pem&sslkey=/k.pk8"


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        # A password with any character in it reaches the driver as it is.
        ("postgresql://us%40er:p%2Fw%3F%20@db/n", {"user": "us@er", "password": "p/w? "}),
        # As for every client of PostgreSQL.
        ("postgresql://db/n", {"user": "someone", "password": "secret"}),
        (f"postgresql://u@db/n?{VERIFIED}", dict(part.split("=") for part in VERIFIED.split("&"))),
        # What libpq calls by one name the driver may call by another, or has no need for.
        ("postgresql://u@db/n?connect_timeout=3", {"connectTimeout": "3"}),
        ("postgresql://u@db/n?target_session_attrs=read-write", {"targetServerType": "primary"}),
        ("postgresql://u@db/n?keepalives_idle=5", {"keepalives_idle": None}),
    ],
)
def test_the_rest_is_properties(url: str, expected: dict[str, str | None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Credentials, of the URL or of PGUSER and PGPASSWORD, and options of TLS and of connecting."""
    monkeypatch.setenv("PGUSER", "someone")
    monkeypatch.setenv("PGPASSWORD", "secret")
    options = jdbc_options(url)
    assert {name: options.get(name) for name in expected} == expected
    assert options["url"] == "jdbc:postgresql://db:5432/n"


@pytest.mark.parametrize(
    ("url", "named"),
    [
        ("postgresql:///name", "Unix socket"),
        ("postgresql://user:secret@/name?host=/run/postgresql", "Unix socket"),
        ("mysql://user:secret@db/name", "mysql"),
        ("postgresql://user:secret@db:port/name", "URL"),
        ("postgresql://user:secret@/name?host=h1,h2,h3&port=1,2", "do not match"),
        ("no url, secret", "URL"),
        ("postgresql://user:secret@db/name?krbsrvname=x", "krbsrvname"),
        ("postgresql://user:secret@db/name?target_session_attrs=x", "target_session_attrs"),
    ],
)
def test_what_the_driver_cannot_use_is_refused(url: str, named: str) -> None:
    """One clear error, without the URL."""
    with pytest.raises(ConfigurationError, match=named) as refused:
        jdbc_options(url)
    assert "secret" not in str(refused.value)


def test_the_jar_is_the_one_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """RELATUM_JDBC_JAR goes before the system's package, and is never passed over in silence."""
    jar = tmp_path / "driver.jar"
    monkeypatch.setenv("RELATUM_JDBC_JAR", str(jar))
    with pytest.raises(ConfigurationError, match=r"driver\.jar"):
        relatum_spark.jdbc_jar()
    jar.touch()
    assert relatum_spark.jdbc_jar() == str(jar)
