"""Sets of messages placed over the partitions of a super stream: affinity sets, and contexts consumed in order.

`affinity`, `placement` and `serial` are its parts; what other rooms may use of them is here.
"""

from relatum.contexts.affinity._affinity_options import AffinityOptions
from relatum.contexts.affinity._affinity_router import AffinityRouter
from relatum.contexts.affinity._async_affinity_router import AsyncAffinityRouter
from relatum.contexts.affinity._sets import AffinitySet, AffinitySets
from relatum.contexts.placement._model import MoveState
from relatum.contexts.placement._placement_opening import placed_super_streams
from relatum.contexts.placement._placement_prune import forget_placements
from relatum.contexts.placement._router_statistics import RouterStatistics
from relatum.contexts.serial._async_context_router import AsyncContextRouter
from relatum.contexts.serial._context_options import ContextOptions
from relatum.contexts.serial._context_router import ContextRouter
from relatum.contexts.serial._order import ContextMessage, Finding, FindingKind, SerialReport
from relatum.contexts.serial._order_verify import verify
from relatum.contexts.serial.consuming._async_consumer import AsyncSerialConsumer
from relatum.contexts.serial.consuming._consumer import SerialConsumer
from relatum.contexts.serial.consuming._serial_batch import AsyncSerialBatch, SerialBatch
from relatum.contexts.serial.consuming._serial_options import SerialOptions
from relatum.contexts.serial.consuming._serial_statistics import SerialStatistics
from relatum.contexts.serial.consuming._serial_status import (
    HoldStatus,
    PartitionStatus,
    SerialStatus,
    consumers,
    forget_consumer,
)
from relatum.contexts.serial.moving._assignments import Assignment, ContextsStatus, Move, MoveProgress, Plan, Progress
from relatum.contexts.serial.moving._serialization_contexts import SerializationContexts

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
    "ContextMessage",
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
