"""Connections to PostgreSQL that wait for an answer only so long, whoever is at the other end, and says nothing.

psycopg waits by itself for as long as the connection lives. A server that stands still, a locked table or a proxy that
accepts and answers nothing keep it alive: the kernel answers, so no time-out of TCP notices. Here each wait ends by its
statement's limit and by the deadline of the call (`relatum.waiting`). Then the connection is closed, since what comes
next on it belongs to nobody; the pool puts another in its place. The server is asked to end the statement, too.
"""

import asyncio
import math
import selectors
import threading
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Final, TypeVar

import psycopg
import sqlalchemy as sa
from psycopg.pq import PollingStatus, TransactionStatus
from psycopg.waiting import Ready, Wait
from sqlalchemy.engine.base import OptionEngine
from sqlalchemy.pool import ConnectionPoolEntry, QueuePool

from relatum.checks import seconds_text
from relatum.errors import DatabaseUnavailable
from relatum.steps import async_run
from relatum.waiting import LOOK_S, Bell, Deadline, current, left_s, within

ROLLBACK_S: Final = 0.5
"""Seconds for a rollback after the time of a call: an answering server needs less, and the connection is kept."""

CANCEL_S: Final = 2.0
"""Seconds to tell a server that nobody waits for a statement any more; it is told aside, and nobody waits for that."""

CANCELS_MAX: Final = 4
"""Statements that are cancelled at the same time; what is more is left to the server."""


_cancelling: Final = threading.BoundedSemaphore(CANCELS_MAX)

_Result = TypeVar("_Result")


class NoAnswerInTime(psycopg.OperationalError):
    """PostgreSQL did not answer in time; the connection was closed."""


class _Ended(Generator[Any, Any, _Result]):
    """The steps of a wait, ended at a moment, or by a deadline that is brought forward meanwhile."""

    def __init__(self, steps: Generator[Any, Any, _Result], until: float, deadline: Deadline | None, what: str) -> None:
        self._steps = steps
        self._until = until
        self._deadline = deadline
        self._what = what

    def __next__(self) -> Any:
        return next(self._steps)

    def send(self, answer: Any) -> Any:
        wanted = self._steps.send(answer)
        # Steps that have what they waited for do not come here: an answer just in time is taken.
        deadline = self._deadline
        if time.monotonic() >= self._until or (not answer and deadline is not None and deadline.has_passed):
            raise _no_answer(deadline, self._what)
        return wanted

    def throw(self, *error: Any) -> Any:
        return self._steps.throw(*error)

    def close(self) -> None:
        self._steps.close()


def _connecting(steps: Generator[Any, Any, _Result], deadline: Deadline) -> Generator[Any, Any, _Result]:
    # The first step resolves the host and sends: not where there is no time for an answer.
    if deadline.has_passed:
        steps.close()
        raise _no_answer(deadline, "")
    return (yield from _Ended(steps, deadline.until, deadline, ""))


def _no_answer(deadline: Deadline | None, what: str) -> NoAnswerInTime:
    reason = str(deadline) if deadline is not None and deadline.has_passed else what
    return NoAnswerInTime(f"no answer in time ({reason}); it is safe to repeat")


def no_connection() -> DatabaseUnavailable:
    """The error of who waited for a connection of a pool that others use up."""
    deadline = current()
    reason = f" ({deadline})" if deadline is not None and deadline.has_passed else ""
    text = f"no connection to PostgreSQL became free in time{reason}; it is safe to repeat"
    return DatabaseUnavailable(text, reason="pool")


