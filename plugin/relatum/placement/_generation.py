"""Reading the generation of a super stream: once for each publication, so by a prepared statement of its own."""

import threading
from typing import Any, Final, cast

import psycopg
import sqlalchemy as sa
from sqlalchemy.dialects import registry

from relatum.placement import _statements as statements
from relatum.store import translated_errors

_SQL: Final = str(statements.generation.compile(dialect=registry.load("postgresql.psycopg")())).encode()


class GenerationReader:
    """Connections that read generations and nothing else; one for each thread that reads at the same time.

    Args:
        engine: Where connections come from. They are taken out of its pool, since each is kept while idle.
    """

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._idle: list[psycopg.Connection[Any]] = []
        self._is_closed = False

    def read(self, super_stream_id: int) -> int | None:
        """The super stream's generation; None where there is no such super stream any more.

        Raises:
            DatabaseUnavailable: PostgreSQL does not answer, on a new connection either.
        """
        with translated_errors():
            with self._lock:
                connection = self._idle.pop() if self._idle else None
            if connection is not None:
                try:
                    return self._read(connection, super_stream_id)
                except psycopg.OperationalError:
                    # It may be of a server that was restarted since, as all that are idle; a new one tells.
                    self._drop()
            return self._read(self._connect(), super_stream_id)

    def close(self) -> None:
        """Close all connections; those in use, when they are given back."""
        self._is_closed = True
        self._drop()

    def _read(self, connection: psycopg.Connection[Any], super_stream_id: int) -> int | None:
        try:
            row = connection.execute(_SQL, {"of_super_stream": super_stream_id}, prepare=True).fetchone()
        except BaseException:
            connection.close()
            raise
        self._give_back(connection)
        return None if row is None else int(row[0])

    def _give_back(self, connection: psycopg.Connection[Any]) -> None:
        with self._lock:
            if not self._is_closed:
                self._idle.append(connection)
                return
        connection.close()

    def _connect(self) -> psycopg.Connection[Any]:
        pooled = self._engine.raw_connection()
        connection: Any = pooled.driver_connection
        pooled.detach()
        connection.autocommit = True
        return cast("psycopg.Connection[Any]", connection)

    def _drop(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()
