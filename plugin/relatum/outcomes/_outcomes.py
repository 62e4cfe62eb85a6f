"""Asking what became of a message, from any process: by its id, one or many at once."""

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
"""Seconds an outcome is waited for by default."""

_WHO: Final = "asking for outcomes that handlers wait for"
_THREADS: Final = "relatum-outcomes"


@dataclass(frozen=True, slots=True)
class _Asked:
    """A message whose outcome is waited for, and the status that a handler was last told."""

    message_id: str
    collector: str | None
    told: tuple[OutcomeStatus, int] = (OutcomeStatus.UNKNOWN, 0)


def call_handler(
    handler: Callable[[Outcome], object], outcome: Outcome, *, caught: type[BaseException] = Exception
) -> None:
    """Call a result handler; what it raises is logged and breaks nothing. In an event loop an exit ends the loop."""
    try:
        handler(outcome)
    except caught:
        logger.exception("a result handler raised for message %s (%s)", outcome.message_id, outcome.status.value)


class Outcomes(Closing):
    """What became of messages, for the producer and for whoever else has their ids. Thread-safe.

    Args:
        database: PostgreSQL's URL, or a `Database`, which stays the caller's. A user with the role `relatum_consumer`,
            `relatum_recorder` or `relatum_collector` may ask.
    """

    def __init__(self, database: AnyDatabase) -> None:
        self._ending = Deadline(None)
        self._database = Database(database, refusing=None, ending=self._ending, pool_size=2)
        self._outages = Outages(logger, database=self._database.address.name)
        self._lock = threading.Lock()
        self._is_closed = False
        # Weakly: what is dropped without being closed must not wait for the garbage collector.
        this = weakref.proxy(self)
        self._waits: SharedWait[_Asked, Outcome] = SharedWait(partial(Outcomes._finals, this), _THREADS, first_s=0)
        self._handlers: SharedWait[_Asked, Outcome] = SharedWait(partial(Outcomes._news, this), _THREADS, first_s=0)
        self._calls = Threads(1, _THREADS)
        after_fork(self, Outcomes._renew)

    def _renew(self) -> None:
        """In a child: handlers are the parent's. What waits and calls sees to itself."""
        self._lock = threading.Lock()

    def close(self) -> None:
        """Call no more result handlers, let go of whoever waits, and give connections back."""
        with self._lock:
            self._is_closed = True
        self._ending.end_in(0)
        for waits in (self._waits, self._handlers):
            waits.end()
            waits.join()
        self._calls.shutdown(wait=not self._calls.has(threading.current_thread()))
        self._database.close()

    def of(self, message_id: str, *, collector: str | None = None) -> Outcome:
        """What became of a message so far.

        Args:
            message_id: Its property `message_id`; "stream:offset" for a message that was published without one.
            collector: The name of a collector; None: all of them.

        Returns:
            Its outcome; of several messages with this id, or several collectors, the least advanced one, with the
            others in `others`. Its status is UNKNOWN where no collector has taken it, and where it was finished
            longer ago than its collector keeps (`keep_s`).

        Raises:
            NotFound: there is no collector of that name.
            DatabaseUnavailable: PostgreSQL does not answer; nothing is known.
            ConfigurationError: these outcomes were closed.
        """
        return self.of_many([message_id], collector=collector)[message_id]

    def of_many(self, message_ids: Iterable[str], *, collector: str | None = None) -> dict[str, Outcome]:
        """What became of messages so far: an outcome for each id, in the order given; see `of`."""
        ids = _checked(message_ids)
        if collector is not None:
            checked_name("collector", collector)
        self._require_open()
        with self._database.transaction() as connection:
            found = read_outcomes(connection, ids, collector=collector)
            # Whatever was found has a collector: it is looked for where its name may be misspelt.
            if collector is not None and all(each.status is OutcomeStatus.UNKNOWN for each in found.values()):
                require_collector(connection, collector)
            return found

    def _read(self, asked: Sequence[_Asked]) -> Iterator[tuple[int, Outcome]]:
        """As `of_many`, for what waits: a collector that nobody has made yet may come."""
        for collector in {each.collector for each in asked}:
            ids = {number: each.message_id for number, each in enumerate(asked) if each.collector == collector}
            with self._database.transaction() as connection:
                found = read_outcomes(connection, ids.values(), collector=collector)
            yield from ((number, found[message_id]) for number, message_id in ids.items())

    def _finals(self, asked: Sequence[_Asked]) -> Iterator[tuple[int, Outcome]]:
        # While PostgreSQL is away, it is waited for.
        with suppress(Transient):
            yield from ((number, outcome) for number, outcome in self._read(asked) if outcome.is_final)

    def _news(self, asked: Sequence[_Asked]) -> list[tuple[int, Outcome]]:
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
        """The outcome of a message, once it is final: of every message with this id that was collected.

        Args:
            message_id: As for `of`.
            timeout_s: Seconds to wait. While PostgreSQL is away, it is waited for as well.
            collector: As for `of`. While there is none of that name, its first member is waited for as well.

        Raises:
            NotFinishedInTime: not final in time; its field `outcome` has what is known. Waiting again is fine.
            NotFound: there was no collector of that name until the end.
            DatabaseUnavailable: PostgreSQL did not answer until the end.
        """
        asked, until = self._asked(message_id, collector), _until(timeout_s)
        outcome = self._waits.result(self._ask(asked), until)
        if outcome is None:
            with within(LEAST_S):
                outcome = self._at_end(asked, timeout_s)
        return outcome

    def _asked(self, message_id: str, collector: str | None) -> _Asked:
        _checked([message_id])
        if collector is not None:
            checked_name("collector", collector)
        return _Asked(message_id, collector)

    def _ask(self, asked: _Asked) -> "Future[Outcome | None]":
        # Whoever asks once this was closed would be let go by nobody.
        with self._lock:
            self._require_open()
            return self._waits.ask(asked)

    def _at_end(self, asked: _Asked, timeout_s: float) -> Outcome:
        outcome = self.of(asked.message_id, collector=asked.collector)
        if outcome.is_final:
            return outcome
        raise not_finished(outcome, timeout_s)

    def register_result_handler(
        self, handler: Callable[[Outcome], object], message_id: str, *, collector: str | None = None
    ) -> None:
        """Have a handler called with each new status of a message, until it is final: `collected` and on.

        It is called in a thread of this object; the table is asked twenty times a second for all handlers at once. A
        status that lasts for less may be passed over, the final one never is. One that raises is logged, and called
        again with the next status. Where the status is final already, it is called once.

        Args:
            handler: Called with the outcome.
            message_id: As for `of`.
            collector: As for `wait`.

        Raises:
            InvalidInput: an argument cannot be one.
            ConfigurationError: these outcomes were closed.
        """
        checked_callable("handler", handler)
        checked_name("message_id", message_id)
        self._listen(handler, self._asked(message_id, collector))

    def _listen(self, handler: Callable[[Outcome], object], asked: _Asked) -> None:
        with self._lock:
            self._require_open()
            future = self._handlers.ask(asked)
        future.add_done_callback(partial(self._call_later, handler, asked))

    def _call_later(
        self, handler: Callable[[Outcome], object], asked: _Asked, future: "Future[Outcome | None]"
    ) -> None:
        outcome = future.result()
        # Nothing is called any more once this was closed.
        with suppress(RuntimeError):
            if outcome is not None:
                self._calls.submit(self._call, handler, asked, outcome)

    def _call(self, handler: Callable[[Outcome], object], asked: _Asked, outcome: Outcome) -> None:
        # Exits, too: a handler's end is nobody else's.
        call_handler(handler, outcome, caught=BaseException)
        if not outcome.is_final:
            with suppress(UsedAfterClose):
                self._listen(handler, replace(asked, told=_status(outcome)))


