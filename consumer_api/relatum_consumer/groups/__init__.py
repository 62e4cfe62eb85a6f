"""Read message groups, complete and in order; the index finds their messages in all streams.

The methods belong to `Relations` and `AsyncRelations`: `groups`, `group`, `grouped`, `group_position`,
`incomplete_groups`, `group_consumers`, `group_consumer_status`.
"""

from relatum_consumer.groups._assembly import GroupOrder
from relatum_consumer.groups._consumer import SharedGroupsStatistics
from relatum_consumer.groups._groups import GroupConsumerStatus, GroupMemberStatus, GroupMethods, GroupSourceStatus
from relatum_consumer.groups._options import GroupArguments, GroupConsumer, OnConflict, OnDuplicate, SharingArguments
from relatum_consumer.groups._reading import Group, GroupPage, GroupReport, IncompleteGroupReport
from relatum_consumer.groups._shared_groups import AsyncSharedGroup, AsyncSharedGroups, SharedGroup, SharedGroups

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
