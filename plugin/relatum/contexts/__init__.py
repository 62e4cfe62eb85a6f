"""Sets of messages placed over the partitions of a super stream: affinity sets, and contexts consumed in order.

`affinity`, `placement` and `serial` are its parts; what other rooms may use of them is here.
"""

from relatum.contexts._async_routers import AsyncAffinityRouter, AsyncContextRouter
from relatum.contexts._options import AffinityOptions, ContextOptions, SerialOptions
from relatum.contexts._routers import AffinityRouter, ContextRouter
from relatum.contexts._statistics import RouterStatistics, SerialStatistics
from relatum.contexts.affinity._sets import AffinitySet, AffinitySets
from relatum.contexts.placement._model import Move, MoveState
from relatum.contexts.placement._placement_opening import placed_super_streams
from relatum.contexts.placement._placement_prune import forget_placements
from relatum.contexts.serial._order import ContextMessage, Finding, FindingKind, SerialReport
from relatum.contexts.serial._order_verify import verify
from relatum.contexts.serial.consuming._async_consumer import AsyncSerialConsumer
from relatum.contexts.serial.consuming._batch import AsyncSerialBatch, SerialBatch
from relatum.contexts.serial.consuming._consumer import SerialConsumer
from relatum.contexts.serial.consuming._serial_status import (
    HoldStatus,
    PartitionStatus,
    SerialStatus,
    consumers,
    forget_consumer,
)
from relatum.contexts.serial.moving._assignments import Assignment, ContextsStatus, MoveProgress, Plan, Progress
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
