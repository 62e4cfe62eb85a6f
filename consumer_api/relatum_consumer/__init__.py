"""Finding and reading the messages that belong together: by key, by time, with an honest answer where there is none.

`Relations` is blocking, `AsyncRelations` is for asyncio; both have the same methods. An `Answer` is a sequence of
messages with a `Status`. What their methods for groups take and give is here, too; all of it is in
`relatum_consumer.groups`.
"""

from typing import TYPE_CHECKING

from relatum.faces import imported_later

if TYPE_CHECKING:
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

_HOMES = {
    "Answer": "relatum_consumer.lookups.answer",
    "AsyncRelations": "relatum_consumer._async_relations",
    "AsyncSharedGroup": "relatum_consumer.groups",
    "AsyncSharedGroups": "relatum_consumer.groups",
    "Expectation": "relatum_consumer.expectations",
    "ExpectationResult": "relatum_consumer.expectations",
    "Group": "relatum_consumer.groups",
    "GroupConsumer": "relatum_consumer.groups",
    "GroupConsumerStatus": "relatum_consumer.groups",
    "Health": "relatum_consumer.lookups.servers",
    "Hit": "relatum_consumer.lookups.answer",
    "IncompleteGroupReport": "relatum_consumer.groups",
    "MissingKey": "relatum_consumer.lookups.answer",
    "UnreadableStream": "relatum_consumer.lookups.answer",
    "LookupStatistics": "relatum_consumer.lookups.telemetry",
    "MissingReport": "relatum_consumer.expectations",
    "NewKey": "relatum_consumer.lookups.answer",
    "Relations": "relatum_consumer._relations",
    "SharedGroup": "relatum_consumer.groups",
    "SharedGroups": "relatum_consumer.groups",
    "Status": "relatum_consumer.lookups.answer",
    "Trace": "relatum_consumer.traces",
    "UnmetExpectation": "relatum_consumer.expectations",
    "Reason": "relatum_consumer.expectations",
}

# A command's help needs none of this, nor the database's driver.
__getattr__ = imported_later(__name__, _HOMES)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
