"""The one way to run SQL: a statement by itself, or a transaction, over the connections of one pool.

Statements are compiled once and run with their parameters. What one asks for and nothing else depends on goes to the
driver's own connection, each statement a transaction of its own: SQLAlchemy's layers on top take longer than the probe
of an index. Everything else is a transaction of SQLAlchemy's, which takes its connection from the same pool.

One rule says what is repeated: what met a connection of before that was dead in the pool, as after a restart of the
server, and what a deadlock or a serialization failure ended. So what is run here does no harm when it is run again.
All of it waits only so long (`relatum.store.connection`), prepares nothing behind a pooler (`relatum.store.pool`),
and raises Relatum's errors.
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

from relatum.errors import UsedAfterClose
from relatum.store.address import POOL, POOL_SIZE, STATEMENT, DatabaseAddress, parse_database
from relatum.store.connection import NoAnswerInTime, TimedConnection
from relatum.store.pool import Pool
from relatum.store.translation import translated_errors
from relatum.waiting import Deadline

_DIALECT: Final = registry.load("postgresql.psycopg")()

_TYPED: Final = re.compile(r"(?<!:):([a-z]\w*)::(\w+(?: precision)?(?:\[\])?)")
_UNTYPED: Final = re.compile(r"(?<!:):([a-z]\w*)\b(?!::)")

TRIES: Final = 5
"""Times a statement or transaction is tried that another one, or a dead connection, got in the way of."""

_IN_THE_WAY: Final = (psycopg.errors.DeadlockDetected, psycopg.errors.SerializationFailure)

STATEMENT_S: Final = 30.0
"""Seconds for one statement, by default. Components that run on repeat what failed."""

ONCE_STATEMENT_S: Final = 600.0
"""Seconds for one statement of a one-off task, by default: it may read much of a table."""

IDLE_S: Final = 30.0
"""Seconds that a transaction may be idle while the broker is asked: each question is answered sooner, or fails."""

_POOL_S: Final = 30.0
"""Seconds to wait for a connection of a pool that opens more when all are busy."""

_POOL_BOUNDED_S: Final = 600.0
"""Seconds to wait for one of a bounded pool: work queues there, and should not fail for it."""

CLOSED: Final = "this was closed: make another one; nothing was written"

Rows = list[Any]
_Answer = TypeVar("_Answer")


def sql(text: str) -> sa.TextClause:
    """A statement with parameters as `:name::type`: PostgreSQL makes a plan for each combination of types.

    Quotes are not parsed: a colon and a letter inside them are a parameter, too.

    Raises:
        ValueError: a parameter has no type.
    """
    untyped = _UNTYPED.findall(text)
    if untyped:
        raise ValueError(f"parameters without a type: {', '.join(untyped)}")
    return sa.text(_TYPED.sub(r"CAST(:\1 AS \2)", text))


@lru_cache(maxsize=1024)
def _text_of(statement: sa.TextClause) -> bytes:
    """A statement as psycopg takes it."""
    return str(statement.compile(dialect=_DIALECT)).encode()


class Database:
    """PostgreSQL as one component uses it. Threads may share it.

    Args:
        database: PostgreSQL's URL, or a `Database`, which stays the caller's and whose connections are shared; or the
            address of one, for connections of its own.
        refusing: The text of `UsedAfterClose` once it is closed; None: it may be used after `close`.
        ending: A deadline of all waits, which is brought forward as the component ends; None for none.
        pool_size: Connections kept; as many again may be opened under load. Not with `connections_max`.
        is_bounded: False: further connections are opened instead of waiting for one, also beyond those of a shared
            `Database`.
        connections_max: Connections at most, all of them kept; a caller waits up to ten minutes for a free one. None:
            twice `pool_size`, and half a minute.
        statement_s: Seconds for one statement; None for no limit but the deadline of a call (`relatum.waiting`).
        idle_s: Seconds after which the server ends an idle transaction of this component, whose process may be
            suspended, and releases its locks. None (default): never.
        writes: True connects only to a host that takes writes, where the URL lists several and does not say otherwise.

    What the URL says of `statement_timeout_s`, `pool_size` and `pool_timeout_s` comes before these.

    Attributes:
        address: Where it is.
        pool: Its connections.

    Raises:
        ConfigurationError: the text is no PostgreSQL URL.
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
        limits = self.address.limits
        most: int | None = connections_max
        if connections_max is None:
            pool_size = int(limits.get(POOL_SIZE, pool_size))
            most = 2 * pool_size if is_bounded else None
        parameters = dict(self.address.parameters)
        if writes and len(self.address.hosts()) > 1:
            parameters.setdefault("target_session_attrs", "read-write")
        self.pool = Pool(
            parameters,
            kept=pool_size if connections_max is None else connections_max,
            most=most,
            wait_s=limits.get(POOL, _POOL_S if connections_max is None else _POOL_BOUNDED_S),
            statement_s=limits.get(STATEMENT, statement_s) or None,
            prepare_threshold=self.address.prepare_threshold,
        )

    @cached_property
    def engine(self) -> sa.Engine:
        """For transactions, by SQLAlchemy: each takes a connection of the pool. To dispose of it closes an own pool."""
        engine = sa.create_engine(
            self.address.url(),
            creator=partial(self._taken, autocommit=False),
            poolclass=sa.NullPool,
            # It would ask each connection that it is given for the type's number.
            use_native_hstore=False,
            hide_parameters=True,
        )
        sa.event.listen(engine, "handle_error", self._leave_read_only)
        engine.dialect.initialize = partial(_initialized, engine.dialect.initialize)  # type: ignore[method-assign]
        engine.dialect.do_begin = _begin  # type: ignore[method-assign,assignment]
        # The pool sets it back: where that fails behind a transaction, SQLAlchemy forgets the connection.
        engine.dialect.reset_isolation_level = lambda dbapi_connection: None  # type: ignore[method-assign]
        if self._shared is None:
            sa.event.listen(engine, "engine_disposed", lambda _: self.pool.close())
        return engine

    def _leave_read_only(self, context: sa.engine.ExceptionContext) -> None:
        """Give up all connections to a server that takes no writes: a new one may reach another, by name or list."""
        connection = context.connection
        if connection and isinstance(context.original_exception, psycopg.errors.ReadOnlySqlTransaction):
            context.is_disconnect = True
            driver: Any = connection.connection.driver_connection
            self.pool.forget(driver.generation)

    def check_open(self) -> None:
        """Raise `UsedAfterClose` where it, or the one whose connections it shares, was closed."""
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
        """The rows a statement gives, as named tuples; those of an update that gives none: none.

        - `statement`: Made by `sql`, once, so that it is compiled once.
        - `accept`: Whether what it wrote shall stay, by its rows: then it is a transaction. None (default): it stays.
        - `once`: Whether it is not repeated here where the connection is lost, since the caller finds out what became
          of it. Default: False.
        - `on_primary`: Whether a standby's rows are refused, which may be old: each says `is_standby`. Default: False.

        Returns:
            The rows; none where they were not accepted.

        Raises:
            DatabaseUnavailable: PostgreSQL does not answer, on a new connection either.
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
        """Whether what ended with this error may come through if it is begun again."""
        if isinstance(error, psycopg.errors.ReadOnlySqlTransaction):
            self.pool.forget(connection.generation)  # a new one may reach a server that takes writes
            return False
        if not connection.closed:
            return isinstance(error, _IN_THE_WAY)
        # One that was dead in the pool says so now. One that had no answer in time says nothing of the next.
        return isinstance(error, psycopg.OperationalError) and not isinstance(error, NoAnswerInTime) and not is_new

    @contextmanager
    def transaction(self) -> Iterator[sa.Connection]:
        """A transaction; committed at the end of the block, or rolled back where it raises."""
        with transaction(self.engine) as connection:
            yield connection

    def run(self, work: Callable[[sa.Connection], _Answer]) -> _Answer:
        """Do work in one transaction; again where another one, or a connection of a server before, was in the way."""
        for tries_left in reversed(range(TRIES)):
            try:
                with self.transaction() as connection:
                    return work(connection)
            except Exception as error:
                if not tries_left or not _passes(error):
                    raise
        raise AssertionError("the last try returns or raises")

    def close(self) -> None:
        """Close the connections; those in use as their work is done. Another's stay as they are."""
        self._is_closed = True
        if self._shared is None:
            self.pool.close()