class AsyncOutcomes(AsyncClosing):
    """The asyncio twin of `Outcomes`: PostgreSQL is asked in threads.

    Args:
        database: As for `Outcomes`.
    """

    def __init__(self, database: AnyDatabase) -> None:
        self._outcomes = Outcomes(database)

    async def close(self) -> None:
        """Give connections back; handlers are not called any more."""
        await asyncio.to_thread(self._outcomes.close)

    async def of(self, message_id: str, *, collector: str | None = None) -> Outcome:
        """What became of a message so far; see `Outcomes.of`."""
        return await in_thread(None, partial(self._outcomes.of, message_id, collector=collector))

    async def of_many(self, message_ids: Iterable[str], *, collector: str | None = None) -> dict[str, Outcome]:
        """What became of messages so far; see `Outcomes.of_many`."""
        return await in_thread(None, partial(self._outcomes.of_many, message_ids, collector=collector))

    async def wait(self, message_id: str, timeout_s: float = WAIT_S, *, collector: str | None = None) -> Outcome:
        """The outcome of a message, once it is final; see `Outcomes.wait`. Cancelling it leaves nothing behind."""
        return await outcome_in_task(self._outcomes, message_id, timeout_s, collector)

    def register_result_handler(
        self, handler: Callable[[Outcome], object], message_id: str, *, collector: str | None = None
    ) -> None:
        """Have a handler called in the running loop; see `Outcomes.register_result_handler`. It must not block."""
        loop = asyncio.get_running_loop()

        def in_loop(outcome: Outcome) -> None:
            # A loop that has ended has nobody to tell.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(call_handler, handler, outcome)

        checked_callable("handler", handler)
        self._outcomes.register_result_handler(in_loop, message_id, collector=collector)


