"""Sets of messages placed over the partitions of a super stream: affinity sets, and contexts consumed in order.

`affinity`, `placement` and `serial` are its parts; what other rooms may use of them is here, imported when it is used.
"""

from typing import TYPE_CHECKING

from relatum.faces import imported_later

if TYPE_CHECKING:
    from relatum.contexts.affinity import AffinityRouter, AffinitySet, AffinitySets, AsyncAffinityRouter
    from relatum.contexts.placement import RouterStatistics, forget_placements
    from relatum.contexts.serial import (
        Assignment,
        AsyncContextRouter,
        AsyncSerialBatch,
        AsyncSerialConsumer,
        ContextMessage,
        ContextRouter,
        ContextsStatus,
        Finding,
        FindingKind,
        HoldStatus,
        Move,
        MoveProgress,
        MoveState,
        PartitionStatus,
        Pause,
        Plan,
        Progress,
        SerialBatch,
        SerialConsumer,
        SerializationContexts,
        SerialReport,
        SerialStatus,
        consumers,
        forget_consumer,
        history,
        verify,
    )

__all__ = [
    "AffinityRouter",
    "AffinitySet",
    "AffinitySets",
    "Assignment",
    "AsyncAffinityRouter",
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
    "RouterStatistics",
    "SerialBatch",
    "SerialConsumer",
    "SerialReport",
    "SerialStatus",
    "SerializationContexts",
    "consumers",
    "forget_consumer",
    "forget_placements",
    "history",
    "verify",
]

__getattr__ = imported_later(
    __name__,
    {
        **dict.fromkeys(
            ("AffinityRouter", "AffinitySet", "AffinitySets", "AsyncAffinityRouter"), "relatum.contexts.affinity"
        ),
        **dict.fromkeys(("RouterStatistics", "forget_placements"), "relatum.contexts.placement"),
        **dict.fromkeys(
            (
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
            ),
            "relatum.contexts.serial",
        ),
    },
)
