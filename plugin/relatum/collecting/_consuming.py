"""What is done with a bulk, step by step, and what is decided of its messages. No I/O: a worker does the steps."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, Final

from relatum.collecting._bulk import Bulk, Collected, Failure, id_of, id_of_place, results_of
from relatum.collecting._collector_core import Result, Stored
from relatum.collecting._collector_options import CRASHES_MAX, ExecutorOptions
from relatum.errors import NotFound, OffsetExpired, OffsetNotFound, RelatumError
from relatum.ids import MessageId
from relatum.outcomes import Outcome, OutcomeStatus
from relatum.reading import Message
from relatum.waiting import may_repeat

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


Letter = tuple[Message, str]
"""A message for the dead-letter stream, and why."""


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


@dataclass(frozen=True, slots=True)
class Consumed:
    """What became of a bulk: what was stored of its messages, and the store's time."""

    results: list[Result]
    at: datetime | None = None

    def __add__(self, other: "Consumed") -> "Consumed":
        return Consumed(self.results + other.results, other.at)


Answered = tuple[Any, BaseException | None]
"""What an executor returned, and what it raised instead."""

Judge = Callable[[Answered], list[Result]]
"""Decides what to store of a bulk's messages by what its executor came to."""


class BulkConsumer(ABC):
    """Consumes bulks of a type."""

    def __init__(self, options: ExecutorOptions, *, may_die: bool) -> None:
        self.options = options
        self._may_die = may_die

    # --- the steps ------------------------------------------------------------------------------------------------

    @abstractmethod
    def load(self, places: Sequence[MessageId]) -> Mapping[MessageId, Message | RelatumError] | None:
        """Read messages, or why they cannot be read; None where others have them, since this member is cut off."""

    @abstractmethod
    def forward(self, bulk: Bulk) -> Stored:
        """Note in the store that an executor is handed these messages now."""

    @abstractmethod
    def execute(self, bulk: Bulk) -> Answered:
        """Call the executor."""

    @abstractmethod
    def join(self, bulk: Bulk, judge: Judge) -> tuple[list[Result], Stored | None]:
        """Call the executor in a transaction that stores its results, too; None where all of it was rolled back."""

    @abstractmethod
    def bury(self, letters: Sequence[Letter]) -> Mapping[MessageId, str] | None:
        """Publish to the dead-letter stream; gives those it takes at no time, and why. None as in `load`."""

    @abstractmethod
    def finish(self, bulk: Bulk, results: Sequence[Result]) -> Stored:
        """Store results."""

    # --- in their order -------------------------------------------------------------------------------------------

    def consume(self, bulk: Bulk) -> Consumed:
        """Read what is not in memory, note the attempt, call the executor, store what came of it."""
        lost, later = self._load(bulk)
        if not bulk.messages:
            return Consumed(later)
        end = Consumed(later, self._forward(bulk))
        lost |= {message.place: GIVEN_UP for message in bulk.messages if is_hopeless(self.options, message)}
        hopeless = [message for message in bulk.messages if message.place in lost]
        if hopeless:
            end += self._finish(bulk, decide(self.options, hopeless, lost, may_die=self._may_die))
            bulk._keep({message.place for message in bulk.messages} - lost.keys())
        return end + self._execute(bulk) if bulk.messages else end

    def fail(self, bulk: Bulk, error: Exception) -> Consumed:
        """End the attempt of a bulk whose consumption a defect broke off: all its messages failed, for that reason.

        Else they would be with this member for as long as it lives, and nobody would consume them.
        """
        self._forward(bulk)
        failed = dict.fromkeys((message.place for message in bulk.messages), Failure.of(error))
        return self._finish(bulk, decide(self.options, bulk.messages, failed, may_die=False))

    def _forward(self, bulk: Bulk) -> datetime:
        """Note the attempt, once; only what is still this member's is left to be consumed."""
        forwarded = self.forward(bulk)
        bulk._keep(forwarded.places)
        bulk._note_forwarded(forwarded.at)
        return forwarded.at

    def _load(self, bulk: Bulk) -> tuple[dict[MessageId, Failure], list[Result]]:
        """Read bodies that were left in their streams; gives why some cannot be read, and what is to be read later.

        What cannot be read yet is taken off the bulk: neither it nor what lies beside it waits for the other.
        """
        unread = {message.place: message for message in bulk.messages if message.body is None}
        if not unread:
            return {}, []
        found = self.load(list(unread))
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
        if later:
            bulk._keep({message.place for message in bulk.messages} - {result.place for result in later})
        return lost, later

    def _execute(self, bulk: Bulk) -> Consumed:
        def judge(answered: Answered) -> list[Result]:
            return decide(self.options, bulk.messages, results_of(bulk, *answered), may_die=self._may_die)

        bulk._begin_attempt()
        if not self.options.joins_transaction:
            return self._finish(bulk, judge(self.execute(bulk)))
        results, stored = self.join(bulk, judge)
        return self._finish(bulk, results) if stored is None else _consumed(results, stored)

    def _finish(self, bulk: Bulk, results: list[Result]) -> Consumed:
        letters = letters_of(bulk.messages, results)
        if letters:
            # First: a message that is called dead must be there. Killed between the two, it is published again.
            refused = self.bury(letters)
            if refused is None:
                results = [result for result in results if result.status is not OutcomeStatus.DEAD]
            else:
                results = with_refused(results, refused)
        return _consumed(results, self.finish(bulk, results))


def _consumed(results: list[Result], stored: Stored) -> Consumed:
    return Consumed([result for result in results if result.place in stored.places], stored.at)


def is_not_known(error: RelatumError) -> bool:
    """Whether an error says nothing about a message: a node that is behind does not have it yet, or no longer answers.

    A stream whose leader cannot be asked may hold what this node does not.
    """
    if isinstance(error, OffsetExpired):
        return False
    return may_repeat(error) or (isinstance(error, OffsetNotFound) and not getattr(error, "is_proven", True))
