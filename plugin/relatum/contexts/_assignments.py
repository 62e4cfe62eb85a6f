"""Assignments of contexts, the progress of moves, and plans for an even spread. No input or output."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Self, TypeAlias

from relatum.contexts._placements import Move, PartitionRow, Placement
from relatum.errors import InvalidInput


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
    """The number of contexts that each partition should have."""
    total = sum(map(Fraction, weights.values()))
    if total <= 0 or any(weight < 0 for weight in weights.values()):
        raise InvalidInput("contexts are spread over partitions with weights from 0, at least one of them above 0")
    count = sum(map(len, placed.values()))
    exact = {stream: count * Fraction(weight) / total for stream, weight in weights.items()}
    quotas = {stream: int(share) for stream, share in exact.items()}

    def first_served(stream: str) -> tuple[Fraction, int]:
        # Among equal remainders, prefer the partition with most contexts: fewer have to move.
        return exact[stream] - quotas[stream], len(placed.get(stream, ()))

    for stream in sorted(quotas, key=first_served, reverse=True)[: count - sum(quotas.values())]:
        quotas[stream] += 1
    return quotas
