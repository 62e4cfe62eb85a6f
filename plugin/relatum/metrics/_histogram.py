"""How long things took, counted by length."""

import threading
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
"""The upper ends of buckets for what takes a millisecond when all is well, and is given up after ten seconds."""


@dataclass(frozen=True, slots=True)
class Observed:
    """What a histogram has counted.

    Attributes:
        bounds: The buckets' upper ends, rising. The last bucket has none.
        counts: How many were seen in each bucket; one more than bounds.
        sum: All values together.
    """

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    sum: float

    @property
    def count(self) -> int:
        """How many values were seen."""
        return sum(self.counts)

    def __add__(self, other: "Observed") -> "Observed":
        counts = tuple(mine + theirs for mine, theirs in zip(self.counts, other.counts, strict=True))
        return Observed(self.bounds, counts, self.sum + other.sum)


class Histogram:
    """Counts values by size. Threads may share one.

    Args:
        bounds: The buckets' upper ends, rising. Default: for seconds, from a millisecond to ten seconds.
    """

    __slots__ = ("_bounds", "_counts", "_lock", "_sum")

    def __init__(self, bounds: Sequence[float] = SECONDS) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0
        self._lock = threading.Lock()

    def observe(self, value: float) -> None:
        """Count one value."""
        bucket = bisect_left(self._bounds, value)
        with self._lock:
            self._counts[bucket] += 1
            self._sum += value

    def observed(self) -> Observed:
        """What was counted so far."""
        with self._lock:
            return Observed(self._bounds, tuple(self._counts), self._sum)
