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
    "relatum_consumer._async_relations": ["AsyncRelations"],
    "relatum_consumer._relations": ["Relations"],
    "relatum_consumer.expectations": ["MissingReport", "Reason", *(each for each in __all__ if "Expectation" in each)],
    "relatum_consumer.groups": [each for each in __all__ if "Group" in each],
    "relatum_consumer.lookups.answer": ["Answer", "Hit", "MissingKey", "NewKey", "Status", "UnreadableStream"],
    "relatum_consumer.lookups.servers": ["Health"],
    "relatum_consumer.lookups.telemetry": ["LookupStatistics"],
    "relatum_consumer.traces": ["Trace"],
}

# A command's help needs none of this, nor the database's driver: that is a second of a processor.
__getattr__ = imported_later(__name__, {name: home for home, names in _HOMES.items() for name in names})


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
