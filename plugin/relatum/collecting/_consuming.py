"""What a worker does with a bulk, step by step. No I/O: it yields each step, and is sent what came of it."""

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Final

from relatum.collecting._bulk import Bulk, Collected, Failure, Result, Stored, id_of, id_of_place, results_of
from relatum.collecting._collector_options import CRASHES_MAX, ExecutorOptions
from relatum.errors import NotFound, OffsetExpired, OffsetNotFound, RelatumError
from relatum.ids import MessageId
from relatum.outcomes import Outcome, OutcomeStatus
from relatum.reading import Message
from relatum.steps import Request
from relatum.waiting import may_repeat

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


UNREAD_S: Final = 2.0
"""Seconds until a body is read again that is in its stream, as far as anybody knows, and could not be read."""


@dataclass(frozen=True, slots=True)
class Load(Request[Mapping[MessageId, Message | RelatumError] | None]):
    """Read the messages at these places: answer with a mapping to each message, or to the error that says why not.

    None: they were given to other members, for this one does not reach the broker.
    """

    places: Sequence[MessageId]


@dataclass(frozen=True, slots=True)
class Forward(Request[Stored]):
    """Note in the store that these are handed on: answer with its `Stored`."""

    bulk_id: int
    places: Sequence[MessageId]


@dataclass(frozen=True, slots=True)
class Executed:
    """What an executor returned, or raised."""

    answer: Any = None
    raised: BaseException | None = None


@dataclass(frozen=True, slots=True)
class Execute(Request[Executed]):
    """Call the executor: answer with an `Executed`; what it raises is in there."""

    bulk: Bulk


@dataclass(frozen=True, slots=True)
class Join(Request["Joined"]):
    """Call the executor in a transaction that stores its results, too: answer with what `_joined` comes to."""

    bulk: Bulk
    judge: Callable[[Executed], list[Result]]


@dataclass(frozen=True, slots=True)
class Joined:
    """What a joined transaction came to."""

    results: list[Result]
    stored: Stored | None


Letter = tuple[Message, str]
"""A message for the dead-letter stream, and why."""


@dataclass(frozen=True, slots=True)
class Bury(Request[Mapping[MessageId, str] | None]):
    """Publish messages to the dead-letter stream: answer with those it takes at no time, and why; None as in `Load`."""

    letters: Sequence[Letter]


@dataclass(frozen=True, slots=True)
class Finish(Request[Stored]):
    """Store results: answer with the store's `Stored`."""

    bulk_id: int
    results: Sequence[Result]


Step = Load | Forward | Execute | Join | Bury | Finish


@dataclass(frozen=True, slots=True)
class Consumed:
    """What became of a bulk."""

    results: list[Result]
    at: datetime | None


Steps = Generator[Step, Any, Consumed]
"""The steps of a bulk, to be performed one after the other."""


def consume(options: ExecutorOptions, bulk: Bulk, *, may_die: bool) -> Steps:
    """Consume a bulk: read what is not in memory, note the attempt, call the executor, store what came of it."""
    lost, later = yield from _load(bulk)
    if not bulk.messages:
        return Consumed(later, None)
    end = Consumed(later, (yield from _forward(bulk)))
    lost |= {message.place: GIVEN_UP for message in bulk.messages if is_hopeless(options, message)}
    hopeless = [message for message in bulk.messages if message.place in lost]
    if hopeless:
        decided = decide(options, hopeless, lost, may_die=may_die)
        end = _both(end, (yield from _finish(bulk, decided)))
        bulk._keep({message.place for message in bulk.messages} - lost.keys())
    if bulk.messages:
        end = _both(end, (yield from _execute(options, bulk, may_die=may_die)))
    return end


def fail(options: ExecutorOptions, bulk: Bulk, error: Exception) -> Steps:
    """End the attempt of a bulk whose consumption a defect broke off: all its messages failed, for that reason.

    Else they would be with this member for as long as it lives, and nobody would consume them.
    """
    yield from _forward(bulk)
    failed = dict.fromkeys((message.place for message in bulk.messages), Failure.of(error))
    return (yield from _finish(bulk, decide(options, bulk.messages, failed, may_die=False)))


