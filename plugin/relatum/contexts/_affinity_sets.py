"""Affinity sets for operators: list, close and move them."""

import builtins
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import islice, takewhile

from relatum.common.checks import (
    checked_count,
    checked_name,
    checked_seconds,
    checked_text,
    checked_weights,
)
from relatum.common.headers import CONTEXT_HEADER
from relatum.contexts._placement_store import PAGE
from relatum.contexts._placements import Move, Placement, Progress, check_name, checked_contexts
from relatum.contexts._router_sets import close_idle
from relatum.contexts._serialization_contexts import SerializationContexts
from relatum.contexts._super_stream_rows import IDLE_S_MIN
from relatum.errors import MoveConflict, PlacementNotFound, SuperStreamConflict


@dataclass(frozen=True, slots=True)
class AffinitySet:
    """An open affinity set.

    Attributes:
        name: The set's name.
        partition: The stream of the set's messages; during a move, the stream that the set leaves.
        epoch: The epoch of the set's messages. Later placements have higher epochs.
        state: "open" or "moving".
        move_id: The current move, or None.
        opened_at: When a router placed the set.
        used_at: When a router last reported use of the set. A report is up to 15 seconds late.
    """

    name: str
    partition: str
    epoch: int
    state: str
    move_id: int | None
    opened_at: datetime | None
    used_at: datetime | None


class AffinitySets(SerializationContexts):
    """Lists, closes and moves the affinity sets of a super stream. A context manager; threads may share one.

    `SerializationContexts` documents the arguments, and the methods that move sets or change partitions: sets move like
    contexts.

    Raises:
        SuperStreamNotFound: no router has opened the super stream yet.
        DatabaseUnavailable: PostgreSQL does not answer. All methods may raise this error.
    """

    def _open(self, header: str | None) -> None:
        self._store.open(header)

    def list(
        self, prefix: str = "", *, partition: str | None = None, limit: int | None = PAGE
    ) -> Sequence[AffinitySet]:
        """Return the open sets, ordered by name.

        Args:
            prefix: Only sets with names that begin with this text. Default: "", all sets.
            partition: Only sets in this stream. None (default): all.
            limit: Maximum number of sets to return; None: all. Default: 1,000.
        """
        checked_text("prefix", prefix)
        if partition is not None:
            checked_name("partition", partition)
        if limit is not None:
            checked_count("limit", limit, otherwise=", or None")
        found = self._store.placements(stream=partition, first=prefix)
        with_prefix = takewhile(lambda each: each.name.startswith(prefix), found)
        return [_set_of(placement) for placement in islice(with_prefix, limit)]

    def count(self) -> dict[str, int]:
        """Return the number of open sets in every partition, by the partition's stream."""
        return {partition.stream: partition.open_sets for partition in self._store.partitions()}

    def inspect(self, name: str) -> AffinitySet:
        """Return an open set.

        Raises:
            PlacementNotFound: no set of this name is open.
        """
        check_name(name, "an affinity set's name")
        placement = self._store.find([name]).get(name)
        if placement is None:
            raise PlacementNotFound(f"no affinity set {name!r} is open in {self.super_stream!r}", name=name)
        return _set_of(placement)

    def close_set(self, name: str) -> AffinitySet:
        """Close a set, and return it as it was before. The next message of its name opens a new set.

        Raises:
            PlacementNotFound: no set of this name is open.
            MoveConflict: the set is moving; nothing was changed.
            SuperStreamConflict: the super stream has serialization contexts, which are never closed; nothing was
                changed.
        """
        check_name(name, "an affinity set's name")
        self._check_closes()
        found = self.inspect(name)
        while self._store.release([(name, found.epoch)]):
            move_id = self.inspect(name).move_id
            if move_id is not None:
                raise MoveConflict(
                    f"{name!r} is moving: resume or abort move {move_id}, then close the set",
                    move_id=move_id,
                    state=str(self._store.move(move_id).state),
                )
        return found

    def close_idle(self, idle_s: float) -> int:
        """Close the sets that were unused for `idle_s` seconds, and return their number. Moving sets stay open.

        Raises:
            SuperStreamConflict: the super stream has serialization contexts; nothing was changed.
        """
        checked_seconds("idle_s", idle_s, zero=False)
        self._check_closes()
        return close_idle(self._store, idle_s)

    def set_idle(self, idle_s: float | None) -> None:
        """Store the seconds without a message after which routers close a set: at least 60, or None for never.

        Running routers use the new value within 15 seconds. `SuperStreamConflict`: the super stream has contexts.
        """
        if idle_s is not None:
            checked_seconds("idle_s", idle_s, least=IDLE_S_MIN)
        self._check_closes()
        self._store.set_idle(idle_s)

    def set_weights(self, weights: Mapping[str, float]) -> None:
        """Store the weights of partitions, by stream, for plans and for all routers with `balance="weighted"`.

        Raises:
            StreamNotFound: the super stream has no such partition; nothing was changed.
            InvalidInput: a weight is negative or not a number; nothing was changed.
        """
        weights = checked_weights("weights", weights)
        self._store.set_weights(weights)

    def move(self, names: str | Iterable[str], to: str, *, progress: Progress | None = None) -> "builtins.list[Move]":
        """Move sets to another partition, with the guarantees and errors of `SerializationContexts.move`.

        Args:
            names: The sets' names. A single string raises `InvalidInput`.
            to: The target partition's stream.
            progress: Called after each step.
        """
        return super().move(checked_contexts("names", names), to, progress=progress)

    def _check_closes(self) -> None:
        # The next message of a closed context could go to another partition, which would break the context's order.
        if self._store.header == CONTEXT_HEADER:
            raise SuperStreamConflict(
                f"{self.super_stream!r} has serialization contexts, and closing one would break its order; "
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
