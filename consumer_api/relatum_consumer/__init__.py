"""Finding and reading the messages that belong together: by key, by time, with an honest answer where there is none.

`Relations` is blocking, `AsyncRelations` is for asyncio; both have the same methods. An `Answer` is a sequence of
messages with a `Status`.
"""

from relatum_consumer._answer import Answer, Hit, Status
from relatum_consumer._async_relations import AsyncRelations
from relatum_consumer._relations import Relations

__all__ = [
    "Answer",
    "AsyncRelations",
    "Hit",
    "Relations",
    "Status",
]
