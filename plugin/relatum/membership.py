"""Message groups: the place of a message in its group, and the progress of a group. Pure.

A group's messages have a common id, sequence numbers from 1 without gaps, and a flag for the last message, in the
headers `group_id`, `group_sequence` and `group_last`. `relatum.MessageGroup` publishes groups; the key `GROUP_KEY`
finds them.
"""

import os
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import count, pairwise
from typing import Any, Final, NamedTuple, TypeAlias

from relatum.common.headers import GROUP_ID_HEADER, GROUP_LAST_HEADER, GROUP_SEQUENCE_HEADER
from relatum.common.limits import GROUP_ID_BYTES, GROUP_SEQUENCE_MAX
from relatum.common.uuid7 import uuid7
from relatum.errors import InvalidGroup
from relatum.keys import InvalidValue, KeyDefinition

GROUP_KEY: Final = KeyDefinition(
    "message_group",
    (f"header:{GROUP_ID_HEADER}", f"header:{GROUP_SEQUENCE_HEADER}", f"header:{GROUP_LAST_HEADER}"),
)
"""The key by which groups are found. Its values are `<group id>|<sequence>|<last>`, so a group is one range of the
index. No part contains a character that a composite key escapes."""

_GROUP_ID: Final = re.compile(rf"[0-9a-f]{{{2 * GROUP_ID_BYTES}}}\Z", re.ASCII)
_VALUE: Final = re.compile(rf"([0-9a-f]{{{2 * GROUP_ID_BYTES}}})\|([1-9][0-9]{{0,8}})\|(true|false)\Z", re.ASCII)


class GroupFault(StrEnum):
    """The field `reason` of `InvalidGroup`: why a message's headers or a call's arguments are invalid."""

    ID_MISSING = "group_id_missing"
    SEQUENCE_MISSING = "group_sequence_missing"
    ID_INVALID = "group_id_not_48_hex_digits"
    SEQUENCE_NOT_INTEGER = "group_sequence_not_an_integer"
    SEQUENCE_OUT_OF_RANGE = "group_sequence_out_of_range"
    LAST_NOT_BOOLEAN = "group_last_not_a_boolean"
    ENDED = "group_has_ended"
    """The group already has its last message, or its `with` block has ended."""
    OPTION_INVALID = "option_invalid"
    """An option of the group, or the position to resume from, is invalid."""

    def error(self, text: str = "") -> InvalidGroup:
        """Return an error with this reason."""
        return InvalidGroup(text or _ADVICE[self], reason=str(self))


_ADVICE: Final = {
    GroupFault.ID_MISSING: "a sequence number or a last flag needs the header group_id",
    GroupFault.SEQUENCE_MISSING: "the header group_id needs the header group_sequence",
    GroupFault.ID_INVALID: "group_id must be 24 bytes as 48 hexadecimal digits in lower case: relatum.new_group_id()",
    GroupFault.SEQUENCE_NOT_INTEGER: "group_sequence must be an integer",
    GroupFault.SEQUENCE_OUT_OF_RANGE: f"group_sequence must be from 1 to {GROUP_SEQUENCE_MAX:,}",
    GroupFault.LAST_NOT_BOOLEAN: "group_last must be True or False",
}


class GroupStatus(StrEnum):
    """Whether a message belongs to a group, and whether it ends the group."""

    NOT_IN_GROUP = "not_in_group"
    IN_GROUP = "in_group"
    LAST_IN_GROUP = "last_in_group"


class Membership(NamedTuple):
    """A message's place in its group. The fields are not checked; `checked_membership` checks them.

    Attributes:
        group_id: 24 bytes as 48 hexadecimal digits in lower case.
        sequence: From 1 to 999,999,999.
        last: Whether the group ends with the message.
    """

    group_id: str
    sequence: int
    last: bool = False

    @property
    def headers(self) -> dict[str, Any]:
        """The three headers of a message at this place."""
        return {GROUP_ID_HEADER: self.group_id, GROUP_SEQUENCE_HEADER: self.sequence, GROUP_LAST_HEADER: self.last}

    @property
    def value(self) -> str:
        """The value of `GROUP_KEY` for a message at this place."""
        return f"{self.group_id}|{self.sequence}|{'true' if self.last else 'false'}"


