"""Settles commits in doubt: finds out whether a transaction was committed if PostgreSQL did not answer its COMMIT.

The rows that the transaction wrote prove nothing: this or another process may have changed them since. So each fenced
step writes a unique token in its transaction, and settling looks for that token. If it exists, the step was committed.
If not, settling inserts it as void, and the step can no longer be committed: it was rolled back, or will fail on that
row. While the step's transaction is open, PostgreSQL makes settling wait. See docs/adr/0013.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final
from uuid import UUID

import sqlalchemy as sa

from relatum.common.uuid7 import uuid7
from relatum.common.waiting import backoff, within
from relatum.errors import (
    AccessRefused,
    ConfigurationError,
    DatabaseUnavailable,
    RelatumError,
    SchemaMissing,
    UsedAfterClose,
    UsedAfterFork,
)
from relatum.store.connection import idle_limit, patient
from relatum.store.database import ONCE_STATEMENT_S, sql, transaction
from relatum.store.translation import translated_errors

SETTLE_S: Final = 10.0
"""Default maximum seconds of settling with its retries."""

ASK_S: Final = 3.0
"""Maximum seconds of one attempt to settle. If the server is suspended, the next attempt uses another connection."""

KEEP_S: Final = 86_400.0
"""Seconds after which a token that its writer did not remove is deleted. A step that arrived even later would be
committed although it was settled as rolled back, but no connection stays open that long without an answer."""

_FORGET_MOST: Final = 10_000
"""Maximum tokens that one statement removes."""

_FORGET_BEFORE: Final = """
        DELETE FROM relatum.settlements WHERE token = ANY (:tokens_before::uuid[]) AND NOT is_void"""

_WRITE_TOKEN: Final = sql(f"""
    WITH before AS ({_FORGET_BEFORE}) INSERT INTO relatum.settlements (token) VALUES (:token::uuid)""")


def marked(step: str) -> sa.TextClause:
    """Return a statement that runs a step (an UPDATE), and writes and returns the step's token if a row was changed.

    Its parameters are those of the step and of `Tokens.of`.
    """
    return sql(f"""
    WITH before AS ({_FORGET_BEFORE}),
    done AS ({step} RETURNING 1)
    INSERT INTO relatum.settlements (token) SELECT :token::uuid FROM done LIMIT 1 RETURNING token""")


# Waits while the step's transaction is open. It changes no existing row, so each execution has the same result.
_SETTLE: Final = sql("""
    INSERT INTO relatum.settlements AS s (token, is_void) VALUES (:token::uuid, true)
    ON CONFLICT (token) DO UPDATE SET is_void = s.is_void
    RETURNING is_void""")

_SET_LOCK_TIMEOUT: Final = sql("SELECT set_config('lock_timeout', :limit::text, true)")

_FORGET_OLD: Final = sql("""
    DELETE FROM relatum.settlements WHERE token = ANY (ARRAY (
        SELECT token FROM relatum.settlements
        WHERE written_at < now() - make_interval(secs => :older_s::double precision)
        LIMIT :most::integer))""")


class CommitInDoubt(DatabaseUnavailable):
    """The connection was lost during a commit, and the commit's outcome is unknown.

    Attributes:
        token: The step's token, for `settle`.
    """

    token: UUID


class Tokens:
    """The tokens of a writer's steps: makes a token for each attempt, and removes settled ones later. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._settled: list[UUID] = []

    @staticmethod
    def new() -> UUID:
        """Return a unique token. Each attempt of a step needs a new one."""
        return UUID(uuid7(time.time_ns()))

    def of(self, token: UUID) -> dict[str, Any]:
        """Return the parameters of `marked`: this token, and settled tokens, which the statement removes."""
        with self._lock:
            # Only one step removes them: steps that delete the same rows would wait for each other.
            settled, self._settled = self._settled, []
        return {"token": token, "tokens_before": settled}

    def write(self, connection: sa.Connection, token: UUID) -> None:
        """Write a step's token in the step's transaction."""
        connection.execute(_WRITE_TOKEN, self.of(token))

    def committed(self, token: UUID) -> None:
        """Note that a step was committed, so that the next step removes its token."""
        with self._lock:
            self._settled.append(token)

    @contextmanager
    def transaction(
        self,
        engine: sa.Engine,
        store: "Callable[[sa.Connection, UUID], object] | None" = None,
        *,
        within_s: float = SETTLE_S,
        stop: threading.Event | None = None,
        what: str = "",
    ) -> Iterator[sa.Connection]:
        """Open a transaction for the caller's statements. It is committed if neither the block nor `store` raises.

        - `store`: Stores a step and its token at the end of the block, by `write` or `marked`. If it raises,
          everything is rolled back. None (default): only write the token.
        - `within_s`: Maximum seconds for settling a commit in doubt.
        - `stop`: An event that also ends settling.
        - `what`: A suffix for the message of the error that says that nothing was committed.

        Raises:
            CommitInDoubt: the commit could not be settled; call `was_committed` with `error.token` later.
            DatabaseUnavailable: PostgreSQL does not answer; nothing was committed.
            ConfigurationError: the block ended the transaction itself.
        """
        token, write = self.new(), store or self.write
        try:
            with joined(engine, token, lambda connection: write(connection, token)) as connection:
                yield connection
        except CommitInDoubt as error:
            try:
                was_committed = settle(engine, token, within_s=within_s, stop=stop)
            except RelatumError:
                raise error from error.__cause__
            if not was_committed:
                message = f"the connection to PostgreSQL was lost during the commit; nothing was committed{what}"
                raise DatabaseUnavailable(message) from error
        self.committed(token)

    def was_committed(self, engine: sa.Engine, token: UUID) -> bool:
        """Return whether a step in doubt was committed, by one query; see `settle`."""
        was_committed = settle(engine, token, within_s=0.0)
        if was_committed:
            self.committed(token)
        return was_committed


