"""What became of a message: its status, and the facts around it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from enum import Enum
from typing import Final


class OutcomeStatus(Enum):
    """How far a message has come, least first."""

    UNKNOWN = "unknown"
    """No collector has taken it: it may come later, or its type has no executor."""
    COLLECTED = "collected"
    """It is stored that it has to be consumed; with `attempts`, it waits for the next one."""
    FORWARDED = "forwarded"
    """An executor was handed it."""
    SUCCEEDED = "succeeded"
    """Its executor succeeded. Final."""
    FAILED = "failed"
    """Its executor failed as often as it may, or retention dropped it; there is no dead-letter stream. Final."""
    DEAD = "dead"
    """As failed, and it lies in the dead-letter stream. Final."""

    @property
    def is_final(self) -> bool:
        """Whether it never changes any more."""
        return self in FINAL


FINAL: Final = frozenset({OutcomeStatus.SUCCEEDED, OutcomeStatus.FAILED, OutcomeStatus.DEAD})


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a message.

    Attributes:
        message_id: The message's property `message_id`; "stream:offset" where it has none.
        status: How far it has come.
        collector: The collector's name; None while unknown, as are those below.
        type: The type its executor was chosen by.
        stream: Where it lies.
        offset: Where it lies.
        attempts: How often an executor was handed it.
        reason: Why the last attempt failed; None where none did.
        collected_at: When it was collected.
        forwarded_at: When an executor was last handed it.
        finished_at: When its status became final.
        others: The outcomes of further messages with the same id, where a publisher repeated itself.
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
        """Whether it never changes any more."""
        return self.status in FINAL


def unknown(message_id: str) -> Outcome:
    """The outcome of a message nobody has collected."""
    return Outcome(message_id, OutcomeStatus.UNKNOWN)


_LEAST_FIRST: Final = (
    OutcomeStatus.UNKNOWN,
    OutcomeStatus.COLLECTED,
    OutcomeStatus.FORWARDED,
    OutcomeStatus.FAILED,
    OutcomeStatus.DEAD,
    OutcomeStatus.SUCCEEDED,
)


def least_advanced(outcomes: Sequence[Outcome]) -> Outcome:
    """Of the outcomes of messages with one id, the least advanced (the earliest of equals), with the others.

    One that failed comes before one that succeeded: where the latter is given, all have.
    """
    ranked = sorted(outcomes, key=lambda outcome: (_LEAST_FIRST.index(outcome.status), outcome.stream, outcome.offset))
    return replace(ranked[0], others=tuple(ranked[1:]))
