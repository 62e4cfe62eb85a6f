"""Groups as they are delivered, and reports of groups; reads many groups in one pass, and checks each message."""

from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from datetime import datetime
from itertools import islice
from typing import Any, Final, overload

from relatum.common.ids import MessageId
from relatum.common.limits import INTEGER_MAX
from relatum.errors import GroupConflict, RelatumError, StreamUnavailable, Transient, UndecodableMessage
from relatum.membership import Anomaly, GroupPosition, GroupStatus, group_status, membership
from relatum.reading import Message, StreamBounds
from relatum.wire.amqp10 import find_head, pick
from relatum_consumer.groups._assembly import Assembled, GroupOrder, Row, assemble
from relatum_consumer.groups._options import BATCH_MESSAGES, GroupOptions
from relatum_consumer.lookups.answering import first_retained
from relatum_consumer.lookups.catalog import replaced
from relatum_consumer.lookups.proof import Uncovered, all_ends
from relatum_consumer.lookups.servers import Servers


@dataclass(frozen=True, slots=True, eq=False)
class Group(Sequence[Message]):
    """A group's messages, one for each number, in the requested order. Immutable.

    A sequence of messages: `len(group)`, `group[0]`, `for message in group`; `group.at(1)` returns a message by number.

    Attributes:
        group_id: The group's id, 48 hexadecimal digits.
        messages: The messages, each read and checked.
        position: The group's progress, missing numbers and anomalies.
        duplicates: Further messages with the same numbers as `messages`, in the order of arrival.
        expired: The ids of messages that retention has dropped.
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
        # Try first the message's index in a complete group in logical order.
        likely = self.messages[sequence - 1 : sequence] if sequence > 0 else ()
        return next((message for message in (*likely, *self.messages) if sequence_of(message) == sequence), None)

    def status_of(self, message: Message) -> GroupStatus:
        """Return whether a message has no group, is in a group, or is a group's last message."""
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
    place = membership(message.headers)
    return None if place is None else place.sequence


@dataclass(frozen=True, slots=True)
class GroupReport:
    """A report of a group, without its messages.

    Attributes:
        group_id: The group's id.
        position: The group's progress, missing numbers and anomalies.
        first_seen: The time of the earliest message; None if no message has a time.
        last_seen: The time of the latest message; None if no message has a time.
        places: The ids of the retained messages, ordered by time.
    """

    group_id: str
    position: GroupPosition
    first_seen: datetime | None
    last_seen: datetime | None
    places: tuple[MessageId, ...]


IncompleteGroupReport = GroupReport
"""The report of a group that is incomplete or has anomalies."""


@dataclass(frozen=True, slots=True)
class GroupPage:
    """A page of recorded groups, the newest first.

    Attributes:
        groups: The groups, complete or not, in descending order of their ids, which begin with the creation time.
        next: The argument `before` for the next page; None if this is the last page.
        unrecorded: Retained ranges that are not recorded for the key of groups. A group with some messages in these
            ranges is reported as incomplete; a group with all its messages in them is not reported.
    """

    groups: tuple[GroupReport, ...]
    next: str | None
    unrecorded: tuple[Uncovered, ...] = ()


READ_RETRIES: Final = 1
"""Retries on a new connection: the broker may close the connection while the caller handles the groups."""

_HEADERS: Final = {b"group_id": 0, b"group_sequence": 1, b"group_last": 2, b"relatum_time": 3}
_NOTHING: Final[list[Any]] = [None] * len(_HEADERS)

_SKIP: Final = 'on_conflict="skip" skips such groups'

_ANOMALIES: Final = {
    Anomaly.DUPLICATE: 'several messages have the same number; on_duplicate="first" takes the first',
    Anomaly.TWO_LASTS: f"several numbers are marked as the last; {_SKIP}",
    Anomaly.PAST_LAST: f"there are numbers past the last; {_SKIP}",
    Anomaly.EXPIRED: f"retention has dropped some of its messages; {_SKIP}",
}


def conflict(group_id: str, anomaly: Anomaly) -> GroupConflict:
    text = f"the group {group_id} cannot be delivered: {_ANOMALIES[anomaly]}"
    return GroupConflict(text, group_id=group_id, anomaly=anomaly)


def deliver(servers: Servers, groups: Sequence[Assembled], options: GroupOptions) -> Iterator[Group]:
    """Yield the complete, sound groups. An unsound group raises its conflict or is skipped, according to `options`."""
    with closing(read_groups(servers, groups, options, is_named=options.names is not None)) as read:
        for found in read:
            if isinstance(found, Group):
                yield found
            elif found is not None and (options.on_conflict == "raise" or found.anomaly == Anomaly.DUPLICATE):
                raise found


def read_groups(
    servers: Servers, groups: Sequence[Assembled], options: GroupOptions, *, is_named: bool
) -> Generator[Group | GroupConflict | None, None, None]:
    """Yield for each group the group, the conflict that prevents its delivery, or None if it is incomplete."""
    sound = [group for group in groups if group.is_complete and group.flaw is None]
    with closing(read_on(servers, [row for group in sound for row in group.retained])) as reading:
        for group in groups:
            if not group.was_complete:
                yield None
            elif group.flaw is not None:
                yield conflict(group.group_id, group.flaw)
            else:
                read, messages = read_group(reading, group, options.order, is_named=is_named)
                if read.flaw is not None:
                    yield conflict(group.group_id, read.flaw)
                    continue
                found = as_group(read, messages)
                is_refused = found.duplicates and options.on_duplicate == "raise"
                yield conflict(group.group_id, Anomaly.DUPLICATE) if is_refused else found


