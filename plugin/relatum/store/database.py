"""Runs all SQL: single statements and transactions, on the connections of one pool.

Statements are compiled once. A single statement runs directly on the driver's connection, as its own transaction:
SQLAlchemy's layers take longer than an index probe. Everything else runs in a transaction of SQLAlchemy, which takes
its connection from the same pool.

A statement or transaction is repeated after a deadlock or a serialization failure, and if its pooled connection was
dead, as after a restart of the server. So everything that runs here must be safe to repeat. All waits are limited
(`relatum.store.connection`), nothing is prepared behind a pooler (`relatum.store.pool`), and errors are Relatum's.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager
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

_CONFLICTS: Final = (psycopg.errors.DeadlockDetected, psycopg.errors.SerializationFailure)

STATEMENT_S: Final = 30.0
"""Default maximum seconds of a statement. Long-running components retry after it."""

ONCE_STATEMENT_S: Final = 600.0
"""Default maximum seconds of a statement in a one-off task, which may read much of a table."""

IDLE_S: Final = 30.0
"""Seconds that a transaction may be idle during queries to the broker, each of which ends or fails sooner."""

_POOL_S: Final = 30.0
"""Default seconds to wait for a connection of a pool without `connections_max`."""

_POOL_BOUNDED_S: Final = 600.0
"""Seconds to wait for a connection of a pool with `connections_max`: calls queue there, and should not fail."""

CLOSED: Final = "this object is closed: create another one; nothing was written"

Rows = list[Any]
_Result = TypeVar("_Result")


def sql(text: str) -> sa.TextClause:
    """Return a statement. Its parameters are `:name::type`: PostgreSQL plans each combination of types separately.

    Quotes are not parsed: a colon before a letter is a parameter even inside quotes.
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
        database: PostgreSQL's URL or address, for a new pool; or a `Database`, whose pool is shared, and which the
            caller closes.
        refusing: The message of `UsedAfterClose` after `close`. None: the object may be used after `close`.
        ending: A deadline of all waits, which the component shortens when it ends. None (default): no deadline.
        pool_size: Maximum idle connections; under load, twice as many are open. Default: 5. Ignored with
            `connections_max`.
        is_bounded: If False, open more connections instead of waiting, also in a shared pool. Default: True.
        connections_max: Maximum connections, idle or in use; a caller waits up to ten minutes for a free connection.
            None (default): twice `pool_size`, with a wait of half a minute.
        statement_s: Maximum seconds of a statement. None: only the call's deadline (`relatum.common.waiting`).
        idle_s: Seconds after which the server ends an idle transaction and releases its locks, in case this process is
            suspended. None (default): as the database is set.
        writes: If the URL lists several hosts and does not set `target_session_attrs`: True connects only to a host
            that accepts writes, False (default) only to the primary. Statements that reached a primary and a lagging
            standby by turns would prove that messages are absent which exist.

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
        self._closed_message = refusing
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
        size_max = connections_max or (2 * pool_size if is_bounded else None)
        parameters = dict(self.address.parameters)
        if len(self.address.hosts()) > 1:
            parameters.setdefault("target_session_attrs", "read-write" if writes else "primary")
        self.pool = Pool(
            parameters,
            idle_max=connections_max or pool_size,
            size_max=size_max,
            wait_s=_POOL_S if connections_max is None else _POOL_BOUNDED_S,
            statement_s=(statement_s if self.address.statement_s is None else self.address.statement_s) or None,
            is_pooled=self.address.is_pooled,
        )

    @cached_property
    def engine(self) -> sa.Engine:
        """SQLAlchemy's engine for transactions. Disposing of it closes the pool, unless the pool is shared."""
        engine = sa.create_engine(
            self.address.url(),
            creator=partial(self._take_connection, autocommit=False),
            poolclass=sa.NullPool,
            # hstore would query the type's OID on each connection.
            use_native_hstore=False,
            hide_parameters=True,
        )
        sa.event.listen(engine, "handle_error", self._drop_read_only)
        engine.dialect.initialize = partial(_initialize, engine.dialect.initialize)  # type: ignore[method-assign]
        engine.dialect.do_begin = _begin  # type: ignore[method-assign,assignment]
        # The pool resets the isolation level: SQLAlchemy would drop the connection if its own reset failed.
        engine.dialect.reset_isolation_level = lambda dbapi_connection: None  # type: ignore[method-assign]
        if self._shared is None:
            sa.event.listen(engine, "engine_disposed", lambda _: self.pool.close())
        return engine

    def _drop_read_only(self, context: sa.engine.ExceptionContext) -> None:
        """Drop all connections to a read-only server: by DNS or a list of hosts, a new one may reach another server."""
        connection = context.connection
        if connection and isinstance(context.original_exception, psycopg.errors.ReadOnlySqlTransaction):
            context.is_disconnect = True
            driver: Any = connection.connection.driver_connection
            self.pool.forget(driver.generation)

    def check_open(self) -> None:
        """Raise `UsedAfterClose` if this object was closed, or the `Database` whose pool it shares."""
        if self._is_closed and self._closed_message is not None:
            raise UsedAfterClose(self._closed_message)
        if self._shared is not None:
            self._shared.check_open()

    def _take_connection(self, *, autocommit: bool) -> TimedConnection:
        self.check_open()
        connection = self.pool.take(ending=self._ending, autocommit=autocommit, is_bounded=self._is_bounded)
        connection.idle_s, connection.default_level = self._idle_s, psycopg.IsolationLevel.READ_COMMITTED
        return connection

    def rows(
        self,
        statement: sa.TextClause,
        parameters: Mapping[str, Any],
        *,
        once: bool = False,
        on_primary: bool = False,
        in_transaction: bool = False,
    ) -> Rows:
        """Run a statement and return its rows as named tuples.

        - `statement`: A constant made by `sql`, so that it is compiled once.
        - `once`: Never repeat the statement, since the caller finds out whether it was committed. Default: False.
        - `on_primary`: Refuse rows of a standby, which may be old; the rows have a column `is_standby`. Default: False.
        - `in_transaction`: Run at READ COMMITTED, to see what was committed during a wait for a lock. Default: False.

        Raises:
            DatabaseUnavailable: PostgreSQL does not answer, or is a standby in spite of `on_primary`.
            UsedAfterClose: the object was closed.
        """
        with translated_errors():
            for tries_left in reversed(range(1 if once else TRIES)):
                connection = self._take_connection(autocommit=not in_transaction)
                try:
                    return _fetch(connection, _text_of(statement), parameters, on_primary=on_primary)
                except psycopg.Error as error:
                    if not tries_left or not self._is_retryable(connection, error):
                        raise
                finally:
                    connection.close()
        raise AssertionError("the last try returns or raises")

    def _is_retryable(self, connection: TimedConnection, error: psycopg.Error) -> bool:
        """Return whether a statement that failed with this error may succeed if it is repeated."""
        if isinstance(error, psycopg.errors.ReadOnlySqlTransaction):
            self.pool.forget(connection.generation)  # a new connection may reach a writable server
            return False
        if not connection.closed:
            return isinstance(error, _CONFLICTS)
        # Repeat if the pooled connection was dead, but not after a time-out: a new connection may time out as well.
        is_lost = isinstance(error, psycopg.OperationalError) and not isinstance(error, NoAnswerInTime)
        return is_lost and connection.is_used

    def transaction(self) -> AbstractContextManager[sa.Connection]:
        """Open a transaction. It is committed at the end of the block, or rolled back if the block raises."""
        return transaction(self.engine)

    def run(self, work: Callable[[sa.Connection], _Result]) -> _Result:
        """Call `work` in a transaction, and repeat both after a deadlock, serialization failure or dead connection."""
        for tries_left in reversed(range(TRIES)):
            try:
                with self.transaction() as connection:
                    return work(connection)
            except Exception as error:
                if not tries_left or not _is_transient(error):
                    raise
        raise AssertionError("the last try returns or raises")

    def close(self) -> None:
        """Close the connections: idle ones now, the others when they are returned. A shared pool stays open."""
        self._is_closed = True
        if self._shared is None:
            self.pool.close()

    def reopen(self) -> None:
        """Reopen after `close`: otherwise, each statement would open a connection."""
        self._is_closed = False
        if self._shared is None:
            self.pool.reopen()


