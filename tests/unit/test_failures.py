"""What PostgreSQL's errors become, and which errors may be repeated."""

import inspect
from itertools import islice

import psycopg
import pytest
import sqlalchemy as sa

from relatum import errors
from relatum.store.translation import translated_errors
from relatum.waiting import BACKOFF_S, QUESTION_S, backoff, may_be_mended, may_repeat

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
        (psycopg.errors.AdminShutdown("going away"), errors.DatabaseUnavailable),
        (psycopg.errors.ReadOnlySqlTransaction("a standby"), errors.DatabaseUnavailable),
        (psycopg.errors.DiskFull("no space left"), errors.DatabaseUnavailable),
        (psycopg.errors.LockNotAvailable("locked"), errors.DatabaseUnavailable),
        (
            psycopg.errors.ProgramLimitExceeded("index row size 2840 exceeds btree version 4 maximum 2704"),
            errors.RowRefused,
        ),
        (psycopg.errors.UntranslatableCharacter("no equivalent in LATIN1"), errors.RowRefused),
        (psycopg.errors.NumericValueOutOfRange("out of range"), errors.RowRefused),
        (psycopg.errors.UniqueViolation("there is one"), errors.RowRefused),
    ],
)
def test_only_what_waiting_may_cure_is_transient(theirs: psycopg.Error, ours: type[errors.RelatumError]) -> None:
    """An older schema and a database that is not there are configuration, by SQLAlchemy and by psycopg itself."""
    for raised in (theirs, driver_error(theirs)):
        with pytest.raises(ours) as caught, translated_errors():
            raise raised
        assert type(caught.value) is ours


def test_what_a_caller_wrote_stays_the_drivers_error() -> None:
    """In a block with an application's own statements, what PostgreSQL refuses is told as the application knows it."""
    for raised in (psycopg.errors.UniqueViolation("twice"), driver_error(psycopg.errors.UniqueViolation("twice"))):
        with pytest.raises(type(raised)), translated_errors(theirs_too=True):
            raise raised
    with pytest.raises(errors.DatabaseUnavailable), translated_errors(theirs_too=True):
        raise psycopg.errors.AdminShutdown("going away")


# --- which may be repeated ---

ALL = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, errors.RelatumError)]
FINAL = (errors.InvalidInput, errors.DataError, errors.Conflict, errors.OffsetNotFound)
MENDED = (errors.AccessRefused, errors.SchemaMissing, errors.StreamNotFound, errors.PublishNacked)


@pytest.mark.parametrize("kind", [*ALL, KeyError, AssertionError, OSError, TimeoutError])
def test_what_may_be_repeated(kind: type[Exception]) -> None:
    """All that is transient, and nothing else; what is wrong with one message, and a defect, nobody mends either."""
    error = kind("what happened")
    assert may_repeat(error) == issubclass(kind, errors.Transient)
    if issubclass(kind, FINAL) or kind not in ALL:
        assert not may_be_mended(error)
    if kind in MENDED:
        # A permission or a stream that is missing is asked for more and more rarely, not as if it came by itself.
        assert may_be_mended(error)


def test_pauses_grow_to_their_longest() -> None:
    """A server that is away is tried every few seconds in the end; a refused question is asked every half minute."""
    for longest_s in (BACKOFF_S[1], QUESTION_S):
        pauses = list(islice(backoff(longest_s), 40))
        assert pauses[0] <= BACKOFF_S[0]
        assert all(longest_s / 2 <= pause <= longest_s for pause in pauses[20:])
    assert QUESTION_S / 2 >= 30
