"""Serialization contexts over the partitions of a super stream: placed, moved, and consumed in order."""

from relatum.placement._model import MoveState
from relatum.serial._assignments import Assignment, ContextsStatus, Move, MoveProgress, Plan, Progress
from relatum.serial._async_consumer import AsyncSerialConsumer
from relatum.serial._batch import AsyncSerialBatch, SerialBatch
from relatum.serial._consumer import SerialConsumer
from relatum.serial._consumer_status import HoldStatus, PartitionStatus, SerialStatus
from relatum.serial._contexts import SerializationContexts
from relatum.serial._following import Pause
from relatum.serial._forgetting import forget_consumer
from relatum.serial._order import ContextMessage, Finding, FindingKind, SerialReport
from relatum.serial._router import AsyncContextRouter, ContextRouter
from relatum.serial._verify import history, verify

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
    "forget_consumer",
    "history",
    "verify",
]
