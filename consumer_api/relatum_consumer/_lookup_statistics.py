"""What look-ups tell of themselves."""

import threading
import time
from collections import Counter as Counts
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Annotated, Any

from relatum.errors import RelatumError
from relatum.metrics import Counter, Distribution, Gauge, Histogram, Observed, reported
from relatum.reading import ReaderStatistics


@reported("look-ups")
@dataclass(frozen=True, slots=True)
class LookupStatistics(ReaderStatistics):
    """The connections of look-ups to the broker, and what was asked.

    Attributes:
        lookup_s: Seconds that look-ups took, those that ended as an error too; waiting for what is asked included.
            Iterations are not among them.
        errors: Look-ups that ended as an error, by its class.
        asking: Look-ups under way, besides those that wait for a message.
        awaiting: Look-ups that wait for a message (`wait_related`).
    """

    lookup_s: Annotated[Observed, Distribution("relatum_lookup_seconds", "Time of one lookup")]
    errors: Annotated[
        Mapping[str, int], Counter("relatum_lookup_errors_total", "Lookups that ended as an error", by="error")
    ]
    asking: Annotated[int, Gauge("relatum_lookups_asking", "Lookups under way that do not wait for a message")]
    awaiting: Annotated[int, Gauge("relatum_lookups_awaiting", "Lookups that wait for a message")]


class LookupCounts:
    """The look-ups of one object: what is counted of them. Thread-safe.

    Args:
        limit: Of its connections to the broker.
    """

    def __init__(self, limit: int) -> None:
        self.connections = ReaderStatistics.of_none(limit)
        self._lookup_s = Histogram()
        self._errors: Counts[str] = Counts()
        self._asking = self._awaiting = 0
        self._lock = threading.Lock()

    def counted(self) -> "_Counted":
        """Count what is asked in the block, and how it ends."""
        return _Counted(self)

    @contextmanager
    def awaiting(self) -> Iterator[None]:
        """Wait for a message inside: that takes no connection."""
        self._move(-1, 1)
        try:
            yield
        finally:
            self._move(1, -1)

    def _move(self, asking: int, awaiting: int) -> None:
        with self._lock:
            self._asking += asking
            self._awaiting += awaiting

    def renew(self) -> None:
        """In a child: what is under way is the parent's."""
        self._lock = threading.Lock()
        self._asking = self._awaiting = 0

    def statistics(self, connections: ReaderStatistics | None = None) -> LookupStatistics:
        """What was counted, with a reader's connections; None where there is no reader."""
        told = asdict(connections or self.connections)
        with self._lock:
            return LookupStatistics(
                **told,
                lookup_s=self._lookup_s.observed(),
                errors=dict(self._errors),
                asking=self._asking,
                awaiting=self._awaiting,
            )


class _Counted:
    """A class and not a generator: it stands on the path of every look-up."""

    __slots__ = ("_began", "_counts")

    def __init__(self, counts: LookupCounts) -> None:
        self._counts = counts

    def __enter__(self) -> None:
        self._counts._move(1, 0)
        self._began = time.perf_counter()

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        counts = self._counts
        counts._lookup_s.observe(time.perf_counter() - self._began)
        counts._move(-1, 0)
        if isinstance(error, RelatumError):
            with counts._lock:
                counts._errors[type(error).__name__] += 1
