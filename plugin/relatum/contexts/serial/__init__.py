"""Serialization contexts over the partitions of a super stream: placed, moved, and consumed in order."""

from relatum.contexts.placement._model import MoveState
from relatum.contexts.serial._context_router import AsyncContextRouter, ContextRouter
from relatum.contexts.serial._order import ContextMessage, Finding, FindingKind, SerialReport
from relatum.contexts.serial._order_verify import history, verify
from relatum.contexts.serial.consuming._async_consumer import AsyncSerialConsumer
from relatum.contexts.serial.consuming._consumer import SerialConsumer
from relatum.contexts.serial.consuming._forgetting import forget_consumer
from relatum.contexts.serial.consuming._partition_following import Pause
from relatum.contexts.serial.consuming._serial_batch import AsyncSerialBatch, SerialBatch
from relatum.contexts.serial.consuming._serial_statistics import SerialStatistics
from relatum.contexts.serial.consuming._serial_status import HoldStatus, PartitionStatus, SerialStatus, consumers
from relatum.contexts.serial.moving._assignments import Assignment, ContextsStatus, Move, MoveProgress, Plan, Progress
from relatum.contexts.serial.moving._serialization_contexts import SerializationContexts

__all__ = [
    "Assignment",
    "AsyncContextRouter",
    "AsyncSerialBatch",
    "AsyncSerialConsumer",
    "ContextMessage",
    "ContextRouter",
    "ContextsStatus",
    "Finding",
    "FindingKind",
    "HoldStatus",
    "Move",
    "MoveProgress",
    "MoveState",
    "PartitionStatus",
    "Pause",
    "Plan",
    "Progress",
    "SerialBatch",
    "SerialConsumer",
    "SerialReport",
    "SerialStatistics",
    "SerialStatus",
    "SerializationContexts",
    "consumers",
    "forget_consumer",
    "history",
    "verify",
]
