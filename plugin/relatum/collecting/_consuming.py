"""Consumes bulks in threads of their type: reads bodies, calls the executor, stores the results."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar
from uuid import UUID

import sqlalchemy as sa

from relatum import otel
from relatum.collecting._bulk import (
    Bulk,
    Collected,
    Executor,
    ExecutorOptions,
    Failure,
    id_of,
    id_of_place,
    results_of,
)
from relatum.collecting._collector_core import Abandoned, Result, Stored
from relatum.collecting._collector_status import TypeCounts
from relatum.collecting._handlers import collector_call, logger, outcome_of
from relatum.common.ids import MessageId
from relatum.common.waiting import Threads, log_failure, may_repeat
from relatum.errors import (
    AccessRefused,
    ConfigurationError,
    DatabaseUnavailable,
    NotFound,
    OffsetExpired,
    OffsetNotFound,
    PublishRejected,
    RelatumError,
    StreamUnavailable,
    TlsRefused,
    Transient,
)
from relatum.otel import Description, Part, Span
from relatum.outcomes import OutcomeStatus
from relatum.own_messages import DeadLetterPublisher
from relatum.reading import Result as Found

if TYPE_CHECKING:
    from relatum.collecting._collector_loop import CollectorLoop

NAMED_MAX: Final = 10
"""Maximum places of messages in one log line."""

CRASHES_MAX: Final = 10
"""Maximum attempts beyond `attempts` that end with the collector's death; then the message fails for good."""

UNREAD_S: Final = 2.0
"""Seconds before the next attempt to read a body that may be in its stream."""

CRASHED: Final = Failure("the collector died each time this message was consumed", retry=False)

T = TypeVar("T")

# --- a bulk's span ----------------------------------------------------------------------------------------------------


def _described(collector: str, bulk: Bulk) -> Description:
    streams = {message.place.stream for message in bulk.messages}
    attributes: dict[str, str | int] = {
        "messaging.system": "rabbitmq",
        "messaging.operation.name": "process",
        "messaging.operation.type": "process",
        "messaging.batch.message_count": len(bulk),
        "messaging.consumer.group.name": collector,
        "relatum.bulk.type": bulk.type,
        "relatum.bulk.reason": bulk.reason.value,
    }
    name = "process"
    if len(streams) == 1:
        name = f"process {(stream := streams.pop())}"
        attributes["messaging.destination.name"] = stream
    return Description(name, attributes, "consumer", _links_of(bulk.messages))


def _links_of(messages: Iterable[Collected]) -> list[otel.Link]:
    return otel.links_of(message.body for message in messages if message.body is not None)


def _counts(results: Sequence[Result]) -> dict[str, int]:
    found = Counter(result.status for result in results)
    statuses = (OutcomeStatus.SUCCEEDED, OutcomeStatus.FAILED, OutcomeStatus.DEAD)
    return {f"relatum.bulk.{status.value}": found[status] for status in statuses}


# --- consuming --------------------------------------------------------------------------------------------------------


class _RolledBack(Exception):
    """Rolls the transaction back: the executor raised, or another member owns some rows."""