async def outcome_in_task(outcomes: Outcomes, message_id: str, timeout_s: float, collector: str | None) -> Outcome:
    """As `Outcomes.wait`, for a task: no thread is held while it waits."""
    asked, until = outcomes._asked(message_id, collector), _until(timeout_s)
    outcome = await outcomes._waits.result_in_task(outcomes._ask(asked), until)
    if outcome is None:
        # From here on, not from when a thread is free: many that wait at once end in time, too.
        with within(LEAST_S):
            outcome = await in_thread(None, outcomes._at_end, asked, timeout_s)
    return outcome


def _until(timeout_s: float) -> float:
    return time.monotonic() + checked_seconds("timeout_s", timeout_s)


def _status(outcome: Outcome) -> tuple[OutcomeStatus, int]:
    """What a handler is told once."""
    return outcome.status, outcome.attempts


def not_finished(outcome: Outcome, timeout_s: float) -> NotFinishedInTime:
    """The error of an outcome that was waited for in vain."""
    hints = {
        OutcomeStatus.UNKNOWN: "no collector has taken it: see whether one runs (`relatum status --collector`)",
        OutcomeStatus.COLLECTED: "it waits for its executor",
        OutcomeStatus.FORWARDED: "its executor has it",
    }
    return NotFinishedInTime(
        f"the outcome of message {outcome.message_id} was not final within {seconds_text(timeout_s)}: it is "
        f"{outcome.status.value}, {hints[outcome.status]}; wait again",
        outcome=outcome,
    )


def _checked(message_ids: Iterable[str]) -> list[str]:
    """The ids, as a list of text."""
    if isinstance(message_ids, str):
        raise InvalidInput("of_many takes several ids; use of for one")
    if not isinstance(message_ids, Iterable):
        raise InvalidInput(f"message_ids are several ids, not {message_ids!r}")
    ids = list(message_ids)
    for message_id in ids:
        # Others' ids are asked for, too: one that no message can have is unknown, and no mistake.
        if not isinstance(message_id, str) or not message_id:
            raise InvalidInput(f"message_id= is text that is not empty, not {shown(message_id)}")
    return ids
