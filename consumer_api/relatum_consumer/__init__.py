"""Find and read the messages that belong together, by key and by time, with proof if there are none.

`Relations` is blocking, `AsyncRelations` is for asyncio; both have the same methods. An `Answer` is a sequence of
messages with a `Status`. The group types are defined in `relatum_consumer.groups`; this module exports most of them.
"""

from relatum_consumer._async_relations import AsyncRelations
from relatum_consumer._relations import Relations
from relatum_consumer.expectations import Expectation, ExpectationResult, MissingReport, Reason, UnmetExpectation
from relatum_consumer.groups import (
    AsyncSharedGroup,
    AsyncSharedGroups,
    Group,
    GroupConsumer,
    GroupConsumerStatus,
    IncompleteGroupReport,
    SharedGroup,
    SharedGroups,
)
from relatum_consumer.lookups.answer import Answer, Hit, MissingKey, NewKey, Status, UnreadableStream
from relatum_consumer.lookups.servers import Health
from relatum_consumer.lookups.telemetry import LookupStatistics
from relatum_consumer.traces import Trace

__all__ = [
    "Answer",
    "AsyncRelations",
    "AsyncSharedGroup",
    "AsyncSharedGroups",
    "Expectation",
    "ExpectationResult",
    "Group",
    "GroupConsumer",
    "GroupConsumerStatus",
    "Health",
    "Hit",
    "IncompleteGroupReport",
    "LookupStatistics",
    "MissingKey",
    "MissingReport",
    "NewKey",
    "Reason",
    "Relations",
    "SharedGroup",
    "SharedGroups",
    "Status",
    "Trace",
    "UnmetExpectation",
    "UnreadableStream",
]
