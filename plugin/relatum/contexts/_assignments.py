"""Where contexts are, the progress of moves, and which contexts must move for an even spread. Pure."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Self, TypeAlias

from relatum.contexts._placements import Move, PartitionRow, Placement
from relatum.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class Assignment:
    """Where a context is.

    Attributes:
        context: Its name.
        partition: The stream it is in; while it moves, the one it leaves.
        epoch: The epoch its messages are published under.
        move_id: The move it is in; None where it stands.
    """

    context: str
    partition: str
    epoch: int
    move_id: int | None

    @classmethod
    def of(cls, placement: Placement) -> Self:
        """A placement as one of a context."""
        return cls(placement.name, placement.stream, placement.epoch, placement.move_id)


@dataclass(frozen=True, slots=True)
class Plan:
    """Which contexts are to go where.

    Attributes:
        moves: For each partition, the contexts that are to come to it.
    """

    moves: dict[str, tuple[str, ...]]

    def __len__(self) -> int:
        """How many contexts are to move."""
        return sum(map(len, self.moves.values()))


@dataclass(frozen=True, slots=True)
class MoveProgress:
    """The progress of a call that moves contexts.

    Attributes:
        move: The move that is one step further.
        contexts_done: Contexts of the whole call that go on already.
        contexts_all: Contexts of the whole call.
    """

    move: Move
    contexts_done: int
    contexts_all: int


Progress: TypeAlias = Callable[[MoveProgress], None]
"""Called from the threads that move, one call at a time."""


@dataclass(frozen=True, slots=True)
class ContextsStatus:
    """A super stream whose contexts are placed.

    Attributes:
        super_stream: Its name.
        header: The header that names contexts.
        generation: How often placements changed.
        partitions: Its partitions in their order, each with its number of contexts; retired ones included.
        moves: The moves that have not ended, oldest first.
    """

    super_stream: str
    header: str
    generation: int
    partitions: tuple[PartitionRow, ...]
    moves: tuple[Move, ...]


def spread(placed: Mapping[str, Sequence[str]], weights: Mapping[str, float]) -> dict[str, tuple[str, ...]]:
    """For each partition, the contexts that have to come to it; as few as possible move.

    Partitions get shares in proportion to their weights, within one context of the exact share.

    Contexts of partitions without a weight, or with 0, all leave.
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
    """How many contexts each partition is to have."""
    total = sum(map(Fraction, weights.values()))
    if total <= 0 or any(weight < 0 for weight in weights.values()):
        raise InvalidInput("contexts are spread over partitions with weights from 0, at least one of them above 0")
    count = sum(map(len, placed.values()))
    exact = {stream: count * Fraction(weight) / total for stream, weight in weights.items()}
    quotas = {stream: int(share) for stream, share in exact.items()}

    def first_served(stream: str) -> tuple[Fraction, int]:
        # Of equal remainders, to whom has most already: what stays need not move.
        return exact[stream] - quotas[stream], len(placed.get(stream, ()))

    for stream in sorted(quotas, key=first_served, reverse=True)[: count - sum(quotas.values())]:
        quotas[stream] += 1
    return quotas
