"""What PostgreSQL's errors become."""

import psycopg
import pytest
import sqlalchemy as sa

from relatum.errors import ConfigurationError, DatabaseUnavailable, RelatumError, SchemaMissing
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
        (psycopg.errors.InvalidCatalogName("no database"), ConfigurationError),
        (psycopg.OperationalError(REFUSED), ConfigurationError),
        (psycopg.OperationalError("connection refused"), DatabaseUnavailable),
        (psycopg.errors.AdminShutdown("going away"), DatabaseUnavailable),
    ],
)
def test_only_what_waiting_may_cure_is_transient(theirs: psycopg.Error, ours: type[RelatumError]) -> None:
    """An older schema and a database that is not there are configuration, by SQLAlchemy and by psycopg itself."""
    for raised in (theirs, driver_error(theirs)):
        with pytest.raises(ours) as caught, translated_errors():
            raise raised
        assert type(caught.value) is ours
