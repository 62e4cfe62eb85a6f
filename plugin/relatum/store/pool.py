"""A bounded pool of connections to one database.

SQLAlchemy also uses this pool: each transaction takes a connection, and the connection's `close` returns it. psycopg's
own pool connects in the background, so that a wrong password appears as a time-out without a cause, and the pool
continues to log in after the caller has given up. See docs/adr/0049.
"""

import math
import threading
from collections import deque
from contextlib import suppress
from typing import Any, Final

import psycopg
from psycopg.pq import TransactionStatus

from relatum.common.processes import after_fork, leave_to_parent
from relatum.common.waiting import LOOK_S, Deadline, call_in_time, current
from relatum.errors import ConfigurationError, DatabaseUnavailable
from relatum.store.connection import TimedConnection, check

LIBPQ_OPTIONS: Final[dict[str, Any]] = {
    "fallback_application_name": "relatum",
    # From a database in SQL_ASCII, SQLAlchemy's catalog queries would get bytes, which it does not expect.
    "client_encoding": "utf8",
    "connect_timeout": 5,
    # A half-open connection is detected in about ten seconds, idle or not.
    "keepalives_idle": 5,
    "keepalives_interval": 2,
    "keepalives_count": 3,
    "tcp_user_timeout": 10_000,
}

PREPARE_AFTER: Final = 5
"""Executions after which psycopg prepares a statement; psycopg's default."""

OLDEST: Final = 15
"""The oldest supported major version of PostgreSQL."""


