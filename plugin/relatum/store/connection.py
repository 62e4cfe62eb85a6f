"""Connections to PostgreSQL with limits on every wait.

psycopg waits as long as the connection lives. A suspended server, a locked table or a silent proxy keeps it alive: the
kernel answers, so no TCP time-out fires. Here each wait ends at its statement's limit or at the deadline of the call
(`relatum.common.waiting`). The connection is then closed, since a late answer would be taken for the next statement's;
the pool opens another. The server is also asked to cancel the statement.
"""

import math
import threading
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
from relatum.common.waiting import LOOK_S, Deadline, current, left_s

ROLLBACK_S: Final = 0.5
"""Seconds for a rollback after a call's deadline: a healthy server needs less, and the connection is kept."""

CANCEL_S: Final = 2.0
"""Seconds to send a cancel request, in the background."""

CANCELS_MAX: Final = 4
"""Maximum cancel requests at the same time; further statements are not cancelled."""


_cancelling: Final = threading.BoundedSemaphore(CANCELS_MAX)

_Result = TypeVar("_Result")


class NoAnswerInTime(psycopg.OperationalError):
    """PostgreSQL did not answer in time; the connection was closed."""


def _ended(
    steps: Generator[Any, Any, _Result], until: float, deadline: Deadline | None, limit_s: float | None
) -> Generator[Any, Any, _Result]:
    """Run the steps of a wait until a moment, or until a deadline, which may be brought forward."""
    try:
        wanted = next(steps)
        while True:
            answer = yield wanted
            wanted = steps.send(answer)
            # Finished steps do not get here, so an answer just in time is accepted.
            if time.monotonic() >= until or (not answer and deadline is not None and deadline.has_passed):
                raise _no_answer(deadline, limit_s)
    except StopIteration as end:
        result: _Result = end.value
        return result


def _no_answer(deadline: Deadline | None, limit_s: float | None) -> NoAnswerInTime:
    is_over = deadline is not None and deadline.has_passed
    reason = str(deadline) if is_over or limit_s is None else seconds_text(limit_s)
    return NoAnswerInTime(f"no answer in time ({reason}); it is safe to repeat")


def check(deadline: Deadline | None) -> None:
    """Raise `NoAnswerInTime` if no time is left."""
    if deadline is not None and deadline.has_passed:
        raise _no_answer(deadline, None)


class TimedConnection(psycopg.Connection[Any]):
    """A connection whose waits end at the deadline of the current call, and each after `statement_s`.

    Attributes:
        statement_s: Seconds for one statement, or for a commit; None for no limit except the call's deadline.
        ending: The deadline of the component that uses the connection; it ends waits, too.
        idle_s: Seconds after which the server ends an idle transaction; None for never.
        give_back: Called by `close` to return the connection to its pool. None if it has no pool.
        is_used: Whether it was used before; its server may have been restarted since.
        generation: The pool's generation when the connection was opened.
    """

    statement_s: float | None = None
    ending: Deadline | None = None
    idle_s: float | None = None
    give_back: "Callable[[TimedConnection], None] | None" = None
    is_used = False
    generation = 0
    _step = ""
    """"commit" or "rollback" while the connection waits for it."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._told: set[Any] = set()
        """The notice handlers that were added."""

    def close(self) -> None:
        """Return it to its pool. SQLAlchemy calls this when it is done with a connection."""
        if self.give_back is None:
            self.end()
        else:
            self.give_back(self)

    def end(self) -> None:
        """Close the connection itself."""
        super().close()

    def begin(self) -> None:
        """Begin a transaction that the server ends if this process is idle in it for longer than `idle_s`.

        A suspended process keeps its connection alive, and with it its transaction's locks. The limit is sent in the
        same round trip and is local to the transaction, so it works behind a pooler, too.
        """
        level = self.isolation_level
        isolation = "" if level is None else f" ISOLATION LEVEL {level.name.replace('_', ' ')}"
        limit = "" if self.idle_s is None else f"; {idle_limit(self.idle_s)}"
        command = f"BEGIN{isolation}{limit}".encode()

        def steps() -> Generator[Any, Any, Any]:
            # Sent inside of the wait, so that nothing is sent if no time is left.
            self.pgconn.send_query(command)
            return (yield from generators.execute(self.pgconn))

        for result in self.wait(steps()):
            if result.status != ExecStatus.COMMAND_OK:
                raise psycopg.errors.error_from_result(result)

    def add_notice_handler(self, callback: Any) -> None:
        """Add a handler once: SQLAlchemy adds the same one each time that it gets the connection."""
        if callback not in self._told:
            self._told.add(callback)
            super().add_notice_handler(callback)

    def wait(self, gen: Any, interval: float = LOOK_S, *args: Any, **options: Any) -> Any:
        """Wait as psycopg does, up to the limit.

        Raises:
            NoAnswerInTime: the limit has passed; the connection was closed, unless nothing had been sent yet.
        """
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
            return super().wait(_ended(gen, until, deadline, limit_s), min(interval, until - now), *args, **options)
        except NoAnswerInTime as error:
            # Never cancel a commit: if it waits for a standby, it would complete without the standby.
            if self._step != "commit" and self.pgconn.transaction_status == TransactionStatus.ACTIVE:
                _cancel(self.pgconn)
            self.end()
            if self._step == "commit":
                reason = str(error).partition(";")[0]
                raise NoAnswerInTime(f"{reason} to a commit: its outcome is unknown") from None
            raise

    def commit(self) -> None:
        """Commit. Without an answer in time its outcome is unknown, as after any lost connection."""
        self._step = "commit"
        try:
            super().commit()
        finally:
            self._step = ""

    def rollback(self) -> None:
        """Roll back, even if the call has no time left; if the server does not answer, the connection is closed."""
        if self.closed or self.pgconn.transaction_status == TransactionStatus.IDLE:
            return
        self._step = "rollback"
        try:
            with suppress(NoAnswerInTime):
                super().rollback()
        finally:
            self._step = ""


def idle_limit(seconds: float) -> str:
    """Return the statement that makes the server end the transaction after this many idle seconds."""
    return f"SET LOCAL idle_in_transaction_session_timeout = {max(1, round(seconds * 1000))}"


def _cancel(pgconn: Any) -> None:
    if not _cancelling.acquire(blocking=False):
        return
    try:
        line = pgconn.cancel_conn()
    except psycopg.Error:
        # Before libpq 17, only a call that may block can cancel.
        _cancelling.release()
        return
    threading.Thread(target=_say_cancel, args=(line,), name="relatum-cancel", daemon=True).start()


def _say_cancel(line: Any) -> None:
    try:
        with suppress(psycopg.Error, OSError, ValueError):
            line.start()
            wait_conn(_ended(generators.cancel(line), time.monotonic() + CANCEL_S, None, CANCEL_S), LOOK_S)
    finally:
        line.finish()
        _cancelling.release()


@contextmanager
def patient(connection: sa.Connection, statement_s: float) -> Iterator[None]:
    """Raise the statement limit in the block to `statement_s`, for statements of callers and other long ones."""
    driver: Any = connection.connection.driver_connection
    before = getattr(driver, "statement_s", None)
    driver.statement_s = None if before is None else max(before, statement_s)
    try:
        yield
    finally:
        driver.statement_s = before
