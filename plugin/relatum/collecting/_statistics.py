"""The statistics of a member of a collector."""

from collections import Counter as Counts
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from relatum.collecting._collector_core import Result
from relatum.metrics import Counter, Distribution, Each, Gauge, Histogram, Observed, reported
from relatum.outcomes import OutcomeStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class TypeStatistics:
    """The statistics of one type with an executor in this member.

    Attributes:
        collected: Messages stored to be consumed here.
        outcomes: Messages with a final outcome, by status: "succeeded", "failed", "dead".
        retries: Failed attempts that are retried.
        waiting_bulks: Closed bulks waiting for a worker.
        bulk_s: Seconds from taking a bulk to storing its results.
    """

    collected: Annotated[int, Counter("relatum_collector_collected_total", "Messages stored to be consumed here")]
    outcomes: Annotated[
        Mapping[str, int],
        Counter("relatum_collector_outcomes_total", "Messages whose outcome became final in this member", by="status"),
    ]
    retries: Annotated[int, Counter("relatum_collector_retries_total", "Failed attempts that are retried")]
    waiting_bulks: Annotated[int, Gauge("relatum_collector_waiting_bulks", "Closed bulks that wait for a worker")]
    bulk_s: Annotated[
        Observed, Distribution("relatum_collector_bulk_seconds", "Time from taking a bulk to storing its results")
    ]


@reported("collector")
@dataclass(frozen=True, slots=True, kw_only=True)
class CollectorStatistics:
    """The counts of one member of a collector, and what it holds now.

    Attributes:
        types: Statistics by type, for types with an executor here.
        held_messages: Messages taken and not finished.
        held_bytes: Memory of the held messages in bytes, which counts towards `bytes_max`.
        passed_over: Messages of types without an executor here.
        refused: Messages refused or not stored: no room in time, the collector is closing, or storing failed.
    """

    types: Annotated[Mapping[str, TypeStatistics], Each("type")]
    held_messages: Annotated[int, Gauge("relatum_collector_held_messages", "Messages taken and not settled")]
    held_bytes: Annotated[int, Gauge("relatum_collector_held_bytes", "Memory of the held messages")]
    passed_over: Annotated[int, Counter("relatum_collector_passed_over_total", "Messages of types without executor")]
    refused: Annotated[int, Counter("relatum_collector_refused_total", "Messages refused")]


class TypeCounts:
    """The counts of a type. For the collector's loop."""

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
        """Return the counts as statistics."""
        return TypeStatistics(
            collected=self.collected,
            outcomes=dict(self.outcomes),
            retries=self.retries,
            waiting_bulks=waiting_bulks,
            bulk_s=self.bulk_s.observed(),
        )