class TimedConnection(psycopg.Connection[Any]):
    """A connection whose waits end: by the deadline of the call under way, and each after `statement_s`.

    Attributes:
        statement_s: Seconds for one statement, or for a commit; None for no limit but that of the call.
        ending: Ends what is under way as well: that of the component whose engine it was taken from.
    """

    statement_s: float | None = None
    ending: Deadline | None = None
    _is_committing = False
    _bell: Bell | None = None

    def wait(self, gen: Any, interval: float = LOOK_S, *args: Any, **options: Any) -> Any:
        """Wait as psycopg does, up to the limit.

        Raises:
            NoAnswerInTime: it has passed; the connection is closed, unless nothing was asked yet.
        """
        until, deadline, look_s = self._limits(interval)
        return self._wait_until(until, deadline, gen, (look_s, *args), options)

    async def wait_in_task(self, gen: Generator[Any, Any, _Result]) -> _Result:
        """As `wait`, for a statement by itself and a task of the running loop, which must have the connection alone.

        Raises:
            NoAnswerInTime: as for `wait`.
            CancelledError: the task was cancelled; the server is told, and the connection is closed.
        """
        until, deadline, look_s = self._limits(LOOK_S)
        steps: Any = _Ended(gen, until, deadline, self._limit)
        try:
            result: _Result = await async_run(steps, partial(self._ready, look_s))
        except (NoAnswerInTime, asyncio.CancelledError, GeneratorExit):
            self._abandon()
            raise
        return result

    async def _ready(self, look_s: float, wanted: int) -> int:
        """What the socket is ready for, of what is wanted; 0 where it is for nothing in `look_s`."""
        loop, socket, bell = asyncio.get_running_loop(), self.pgconn.socket, self._bell
        if bell is None:
            bell = self._bell = Bell()
        if wanted & Wait.R:
            loop.add_reader(socket, bell.ring, Ready.R)
        if wanted & Wait.W:
            loop.add_writer(socket, bell.ring, Ready.W)
        try:
            return await bell.wait(look_s)
        finally:
            if wanted & Wait.R:
                loop.remove_reader(socket)
            if wanted & Wait.W:
                loop.remove_writer(socket)

    def _limits(self, interval: float) -> tuple[float, Deadline | None, float]:
        """Until when to wait from now on, what may end that before, and how often to look whether it has."""
        now, deadline, seconds = time.monotonic(), self._deadline(), self.statement_s
        until = math.inf if seconds is None else now + seconds
        if deadline is not None:
            until = min(until, deadline.until)
            if until <= now:
                raise _no_answer(deadline, "")
        return until, deadline, min(interval, until - now)

    @property
    def _limit(self) -> str:
        return "" if self.statement_s is None else seconds_text(self.statement_s)

    def _deadline(self) -> Deadline | None:
        """What ends first: the call under way, or the component it is of."""
        deadline = current()
        if self.ending is None:
            return deadline
        return self.ending if deadline is None else Deadline(None, deadline, self.ending)

    def _wait_until(
        self, until: float, deadline: Deadline | None, gen: Any, args: tuple[Any, ...], options: dict[str, Any]
    ) -> Any:
        try:
            return super().wait(_Ended(gen, until, deadline, self._limit), *args, **options)
        except NoAnswerInTime as error:
            self._abandon()
            if self._is_committing:
                reason = str(error).partition(";")[0]
                raise NoAnswerInTime(f"{reason} to a commit: whether it came through is not known") from None
            raise

    def commit(self) -> None:
        """Commit. Where no answer comes in time it is not known what became of it, as after any lost connection."""
        self._is_committing = True
        try:
            super().commit()
        finally:
            self._is_committing = False

    def rollback(self) -> None:
        """Roll back, also where the call has no time left; a server that does not answer is left, and does so, too."""
        if self.closed or self.pgconn.transaction_status == TransactionStatus.IDLE:
            return
        until = time.monotonic() + max(ROLLBACK_S, left_s(ROLLBACK_S if self.statement_s is None else self.statement_s))
        with self.lock, suppress(NoAnswerInTime):
            self._wait_until(until, None, self._rollback_gen(), (LOOK_S,), {})

    @property
    def is_alone(self) -> bool:
        """Whether each statement is a transaction of its own; to be set where it is in none."""
        return bool(self._autocommit)

    @is_alone.setter
    def is_alone(self, value: bool) -> None:
        # Directly: `autocommit` waits for the connection, which has nothing to say to it.
        self._autocommit = value

    @classmethod
    def _connect_gen(cls, *args: Any, **options: Any) -> Any:
        # psycopg counts whole seconds, from two on, for each host.
        deadline = current()
        if deadline is None:
            return super()._connect_gen(*args, **options)
        return _connecting(super()._connect_gen(*args, **options), deadline)

    def _abandon(self) -> None:
        # A commit is not to be cancelled: where it waits for a standby, it would go on without it.
        if not self._is_committing and self.pgconn.transaction_status == TransactionStatus.ACTIVE:
            _cancel(self.pgconn)
        self.close()


def _cancel(pgconn: Any) -> None:
    """Tell the server in a thread of its own that nobody waits for the statement."""
    if not _cancelling.acquire(blocking=False):
        return
    try:
        line = pgconn.cancel_conn()
    except psycopg.Error:
        # Before libpq 17 it can only be said by a call that may hang.
        _cancelling.release()
        return
    threading.Thread(target=_say_cancel, args=(line,), name="relatum-cancel", daemon=True).start()


