"""The outcomes of collected messages, by message id, from any process: queries, waits and handlers.

Collectors (`relatum.collecting`) store outcomes. This module only reads outcomes, and does not import collectors.
"""

import asyncio
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from enum import Enum
from functools import partial
from typing import Final

import sqlalchemy as sa

from relatum.common.checks import checked_callable, checked_name, checked_seconds, is_clean, seconds_text, shown
from relatum.common.closing import AsyncClosing, Closing
from relatum.common.waiting import LEAST_S, Deadline, Outages, SharedWait, Threads, in_thread, within
from relatum.errors import InvalidInput, NotFinishedInTime, NotFound, RelatumError, Transient, UsedAfterClose
from relatum.store.database import AnyDatabase, Database, sql

__all__ = ["AsyncOutcomes", "Outcome", "OutcomeStatus", "Outcomes"]

logger = logging.getLogger("relatum.collector")

WAIT_S: Final = 10.0
"""Default seconds to wait for an outcome."""


class OutcomeStatus(Enum):
    """The status of a message, least advanced first; failures come before successes."""

    UNKNOWN = "unknown"
    """No collector has stored the message yet, its type has no executor, or its row was deleted after `keep_s`."""
    COLLECTED = "collected"
    """The message is stored and waits for an executor, or for a retry if `attempts` is above 0."""
    FORWARDED = "forwarded"
    """The executor is processing the message."""
    FAILED = "failed"
    """All attempts failed, or retention dropped the message; no dead-letter stream has it. Final."""
    DEAD = "dead"
    """All attempts failed; the message is in the dead-letter stream. Final."""
    SUCCEEDED = "succeeded"
    """The executor succeeded. Final."""

    @property
    def is_final(self) -> bool:
        """Whether the status no longer changes."""
        return self in (OutcomeStatus.FAILED, OutcomeStatus.DEAD, OutcomeStatus.SUCCEEDED)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a message.

    Attributes:
        message_id: The message's property `message_id`; "stream:offset" if it has none.
        status: The message's status. While it is UNKNOWN, the following attributes have their defaults.
        collector: The collector's name.
        type: The type by which the executor was chosen.
        stream: The message's stream.
        offset: The message's offset.
        attempts: Number of times an executor got the message.
        reason: Why the last attempt failed; None if no attempt failed.
        collected_at: When the message was collected.
        forwarded_at: When an executor last got the message.
        finished_at: When the status became final.
        others: The outcomes of other messages with this id, or of the same message in other collectors.
    """

    message_id: str
    status: OutcomeStatus
    collector: str | None = None
    type: str | None = None
    stream: str | None = None
    offset: int | None = None
    attempts: int = 0
    reason: str | None = None
    collected_at: datetime | None = None
    forwarded_at: datetime | None = None
    finished_at: datetime | None = None
    others: "tuple[Outcome, ...]" = ()

    @property
    def is_final(self) -> bool:
        """Whether the outcome no longer changes."""
        return self.status.is_final


_IDS_MAX: Final = 1_000
"""Maximum ids in one query."""

_POLL_S: Final = 1.0
"""Maximum seconds of each query of a poll, for any number of queries. The next poll retries a frozen server."""

OUTCOMES: Final = sql("""
    SELECT message_id, state, collector.name, type, stream, stream_offset, attempts, reason,
        collected_at, forwarded_at, finished_at
    FROM relatum.collected_messages JOIN relatum.collector_sources AS source USING (source_id)
        JOIN relatum.collectors AS collector ON collector.collector_id = source.collector_id
    WHERE message_id = ANY (:ids::text[])
        AND (:in_collector::integer IS NULL OR collector.collector_id = :in_collector::integer)
        AND (:of_collector::text IS NULL OR collector.name = :of_collector::text)""")
"""Selects the fields of `Outcome`, in order, of every message with one of the ids."""

_COLLECTOR: Final = sql("SELECT 1 FROM relatum.collectors WHERE name = :name::text LIMIT 1")


def read_outcomes(
    connection: sa.Connection,
    message_ids: Iterable[str],
    *,
    collector_id: int | None = None,
    collector: str | None = None,
) -> dict[str, Outcome]:
    """Return the outcome of each id, in one collector or in all; with status UNKNOWN for ids that are not found."""
    found: dict[str, list[Outcome]] = {message_id: [] for message_id in message_ids}
    # PostgreSQL cannot store a NUL or a lone surrogate, so no message has such an id.
    ids = [each for each in found if is_clean(each)]
    for start in range(0, len(ids), _IDS_MAX):
        named = {"ids": ids[start : start + _IDS_MAX], "in_collector": collector_id, "of_collector": collector}
        for message_id, state, *columns in connection.execute(OUTCOMES, named):
            found[message_id].append(Outcome(message_id, OutcomeStatus(state), *columns))
    order = list(OutcomeStatus)
    for outcomes in found.values():
        # Least advanced first: the result is a success only if all messages have succeeded.
        outcomes.sort(key=lambda outcome: (order.index(outcome.status), outcome.stream, outcome.offset))
    return {
        message_id: replace(each[0], others=tuple(each[1:])) if each else Outcome(message_id, OutcomeStatus.UNKNOWN)
        for message_id, each in found.items()
    }


_HANDLER_QUERIES: Final = "asking for outcomes that handlers wait for"
_THREADS: Final = "relatum-outcomes"


@dataclass(frozen=True, slots=True)
class _Query:
    """A query for an outcome. `reported`: status and attempts that the handler was called with; None for a wait."""

    message_id: str
    collector: str | None
    reported: tuple[OutcomeStatus, int] | None = None


def call_handler(
    handler: Callable[[Outcome], object], outcome: Outcome, *, caught: type[BaseException] = Exception
) -> None:
    """Call a result handler, and log its exception. By default, exits such as `SystemExit` are not caught."""
    try:
        handler(outcome)
    except caught:
        logger.exception("a result handler raised for message %s (%s)", outcome.message_id, outcome.status.value)


class Outcomes(Closing):
    """The outcomes of messages, for any process that knows their ids. Thread-safe.

    Args:
        database: PostgreSQL's URL, or a `Database`, which the caller closes. The user needs the role
            `relatum_consumer`, `relatum_recorder` or `relatum_collector`.
    """

    def __init__(self, database: AnyDatabase) -> None:
        self._ending = Deadline(None)
        self._database = Database(database, refusing=None, ending=self._ending, pool_size=2)
        self._outages = Outages(logger, database=self._database.address.name)
        # A weak reference, so that an object that is dropped without `close` can be freed.
        this = weakref.proxy(self)
        self._waits = SharedWait(partial(Outcomes._final_outcomes, this), _THREADS, first_s=0)
        self._handlers = SharedWait(partial(Outcomes._new_outcomes, this), _THREADS, first_s=0)
        self._calls = Threads(1, _THREADS)

    def close(self) -> None:
        """Stop calling result handlers, end all waits, and close connections."""
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
            The outcome. If several messages have the id, or several collectors stored the message, the least advanced
            outcome, with the others in `others`. The status is UNKNOWN if no collector has stored the message, or if
            its final outcome is older than its collector's `keep_s`.

        Raises:
            NotFound: There is no collector with this name.
            DatabaseUnavailable: PostgreSQL is unavailable; safe to retry.
            UsedAfterClose: The object was closed.
        """
        return self.of_many([message_id], collector=collector)[message_id]

    def of_many(self, message_ids: Iterable[str], *, collector: str | None = None) -> dict[str, Outcome]:
        """Return the current outcomes of messages by id, in the order of the ids; see `of`."""
        ids = _checked(message_ids, collector)
        self._require_open()
        with self._database.transaction() as connection:
            found = read_outcomes(connection, ids, collector=collector)
            # If nothing was found, the name may be misspelt.
            is_unknown = all(each.status is OutcomeStatus.UNKNOWN for each in found.values())
            if collector and is_unknown and connection.execute(_COLLECTOR, {"name": collector}).first() is None:
                raise NotFound(f"there is no collector {collector!r}: check the name, or start its first member")
            return found

    def _answers(self, queries: Sequence[_Query]) -> Iterator[tuple[int, Outcome]]:
        """Yield outcomes that end waits or are new to handlers. A missing collector may start later: no error."""
        for collector in {each.collector for each in queries}:
            numbers = [number for number, each in enumerate(queries) if each.collector == collector]
            for start in range(0, len(numbers), _IDS_MAX):
                batch = numbers[start : start + _IDS_MAX]
                with within(Deadline(_POLL_S)), self._database.transaction() as connection:
                    found = read_outcomes(connection, (queries[n].message_id for n in batch), collector=collector)
                for number in batch:
                    outcome, reported = found[queries[number].message_id], queries[number].reported
                    if outcome.is_final if reported is None else reported != (outcome.status, outcome.attempts):
                        yield number, outcome

    def _final_outcomes(self, queries: Sequence[_Query]) -> Iterator[tuple[int, Outcome]]:
        # Waits continue while PostgreSQL is unavailable.
        with suppress(Transient):
            yield from self._answers(queries)

    def _new_outcomes(self, queries: Sequence[_Query]) -> Iterator[tuple[int, Outcome]]:
        try:
            yield from self._answers(queries)
        except RelatumError as error:
            self._outages.failed(_HANDLER_QUERIES, error)
        else:
            self._outages.over(_HANDLER_QUERIES)

    def _require_open(self) -> None:
        if self._ending.has_passed:
            raise UsedAfterClose("this Outcomes object was closed: create another one, or query in its `with` block")

    def wait(self, message_id: str, timeout_s: float = WAIT_S, *, collector: str | None = None) -> Outcome:
        """Wait until the outcomes of all messages with this id are final; return the outcome as `of` does.

        Args:
            message_id: As for `of`.
            timeout_s: Seconds to wait, also while PostgreSQL is unavailable. Default: 10.
            collector: As for `of`. The collector need not exist yet.

        Raises:
            NotFinishedInTime: The outcome was not final in time; `outcome` has the current one. You can wait again.
            NotFound: At the end of the wait there is no collector with this name.
            DatabaseUnavailable: PostgreSQL is unavailable at the end of the wait.
        """
        until = time.monotonic() + checked_seconds("timeout_s", timeout_s)
        outcome = self._waits.wait(self._submit(self._waits, _Query(message_id, collector)), until)
        if outcome is not None:
            return outcome
        # The outer deadline does not apply to the last query.
        with within(Deadline(LEAST_S)):
            return self._at_end(message_id, timeout_s, collector)

    def _submit(self, waits: "SharedWait[_Query, Outcome]", query: _Query) -> "Future[Outcome | None]":
        _checked([query.message_id], query.collector)
        self._require_open()
        future = waits.ask(query)
        if self._ending.has_passed:
            # `close` may have ended the waits just before this wait began.
            waits.end()
        return future

    def _at_end(self, message_id: str, timeout_s: float, collector: str | None) -> Outcome:
        outcome = self.of(message_id, collector=collector)
        if outcome.is_final:
            return outcome
        hints = {
            OutcomeStatus.UNKNOWN: "no collector has stored it: check that one runs, by `relatum status --collector`",
            OutcomeStatus.COLLECTED: "the message waits for its executor",
            OutcomeStatus.FORWARDED: "its executor is processing the message",
        }
        raise NotFinishedInTime(
            f"the outcome of message {message_id} was not final within {seconds_text(timeout_s)}: it is "
            f"{outcome.status.value} ({hints[outcome.status]}); wait again",
            outcome=outcome,
        )

    def register_result_handler(
        self, handler: Callable[[Outcome], object], message_id: str, *, collector: str | None = None
    ) -> None:
        """Call a handler with each new status of a message, from `collected` to the final one.

        One thread of this object calls all handlers. Another queries the table for them every 50 ms, or less often if
        PostgreSQL is slow, so a short-lived status may be skipped, but never the final one. A handler's exception is
        logged. If the status is already final, the handler is called once.

        Args:
            handler: Called with the `Outcome`.
            message_id: As for `of`.
            collector: As for `wait`.

        Raises:
            InvalidInput: An argument has the wrong type, or the handler is a coroutine function.
            UsedAfterClose: The object was closed.
        """
        checked_callable("handler", handler, is_awaited=False)
        checked_name("message_id", message_id)
        self._watch(handler, _Query(message_id, collector, (OutcomeStatus.UNKNOWN, 0)))

    def _watch(self, handler: Callable[[Outcome], object], query: _Query) -> None:
        def answered(future: "Future[Outcome | None]") -> None:
            outcome = future.result()
            # The threads refuse calls after `close`.
            with suppress(RuntimeError):
                if outcome is not None:
                    self._calls.submit(self._call, handler, query, outcome)

        self._submit(self._handlers, query).add_done_callback(answered)

    def _call(self, handler: Callable[[Outcome], object], query: _Query, outcome: Outcome) -> None:
        # Also catches exits, which would end this thread.
        call_handler(handler, outcome, caught=BaseException)
        if not outcome.is_final:
            with suppress(UsedAfterClose):
                self._watch(handler, replace(query, reported=(outcome.status, outcome.attempts)))


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
        """Wait until the outcome of a message is final; see `Outcomes.wait`. Cancelling the task ends the wait."""
        return await outcome_in_task(self._outcomes, message_id, timeout_s, collector)

    def register_result_handler(
        self, handler: Callable[[Outcome], object], message_id: str, *, collector: str | None = None
    ) -> None:
        """Call a handler in the running loop; see `Outcomes.register_result_handler`. The handler must not block."""
        loop = asyncio.get_running_loop()

        def in_loop(outcome: Outcome) -> None:
            # The loop may have ended.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(call_handler, handler, outcome)

        checked_callable("handler", handler, is_awaited=False)
        self._outcomes.register_result_handler(in_loop, message_id, collector=collector)


