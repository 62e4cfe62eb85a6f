"""What the database knows of a super stream's placements: partitions, placements, moves."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any, TypeAlias

from relatum.errors import InvalidInput
from relatum.keys import InvalidValue, checked_text
from relatum.superstreams import Partition


def check_name(name: Any, what: str = "the name of a context or set", *, outcome: str = "nothing was changed") -> str:
    """The name itself, which is text of 1 to 1,024 bytes in UTF-8 that PostgreSQL stores; else `InvalidInput`."""
    if not isinstance(name, str):
        raise InvalidInput(f"{what} is text, not {type(name).__name__}; {outcome}")
    if not name:
        raise InvalidInput(f"{what} is not empty; {outcome}")
    try:
        return checked_text(name)
    except InvalidValue as error:
        raise InvalidInput(f"{what} cannot be {name[:40]!r}: {error.reason}; {outcome}") from error


class PlacementState(StrEnum):
    """What a placement may be relied on for."""

    OPEN = "open"
    """Messages go to its partition."""
    MOVING = "moving"
    """A move is between its fence and its marker: nothing is published until it has ended."""
    RELEASED = "released"
    """It is over: the name's next message is placed anew."""


class PartitionState(StrEnum):
    """Whether a partition takes new placements."""

    ACTIVE = "active"
    RETIRED = "retired"


class MoveState(StrEnum):
    """How far a move is."""

    FENCING = "fencing"
    """Its contexts wait; the fence's offset is not known yet."""
    FENCED = "fenced"
    """The fence is in the source; the marker is not known to be in the target yet."""
    SWITCHED = "switched"
    """Ended: its contexts go to the target."""
    ABORTED = "aborted"
    """Ended: its contexts go to the source again."""

    @property
    def is_ended(self) -> bool:
        """Whether nothing is left to do."""
        return self in (MoveState.SWITCHED, MoveState.ABORTED)


@dataclass(frozen=True, slots=True)
class PartitionRow:
    """A partition as the database knows it.

    Attributes:
        partition_id: What other rows name it by.
        stream: The stream's name.
        binding_key: The key it is bound with to the super stream's exchange.
        place: Its place among the partitions, from 0.
        state: Whether it takes new placements.
        weight: Its share where sets are spread by weight.
        open_sets: Placements in it that are not released.
    """

    partition_id: int
    stream: str
    binding_key: str
    place: int
    state: PartitionState = PartitionState.ACTIVE
    weight: float = 1.0
    open_sets: int = 0


PartitionLike: TypeAlias = Partition | PartitionRow
"""A partition as the broker has it, or as the database knows it."""

Choose: TypeAlias = Callable[[str, Sequence[PartitionRow]], PartitionRow]
"""Chooses the partition of a name that is placed for the first time, among the active ones in their places' order.

Names that are placed together are asked for one by one, with the open sets counted on from one to the next. It may be
called again for the same name, and in vain: another publisher may place it first.
"""


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the messages of a name go, a serialization context's or an affinity set's."""

    name: str
    partition_id: int
    stream: str
    binding_key: str
    epoch: int
    """Which placement this is; each later one of the name has a higher one, moves included."""
    state: PlacementState
    move_id: int | None = None
    """The move it waits for; None where none."""
    generation: int = 0
    """The super stream's generation when it last changed; 0 where it never did."""
    opened_at: datetime | None = None
    used_at: datetime | None = None
    """When a publisher last said that it is in use; see `PlacementStore.touch`."""
    released_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class Move:
    """A move of contexts from one partition to another.

    Attributes:
        move_id: Its id, also in its fence and marker.
        source: The stream its contexts come from.
        target: The stream they go to; the source where it is aborted.
        source_id: The source's partition id.
        target_id: The target's partition id.
        state: How far it is.
        aborting: Whether it goes back to the source.
        attempt: Raised when its fence gets its epoch, and when the other way is taken.
        contexts: How many contexts it moves.
        fence_epoch: Behind its fence, what was placed under an earlier epoch is a stray. 0: there is none yet.
        epoch: The contexts' epoch when it has ended.
        scan_from: An offset of the source at or below its first fence.
        target_scan_from: An offset of the target at or below its first marker.
        fence_offset: The offset of its first fence; None while that is not known.
        marker_offset: The offset of its first marker; None until it has ended.
        holder: The process that performs it; None for none.
        lease_expires_at: Until when that is believed.
        started_at: When its contexts began to wait.
        fenced_at: When the fence was found.
        ended_at: When its contexts went on; None while they wait.
        reason: Why it was aborted.
    """

    move_id: int
    source: str
    target: str
    source_id: int
    target_id: int
    state: MoveState
    aborting: bool
    attempt: int
    contexts: int
    fence_epoch: int
    epoch: int
    scan_from: int
    target_scan_from: int
    fence_offset: int | None
    marker_offset: int | None
    holder: str | None
    lease_expires_at: datetime | None
    started_at: datetime
    fenced_at: datetime | None
    ended_at: datetime | None
    reason: str | None

    @property
    def pause_s(self) -> float | None:
        """Seconds its contexts waited; None while they do."""
        return None if self.ended_at is None else (self.ended_at - self.started_at).total_seconds()

    @property
    def is_attended(self) -> bool:
        """Whether a process performs it now, by the clock of this machine. Another may take it over all the same."""
        return self.lease_expires_at is not None and self.lease_expires_at > datetime.now(UTC)