def read_on(servers: Servers, rows: Sequence[Row]) -> Generator[Message | RelatumError, None, None]:
    """Yield for each row its message, or the error that says why there is none; if need be, on a new connection."""
    index = failures = 0
    while index < len(rows):
        ids = (row[3:5] for row in islice(rows, index, None))
        with closing(servers.read_many(ids, window=BATCH_MESSAGES)) as found:
            try:
                for each in found:
                    yield each
                    index, failures = index + 1, 0
            except Transient:
                failures += 1
                if failures > READ_RETRIES:
                    raise


def read_group(
    reading: Iterator[Message | RelatumError], group: Assembled, order: GroupOrder, *, is_named: bool
) -> tuple[Assembled, list[Message]]:
    """Take the messages of the group's `retained` rows from `reading`; if some have expired, assemble it anew."""
    messages: list[Message] = []
    floors: dict[str, int] = {}
    for row, found in zip(group.retained, islice(reading, len(group.retained)), strict=True):
        if isinstance(found, Message):
            check(row, found)
            messages.append(found)
        else:
            first = first_retained(MessageId(*row[3:5]), found, is_named=is_named)
            floors[row[3]] = max(first, floors.get(row[3], 0))
    if not floors:
        return group, messages
    for _, _, _, stream, offset, _ in group.expired:
        floors[stream] = max(floors.get(stream, 0), offset + 1)
    group = assemble(group.group_id, group.members, order, floors)
    read = {message.id: message for message in messages}
    return group, [read[MessageId(*row[3:5])] for row in group.retained]


def as_group(group: Assembled, messages: Sequence[Message]) -> Group:
    """Return a `Group` of the messages of its `retained` rows. Copies that an exchange routed are not duplicates."""
    count = len(group.rows)
    chosen, position = tuple(messages[:count]), group.position
    duplicates = without_copies(chosen, messages[count:]) if len(messages) > count else ()
    if group.duplicates and not duplicates:
        sound = tuple(each for each in position.anomalies if each is not Anomaly.DUPLICATE)
        position = replace(position, anomalies=sound)
    return Group(group.group_id, chosen, position, duplicates, tuple(MessageId(*row[3:5]) for row in group.expired))


def without_copies(chosen: Sequence[Message], others: Sequence[Message]) -> tuple[Message, ...]:
    """Return the other messages that are real duplicates, not routed copies."""
    seen: dict[int | None, list[Message]] = {sequence_of(message): [message] for message in chosen}
    duplicates = []
    for message in others:
        of_number = seen.setdefault(sequence_of(message), [])
        if not any(_is_copy(message, each) for each in of_number):
            duplicates.append(message)
        of_number.append(message)
    return tuple(duplicates)


def _is_copy(message: Message, other: Message) -> bool:
    name = message.properties.message_id
    return name is not None and name == other.properties.message_id and message.stream != other.stream


def floors_of(servers: Servers, streams: Iterable[str], *, is_named: bool) -> dict[str, int]:
    """Return the first offset that each stream retains; `INTEGER_MAX` for an empty or deleted stream."""
    floors: dict[str, int] = {}
    for stream, bounds in all_ends(servers, sorted(set(streams)), is_named=is_named).items():
        if not isinstance(bounds, StreamBounds):
            # If this user may not read the stream, rely on the table.
            floors[stream] = INTEGER_MAX if bounds is None else 0
        elif bounds.first is None and not bounds.is_sure:
            text = f"it is unknown whether the stream {stream!r} is empty: its leader is unreachable; retry later"
            raise StreamUnavailable(text, stream=stream)
        else:
            floors[stream] = INTEGER_MAX if bounds.first is None else bounds.first
    return floors


def check(row: Row, message: Message) -> None:
    """Check that a message matches its row; if not, the stream is not the recorded one: raise `StreamReplaced`."""
    if _matches(row, message):
        return
    *_, stream, offset, recorded_us = row
    # A row recorded over AMQP 0.9.1 may lack the time. If both have a time, they must agree.
    is_other = recorded_us is not None and message.time_us not in (recorded_us, None)
    if is_other or membership(message.headers) != row[:3]:
        raise replaced(stream, offset)


def _matches(row: Row, message: Message) -> bool:
    """Whether four headers alone prove that a message matches its row; usually they do, which saves decoding it."""
    raw, found = message.raw, _NOTHING.copy()
    if raw is None:
        return False
    try:
        _, properties, application = find_head(raw)
        if application < 0:
            return False
        pick(raw, application, _HEADERS, found)
    except UndecodableMessage:
        return False
    group_id, sequence, last, time_us = found
    # Compare the types, too: 1.0 and True equal 1, but are different values of the key.
    if group_id != row[0] or sequence != row[1] or type(sequence) is not int or last is not row[2]:
        return False
    if time_us is None and properties < 0:
        # Without properties, the message's time is that of its chunk.
        time_us = 1_000 * (message.chunk_ms or 0)
    return row[5] is None or (type(time_us) is int and time_us == row[5])
