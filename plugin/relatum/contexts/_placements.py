"""Partitions, placements and moves: the rows of the database, the results for operators, and plans for rebalancing."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from fractions import Fraction
from itertools import chain, islice
from typing import Any, Self, TypeAlias

from relatum.common.checks import checked_names
from relatum.errors import InvalidInput
from relatum.keys import InvalidValue, checked_text


def check_name(name: Any, what: str = "the name of a context or set", *, outcome: str = "nothing was changed") -> str:
    """Return a name that is text of 1 to 1,024 UTF-8 bytes and that PostgreSQL can store, or raise `InvalidInput`."""
    if not isinstance(name, str):
        raise InvalidInput(f"{what} must be text, not {type(name).__name__}; {outcome}")
    if not name:
        raise InvalidInput(f"{what} must not be empty; {outcome}")
    try:
        return checked_text(name)
    except InvalidValue as error:
        raise InvalidInput(f"{what} cannot be {name[:40]!r}: {error.reason}; {outcome}") from error


def checked_contexts(argument: str, names: Any) -> tuple[str, ...]:
    """Return the names of contexts or sets, which are longer than a stream's, or raise `InvalidInput`."""
    return checked_names(argument, names, check=lambda argument, name: check_name(name, f"a name in {argument}="))


def next_name(name: str) -> str:
    """Return the lowest possible name above this one: names contain no NUL."""
    return name + "\x01"


def chunked(names: Iterable[str], count: int) -> Iterator[list[str]]:
    """Split names into lists of at most `count`."""
    rest = iter(names)
    while part := list(islice(rest, count)):
        yield part


class PlacementState(StrEnum):
    """The state of a placement."""

    OPEN = "open"
    """Messages of the name go to the placement's partition."""
    MOVING = "moving"
    """A move has begun: routers publish no message of the name until the move has ended."""
    RELEASED = "released"
    """The placement has ended: the next message of the name gets a new one."""


class PartitionState(StrEnum):
    """Whether a partition takes new placements."""

    ACTIVE = "active"
    RETIRED = "retired"


class MoveState(StrEnum):
    """The state of a move."""

    FENCING = "fencing"
    """The contexts wait; the fence's offset is not known yet."""
    FENCED = "fenced"
    """The fence is in the source; the marker in the target is not confirmed yet."""
    SWITCHED = "switched"
    """Ended: the contexts are in the target."""
    ABORTED = "aborted"
    """Ended: the contexts stay in the source."""

    @property
    def is_ended(self) -> bool:
        """Whether the move has ended."""
        return self in (MoveState.SWITCHED, MoveState.ABORTED)


@dataclass(frozen=True, slots=True)
class PartitionRow:
    """A partition as the database stores it.

    Attributes:
        partition_id: The partition's id in other tables.
        stream: The stream's name.
        binding_key: The binding key on the super stream's exchange.
        place: The position among the partitions, from 0.
        state: Whether the partition takes new placements.
        weight: The weight for the balance rule "weighted", and for plans.
        open_sets: The number of placements in the partition that are not released.
    """

    partition_id: int
    stream: str
    binding_key: str
    place: int
    state: PartitionState = PartitionState.ACTIVE
    weight: float = 1.0
    open_sets: int = 0


Choose: TypeAlias = Callable[[str, Sequence[PartitionRow]], PartitionRow]
"""Chooses the partition of a new name from the active partitions, which are in order.

If several names are placed together, each name is one call, and `open_sets` includes the names of earlier calls. A name
may take several calls, and a choice may be discarded: another publisher may place the name first.
"""


@dataclass(frozen=True, slots=True)
class Placement:
    """The partition assigned to a name, which is that of a serialization context or an affinity set."""

    name: str
    partition_id: int
    stream: str
    binding_key: str
    epoch: int
    """Rises with each placement and move of the name."""
    state: PlacementState
    move_id: int | None = None
    """The move that has not ended, or None."""
    opened_at: datetime | None = None
    used_at: datetime | None = None
    """When a router last reported that it used the name; see `PlacementStore.touch`."""


