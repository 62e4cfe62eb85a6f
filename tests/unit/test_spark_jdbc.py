"""What Spark's JDBC reads are made of: URLs and jars."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from relatum.errors import ConfigurationError
from relatum_spark import catalog, jdbc_jar


def jdbc_options(url: str) -> dict[str, str]:
    settings: dict[str, str] = {}
    conf = SimpleNamespace(get=settings.get, set=settings.__setitem__)
    session: Any = SimpleNamespace(schema=None, conf=conf, sql=lambda _query: session)  # it has the driver
    catalog(session, "c", database=url)
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
        jdbc_jar()
    jar.touch()
    assert jdbc_jar() == str(jar)
