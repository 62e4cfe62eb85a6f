"""Placement of sets of messages in the partitions of a super stream: affinity sets, and contexts consumed in order."""

from relatum.contexts._affinity_sets import AffinitySet, AffinitySets
from relatum.contexts._async_serial_consumer import AsyncSerialBatch, AsyncSerialConsumer
from relatum.contexts._context_options import (
    AffinityOptions,
    ContextOptions,
    RouterStatistics,
    SerialOptions,
    SerialStatistics,
)
from relatum.contexts._order import Finding, FindingKind, SerialReport, verify
from relatum.contexts._placement_prune import forget_placements
from relatum.contexts._placements import (
    Assignment,
    ContextsStatus,
    Move,
    MoveProgress,
    MoveState,
    Plan,
    Progress,
)
from relatum.contexts._routers import AffinityRouter, AsyncAffinityRouter, AsyncContextRouter, ContextRouter
from relatum.contexts._serial_consumer import SerialBatch, SerialConsumer
from relatum.contexts._serial_status import (
    HoldStatus,
    PartitionStatus,
    SerialStatus,
    consumers,
    forget_consumer,
)
from relatum.contexts._serialization_contexts import SerializationContexts
from relatum.contexts._super_stream_rows import placed_super_streams

__all__ = [
    "AffinityOptions",
    "AffinityRouter",
    "AffinitySet",
    "AffinitySets",
    "Assignment",
    "AsyncAffinityRouter",
    "AsyncContextRouter",
    "AsyncSerialBatch",
    "AsyncSerialConsumer",
    "ContextOptions",
    "ContextRouter",
    "ContextsStatus",
    "Finding",
    "FindingKind",
    "HoldStatus",
    "Move",
    "MoveProgress",
    "MoveState",
    "PartitionStatus",
    "Plan",
    "Progress",
    "RouterStatistics",
    "SerialBatch",
    "SerialConsumer",
    "SerialOptions",
    "SerialReport",
    "SerialStatistics",
    "SerialStatus",
    "SerializationContexts",
    "consumers",
    "forget_consumer",
    "forget_placements",
    "placed_super_streams",
    "verify",
]