def _forward(bulk: Bulk) -> Generator[Step, Any, datetime]:
    """Note the attempt, once; only what is still this member's is left to be consumed."""
    forwarded = yield from Forward(bulk.id, [message.place for message in bulk.messages])
    bulk._keep(forwarded.places)
    bulk._note_forwarded(forwarded.at)
    return forwarded.at


def _load(bulk: Bulk) -> Generator[Step, Any, tuple[dict[MessageId, Failure], list[Result]]]:
    """Read bodies that were left in their streams; gives why some cannot be read, and what is to be read later.

    What cannot be read yet is taken off the bulk: neither it nor what lies beside it waits for the other.
    """
    unread = {message.place: message for message in bulk.messages if message.body is None}
    if not unread:
        return {}, []
    found = yield from Load(list(unread))
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
                lost[place] = Failure(
                    f"{'expired' if isinstance(body, NotFound) else 'unreadable'}: {body}", retry=False
                )
        elif message.message_id not in (id_of(body), id_of_place(place)):
            lost[place] = Failure("expired: another message lies there now", retry=False)
        else:
            message._note_read(body)
    if later:
        bulk._keep({message.place for message in bulk.messages} - {result.place for result in later})
    return lost, later


def is_not_known(error: RelatumError) -> bool:
    """Whether an error says nothing about a message: a node that is behind does not have it yet, or no longer answers.

    A stream whose leader cannot be asked may hold what this node does not.
    """
    if isinstance(error, OffsetExpired):
        return False
    return may_repeat(error) or (isinstance(error, OffsetNotFound) and not getattr(error, "is_proven", True))


def _execute(options: ExecutorOptions, bulk: Bulk, *, may_die: bool) -> Steps:
    def judge(executed: Executed) -> list[Result]:
        results = results_of(bulk, executed.answer, executed.raised)
        return decide(options, bulk.messages, results, may_die=may_die)

    bulk._begin_attempt()
    if not options.joins_transaction:
        return (yield from _finish(bulk, judge((yield from Execute(bulk)))))
    joined = yield from Join(bulk, judge)
    if joined.stored is None:
        return (yield from _finish(bulk, joined.results))
    return _consumed(joined.results, joined.stored)


def letters_of(messages: Sequence[Collected], results: Sequence[Result]) -> list[Letter]:
    """The messages that go to the dead-letter stream, each with its reason."""
    reasons = {result.place: result.reason or "" for result in results if result.status is OutcomeStatus.DEAD}
    return [(message.message, reasons[message.place]) for message in messages if message.place in reasons]


def with_refused(results: Sequence[Result], refused: Mapping[MessageId, str]) -> list[Result]:
    """Results, where the dead-letter stream took some messages at no time: those failed, and both reasons are kept."""
    return [
        result
        if result.place not in refused
        else replace(
            result,
            status=OutcomeStatus.FAILED,
            reason=Failure(f"{result.reason}; no dead letter: {refused[result.place]}").stored_reason,
        )
        for result in results
    ]


def _finish(bulk: Bulk, results: list[Result]) -> Steps:
    letters = letters_of(bulk.messages, results)
    if letters:
        # First: a message that is called dead must be there. Killed between the two, it is published again.
        refused = yield from Bury(letters)
        if refused is None:
            results = [result for result in results if result.status is not OutcomeStatus.DEAD]
        else:
            results = with_refused(results, refused)
    stored = yield from Finish(bulk.id, results)
    return _consumed(results, stored)


def _consumed(results: list[Result], stored: Stored) -> Consumed:
    return Consumed([result for result in results if result.place in stored.places], stored.at)


def _both(one: Consumed, other: Consumed) -> Consumed:
    return Consumed(one.results + other.results, other.at)
