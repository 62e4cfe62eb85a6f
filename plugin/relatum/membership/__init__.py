"""Message groups: what a message's place in one is, and how far a group has come. No input or output happens here.

A group is a set of messages that carry one id, numbers from 1 on without gaps, and a flag on the last of them, all in
headers: `group_id`, `group_sequence` and `group_last`. `relatum.MessageGroup` publishes them; they are found by the
key `GROUP_KEY`.
"""

from relatum.membership._membership import (
    GROUP_KEY,
    GroupFault,
    GroupStatus,
    Membership,
    checked_group_id,
    checked_membership,
    checked_sequence,
    group_status,
    membership,
    new_group_id,
    parse_value,
    value_bounds,
    value_of,
)
from relatum.membership._numbering import Numbering
from relatum.membership._position import Anomaly, GroupPosition, Ranges, assess

__all__ = [
    "GROUP_KEY",
    "Anomaly",
    "GroupFault",
    "GroupPosition",
    "GroupStatus",
    "Membership",
    "Numbering",
    "Ranges",
    "assess",
    "checked_group_id",
    "checked_membership",
    "checked_sequence",
    "group_status",
    "membership",
    "new_group_id",
    "parse_value",
    "value_bounds",
    "value_of",
]
