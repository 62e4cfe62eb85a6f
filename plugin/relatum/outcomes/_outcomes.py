"""Queries and waits for outcomes by message id, from any process."""

import asyncio
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

from relatum.checks import checked_callable, checked_name, checked_seconds, seconds_text, shown
from relatum.closing import AsyncClosing, Closing
from relatum.errors import InvalidInput, NotFinishedInTime, RelatumError, Transient, UsedAfterClose
from relatum.outcomes._outcome_values import Outcome, OutcomeStatus, read_outcomes, require_collector
from relatum.processes import after_fork
from relatum.store.database import AnyDatabase, Database
from relatum.waiting import LEAST_S, Deadline, Outages, SharedWait, Threads, in_thread, within

logger = logging.getLogger("relatum.collector")

WAIT_S: Final = 10.0
"""Default seconds to wait for an outcome."""

_WHO: Final = "asking for outcomes that handlers wait for"
_THREADS: Final = "relatum-outcomes"


@dataclass(frozen=True, slots=True)
class _AwaitedOutcome:
    """A message whose outcome is awaited; `told` is the status and attempts of the last call of its handler."""

    message_id: str
    collector: str | None
    told: tuple[OutcomeStatus, int] = (OutcomeStatus.UNKNOWN, 0)


def call_handler(
    handler: Callable[[Outcome], object], outcome: Outcome, *, caught: type[BaseException] = Exception
) -> None:
    """Call a result handler, and log its exception. By default exits are not caught: they end an event loop."""
    try:
        handler(outcome)
    except caught:
        logger.exception("a result handler raised for message %s (%s)", outcome.message_id, outcome.status.value)


