"""Serialization contexts over the partitions of a super stream: placed, moved, and consumed in order."""

from relatum.placement._model import MoveState
from relatum.serial._order import ContextMessage, Finding, FindingKind, SerialReport
from relatum.serial._router import AsyncContextRouter, ContextRouter
from relatum.serial._verify import history, verify
from relatum.serial.consuming._async_consumer import AsyncSerialConsumer
from relatum.serial.consuming._batch import AsyncSerialBatch, SerialBatch
from relatum.serial.consuming._consumer import SerialConsumer
from relatum.serial.consuming._following import Pause
from relatum.serial.consuming._forgetting import forget_consumer
from relatum.serial.consuming._status import HoldStatus, PartitionStatus, SerialStatus, consumers
from relatum.serial.moving._assignments import Assignment, ContextsStatus, Move, MoveProgress, Plan, Progress
from relatum.serial.moving._contexts import SerializationContexts

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
    "SerialStatus",
    "SerializationContexts",
    "consumers",
    "forget_consumer",
    "history",
    "verify",
]
