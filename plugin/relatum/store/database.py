"""The one way to run SQL: single statements and transactions, with the connections of one pool.

Statements are compiled once. A single statement runs directly on the driver's connection, as its own transaction:
SQLAlchemy's layers take longer than an index probe. Everything else is a transaction of SQLAlchemy, which takes its
connection from the same pool.

A statement or transaction is repeated if its pooled connection turned out to be dead, as after a restart of the server,
or after a deadlock or a serialization failure. So everything that runs here must be safe to repeat. All waits are
limited (`relatum.store.connection`), nothing is prepared behind a pooler (`relatum.store.pool`), and errors are
Relatum's.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from functools import cached_property, lru_cache, partial
from typing import Any, Final, TypeAlias, TypeVar

import psycopg
import sqlalchemy as sa
from psycopg.rows import namedtuple_row
from sqlalchemy.dialects import registry

from relatum.common.waiting import Deadline
from relatum.errors import UsedAfterClose
from relatum.store.address import DatabaseAddress, parse_database
from relatum.store.connection import NoAnswerInTime, TimedConnection
from relatum.store.pool import Pool
from relatum.store.translation import translated_errors

_DIALECT: Final = registry.load("postgresql.psycopg")()

_TYPED: Final = re.compile(r"(?<!:):([a-z]\w*)::(\w+(?: precision)?(?:\[\])?)")
_UNTYPED: Final = re.compile(r"(?<!:):([a-z]\w*)\b(?!::)")

TRIES: Final = 5
"""Attempts of a statement or transaction after deadlocks, serialization failures and dead connections."""

_IN_THE_WAY: Final = (psycopg.errors.DeadlockDetected, psycopg.errors.SerializationFailure)

STATEMENT_S: Final = 30.0
"""Default maximum seconds of a statement. Long-running components repeat what failed."""

ONCE_STATEMENT_S: Final = 600.0
"""Default maximum seconds of a statement in a one-off task, which may read much of a table."""

IDLE_S: Final = 30.0
"""Seconds for which a transaction may be idle while the broker is asked: each query is answered sooner, or fails."""

_POOL_S: Final = 30.0
"""Default seconds to wait for a connection of a pool without `connections_max`."""

_POOL_BOUNDED_S: Final = 600.0
"""Seconds to wait for a connection of a pool with `connections_max`: work queues there, and should not fail."""

CLOSED: Final = "this object is closed: create another one; nothing was written"

Rows = list[Any]
_Answer = TypeVar("_Answer")


def sql(text: str) -> sa.TextClause:
    """Make a statement with parameters as `:name::type`: PostgreSQL plans each combination of types separately.

    Quotes are not parsed: a colon and a letter inside quotes are a parameter, too.

    Raises:
        ValueError: a parameter has no type.
    """
    untyped = _UNTYPED.findall(text)
    if untyped:
        raise ValueError(f"parameters without a type: {', '.join(untyped)}")
    return sa.text(_TYPED.sub(r"CAST(:\1 AS \2)", text))


@lru_cache(maxsize=1024)
def _text_of(statement: sa.TextClause) -> bytes:
    return str(statement.compile(dialect=_DIALECT)).encode()


class Database:
    """A component's access to PostgreSQL. Thread-safe.

    Args:
        database: PostgreSQL's URL or address, for a pool of its own; or a `Database`, whose pool is shared, and which
            the caller closes.
        refusing: The message of `UsedAfterClose` after `close`. None: it may be used after `close`.
        ending: A deadline of all waits, which is brought forward when the component ends. None (default): no deadline.
        pool_size: Connections kept; as many again may be opened under load. Default: 5. Ignored with `connections_max`.
        is_bounded: If False, open more connections instead of waiting, also in a shared pool. Default: True.
        connections_max: Maximum connections, all of them kept; a caller waits up to ten minutes for a free one. None
            (default): twice `pool_size`, and half a minute.
        statement_s: Maximum seconds of a statement. None: only the call's deadline (`relatum.common.waiting`).
        idle_s: Seconds after which the server ends an idle transaction, in case this process is suspended, and releases
            its locks. None (default): never.
        writes: If True, and the URL lists several hosts, connect only to a host that accepts writes. Default: False.

    `statement_timeout_s` in the URL overrides `statement_s`.

    Attributes:
        address: The database's address.
        pool: The connections.

    Raises:
        ConfigurationError: the URL is invalid.
    """

    def __init__(
        self,
        database: "AnyDatabase | DatabaseAddress",
        *,
        refusing: str | None = CLOSED,
        ending: Deadline | None = None,
        pool_size: int = 5,
        is_bounded: bool = True,
        connections_max: int | None = None,
        statement_s: float | None = STATEMENT_S,
        idle_s: float | None = None,
        writes: bool = False,
    ) -> None:
        self._idle_s = idle_s
        self._refusing = refusing
        self._ending = ending
        self._is_bounded = is_bounded
        self._is_closed = False
        self._shared = database if isinstance(database, Database) else None
        self.address: DatabaseAddress
        self.pool: Pool
        if isinstance(database, Database):
            self.address, self.pool = database.address, database.pool
            return
        self.address = database if isinstance(database, DatabaseAddress) else parse_database(database)
        most = connections_max or (2 * pool_size if is_bounded else None)
        parameters = dict(self.address.parameters)
        if writes and len(self.address.hosts()) > 1:
            parameters.setdefault("target_session_attrs", "read-write")
        self.pool = Pool(
            parameters,
            kept=connections_max or pool_size,
            most=most,
            wait_s=_POOL_S if connections_max is None else _POOL_BOUNDED_S,
            statement_s=(statement_s if self.address.statement_s is None else self.address.statement_s) or None,
            is_pooled=self.address.is_pooled,
        )

    @cached_property
    def engine(self) -> sa.Engine:
        """SQLAlchemy's engine for transactions. Disposing of it closes the pool, unless the pool is shared."""
        engine = sa.create_engine(
            self.address.url(),
            creator=partial(self._taken, autocommit=False),
            poolclass=sa.NullPool,
            # It would query the type's OID on each connection.
            use_native_hstore=False,
            hide_parameters=True,
        )
        sa.event.listen(engine, "handle_error", self._leave_read_only)
        engine.dialect.initialize = partial(_initialized, engine.dialect.initialize)  # type: ignore[method-assign]
        engine.dialect.do_begin = _begin  # type: ignore[method-assign,assignment]
        # The pool resets it: if a reset after a transaction fails, SQLAlchemy drops the connection.
        engine.dialect.reset_isolation_level = lambda dbapi_connection: None  # type: ignore[method-assign]
        if self._shared is None:
            sa.event.listen(engine, "engine_disposed", lambda _: self.pool.close())
        return engine

    def _leave_read_only(self, context: sa.engine.ExceptionContext) -> None:
        """Drop all connections to a read-only server: a new one may reach another server, by DNS or list of hosts."""
        connection = context.connection
        if connection and isinstance(context.original_exception, psycopg.errors.ReadOnlySqlTransaction):
            context.is_disconnect = True
            driver: Any = connection.connection.driver_connection
            self.pool.forget(driver.generation)

    def check_open(self) -> None:
        """Raise `UsedAfterClose` if it, or the `Database` whose pool it shares, was closed."""
        if self._is_closed and self._refusing is not None:
            raise UsedAfterClose(self._refusing)
        if self._shared is not None:
            self._shared.check_open()

    def _taken(self, *, autocommit: bool) -> TimedConnection:
        self.check_open()
        connection = self.pool.take(ending=self._ending, autocommit=autocommit, is_bounded=self._is_bounded)
        connection.idle_s = self._idle_s
        return connection

    def rows(
        self,
        statement: sa.TextClause,
        parameters: Mapping[str, Any],
        *,
        accept: Callable[[Rows], bool] | None = None,
        once: bool = False,
        on_primary: bool = False,
    ) -> Rows:
        """Run a statement and return its rows as named tuples.

        - `statement`: Made by `sql`, once, so that it is compiled once.
        - `accept`: Decides from the rows whether to commit or roll back the statement. None (default): commit.
        - `once`: Never repeat the statement, since the caller finds out whether it was committed. Default: False.
        - `on_primary`: Refuse rows of a standby, which may be old; the rows have a column `is_standby`. Default: False.

        Returns:
            The rows; empty if they were not accepted, or if the statement returns none.

        Raises:
            DatabaseUnavailable: PostgreSQL does not answer, not even on a new connection.
            UsedAfterClose: it was closed.
        """
        with translated_errors():
            for tries_left in reversed(range(1 if once else TRIES)):
                connection = self._taken(autocommit=True)
                is_new, connection.is_used = not connection.is_used, True
                try:
                    return _executed(connection, _text_of(statement), parameters, accept, on_primary=on_primary)
                except psycopg.Error as error:
                    if not tries_left or not self._may_go_on(connection, error, is_new=is_new):
                        raise
                finally:
                    connection.close()
        raise AssertionError("the last try returns or raises")

    def _may_go_on(self, connection: TimedConnection, error: psycopg.Error, *, is_new: bool) -> bool:
        """Return whether a statement that failed with this error may succeed if it is repeated."""
        if isinstance(error, psycopg.errors.ReadOnlySqlTransaction):
            self.pool.forget(connection.generation)  # a new one may reach a writable server
            return False
        if not connection.closed:
            return isinstance(error, _IN_THE_WAY)
        # Repeat on a pooled connection that was dead. After a time-out, a new connection need not do better.
        return isinstance(error, psycopg.OperationalError) and not isinstance(error, NoAnswerInTime) and not is_new

    @contextmanager
    def transaction(self) -> Iterator[sa.Connection]:
        """Open a transaction, committed at the end of the block, or rolled back if the block raises."""
        with transaction(self.engine) as connection:
            yield connection

    def run(self, work: Callable[[sa.Connection], _Answer]) -> _Answer:
        """Do work in one transaction; repeat it after a deadlock, a serialization failure or a dead connection."""
        for tries_left in reversed(range(TRIES)):
            try:
                with self.transaction() as connection:
                    return work(connection)
            except Exception as error:
                if not tries_left or not _passes(error):
                    raise
        raise AssertionError("the last try returns or raises")

    def close(self) -> None:
        """Close the connections; connections in use are closed after their work. A shared pool stays open."""
        self._is_closed = True
        if self._shared is None:
            self.pool.close()


