"""Reading message groups: whole, in order, found through the table whatever order their messages lie in.

The methods are those of `Relations` and `AsyncRelations`: `groups`, `group`, `grouped`, `group_position`,
`incomplete_groups`, `group_consumer_status`.
"""

from relatum_consumer.groups.reading._assembly import GroupOrder
from relatum_consumer.groups.reading._group_options import (
    GroupArguments,
    OnConflict,
    OnDuplicate,
    SharingArguments,
)
from relatum_consumer.groups.reading._group_values import Group, GroupPage, GroupReport, IncompleteGroupReport
from relatum_consumer.groups.reading._groups import GroupMethods
from relatum_consumer.groups.sharing._async_shared_groups import AsyncSharedGroup, AsyncSharedGroups
from relatum_consumer.groups.sharing._shared_groups import SharedGroup, SharedGroups
from relatum_consumer.groups.sharing._sharing_options import GroupConsumer
from relatum_consumer.groups.sharing._sharing_status import (
    GroupConsumerStatus,
    GroupMemberStatus,
    GroupSourceStatus,
    SharedGroupsStatistics,
)

__all__ = [
    "AsyncSharedGroup",
    "AsyncSharedGroups",
    "Group",
    "GroupArguments",
    "GroupConsumer",
    "GroupConsumerStatus",
    "GroupMemberStatus",
    "GroupMethods",
    "GroupOrder",
    "GroupPage",
    "GroupReport",
    "GroupSourceStatus",
    "IncompleteGroupReport",
    "OnConflict",
    "OnDuplicate",
    "SharedGroup",
    "SharedGroups",
    "SharedGroupsStatistics",
    "SharingArguments",
]
