"""Reading assembled groups: one pass over the streams for many of them, every message checked against its row."""

from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import islice
from typing import Final

from relatum.errors import GroupConflict, RelatumError, StreamUnavailable, Transient
from relatum.ids import MessageId
from relatum.limits import INTEGER_MAX
from relatum.membership import GROUP_KEY, Anomaly, membership, value_of
from relatum.reading import Message, StreamBounds
from relatum.recording.extractor import Extractor
from relatum_consumer.groups._assembly import Assembled, Row, assemble
from relatum_consumer.groups._group import Group, sequence_of
from relatum_consumer.groups._options import BATCH_MESSAGES, READ_RETRIES, GroupOptions
from relatum_consumer.lookups.answering import first_retained
from relatum_consumer.lookups.catalog import replaced
from relatum_consumer.lookups.servers import Servers

_RECORDED: Final = Extractor([GROUP_KEY])

FINAL = (Anomaly.EXPIRED, Anomaly.TWO_LASTS, Anomaly.PAST_LAST)
"""What a group cannot recover from, in the order in which it is named."""


def is_sound(group: Assembled, options: GroupOptions) -> bool:
    """Whether nothing is wrong with a group that it cannot recover from.

    Raises:
        GroupConflict: there is, and it must not be passed over.
    """
    anomaly = next((each for each in FINAL if each in group.anomalies), None)
    if anomaly is not None and options.on_conflict == "raise":
        raise conflict(group.group_id, anomaly)
    return anomaly is None


def _passes(group: Assembled, options: GroupOptions) -> bool:
    """Whether a group is to be given; `GroupConflict` as of `is_sound`."""
    return group.was_complete and is_sound(group, options)


def conflict(group_id: str, anomaly: Anomaly) -> GroupConflict:
    """The error for a group that is not sound."""
    what = {
        Anomaly.DUPLICATE: "several messages have one number",
        Anomaly.TWO_LASTS: "several numbers are marked as the last",
        Anomaly.PAST_LAST: "there are numbers past the last",
        Anomaly.EXPIRED: "retention has dropped a message of it",
    }
    return GroupConflict(f"the group {group_id} is not sound: {what[anomaly]}", group_id=group_id, anomaly=anomaly)


def deliver(servers: Servers, groups: Sequence[Assembled], options: GroupOptions) -> Generator[Group, None, None]:
    """Give those of the groups that are whole and sound, one after the other, reading them all in one pass."""
    rows = [row for group in groups if _is_readable(group) for row in all_of(group)]
    with closing(Reading(servers, rows)) as reading:
        for group in groups:
            if not _is_readable(group):
                # It is not given; but what is wrong with it is said at its turn.
                _passes(group, options)
                continue
            given = read_group(reading, group, options)
            if given is not None:
                yield given


def _is_readable(group: Assembled) -> bool:
    return group.is_complete and not any(anomaly in group.anomalies for anomaly in FINAL)


def all_of(group: Assembled) -> tuple[Row, ...]:
    """A group's retained members in the order they are read in: duplicates last."""
    return group.rows + group.duplicate_rows


def read_group(reading: "Reading", group: Assembled, options: GroupOptions) -> Group | None:
    """The next group of a reading; None where it is to be passed over, now that its messages are known."""
    members = all_of(group)
    messages, floors = read_members(reading, members, is_named=options.is_named)
    if floors:
        # Retention took a message between the look at the stream's first offset and the reading.
        group = assemble(group.group_id, (*members, *group.expired), options.order, raised(group, floors))
        if not _passes(group, options):
            return None
        # Nothing is missing: each number that retention took is that of another message, too.
        read = {message.id: message for message in messages}
        messages = [read[MessageId(*row[3:5])] for row in all_of(group)]
    found = as_group(group, messages)
    if found.duplicates and options.on_duplicate == "raise":
        raise conflict(group.group_id, Anomaly.DUPLICATE)
    return found


