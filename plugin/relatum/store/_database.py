"""The one way to run SQL: a statement by itself, or a transaction, on an engine of its own or of another `Database`.

Statements are built with SQLAlchemy, compiled once and run with their parameters. What one asks for and nothing else
depends on goes to the driver's own connection, each statement a transaction of its own: SQLAlchemy's layers on top take
longer than the probe of an index. Everything else is a transaction of SQLAlchemy's.

One rule says what is repeated: what met a connection of before that was dead in the pool, as after a restart of the
server, and what a deadlock or a serialization failure ended. So what is run here does no harm when it is run again.
All of it waits only so long (`relatum.store._waiting`), prepares nothing behind a pooler (`relatum.store._sessions`),
and raises Relatum's errors.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

import psycopg
import sqlalchemy as sa
from psycopg.pq import TransactionStatus
from sqlalchemy.dialects import registry
from sqlalchemy.engine import URL

from relatum.errors import UsedAfterClose
from relatum.store._engine import ONCE_STATEMENT_S, close_engine, component_engine, make_engine
from relatum.store._kept import Kept, Lent
from relatum.store._translation import translated_errors
from relatum.store._waiting import NoAnswerInTime, TimedConnection
from relatum.waiting import Deadline

_DIALECT: Final = registry.load("postgresql.psycopg")()

_TYPED: Final = re.compile(r"(?<!:):([a-z]\w*)::(\w+(?: precision)?(?:\[\])?)")
_UNTYPED: Final = re.compile(r"(?<!:):([a-z]\w*)\b(?!::)")

TRIES: Final = 5
"""Times a statement or transaction is tried that another one, or a dead connection, got in the way of."""

_IN_THE_WAY: Final = (psycopg.errors.DeadlockDetected, psycopg.errors.SerializationFailure)

CLOSED: Final = "this was closed: make another one; nothing was written"

Rows = list[Any]
_Answer = TypeVar("_Answer")


class Either(NamedTuple):
    """Two statements that answer the same: for sessions that prepare one, and for those that plan it each time."""

    prepared: sa.TextClause
    unprepared: sa.TextClause

    def __str__(self) -> str:
        """The one that says what is asked for."""
        return str(self.prepared)


class Text(NamedTuple):
    """A statement as psycopg takes it, and the parameters it brings itself."""

    sql: bytes
    unprepared: bytes
    own: Mapping[str, Any]

    def on(self, driver: TimedConnection) -> bytes:
        """What a connection is asked."""
        return self.sql if driver.prepare_threshold is not None else self.unprepared


def sql(text: str) -> sa.TextClause:
    """A statement, written as SQL with parameters as `:name::type`: PostgreSQL plans by the types that it is told.

    What stands in quotes is text of the statement like any other: a colon and a letter in it are a parameter.

    Raises:
        ValueError: a parameter has no type.
    """
    untyped = _UNTYPED.findall(text)
    if untyped:
        raise ValueError(f"parameters without a type: {', '.join(untyped)}")
    return sa.text(_TYPED.sub(r"CAST(:\1 AS \2)", text))


@lru_cache(maxsize=1024)
def _text_of(statement: Any) -> Text:
    if isinstance(statement, Either):
        return Text(_text_of(statement.prepared).sql, _text_of(statement.unprepared).sql, {})
    if isinstance(statement, str):
        return Text(statement.encode(), statement.encode(), {})
    text = statement.compile(dialect=_DIALECT)
    sql = str(text).encode()
    return Text(sql, sql, {name: value for name, value in text.params.items() if value is not None})


class Database:
    """PostgreSQL as one component uses it. Threads may share it.

    Args:
        database: PostgreSQL's URL, or a `Database`, which stays the caller's.
        refusing: What `UsedAfterClose` says once it is closed; None where what is under way goes on, and it may be
            used again.
        ending: Lets go of a database that does not answer as it is brought forward; None for never.
        options: Of `make_engine`, where one is made.

    Raises:
        ConfigurationError: the text is no PostgreSQL URL.
    """

    def __init__(
        self,
        database: "AnyDatabase",
        *,
        refusing: str | None = CLOSED,
        ending: Deadline | None = None,
        **options: Any,
    ) -> None:
        self._is_own = not isinstance(database, Database)
        self._refusing = refusing
        self._is_closed = False
        engine = database.engine if isinstance(database, Database) else make_engine(database, **options)
        self.engine: sa.Engine = engine if ending is None else component_engine(engine, ending)
        """For those who are given an engine."""
        most = _kept_most(self.engine.pool, is_alone=options.get("is_kept", False)) if self._is_own else 0
        self.kept = Kept(self.engine, most)
        """Its connections, for who carries statements out as `rows` does."""

    def rows(
        self,
        statement: Any,
        parameters: Mapping[str, Any],
        *,
        accept: Callable[[Rows], bool] | None = None,
        once: bool = False,
    ) -> Rows:
        """The rows a statement gives, as named tuples; those of an update that gives none: none.

        - `statement`: Built once, so that it is compiled once; or its text, or either of two.
        - `accept`: Whether what it wrote shall stay, by its rows: then it is a transaction. None (default): it stays.
        - `once`: Whether it is not repeated here where the connection is lost, since the caller finds out what became
          of it. Default: False.

        Returns:
            The rows; none where they were not accepted.

        Raises:
            DatabaseUnavailable: PostgreSQL does not answer, on a new connection either.
            UsedAfterClose: it was closed.
        """
        text, given = self.asked(statement, parameters)
        with translated_errors():
            for tries_left in reversed(range(1 if once else TRIES)):
                lent = self.kept.take()
                try:
                    rows = _executed(lent.driver, text.on(lent.driver), given, accept)
                except BaseException as error:
                    if not self.may_go_on(lent, error) or not tries_left:
                        raise
                else:
                    self.kept.give_back(lent)
                    return rows
        raise AssertionError("the last try returns or raises")

    def asked(self, statement: Any, parameters: Mapping[str, Any]) -> tuple[Text, Mapping[str, Any]]:
        """What the driver is given for a statement; for who carries it out as `rows` does.

        Raises:
            UsedAfterClose: it was closed.
        """
        if self._is_closed and self._refusing is not None:
            raise UsedAfterClose(self._refusing)
        text = _text_of(statement)
        return text, {**text.own, **parameters} if text.own else parameters

    def may_go_on(self, lent: Lent, error: BaseException) -> bool:
        """Whether what ended with this error may come through if it is begun again; gives the connection back."""
        if isinstance(error, psycopg.errors.ReadOnlySqlTransaction):
            self.kept.forget(lent, error)  # a new one may reach a server that takes writes
            return False
        if not lent.driver.closed and lent.driver.info.transaction_status is TransactionStatus.IDLE:
            # One that was refused is over, and the connection is as good as before.
            self.kept.give_back(lent)
            return isinstance(error, _IN_THE_WAY)
        if not isinstance(error, psycopg.OperationalError) or isinstance(error, NoAnswerInTime):
            # One that had no answer in time is alone, as is one that was interrupted.
            lent.pooled.invalidate()
            return False
        # It was dead: others of before may be, too. A new one tells.
        self.kept.forget(lent, error)
        return not lent.is_new

    @contextmanager
    def transaction(self) -> Iterator[sa.Connection]:
        """A transaction; committed at the end of the block, or rolled back where it raises."""
        self.kept.spare()
        with translated_errors(), self.engine.begin() as connection:
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
        """Give the connections back; those in use as their work is done. Another's stay as they are."""
        self._is_closed = True
        self.kept.drop()
        if self._is_own:
            close_engine(self.engine, self._refusing)


