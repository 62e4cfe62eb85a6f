"""Serialization contexts over the partitions of a super stream: placed, moved, and consumed in order."""

from relatum.serial._order import ContextMessage, Finding, FindingKind, SerialReport
from relatum.serial._router import AsyncContextRouter, ContextRouter
from relatum.serial._verify import history, verify

__all__ = [
    "AsyncContextRouter",
    "ContextMessage",
    "ContextRouter",
    "Finding",
    "FindingKind",
    "SerialReport",
    "history",
    "verify",
]