def raised(group: Assembled, floors: Mapping[str, int]) -> dict[str, int]:
    """The first retained offsets with what was known of them before, from what of a group has expired."""
    highest = dict(floors)
    for member in group.expired:
        highest[member.stream] = max(highest.get(member.stream, 0), member.offset + 1)
    return highest


def as_group(group: Assembled, messages: Sequence[Message]) -> Group:
    """A group and its messages, those of `all_of(group)`.

    A message that an exchange routed to several streams lies in each of them and is no duplicate: its copies have the
    same `message_id` and lie in different streams.
    """
    chosen, others = tuple(messages[: len(group.rows)]), messages[len(group.rows) :]
    position = group.position
    duplicates: tuple[Message, ...] = ()
    if others:
        duplicates = without_copies(chosen, others)
        if not duplicates:
            sound = tuple(each for each in position.anomalies if each is not Anomaly.DUPLICATE)
            position = replace(position, anomalies=sound)
    expired = tuple(member.id for member in group.expired)
    return Group(group.group_id, chosen, position, duplicates, expired)


def without_copies(chosen: Sequence[Message], others: Sequence[Message]) -> tuple[Message, ...]:
    """Those of the others that were published by themselves."""
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


# --- reading ----------------------------------------------------------------------------------------------


class Reading:
    """Members read one after the other, by one batched read.

    The broker closes a connection that is not read from while the groups of a batch are being handled; then it is
    gone on with where it was, on a new one. To be closed.
    """

    def __init__(self, servers: Servers, members: Sequence[Row]) -> None:
        self._servers = servers
        self._members = members
        self._at = 0
        self._messages: Generator[Message | RelatumError, None, None] | None = None

    def take(self, count: int) -> list[Message | RelatumError]:
        """The next so many messages, or for each the error that says why there is none."""
        if count == 0:
            return []
        failures = 0
        while True:
            try:
                if self._messages is None:
                    ids = (row[3:5] for row in islice(self._members, self._at, None))
                    self._messages = self._servers.read_many(ids, window=BATCH_MESSAGES)
                results = list(islice(self._messages, count))
            except Transient:
                self.close()
                failures += 1
                if failures > READ_RETRIES:
                    raise
            else:
                self._at += count
                return results

    def close(self) -> None:
        """Let the connection go."""
        messages, self._messages = self._messages, None
        if messages is not None:
            messages.close()


def read_members(reading: Reading, members: Collection[Row], *, is_named: bool) -> tuple[list[Message], dict[str, int]]:
    """The next members of a reading, each checked; and the first retained offsets of streams that dropped some."""
    messages: list[Message] = []
    floors: dict[str, int] = {}
    for row, found in zip(members, reading.take(len(members)), strict=True):
        if isinstance(found, Message):
            check(row, found)
            messages.append(found)
        else:
            first = first_retained(MessageId(*row[3:5]), found, is_named=is_named)
            floors[row[3]] = max(first, floors.get(row[3], 0))
    return messages, floors


def floor_of(stream: str, bounds: StreamBounds) -> int:
    """The first offset that a stream retains; of one without any message, that is behind all that it ever had."""
    if bounds.first is not None:
        return bounds.first
    if bounds.is_sure:
        return INTEGER_MAX
    raise StreamUnavailable(
        f"whether the stream {stream!r} is empty cannot be said now: its leader cannot be asked from here",
        stream=stream,
    )


def check(row: Row, message: Message) -> None:
    """See that a message is what its row says.

    Raises:
        StreamReplaced: it is another one.
    """
    group_id, sequence, last, stream, offset, recorded_us = row
    if message.raw is not None:
        # What a recorder would write down of it today, without decoding the rest.
        time_us, _, values, _, _ = _RECORDED.from_record(message.raw, message.chunk_ms)
        expected = [(0, value_of(group_id, sequence, last))]
        if values == expected and (recorded_us is None or time_us in (recorded_us, None)):
            return
    if membership(message.headers) != row[:3]:
        raise replaced(stream, offset)
    # A row that was recorded over AMQP 0.9.1 may lack the time; what both have must agree.
    if recorded_us is not None and message.time_us not in (recorded_us, None):
        raise replaced(stream, offset)
