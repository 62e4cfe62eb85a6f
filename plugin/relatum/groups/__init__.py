"""Message groups as publishers send them: in a logical order, each message with its number.

What a message's place in a group is stands in `relatum.membership`; groups are read by `relatum_consumer.groups`.
"""

from relatum.groups._group import AsyncMessageGroup, MessageGroup
from relatum.membership import GROUP_KEY, Membership, new_group_id

__all__ = [
    "GROUP_KEY",
    "AsyncMessageGroup",
    "Membership",
    "MessageGroup",
    "new_group_id",
]
