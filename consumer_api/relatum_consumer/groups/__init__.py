"""Reading message groups: whole, in order, found through the table whatever order their messages lie in.

The methods are those of `Relations` and `AsyncRelations`: `groups`, `group`, `grouped`, `group_position`,
`incomplete_groups`, `group_consumer_status`.
"""

from relatum_consumer.grouping._assembly import GroupOrder
from relatum_consumer.grouping._asyncio import AsyncOpenGroup
from relatum_consumer.grouping._blocking import OpenGroup
from relatum_consumer.grouping._durable_asyncio import AsyncSharedGroup, AsyncSharedGroups
from relatum_consumer.grouping._durable_blocking import SharedGroup, SharedGroups
from relatum_consumer.grouping._durable_options import GroupConsumer
from relatum_consumer.grouping._durable_status import GroupConsumerStatus, GroupMemberStatus, GroupSourceStatus
from relatum_consumer.grouping._group import Group, IncompleteGroupReport
from relatum_consumer.grouping._options import OnConflict, OnDuplicate

__all__ = [
    "AsyncOpenGroup",
    "AsyncSharedGroup",
    "AsyncSharedGroups",
    "Group",
    "GroupConsumer",
    "GroupConsumerStatus",
    "GroupMemberStatus",
    "GroupOrder",
    "GroupSourceStatus",
    "IncompleteGroupReport",
    "OnConflict",
    "OnDuplicate",
    "OpenGroup",
    "SharedGroup",
    "SharedGroups",
]
