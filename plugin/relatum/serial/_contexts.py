"""Serialization contexts for operators: where each is, and how they are moved."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from types import TracebackType
from typing import Final, Self

import sqlalchemy as sa

from relatum._names import CONTEXT_HEADER
from relatum.reading import BrokerAddress
from relatum.serial._moving import MoveState

MOVES_AT_ONCE: Final = 4
"""How many moves are performed side by side unless the caller says otherwise."""


@dataclass(frozen=True, slots=True)
class Move:
    """A move of contexts, as the database has it.

    Attributes:
        move_id: Its number.
        source: The stream its contexts leave.
        target: The stream they go to; the source where the move is taken back.
        contexts: How many they are.
        state: How far it is.
        aborting: Whether it is, or was, taken back.
        started_at: When its contexts stopped.
        ended_at: When they went on; None while they have not.
        pause_s: Seconds they stood still: until now, while the move has not ended.
        is_attended: Whether somebody goes on with it now.
        holder: Who went on with it last; None for nobody.
        reason: Why it was begun or taken back, where that was said.
    """

    move_id: int
    source: str
    target: str
    contexts: int
    state: MoveState
    aborting: bool
    started_at: datetime
    ended_at: datetime | None
    pause_s: float
    is_attended: bool
    holder: str | None
    reason: str | None


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


@dataclass(frozen=True, slots=True)
class Plan:
    """Which contexts are to go where.

    Attributes:
        moves: For each target, the contexts that are to go there.
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


Progress = Callable[[MoveProgress], None]
"""Called from the threads that move, one call at a time."""


class SerializationContexts:
    """Where the contexts of a super stream are, and how they are moved. A context manager; threads may share one.

    Args:
        super_stream: The super stream's name.
        database: PostgreSQL's URL, or an engine, which stays the caller's.
        broker: The broker's AMQP URL or address: moves and partitions need it, looking does not.
        stream_url: Where the stream protocol answers, if not 120 ports below AMQP's.
        header: The header that names contexts; None for the one the super stream is used with, `serialization_context`
            where it was not used before.
        moves_at_once: Moves performed side by side.
    """

    def __init__(
        self,
        super_stream: str,
        database: str | sa.URL | sa.Engine,
        *,
        broker: str | BrokerAddress | None = None,
        stream_url: str | None = None,
        header: str | None = None,
        moves_at_once: int = MOVES_AT_ONCE,
    ) -> None:
        raise NotImplementedError

    def assign(self, context: str, partition: str) -> Assignment:
        """Assign a context to a partition before its first message."""
        raise NotImplementedError

    def assignment_of(self, context: str) -> Assignment:
        """Where a context is."""
        raise NotImplementedError

    def assignments(self, partition: str | None = None) -> list[Assignment]:
        """Where contexts are, by name."""
        raise NotImplementedError

    def move(
        self, contexts: str | Iterable[str], to: str, *, reason: str | None = None, progress: Progress | None = None
    ) -> list[Move]:
        """Move contexts to a partition."""
        raise NotImplementedError

    def consolidate(
        self, sources: Iterable[str], target: str, *, reason: str | None = None, progress: Progress | None = None
    ) -> list[Move]:
        """Move all contexts of several partitions to one."""
        raise NotImplementedError

    def plan(self, partitions: Iterable[str] | None = None) -> Plan:
        """Which contexts would have to move for all to be spread evenly over partitions."""
        raise NotImplementedError

    def rebalance(
        self, plan: Plan | None = None, *, reason: str | None = None, progress: Progress | None = None
    ) -> list[Move]:
        """Move contexts as planned."""
        raise NotImplementedError

    def add_partitions(self, count: int = 1, *, binding_keys: Sequence[str] | None = None) -> list[str]:
        """Add partitions to the super stream."""
        raise NotImplementedError

    def retire(self, partition: str, *, delete: bool = False) -> None:
        """Take a partition without contexts out of use."""
        raise NotImplementedError

    def moves(self, *, all_of_them: bool = False) -> list[Move]:
        """The moves that have not ended."""
        raise NotImplementedError

    def resume(self, move_id: int, *, progress: Progress | None = None) -> Move:
        """Go on with a move, from whatever state it is in."""
        raise NotImplementedError

    def abort(self, move_id: int, *, reason: str | None = None, progress: Progress | None = None) -> Move:
        """Take a move back: its contexts go on in their source."""
        raise NotImplementedError

    def close(self) -> None:
        """Close connections."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


HEADER_DEFAULT: Final = CONTEXT_HEADER
"""The header that names contexts unless another was chosen."""