def new_group_id() -> str:
    """Return a new group id: a version 7 UUID and 8 random bytes. Later ids sort later, to the millisecond."""
    return uuid7(time.time_ns()).replace("-", "") + os.urandom(GROUP_ID_BYTES - 16).hex()


def membership(headers: Mapping[str, Any]) -> Membership | None:
    """Return the place that a message's headers name; None if it is in no group.

    A message without a valid id, number and flag is in no group, since it has no value of `GROUP_KEY`.
    """
    group_id = headers.get(GROUP_ID_HEADER)
    if group_id is None:
        return None
    sequence: Any = headers.get(GROUP_SEQUENCE_HEADER)
    last = headers.get(GROUP_LAST_HEADER)
    if last is not None and _fault(group_id, sequence, last) is None:
        return Membership(group_id, sequence, last)
    # Other clients and older brokers encode the same values as bytes or text.
    try:
        value = GROUP_KEY.canonical_of((group_id, sequence, last))
    except InvalidValue:
        return None
    return None if value is None else parse_value(value)


def parse_value(value: str) -> Membership | None:
    """Return the place that a value of `GROUP_KEY` names; None if the value has another form."""
    match = _VALUE.match(value)
    if match is None:
        return None
    group_id, sequence, last = match.groups()
    return Membership(group_id, int(sequence), last == "true")


def group_status(message: Any) -> GroupStatus:
    """Return whether a message, an object with `headers`, is in no group, in a group, or the last of a group."""
    place = membership(message.headers)
    if place is None:
        return GroupStatus.NOT_IN_GROUP
    return GroupStatus.LAST_IN_GROUP if place.last else GroupStatus.IN_GROUP


def checked_group_id(group_id: Any) -> str:
    """Return a group id unchanged.

    Raises:
        InvalidGroup: it is not 24 bytes, written as 48 hexadecimal digits in lower case.
    """
    if not _is_group_id(group_id):
        raise GroupFault.ID_INVALID.error()
    return str(group_id)


def _is_group_id(group_id: Any) -> bool:
    return isinstance(group_id, str) and _GROUP_ID.match(group_id) is not None


def checked_membership(headers: Mapping[str, Any]) -> Membership | None:
    """Return the place of a message before it is published; None if its headers name no group.

    A header with the value None counts as missing, and a missing flag as False.

    Raises:
        InvalidGroup: the id or the number is missing, or one of the three is invalid.
    """
    group_id: Any = headers.get(GROUP_ID_HEADER)
    sequence: Any = headers.get(GROUP_SEQUENCE_HEADER)
    last = headers.get(GROUP_LAST_HEADER)
    if group_id is None and sequence is None and last is None:
        return None
    if fault := _fault(group_id, sequence, last):
        raise fault.error(f"{_ADVICE[fault]}; nothing was sent")
    return Membership(group_id, sequence, bool(last))


def _fault(group_id: Any, sequence: Any, last: Any) -> GroupFault | None:
    if group_id is None:
        return GroupFault.ID_MISSING
    if not _is_group_id(group_id):
        return GroupFault.ID_INVALID
    if sequence is None:
        return GroupFault.SEQUENCE_MISSING
    if fault := _sequence_fault(sequence):
        return fault
    return None if last is None or type(last) is bool else GroupFault.LAST_NOT_BOOLEAN


def checked_sequence(sequence: Any) -> int:
    """Return a sequence number unchanged.

    Raises:
        InvalidGroup: it is not an integer from 1 to 999,999,999.
    """
    if fault := _sequence_fault(sequence):
        raise fault.error()
    return int(sequence)


def _sequence_fault(sequence: Any) -> GroupFault | None:
    if isinstance(sequence, bool) or not isinstance(sequence, int):
        return GroupFault.SEQUENCE_NOT_INTEGER
    return None if 1 <= sequence <= GROUP_SEQUENCE_MAX else GroupFault.SEQUENCE_OUT_OF_RANGE


Place: TypeAlias = tuple[Any, ...]
"""A `Membership`, or another tuple that begins with its fields."""

Ranges: TypeAlias = tuple[tuple[int, int], ...]
"""Ranges of sequence numbers (first, last), in ascending order."""


