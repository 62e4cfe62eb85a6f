"""Connections to PostgreSQL with a time limit for every wait.

psycopg waits until the connection ends. A connection to a suspended server, a locked table or a silent proxy does not
end: the kernel acknowledges packets, so no TCP time-out expires. Here each wait ends at its statement's limit or at the
call's deadline (`relatum.common.waiting`). The connection is then closed, since a late answer would be taken for the
answer to the next statement, and the pool opens another one. A cancel request for the statement is sent to the server.
"""

import math
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final, TypeVar

import psycopg
import sqlalchemy as sa
from psycopg import generators
from psycopg.pq import ExecStatus, TransactionStatus
from psycopg.waiting import wait_conn

from relatum.common.checks import seconds_text
from relatum.common.waiting import LOOK_S, Deadline, Threads, current, left_s

ROLLBACK_S: Final = 0.5
"""Seconds for a rollback after a call's deadline. A healthy server needs less, so its connection can be reused."""

CANCEL_S: Final = 2.0
"""Seconds to send a cancel request, in the background."""

_CANCELLING: Final = Threads(4, "relatum-cancel")
"""Threads that send cancel requests. While all are busy, further statements are not cancelled."""

_Result = TypeVar("_Result")


class NoAnswerInTime(psycopg.OperationalError):
    """PostgreSQL did not answer in time. If anything was sent, the connection was closed."""


def _limited(
    steps: Generator[Any, Any, _Result], until: float, deadline: Deadline | None, limit_s: float | None
) -> Generator[Any, Any, _Result]:
    """Run the steps of a wait until a moment, or until a deadline, which may be shortened during the wait."""
    try:
        state = next(steps)
        while True:
            ready = yield state
            state = steps.send(ready)
            # The last step raises StopIteration above, so an answer that came just in time is accepted.
            if time.monotonic() >= until or (not ready and deadline is not None and deadline.has_passed):
                raise _no_answer(deadline, limit_s)
    except StopIteration as end:
        result: _Result = end.value
        return result


def _no_answer(deadline: Deadline | None, limit_s: float | None) -> NoAnswerInTime:
    has_passed = deadline is not None and deadline.has_passed
    reason = str(deadline) if has_passed or limit_s is None else seconds_text(limit_s)
    return NoAnswerInTime(f"no answer in time ({reason}); the call is safe to repeat")


def check(deadline: Deadline | None) -> None:
    """Raise `NoAnswerInTime` if the deadline has passed."""
    if deadline is not None and deadline.has_passed:
        raise _no_answer(deadline, None)


