"""The database: how its URL is read, how statements are written, and what its errors become."""

import inspect
from itertools import islice

import psycopg
import pytest
import sqlalchemy as sa
from psycopg.conninfo import conninfo_to_dict
from sqlalchemy.engine import URL, make_url

from relatum import errors
from relatum.common.waiting import BACKOFF_S, QUESTION_S, backoff, may_repeat, needs_operator
from relatum.errors import ConfigurationError
from relatum.store.address import parse_database
from relatum.store.database import make_engine, sql
from relatum.store.translation import translated_errors
from tests.support.plans import text_of

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
    make_url("postgresql://user:two%20words@db/name"): "user=user password='two words' host=db dbname=name",
    # Each way in which libpq takes a whole number is taken.
    **{
        f"postgresql://db?connect_timeout={number.replace('+', '%2B')}": f"host=db connect_timeout={number}"
        for number in ("7", "-1", "0", "+3")
    },
}


@pytest.mark.parametrize("url", ADDRESSES, ids=str)
def test_a_url_is_read_as_libpq_reads_it(url: str | URL) -> None:
    """A URL with several hosts, a socket, a service or SQLAlchemy's own form gives libpq's parameters."""
    expected = conninfo_to_dict(ADDRESSES[url])
    assert parse_database(url).parameters == expected
    engine = make_engine(url)
    assert parse_database(engine.url).parameters == expected
    engine.dispose()


def test_an_address_has_a_name_for_the_log() -> None:
    """An address's name has all hosts and the database, without user and password."""
    assert parse_database("postgresql://user:secret@h1:5433,h2/name").name == "h1:5433,h2/name"
    assert parse_database("postgresql:///name?host=/run/postgresql").name == "/run/postgresql/name"


@pytest.mark.parametrize(
    ("query", "is_pooled"),
    [("", None), ("?pgbouncer=true", True), ("?pgbouncer=false", False), ("?sslmode=require&pgbouncer=1", True)],
)
def test_a_url_says_whether_statements_are_prepared(query: str, is_pooled: bool | None) -> None:
    """The option `pgbouncer` is read from the URL, unknown if it is missing, and never given to libpq."""
    address = parse_database(f"postgresql://db/name{query}")
    assert address.is_pooled == is_pooled
    assert address.parameters.keys() <= {"host", "dbname", "sslmode"}


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("no url, secret", "must be a URL"),
        ("host=db password=secret", "must be a URL"),
        ("mysql://user:secret@db/name", "must begin with postgresql://, not 'mysql'"),
        ("postgresql://user:secret@db:port/name", "port is not a number"),
        ("postgresql://user:secret@db:70000/name", "port is not a number"),
        ("postgresql://user:sec/ret@db/name", "%2F"),
        ("postgresql://user:sec@ret@db/name", "%40"),
        ("postgresql://user:sec?ret@db/name", "must be a URL"),
        ("postgresql://user:sec?ret=1@db/name", "must be a URL"),
        ("postgresql://user:%zzsecret@db/name", "must be a URL"),
        ("postgresql://user:secret@h1:1,h2:2/name?port=1,2,3", "do not match"),
        ("postgresql:///name?host=h1&host=h2", "host more than once"),
        ("postgresql:///name?host=h1:1", "before the path"),
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
    """A URL that cannot be read is an error that says what to change and shows no part of the password."""
    with pytest.raises(ConfigurationError, match=said) as refused:
        make_engine(url)
    assert "sec" not in str(refused.value)
    assert "ret" not in str(refused.value).replace("interpreted", "")


def test_a_parameter_is_cast_to_its_type() -> None:
    """A parameter is cast to its type, other casts stay, and a parameter without a type is refused."""
    text = "SELECT :many::bigint[], :at::timestamptz, :s::double precision, a::int[], 'now'::date WHERE b % 5 = :n::int"
    expected = (
        "SELECT CAST(%(many)s AS bigint[]), CAST(%(at)s AS timestamptz), CAST(%(s)s AS double precision), a::int[], "
        "'now'::date WHERE b %% 5 = CAST(%(n)s AS int)"
    )
    assert text_of(sql(text)) == expected
    with pytest.raises(ValueError, match="parameters without a type: name, number"):
        sql("SELECT :name, :id::int, :number + 1")


REFUSED = (
    'connection failed: connection to server at "127.0.0.1", port 5432 failed: FATAL:  database "x" does not exist'
)