AnyDatabase: TypeAlias = str | URL | Database
"""What `database=` takes: PostgreSQL's URL, or a `Database`, whose connections are shared."""


@contextmanager
def as_engine(database: AnyDatabase, *, statement_s: float | None = ONCE_STATEMENT_S) -> Iterator[sa.Engine]:
    """The engine of a `Database`, or one made for a URL and disposed of at the end."""
    if isinstance(database, Database):
        yield database.engine
        return
    engine = make_engine(database, statement_s=statement_s)
    try:
        yield engine
    finally:
        close_engine(engine)


def _kept_most(pool: Any, *, is_alone: bool) -> int:
    """Half of the connections that a pool allows; as many as it keeps itself, where it allows any number.

    `is_alone`: All, since nobody asks but by statements by themselves.
    """
    overflow: int = pool._max_overflow
    kept: int = pool.size()
    if is_alone:
        return kept
    return max(1, (kept + (kept if overflow < 0 else overflow)) // 2)


def _executed(
    driver: TimedConnection, sql: bytes, given: Mapping[str, Any], accept: Callable[[Rows], bool] | None
) -> Rows:
    if accept is None:
        return _fetched(driver, sql, given)
    with driver.transaction():
        rows = _fetched(driver, sql, given)
        if accept(rows):
            return rows
        raise psycopg.Rollback
    return []  # type: ignore[unreachable]  # psycopg.Rollback ends the block, and goes no further


def _fetched(driver: TimedConnection, sql: bytes, given: Mapping[str, Any]) -> Rows:
    cursor = driver.execute(sql, given)
    result = cursor.pgresult
    # `description` would look up the type of each column.
    return cursor.fetchall() if result is not None and result.nfields else []


def _passes(error: BaseException) -> bool:
    """Whether the same transaction may come through when it is begun again."""
    cause = error.__cause__ if isinstance(error.__cause__, sa.exc.DBAPIError) else error
    if not isinstance(cause, sa.exc.DBAPIError):
        return False
    return cause.connection_invalidated or isinstance(cause.orig, _IN_THE_WAY)
