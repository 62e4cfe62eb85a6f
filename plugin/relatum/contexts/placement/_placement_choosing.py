"""Which partition a name is placed in that has none yet: chosen among those of a moment ago."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Final

from relatum.contexts.placement._model import Choose, PartitionRow, PartitionState
from relatum.errors import SuperStreamConflict

COUNTS_S: Final = 0.1
"""Seconds for which the partitions, and the numbers of sets open in them, serve to choose among them."""


class Candidates:
    """The partitions of a super stream that take new placements. Thread-safe."""

    def __init__(self, super_stream: str, ask: Callable[[], list[PartitionRow]]) -> None:
        self._name = super_stream
        self._ask = ask
        self._lock = threading.Lock()
        self._rows: list[PartitionRow] = []
        self._rows_until = 0.0

    def forget(self) -> None:
        """Ask anew before the next one is chosen."""
        self._rows_until = 0.0

    def active(self, *, fresh: bool) -> list[PartitionRow]:
        """The partitions that take new placements; those of a moment ago, with what was placed here since counted."""
        with self._lock:
            if not fresh and time.monotonic() < self._rows_until:
                return list(self._rows)
        active = [partition for partition in self._ask() if partition.state == PartitionState.ACTIVE]
        if not active:
            raise SuperStreamConflict(
                f"super stream {self._name!r} has no partition that takes new placements",
                super_stream=self._name,
                reason="it has no active partition",
            )
        with self._lock:
            self._rows = active
            self._rows_until = time.monotonic() + COUNTS_S
        return active

    def count(self, chosen: Iterable[int]) -> None:
        """Count placements in the partitions of a moment ago."""
        more = Counter(chosen)
        with self._lock:
            self._rows = [replace(row, open_sets=row.open_sets + more[row.partition_id]) for row in self._rows]


def chosen_among(names: Iterable[str], partitions: Sequence[PartitionRow], choose: Choose) -> dict[str, int]:
    """The partition's id for each name, the open sets counted on from one to the next."""
    candidates = {partition.partition_id: partition for partition in partitions}
    chosen = {}
    for name in names:
        partition_id = choose(name, list(candidates.values())).partition_id
        row = candidates[partition_id]
        candidates[partition_id] = replace(row, open_sets=row.open_sets + 1)
        chosen[name] = partition_id
    return chosen
