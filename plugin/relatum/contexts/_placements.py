"""Partitions, placements and moves, as rows of the database and as operators see them; and plans for an even spread."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from fractions import Fraction
from itertools import islice
from typing import Any, Self, TypeAlias

from relatum.errors import InvalidInput
from relatum.keys import InvalidValue, checked_text


def check_name(name: Any, what: str = "the name of a context or set", *, outcome: str = "nothing was changed") -> str:
    """Check that a name is text of 1 to 1,024 bytes in UTF-8 that PostgreSQL can store; else `InvalidInput`."""
    if not isinstance(name, str):
        raise InvalidInput(f"{what} must be text, not {type(name).__name__}; {outcome}")
    if not name:
        raise InvalidInput(f"{what} must not be empty; {outcome}")
    try:
        return checked_text(name)
    except InvalidValue as error:
        raise InvalidInput(f"{what} cannot be {name[:40]!r}: {error.reason}; {outcome}") from error


def behind(name: str) -> str:
    """The text before all names after this one: names contain no NUL."""
    return name + "\x01"


def in_parts(names: Iterable[str], count: int) -> Iterator[list[str]]:
    """Split names into lists of at most this many."""
    rest = iter(names)
    while part := list(islice(rest, count)):
        yield part


class PlacementState(StrEnum):
    """The state of a placement."""

    OPEN = "open"
    """Messages go to its partition."""
    MOVING = "moving"
    """A move is between its fence and its marker: nothing is published until it has ended."""
    RELEASED = "released"
    """It has ended: the next message with the name gets a new placement."""


class PartitionState(StrEnum):
    """Whether a partition takes new placements."""

    ACTIVE = "active"
    RETIRED = "retired"


class MoveState(StrEnum):
    """The state of a move."""

    FENCING = "fencing"
    """Its contexts wait; the fence's offset is not known yet."""
    FENCED = "fenced"
    """The fence is in the source; the marker in the target is not confirmed yet."""
    SWITCHED = "switched"
    """Ended: its contexts go to the target."""
    ABORTED = "aborted"
    """Ended: its contexts stay in the source."""

    @property
    def is_ended(self) -> bool:
        """Whether the move has ended."""
        return self in (MoveState.SWITCHED, MoveState.ABORTED)


@dataclass(frozen=True, slots=True)
class PartitionRow:
    """A partition as the database stores it.

    Attributes:
        partition_id: Its id in other tables.
        stream: The stream's name.
        binding_key: Its binding key on the super stream's exchange.
        place: Its position among the partitions, from 0.
        state: Whether it takes new placements.
        weight: Its weight for balancing by weight.
        open_sets: The number of placements in it that are not released.
    """

    partition_id: int
    stream: str
    binding_key: str
    place: int
    state: PartitionState = PartitionState.ACTIVE
    weight: float = 1.0
    open_sets: int = 0


Choose: TypeAlias = Callable[[str, Sequence[PartitionRow]], PartitionRow]
"""Chooses the partition of a new name among the active partitions, in order.

If several names are placed together, it is called for each of them, and `open_sets` includes the earlier ones. It may
be called repeatedly for one name, and its choice may be discarded: another publisher may place the name first.
"""


@dataclass(frozen=True, slots=True)
class Placement:
    """The partition of a name, which is a serialization context or an affinity set."""

    name: str
    partition_id: int
    stream: str
    binding_key: str
    epoch: int
    """Ascends with each placement and move of the name."""
    state: PlacementState
    move_id: int | None = None
    """The move it waits for, or None."""
    opened_at: datetime | None = None
    used_at: datetime | None = None
    """When a publisher last reported use; see `PlacementStore.touch`."""