@contextmanager
def joined(engine: sa.Engine, token: UUID, store: Callable[[sa.Connection], object]) -> Iterator[sa.Connection]:
    """Open a transaction as `Tokens.transaction` does, without settling a commit in doubt.

    It has the database's default isolation level. The caller may leave it idle for any time. `store` locks rows that
    others may wait for: from then on, the server ends the transaction if this process is suspended, as it ends the
    engine's other transactions.
    """
    with translated_errors(theirs_too=True), engine.connect() as connection:
        driver: Any = connection.connection.driver_connection
        idle_s, driver.idle_s, driver.default_level = driver.idle_s, 0, None
        with connection.begin() as begun:
            with patient(connection, ONCE_STATEMENT_S):
                yield connection
            if not begun.is_active:
                raise ConfigurationError(
                    "the block ended the transaction itself, so its rows were not committed with the step: leave out "
                    "commit() and rollback()"
                )
            if idle_s is not None:
                connection.exec_driver_sql(idle_limit(idle_s))
            store(connection)
            try:
                begun.commit()
            except sa.exc.DBAPIError as error:
                if not _is_lost(error):
                    raise
                raise CommitInDoubt(
                    "the connection to PostgreSQL was lost during a commit, whose outcome is unknown", token=token
                ) from error


def settle(engine: sa.Engine, token: UUID, *, within_s: float = SETTLE_S, stop: threading.Event | None = None) -> bool:
    """Return whether the step that wrote a token was committed. If False, it can no longer be committed.

    Blocks, and retries while PostgreSQL is unavailable or suspended, refuses the login, or the step's transaction is
    open. Raises the error if that lasts for `within_s` (0: query once), or until `stop` is set.
    """
    stop = stop or threading.Event()
    until, pauses = time.monotonic() + within_s, backoff()
    while True:
        try:
            return _settle_once(engine, token)
        except (UsedAfterClose, UsedAfterFork, SchemaMissing):
            raise
        except (DatabaseUnavailable, AccessRefused, ConfigurationError):
            # A server that is failing over, or its pooler, may also refuse logins for a moment.
            if time.monotonic() >= until or stop.is_set():
                raise
        stop.wait(min(next(pauses), max(0.0, until - time.monotonic())))


def forget_settlements(connection: sa.Connection) -> None:
    """Delete up to 10,000 tokens that their writers did not remove. Components call this when they start."""
    connection.execute(_FORGET_OLD, {"older_s": KEEP_S, "most": _FORGET_MOST})


def _settle_once(engine: sa.Engine, token: UUID) -> bool:
    with within(ASK_S), transaction(engine) as connection:
        connection.execute(_SET_LOCK_TIMEOUT, {"limit": f"{ASK_S * 500:.0f}ms"})
        return not connection.execute(_SETTLE, {"token": token}).scalar_one()


def _is_lost(error: sa.exc.DBAPIError) -> bool:
    """Return whether a failed commit may have been executed, because the error does not prove a rollback."""
    # The server's error codes prove a rollback: a constraint, a conflict, an end before the commit. The exceptions are
    # codes for a session that the server ended, perhaps after it wrote the commit to the disk.
    code = getattr(error.orig, "sqlstate", None)
    return error.connection_invalidated or code is None or code.startswith(("57", "08", "XX", "58", "40003"))
