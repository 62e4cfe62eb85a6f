"""Assembles groups from rows of the table: members in order, and the group's place among others. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import Final, Literal, NamedTuple, TypeAlias

from relatum.ids import MessageId
from relatum.limits import INTEGER_MIN
from relatum.membership import Anomaly, GroupPosition, assess

GroupOrder: TypeAlias = Literal["logical", "physical"]

_FINAL: Final = (Anomaly.EXPIRED, Anomaly.TWO_LASTS, Anomaly.PAST_LAST)
"""Anomalies that a complete group cannot recover from. The first that applies is reported."""


Row: TypeAlias = tuple[str, int, bool, str, int, int | None]
"""The fields of a `Member`. A hundred thousand rows are held at once. Python's garbage collector skips plain tuples of
texts and numbers, but visits objects of a class repeatedly: tuples take a tenth of the time."""


class Member(NamedTuple):
    """A message of a group, from its row. The first three fields are those of a `Membership`."""

    group_id: str
    sequence: int
    last: bool
    stream: str
    offset: int
    time_us: int | None

    @property
    def id(self) -> MessageId:
        """The message's stream and offset."""
        return MessageId(self.stream, self.offset)


def named(rows: Iterable[Row]) -> list[Member]:
    """Return rows as members."""
    return [Member(*row) for row in rows]


stream_and_offset: Final = itemgetter(3, 4)


class Place(NamedTuple):
    """The position of a message in the order of arrival over streams.

    `reached_us` is the latest time in the message's stream up to the message. So a stream's messages are ordered by
    offset, whatever their times are, and streams are merged by time.
    """

    reached_us: int
    stream: str
    offset: int


NEVER_US: Final = INTEGER_MIN
"""Sorts before all times: no message in the stream has had a time so far."""


class Clock:
    """Computes messages' places. It gets the messages of each stream in the order of offsets."""

    def __init__(self) -> None:
        self._reached: dict[str, int] = {}

    def place(self, row: Row) -> Place:
        """Return the place of a stream's next message. Without a time, it has the time of the message before it."""
        _, _, _, stream, offset, time_us = row
        reached = self._reached.get(stream, NEVER_US)
        if time_us is not None and time_us > reached:
            self._reached[stream] = reached = time_us
        return Place(reached, stream, offset)


def in_arrival(rows: Iterable[Row]) -> list[Row]:
    """Return the rows in the order of arrival: by offset in a stream; streams merged by time, then by name."""
    by_offset = sorted(rows, key=stream_and_offset)
    if not by_offset or by_offset[0][3] == by_offset[-1][3]:
        return by_offset
    return sorted(by_offset, key=Clock().place)


def distinct(rows: Iterable[Row]) -> list[Row]:
    """Return the rows without repetitions.

    A row from the table and one made from the unrecorded message may have different times.
    """
    return list({stream_and_offset(row): row for row in rows}.values())


@dataclass(frozen=True, slots=True)
class Assembled:
    """A group, assembled from its rows.

    Attributes:
        group_id: The group's id.
        position: The group's progress and anomalies.
        rows: The retained rows, one for each number: the first that arrived. In the requested order.
        duplicates: Other rows with the same numbers, in the order of arrival.
        expired: Rows of messages that retention has dropped, in the order of arrival.
        was_complete: Whether each number from 1 to the last is present, or was until retention dropped it.
        head: The member whose place is the group's place: the first with number 1 in logical order, the first member in
            physical order; None if there is none.
    """

    group_id: str
    position: GroupPosition
    rows: tuple[Row, ...]
    duplicates: tuple[Row, ...] = ()
    expired: tuple[Row, ...] = ()
    was_complete: bool = True
    head: Member | None = None

    @property
    def retained(self) -> tuple[Row, ...]:
        """The rows whose messages can be read, in the order of reading: duplicates last."""
        return self.rows + self.duplicates if self.duplicates else self.rows

    @property
    def is_complete(self) -> bool:
        """Whether each number from 1 to the last is present and retained."""
        return self.position.is_complete

    @property
    def flaw(self) -> Anomaly | None:
        """The anomaly for which the group must not be delivered even if it is complete; None if it is sound."""
        anomalies = self.position.anomalies
        return next((each for each in _FINAL if each in anomalies), None) if anomalies else None


def assemble(
    group_id: str, rows: Iterable[Row], order: GroupOrder = "logical", floors: Mapping[str, int] | None = None
) -> Assembled:
    """Assemble a group from its rows, which come in any order and without repetitions.

    `floors`: The first retained offset of each stream.
    """
    arrived = in_arrival(rows)
    expired: list[Row] = []
    if floors and any(row[4] < floors.get(row[3], 0) for row in arrived):
        expired = [row for row in arrived if row[4] < floors.get(row[3], 0)]
        arrived = [row for row in arrived if row[4] >= floors.get(row[3], 0)]
    chosen: dict[int, Row] = {}
    duplicates = tuple(row for row in arrived if chosen.setdefault(row[1], row) is not row)
    # The dictionary is in the order of arrival.
    ordered = list(chosen.values()) if order == "physical" else [chosen[number] for number in sorted(chosen)]
    head = next(iter(ordered), None) if order == "physical" else chosen.get(1)
    there, gone = [row[:3] for row in arrived], [row[:3] for row in expired]
    position = assess(group_id, there, expired=gone)
    return Assembled(
        group_id,
        position,
        tuple(ordered),
        duplicates,
        tuple(expired),
        assess(group_id, there + gone).is_complete if gone else position.is_complete,
        None if head is None else Member(*head),
    )