class TimedConnection(psycopg.Connection[Any]):
    """A connection that limits each of its waits to `statement_s` and to the deadline of the current call.

    Attributes:
        statement_s: Maximum seconds of a statement or a commit; None for no limit except the call's deadline.
        ending: The deadline of the component that uses the connection. Waits also end at it.
        idle_s: Seconds after which the server ends an idle transaction; 0 for never, None for the database's default.
        default_level: The isolation level of transactions without one of their own; None for the database's default. At
            a higher level, a statement after a wait for a lock would not see what the lock's holder committed.
        release: Returns the connection to its pool when `close` is called. None if the connection has no pool.
        is_used: Whether the connection was used before; the server may have restarted since.
        generation: The pool's generation when the connection was opened.
    """

    statement_s: float | None = None
    ending: Deadline | None = None
    idle_s: float | None = None
    default_level: psycopg.IsolationLevel | None = None
    release: "Callable[[TimedConnection], None] | None" = None
    is_used = False
    generation = 0
    _step = ""
    """"commit" or "rollback" while the connection waits for its answer."""

    def close(self) -> None:
        """Return the connection to its pool. SQLAlchemy calls this when it no longer needs the connection."""
        if self.release is None:
            self.end()
        else:
            self.release(self)

    def end(self) -> None:
        """Close the connection, also if it has a pool."""
        super().close()

    def begin(self) -> None:
        """Begin a transaction. The server ends it if this process is idle in it for longer than `idle_s`.

        Otherwise, the connection of a suspended process would keep its transaction's locks. The limit is sent in the
        same round trip and is local to the transaction, so it also works behind a pooler.
        """
        level = self.isolation_level or self.default_level
        isolation = "" if level is None else f" ISOLATION LEVEL {level.name.replace('_', ' ')}"
        limit = "" if self.idle_s is None else f"; {idle_limit(self.idle_s)}"
        command = f"BEGIN{isolation}{limit}".encode()

        def steps() -> Generator[Any, Any, Any]:
            # Sent within the wait, so that nothing is sent if no time is left.
            self.pgconn.send_query(command)
            return (yield from generators.execute(self.pgconn))

        for result in self.wait(steps()):
            if result.status != ExecStatus.COMMAND_OK:
                raise psycopg.errors.error_from_result(result)

    def add_notice_handler(self, callback: Any) -> None:
        """Add a handler once: SQLAlchemy adds it again whenever it gets the connection."""
        with suppress(ValueError):
            self.remove_notice_handler(callback)
        super().add_notice_handler(callback)

    def wait(self, gen: Any, interval: float = LOOK_S, *args: Any, **options: Any) -> Any:
        """Wait as psycopg does, but only up to the limit and the deadline; then raise `NoAnswerInTime`."""
        deadline = current() if self.ending is None else Deadline(None, current(), self.ending)
        now, limit_s = time.monotonic(), self.statement_s
        if self._step == "rollback":
            # A rollback gets time even if the call has none left.
            deadline, limit_s = None, max(ROLLBACK_S, left_s(ROLLBACK_S if limit_s is None else limit_s))
        check(deadline)
        until = math.inf if limit_s is None else now + limit_s
        if deadline is not None:
            until = min(until, deadline.until)
        try:
            return super().wait(_limited(gen, until, deadline, limit_s), min(interval, until - now), *args, **options)
        except NoAnswerInTime as error:
            # Never cancel a commit: if it waits for a standby, it would complete without the standby.
            if self._step != "commit" and self.pgconn.transaction_status == TransactionStatus.ACTIVE:
                _cancel(self.pgconn)
            self.end()
            if self._step == "commit":
                reason = str(error).partition(";")[0]
                raise NoAnswerInTime(f"{reason} to a commit, whose outcome is unknown") from None
            raise

    def commit(self) -> None:
        """Commit. If no answer comes in time, the outcome is unknown, as after any lost connection."""
        self._step = "commit"
        try:
            super().commit()
        finally:
            self._step = ""

    def rollback(self) -> None:
        """Roll back, even if the call has no time left. If the server does not answer, the connection is closed."""
        if self.closed or self.pgconn.transaction_status == TransactionStatus.IDLE:
            return
        self._step = "rollback"
        try:
            with suppress(NoAnswerInTime):
                super().rollback()
        finally:
            self._step = ""


def idle_limit(seconds: float) -> str:
    """Return the statement that makes the server end the transaction after this many idle seconds; 0 for never."""
    return f"SET LOCAL idle_in_transaction_session_timeout = {min(math.ceil(seconds * 1000), 2**31 - 1)}"


def _cancel(pgconn: Any) -> None:
    if not _CANCELLING.waiting:
        # Before libpq 17, only a blocking call can cancel.
        with suppress(psycopg.Error):
            _CANCELLING.submit(_send_cancel, pgconn.cancel_conn())


def _send_cancel(cancel_connection: Any) -> None:
    try:
        with suppress(psycopg.Error, OSError, ValueError):
            cancel_connection.start()
            wait_conn(
                _limited(generators.cancel(cancel_connection), time.monotonic() + CANCEL_S, None, CANCEL_S), LOOK_S
            )
    finally:
        cancel_connection.finish()


@contextmanager
def patient(connection: sa.Connection, statement_s: float) -> Iterator[None]:
    """Raise the limit of statements in the block to `statement_s`, for long statements and those of callers."""
    driver: Any = connection.connection.driver_connection
    previous_s = getattr(driver, "statement_s", None)
    driver.statement_s = None if previous_s is None else max(previous_s, statement_s)
    try:
        yield
    finally:
        driver.statement_s = previous_s
