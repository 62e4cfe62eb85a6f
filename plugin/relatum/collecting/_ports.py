"""What a collector's store is told of messages and streams, and what it answers."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from relatum.ids import MessageId
from relatum.outcomes import OutcomeStatus
from relatum.store import Position


@dataclass(frozen=True, slots=True)
class Entry:
    """A collected message as the store knows it: everything but the body.

    Attributes:
        place: Where the message lies; that is its identity.
        message_id: The property `message_id`, or "stream:offset".
        type: The type its executor is chosen by.
        bytes: The message's bytes, for the sizes of bulks.
        attempts: How often an executor was handed it.
        due_in_s: Seconds until its next attempt; 0 for at once.
        collected_at: When it was collected; None before it is.
    """

    place: MessageId
    message_id: str
    type: str
    bytes: int
    attempts: int = 0
    due_in_s: float = 0.0
    collected_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class Advance:
    """A followed stream's position moves: everything in [from_offset, to_offset) is collected or passed over.

    Attributes:
        stream: The stream's name.
        from_offset: Where the position must be.
        to_offset: Where it is then: the next offset to be read.
        known_by: What lies at the last offset read, to know the stream again.
        passed_over: Messages whose type has no executor.
        passed_over_types: The types of those passed over.
    """

    stream: str
    from_offset: int
    to_offset: int
    known_by: Position | None = None
    passed_over: int = 0
    passed_over_types: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Followed:
    """A stream this member follows now.

    Attributes:
        next_offset: The position: where to read on.
        known_by: What lay at the last offset read; None where none was.
        is_new: Whether it was never followed before, and so begins where it was told to.
    """

    next_offset: int
    known_by: Position | None = None
    is_new: bool = False


@dataclass(frozen=True, slots=True)
class Result:
    """What an attempt came to, to be stored.

    Attributes:
        place: The message's place.
        status: SUCCEEDED, FAILED or DEAD; COLLECTED where it is to be tried again.
        reason: Why it failed, at most 1,000 characters; None where it succeeded.
        retry_in_s: With COLLECTED: seconds until the next attempt.
    """

    place: MessageId
    status: OutcomeStatus
    reason: str | None = None
    retry_in_s: float | None = None


@dataclass(frozen=True, slots=True)
class Stored:
    """What a call to the store came to.

    Attributes:
        places: Those of the places asked for that are this member's and are now as asked. What is missing belongs to
            another member, or was finished before.
        at: The store's time, aware: what it wrote as `collected_at`, `forwarded_at`, `finished_at`.
        renamed: With `add`: the names of messages whose own it cannot hold.
    """

    places: frozenset[MessageId]
    at: datetime
    renamed: Mapping[MessageId, str] = field(default_factory=dict)


class Abandoned(Exception):
    """The collector was closed before a server came back; what was under way is left to another member."""