class BulkConsumer:
    """Consumes bulks of one type. `take` does all steps in one of `threads`: read bodies, execute, store results."""

    def __init__(
        self,
        shared: "CollectorLoop",
        type: str,  # noqa: A002 - RabbitMQ's word for it
        options: ExecutorOptions,
        executor: Executor,
    ) -> None:
        self.options = options
        self.counts = TypeCounts()
        # One more than concurrent bulks, since a thread becomes free only a moment after its call has ended.
        self.threads = Threads(options.workers + 1, f"relatum-{type}")
        self._shared = shared
        self._type = type
        self._executor = executor

    def take(self, bulk: Bulk) -> list[Result]:
        """Consume a bulk and call handlers for final outcomes; return the results that were stored."""
        shared, stored = self._shared, list[Result]()
        span_of = otel.span(Part.COLLECTOR, partial(_described, shared.store.name, bulk))
        with collector_call(shared), span_of as span:
            try:
                self._consume(bulk, stored, span)
            except Abandoned:
                # The bulk stays forwarded in the store: another member takes it over.
                pass
            except Exception as error:  # noqa: BLE001 - one bulk must not stop the consumption of others
                # This member owns the messages until it ends; then another member takes them over.
                places = ", ".join(str(message.place) for message in bulk.messages[:NAMED_MAX])
                log_failure(
                    logger, error, f"no result was stored for {len(bulk)} messages of type {bulk.type!r}: {places}"
                )
            span.tell(partial(_counts, stored))
        return stored

    def _consume(self, bulk: Bulk, stored: list[Result], span: Span) -> None:
        """Read missing bodies, store the attempt, call the executor, store the results."""
        try:
            lost = self._load(bulk, stored, span)
        except Exception as error:  # noqa: BLE001 - logged, and the messages' result
            lost = dict.fromkeys((message.place for message in bulk.messages), self._defect(error))
        postponed = {result.place for result in stored}
        messages = self._forward(bulk.id, [message for message in bulk.messages if message.place not in postponed])
        # A message with this many attempts and no result probably kills its collectors.
        most = self.options.attempts + CRASHES_MAX
        lost |= {message.place: CRASHED for message in messages if message.attempts > most}
        failures = [self._result_of(message, lost[message.place]) for message in messages if message.place in lost]
        rest = tuple(message for message in messages if message.place not in lost)
        try:
            if failures:
                self._finish(bulk, failures, stored)
            if rest:
                self._execute(bulk if len(rest) == len(bulk) else replace(bulk, messages=rest), stored, span)
        except Exception as error:  # noqa: BLE001 - logged, and the messages' result
            # Without a result, this member would own the messages until it ends, and never consume them.
            failure, done = self._defect(error), {result.place for result in stored}
            left = [message for message in messages if message.place not in done]
            self._finish(bulk, [self._result_of(message, failure, may_be_dead=False) for message in left], stored)

    def _defect(self, error: Exception) -> Failure:
        log_failure(logger, error, self._shared.label(f"consuming a bulk of type {self._type!r}") + " failed")
        return Failure.of(error)

    def _result_of(self, message: Collected, failure: Failure | None, *, may_be_dead: bool = True) -> Result:
        if failure is None:
            return Result(message.place, OutcomeStatus.SUCCEEDED)
        if failure.retry and message.attempts < self.options.attempts:
            backoff_s = self.options.backoff_after(message.attempts)
            return Result(message.place, OutcomeStatus.COLLECTED, failure.stored_reason, backoff_s)
        # If retention dropped the body, there is nothing to publish as a dead letter.
        is_dead = may_be_dead and self._shared.streams.dead_letters is not None and message.body is not None
        return Result(message.place, OutcomeStatus.DEAD if is_dead else OutcomeStatus.FAILED, failure.stored_reason)

    # --- bodies that are only in their streams ------------------------------------------------------------------------

    def _load(self, bulk: Bulk, stored: list[Result], span: Span) -> dict[MessageId, Failure]:
        """Read missing bodies from their streams; return failures by place.

        Appends results for messages to read later to `stored`, so that the others need not wait for them.
        """
        unread = [message for message in bulk.messages if message.body is None]
        if not unread:
            return {}
        lost: dict[MessageId, Failure] = {}
        places = [message.place for message in unread]
        found = self._persist(partial(self._read, places), "reading messages")
        for message, body in zip(unread, found, strict=True):
            place = message.place
            if isinstance(body, RelatumError):
                # The message may exist: a node lags or does not answer, or the leader is unreachable.
                is_unproven = isinstance(body, OffsetNotFound) and not body.is_proven
                if not isinstance(body, OffsetExpired) and (may_repeat(body) or is_unproven):
                    stored.append(Result(place, OutcomeStatus.COLLECTED, retry_in_s=UNREAD_S))
                else:
                    why = "expired" if isinstance(body, NotFound) else "unreadable"
                    lost[place] = Failure(f"{why}: {body}", retry=False)
            elif message.message_id not in (id_of(place, body.properties.message_id), id_of_place(place)):
                lost[place] = Failure("expired: another message is there now", retry=False)
            else:
                message._note(body=body)
        # The bodies count towards `bytes_max` from now on.
        self._shared.loop.call(self._shared.core.loaded, bulk)
        span.link(lambda: _links_of(unread))
        return lost

    def _read(self, places: Sequence[MessageId]) -> Sequence[Found | StreamUnavailable]:
        """Read messages. Those of an unavailable stream get that error, and hold up no others."""
        shared = self._shared
        try:
            found = shared.streams.reader().read_all(places)
        except StreamUnavailable as error:
            others = [place for place in places if place.stream != error.stream]
            if len(others) == len(places):
                raise
            shared.outages.failed(shared.label(f"reading messages of stream {error.stream!r}"), error)
            by_place = dict(zip(others, self._read(others), strict=True))
            return [by_place.get(place, error) for place in places]
        for stream in {place.stream for place in places}:
            shared.outages.over(shared.label(f"reading messages of stream {stream!r}"))
        for each in found:
            if isinstance(each, AccessRefused):
                # Raise, so that the read is repeated: the user may get the permission again.
                raise each
        return found

    # --- an attempt ---------------------------------------------------------------------------------------------------

    def _forward(self, bulk_id: int, messages: Sequence[Collected]) -> list[Collected]:
        """Store the attempt; return the messages that no other member has taken over."""
        shared, places = self._shared, [message.place for message in messages]
        forwarded = self._persist(partial(shared.store.forward, shared.member, bulk_id, places), "forwarding a bulk")
        owned = [message for message in messages if message.place in forwarded.places]
        for message in owned:
            message._note(attempts=message.attempts + 1, forwarded_at=forwarded.at)
        return owned

    def _execute(self, bulk: Bulk, stored: list[Result], span: Span) -> None:
        if not self.options.joins_transaction:
            results, _ = self._call_executor(bulk, span)
        else:
            results, committed = self._persist(partial(self.execute_joined, bulk, span), "committing results")
            if committed is not None:
                self._report(bulk, results, committed, stored)
                return
        self._finish(bulk, results, stored)

    def _call_executor(self, bulk: Bulk, span: Span) -> tuple[list[Result], BaseException | None]:
        """Call the executor; return the results, and the exception if it raised one."""
        answer, raised = None, None
        try:
            answer = self._executor(bulk)
        except Abandoned:
            raise
        except BaseException as error:  # noqa: BLE001 - it becomes the messages' result
            span.failed(error)
            raised = error
        return self._results(bulk, answer, raised), raised

    def _results(self, bulk: Bulk, answer: Any, raised: BaseException | None) -> list[Result]:
        found = results_of(bulk, answer, raised)
        return [self._result_of(message, found[message.place]) for message in bulk.messages]

    def execute_joined(self, bulk: Bulk, span: Span) -> tuple[list[Result], Stored | None]:
        """Call the executor in a transaction; return its results, and what was committed (None: rolled back).

        Exactly-once depends on the statement that stores the results: it must find each row still forwarded, in this
        bulk, by this member. Otherwise the transaction is rolled back, with everything that the executor wrote.
        """
        store, results, stored = self._shared.store, list[Result](), Stored(frozenset(), None)

        def finish(connection: sa.Connection, token: UUID) -> None:
            nonlocal stored
            stored = store.finish(self._shared.member, bulk.id, results, connection=connection, token=token)
            if len(stored.places) < len(results):
                raise _RolledBack

        while bulk.messages:
            raised = None
            try:
                # Results lock rows, so they are stored at the end: the executor's transaction may be idle for any time.
                with store.transaction(finish, self._shared.abandoned) as connection:
                    results, raised = self._call_executor(replace(bulk, connection=connection), span)
                    _check_joined(connection, raised)
                    results = self._publish_dead(bulk, results, is_joined=True)
            except _RolledBack:
                if raised is not None:
                    return results, None
                # Another member has taken over some messages: repeat without them.
                owned = stored.places
                bulk = replace(bulk, messages=tuple(each for each in bulk.messages if each.place in owned))
            except (Transient, AccessRefused, PublishRejected, TlsRefused):
                # PostgreSQL or the dead-letter stream is unavailable, which is no failure of the messages.
                raise
            except Exception as error:  # noqa: BLE001 - the executor left a transaction that fails
                return self._results(bulk, None, error), None
            else:
                return results, stored
        return [], None

    # --- results ------------------------------------------------------------------------------------------------------

    def _finish(self, bulk: Bulk, results: list[Result], stored: list[Result]) -> None:
        """Publish dead letters, store the results, and append the results that were stored to `stored`."""
        shared = self._shared
        # Publish first: a dead message must be in the dead-letter stream. After a crash, it may be published twice.
        results = self._publish_dead(bulk, results)
        finish = partial(shared.store.finish, shared.member, bulk.id, results)
        self._report(bulk, results, self._persist(finish, "storing results"), stored)

    def _report(self, bulk: Bulk, results: Sequence[Result], committed: Stored, stored: list[Result]) -> None:
        shared, found = self._shared, [result for result in results if result.place in committed.places]
        stored += found
        if shared.handlers:
            by_place = {message.place: message for message in bulk.messages}
            finals = [result for result in found if result.status.is_final]
            shared.notify_handlers(
                [outcome_of(shared.store.name, by_place[each.place], each, committed.at) for each in finals]
            )

    def _publish_dead(self, bulk: Bulk, results: list[Result], *, is_joined: bool = False) -> list[Result]:
        """Publish dead letters; return the results, with messages that can never be dead letters as failed."""
        reasons = {result.place: result.reason or "" for result in results if result.status is OutcomeStatus.DEAD}
        if not reasons:
            return results
        dead_letters = self._shared.streams.dead_letters
        assert dead_letters is not None, "messages are dead only if there is a dead-letter stream"
        letters = [(message.message, reasons[message.place]) for message in bulk.messages if message.place in reasons]
        # One publisher for all repetitions: it remembers which letters were confirmed. A transaction does not wait.
        publish = DeadLetterPublisher(dead_letters, letters).run
        refused = publish() if is_joined else self._persist(publish, "publishing dead letters")

        def failed(result: Result) -> Result:
            both = Failure(f"{result.reason}; no dead letter: {refused[result.place]}")
            return result._replace(status=OutcomeStatus.FAILED, reason=both.stored_reason)

        return [failed(each) if each.place in refused else each for each in results]

    def _persist(self, call: Callable[[], T], what: str) -> T:
        return self._shared.persist(call, f"{what} of type {self._type!r}")


def _check_joined(connection: sa.Connection, raised: BaseException | None) -> None:
    """Raise an error unless the executor left its transaction open and raised nothing. `raised`: What it raised."""
    # A lost connection is no longer `invalidated` once the executor's `with` block has closed it.
    if connection.invalidated or (connection.closed and getattr(raised, "connection_invalidated", False)):
        raise DatabaseUnavailable("the executor's transaction was lost") from raised
    if connection.closed or not connection.in_transaction():
        raise ConfigurationError(
            "the executor ended the transaction of bulk.connection, so writes and results are not atomic: leave commit "
            "and close to the collector"
        ) from raised
    if raised is not None:
        raise _RolledBack
