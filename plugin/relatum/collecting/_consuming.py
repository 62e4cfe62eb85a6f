"""What is done with a bulk, in a thread of its type's, and what is decided of its messages."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Final, TypeVar

from relatum import otel
from relatum.collecting._bulk import Bulk, Collected, Executor, Failure, id_of, id_of_place, results_of
from relatum.collecting._bulks import CRASHES_MAX, ExecutorOptions
from relatum.collecting._collector_core import Abandoned, Result, Stored
from relatum.collecting._handlers import inside, logger
from relatum.collecting._joined import Answered, JoinedRun, Letter, call, letters_of, with_refused
from relatum.errors import (
    AccessRefused,
    BrokerUnavailable,
    NotFound,
    OffsetExpired,
    OffsetNotFound,
    ReadTimeout,
    RelatumError,
)
from relatum.ids import MessageId
from relatum.otel import Description, Link, Part, Span
from relatum.outcomes import Outcome, OutcomeStatus
from relatum.publishing import Burial, DeadLetters
from relatum.reading import Result as Found
from relatum.reading import StreamReader
from relatum.waiting import Threads, log_failure, may_repeat

if TYPE_CHECKING:
    from relatum.collecting._collector_loop import CollectorLoop

NAMED_MAX: Final = 10
"""Messages that are named in one line of the log."""

log_defect = partial(log_failure, logger)
"""Logs what ended some work: `log_defect(error, what)`."""

T = TypeVar("T")

UNREAD_S: Final = 2.0
"""Seconds until a body is read again that is in its stream, as far as anybody knows, and could not be read."""

GIVEN_UP: Final = Failure("the collector died each time this message was consumed", retry=False)


def decide(
    options: ExecutorOptions,
    messages: Sequence[Collected],
    results: Mapping[MessageId, Failure | None],
    *,
    may_die: bool,
) -> list[Result]:
    """What to store of each message of a bulk."""
    return [_decided(options, message, results[message.place], may_die=may_die) for message in messages]


def _decided(options: ExecutorOptions, message: Collected, failure: Failure | None, *, may_die: bool) -> Result:
    if failure is None:
        return Result(message.place, OutcomeStatus.SUCCEEDED)
    if failure.retry and message.attempts < options.attempts:
        backoff_s = options.backoff_after(message.attempts)
        return Result(message.place, OutcomeStatus.COLLECTED, failure.stored_reason, backoff_s)
    # What retention took has no body that could be published.
    status = OutcomeStatus.DEAD if may_die and message.body is not None else OutcomeStatus.FAILED
    return Result(message.place, status, failure.stored_reason)


def is_hopeless(options: ExecutorOptions, message: Collected) -> bool:
    """Whether a message was handed on so often without any result that it must be what kills its collectors."""
    return message.attempts > options.attempts + CRASHES_MAX


def outcome_of(collector: str, message: Collected, result: Result | None = None, at: datetime | None = None) -> Outcome:
    """What handlers are told of a message: after an attempt, or, without a result, when it was stored."""
    status = OutcomeStatus.COLLECTED if result is None else result.status
    return Outcome(
        message.message_id,
        status,
        collector,
        message.type,
        message.place.stream,
        message.place.offset,
        message.attempts,
        None if result is None else result.reason,
        message.collected_at,
        message.forwarded_at,
        at if status.is_final else None,
    )


def _described(collector: str, bulk: Bulk) -> Description:
    """A bulk as a span of its consumption tells of it."""
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


def _links_of(messages: Iterable[Collected]) -> list[Link]:
    return otel.links_of(message.body for message in messages if message.body is not None)


def _counts(results: Sequence[Result]) -> dict[str, int]:
    """What became of a bulk's messages, as its span tells of it."""
    found = Counter(result.status for result in results)
    told = (OutcomeStatus.SUCCEEDED, OutcomeStatus.FAILED, OutcomeStatus.DEAD)
    return {f"relatum.bulk.{status.value}": found[status] for status in told}