async def outcome_in_task(outcomes: Outcomes, message_id: str, timeout_s: float, collector: str | None) -> Outcome:
    """Wait like `Outcomes.wait`, but in a task, which needs no thread while it waits."""
    until = time.monotonic() + checked_seconds("timeout_s", timeout_s)
    future = outcomes._submit(outcomes._waits, _Query(message_id, collector))
    outcome = await outcomes._waits.wait_in_task(future, until)
    if outcome is not None:
        return outcome
    # The limit includes the wait for a free thread, so that many simultaneous waits end in time.
    with within(LEAST_S):
        return await in_thread(None, outcomes._at_end, message_id, timeout_s, collector)


def _checked(message_ids: Iterable[str], collector: str | None) -> list[str]:
    """Check the arguments of a query; return the ids as a list."""
    if collector is not None:
        checked_name("collector", collector)
    if isinstance(message_ids, str) or not isinstance(message_ids, Iterable):
        raise InvalidInput(f"message_ids= takes several ids, not {shown(message_ids)}: use `of` for one")
    ids = list(message_ids)
    for message_id in ids:
        # Other programs choose ids, so an id that no message can have is UNKNOWN, not an error.
        if not isinstance(message_id, str) or not message_id:
            raise InvalidInput(f"a message id must be non-empty text, not {shown(message_id)}")
    return ids