def _say_cancel(line: Any) -> None:
    until = time.monotonic() + CANCEL_S
    try:
        with suppress(psycopg.Error, OSError, ValueError):
            line.start()
            while (state := line.poll()) in (PollingStatus.READING, PollingStatus.WRITING):
                left = until - time.monotonic()
                if left <= 0:
                    return
                with selectors.DefaultSelector() as ready:
                    is_read = state == PollingStatus.READING
                    ready.register(line.socket, selectors.EVENT_READ if is_read else selectors.EVENT_WRITE)
                    ready.select(left)
    finally:
        line.finish()
        _cancelling.release()


class TimedPool(QueuePool):
    """A pool whose callers wait for a connection no longer than their call may last.

    Disposed of while a thread still has a connection, it closes that one when it comes back. SQLAlchemy's keeps it
    in a pool that nobody has any more, open until the garbage collector comes by.
    """

    # By it SQLAlchemy names a pool's logger: what its pools say is not for those who listen to `relatum`.
    __module__ = "sqlalchemy.pool"

    _longest_s: float
    _is_disposed = False

    @property
    def _timeout(self) -> float:
        return left_s(self._longest_s)

    @_timeout.setter
    def _timeout(self, seconds: float) -> None:
        self._longest_s = seconds

    def recreate(self) -> "TimedPool":
        """Another one, as `Engine.dispose` asks for, with the same options."""
        pool: Any = super().recreate()
        pool._timeout = self._longest_s
        return pool  # type: ignore[no-any-return]

    def dispose(self) -> None:
        """Close the connections that are in the pool, and the others as they come back."""
        self._is_disposed = True
        super().dispose()

    def _do_return_conn(self, record: ConnectionPoolEntry) -> None:
        super()._do_return_conn(record)
        if self._is_disposed:  # looked at last, so that none slips in beside `dispose`
            super().dispose()


def bound_waits(engine: sa.Engine, statement_s: float | None) -> None:
    """Have an engine's connections wait only so long.

    Args:
        engine: Of psycopg, on a `TimedPool`.
        statement_s: Seconds for each statement; None for no limit but that of a call of ours.
    """

    def connect(_dialect: Any, _record: Any, args: Any, options: Any) -> Any:
        connection = TimedConnection.connect(*args, **options)
        connection.statement_s = statement_s
        return connection

    def keep_others(context: Any) -> None:
        # One that did not answer in time says nothing of the others: a table may be locked.
        if isinstance(context.original_exception, NoAnswerInTime):
            context.invalidate_pool_on_disconnect = False

    sa.event.listen(engine, "handle_error", keep_others)
    sa.event.listen(engine, "do_connect", connect)
    sa.event.listen(engine, "checkout", _checked)


def _checked(driver: Any, _record: Any, _fairy: Any) -> None:
    """Have a connection end its waits with nobody's end; one that was closed is replaced."""
    driver.ending = None
    if driver.closed:
        raise sa.exc.DisconnectionError("it was closed when no answer came in time")


class ComponentEngine(OptionEngine):
    """An engine for one component, which lets go of the database when that ends; the pool is the engine's it is of.

    Args:
        proxied: One of `make_engine`.
        ending: The component's; brought forward when it is to stop.
    """

    def __init__(self, proxied: Any, options: Any = None, ending: Deadline | None = None) -> None:
        super().__init__(proxied, options or {})
        self._ending: Deadline = ending or proxied._ending

    def raw_connection(self) -> Any:
        """A connection of the pool, whose waits end with the component, as waiting for it does."""
        deadline = current()
        given = () if deadline is None else (deadline,)
        with within(Deadline(None, *given, self._ending)):
            pooled = super().raw_connection()
        driver: Any = pooled.driver_connection
        if isinstance(driver, TimedConnection):
            driver.ending = self._ending
        return pooled


ComponentEngine._option_cls = ComponentEngine


@contextmanager
def patient(connection: sa.Connection, statement_s: float) -> Iterator[None]:
    """Statements in the block are a caller's own, and may take longer than ours."""
    driver: Any = connection.connection.driver_connection
    before = getattr(driver, "statement_s", None)
    driver.statement_s = None if before is None else max(before, statement_s)
    try:
        yield
    finally:
        driver.statement_s = before
