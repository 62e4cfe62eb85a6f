"""The look-ups of groups by their public arguments: checked, and turned into steps. One for both faces."""

from datetime import timedelta
from typing import Any

from relatum.checks import checked_seconds
from relatum.membership import GroupPosition, checked_group_id, checked_sequence
from relatum_consumer.groups.reading import _group_position as position
from relatum_consumer.groups.reading._assembly import GroupOrder
from relatum_consumer.groups.reading._group_options import GroupOptions, check_order
from relatum_consumer.groups.reading._group_requests import GivingSteps, GroupSteps
from relatum_consumer.groups.reading._group_values import Group, IncompleteGroupReport
from relatum_consumer.groups.reading._open_group import Unfolding, unfolding_groups
from relatum_consumer.groups.reading._whole_groups import whole_groups
from relatum_consumer.lookups import Answer, Catalog, Names, names_of


class GroupLookups:
    """Look-ups of groups in the streams of one virtual host; what they mean is told at `Relations`."""

    def __init__(self, catalog: Catalog) -> None:
        self.catalog = catalog

    def groups(self, streams: Names, options: dict[str, Any]) -> GivingSteps[Group | Unfolding, None]:
        """Groups one after the other."""
        checked = GroupOptions(names_of("streams", streams), **options)
        return whole_groups(self.catalog, checked) if checked.complete_only else unfolding_groups(self.catalog, checked)

    def group(self, group_id: str, streams: Names, order: GroupOrder, *, complete: bool) -> GroupSteps[Group]:
        """One group."""
        check_order(order)
        names = names_of("streams", streams)
        return position.group(self.catalog, checked_group_id(group_id), names, order=order, complete=complete)

    def grouped(self, group_id: str, sequence: int, streams: Names, *, complete: bool) -> GroupSteps[Answer]:
        """The messages of one number of a group."""
        names = names_of("streams", streams)
        checked = checked_group_id(group_id), checked_sequence(sequence)
        return position.grouped(self.catalog, *checked, names, complete=complete)

    def group_position(self, group_id: str, streams: Names, *, complete: bool) -> GroupSteps[GroupPosition]:
        """How far a group is."""
        names = names_of("streams", streams)
        return position.position(self.catalog, checked_group_id(group_id), names, complete=complete)

    def incomplete_groups(
        self, streams: Names, older_than: timedelta | float
    ) -> GroupSteps[list[IncompleteGroupReport]]:
        """Groups that are not complete."""
        seconds = older_than.total_seconds() if isinstance(older_than, timedelta) else older_than
        checked_seconds("older_than", seconds)
        return position.incomplete(self.catalog, names_of("streams", streams), round(seconds * 1_000_000))