AnyDatabase: TypeAlias = str | sa.URL | Database
"""The type of `database=`: PostgreSQL's URL, or a `Database`, whose connections are shared."""


def make_engine(database: str | sa.URL, **options: Any) -> sa.Engine:
    """Return the engine of a new `Database` with these options; dispose of it to close the connections."""
    return Database(database, refusing=None, **options).engine


@contextmanager
def as_engine(
    database: AnyDatabase, *, statement_s: float | None = ONCE_STATEMENT_S, idle_s: float | None = None
) -> Iterator[sa.Engine]:
    """Yield the engine of a `Database`, or a new engine that is closed at the end of the block."""
    if isinstance(database, Database) and idle_s is None:
        yield database.engine
        return
    with closing(Database(database, refusing=None, statement_s=statement_s, idle_s=idle_s)) as own:
        yield own.engine


@contextmanager
def transaction(engine: sa.Engine) -> Iterator[sa.Connection]:
    """Open a transaction of an engine, committed at the end of the block, or rolled back if the block raises."""
    with translated_errors(), engine.begin() as connection:
        yield connection


@contextmanager
def at_one_moment(engine: sa.Engine) -> Iterator[sa.Connection]:
    """Open a transaction whose statements all see one snapshot; committed at the end of the block."""
    with translated_errors(), engine.connect() as connection:
        connection.execution_options(isolation_level="REPEATABLE READ")
        with connection.begin():
            yield connection


