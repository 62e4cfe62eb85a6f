"""Affinity sets for operators: listed, closed and moved."""

import builtins
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from relatum.checks import (
    checked_count,
    checked_name,
    checked_names,
    checked_seconds,
    checked_text,
    checked_weights,
)
from relatum.contexts._assignments import Progress
from relatum.contexts._placements import Move, Placement, check_name
from relatum.contexts._serialization_contexts import SerializationContexts
from relatum.contexts._set_keeper import close_idle
from relatum.contexts._super_stream_rows import IDLE_S_MIN
from relatum.errors import PlacementNotFound, SuperStreamConflict
from relatum.headers import CONTEXT_HEADER

PAGE: Final = 1_000
"""Sets that are read at once."""


@dataclass(frozen=True, slots=True)
class AffinitySet:
    """An affinity set that is open.

    Attributes:
        name: Its name.
        partition: The stream its messages go to; while it moves, the one it leaves.
        epoch: The epoch its messages are published under: later placements have higher ones.
        state: "open" or "moving".
        move_id: The move it is in; None where it stands.
        opened_at: When its first message was placed.
        used_at: When a publisher last said that it is in use; up to 15 seconds behind.
    """

    name: str
    partition: str
    epoch: int
    state: str
    move_id: int | None
    opened_at: datetime | None
    used_at: datetime | None


class AffinitySets(SerializationContexts):
    """The affinity sets of a super stream. A context manager; threads may share one.

    Arguments, and what moves sets or changes partitions, are as of `SerializationContexts`: a set moves as a context
    does.

    Raises:
        SuperStreamNotFound: no router has published sets to it yet.
        DatabaseUnavailable: PostgreSQL does not answer; so may all methods.
    """

    def _open(self, header: str | None) -> None:
        self._placements.open(header)

    def list(
        self, prefix: str = "", *, partition: str | None = None, limit: int | None = PAGE
    ) -> Sequence[AffinitySet]:
        """Open sets, by name.

        Args:
            prefix: Only sets whose names begin so.
            partition: Only sets in this stream; None: in all.
            limit: How many at most; None: all of them.
        """
        checked_text("prefix", prefix)
        if partition is not None:
            checked_name("partition", partition)
        if limit is not None:
            checked_count("limit", limit, otherwise=", or None")
        found = []
        for placement in self._placements.placements(stream=partition, first=prefix):
            if not placement.name.startswith(prefix):
                break
            found.append(_set_of(placement))
            if len(found) == limit:
                break
        return found

    def count(self) -> dict[str, int]:
        """How many sets are open in each partition, by stream; partitions without any are there with 0."""
        return {partition.stream: partition.open_sets for partition in self._placements.partitions()}

    def inspect(self, name: str) -> AffinitySet:
        """An open set.

        Raises:
            PlacementNotFound: none of that name is open.
        """
        check_name(name, "an affinity set's name")
        placement = self._placements.find([name]).get(name)
        if placement is None:
            raise PlacementNotFound(f"no affinity set {name!r} is open in {self.super_stream!r}", name=name)
        return _set_of(placement)

    def close_set(self, name: str) -> AffinitySet:
        """Close a set; the next message under its name begins another. Gives it as it was.

        Raises:
            PlacementNotFound: none of that name is open.
            MoveConflict: it moves; nothing was changed.
            SuperStreamConflict: serialization contexts are placed there, which are not closed; nothing was changed.
        """
        check_name(name, "an affinity set's name")
        self._check_closes()
        return _set_of(self._placements.end(name))

    def close_idle(self, idle_s: float) -> int:
        """Close sets that no publisher used for so many seconds; gives their number. Those that move stay open.

        Raises:
            SuperStreamConflict: serialization contexts are placed there, which are not closed; nothing was changed.
        """
        checked_seconds("idle_s", idle_s, zero=False)
        self._check_closes()
        return close_idle(self._placements, idle_s)

    def set_idle(self, idle_s: float | None) -> None:
        """Set after how many seconds without a message sets are closed, at least 60; None: never.

        Routers that are up take it over within 15 seconds.
        """
        if idle_s is not None:
            checked_seconds("idle_s", idle_s, least=IDLE_S_MIN)
        self._check_closes()
        self._placements.set_idle(idle_s)

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """Set the weights of partitions, by stream, for all routers that balance by weight.

        Raises:
            StreamNotFound: there is no such partition; nothing was changed.
            InvalidInput: a weight is negative or no number; nothing was changed.
        """
        weights = checked_weights("weights", weights)
        self._placements.set_weights(weights)

    def move(self, names: str | Iterable[str], to: str, *, progress: Progress | None = None) -> "builtins.list[Move]":
        """Move sets to another partition, with the guarantee, and the errors, of `SerializationContexts.move`.

        Args:
            names: The sets' names; one text is refused.
            to: The stream they are to go to.
            progress: Called after each step.
        """
        return super().move(checked_names("names", names), to, progress=progress)

    def _check_closes(self) -> None:
        # A context that was closed is placed anew by its next message: nothing would keep the order of what it has in
        # the old partition and in the new one.
        if self._placements.header == CONTEXT_HEADER:
            raise SuperStreamConflict(
                f"serialization contexts are placed in {self.super_stream!r}: closing one would end its order; "
                "nothing was changed",
                super_stream=self.super_stream,
                reason="contexts",
            )


def _set_of(placement: Placement) -> AffinitySet:
    return AffinitySet(
        placement.name,
        placement.stream,
        placement.epoch,
        str(placement.state),
        placement.move_id,
        placement.opened_at,
        placement.used_at,
    )