class BulkConsumer:
    """Consumes bulks of a type: `take` is one call, in one of `threads`, from reading a bulk to storing its results."""

    def __init__(
        self,
        shared: "CollectorLoop",
        type: str,  # noqa: A002 - RabbitMQ's word for it
        options: ExecutorOptions,
        executor: Executor,
        *,
        open_reader: Callable[[], StreamReader] | None,
        dead_letters: DeadLetters | None,
    ) -> None:
        self.options = options
        # One more than bulks are consumed at once: a thread is free a moment after its call has ended.
        self.threads = Threads(options.workers + 1, f"relatum-{type}")
        self._shared = shared
        self._type = type
        self._executor = executor
        self._open_reader = open_reader
        self._dead_letters = dead_letters
        self._readers: list[StreamReader] = []

    def close(self) -> None:
        """Close what it reads by."""
        while self._readers:
            self._readers.pop().close()

    def take(self, bulk: Bulk) -> list[Result]:
        """Consume a bulk; gives what was stored of its messages. Handlers are told of what has become final."""
        shared, stored = self._shared, list[Result]()
        span_of = otel.span(Part.COLLECTOR, partial(_described, shared.store.name, bulk))
        with inside(shared), span_of as span:
            try:
                self._consume(bulk, stored, span)
            except Abandoned:
                # It stays forwarded in the store: another member takes it over.
                pass
            except Exception as error:  # noqa: BLE001 - one bulk must not end what consumes all others
                # They are with this member until it ends, then another member takes them over.
                places = ", ".join(str(message.place) for message in bulk.messages[:NAMED_MAX])
                log_defect(error, f"{len(bulk)} messages of type {bulk.type!r} without a stored result: {places}")
            span.tell(partial(_counts, stored))
        return stored

    def _consume(self, bulk: Bulk, stored: list[Result], span: Span) -> None:
        try:
            self._try(bulk, stored, span)
        except Abandoned:
            raise
        except Exception as error:  # noqa: BLE001 - logged, and the messages' result
            log_defect(error, self._shared.who(f"a bulk of type {self._type!r}") + " not consumed")
            # Else they would be with this member for as long as it lives, and nobody would consume them.
            self._forward(bulk)
            failed = dict.fromkeys((message.place for message in bulk.messages), Failure.of(error))
            self._finish(bulk, decide(self.options, bulk.messages, failed, may_die=False), stored)

    # --- in their order -----------------------------------------------------------------------------------------------

    def _try(self, bulk: Bulk, stored: list[Result], span: Span) -> None:
        """Read what is not in memory, note the attempt, call the executor, store what came of it."""
        unread = [message for message in bulk.messages if message.body is None]
        lost, later = self._load(bulk)
        span.link(lambda: _links_of(unread))
        stored += later
        if not bulk.messages:
            return
        self._forward(bulk)
        lost |= {message.place: GIVEN_UP for message in bulk.messages if is_hopeless(self.options, message)}
        hopeless = [message for message in bulk.messages if message.place in lost]
        if hopeless:
            self._finish(bulk, decide(self.options, hopeless, lost, may_die=self._may_die), stored)
            bulk._keep({message.place for message in bulk.messages} - lost.keys())
        if bulk.messages:
            self._execute(bulk, stored, span)

    @property
    def _may_die(self) -> bool:
        return self._dead_letters is not None

    def _load(self, bulk: Bulk) -> tuple[dict[MessageId, Failure], list[Result]]:
        """Read bodies that were left in their streams; gives why some cannot be read, and what is to be read later.

        What cannot be read yet is taken off the bulk: neither it nor what lies beside it waits for the other.
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
                if is_not_known(body):
                    later.append(Result(place, OutcomeStatus.COLLECTED, retry_in_s=UNREAD_S))
                else:
                    why = "expired" if isinstance(body, NotFound) else "unreadable"
                    lost[place] = Failure(f"{why}: {body}", retry=False)
            elif message.message_id not in (id_of(body), id_of_place(place)):
                lost[place] = Failure("expired: another message lies there now", retry=False)
            else:
                message._note(body=body)
        # They count as what is held from now on.
        self._shared.loop.call(self._shared.core.loaded, bulk)
        if later:
            bulk._keep({message.place for message in bulk.messages} - {result.place for result in later})
        return lost, later

    def _read(self, places: Sequence[MessageId]) -> dict[MessageId, Found]:
        assert self._open_reader is not None, "bodies are left in streams only where there is a broker"
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
                # That passes, or somebody sees to it: nothing is lost.
                raise each
        return found

    def _forward(self, bulk: Bulk) -> None:
        """Note the attempt, once; only what is still this member's is left to be consumed."""
        shared, places = self._shared, [message.place for message in bulk.messages]
        forwarded = self._persist(partial(shared.store.forward, shared.member, bulk.id, places), "forwarding a bulk")
        bulk._keep(forwarded.places)
        bulk._note_forwarded(forwarded.at)

    def _execute(self, bulk: Bulk, stored: list[Result], span: Span) -> None:
        def judge(answered: Answered) -> list[Result]:
            return decide(self.options, bulk.messages, results_of(bulk, *answered), may_die=self._may_die)

        shared = self._shared
        bulk._begin_attempt()
        if not self.options.joins_transaction:
            self._finish(bulk, judge(call(self._executor, bulk, span)), stored)
            return
        joined = JoinedRun(
            shared.store, shared.member, bulk, judge, self._executor, lambda each: self._burial(each).run(), span
        )
        results, committed = self._persist(joined.run, "committing results")
        if committed is None:
            self._finish(bulk, results, stored)
        else:
            self._tell(bulk, results, committed, stored)

    def _finish(self, bulk: Bulk, results: list[Result], stored: list[Result]) -> None:
        """Store results, and add those that were to `stored`."""
        shared, letters = self._shared, letters_of(bulk, results)
        if letters:
            # First: a message that is called dead must be there. Killed between the two, it is published again.
            refused = self._bury(letters)
            if refused is None:
                results = [result for result in results if result.status is not OutcomeStatus.DEAD]
            else:
                results = with_refused(results, refused)
        finish = partial(shared.store.finish, shared.member, bulk.id, results)
        self._tell(bulk, results, self._persist(finish, "storing results"), stored)

    def _tell(self, bulk: Bulk, results: Sequence[Result], committed: Stored, stored: list[Result]) -> None:
        shared, found = self._shared, [result for result in results if result.place in committed.places]
        stored += found
        if shared.handlers.is_wanted(bulk.type):
            by_place = {message.place: message for message in bulk.taken}
            finals = [result for result in found if result.status.is_final]
            shared.tell([outcome_of(shared.store.name, by_place[each.place], each, committed.at) for each in finals])

    def _bury(self, letters: Sequence[Letter]) -> Mapping[MessageId, str] | None:
        """Publish to the dead-letter stream; gives those it takes at no time, and why. None as in `_if_reached`."""
        # One burial for all tries: it knows which letters were confirmed.
        burial, places = self._burial(letters), [message.id for message, _ in letters]
        return self._persist(lambda: self._if_reached(burial.run, places), "publishing dead letters")

    def _burial(self, letters: Sequence[Letter]) -> Burial:
        assert self._dead_letters is not None, "messages are dead only where there is a stream for them"
        return Burial(self._dead_letters, letters)

    def _persist(self, ask: Callable[[], T], what: str) -> T:
        return self._shared.persist(ask, f"{what} of type {self._type!r}")

    def _if_reached(self, ask: Callable[[], T], places: Sequence[MessageId]) -> T | None:
        """Ask the broker; None where this member is cut off from it, and others have these messages instead."""
        try:
            return ask()
        except (BrokerUnavailable, ReadTimeout):
            shared = self._shared
            if shared.is_cut_off and shared.store.give_back(shared.member, places):
                return None
            raise


def is_not_known(error: RelatumError) -> bool:
    """Whether an error says nothing about a message: a node that is behind does not have it yet, or no longer answers.

    A stream whose leader cannot be asked may hold what this node does not.
    """
    if isinstance(error, OffsetExpired):
        return False
    return may_repeat(error) or (isinstance(error, OffsetNotFound) and not getattr(error, "is_proven", True))
