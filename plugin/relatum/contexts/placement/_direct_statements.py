"""Statements that publishing waits for, prepared, on connections of their own: several times faster than the engine's.

A generation is read for each publication, a placement for each new name.
"""

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple, cast

import psycopg
import sqlalchemy as sa
from psycopg.pq import TransactionStatus
from psycopg.rows import namedtuple_row
from sqlalchemy.dialects import registry

from relatum.errors import UsedAfterClose
from relatum.store import REFUSALS, NoAnswerInTime, look_at, translated_errors

_DIALECT: Final = registry.load("postgresql.psycopg")()

_TRIES: Final = 5
"""Times a statement is tried that another one got in the way of, or that met a connection of a server before."""

_PASSING: Final = (psycopg.errors.DeadlockDetected, psycopg.errors.SerializationFailure)

Rows = Sequence[Any]


class _Text(NamedTuple):
    """A statement as psycopg takes it, and the parameters it brings itself."""

    sql: bytes
    own: Mapping[str, Any]


@lru_cache(maxsize=64)
def _text_of(statement: "sa.Select[Any] | sa.Update") -> _Text:
    compiled = statement.compile(dialect=_DIALECT)
    own = {name: value for name, value in compiled.params.items() if value is not None}
    return _Text(str(compiled).encode(), own)


CLOSED: Final = "this was closed: make another one"


class DirectStatements:
    """Connections for prepared statements; one for each thread that executes one at the same time.

    Args:
        engine: Where connections come from. They are taken out of its pool, since each is kept while idle.
    """

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine
        self._lock = threading.Lock()
        self._idle: list[psycopg.Connection[Any]] = []
        self._is_closed = False

    def rows(
        self,
        statement: "sa.Select[Any] | sa.Update",
        parameters: Mapping[str, Any],
        accept: Callable[[Rows], bool] | None = None,
    ) -> Rows:
        """The rows a statement gives, as named tuples; those of an update that gives none: none.

        Args:
            statement: Built once, so that it is compiled once.
            parameters: Its parameters.
            accept: Whether what it wrote shall stay, by its rows: then it is a transaction. None (default): it stays.

        Returns:
            The rows; none where they were not accepted.

        Raises:
            DatabaseUnavailable: PostgreSQL does not answer, on a new connection either.
        """
        if self._is_closed:
            raise UsedAfterClose(f"{CLOSED}; nothing was written")
        text = _text_of(statement)
        with translated_errors():
            for tries_left in reversed(range(_TRIES)):
                connection = self._take()
                is_new = connection is None
                connection = connection or self._connect()
                try:
                    return self._execute(connection, text, parameters, accept)
                except NoAnswerInTime:
                    raise
                except psycopg.OperationalError as error:
                    if not tries_left or isinstance(error, REFUSALS) or (is_new and not isinstance(error, _PASSING)):
                        raise
                    # Those that are idle may be of a server that was restarted since; a new one tells.
                    self._drop()
                except psycopg.errors.ReadOnlySqlTransaction:
                    self._drop()  # a new one may reach a server that takes writes
                    raise
        raise AssertionError("the last try returns or raises")

    def close(self) -> None:
        """Close all connections; those in use, when they are given back."""
        self._is_closed = True
        self._drop()

    def _execute(
        self,
        connection: psycopg.Connection[Any],
        text: _Text,
        parameters: Mapping[str, Any],
        accept: Callable[[Rows], bool] | None,
    ) -> Rows:
        given = {**text.own, **parameters}
        try:
            rows = _kept(connection, text, given, accept) if accept else _rows(connection, text, given)
        except BaseException:
            # One that was refused is over, and the connection is as good as before.
            if connection.info.transaction_status is TransactionStatus.IDLE:
                self._give_back(connection)
            else:
                connection.close()
            raise
        self._give_back(connection)
        return rows

    def _take(self) -> "psycopg.Connection[Any] | None":
        with self._lock:
            return self._idle.pop() if self._idle else None

    def _give_back(self, connection: psycopg.Connection[Any]) -> None:
        with self._lock:
            if not self._is_closed:
                self._idle.append(connection)
                return
        connection.close()

    def _connect(self) -> psycopg.Connection[Any]:
        pooled = self._engine.raw_connection()
        connection: Any = pooled.driver_connection
        known = pooled.info
        pooled.detach()
        connection.autocommit = True
        connection.row_factory = namedtuple_row
        try:
            look_at(connection, known)  # not done yet where the engine is a caller's
        except BaseException:
            connection.close()
            raise
        return cast("psycopg.Connection[Any]", connection)

    def _drop(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()


def _rows(connection: psycopg.Connection[Any], text: _Text, parameters: Mapping[str, Any]) -> Rows:
    cursor = connection.execute(text.sql, parameters, prepare=True)
    return cursor.fetchall() if cursor.description else ()


def _kept(
    connection: psycopg.Connection[Any], text: _Text, parameters: Mapping[str, Any], accept: Callable[[Rows], bool]
) -> Rows:
    """The rows of a statement whose writes are kept where its rows are accepted; none otherwise."""
    with connection.transaction():
        rows = _rows(connection, text, parameters)
        if accept(rows):
            return rows
        raise psycopg.Rollback
    return ()  # type: ignore[unreachable]  # psycopg.Rollback ends the block, and goes no further