class Pool:
    """Connections to one database. Thread-safe. In a forked child, the pool is empty: the parent owns the connections.

    `parameters` are libpq's, by name; they override `LIBPQ_OPTIONS`. `size_max` limits the connections in use and idle;
    `wait_s` is the time limit of a wait for one. `is_pooled`: Whether a pooler assigns sessions by transaction, so that
    nothing is prepared; None to detect it.
    """

    def __init__(
        self,
        parameters: dict[str, Any],
        *,
        idle_max: int,
        size_max: int | None,
        wait_s: float,
        statement_s: float | None,
        is_pooled: bool | None,
    ) -> None:
        self._parameters = LIBPQ_OPTIONS | parameters
        self._idle_max = idle_max
        self._size_max = math.inf if size_max is None else size_max
        self._wait_s = wait_s
        self._statement_s = statement_s
        self._is_pooled = is_pooled
        self._is_closed = False
        self._reset()
        after_fork(self, Pool._renew)

    def _reset(self) -> None:
        # Reentrant: garbage collection may return a dropped connection in a thread that holds the lock.
        self._lock = threading.RLock()
        self._idle: list[TimedConnection] = []
        self._in_use: set[TimedConnection] = set()
        self._opening = 0
        self._waiters: deque[threading.Condition] = deque()
        """The conditions of waiting callers, in order of arrival."""
        self._generation = 0

    def _renew(self) -> None:
        leave_to_parent(*self._idle, *self._in_use)
        self._reset()

    @property
    def idle(self) -> int:
        """The number of idle connections."""
        return len(self._idle)

    @property
    def in_use(self) -> int:
        """The number of connections in use or being opened."""
        return len(self._in_use) + self._opening

    def take(self, *, ending: Deadline | None = None, autocommit: bool, is_bounded: bool = True) -> TimedConnection:
        """Return an idle or a new connection; wait if the pool is full. The connection's `close` returns it.

        `ending` is a deadline of this wait and of the connection's waits. Without `is_bounded`, another connection is
        opened if all are in use, so that leases never wait.
        """
        connection = self._take_idle(ending, is_bounded) or self._open_connection(Deadline(None, current(), ending))
        try:
            connection.ending = ending
            if connection.autocommit != autocommit:
                connection.autocommit = autocommit
            if connection.isolation_level is not None:
                connection.isolation_level = None
        except BaseException:
            connection.close()
            raise
        return connection

    def _take_idle(self, ending: Deadline | None, is_bounded: bool) -> TimedConnection | None:
        """Return an idle connection, after a wait if the pool is full and `is_bounded`; None to open a new one."""
        with self._lock:
            if is_bounded and (self._waiters or not self._has_capacity()):
                self._wait_for_capacity(Deadline(self._wait_s, current(), ending))
            while self._idle:
                connection = self._idle.pop()
                if not connection.closed:
                    self._in_use.add(connection)
                    return connection
            self._opening += 1
            return None

    def _has_capacity(self) -> bool:
        return bool(self._idle) or self.in_use < self._size_max

    def _wait_for_capacity(self, deadline: Deadline) -> None:
        """Wait for an idle connection or for room in the pool, in order of arrival. Call with the lock held."""
        waiter = threading.Condition(self._lock)
        self._waiters.append(waiter)
        try:
            while self._waiters[0] is not waiter or not self._has_capacity():
                if deadline.has_passed:
                    call = current()
                    reason = f" ({call})" if call is not None and call.has_passed else ""
                    text = f"no connection to PostgreSQL became free in time{reason}; the call is safe to repeat"
                    raise DatabaseUnavailable(text, reason="pool")
                waiter.wait(max(0.0, min(LOOK_S, deadline.left_s())))
        finally:
            self._waiters.remove(waiter)
            self._wake_first()

    def _wake_first(self) -> None:
        """Wake the first waiting caller. Call with the lock held."""
        if self._waiters:
            self._waiters[0].notify()

    def _open_connection(self, deadline: Deadline) -> TimedConnection:
        """Open a connection within a deadline. psycopg's limit is in whole seconds, and excludes name resolution."""
        try:
            check(deadline)
            try:
                connection = call_in_time(deadline, self._connect, deadline.left_s(), unwanted=TimedConnection.end)
            except TimeoutError:
                check(deadline)
                raise
        except BaseException:
            with self._lock:
                self._opening -= 1
                self._wake_first()
            raise
        connection.release = self.release
        with self._lock:
            self._opening -= 1
            self._in_use.add(connection)
        return connection

    def _connect(self, left_s: float) -> TimedConnection:
        timeout_s = int(self._parameters["connect_timeout"])
        # Without a limit, the thread would wait forever for a silent server.
        limit_s = timeout_s if timeout_s > 0 else max(2, math.ceil(min(left_s, 3600)))
        generation = self._generation
        connection = TimedConnection.connect(**self._parameters | {"connect_timeout": limit_s}, autocommit=True)
        connection.statement_s, connection.generation = self._statement_s, generation
        try:
            check_session(connection, self._is_pooled)
        except BaseException:
            connection.end()
            raise
        return connection

    def release(self, connection: TimedConnection) -> None:
        """Keep a returned connection if it is reusable. If it is broken, drop all connections of its generation."""
        if connection not in self._in_use:
            return  # It was already returned, or belongs to the parent.
        if connection.broken:
            self.forget(connection.generation)
        try:
            if connection.pgconn.transaction_status in (TransactionStatus.INTRANS, TransactionStatus.INERROR):
                with suppress(psycopg.Error):
                    connection.rollback()
        finally:
            is_idle = connection.pgconn.transaction_status == TransactionStatus.IDLE
            with self._lock:
                self._in_use.discard(connection)
                is_reusable = is_idle and connection.generation == self._generation and not self._is_closed
                if is_reusable and len(self._idle) < max(self._idle_max, len(self._waiters)):
                    connection.is_used = True
                    self._idle.append(connection)
                else:
                    # libpq sends the Terminate message without waiting.
                    connection.end()
                self._wake_first()

    def close(self) -> None:
        """Close idle connections now, and the others when they are returned."""
        self._is_closed = True
        self.forget(self._generation)

    def reopen(self) -> None:
        """Keep returned connections again after `close`."""
        self._is_closed = False

    def forget(self, generation: int) -> None:
        """Close all connections of a generation: idle ones now, the others when they are returned."""
        with self._lock:
            if generation != self._generation:
                return  # Another connection of this generation has already been reported.
            self._generation += 1
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.end()


def check_session(connection: TimedConnection, is_pooled: bool | None) -> None:
    """Check that a new connection can be used, and detect whether statements may be prepared on it.

    A pooler that assigns sessions by transaction (pgbouncer, `pool_mode = transaction`) runs each transaction in any
    free session, which may have another client's statement of the same name: it would run with our parameters. So
    nothing else depends on the session, either: settings are `SET LOCAL`, locks belong to transactions, and no start-up
    parameter is sent that poolers refuse. Poolers invent the process id that they report to a client.

    Source: https://www.postgresql.org/docs/18/protocol-message-formats.html (BackendKeyData);
    https://www.pgbouncer.org/features.html
    """
    major = connection.info.server_version // 10_000
    if major < OLDEST:
        raise ConfigurationError(f"PostgreSQL {major} is too old: upgrade it to version {OLDEST} or newer")
    if is_pooled is None:
        row = connection.execute("SELECT pg_catalog.pg_backend_pid()", prepare=False).fetchone()
        is_pooled = row is None or row[0] != connection.info.backend_pid
    connection.prepare_threshold = None if is_pooled else PREPARE_AFTER
    if not (connection.info.parameter_status("DateStyle") or "ISO").startswith("ISO"):
        # psycopg only parses this style. Poolers keep this setting for each client.
        connection.execute("SET DateStyle = 'ISO'", prepare=False)
