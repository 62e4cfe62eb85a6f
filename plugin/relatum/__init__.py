"""Relatum finds the messages that belong together, across RabbitMQ streams, without scanning them.

A publisher wraps its connection: `relatum.intercept(connection, database=URL, keys=["order_id"])`. One that needs the
offset of what it published calls `relatum.publish` (`publish_async` for aio-pika) and waits on the receipt.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from relatum import errors
from relatum._ids import MessageId

if TYPE_CHECKING:
    from relatum.affinity import AffinityRouter, AffinitySet, AffinitySets, AsyncAffinityRouter
    from relatum.collecting import (
        AsyncMessageCollector,
        AsyncOutcomes,
        MessageCollector,
        Outcome,
        Outcomes,
        OutcomeStatus,
    )
    from relatum.grouping import GROUP_KEY, new_group_id
    from relatum.interception import (
        AsyncMessageGroup,
        AsyncReceipt,
        MessageGroup,
        Receipt,
        intercept,
        publish,
        publish_async,
        release,
    )
    from relatum.keys import KeyDefinition
    from relatum.serial import (
        AsyncContextRouter,
        AsyncSerialConsumer,
        ContextRouter,
        SerialConsumer,
        SerializationContexts,
    )
    from relatum.superstreams import AffinityHandle, SuperStream

__all__ = [
    "GROUP_KEY",
    "AffinityHandle",
    "AffinityRouter",
    "AffinitySet",
    "AffinitySets",
    "AsyncAffinityRouter",
    "AsyncContextRouter",
    "AsyncMessageCollector",
    "AsyncMessageGroup",
    "AsyncOutcomes",
    "AsyncReceipt",
    "AsyncSerialConsumer",
    "ContextRouter",
    "KeyDefinition",
    "MessageCollector",
    "MessageGroup",
    "MessageId",
    "Outcome",
    "OutcomeStatus",
    "Outcomes",
    "Receipt",
    "SerialConsumer",
    "SerializationContexts",
    "SuperStream",
    "errors",
    "intercept",
    "new_group_id",
    "publish",
    "publish_async",
    "release",
]

_HOMES = {
    "AsyncSerialConsumer": "relatum.serial",
    "SerialConsumer": "relatum.serial",
    "SerializationContexts": "relatum.serial",
    "GROUP_KEY": "relatum.grouping",
    "AffinityHandle": "relatum.superstreams",
    "AffinityRouter": "relatum.affinity",
    "AffinitySet": "relatum.affinity",
    "AffinitySets": "relatum.affinity",
    "AsyncContextRouter": "relatum.serial",
    "AsyncAffinityRouter": "relatum.affinity",
    "AsyncMessageCollector": "relatum.collecting",
    "AsyncMessageGroup": "relatum.interception",
    "AsyncOutcomes": "relatum.collecting",
    "AsyncReceipt": "relatum.interception",
    "ContextRouter": "relatum.serial",
    "KeyDefinition": "relatum.keys",
    "MessageCollector": "relatum.collecting",
    "MessageGroup": "relatum.interception",
    "Outcome": "relatum.collecting",
    "OutcomeStatus": "relatum.collecting",
    "Outcomes": "relatum.collecting",
    "Receipt": "relatum.interception",
    "SuperStream": "relatum.superstreams",
    "intercept": "relatum.interception",
    "new_group_id": "relatum.grouping",
    "publish": "relatum.interception",
    "publish_async": "relatum.interception",
    "release": "relatum.interception",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used.

    This module runs before any other of the package. Were it to import pika and SQLAlchemy, so would the keys and the
    wire format, which need neither, and every start of the command.
    """
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'relatum' has no attribute {name!r}")
    value = getattr(import_module(home), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
