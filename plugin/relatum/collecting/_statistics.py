"""What a member of a collector has counted, and what it holds."""

from collections import Counter as Counts
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from relatum.collecting._collector_core import Result
from relatum.metrics import Counter, Distribution, Each, Gauge, Histogram, Observed, reported
from relatum.outcomes import OutcomeStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class TypeStatistics:
    """What was counted of one type that has an executor here.

    Attributes:
        collected: Messages that were stored, to be consumed here.
        outcomes: Messages with a final outcome, by status: "succeeded", "failed", "dead".
        retries: Failed attempts that are tried again.
        waiting_bulks: Closed bulks that wait for a worker.
        bulk_s: Seconds from taking a bulk to storing its results.
    """

    collected: Annotated[int, Counter("relatum_collector_collected_total", "Messages stored to be consumed here")]
    outcomes: Annotated[
        Mapping[str, int],
        Counter("relatum_collector_outcomes_total", "Messages whose outcome has become final here", by="status"),
    ]
    retries: Annotated[int, Counter("relatum_collector_retries_total", "Failed attempts that are tried again")]
    waiting_bulks: Annotated[int, Gauge("relatum_collector_waiting_bulks", "Closed bulks that wait for a worker")]
    bulk_s: Annotated[
        Observed, Distribution("relatum_collector_bulk_seconds", "Time from taking a bulk to storing what came of it")
    ]


@reported("collector")
@dataclass(frozen=True, slots=True, kw_only=True)
class CollectorStatistics:
    """What one member of a collector has counted, and what it holds.

    Attributes:
        types: By type with an executor here.
        held_messages: Messages that were taken and are not finished.
        held_bytes: Their bytes in memory, which count towards `bytes_max`.
        passed_over: Messages of types without an executor here.
        refused: Messages that `collect` refused: no room in time, closing, or they cannot be stored.
    """

    types: Annotated[Mapping[str, TypeStatistics], Each("type")]
    held_messages: Annotated[int, Gauge("relatum_collector_held_messages", "Messages taken and not settled")]
    held_bytes: Annotated[int, Gauge("relatum_collector_held_bytes", "Memory that held messages take")]
    passed_over: Annotated[int, Counter("relatum_collector_passed_over_total", "Messages that nobody here consumes")]
    refused: Annotated[int, Counter("relatum_collector_refused_total", "Messages refused")]


class TypeCounts:
    """What is counted of a type, in the collector's loop."""

    def __init__(self) -> None:
        self.collected = self.retries = 0
        self.outcomes: Counts[str] = Counts()
        self.bulk_s = Histogram()

    def settled(self, results: Sequence[Result], seconds: float) -> None:
        """Count the results of a bulk."""
        self.bulk_s.observe(seconds)
        found = Counts(result.status for result in results)
        self.retries += found.pop(OutcomeStatus.COLLECTED, 0)
        self.outcomes.update({status.value: count for status, count in found.items()})

    def statistics(self, waiting_bulks: int) -> TypeStatistics:
        """The counts as statistics."""
        return TypeStatistics(
            collected=self.collected,
            outcomes=dict(self.outcomes),
            retries=self.retries,
            waiting_bulks=waiting_bulks,
            bulk_s=self.bulk_s.observed(),
        )
