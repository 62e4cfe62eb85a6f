"""Engines for PostgreSQL, and the one place where its errors become Relatum's."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import psycopg
import sqlalchemy as sa
from sqlalchemy.engine import URL, make_url

from relatum._processes import after_fork, leave_to_parent
from relatum.errors import AccessRefused, ConfigurationError, DatabaseUnavailable, RowRefused, SchemaMissing

_LIBPQ_OPTIONS: dict[str, Any] = {
    "application_name": "relatum",
    # A database in SQL_ASCII would hand out bytes otherwise, which SQLAlchemy cannot read its own catalog by.
    "client_encoding": "utf8",
    "connect_timeout": 5,
    # A half-open link is noticed in about ten seconds, whether bytes wait to be acknowledged or the line is idle.
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "tcp_user_timeout": 10_000,
}

REFUSALS: Final = (psycopg.DataError, psycopg.IntegrityError, psycopg.errors.ProgramLimitExceeded)
"""What no waiting cures: SQLSTATE classes 22 and 23, and 54000, which psycopg counts among what passes.

Source: PostgreSQL, appendix A, "PostgreSQL Error Codes".
"""

_PASSING: Final = (
    psycopg.OperationalError,
    psycopg.InterfaceError,
    # A standby that is not promoted yet, and sessions ended for their time: a new connection does better.
    psycopg.errors.ReadOnlySqlTransaction,
    psycopg.errors.IdleInTransactionSessionTimeout,
    psycopg.errors.TransactionTimeout,
)

_POOL_S: Final = 30.0
"""Seconds to wait for a connection of a pool that opens more when all are busy."""

_POOL_BOUNDED_S: Final = 600.0
"""Seconds to wait for one of a pool that does not: work waits in turn there, and should not fail for it."""

# libpq gives no SQLSTATE for what a server answers before there is a session: only the text tells.
_NO_DATABASE: Final = re.compile(r'FATAL:\s+database ".*" does not exist')


def make_engine(
    database: str | URL, *, pool_size: int = 5, is_bounded: bool = True, connections_max: int | None = None
) -> sa.Engine:
    """An engine for a PostgreSQL URL, through psycopg 3.

    Args:
        database: `postgresql://user:password@host:port/name`; its query may hold any libpq option.
        pool_size: Connections kept; as many again may be opened under load.
        is_bounded: False where more may be opened, one for each thread that asks: nobody waits for another then.
        connections_max: Connections at most; who needs one while all are busy waits for it, ten minutes if need be.
            None for twice `pool_size`, and half a minute.

    Raises:
        ConfigurationError: the text is no PostgreSQL URL.
    """
    try:
        url = make_url(database)
    except (sa.exc.ArgumentError, ValueError):
        raise ConfigurationError("the database must be a URL like postgresql://user@host:5432/name") from None
    if url.get_backend_name() not in ("postgresql", "postgres"):
        raise ConfigurationError(f"Relatum keeps its table in PostgreSQL, not in {url.get_backend_name()!r}")
    url = url.set(drivername="postgresql+psycopg")
    options = {name: value for name, value in _LIBPQ_OPTIONS.items() if name not in url.query}
    overflow = pool_size if is_bounded else -1
    if connections_max is not None:
        pool_size, overflow = min(pool_size, connections_max), max(0, connections_max - pool_size)
    engine = sa.create_engine(
        url,
        pool_size=pool_size,
        max_overflow=overflow,
        pool_timeout=_POOL_S if connections_max is None else _POOL_BOUNDED_S,
        pool_use_lifo=True,
        connect_args=options,
        hide_parameters=True,
    )
    return known_engine(engine)


def known_engine(engine: sa.Engine) -> sa.Engine:
    """The engine itself, whose connections a child leaves to its parent from now on: a caller's own, too."""
    after_fork(engine, _forget_connections)
    return engine


def _forget_connections(engine: sa.Engine) -> None:
    leave_to_parent(engine.pool)
    engine.dispose(close=False)


@contextmanager
def as_engine(database: str | URL | sa.Engine) -> Iterator[sa.Engine]:
    """The engine itself, or one made for a URL and disposed of at the end."""
    if isinstance(database, sa.Engine):
        yield known_engine(database)
        return
    engine = make_engine(database)
    try:
        yield engine
    finally:
        engine.dispose()


class translated_errors:  # noqa: N801 - reads as the statement it is: `with translated_errors():`
    """Turn what psycopg and SQLAlchemy raise inside the block into Relatum's errors.

    A class and not a generator: it stands on the path of every look-up and costs a third so.

    Args:
        theirs_too: Whether the block runs a caller's own statements as well. What PostgreSQL refuses of them stays the
            driver's error then, which the caller may know better than ours.

    Raises:
        DatabaseUnavailable: PostgreSQL does not answer, or ended the connection: nothing was committed, unless the
            connection was lost during the commit itself.
        SchemaMissing: a table or column is not there.
        ConfigurationError: the server has no database of that name.
        AccessRefused: this user may not.
        RowRefused: PostgreSQL cannot hold a value, however often it is given; nothing was written.
    """

    __slots__ = ("_theirs_too",)

    def __init__(self, *, theirs_too: bool = False) -> None:
        self._theirs_too = theirs_too

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if isinstance(error, sa.exc.DBAPIError):
            if not (self._theirs_too and isinstance(error.orig, REFUSALS)):
                raise_translated(error, error.orig, lost=error.connection_invalidated)
        elif isinstance(error, psycopg.Error):
            if not (self._theirs_too and isinstance(error, REFUSALS)):
                raise_translated(error, error)
        elif isinstance(error, sa.exc.TimeoutError):
            raise DatabaseUnavailable("no connection to PostgreSQL became free in time") from error


def raise_translated(error: BaseException, original: BaseException | None, *, lost: bool = False) -> None:
    """Raise Relatum's error for a driver's error; return where the driver's own should be seen (a defect of ours)."""
    missing = (psycopg.errors.UndefinedTable, psycopg.errors.UndefinedColumn, psycopg.errors.InvalidSchemaName)
    if isinstance(original, missing):
        raise SchemaMissing("the database has no schema `relatum`, or an older one: run `relatum migrate`") from error
    refused = (psycopg.errors.InsufficientPrivilege, psycopg.errors.InvalidPassword)
    if isinstance(original, refused) or "authentication failed" in str(original):
        raise AccessRefused(f"PostgreSQL refuses this user: {_first_line(original)}") from error
    if isinstance(original, psycopg.errors.InvalidCatalogName) or _NO_DATABASE.search(str(original)):
        raise ConfigurationError(f"there is no such database: {_first_line(original)}") from error
    if isinstance(original, REFUSALS) and not lost:
        raise RowRefused(
            f"PostgreSQL refuses a value, and would again: {_first_line(original)}", sqlstate=original.sqlstate
        ) from error
    if lost or isinstance(original, _PASSING):
        raise DatabaseUnavailable(f"PostgreSQL does not answer: {_first_line(original)}") from error


def _first_line(error: BaseException | None) -> str:
    """The first line of a driver's message; psycopg puts neither passwords nor parameters into it."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
