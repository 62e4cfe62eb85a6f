"""Running finished statements: no transaction, no check before use, one retry on a connection that went stale."""

from contextlib import closing
from typing import Any, Final

import psycopg
import sqlalchemy as sa

from relatum.errors import UsedAfterClose
from relatum.store import NoAnswerInTime, known_engine, make_engine, translated_errors
from relatum_consumer.lookups._requests import Select

CLOSED: Final = "these relations were closed: make others, or ask inside the `with` block"


class Database:
    """The database of look-ups. Threads may share it.

    Each statement is one round trip: it commits by itself, which for a SELECT alone is as good as a transaction.

    Args:
        database: PostgreSQL's URL, or an engine, which stays open.
        pool_size: Connections kept for a URL.
    """

    def __init__(self, database: str | sa.Engine, *, pool_size: int) -> None:
        self._owned = None if isinstance(database, sa.Engine) else make_engine(database, pool_size=pool_size)
        self._is_closed = False
        if self._owned is not None:
            sa.event.listen(self._owned, "connect", _commit_each)
        elif isinstance(database, sa.Engine):
            self._theirs = known_engine(database).execution_options(isolation_level="AUTOCOMMIT")

    def select(self, request: Select) -> list[Any]:
        """The rows of a statement.

        Raises:
            UsedAfterClose: `close` was called.
            DatabaseUnavailable: PostgreSQL does not answer.
            SchemaMissing: a table is not there.
            AccessRefused: this user may not read.
        """
        if self._is_closed:
            raise UsedAfterClose(CLOSED)
        with translated_errors():
            if self._owned is None:
                return self._execute_on_theirs(request)
            return self._execute(self._owned, request)

    def _execute(self, engine: sa.Engine, request: Select, *, is_retry: bool = False) -> list[Any]:
        """Run it on the driver's own connection: SQLAlchemy's layers on top take longer than the index probe."""
        with closing(engine.raw_connection()) as pooled:
            driver: psycopg.Connection[Any] = pooled.driver_connection  # type: ignore[assignment]
            try:
                return driver.execute(request.sql, request.parameters).fetchall()
            except NoAnswerInTime as error:
                pooled.invalidate(error)
                raise
            except psycopg.OperationalError as error:
                if not driver.closed:
                    raise
                pooled.invalidate(error)
                if is_retry:
                    raise
        # A pooled connection that the server closed meanwhile shows only when it is used, and the others with it.
        engine.dispose()
        return self._execute(engine, request, is_retry=True)

    def _execute_on_theirs(self, request: Select) -> list[Any]:
        try:
            return self._execute_once(request)
        except sa.exc.DBAPIError as error:
            if not error.connection_invalidated:
                raise
        return self._execute_once(request)

    def _execute_once(self, request: Select) -> list[Any]:
        with self._theirs.connect() as connection:
            return list(connection.exec_driver_sql(request.sql, dict(request.parameters)).fetchall())

    def close(self) -> None:
        """Close the connections of an engine that was made here."""
        self._is_closed = True
        if self._owned is not None:
            self._owned.dispose()


def _commit_each(connection: psycopg.Connection[Any], record: Any) -> None:
    connection.autocommit = True
