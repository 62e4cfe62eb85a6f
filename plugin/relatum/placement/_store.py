"""The placements of one super stream in PostgreSQL: each call is one transaction, and says what is true afterwards."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from types import TracebackType
from typing import Self

import sqlalchemy as sa

from relatum.placement._model import (
    Changes,
    Choose,
    MoveInfo,
    PartitionLike,
    PartitionRow,
    Placement,
    PlacementCounts,
    PlacementState,
)


class PlacementStore:
    """The placements of one super stream. Threads may share it.

    Args:
        database: PostgreSQL's URL, or an engine, which stays open when the store is closed.
        vhost: The broker's virtual host.
        super_stream: The super stream's name.

    Every call raises `DatabaseUnavailable` where PostgreSQL does not answer, `SchemaMissing` where it has no such
    tables, and `AccessRefused` where the user may not.
    """

    def __init__(self, database: "str | sa.Engine", vhost: str, super_stream: str) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close_store()

    @property
    def engine(self) -> sa.Engine:
        """The database, for statements of those who move contexts."""
        raise NotImplementedError

    @property
    def super_stream_id(self) -> int:
        """The id of the super stream's row. Known after `open`."""
        raise NotImplementedError

    @property
    def header(self) -> str:
        """The header that names the sets. Known after `open`."""
        raise NotImplementedError

    def open(self, header: str | None = None, partitions: Iterable[PartitionLike] | None = None) -> list[PartitionRow]:
        """Make the super stream's rows where they are not there, and see that all mean the same by them.

        Where nothing is missing, nothing is written, so that a user who may only read can open it, too.

        Args:
            header: The header that names the sets; None: the one that is stored.
            partitions: Its partitions as the broker has them; those that are new are added, those that the broker does
                not have any more stay as they are. None: those that are stored.

        Returns:
            All partitions that are stored, in the order of their places, retired ones included.

        Raises:
            SuperStreamConflict: its sets are named by another header, or it has no partition.
            SuperStreamNotFound: nothing is stored of it, and no header or no partitions were given.
        """
        raise NotImplementedError

    def close_store(self) -> None:
        """Give the connections back."""

    def partitions(self) -> list[PartitionRow]:
        """The partitions as they are now, in the order of their places, retired ones included."""
        raise NotImplementedError

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """Set the weights of partitions, by stream; 0 takes no new sets where they are spread by weight.

        Raises:
            StreamNotFound: the super stream has no such partition; nothing was written.
            InvalidInput: a weight is negative or no number; nothing was written.
        """
        raise NotImplementedError

    def generation(self) -> int:
        """The super stream's generation: what is cached at it is right as long as it does not change."""
        raise NotImplementedError

    def changes(self, since: int) -> Changes:
        """What changed after a generation, and the generation of now, in one statement."""
        raise NotImplementedError

    def find(self, names: Collection[str]) -> dict[str, Placement]:
        """The placements of names that are placed, by name; those that were released are not among them."""
        raise NotImplementedError

    def place(
        self, names: Collection[str], choose: Choose, *, open_sets_max: int | None = None
    ) -> dict[str, Placement]:
        """The placements of names, placed now where they were not: all who place a name at once get the same.

        Args:
            names: The names.
            choose: Chooses a partition for each that is not placed yet.
            open_sets_max: Placements of the super stream that may be open; None for any number.

        Returns:
            The placement of each name; its state may be MOVING.

        Raises:
            TooManyOpenSets: there would be more of them; none of these names was placed.
            SuperStreamConflict: the super stream has no active partition.
            InvalidInput: a name is empty, too long or holds a character that PostgreSQL does not store.
        """
        raise NotImplementedError

    def release(self, released: Iterable[tuple[str, int]]) -> frozenset[str]:
        """End placements. One that was placed anew since, or ended by another, is left as it is.

        Args:
            released: Names, each with an epoch it had since it was opened; moves in between change nothing.

        Returns:
            The names that cannot be released now since a move is under way: to be tried again.
        """
        raise NotImplementedError

    def close(self, name: str) -> Placement:
        """End a name's placement, whatever its epoch; gives it as it was.

        Raises:
            PlacementNotFound: the name is not placed.
            MoveConflict: it is being moved; nothing was written.
        """
        raise NotImplementedError

    def touch(self, names: Collection[str]) -> None:
        """Say that names are in use, for `idle`."""
        raise NotImplementedError

    def idle(self, idle_s: float, *, limit: int = 1_000) -> list[Placement]:
        """Open placements that nobody touched for so many seconds, the longest unused first; moving ones are not."""
        raise NotImplementedError

    def placements(
        self,
        *,
        stream: str | None = None,
        states: Sequence[PlacementState] = (PlacementState.OPEN, PlacementState.MOVING),
        after: str | None = None,
        limit: int = 1_000,
    ) -> list[Placement]:
        """Placements by name, for lists: ask again with the last name until there are none.

        Args:
            stream: Only those in this partition; None for all.
            states: Only those in these states.
            after: Only names after this one, in the order of their bytes; None from the first.
            limit: How many at most.
        """
        raise NotImplementedError

    def count(self) -> PlacementCounts:
        """How many placements there are, by partition and state."""
        raise NotImplementedError

    def move_of(self, move_id: int) -> MoveInfo | None:
        """A move as it is now; None where it is not known."""
        raise NotImplementedError

    def fence_after(self, name: str, epoch: int, stream: str) -> MoveInfo | None:
        """The first move of a name out of a partition with an epoch above this one.

        Its `fence_offset` says from where on a message of this epoch would be a stray; None as long as that is not
        known. None as the answer: a message of this epoch cannot lie behind a fence there.
        """
        raise NotImplementedError
