"""Finding and reading the messages that belong together: by key, by time, with an honest answer where there is none.

`Relations` is blocking, `AsyncRelations` is for asyncio; both have the same methods. An `Answer` is a sequence of
messages with a `Status`. What their methods for groups take and give is here, too; all of it is in
`relatum_consumer.groups`.
"""

from relatum_consumer._async_relations import AsyncRelations
from relatum_consumer._lookup_statistics import LookupStatistics
from relatum_consumer._relations import Relations
from relatum_consumer.groups import (
    AsyncOpenGroup,
    AsyncSharedGroup,
    AsyncSharedGroups,
    Group,
    GroupConsumer,
    GroupConsumerStatus,
    IncompleteGroupReport,
    OpenGroup,
    SharedGroup,
    SharedGroups,
)
from relatum_consumer.lookups import Answer, Health, Hit, Lacking, LeftOut, Status

__all__ = [
    "Answer",
    "AsyncOpenGroup",
    "AsyncRelations",
    "AsyncSharedGroup",
    "AsyncSharedGroups",
    "Group",
    "GroupConsumer",
    "GroupConsumerStatus",
    "Health",
    "Hit",
    "IncompleteGroupReport",
    "Lacking",
    "LeftOut",
    "LookupStatistics",
    "OpenGroup",
    "Relations",
    "SharedGroup",
    "SharedGroups",
    "Status",
]