class Outcomes(Closing):
    """The outcomes of messages, for producers and all others who know the ids. Thread-safe.

    Args:
        database: PostgreSQL's URL, or a `Database`, which the caller closes. The user needs the role
            `relatum_consumer`, `relatum_recorder` or `relatum_collector`.
    """

    def __init__(self, database: AnyDatabase) -> None:
        self._ending = Deadline(None)
        self._database = Database(database, refusing=None, ending=self._ending, pool_size=2)
        self._outages = Outages(logger, database=self._database.address.name)
        self._lock = threading.Lock()
        self._is_closed = False
        # A weak reference, so that an object that is dropped without closing is freed at once.
        this = weakref.proxy(self)
        self._waits: SharedWait[_AwaitedOutcome, Outcome] = SharedWait(
            partial(Outcomes._finals, this), _THREADS, first_s=0
        )
        self._handlers: SharedWait[_AwaitedOutcome, Outcome] = SharedWait(
            partial(Outcomes._news, this), _THREADS, first_s=0
        )
        self._calls = Threads(1, _THREADS)
        after_fork(self, Outcomes._renew)

    def _renew(self) -> None:
        """Renew the lock after a fork: handlers stay with the parent. `SharedWait` and `Threads` renew themselves."""
        self._lock = threading.Lock()

    def close(self) -> None:
        """Stop calling result handlers, end all waits, and close connections."""
        with self._lock:
            self._is_closed = True
        self._ending.end_in(0)
        for waits in (self._waits, self._handlers):
            waits.end()
            waits.join()
        self._calls.shutdown(wait=not self._calls.has(threading.current_thread()))
        self._database.close()

    def of(self, message_id: str, *, collector: str | None = None) -> Outcome:
        """Return the current outcome of a message.

        Args:
            message_id: The property `message_id`; "stream:offset" for a message without one.
            collector: A collector's name. None (default): all collectors.

        Returns:
            The outcome. If several messages have the id, or several collectors took it, the least advanced outcome,
            with the others in `others`. The status is UNKNOWN if no collector has taken the message, or if it was
            finished longer ago than its collector keeps it (`keep_s`).

        Raises:
            NotFound: There is no collector with this name.
            DatabaseUnavailable: PostgreSQL is unavailable; safe to retry.
            ConfigurationError: The object was closed.
        """
        return self.of_many([message_id], collector=collector)[message_id]

    def of_many(self, message_ids: Iterable[str], *, collector: str | None = None) -> dict[str, Outcome]:
        """Return the current outcomes of messages, by id in the given order; see `of`."""
        ids = _checked(message_ids)
        if collector is not None:
            checked_name("collector", collector)
        self._require_open()
        with self._database.transaction() as connection:
            found = read_outcomes(connection, ids, collector=collector)
            # If nothing was found, the name may be misspelt.
            if collector is not None and all(each.status is OutcomeStatus.UNKNOWN for each in found.values()):
                require_collector(connection, collector)
            return found

    def _read(self, asked: Sequence[_AwaitedOutcome]) -> Iterator[tuple[int, Outcome]]:
        """As `of_many`, for waits and handlers: a missing collector is no error, since it may start later."""
        for collector in {each.collector for each in asked}:
            ids = {number: each.message_id for number, each in enumerate(asked) if each.collector == collector}
            with self._database.transaction() as connection:
                found = read_outcomes(connection, ids.values(), collector=collector)
            yield from ((number, found[message_id]) for number, message_id in ids.items())

    def _finals(self, asked: Sequence[_AwaitedOutcome]) -> Iterator[tuple[int, Outcome]]:
        # Waits continue while PostgreSQL is unavailable.
        with suppress(Transient):
            yield from ((number, outcome) for number, outcome in self._read(asked) if outcome.is_final)

    def _news(self, asked: Sequence[_AwaitedOutcome]) -> list[tuple[int, Outcome]]:
        try:
            read = list(self._read(asked))
        except RelatumError as error:
            self._outages.failed(_WHO, error)
            return []
        self._outages.over(_WHO)
        return [(number, outcome) for number, outcome in read if _status(outcome) != asked[number].told]

    def _require_open(self) -> None:
        if self._is_closed:
            raise UsedAfterClose("these outcomes were closed: make others, or ask inside the `with` block")

    def wait(self, message_id: str, timeout_s: float = WAIT_S, *, collector: str | None = None) -> Outcome:
        """Wait until the outcomes of all messages with this id are final; return the outcome as `of` does.

        Args:
            message_id: As for `of`.
            timeout_s: Seconds to wait, including for PostgreSQL while it is unavailable. Default: 10.
            collector: As for `of`. The collector need not exist yet.

        Raises:
            NotFinishedInTime: The outcome was not final in time; `outcome` has the current one. You can wait again.
            NotFound: There is no collector with this name after the wait.
            DatabaseUnavailable: PostgreSQL is unavailable after the wait.
        """
        asked, until = self._asked(message_id, collector), _until(timeout_s)
        outcome = self._waits.result(self._ask(asked), until)
        if outcome is None:
            with within(LEAST_S):
                outcome = self._at_end(asked, timeout_s)
        return outcome

    def _asked(self, message_id: str, collector: str | None) -> _AwaitedOutcome:
        _checked([message_id])
        if collector is not None:
            checked_name("collector", collector)
        return _AwaitedOutcome(message_id, collector)

    def _ask(self, asked: _AwaitedOutcome) -> "Future[Outcome | None]":
        # Under the lock: otherwise `close` could miss a wait that begins now.
        with self._lock:
            self._require_open()
            return self._waits.ask(asked)

    def _at_end(self, asked: _AwaitedOutcome, timeout_s: float) -> Outcome:
        outcome = self.of(asked.message_id, collector=asked.collector)
        if outcome.is_final:
            return outcome
        raise not_finished(outcome, timeout_s)

    def register_result_handler(
        self, handler: Callable[[Outcome], object], message_id: str, *, collector: str | None = None
    ) -> None:
        """Call a handler with each new status of a message, from `collected` to the final one.

        A thread of this object calls the handlers. It queries the table twenty times a second for all of them: a status
        that lasts for less may be skipped, but never the final one. A handler's exception is logged. If the status is
        final already, the handler is called once.

        Args:
            handler: Called with the `Outcome`.
            message_id: As for `of`.
            collector: As for `wait`.

        Raises:
            InvalidInput: An argument has the wrong type.
            ConfigurationError: The object was closed.
        """
        checked_callable("handler", handler)
        checked_name("message_id", message_id)
        self._listen(handler, self._asked(message_id, collector))

    def _listen(self, handler: Callable[[Outcome], object], asked: _AwaitedOutcome) -> None:
        with self._lock:
            self._require_open()
            future = self._handlers.ask(asked)
        future.add_done_callback(partial(self._call_later, handler, asked))

    def _call_later(
        self, handler: Callable[[Outcome], object], asked: _AwaitedOutcome, future: "Future[Outcome | None]"
    ) -> None:
        outcome = future.result()
        # The threads refuse calls after `close`.
        with suppress(RuntimeError):
            if outcome is not None:
                self._calls.submit(self._call, handler, asked, outcome)

    def _call(self, handler: Callable[[Outcome], object], asked: _AwaitedOutcome, outcome: Outcome) -> None:
        # Exits included: they would end this thread.
        call_handler(handler, outcome, caught=BaseException)
        if not outcome.is_final:
            with suppress(UsedAfterClose):
                self._listen(handler, replace(asked, told=_status(outcome)))


