"""How a database's URL is read."""

import pytest
from psycopg.conninfo import conninfo_to_dict
from sqlalchemy.engine import URL, make_url

from relatum.errors import ConfigurationError
from relatum.store.address import parse_database
from relatum.store.database import make_engine

ADDRESSES: dict[str | URL, str] = {
    "postgresql://user:p%40w@db:5433/name": "user=user password=p@w host=db port=5433 dbname=name",
    "postgresql+psycopg://user@db/name": "user=user host=db dbname=name",
    "postgres://db": "host=db",
    "postgresql://h1:5433,h2/name?target_session_attrs=read-write": (
        "host=h1,h2 port=5433, dbname=name target_session_attrs=read-write"
    ),
    "postgresql://h1,[::1]:5433/name": "host=h1,::1 port=,5433 dbname=name",
    "postgresql:///name?host=h1,h2&port=1,2": "host=h1,h2 port=1,2 dbname=name",
    "postgresql:///name?host=/run/postgresql": "host=/run/postgresql dbname=name",
    "postgresql://%2Frun%2Fpostgresql/name": "host=/run/postgresql dbname=name",
    "postgresql:///?service=orders&passfile=/etc/pass": "service=orders passfile=/etc/pass",
    "postgresql://db/name?options=-c%20search_path%3Da%2Cb": "host=db dbname=name options='-c search_path=a,b'",
    make_url("postgresql+psycopg://us%2Ber:p%2Fw@db:5433/name?application_name=my+app"): (
        "user=us+er password=p/w host=db port=5433 dbname=name application_name='my app'"
    ),
}


@pytest.mark.parametrize("url", ADDRESSES, ids=str)
def test_a_url_is_read_as_libpq_reads_it(url: str | URL) -> None:
    """Several hosts, sockets, services and SQLAlchemy's own forms give libpq's parameters; an engine takes them all."""
    expected = conninfo_to_dict(ADDRESSES[url])
    assert parse_database(url).parameters == expected
    engine = make_engine(url)
    assert parse_database(engine.url).parameters == expected
    engine.dispose()


def test_an_address_has_a_name_for_the_log() -> None:
    """Of all its hosts, without user and password."""
    assert parse_database("postgresql://user:secret@h1:5433,h2/name").name == "h1:5433,h2/name"
    assert parse_database("postgresql:///name?host=/run/postgresql").name == "/run/postgresql/name"


@pytest.mark.parametrize(
    ("query", "is_pooled"),
    [("", None), ("?pgbouncer=true", True), ("?pgbouncer=false", False), ("?sslmode=require&pgbouncer=1", True)],
)
def test_a_url_says_whether_statements_are_prepared(query: str, is_pooled: bool | None) -> None:
    """Where it says nothing that is found out when connecting; libpq never sees the option."""
    address = parse_database(f"postgresql://db/name{query}")
    assert address.is_pooled == is_pooled
    assert address.parameters.keys() <= {"host", "dbname", "sslmode"}


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("no url, secret", "must be a URL"),
        ("host=db password=secret", "must be a URL"),
        ("mysql://user:secret@db/name", "PostgreSQL, not 'mysql'"),
        ("postgresql://user:secret@db:port/name", "port is not a number"),
        ("postgresql://user:secret@db:70000/name", "port is not a number"),
        ("postgresql://user:sec/ret@db/name", "%2F"),
        ("postgresql://user:sec@ret@db/name", "%40"),
        ("postgresql://user:sec?ret@db/name", "must be a URL"),
        ("postgresql://user:sec?ret=1@db/name", "must be a URL"),
        ("postgresql://user:%zzsecret@db/name", "must be a URL"),
        ("postgresql://user:secret@h1:1,h2:2/name?port=1,2,3", "do not match"),
        ("postgresql:///name?host=h1&host=h2", "host more than once"),
        ("postgresql:///name?host=h1:1", "after its host"),
        ("postgresql://user:secret@db/name?ssl_mode=require", "ssl_mode"),
        ("postgresql://user:secret@db/name?connect_timeout=abc", "connect_timeout in the database's URL must be a"),
        ("postgresql://user:secret@db/name?keepalives_idle=1.5", "keepalives_idle in the database's URL"),
        ("postgresql://user:secret@db/name?tcp_user_timeout=", "tcp_user_timeout in the database's URL"),
        ("postgresql://us\0er:secret@db/name", "NUL"),
        ("postgresql://user:sec\0ret@db/name", "NUL"),
        ("postgresql://user:secret@db/na\0me", "NUL"),
        ("postgresql://user:sec%00ret@db/name", "NUL"),
        ("postgresql://user:secret@db/name?application_name=%00", "NUL"),
        ("postgresql://user:sec\ud800ret@db/name", "surrogate"),
        (f"postgresql://user:secret@{'h' * 64}/name", "over 63 characters"),
        ("postgresql://user:secret@a..b/name", "over 63 characters"),
    ],
)
def test_a_url_that_cannot_be_read_is_one_error(url: str, said: str) -> None:
    """It says what to change, and shows no part of the password."""
    with pytest.raises(ConfigurationError, match=said) as refused:
        make_engine(url)
    assert "sec" not in str(refused.value)
    assert "ret" not in str(refused.value).replace("interpreted", "")