class Anomaly(StrEnum):
    """Faults of a group other than missing messages. A group may have several."""

    DUPLICATE = "duplicate"
    """Several messages have the same sequence number."""
    TWO_LASTS = "two_lasts"
    """Messages with different sequence numbers are flagged as the last. The lowest number counts."""
    PAST_LAST = "past_last"
    """A message without the flag has a higher sequence number than the last message."""
    EXPIRED = "expired"
    """Retention has dropped a message of the group whose number no other message has."""


@dataclass(frozen=True, slots=True)
class GroupPosition:
    """A group's progress.

    Attributes:
        group_id: The group's id.
        contiguous: The highest number up to which no number is missing; 0 if number 1 is missing.
        highest: The highest number found; 0 if there is none.
        missing: The missing numbers up to the last message's, or below the highest if the last message was not found:
            ranges (first, last), ascending.
        last_sequence: The last message's number, the lowest if several are flagged; None if none was found.
        seen: How many different numbers were found.
        anomalies: Other faults, in the order of `Anomaly`.
        streams: The streams and super streams that were searched, sorted; None: unknown.
        is_of_all: Whether these are all streams that the database knew, because the caller named none.
        is_proven: Whether the streams were searched up to their leaders' ends. If only recorded messages were searched,
            the broker could not report an end, or a batch could not be unpacked, it is False: the group may have more
            messages.
    """

    group_id: str
    contiguous: int
    highest: int
    missing: Ranges
    last_sequence: int | None
    seen: int
    anomalies: tuple[Anomaly, ...] = ()
    streams: tuple[str, ...] | None = field(default=None, compare=False)
    is_of_all: bool = field(default=False, compare=False)
    is_proven: bool = field(default=True, compare=False)

    def holds_for(self, exchange: str, routing_key: str) -> bool:
        """Return whether the searched streams include those that an exchange and a routing key lead to.

        If the caller named streams, they count as those of any exchange: only the caller knows its bindings.
        """
        if self.streams is None:
            return True
        if exchange == "":
            return routing_key in self.streams
        return exchange in self.streams or not self.is_of_all

    @property
    def next_sequence(self) -> int:
        """The lowest number that was not found."""
        return self.contiguous + 1

    @property
    def is_complete(self) -> bool:
        """Whether the last message and all messages before it are present, regardless of anomalies."""
        return self.last_sequence is not None and self.contiguous >= self.last_sequence


def assess(group_id: str, members: Iterable[Place], *, expired: Iterable[Place] = ()) -> GroupPosition:
    """Return a group's position, computed from the places of its messages.

    Args:
        group_id: The group's id. Members of other groups are ignored.
        members: One place for each message, in any order; only one for a message that was routed to several streams.
        expired: Places of messages that retention has dropped. A place whose number a member has is ignored. The others
            count as missing, but their last flags count.
    """
    places = [place for place in members if place[0] == group_id]
    numbers: set[int] = {place[1] for place in places}
    lasts: set[int] = {place[1] for place in places if place[2]}
    dropped = [place for place in expired if place[0] == group_id and place[1] not in numbers]
    lasts.update(place[1] for place in dropped if place[2])
    last_sequence = min(lasts, default=None)
    highest = max(numbers, default=0)
    is_whole = len(places) == len(numbers) == highest and min(numbers, default=0) == 1
    if is_whole and not dropped and (not lasts or lasts == {highest}):
        return GroupPosition(group_id, highest, highest, (), last_sequence, len(places))
    missing = _missing(numbers, highest if last_sequence is None else last_sequence)
    is_past_last = last_sequence is not None and any(number > last_sequence for number in numbers - lasts)
    anomalies = {
        Anomaly.DUPLICATE: len(places) > len(numbers),
        Anomaly.TWO_LASTS: len(lasts) > 1,
        Anomaly.PAST_LAST: is_past_last,
        Anomaly.EXPIRED: bool(dropped),
    }
    return GroupPosition(
        group_id=group_id,
        contiguous=next(number for number in count() if number + 1 not in numbers),
        highest=highest,
        missing=missing,
        last_sequence=last_sequence,
        seen=len(numbers),
        anomalies=tuple(anomaly for anomaly, holds in anomalies.items() if holds),
    )


def _missing(numbers: Iterable[int], end: int) -> Ranges:
    """Return the ranges of numbers from 1 to `end` that are not among `numbers`."""
    present = [0, *sorted(number for number in numbers if number <= end), end + 1]
    return tuple((before + 1, after - 1) for before, after in pairwise(present) if after - before > 1)