def driver_error(error: psycopg.Error) -> sa.exc.DBAPIError:
    return sa.exc.DBAPIError.instance("SELECT 1", {}, error, psycopg.Error)  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (psycopg.errors.UndefinedTable("no table"), errors.SchemaMissing),
        (psycopg.errors.UndefinedColumn("no column"), errors.SchemaMissing),
        (psycopg.errors.UndefinedFunction("no function"), errors.SchemaMissing),
        (psycopg.errors.InvalidCatalogName("no database"), errors.ConfigurationError),
        (psycopg.OperationalError(REFUSED), errors.ConfigurationError),
        (psycopg.OperationalError("connection refused"), errors.DatabaseUnavailable),
        (psycopg.OperationalError("could not send SSL negotiation packet: Broken pipe"), errors.DatabaseUnavailable),
        (psycopg.errors.AdminShutdown("going away"), errors.DatabaseUnavailable),
        (psycopg.errors.ReadOnlySqlTransaction("a standby"), errors.DatabaseUnavailable),
        (psycopg.errors.DiskFull("no space left"), errors.DatabaseUnavailable),
        (psycopg.errors.LockNotAvailable("locked"), errors.DatabaseUnavailable),
        (psycopg.errors.ProgramLimitExceeded("index row size 2840 exceeds maximum 2704"), errors.RowRefused),
        (psycopg.errors.UntranslatableCharacter("no equivalent in LATIN1"), errors.RowRefused),
        (psycopg.errors.NumericValueOutOfRange("out of range"), errors.RowRefused),
        (psycopg.errors.UniqueViolation("there is one"), errors.RowRefused),
    ],
)
def test_only_what_waiting_may_cure_is_transient(theirs: psycopg.Error, ours: type[errors.RelatumError]) -> None:
    """Errors of psycopg and SQLAlchemy are translated alike; a missing schema or database is configuration."""
    for raised in (theirs, driver_error(theirs)):
        with pytest.raises(ours) as caught, translated_errors():
            raise raised
        assert type(caught.value) is ours


def test_what_a_caller_wrote_stays_the_drivers_error() -> None:
    """In a block with the application's own statements, a refused row or a missing table stays the driver's error."""
    for theirs in (psycopg.errors.UniqueViolation("twice"), psycopg.errors.UndefinedTable("no table of theirs")):
        for raised in (theirs, driver_error(theirs)):
            with pytest.raises(type(raised)), translated_errors(theirs_too=True):
                raise raised
    with pytest.raises(errors.DatabaseUnavailable), translated_errors(theirs_too=True):
        raise psycopg.errors.AdminShutdown("going away")


def test_an_option_that_psycopg_refuses_is_configuration() -> None:
    """Also where it is of the environment, or of a caller's own engine, and not of a URL."""
    with pytest.raises(ConfigurationError, match="bad value for connect_timeout"), translated_errors():
        psycopg.connect("host=127.0.0.1 port=1", connect_timeout="abc")


@pytest.mark.parametrize("what", ["schema relatum", "table relationships", "sequence streams_stream_id_seq"])
def test_a_missing_privilege_names_the_roles(what: str) -> None:
    """PostgreSQL's words are followed by the roles that the migration made."""
    with pytest.raises(errors.AccessRefused, match=r"relatum_consumer.*relatum_recorder"), translated_errors():
        raise psycopg.errors.InsufficientPrivilege(f"permission denied for {what}")


ALL = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, errors.RelatumError)]
FINAL = (errors.InvalidInput, errors.DataError, errors.Conflict, errors.OffsetNotFound)
MENDED = (errors.AccessRefused, errors.SchemaMissing, errors.StreamNotFound, errors.PublishNacked)


@pytest.mark.parametrize("kind", [*ALL, KeyError, AssertionError, OSError, TimeoutError])
def test_what_may_be_repeated(kind: type[Exception]) -> None:
    """Transient errors may be repeated, and no others; bad input and defects cannot be mended by waiting."""
    error = kind("what happened")
    assert may_repeat(error) == issubclass(kind, errors.Transient)
    if issubclass(kind, FINAL) or kind not in ALL:
        assert not needs_operator(error)
    if kind in MENDED:
        # A missing permission or stream is retried more and more rarely, since it does not appear by itself.
        assert needs_operator(error)


def test_pauses_grow_to_their_longest() -> None:
    """Pauses between tries grow to seconds for a server that is away, and to half a minute for a refusal."""
    for longest_s in (BACKOFF_S[1], QUESTION_S):
        pauses = list(islice(backoff(longest_s), 40))
        assert pauses[0] <= BACKOFF_S[0]
        assert next(backoff(longest_s, 0.005)) <= 0.005
        assert all(longest_s / 2 <= pause <= longest_s for pause in pauses[20:])
    assert QUESTION_S / 2 >= 30
