"""Rows of the table put together as groups: members in order, the place of a group among others. Pure."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import Final, Literal, NamedTuple, TypeAlias

from relatum._ids import MessageId
from relatum.grouping import Anomaly, GroupPosition, Membership, assess
from relatum.limits import INTEGER_MIN

GroupOrder: TypeAlias = Literal["logical", "physical"]


UNGROUPED: Final = Membership("", 0)
"""Stands for the place of a message that is in no group."""


class Member(NamedTuple):
    """A message of a group as the table has it, or one that is in no group.

    It is one flat tuple: a hundred thousand are held at once, and each object more is one more for Python's garbage
    collector to visit again and again.
    """

    group_id: str
    sequence: int
    last: bool
    stream: str
    offset: int
    time_us: int | None

    @property
    def id(self) -> MessageId:
        """Where the message lies."""
        return MessageId(self.stream, self.offset)

    @property
    def membership(self) -> Membership:
        """Its place in the group."""
        return Membership(*self[:3])


_STREAM_AND_OFFSET: Final = itemgetter(3, 4)


class Place(NamedTuple):
    """Where a message stands in the order of arrival over streams.

    `reached_us` is the latest time in its stream up to the message. So a stream's own order is that of its offsets,
    whatever the messages' times are, and streams are merged by time.
    """

    reached_us: int
    stream: str
    offset: int


NEVER_US: Final = INTEGER_MIN
"""Comes before all times: where nothing in a stream had a time so far."""


class Clock:
    """The places of the messages of streams, each stream's given in the order of offsets."""

    def __init__(self) -> None:
        self._reached: dict[str, int] = {}

    def place(self, stream: str, offset: int, time_us: int | None) -> Place:
        """The place of a stream's next message; one of unknown time arrived when the one before it did."""
        reached = self._reached.get(stream, NEVER_US)
        if time_us is not None and time_us > reached:
            self._reached[stream] = reached = time_us
        return Place(reached, stream, offset)


def in_arrival(members: Iterable[Member]) -> list[Member]:
    """The members in the order they arrived: in a stream by offset; streams merged by time, then by name."""
    by_offset = sorted(members, key=_STREAM_AND_OFFSET)
    if not by_offset or by_offset[0].stream == by_offset[-1].stream:
        return by_offset
    clock = Clock()
    return sorted(by_offset, key=lambda member: clock.place(member.stream, member.offset, member.time_us))


def distinct(members: Iterable[Member]) -> list[Member]:
    """The members, each once.

    A row and the message it is of, read before it was recorded, may differ in what they know of the time.
    """
    return list({(member.stream, member.offset): member for member in members}.values())


def by_group(members: Iterable[Member]) -> dict[str, list[Member]]:
    """The members of each group."""
    groups: dict[str, list[Member]] = defaultdict(list)
    for member in members:
        groups[member.group_id].append(member)
    return groups


@dataclass(frozen=True, slots=True)
class Assembled:
    """A group as its rows show it, or a message that is in no group, as a group of one.

    Attributes:
        group_id: Its id; None for a message that is in no group.
        position: How far it is, and what is wrong with it; None for a message that is in no group.
        members: Those retained, one for each number, the one that arrived first; in the order asked for.
        duplicates: Others of the same numbers, in the order of arrival.
        expired: Those that retention has dropped, in the order of arrival.
        was_complete: Whether each number from 1 to the last is there, or was until retention dropped it.
        head: The member whose place is the group's: in logical order the first of number 1, in physical order the
            first of all; None where there is none.
    """

    group_id: str | None
    position: GroupPosition | None
    members: tuple[Member, ...]
    duplicates: tuple[Member, ...] = ()
    expired: tuple[Member, ...] = ()
    was_complete: bool = True
    head: Member | None = None

    @property
    def is_complete(self) -> bool:
        """Whether each number from 1 to the last is there and retained."""
        return self.position is None or self.position.is_complete

    @property
    def anomalies(self) -> tuple[Anomaly, ...]:
        """What is wrong with it besides being incomplete."""
        return () if self.position is None else self.position.anomalies


def assemble(
    group_id: str, members: Iterable[Member], order: GroupOrder = "logical", floors: Mapping[str, int] | None = None
) -> Assembled:
    """A group out of its rows, which come in any order, each once.

    Args:
        group_id: The group.
        members: All its rows.
        order: "logical" puts members in the order of their numbers, "physical" in that of their arrival.
        floors: The first retained offset by stream: rows before it have expired.
    """
    arrived = in_arrival(members)
    expired: list[Member] = []
    if floors:
        expired = [member for member in arrived if is_expired(member, floors)]
        if expired:
            arrived = [member for member in arrived if not is_expired(member, floors)]
    chosen: dict[int, Member] = {}
    duplicates = tuple(member for member in arrived if chosen.setdefault(member.sequence, member) is not member)
    # A dictionary keeps the order things came in: that of arrival.
    ordered = list(chosen.values()) if order == "physical" else [chosen[number] for number in sorted(chosen)]
    head = next(iter(ordered), None) if order == "physical" else chosen.get(1)
    there, gone = [member.membership for member in arrived], [member.membership for member in expired]
    position = assess(group_id, there, expired=gone)
    was_complete = assess(group_id, there + gone).is_complete if gone else position.is_complete
    return Assembled(group_id, position, tuple(ordered), duplicates, tuple(expired), was_complete, head)


def alone(stream: str, offset: int, time_us: int | None) -> Assembled:
    """A message that is in no group, as a group of one."""
    member = Member(*UNGROUPED, stream, offset, time_us)
    return Assembled(None, None, (member,), head=member)


def is_expired(member: Member, floors: Mapping[str, int]) -> bool:
    """Whether retention has dropped a member's message."""
    return member.offset < floors.get(member.stream, 0)
