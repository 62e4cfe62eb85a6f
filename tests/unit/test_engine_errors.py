"""What PostgreSQL's errors become."""

import psycopg
import pytest
import sqlalchemy as sa

from relatum.errors import ConfigurationError, DatabaseUnavailable, RelatumError, RowRefused, SchemaMissing
from relatum.store import translated_errors

REFUSED = (
    'connection failed: connection to server at "127.0.0.1", port 5432 failed: FATAL:  database "x" does not exist'
)


def driver_error(error: psycopg.Error) -> sa.exc.DBAPIError:
    """A driver's error as SQLAlchemy raises it."""
    return sa.exc.DBAPIError.instance("SELECT 1", {}, error, psycopg.Error)  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        (psycopg.errors.UndefinedTable("no table"), SchemaMissing),
        (psycopg.errors.UndefinedColumn("no column"), SchemaMissing),
        (psycopg.errors.UndefinedFunction("no function"), SchemaMissing),
        (psycopg.errors.InvalidCatalogName("no database"), ConfigurationError),
        (psycopg.OperationalError(REFUSED), ConfigurationError),
        (psycopg.OperationalError("connection refused"), DatabaseUnavailable),
        (psycopg.errors.AdminShutdown("going away"), DatabaseUnavailable),
        (psycopg.errors.ReadOnlySqlTransaction("a standby"), DatabaseUnavailable),
        (psycopg.errors.DiskFull("no space left"), DatabaseUnavailable),
        (psycopg.errors.LockNotAvailable("locked"), DatabaseUnavailable),
        (psycopg.errors.ProgramLimitExceeded("index row size 2840 exceeds btree version 4 maximum 2704"), RowRefused),
        (psycopg.errors.UntranslatableCharacter("no equivalent in LATIN1"), RowRefused),
        (psycopg.errors.NumericValueOutOfRange("out of range"), RowRefused),
        (psycopg.errors.UniqueViolation("there is one"), RowRefused),
    ],
)
def test_only_what_waiting_may_cure_is_transient(theirs: psycopg.Error, ours: type[RelatumError]) -> None:
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
    with pytest.raises(DatabaseUnavailable), translated_errors(theirs_too=True):
        raise psycopg.errors.AdminShutdown("going away")
