"""Consuming a bulk, in a thread of its type: read bodies, call the executor, store the results."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from relatum import otel
from relatum.collecting._bulk import Bulk, Collected, Executor, Failure, id_of, id_of_place, results_of
from relatum.collecting._bulks import CRASHES_MAX, ExecutorOptions
from relatum.collecting._collector_core import Abandoned, Result, Stored
from relatum.collecting._handlers import collector_call, logger, outcome_of
from relatum.collecting._statistics import TypeCounts
from relatum.errors import (
    AccessRefused,
    BrokerUnavailable,
    ConfigurationError,
    DatabaseUnavailable,
    NotFound,
    OffsetExpired,
    OffsetNotFound,
    ReadTimeout,
    RelatumError,
)
from relatum.ids import MessageId
from relatum.otel import Description, Part, Span
from relatum.outcomes import OutcomeStatus
from relatum.publishing import Burial, DeadLetters
from relatum.reading import Message, StreamReader
from relatum.reading import Result as Found
from relatum.waiting import Threads, log_failure, may_repeat

if TYPE_CHECKING:
    import sqlalchemy as sa

    from relatum.collecting._collector_loop import CollectorLoop

NAMED_MAX: Final = 10
"""Maximum messages named in one log line."""

UNREAD_S: Final = 2.0
"""Seconds before another attempt to read a body that may be in its stream."""

GIVEN_UP: Final = Failure("the collector died each time this message was consumed", retry=False)

T = TypeVar("T")

Letter = tuple[Message, str]
"""A message for the dead-letter stream, and the reason."""


# --- results ----------------------------------------------------------------------------------------------------------


def decided(options: ExecutorOptions, message: Collected, failure: Failure | None, *, may_die: bool) -> Result:
    """Return the result to store for a message after an attempt."""
    if failure is None:
        return Result(message.place, OutcomeStatus.SUCCEEDED)
    if failure.retry and message.attempts < options.attempts:
        backoff_s = options.backoff_after(message.attempts)
        return Result(message.place, OutcomeStatus.COLLECTED, failure.stored_reason, backoff_s)
    # If retention dropped the body, there is nothing to publish as a dead letter.
    status = OutcomeStatus.DEAD if may_die and message.body is not None else OutcomeStatus.FAILED
    return Result(message.place, status, failure.stored_reason)


def _letters_of(bulk: Bulk, results: Sequence[Result]) -> list[Letter]:
    """Return the messages for the dead-letter stream, each with its reason."""
    reasons = {result.place: result.reason or "" for result in results if result.status is OutcomeStatus.DEAD}
    return [(message.message, reasons[message.place]) for message in bulk.messages if message.place in reasons]


def _with_refused(results: Sequence[Result], refused: Mapping[MessageId, str]) -> list[Result]:
    """Return the results, with messages that can never be dead letters as failed, with both reasons."""

    def reason(result: Result) -> str:
        return Failure(f"{result.reason}; no dead letter: {refused[result.place]}").stored_reason

    return [
        replace(each, status=OutcomeStatus.FAILED, reason=reason(each)) if each.place in refused else each
        for each in results
    ]


def _is_not_known(error: RelatumError) -> bool:
    """Whether the message may exist nevertheless: a node lags or does not answer, or the leader is unreachable."""
    if isinstance(error, OffsetExpired):
        return False
    return may_repeat(error) or (isinstance(error, OffsetNotFound) and not getattr(error, "is_proven", True))


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
    told = (OutcomeStatus.SUCCEEDED, OutcomeStatus.FAILED, OutcomeStatus.DEAD)
    return {f"relatum.bulk.{status.value}": found[status] for status in told}


# --- consuming --------------------------------------------------------------------------------------------------------


class _RolledBack(Exception):
    """Rolls the transaction back: the executor raised (`stored` is None), or another member owns some rows."""

    def __init__(self, results: list[Result], stored: Stored | None) -> None:
        super().__init__()
        self.results = results
        self.stored = stored


class BulkConsumer:
    """Consumes bulks of one type. `take` does all of it in one of `threads`: read bodies, execute, store results."""

    def __init__(
        self,
        shared: "CollectorLoop",
        type: str,  # noqa: A002 - RabbitMQ's word for it
        options: ExecutorOptions,
        executor: Executor,
        *,
        open_reader: Callable[[], StreamReader],
        dead_letters: DeadLetters | None,
    ) -> None:
        self.options = options
        self.counts = TypeCounts()
        # One more than concurrent bulks, since a thread becomes free only a moment after its call has ended.
        self.threads = Threads(options.workers + 1, f"relatum-{type}")
        self._shared = shared
        self._type = type
        self._executor = executor
        self._open_reader = open_reader
        self._dead_letters = dead_letters
        self._readers: list[StreamReader] = []

    def close(self) -> None:
        """Close the readers."""
        while self._readers:
            self._readers.pop().close()

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
                # This member owns them until it ends; then another one takes them over.
                places = ", ".join(str(message.place) for message in bulk.messages[:NAMED_MAX])
                log_failure(
                    logger, error, f"no result was stored for {len(bulk)} messages of type {bulk.type!r}: {places}"
                )
            span.tell(partial(_counts, stored))
        return stored

    def _consume(self, bulk: Bulk, stored: list[Result], span: Span) -> None:
        try:
            self._try(bulk, stored, span)
        except Abandoned:
            raise
        except Exception as error:  # noqa: BLE001 - logged, and the messages' result
            log_failure(logger, error, self._shared.label(f"consuming a bulk of type {self._type!r}") + " failed")
            # Store a failure: otherwise this member would own them for as long as it lives, and never consume them.
            self._forward(bulk)
            failed = Failure.of(error)
            results = [decided(self.options, each, failed, may_die=False) for each in bulk.messages]
            self._finish(bulk, results, stored)

    def _try(self, bulk: Bulk, stored: list[Result], span: Span) -> None:
        """Read missing bodies, store the attempt, call the executor, store the results."""
        unread = [message for message in bulk.messages if message.body is None]
        lost, later = self._load(bulk)
        span.link(lambda: _links_of(unread))
        stored += later
        if not bulk.messages:
            return
        self._forward(bulk)
        # A message with this many attempts and no result probably kills its collectors.
        most = self.options.attempts + CRASHES_MAX
        lost |= {message.place: GIVEN_UP for message in bulk.messages if message.attempts > most}
        hopeless = [message for message in bulk.messages if message.place in lost]
        if hopeless:
            self._finish(bulk, [self._decided(each, lost[each.place]) for each in hopeless], stored)
            bulk._keep({message.place for message in bulk.messages} - lost.keys())
        if bulk.messages:
            self._execute(bulk, stored, span)

    def _decided(self, message: Collected, failure: Failure | None) -> Result:
        return decided(self.options, message, failure, may_die=self._dead_letters is not None)

    # --- bodies that are only in their streams ------------------------------------------------------------------------

    def _load(self, bulk: Bulk) -> tuple[dict[MessageId, Failure], list[Result]]:
        """Read missing bodies from their streams; return failures by place, and results of messages to read later.

        Messages to read later are removed from the bulk, so that the others need not wait for them.
        """
        unread = {message.place: message for message in bulk.messages if message.body is None}
        if not unread:
            return {}, []
        places = list(unread)
        found = self._persist(lambda: self._if_reached(partial(self._read, places), places), "reading messages")
        if found is None:
            bulk._keep({message.place for message in bulk.messages} - unread.keys())
            return {}, []
        lost: dict[MessageId, Failure] = {}
        later: list[Result] = []
        for place, message in unread.items():
            body = found[place]
            if isinstance(body, RelatumError):
                if _is_not_known(body):
                    later.append(Result(place, OutcomeStatus.COLLECTED, retry_in_s=UNREAD_S))
                else:
                    why = "expired" if isinstance(body, NotFound) else "unreadable"
                    lost[place] = Failure(f"{why}: {body}", retry=False)
            elif message.message_id not in (id_of(body), id_of_place(place)):
                lost[place] = Failure("expired: another message is there now", retry=False)
            else:
                message._note(body=body)
        # The bodies count towards `bytes_max` from now on.
        self._shared.loop.call(self._shared.core.loaded, bulk)
        if later:
            bulk._keep({message.place for message in bulk.messages} - {result.place for result in later})
        return lost, later

    def _read(self, places: Sequence[MessageId]) -> dict[MessageId, Found]:
        try:
            reader = self._readers.pop()
        except IndexError:
            reader = self._open_reader()
        try:
            found = dict(zip(places, reader.read_all(places), strict=True))
        except BaseException:
            reader.close()
            raise
        self._readers.append(reader)
        for each in found.values():
            if isinstance(each, AccessRefused):
                # The permission may be granted again: repeat.
                raise each
        return found

    # --- an attempt ---------------------------------------------------------------------------------------------------

    def _forward(self, bulk: Bulk) -> None:
        """Store the attempt, once, and remove messages that another member has taken over from the bulk."""
        shared, places = self._shared, [message.place for message in bulk.messages]
        forwarded = self._persist(partial(shared.store.forward, shared.member, bulk.id, places), "forwarding a bulk")
        bulk._keep(forwarded.places)
        bulk._note_forwarded(forwarded.at)

    def _execute(self, bulk: Bulk, stored: list[Result], span: Span) -> None:
        if self.options.joins_transaction:
            results, committed = self._persist(partial(self.execute_joined, bulk, span), "committing results")
            if committed is not None:
                self._report(bulk, results, committed, stored)
                return
        else:
            bulk._begin_attempt()
            results = self._results(bulk, *self._call(bulk, span))
        self._finish(bulk, results, stored)

    def _call(self, bulk: Bulk, span: Span) -> tuple[Any, BaseException | None]:
        """Call the executor; return its answer, and the exception if it raised one."""
        try:
            return self._executor(bulk), None
        except Abandoned:
            raise
        except BaseException as error:  # noqa: BLE001 - it becomes the messages' result
            span.failed(error)
            return None, error

    def _results(self, bulk: Bulk, answer: Any, raised: BaseException | None) -> list[Result]:
        found = results_of(bulk, answer, raised)
        return [self._decided(message, found[message.place]) for message in bulk.messages]

    def execute_joined(self, bulk: Bulk, span: Span) -> tuple[list[Result], Stored | None]:
        """Call the executor in a transaction; return the results, and which were committed (None: rolled back).

        Exactly-once depends on the statement that stores the results: it must find each row still forwarded, in this
        bulk, by this member. Otherwise everything that the executor wrote is rolled back.
        """
        shared = self._shared
        while bulk.messages:
            try:
                with shared.store.transaction(shared.abandoned) as connection:
                    return self._write_joined(connection, bulk, span)
            except _RolledBack as end:
                if end.stored is None:
                    return end.results, None
                # Another member has taken over some messages: repeat without them.
                bulk._keep(end.stored.places)
            except (DatabaseUnavailable, Abandoned):
                raise
            except Exception as error:  # noqa: BLE001 - the executor left a transaction that fails
                return self._results(bulk, None, error), None
            finally:
                bulk._note(connection=None)
        return [], None

    def _write_joined(self, connection: "sa.Connection", bulk: Bulk, span: Span) -> tuple[list[Result], Stored]:
        bulk._begin_attempt(connection)
        answer, raised = self._call(bulk, span)
        if connection.invalidated or connection.closed:
            raise DatabaseUnavailable("the executor's transaction was lost") from raised
        if not connection.in_transaction():
            raise ConfigurationError(
                "the executor ended the transaction that stores its results: its writes are not atomic with them"
            ) from raised
        results = self._results(bulk, answer, raised)
        if raised is not None:
            raise _RolledBack(results, None)
        if letters := _letters_of(bulk, results):
            results = _with_refused(results, self._burial(letters).run())
        shared = self._shared
        stored = shared.store.finish(shared.member, bulk.id, results, connection=connection)
        if len(stored.places) < len(results):
            raise _RolledBack(results, stored)
        return results, stored

    # --- results ------------------------------------------------------------------------------------------------------

    def _finish(self, bulk: Bulk, results: list[Result], stored: list[Result]) -> None:
        """Publish dead letters, store the results, and append the results that were stored to `stored`."""
        shared, letters = self._shared, _letters_of(bulk, results)
        if letters:
            # First publish: a dead message must be in the dead-letter stream. A crash in between publishes it twice.
            refused = self._bury(letters)
            if refused is None:
                results = [result for result in results if result.status is not OutcomeStatus.DEAD]
            else:
                results = _with_refused(results, refused)
        finish = partial(shared.store.finish, shared.member, bulk.id, results)
        self._report(bulk, results, self._persist(finish, "storing results"), stored)

    def _report(self, bulk: Bulk, results: Sequence[Result], committed: Stored, stored: list[Result]) -> None:
        shared, found = self._shared, [result for result in results if result.place in committed.places]
        stored += found
        if shared.handlers.is_wanted(bulk.type):
            by_place = {message.place: message for message in bulk.taken}
            finals = [result for result in found if result.status.is_final]
            shared.notify_handlers(
                [outcome_of(shared.store.name, by_place[each.place], each, committed.at) for each in finals]
            )

    def _bury(self, letters: Sequence[Letter]) -> Mapping[MessageId, str] | None:
        """Publish dead letters; return those that can never be published, with reasons. None: see `_if_reached`."""
        # One burial for all repetitions: it remembers which letters were confirmed.
        burial, places = self._burial(letters), [message.id for message, _ in letters]
        return self._persist(lambda: self._if_reached(burial.run, places), "publishing dead letters")

    def _burial(self, letters: Sequence[Letter]) -> Burial:
        assert self._dead_letters is not None, "messages are dead only if there is a dead-letter stream"
        return Burial(self._dead_letters, letters)

    def _persist(self, ask: Callable[[], T], what: str) -> T:
        return self._shared.persist(ask, f"{what} of type {self._type!r}")

    def _if_reached(self, ask: Callable[[], T], places: Sequence[MessageId]) -> T | None:
        """Call the broker; return None if this member is cut off from it and has given the messages to others."""
        try:
            return ask()
        except (BrokerUnavailable, ReadTimeout):
            shared = self._shared
            if shared.is_cut_off and shared.store.give_back(shared.member, places):
                return None
            raise
