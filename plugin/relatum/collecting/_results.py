"""From what an executor answered to what is stored: succeeded, to be tried again, failed, or dead. No I/O."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Final

from relatum.collecting._bulk import Collected, Failure
from relatum.collecting._collector_options import CRASHES_MAX, ExecutorOptions
from relatum.collecting._ports import Result
from relatum.ids import MessageId
from relatum.outcomes import Outcome, OutcomeStatus

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
