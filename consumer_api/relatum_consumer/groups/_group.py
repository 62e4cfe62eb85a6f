"""What reading groups gives: a group's messages in order, and what is known of the group."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import overload

from relatum.ids import MessageId
from relatum.membership import GroupPosition, GroupStatus, group_status, membership
from relatum.reading import Message
from relatum_consumer.lookups.proof import Uncovered


@dataclass(frozen=True, slots=True, eq=False)
class Group(Sequence[Message]):
    """A group's messages, one for each number, in the order asked for. It does not change.

    It is a sequence of messages: `len(group)`, `group[0]`, `for message in group`; `group.at(1)` goes by number.

    Attributes:
        group_id: Its id, 48 hexadecimal digits.
        messages: The messages, each read and checked.
        position: How far the group is, what is missing, and what is wrong with it.
        duplicates: Further messages with numbers that `messages` has already, in the order of arrival.
        expired: Where messages of the group lay that retention has dropped.
    """

    group_id: str
    messages: tuple[Message, ...]
    position: GroupPosition
    duplicates: tuple[Message, ...] = ()
    expired: tuple[MessageId, ...] = field(default=())

    @property
    def is_complete(self) -> bool:
        """Whether each number from 1 to the last is there."""
        return self.position.is_complete

    def at(self, sequence: int) -> Message | None:
        """The message of a number; None if there is none."""
        # A whole group in logical order has it at its place.
        likely = self.messages[sequence - 1 : sequence] if sequence > 0 else ()
        return next((message for message in (*likely, *self.messages) if sequence_of(message) == sequence), None)

    def status_of(self, message: Message) -> GroupStatus:
        """Whether a message is in no group, in one, or the last of one."""
        return group_status(message)

    def __len__(self) -> int:
        return len(self.messages)

    def __iter__(self) -> Iterator[Message]:
        return iter(self.messages)

    @overload
    def __getitem__(self, index: int) -> Message: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Message, ...]: ...
    def __getitem__(self, index: int | slice) -> Message | tuple[Message, ...]:
        return self.messages[index]

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.group_id}: {len(self.messages)} messages>"


def sequence_of(message: Message) -> int | None:
    """A message's number in its group; None if it is in no group."""
    place = membership(message.headers)
    return None if place is None else place.sequence


@dataclass(frozen=True, slots=True)
class GroupReport:
    """A group, without its messages.

    Attributes:
        group_id: Its id.
        position: What is there, what is missing, and what is wrong.
        first_seen: The time of its earliest message; None where no message of it has a time.
        last_seen: The time of its latest message; None where no message of it has a time.
        places: The ids of its messages, in the order of arrival.
    """

    group_id: str
    position: GroupPosition
    first_seen: datetime | None
    last_seen: datetime | None
    places: tuple[MessageId, ...]


IncompleteGroupReport = GroupReport
"""A group that is not complete, or not sound."""


@dataclass(frozen=True, slots=True)
class GroupPage:
    """Groups as they are recorded, the newest first.

    Attributes:
        groups: The groups, complete or not, by their ids, which begin with the time they were made at.
        next: The argument `before` for the next page; None if this is the last.
        unrecorded: The ranges that streams retain and that are not recorded by the key of groups. A group with a part
            there shows as not complete; one that is there wholly is not listed.
    """

    groups: tuple[GroupReport, ...]
    next: str | None
    unrecorded: tuple[Uncovered, ...] = ()
