"""Asking what became of a message, from any process: by its id, one or many at once."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final

from relatum.checks import checked_callable, checked_name, checked_seconds, seconds_text, shown
from relatum.closing import AsyncClosing, Closing
from relatum.errors import InvalidInput, NotFinishedInTime, NotFound, RelatumError, Transient, UsedAfterClose
from relatum.outcomes._outcome_values import Outcome, OutcomeStatus, read_outcomes, require_collector
from relatum.processes import after_fork, leave_to_parent
from relatum.store.database import AnyDatabase, Database
from relatum.waiting import LEAST_S, Deadline, Outages, in_thread, within

logger = logging.getLogger("relatum.collector")

POLL_LAST_S: Final = 0.1
"""Seconds between two questions at most: what a final outcome can come late by."""

_WHO: Final = "asking for outcomes that handlers wait for"


@dataclass(slots=True)
class _Handler:
    """A handler, and the status it was last told."""

    call: Callable[[Outcome], object]
    told: tuple[OutcomeStatus, int] = (OutcomeStatus.UNKNOWN, 0)


class OutcomeWatch:
    """The thread that asks for all messages somebody has a handler for."""

    def __init__(self, read: Callable[[list[str], str | None], Mapping[str, Outcome]], database: str) -> None:
        self._read = read
        self._outages = Outages(logger, database=database)
        self._changed = threading.Condition()
        self._handlers: dict[tuple[str | None, str], list[_Handler]] = {}
        self._is_new = False
        self._is_stopping = False
        self._thread = threading.Thread(target=self._run, name="relatum-outcomes", daemon=True)
        self._thread.start()

    def add(self, message_id: str, collector: str | None, handler: Callable[[Outcome], object]) -> None:
        with self._changed:
            self._handlers.setdefault((collector, message_id), []).append(_Handler(handler))
            self._is_new = True
            self._changed.notify_all()

    def stop(self) -> None:
        with self._changed:
            self._is_stopping = True
            self._changed.notify_all()
        if self._thread is not threading.current_thread():
            self._thread.join()

    def _run(self) -> None:
        while (waiting := self._waiting()) is not None:
            for collector in {collector for collector, _ in waiting}:
                ids = [message_id for named, message_id in waiting if named == collector]
                try:
                    found = self._read(ids, collector)
                except RelatumError as error:
                    self._outages.failed(_WHO, error)
                    continue
                self._outages.over(_WHO)
                for outcome in found.values():
                    self._tell(collector, outcome)

    def _waiting(self) -> list[tuple[str | None, str]] | None:
        """What to ask for now; None at the end."""
        with self._changed:
            while not self._is_stopping and not self._handlers:
                self._changed.wait()
            if not self._is_new and not self._is_stopping:
                self._changed.wait(POLL_LAST_S)
            self._is_new = False
            return None if self._is_stopping else list(self._handlers)

    def _tell(self, collector: str | None, outcome: Outcome) -> None:
        key = (collector, outcome.message_id)
        status = (outcome.status, outcome.attempts)
        with self._changed:
            handlers = [handler for handler in self._handlers.get(key, ()) if handler.told != status]
            for handler in handlers:
                handler.told = status
            if outcome.is_final:
                del self._handlers[key]
        for handler in handlers:
            # Exits, too: they would end this thread, and no handler would be called any more.
            call_handler(handler.call, outcome, caught=BaseException)


def call_handler(
    handler: Callable[[Outcome], object], outcome: Outcome, *, caught: type[BaseException] = Exception
) -> None:
    """Call a result handler; what it raises is logged and breaks nothing. In an event loop an exit ends the loop."""
    try:
        handler(outcome)
    except caught:
        logger.exception("a result handler raised for message %s (%s)", outcome.message_id, outcome.status.value)


WAIT_S: Final = 10.0
"""Seconds an outcome is waited for by default."""

_POLL_FIRST_S: Final = 0.005
"""Seconds before the table is asked again for the first time; collecting and consuming a bulk take longer mostly."""


class Outcomes(Closing):
    """What became of messages, for the producer and for whoever else has their ids. Thread-safe.

    Args:
        database: PostgreSQL's URL, or a `Database`, which stays the caller's. A user with the role `relatum_consumer`,
            `relatum_recorder` or `relatum_collector` may ask.
    """

    def __init__(self, database: AnyDatabase) -> None:
        self._ending = Deadline(None)
        self._database = Database(database, refusing=None, ending=self._ending, pool_size=2)
        self._lock = threading.Lock()
        self._watch: OutcomeWatch | None = None
        self._is_closed = False
        after_fork(self, Outcomes._renew)

    def _renew(self) -> None:
        """In a child: handlers, and the thread that calls them, are the parent's. The engine sees to itself."""
        self._lock = threading.Lock()
        leave_to_parent(self._watch)
        self._watch = None

    def close(self) -> None:
        """End the thread that watches for result handlers, and give connections back."""
        with self._lock:
            watch, self._watch = self._watch, None
            self._is_closed = True
        self._ending.end_in(0)
        if watch is not None:
            watch.stop()
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

    def _read(self, message_ids: list[str], collector: str | None) -> dict[str, Outcome]:
        """As `of_many`, for what waits: a collector that nobody has made yet may come."""
        with self._database.transaction() as connection:
            return read_outcomes(connection, message_ids, collector=collector)

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
        checked_seconds("timeout_s", timeout_s)
        deadline = time.monotonic() + timeout_s
        pause = _POLL_FIRST_S
        while True:
            outcome = self._asked(message_id, collector, deadline)
            if outcome is not None and outcome.is_final:
                return outcome
            remaining = deadline - time.monotonic()
            if outcome is not None and remaining <= 0:
                raise not_finished(outcome, timeout_s)
            time.sleep(max(0.0, min(pause, remaining)))
            pause = min(2 * pause, POLL_LAST_S)

    def _asked(self, message_id: str, collector: str | None, deadline: float) -> Outcome | None:
        """The outcome now; None while the database is away, or the collector not made, and there is time left."""
        try:
            with within(max(LEAST_S, deadline - time.monotonic())):
                return self.of(message_id, collector=collector)
        except (Transient, NotFound):
            if time.monotonic() >= deadline:
                raise
            return None

    def register_result_handler(
        self, handler: Callable[[Outcome], object], message_id: str, *, collector: str | None = None
    ) -> None:
        """Have a handler called with each new status of a message, until it is final: `collected` and on.

        It is called in a thread of this object, which asks the table ten times a second for all handlers at once; a
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
        if collector is not None:
            checked_name("collector", collector)
        with self._lock:
            self._require_open()
            if self._watch is None:
                self._watch = OutcomeWatch(self._read, self._database.address.name)
            self._watch.add(message_id, collector, handler)


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
        checked_seconds("timeout_s", timeout_s)
        deadline = time.monotonic() + timeout_s
        pause = _POLL_FIRST_S
        while True:
            # From here on, not from when a thread is free: many that wait at once end in time, too.
            with within(max(LEAST_S, deadline - time.monotonic())):
                outcome = await in_thread(None, self._outcomes._asked, message_id, collector, deadline)
            if outcome is not None and outcome.is_final:
                return outcome
            remaining = deadline - time.monotonic()
            if outcome is not None and remaining <= 0:
                raise not_finished(outcome, timeout_s)
            await asyncio.sleep(max(0.0, min(pause, remaining)))
            pause = min(2 * pause, POLL_LAST_S)

    def register_result_handler(
        self, handler: Callable[[Outcome], object], message_id: str, *, collector: str | None = None
    ) -> None:
        """Have a handler called in the running loop; see `Outcomes.register_result_handler`. It must not block."""
        loop = asyncio.get_running_loop()

        def in_loop(outcome: Outcome) -> None:
            loop.call_soon_threadsafe(call_handler, handler, outcome)

        checked_callable("handler", handler)
        self._outcomes.register_result_handler(in_loop, message_id, collector=collector)


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
