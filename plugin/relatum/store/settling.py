"""Settling a commit in doubt: whether a transaction was committed whose COMMIT was not answered.

The rows that it wrote do not tell: others, and this very process, may have changed them since. So each fenced step
writes a token of its own in its transaction, and settling looks for that token:

- It is there: the step was committed, whatever others have written since.
- It is missing: settling inserts it first, as void. The step was rolled back, or it is still on its way (in a suspended
  server, or a proxy) and will fail on that row: it can no longer be committed.
- Its transaction is still open: PostgreSQL makes settling wait for its end.

So there is always an answer. No clock and no lease is involved, nor what a failover makes of transaction ids: a server
that lost the step has lost the token with it. Source: docs/adr/0013.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final
from uuid import UUID

import sqlalchemy as sa

from relatum.errors import ConfigurationError, DatabaseUnavailable
from relatum.store.connection import idle_limit, patient
from relatum.store.database import ONCE_STATEMENT_S, sql
from relatum.store.translation import translated_errors
from relatum.uuid7 import uuid7
from relatum.waiting import backoff, within

SETTLE_S: Final = 10.0
"""Seconds for which it is tried to find out whether a commit came through, by default."""

ASK_S: Final = 3.0
"""Seconds for one such question: a suspended server is asked again over another connection."""

KEEP_S: Final = 86_400.0
"""Seconds after which a token is removed that its writer left behind. A step that arrives later than that comes
through though it was found to be rolled back: no connection lives that long without an answer."""

_FORGET_MOST: Final = 10_000
"""Tokens removed at once, at most."""

_FORGET_BEFORE: Final = """
        DELETE FROM relatum.settlements WHERE token = ANY (:tokens_before::uuid[]) AND NOT is_void"""

_WRITE_TOKEN: Final = sql(f"""
    WITH before AS ({_FORGET_BEFORE})
    INSERT INTO relatum.settlements (token) VALUES (:token::uuid)""")
"""Writes a step's token, and removes those before it."""


def marked(step: str) -> sa.TextClause:
    """A step, an UPDATE, with its token, which is written where it changes a row; the statement gives a row then.

    Parameters: the step's own, and those of `Tokens.of`.
    """
    return sql(f"""
    WITH before AS ({_FORGET_BEFORE}),
    done AS ({step} RETURNING 1)
    INSERT INTO relatum.settlements (token) SELECT :token::uuid FROM done LIMIT 1 RETURNING token""")


# Waits while the step's transaction is open. An existing row is not changed: asking twice gives the same answer.
_SETTLE: Final = sql("""
    INSERT INTO relatum.settlements AS s (token, is_void) VALUES (:token::uuid, true)
    ON CONFLICT (token) DO UPDATE SET is_void = s.is_void
    RETURNING is_void""")

_WAIT_NO_LONGER: Final = sql("SELECT set_config('lock_timeout', :limit::text, true)")

_FORGET_OLD: Final = sql("""
    DELETE FROM relatum.settlements WHERE token = ANY (ARRAY (
        SELECT token FROM relatum.settlements
        WHERE written_at < now() - make_interval(secs => :older_s::double precision)
        LIMIT :most::integer))""")


class CommitInDoubt(DatabaseUnavailable):
    """The connection was lost during a commit: it is not known yet whether it came through.

    Attributes:
        token: What the step has written; `settle` tells by it.
    """

    token: UUID


