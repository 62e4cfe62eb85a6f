"""A group as it comes: its messages one after the other, waiting for the next."""

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial

from relatum.errors import IncompleteGroup
from relatum.membership import Anomaly, GroupPosition
from relatum.reading import Message
from relatum_consumer.groups.reading._assembly import Assembled, GroupOrder, Member
from relatum_consumer.groups.reading._delivery import Reading, conflict, is_sound, read_members
from relatum_consumer.groups.reading._group_limits import PART_MESSAGES
from relatum_consumer.groups.reading._group_options import GroupOptions
from relatum_consumer.groups.reading._group_position import settled, standing
from relatum_consumer.groups.reading._group_requests import GivingSteps, GroupSteps
from relatum_consumer.groups.reading._group_scan import Scan
from relatum_consumer.groups.reading._streams_view import look
from relatum_consumer.groups.reading._whole_groups import Batches, Ends, Idle, offset_of
from relatum_consumer.lookups import POLL_S_MAX, POLL_S_MIN, Catalog, Pause


@dataclass(frozen=True, slots=True)
class Unfolding:
    """A group to be given as it comes."""

    group_id: str | None
    position: GroupPosition | None
    messages: Callable[[], GivingSteps[Message, None]]


def unfolding_groups(catalog: Catalog, options: GroupOptions) -> GivingSteps[Unfolding, None]:
    """Give each group as it is found, complete or not."""
    view = yield from look(catalog, options.names, complete=options.complete)
    batches = Batches(view, Scan(view, options.order, offset_of(options), ungrouped=options.ungrouped), options)
    ends, idle = Ends(catalog, view, options.names), Idle(options.idle_timeout_s)
    while True:
        was_given = False
        while (batch := (yield from batches.next())) is not None:
            for group in batch:
                yield _unfolding(catalog, options, group)
                was_given = True
        if not options.follow or not (yield from idle.wait(was_busy=was_given)):
            return
        view.stops.update((yield from ends.beyond()))


def _unfolding(catalog: Catalog, options: GroupOptions, group: Assembled) -> Unfolding:
    if group.group_id is None:
        return Unfolding(None, None, partial(_alone, group, options))
    return Unfolding(group.group_id, group.position, partial(unfold, catalog, options, group.group_id))


def _alone(group: Assembled, options: GroupOptions) -> GivingSteps[Message, None]:
    """Give the one message of a group of one, unless retention took it meanwhile."""
    messages, _ = yield from read_members(Reading(group.members), group.members, is_named=options.is_named)
    yield from messages


def unfold(catalog: Catalog, options: GroupOptions, group_id: str) -> GivingSteps[Message, None]:
    """Give a group's messages as they come: by number, or in physical order by arrival.

    Raises:
        IncompleteGroup: the next message did not come in time; the streams were looked through once more at the end.
        GroupConflict: the group is not sound.
    """
    given: set[int] = set()
    deadline: float | None = None
    pause = POLL_S_MIN
    while True:
        is_last_look = deadline is not None and time.monotonic() >= deadline
        group = yield from standing(
            catalog, group_id, options.names, order=options.order, complete=is_last_look and options.complete
        )
        if not (yield from _is_sound(group, options)):
            return
        ready = _ready(group, given, options.order)
        if ready:
            if not (yield from _give(ready, given, options)):
                return
            deadline = None
            continue
        if group.is_complete:
            return
        if is_last_look:
            raise _overdue(group)
        if deadline is None:
            deadline, pause = time.monotonic() + options.timeout_s, POLL_S_MIN
        yield from Pause(max(0.0, min(pause, deadline - time.monotonic())))
        pause = min(2 * pause, POLL_S_MAX)


def _is_sound(group: Assembled, options: GroupOptions) -> GroupSteps[bool]:
    """Whether to go on with a group."""
    if not is_sound(group, options):
        return False
    if options.on_duplicate == "raise" and Anomaly.DUPLICATE in group.anomalies:
        position = yield from settled(group, is_named=options.is_named)
        if Anomaly.DUPLICATE in position.anomalies:
            raise conflict(group.group_id, Anomaly.DUPLICATE)
    return True


def _ready(group: Assembled, given: Collection[int], order: GroupOrder) -> list[Member]:
    """The members whose turn it is, a part at most; of those given before, the numbers."""
    if order == "physical":
        # By number: another message of a number may be recorded later and have arrived before the one that was given.
        return [member for member in group.members if member.sequence not in given][:PART_MESSAGES]
    there = 0 if group.position is None else group.position.contiguous
    return list(group.members[len(given) : min(there, len(given) + PART_MESSAGES)])


def _give(ready: Sequence[Member], given: set[int], options: GroupOptions) -> GivingSteps[Message, bool]:
    """Give members; False where retention took one meanwhile, and the group is to be passed over."""
    messages, floors = yield from read_members(Reading(ready), ready, is_named=options.is_named)
    if floors:
        if options.on_conflict == "raise":
            raise conflict(ready[0].group_id, Anomaly.EXPIRED)
        return False
    for member, message in zip(ready, messages, strict=True):
        given.add(member.sequence)
        yield message
    return True


def _overdue(group: Assembled) -> IncompleteGroup:
    position = group.position
    assert position is not None, "it is a group"
    return IncompleteGroup(
        f"message {position.next_sequence} of the group {group.group_id} did not come in time",
        group_id=group.group_id,
        missing=position.missing,
        last_sequence=position.last_sequence,
    )