@dataclass(frozen=True, slots=True)
class Move:
    """A move of contexts from one partition to another.

    Attributes:
        move_id: The move's id, also in its fence and marker.
        source: The stream that the contexts leave.
        target: The stream that the contexts move to; the source if the move is aborted.
        source_id: The source's partition id.
        target_id: The target's partition id.
        state: The move's state.
        aborting: Whether the move is being aborted.
        attempt: A counter that rises when the fence gets its epoch, and when the move is aborted.
        contexts: How many contexts move.
        fence_epoch: Behind the fence, messages with an earlier epoch are strays. 0: there is no fence yet.
        epoch: The contexts' epoch after the move.
        scan_from: An offset of the source at or before the first fence.
        target_scan_from: An offset of the target at or before the first marker.
        fence_offset: The offset of the first fence; None until it is known.
        marker_offset: The offset of the first marker; None until the move has ended.
        holder: The process that performs the move, or None.
        lease_expires_at: When the holder's lease expires.
        started_at: When the contexts began to wait.
        fenced_at: When the fence was found.
        ended_at: When the contexts stopped waiting; None while they wait.
        reason: Why the move was aborted, or None.
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
        """Seconds that the contexts waited; None while they wait."""
        return None if self.ended_at is None else (self.ended_at - self.started_at).total_seconds()

    @property
    def is_attended(self) -> bool:
        """Whether a process holds the lease, by this machine's clock. PostgreSQL's clock decides about takeovers."""
        return self.lease_expires_at is not None and self.lease_expires_at > datetime.now(UTC)


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveStep(Move):
    names: frozenset[str]


@dataclass(frozen=True, slots=True)
class Assignment:
    """The partition of a context.

    Attributes:
        context: The context's name.
        partition: The partition's stream; during a move, the stream that the context leaves.
        epoch: The epoch of the context's messages.
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
    """A plan of moves. Its length is the number of contexts that move.

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
        contexts_done: The number of contexts whose moves have ended.
        contexts_all: The number of contexts that the call moves.
    """

    move: Move
    contexts_done: int
    contexts_all: int


Progress: TypeAlias = Callable[[MoveProgress], None]
"""A progress callback. The threads that perform the moves call it, one call at a time."""


@dataclass(frozen=True, slots=True)
class ContextsStatus:
    """The partitions and the moves of a super stream with contexts.

    Attributes:
        super_stream: The super stream's name.
        header: The header that names contexts.
        generation: The number of changes that may have made cached placements outdated.
        partitions: The partitions in order, including retired ones, each with its number of contexts.
        moves: The moves that have not ended, oldest first.
    """

    super_stream: str
    header: str
    generation: int
    partitions: tuple[PartitionRow, ...]
    moves: tuple[Move, ...]


def spread(placed: Mapping[str, Sequence[str]], weights: Mapping[str, float]) -> dict[str, tuple[str, ...]]:
    """Choose the fewest contexts to move to each partition, so that shares are in proportion to the weights.

    Each share is exact to within one context. All contexts leave a partition that has no weight or weight 0.
    """
    quotas = _quotas(placed, weights)
    leaving = chain.from_iterable(names[quotas.get(stream, 0) :] for stream, names in placed.items())
    missing = {stream: quota - len(placed.get(stream, ())) for stream, quota in quotas.items()}
    return {stream: tuple(islice(leaving, count)) for stream, count in missing.items() if count > 0}


def _quotas(placed: Mapping[str, Sequence[str]], weights: Mapping[str, float]) -> dict[str, int]:
    total = sum(map(Fraction, weights.values()))
    if total <= 0 or any(weight < 0 for weight in weights.values()):
        raise InvalidInput("weights of partitions must be 0 or more, and at least one must be above 0")
    count = sum(map(len, placed.values()))
    exact = {stream: count * Fraction(weight) / total for stream, weight in weights.items()}
    quotas = {stream: int(share) for stream, share in exact.items()}

    def priority(stream: str) -> tuple[Fraction, int]:
        # Among equal remainders, prefer the partition with the most contexts: fewer contexts move.
        return exact[stream] - quotas[stream], len(placed.get(stream, ()))

    for stream in sorted(quotas, key=priority, reverse=True)[: count - sum(quotas.values())]:
        quotas[stream] += 1
    return quotas