AnyDatabase: TypeAlias = str | sa.URL | Database
"""What `database=` takes: PostgreSQL's URL, or a `Database`, whose connections are shared."""


def make_engine(database: str | sa.URL, **options: Any) -> sa.Engine:
    """The engine of a `Database` of its own, with these options; to be disposed of."""
    return Database(database, refusing=None, **options).engine


@contextmanager
def as_engine(
    database: AnyDatabase, *, statement_s: float | None = ONCE_STATEMENT_S, idle_s: float | None = None
) -> Iterator[sa.Engine]:
    """The engine of a `Database`, or one made for a URL and disposed of at the end."""
    if isinstance(database, Database) and idle_s is None:
        yield database.engine
        return
    with closing(Database(database, refusing=None, statement_s=statement_s, idle_s=idle_s)) as own:
        yield own.engine


@contextmanager
def transaction(engine: sa.Engine) -> Iterator[sa.Connection]:
    """A transaction of an engine; committed at the end of the block, or rolled back where it raises."""
    with translated_errors(), engine.begin() as connection:
        yield connection


@contextmanager
def at_one_moment(engine: sa.Engine) -> Iterator[sa.Connection]:
    """A transaction whose statements all see the database as it is at the first of them; committed at the end."""
    with translated_errors(), engine.connect() as connection:
        connection.execution_options(isolation_level="REPEATABLE READ")
        with connection.begin():
            yield connection


def _begin(driver: Any) -> None:
    """Begin a transaction of SQLAlchemy's; none where the caller has set `AUTOCOMMIT`."""
    if not driver.autocommit:
        driver.begin()


def _initialized(initialize: Callable[[sa.Connection], None], connection: sa.Connection) -> None:
    """Have SQLAlchemy ask what server it is; where that fails it only forgets the connection, so that is given back."""
    # Asked for first: SQLAlchemy has invalidated its own where the server hung up.
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
    # What ends it before it is committed rolls it back: the connection is given back.
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
    # `description` would look up the type of each column.
    return cursor.fetchall() if result is not None and result.nfields else []


def _passes(error: BaseException) -> bool:
    """Whether the same transaction may come through when it is begun again."""
    cause = error.__cause__ if isinstance(error.__cause__, sa.exc.DBAPIError) else error
    if not isinstance(cause, sa.exc.DBAPIError):
        return False
    return cause.connection_invalidated or isinstance(cause.orig, _IN_THE_WAY)
