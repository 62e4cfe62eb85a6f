"""Rows of the table put together as groups: members in order, the place of a group among others. Pure."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import Final, Literal, NamedTuple, TypeAlias, TypeVar

from relatum.ids import MessageId
from relatum.limits import INTEGER_MIN
from relatum.membership import Anomaly, GroupPosition, Membership, assess

GroupOrder: TypeAlias = Literal["logical", "physical"]


Row: TypeAlias = tuple[str, int, bool, str, int, int | None]
"""The fields of a `Member`. A hundred thousand are held at once: Python's garbage collector visits each object of a
class again and again, and a plain tuple of texts and numbers but once."""


class Member(NamedTuple):
    """A message of a group as the table has it."""

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


_AnyRow = TypeVar("_AnyRow", bound=Row)


def in_arrival(members: Iterable[_AnyRow]) -> list[_AnyRow]:
    """The members in the order they arrived: in a stream by offset; streams merged by time, then by name."""
    by_offset = sorted(members, key=_STREAM_AND_OFFSET)
    if not by_offset or by_offset[0][3] == by_offset[-1][3]:
        return by_offset
    clock = Clock()
    return sorted(by_offset, key=lambda member: clock.place(*member[3:]))


def distinct(members: Iterable[_AnyRow]) -> list[_AnyRow]:
    """The members, each once.

    A row and the message it is of, read before it was recorded, may differ in what they know of the time.
    """
    return list({member[3:5]: member for member in members}.values())


def by_group(members: Iterable[Member]) -> dict[str, list[Member]]:
    """The members of each group."""
    groups: dict[str, list[Member]] = defaultdict(list)
    for member in members:
        groups[member.group_id].append(member)
    return groups


@dataclass(frozen=True, slots=True)
class Assembled:
    """A group as its rows show it.

    Attributes:
        group_id: Its id.
        position: How far it is, and what is wrong with it.
        rows: Those retained, one for each number, the one that arrived first; in the order asked for.
        duplicate_rows: Others of the same numbers, in the order of arrival.
        expired: Those that retention has dropped, in the order of arrival.
        was_complete: Whether each number from 1 to the last is there, or was until retention dropped it.
        head: The member whose place is the group's: in logical order the first of number 1, in physical order the
            first of all; None where there is none.
    """

    group_id: str
    position: GroupPosition
    rows: tuple[Row, ...]
    duplicate_rows: tuple[Row, ...] = ()
    expired: tuple[Member, ...] = ()
    was_complete: bool = True
    head: Member | None = None

    @property
    def members(self) -> tuple[Member, ...]:
        """The rows as members."""
        return tuple(Member(*row) for row in self.rows)

    @property
    def duplicates(self) -> tuple[Member, ...]:
        """The rows of duplicates as members."""
        return tuple(Member(*row) for row in self.duplicate_rows)

    @property
    def is_complete(self) -> bool:
        """Whether each number from 1 to the last is there and retained."""
        return self.position.is_complete

    @property
    def anomalies(self) -> tuple[Anomaly, ...]:
        """What is wrong with it besides being incomplete."""
        return self.position.anomalies


def assemble(
    group_id: str, members: Iterable[Row], order: GroupOrder = "logical", floors: Mapping[str, int] | None = None
) -> Assembled:
    """A group out of its rows, which come in any order, each once."""
    arrived = in_arrival(members)
    expired: list[Row] = []
    if floors:
        expired = [row for row in arrived if _is_expired(row, floors)]
        if expired:
            arrived = [row for row in arrived if not _is_expired(row, floors)]
    chosen: dict[int, Row] = {}
    duplicates = tuple(row for row in arrived if chosen.setdefault(row[1], row) is not row)
    # A dictionary keeps the order things came in: that of arrival.
    rows = list(chosen.values()) if order == "physical" else [chosen[number] for number in sorted(chosen)]
    head = next(iter(rows), None) if order == "physical" else chosen.get(1)
    there, gone = [row[:3] for row in arrived], [row[:3] for row in expired]
    position = assess(group_id, there, expired=gone)
    return Assembled(
        group_id,
        position,
        tuple(rows),
        duplicates,
        tuple(Member(*row) for row in expired),
        assess(group_id, there + gone).is_complete if gone else position.is_complete,
        None if head is None else Member(*head),
    )


def _is_expired(row: Row, floors: Mapping[str, int]) -> bool:
    return row[4] < floors.get(row[3], 0)
