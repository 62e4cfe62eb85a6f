"""The message collector gives each type's messages to an executor in bulks, and stores their outcomes."""

from relatum.collecting._async_collector import AsyncMessageCollector
from relatum.collecting._bulk import Bulk, Collected, ExecutorOptions, Failure, FlushReason, WhenFull
from relatum.collecting._collector import MessageCollector
from relatum.collecting._collector_status import (
    CollectedAt,
    CollectedPage,
    CollectorStatistics,
    CollectorStatus,
    MemberStatus,
    SourceStatus,
    TypeStatistics,
    collected,
    collector_status,
)
from relatum.collecting._collector_store import forget_finished
from relatum.outcomes import AsyncOutcomes, Outcome, Outcomes, OutcomeStatus

__all__ = [
    "AsyncMessageCollector",
    "AsyncOutcomes",
    "Bulk",
    "Collected",
    "CollectedAt",
    "CollectedPage",
    "CollectorStatistics",
    "CollectorStatus",
    "ExecutorOptions",
    "Failure",
    "FlushReason",
    "MemberStatus",
    "MessageCollector",
    "Outcome",
    "OutcomeStatus",
    "Outcomes",
    "SourceStatus",
    "TypeStatistics",
    "WhenFull",
    "collected",
    "collector_status",
    "forget_finished",
]
