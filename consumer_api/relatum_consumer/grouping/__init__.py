"""Reading message groups: whole, in order, found through the table whatever order their messages lie in."""

from relatum_consumer.grouping._assembly import GroupOrder
from relatum_consumer.grouping._group import Group, IncompleteGroupReport
from relatum_consumer.grouping._options import OnConflict, OnDuplicate

__all__ = ["Group", "GroupOrder", "IncompleteGroupReport", "OnConflict", "OnDuplicate"]