@dataclass(frozen=True, slots=True)
class Move:
    """A move of contexts from one partition to another.

    Attributes:
        move_id: Its id, also in its fence and marker.
        source: The stream its contexts come from.
        target: The stream they move to; the source if the move is aborted.
        source_id: The source's partition id.
        target_id: The target's partition id.
        state: Its state.
        aborting: Whether it is being aborted.
        attempt: A counter, raised when the fence gets its epoch and when the move changes direction.
        contexts: How many contexts it moves.
        fence_epoch: After the fence, messages with an earlier epoch are strays. 0: there is no fence yet.
        epoch: The contexts' epoch after the move.
        scan_from: An offset of the source at or before the first fence.
        target_scan_from: An offset of the target at or before the first marker.
        fence_offset: The offset of the first fence; None while it is not known.
        marker_offset: The offset of the first marker; None until the move has ended.
        holder: The process that performs the move, or None.
        lease_expires_at: When the holder's lease expires.
        started_at: When its contexts began to wait.
        fenced_at: When the fence was found.
        ended_at: When its contexts stopped waiting; None while they wait.
        reason: Why the move was aborted.
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
        """Seconds that its contexts waited; None while they wait."""
        return None if self.ended_at is None else (self.ended_at - self.started_at).total_seconds()

    @property
    def is_attended(self) -> bool:
        """Whether a process holds the lease now, by this machine's clock. Another process may still take over."""
        return self.lease_expires_at is not None and self.lease_expires_at > datetime.now(UTC)


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveStep(Move):
    names: frozenset[str]


@dataclass(frozen=True, slots=True)
class Assignment:
    """The partition of a context.

    Attributes:
        context: The context's name.
        partition: The partition's stream; during a move, the source.
        epoch: The epoch of its messages.
        move_id: The current move, or None.
    """

    context: str
    partition: str
    epoch: int
    move_id: int | None

    @classmethod
    def of(cls, placement: Placement) -> Self:
        """Return the assignment of a placement."""
        return cls(placement.name, placement.stream, placement.epoch, placement.move_id)


@dataclass(frozen=True, slots=True)
class Plan:
    """A plan to move contexts. Its length is the number of contexts that move.

    Attributes:
        moves: The contexts to move, by the stream of their target partition.
    """

    moves: dict[str, tuple[str, ...]]

    def __len__(self) -> int:
        return sum(map(len, self.moves.values()))


@dataclass(frozen=True, slots=True)
class MoveProgress:
    """The progress of a call that moves contexts.

    Attributes:
        move: The move that has just completed a step.
        contexts_done: Contexts of the call whose moves have ended.
        contexts_all: All contexts of the call.
    """

    move: Move
    contexts_done: int
    contexts_all: int


Progress: TypeAlias = Callable[[MoveProgress], None]
"""A progress callback. It is called from the moving threads, one call at a time."""


@dataclass(frozen=True, slots=True)
class ContextsStatus:
    """The partitions and the moves of a super stream with contexts.

    Attributes:
        super_stream: The super stream's name.
        header: The header that names contexts.
        generation: How often placements have changed.
        partitions: The partitions in order, each with its number of contexts; retired ones included.
        moves: The moves that have not ended, oldest first.
    """

    super_stream: str
    header: str
    generation: int
    partitions: tuple[PartitionRow, ...]
    moves: tuple[Move, ...]


def spread(placed: Mapping[str, Sequence[str]], weights: Mapping[str, float]) -> dict[str, tuple[str, ...]]:
    """Choose the fewest contexts that must move to each partition for shares in proportion to the weights.

    Shares are exact within one context. All contexts leave a partition without a weight, or with weight 0.
    """
    quotas = _quotas(placed, weights)
    leaving = [name for stream, names in placed.items() for name in names[quotas.get(stream, 0) :]]
    arriving: dict[str, tuple[str, ...]] = {}
    at = 0
    for stream, quota in quotas.items():
        missing = quota - len(placed.get(stream, ()))
        if missing > 0:
            arriving[stream] = tuple(leaving[at : at + missing])
            at += missing
    return arriving


def _quotas(placed: Mapping[str, Sequence[str]], weights: Mapping[str, float]) -> dict[str, int]:
    total = sum(map(Fraction, weights.values()))
    if total <= 0 or any(weight < 0 for weight in weights.values()):
        raise InvalidInput("weights of partitions must be 0 or more, and at least one must be above 0")
    count = sum(map(len, placed.values()))
    exact = {stream: count * Fraction(weight) / total for stream, weight in weights.items()}
    quotas = {stream: int(share) for stream, share in exact.items()}

    def first_served(stream: str) -> tuple[Fraction, int]:
        # Among equal remainders, prefer the partition with most contexts: fewer have to move.
        return exact[stream] - quotas[stream], len(placed.get(stream, ()))

    for stream in sorted(quotas, key=first_served, reverse=True)[: count - sum(quotas.values())]:
        quotas[stream] += 1
    return quotas
