"""The results of reading groups: a group's messages in order, and reports of groups."""

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
    """A group's messages, one for each number, in the requested order. Immutable.

    A sequence of messages: `len(group)`, `group[0]`, `for message in group`. `group.at(1)` finds a message by number.

    Attributes:
        group_id: The group's id, 48 hexadecimal digits.
        messages: The messages, each read and checked.
        position: The group's progress, missing numbers and anomalies.
        duplicates: Further messages with numbers of `messages`, in the order of arrival.
        expired: The places of messages that retention has dropped.
    """

    group_id: str
    messages: tuple[Message, ...]
    position: GroupPosition
    duplicates: tuple[Message, ...] = ()
    expired: tuple[MessageId, ...] = field(default=())

    @property
    def is_complete(self) -> bool:
        """Whether each number from 1 to the last is present."""
        return self.position.is_complete

    def at(self, sequence: int) -> Message | None:
        """Return the message with a sequence number; None if there is none."""
        # In a complete group in logical order, it is at this index.
        likely = self.messages[sequence - 1 : sequence] if sequence > 0 else ()
        return next((message for message in (*likely, *self.messages) if sequence_of(message) == sequence), None)

    def status_of(self, message: Message) -> GroupStatus:
        """Return whether a message is in no group, in one, or the last of one."""
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
    """Return a message's number in its group; None if it is in no group."""
    place = membership(message.headers)
    return None if place is None else place.sequence


@dataclass(frozen=True, slots=True)
class GroupReport:
    """A group, without its messages.

    Attributes:
        group_id: The group's id.
        position: The group's progress, missing numbers and anomalies.
        first_seen: The time of its earliest message; None if no message has a time.
        last_seen: The time of its latest message; None if no message has a time.
        places: The places of its messages, ordered by time.
    """

    group_id: str
    position: GroupPosition
    first_seen: datetime | None
    last_seen: datetime | None
    places: tuple[MessageId, ...]


IncompleteGroupReport = GroupReport
"""A group that is incomplete or has anomalies."""


@dataclass(frozen=True, slots=True)
class GroupPage:
    """A page of recorded groups, the newest first.

    Attributes:
        groups: The groups, complete or not, ordered by id. Ids begin with their creation time.
        next: The argument `before` for the next page; None if this is the last page.
        unrecorded: The ranges that streams retain and that are not recorded for the key of groups. A group with
            messages in them is reported as incomplete; one with all its messages in them is missing.
    """

    groups: tuple[GroupReport, ...]
    next: str | None
    unrecorded: tuple[Uncovered, ...] = ()
