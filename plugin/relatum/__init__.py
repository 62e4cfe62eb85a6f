"""Finds related messages across RabbitMQ streams by an index, without scanning the streams.

A publisher wraps its connection: `relatum.intercept(connection, database=URL, keys=["order_id"])`. A publisher that
needs a message's offset calls `relatum.publish` (`publish_async` for aio-pika) and waits on the receipt.
"""

from typing import TYPE_CHECKING

from relatum import errors
from relatum.common.faces import lazy_attributes
from relatum.common.ids import MessageId

if TYPE_CHECKING:
    from relatum.collecting import AsyncMessageCollector, MessageCollector
    from relatum.contexts import (
        AffinityRouter,
        AffinitySet,
        AffinitySets,
        AsyncAffinityRouter,
        AsyncContextRouter,
        AsyncSerialConsumer,
        ContextRouter,
        SerialConsumer,
        SerializationContexts,
    )
    from relatum.keys import KeyDefinition
    from relatum.membership import GROUP_KEY, new_group_id
    from relatum.outcomes import AsyncOutcomes, Outcome, Outcomes, OutcomeStatus
    from relatum.publishing import (
        AsyncMessageGroup,
        AsyncReceipt,
        MessageGroup,
        Receipt,
        intercept,
        publish,
        publish_async,
        release,
        stamped,
        statistics,
    )
    from relatum.reading import Broker
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
    "Broker",
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
    "stamped",
    "statistics",
]

_MODULES = {
    name: f"relatum.{package}"
    for package, names in {
        "collecting": "AsyncMessageCollector MessageCollector",
        "contexts": "AffinityRouter AffinitySet AffinitySets AsyncAffinityRouter AsyncContextRouter "
        "AsyncSerialConsumer ContextRouter SerialConsumer SerializationContexts",
        "keys": "KeyDefinition",
        "membership": "GROUP_KEY new_group_id",
        "outcomes": "AsyncOutcomes Outcome OutcomeStatus Outcomes",
        "publishing": "AsyncMessageGroup AsyncReceipt MessageGroup Receipt intercept publish publish_async "
        "release stamped statistics",
        "reading": "Broker",
        "superstreams": "AffinityHandle SuperStream",
    }.items()
    for name in names.split()
}

# Every import of a submodule runs this module first. Eager imports here would load pika and SQLAlchemy for the keys and
# the wire format, which need neither, and at every start of the command.
__getattr__ = lazy_attributes(__name__, _MODULES)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