class AsyncOutcomes(AsyncClosing):
    """`Outcomes` for asyncio: PostgreSQL is queried in threads.

    Args:
        database: As for `Outcomes`.
    """

    def __init__(self, database: AnyDatabase) -> None:
        self._outcomes = Outcomes(database)

    async def close(self) -> None:
        """Stop calling result handlers, end all waits, and close connections."""
        await in_thread(None, self._outcomes.close)

    async def of(self, message_id: str, *, collector: str | None = None) -> Outcome:
        """Return the current outcome of a message; see `Outcomes.of`."""
        return await in_thread(None, partial(self._outcomes.of, message_id, collector=collector))

    async def of_many(self, message_ids: Iterable[str], *, collector: str | None = None) -> dict[str, Outcome]:
        """Return the current outcomes of messages; see `Outcomes.of_many`."""
        return await in_thread(None, partial(self._outcomes.of_many, message_ids, collector=collector))

    async def wait(self, message_id: str, timeout_s: float = WAIT_S, *, collector: str | None = None) -> Outcome:
        """Wait until the outcome of a message is final; see `Outcomes.wait`. A cancelled call leaves nothing behind."""
        return await outcome_in_task(self._outcomes, message_id, timeout_s, collector)

    def register_result_handler(
        self, handler: Callable[[Outcome], object], message_id: str, *, collector: str | None = None
    ) -> None:
        """Call a handler in the running loop; see `Outcomes.register_result_handler`. It must not block."""
        loop = asyncio.get_running_loop()

        def in_loop(outcome: Outcome) -> None:
            # The loop may have ended.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(call_handler, handler, outcome)

        checked_callable("handler", handler)
        self._outcomes.register_result_handler(in_loop, message_id, collector=collector)


async def outcome_in_task(outcomes: Outcomes, message_id: str, timeout_s: float, collector: str | None) -> Outcome:
    """As `Outcomes.wait`, for a task, without a thread while it waits."""
    asked, until = outcomes._asked(message_id, collector), _until(timeout_s)
    outcome = await outcomes._waits.result_in_task(outcomes._ask(asked), until)
    if outcome is None:
        # The limit includes the wait for a free thread, so that many waits together end in time.
        with within(LEAST_S):
            outcome = await in_thread(None, outcomes._at_end, asked, timeout_s)
    return outcome


def _until(timeout_s: float) -> float:
    return time.monotonic() + checked_seconds("timeout_s", timeout_s)


def _status(outcome: Outcome) -> tuple[OutcomeStatus, int]:
    """Return the values whose change calls a handler."""
    return outcome.status, outcome.attempts


def not_finished(outcome: Outcome, timeout_s: float) -> NotFinishedInTime:
    """Make the error of a wait that ended before the outcome was final."""
    hints = {
        OutcomeStatus.UNKNOWN: "no collector has taken it: check that one is running (`relatum status --collector`)",
        OutcomeStatus.COLLECTED: "it waits for its executor",
        OutcomeStatus.FORWARDED: "its executor has it",
    }
    return NotFinishedInTime(
        f"the outcome of message {outcome.message_id} was not final within {seconds_text(timeout_s)}: it is "
        f"{outcome.status.value}, {hints[outcome.status]}; wait again",
        outcome=outcome,
    )


def _checked(message_ids: Iterable[str]) -> list[str]:
    """Return the ids as a list, checked to be text that is not empty."""
    if isinstance(message_ids, str):
        raise InvalidInput("of_many takes several ids; use of for one")
    if not isinstance(message_ids, Iterable):
        raise InvalidInput(f"message_ids= takes several ids, not {message_ids!r}")
    ids = list(message_ids)
    for message_id in ids:
        # An id that no message can have is UNKNOWN, not an error, since others choose ids.
        if not isinstance(message_id, str) or not message_id:
            raise InvalidInput(f"message_id= takes text that is not empty, not {shown(message_id)}")
    return ids