def _begin(driver: Any) -> None:
    """Begin a transaction for SQLAlchemy, unless the caller has set `AUTOCOMMIT`."""
    if not driver.autocommit:
        driver.begin()


def _initialized(initialize: Callable[[sa.Connection], None], connection: sa.Connection) -> None:
    """Let SQLAlchemy query the server's version. If that fails, it drops the connection, so return it to the pool."""
    # Read it first: after a lost connection, SQLAlchemy has invalidated its reference.
    driver: Any = connection.connection.driver_connection
    try:
        initialize(connection)
    except BaseException:
        driver.close()
        raise


def _executed(
    driver: TimedConnection,
    text: bytes,
    given: Mapping[str, Any],
    accept: Callable[[Rows], bool] | None,
    *,
    on_primary: bool,
) -> Rows:
    if accept is None:
        rows = _fetched(driver, text, given)
        if on_primary and rows and rows[0].is_standby:
            raise psycopg.errors.ReadOnlySqlTransaction("the server is a standby")
        return rows
    # An error before the commit rolls back: the caller returns the connection to the pool.
    driver.begin()
    rows = _fetched(driver, text, given)
    if accept(rows):
        driver.commit()
        return rows
    driver.rollback()
    return []


def _fetched(driver: TimedConnection, text: bytes, given: Mapping[str, Any]) -> Rows:
    cursor = driver.cursor(row_factory=namedtuple_row).execute(text, given)
    result = cursor.pgresult
    # Not `description`, which would look up the type of each column.
    return cursor.fetchall() if result is not None and result.nfields else []


def _passes(error: BaseException) -> bool:
    """Return whether a transaction that failed with this error may succeed if it is repeated."""
    cause = error.__cause__ if isinstance(error.__cause__, sa.exc.DBAPIError) else error
    if not isinstance(cause, sa.exc.DBAPIError):
        return False
    return cause.connection_invalidated or isinstance(cause.orig, _IN_THE_WAY)
