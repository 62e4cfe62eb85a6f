"""Running finished statements: no transaction, no check before use, one retry on a connection that went stale."""

from typing import Any

import sqlalchemy as sa

from relatum.store import make_engine, translated_errors
from relatum_consumer._requests import Select


class Database:
    """The database of look-ups. Threads may share it.

    Each statement is one round trip: it commits by itself, which for a SELECT alone is as good as a transaction.

    Args:
        database: PostgreSQL's URL, or an engine, which stays open.
        pool_size: Connections kept for a URL.
    """

    def __init__(self, database: str | sa.Engine, *, pool_size: int) -> None:
        self._owned = None if isinstance(database, sa.Engine) else make_engine(database, pool_size=pool_size)
        engine = database if self._owned is None else self._owned
        assert isinstance(engine, sa.Engine), "it was given, or made"
        self._engine = engine.execution_options(isolation_level="AUTOCOMMIT")

    def select(self, request: Select) -> list[Any]:
        """The rows of a statement.

        Raises:
            DatabaseUnavailable: PostgreSQL does not answer.
            SchemaMissing: a table is not there.
            AccessRefused: this user may not read.
        """
        with translated_errors():
            try:
                return self._execute(request)
            except sa.exc.DBAPIError as error:
                # A pooled connection that the server closed meanwhile shows only when it is used.
                if not error.connection_invalidated:
                    raise
            return self._execute(request)

    def _execute(self, request: Select) -> list[Any]:
        with self._engine.connect() as connection:
            return list(connection.exec_driver_sql(request.sql, dict(request.parameters)).fetchall())

    def close(self) -> None:
        """Close the connections of an engine that was made here."""
        if self._owned is not None:
            self._owned.dispose()