class Tokens:
    """The tokens of one writer's steps: a new one for each try, and which are to be removed. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: list[UUID] = []

    @staticmethod
    def new() -> UUID:
        """A unique token. Each attempt of a step takes a new one."""
        return UUID(uuid7(time.time_ns()))

    def of(self, token: UUID) -> dict[str, Any]:
        """The parameters of `marked`: this token, and those that are settled."""
        with self._lock:
            # Taken by one step alone: two that remove the same row would wait for each other.
            known, self._known = self._known, []
        return {"token": token, "tokens_before": known}

    def write(self, connection: sa.Connection, token: UUID) -> None:
        """Write a step's token in the step's transaction."""
        connection.execute(_WRITE_TOKEN, self.of(token))

    def committed(self, token: UUID) -> None:
        """Note that a step came through: its token is removed with the next one."""
        with self._lock:
            self._known.append(token)

    @contextmanager
    def transaction(
        self,
        engine: sa.Engine,
        store: "Callable[[sa.Connection, UUID], object] | None" = None,
        *,
        within_s: float | None = SETTLE_S,
        stop: threading.Event | None = None,
        what: str = "",
    ) -> Iterator[sa.Connection]:
        """A transaction that others write in. It was committed when the block has been left without an error.

        - `store`: Stores a step at its end, with its token, by `write` or a statement made by `marked`. Where it
          raises, all is rolled back. None: the token alone.
        - `within_s`: Seconds for which a commit in doubt is settled; None: for the caller to settle.
        - `stop`: Ends that, too.
        - `what`: Of what the error says that it was rolled back.

        Raises:
            CommitInDoubt: PostgreSQL gave no answer in that time: settle `error.token` later.
            DatabaseUnavailable: PostgreSQL is away; nothing was committed.
            ConfigurationError: The block ended the transaction itself.
        """
        token, write = self.new(), store or self.write
        try:
            with joined(engine, token, lambda connection: write(connection, token)) as connection:
                yield connection
        except CommitInDoubt as error:
            if within_s is None:
                raise
            try:
                came_through = settle(engine, token, within_s=within_s, stop=stop)
            except DatabaseUnavailable:
                raise error from error.__cause__
            if not came_through:
                message = f"the connection to PostgreSQL was lost during the commit; nothing was committed{what}"
                raise DatabaseUnavailable(message) from error
        self.committed(token)

    def came_through(self, engine: sa.Engine, token: UUID) -> bool:
        """Whether a try in doubt was committed; asked once. See `settle`."""
        came_through = settle(engine, token, within_s=0.0)
        if came_through:
            self.committed(token)
        return came_through


@contextmanager
def joined(engine: sa.Engine, token: UUID, store: Callable[[sa.Connection], object]) -> Iterator[sa.Connection]:
    """A transaction that others write in, and that stores a step at its end. It says where its commit is in doubt.

    The caller's own work in it may take any time. The step is fenced by rows that others may wait for: from there on,
    the transaction of a suspended process is ended by the server as any other of the engine's.

    `store`: Stores the step, with its token, by `Tokens.write` or a statement made by `marked`. Where it raises, all is
    rolled back.

    Raises:
        CommitInDoubt: The connection was lost during the commit: `settle` the token.
        DatabaseUnavailable: PostgreSQL is away; nothing was committed.
        ConfigurationError: The block ended the transaction itself.
    """
    with translated_errors(theirs_too=True), engine.connect() as connection:
        driver: Any = connection.connection.driver_connection
        idle_s, driver.idle_s = driver.idle_s, None
        transaction = connection.begin()
        with transaction:
            with patient(connection, ONCE_STATEMENT_S):
                yield connection
            if not transaction.is_active:
                raise ConfigurationError(
                    "the block ended the transaction that stores its end: what it wrote is not joined with it"
                )
            if idle_s is not None:
                connection.exec_driver_sql(idle_limit(idle_s))
            store(connection)
            try:
                transaction.commit()
            except sa.exc.DBAPIError as error:
                if not _is_lost(error):
                    raise
                raise CommitInDoubt(
                    "the connection to PostgreSQL was lost during the commit, whose outcome is not known", token=token
                ) from error


def settle(engine: sa.Engine, token: UUID, *, within_s: float = SETTLE_S, stop: threading.Event | None = None) -> bool:
    """Whether the step that wrote a token was committed. If not, it can no longer be.

    Blocks; asks again while PostgreSQL is away or suspended, or the step's transaction is open.

    - `within_s`: Seconds after which it is given up; 0: asked once.
    - `stop`: Set: given up after the question under way.

    Raises:
        DatabaseUnavailable: There was no answer; it may be asked again.
    """
    stop = stop or threading.Event()
    until, pauses = time.monotonic() + within_s, backoff()
    while True:
        try:
            return _ask(engine, token)
        except DatabaseUnavailable:
            if time.monotonic() >= until or stop.is_set():
                raise
        stop.wait(min(next(pauses), max(0.0, until - time.monotonic())))


def forget_settlements(connection: sa.Connection, *, older_s: float = KEEP_S) -> None:
    """Remove tokens that their writers left behind, 10,000 at most. Called by components as they start."""
    connection.execute(_FORGET_OLD, {"older_s": older_s, "most": _FORGET_MOST})


def _ask(engine: sa.Engine, token: UUID) -> bool:
    with within(ASK_S), translated_errors(), engine.connect() as connection:
        connection.execute(_WAIT_NO_LONGER, {"limit": f"{ASK_S * 500:.0f}ms"})
        is_void = connection.execute(_SETTLE, {"token": token}).scalar_one()
        connection.commit()
    return not is_void


def _is_lost(error: sa.exc.DBAPIError) -> bool:
    """Whether a commit that failed may have come through all the same: the server did not say what became of it."""
    # What the server itself says has a code: a constraint, a conflict, an end before the commit began. A session that
    # is ended by its server says so, too, and may say it behind a commit that is on the disk.
    code = getattr(error.orig, "sqlstate", None)
    return error.connection_invalidated or code is None or code.startswith(("57", "08", "XX", "58", "40003"))
