"""Where contexts are, how they are to move, and what is told of it."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Self, TypeAlias

from relatum.contexts._placements import Move, PartitionRow, Placement


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
    """What is told while contexts are moved.

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


@dataclass(slots=True)
class Call:
    """What one call moves, told as it goes."""

    progress: Progress | None
    contexts_all: int = 0
    contexts_done: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def tell(self, move: Move) -> None:
        """Note that a move is further, and tell of it; one call at a time."""
        with self.lock:
            if move.state.is_ended:
                self.contexts_done += move.contexts
            if self.progress is not None:
                self.progress(MoveProgress(move, self.contexts_done, self.contexts_all))
