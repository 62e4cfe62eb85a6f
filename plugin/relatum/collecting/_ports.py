"""What a collector's store is told of messages and streams, and what it answers."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from relatum.ids import MessageId
from relatum.outcomes import OutcomeStatus
from relatum.store import Position


@dataclass(frozen=True, slots=True)
class Entry:
    """A collected message as the store knows it: everything but the body."""

    place: MessageId
    message_id: str
    type: str
    bytes: int
    attempts: int = 0
    due_in_s: float = 0.0
    collected_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class Advance:
    """A followed stream's position moves: everything in [from_offset, to_offset) is collected or passed over."""

    stream: str
    from_offset: int
    to_offset: int
    known_by: Position | None = None
    passed_over: int = 0
    passed_over_types: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Followed:
    """A stream this member follows now."""

    next_offset: int
    known_by: Position | None = None
    is_new: bool = False


@dataclass(frozen=True, slots=True)
class Result:
    """What an attempt came to, to be stored."""

    place: MessageId
    status: OutcomeStatus
    reason: str | None = None
    retry_in_s: float | None = None


@dataclass(frozen=True, slots=True)
class Stored:
    """What a call to the store came to."""

    places: frozenset[MessageId]
    at: datetime
    renamed: Mapping[MessageId, str] = field(default_factory=dict)


class Abandoned(Exception):
    """The collector was closed before a server came back; what was under way is left to another member."""
