"""What is looked at once for each new connection: the server's version, and whether the session is ours alone.

A pooler that hands out sessions by transaction (pgbouncer, `pool_mode = transaction`) gives each transaction whichever
session of the server is free. A statement prepared before is then not there, or is another client's of the same name,
which would be run with our parameters. So nothing is prepared where a pooler is, and nothing else rests on the session
either: settings are `SET LOCAL`, locks are a transaction's, and no start-up parameter is sent that poolers refuse.

A pooler shows itself by the process id that it tells a client when it connects: its own invention, while
`pg_backend_pid()` is the server's.

Source: https://www.postgresql.org/docs/18/protocol-message-formats.html (BackendKeyData);
https://www.pgbouncer.org/features.html
"""

from typing import Any, Final, LiteralString

import psycopg
import sqlalchemy as sa

from relatum.errors import ConfigurationError

PREPARE_AFTER: Final = 5
"""Executions after which psycopg prepares a statement, its own default."""

OLDEST: Final = 15
"""The oldest PostgreSQL that is supported."""

_LOOKED: Final = "relatum.looked"


def look_at_sessions(engine: sa.Engine, prepare_threshold: int | None) -> None:
    """Have each new connection of an engine looked at.

    `prepare_threshold`: After how many executions a statement is prepared; 0 for never, None to find out.
    """

    def look(connection: "psycopg.Connection[Any]", record: Any) -> None:
        try:
            look_at(connection, record.info, prepare_threshold)
        except BaseException:
            connection.close()
            raise

    # Before SQLAlchemy's own questions, which an old server may not understand.
    sa.event.listen(engine, "connect", look, insert=True)


def look_at(connection: "psycopg.Connection[Any]", known: Any, prepare_threshold: int | None = None) -> None:
    """See that a new connection can be used, and whether statements may be prepared on it.

    `connection`: Outside a transaction.

    Raises:
        ConfigurationError: the server is older than PostgreSQL 15.
        psycopg.Error: the connection failed.
    """
    if _LOOKED in known:
        return
    major = connection.info.server_version // 10_000
    if major < OLDEST:
        raise ConfigurationError(f"PostgreSQL {major} is too old: Relatum needs {OLDEST} or newer")
    if prepare_threshold is None:
        prepare_threshold = 0 if _is_pooled(connection) else PREPARE_AFTER
    connection.prepare_threshold = prepare_threshold or None
    if not (connection.info.parameter_status("DateStyle") or "ISO").startswith("ISO"):
        # psycopg reads no other. Poolers keep this one setting for each of their clients.
        _asked(connection, "SET DateStyle = 'ISO'")
    known[_LOOKED] = True


def _is_pooled(connection: "psycopg.Connection[Any]") -> bool:
    row = _asked(connection, "SELECT pg_catalog.pg_backend_pid()").fetchone()
    return row is None or row[0] != connection.info.backend_pid


def _asked(connection: "psycopg.Connection[Any]", statement: LiteralString) -> "psycopg.Cursor[Any]":
    before = connection.autocommit
    connection.autocommit = True
    try:
        return connection.execute(statement, prepare=False)
    finally:
        if not connection.closed:
            connection.autocommit = before
