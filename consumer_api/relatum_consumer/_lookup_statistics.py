"""What look-ups tell of themselves."""

import threading
import time
from collections import Counter as Counts
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Annotated

from relatum.errors import RelatumError
from relatum.metrics import Counter, Distribution, Histogram, Observed, reported
from relatum.reading import ReaderStatistics


@reported("look-ups")
@dataclass(frozen=True, slots=True)
class LookupStatistics(ReaderStatistics):
    """The connections of look-ups to the broker, and what was asked.

    Attributes:
        lookup_s: Seconds that look-ups took, those that ended as an error too; waiting for what is asked included.
            Iterations are not among them.
        errors: Look-ups that ended as an error, by its class.
    """

    lookup_s: Annotated[Observed, Distribution("relatum_lookup_seconds", "Time of one look-up")]
    errors: Annotated[
        Mapping[str, int], Counter("relatum_lookup_errors_total", "Look-ups that ended as an error", by="error")
    ]


class LookupCounts:
    """What is counted of the look-ups of one object."""

    def __init__(self, limit: int) -> None:
        self.connections = ReaderStatistics.of_none(limit)
        self._lookup_s = Histogram()
        self._errors: Counts[str] = Counts()
        self._lock = threading.Lock()

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count what is asked in the block, and how it ends."""
        began = time.perf_counter()
        try:
            yield
        except RelatumError as error:
            with self._lock:
                self._errors[type(error).__name__] += 1
            raise
        finally:
            self._lookup_s.observe(time.perf_counter() - began)

    def statistics(self) -> LookupStatistics:
        """What was counted. Of connections it tells nothing: the reader does."""
        return self.with_connections(self.connections)

    def with_connections(self, connections: ReaderStatistics) -> LookupStatistics:
        """What was counted, with a reader's connections."""
        with self._lock:
            errors = dict(self._errors)
        told = {field.name: getattr(connections, field.name) for field in fields(ReaderStatistics)}
        return LookupStatistics(**told, lookup_s=self._lookup_s.observed(), errors=errors)