AnyDatabase: TypeAlias = str | sa.URL | Database
"""The type of `database=`: PostgreSQL's URL, or a `Database`, whose connections are shared."""


def make_engine(database: str | sa.URL, **options: Any) -> sa.Engine:
    """Return the engine of a new `Database` with these options. Disposing of it closes the connections."""
    return Database(database, refusing=None, **options).engine


@contextmanager
def as_engine(
    database: AnyDatabase, *, statement_s: float | None = ONCE_STATEMENT_S, idle_s: float | None = None
) -> Iterator[sa.Engine]:
    """Yield the engine of a `Database`, or a new engine that is closed at the end of the block."""
    if isinstance(database, Database) and idle_s is None:
        yield database.engine
        return
    with closing(Database(database, refusing=None, statement_s=statement_s, idle_s=idle_s)) as temporary:
        yield temporary.engine


@contextmanager
def transaction(engine: sa.Engine) -> Iterator[sa.Connection]:
    """Open a transaction. It is committed at the end of the block, or rolled back if the block raises."""
    with translated_errors(), engine.begin() as connection:
        yield connection


def at_one_moment(engine: sa.Engine) -> AbstractContextManager[sa.Connection]:
    """Open a transaction with one snapshot for all statements. It is committed at the end of the block."""
    return transaction(engine.execution_options(isolation_level="REPEATABLE READ"))


def _begin(driver: Any) -> None:
    """Begin a transaction, unless each statement is its own."""
    if not driver.autocommit:
        driver.begin()


def _initialize(initialize: Callable[[sa.Connection], None], connection: sa.Connection) -> None:
    """Run SQLAlchemy's first query. If that fails, return the connection to the pool, since SQLAlchemy drops it."""
    # SQLAlchemy drops its reference to a lost connection, so read it first.
    driver: Any = connection.connection.driver_connection
    try:
        initialize(connection)
    except BaseException:
        driver.close()
        raise


def _fetch(driver: TimedConnection, text: bytes, parameters: Mapping[str, Any], *, on_primary: bool) -> Rows:
    _begin(driver)
    cursor = driver.cursor(row_factory=namedtuple_row).execute(text, parameters)
    result = cursor.pgresult
    # `cursor.description` would look up the type of each column.
    rows: Rows = cursor.fetchall() if result is not None and result.nfields else []
    if on_primary and rows and rows[0].is_standby:
        raise psycopg.errors.ReadOnlySqlTransaction("the server is a standby")
    if not driver.autocommit:
        driver.commit()
    return rows


def _is_transient(error: BaseException) -> bool:
    """Return whether a transaction that failed with this error may succeed if it is repeated."""
    cause = error.__cause__ if isinstance(error.__cause__, sa.exc.DBAPIError) else error
    if not isinstance(cause, sa.exc.DBAPIError):
        return False
    is_lost = cause.connection_invalidated and not isinstance(cause.orig, NoAnswerInTime)
    return is_lost or isinstance(cause.orig, _CONFLICTS)
