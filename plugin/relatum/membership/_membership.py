"""Which place a message has in which group: its three headers, the key made of them, and what they may be. Pure."""

import os
import re
import time
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Final, NamedTuple

from relatum.errors import InvalidGroup
from relatum.headers import GROUP_ID_HEADER, GROUP_LAST_HEADER, GROUP_SEQUENCE_HEADER
from relatum.keys import InvalidValue, KeyDefinition
from relatum.limits import GROUP_ID_BYTES, GROUP_SEQUENCE_MAX
from relatum.reading import Message
from relatum.uuid7 import uuid7

GROUP_KEY: Final = KeyDefinition(
    "message_group",
    (f"header:{GROUP_ID_HEADER}", f"header:{GROUP_SEQUENCE_HEADER}", f"header:{GROUP_LAST_HEADER}"),
)
"""The key by which groups are found. Its values read `<group id>|<sequence>|<last>`, so that a group is one range of
the index; none of the three parts can hold what a composite escapes."""

_GROUP_ID: Final = re.compile(rf"[0-9a-f]{{{2 * GROUP_ID_BYTES}}}\Z", re.ASCII)
_VALUE: Final = re.compile(rf"([0-9a-f]{{{2 * GROUP_ID_BYTES}}})\|([1-9][0-9]{{0,8}})\|(true|false)\Z", re.ASCII)

_AFTER_SEPARATOR: Final = chr(ord("|") + 1)
"""What ends the range of a group's values: the character after the one that separates the parts."""


new_place: Final = tuple.__new__
"""Makes a place out of its parts; `Membership(…)` is a function of its own, and this is on the publish path."""


class GroupFault(StrEnum):
    """Why headers, or a call, cannot make a message one of a group: the field `reason` of `InvalidGroup`."""

    ID_MISSING = "group_id_missing"
    """A sequence number or a flag without an id."""
    SEQUENCE_MISSING = "group_sequence_missing"
    """An id without a sequence number."""
    ID_INVALID = "group_id_not_48_hex_digits"
    """The id is not 24 bytes, written as 48 hexadecimal digits in lower case."""
    SEQUENCE_NOT_INTEGER = "group_sequence_not_an_integer"
    """The sequence number is text, a boolean, a float or anything else that is no integer."""
    SEQUENCE_OUT_OF_RANGE = "group_sequence_out_of_range"
    """The sequence number is below 1 or above 999,999,999."""
    LAST_NOT_BOOLEAN = "group_last_not_a_boolean"
    """The flag is neither True nor False."""
    ENDED = "group_has_ended"
    """The group has its last message already, or was left."""
    OPTION_INVALID = "option_invalid"
    """An option of the group, or the position to go on from, cannot be one."""


class GroupStatus(StrEnum):
    """Whether a message belongs to a group."""

    NOT_IN_GROUP = "not_in_group"
    IN_GROUP = "in_group"
    LAST_IN_GROUP = "last_in_group"


class Membership(NamedTuple):
    """A message's place in its group. Not checked: see `checked_membership`.

    Attributes:
        group_id: 24 bytes as 48 hexadecimal digits in lower case.
        sequence: From 1 to 999,999,999.
        last: Whether the group ends with it.
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
        return value_of(*self)


def new_group_id() -> str:
    """A new group id: a version 7 UUID and 8 random bytes. Ids made later sort later, to the millisecond."""
    return uuid7(time.time_ns()).replace("-", "") + os.urandom(GROUP_ID_BYTES - 16).hex()


def membership(headers: Mapping[str, Any]) -> Membership | None:
    """The place that a message's headers give it, None where it is in no group.

    It is what the message's value of `GROUP_KEY` says: a message without a valid id, number and flag is in no group,
    since nothing could find it there.
    """
    group_id = headers.get(GROUP_ID_HEADER)
    if group_id is None:
        return None
    sequence, last = headers.get(GROUP_SEQUENCE_HEADER), headers.get(GROUP_LAST_HEADER)
    if _is_plain(group_id, sequence, last):
        return new_place(Membership, (group_id, sequence, last))
    # Other clients and older brokers write the same values as bytes or text.
    try:
        value = GROUP_KEY.canonical_of((group_id, sequence, last))
    except InvalidValue:
        return None
    return None if value is None else parse_value(value)


def value_of(group_id: str, sequence: int, last: bool) -> str:
    """The value of `GROUP_KEY` for a message at a place."""
    return f"{group_id}|{sequence}|{'true' if last else 'false'}"


def parse_value(value: str) -> Membership | None:
    """The place that a value of `GROUP_KEY` tells of, None where it tells of none."""
    found = _VALUE.match(value)
    if found is None:
        return None
    group_id, sequence, last = found.groups()
    return Membership(group_id, int(sequence), last == "true")


def value_bounds(group_id: str) -> tuple[str, str]:
    """The range of a group's values of `GROUP_KEY`: from the first text on, up to before the second.

    In the order of code points, which is that of the table's values.
    """
    return f"{group_id}|", f"{group_id}{_AFTER_SEPARATOR}"


def group_status(message: Message) -> GroupStatus:
    """Whether a message is in no group, in one, or the last of one."""
    place = membership(message.headers)
    if place is None:
        return GroupStatus.NOT_IN_GROUP
    return GroupStatus.LAST_IN_GROUP if place.last else GroupStatus.IN_GROUP


def checked_group_id(group_id: Any) -> str:
    """The id itself.

    Raises:
        InvalidGroup: it is not 24 bytes, written as 48 hexadecimal digits in lower case.
    """
    if not _is_group_id(group_id):
        raise invalid(GroupFault.ID_INVALID)
    return str(group_id)


def _is_group_id(group_id: Any) -> bool:
    return isinstance(group_id, str) and _GROUP_ID.match(group_id) is not None


def checked_membership(headers: Mapping[str, Any]) -> Membership | None:
    """The place that headers give a message which is about to be published, None where they name no group.

    Headers of None count as not given; a flag that is not given is False.

    Raises:
        InvalidGroup: one of id and number is given alone, or one of the three cannot be what it is.
    """
    group_id = headers.get(GROUP_ID_HEADER)
    sequence = headers.get(GROUP_SEQUENCE_HEADER)
    last = headers.get(GROUP_LAST_HEADER)
    if _is_plain(group_id, sequence, last):
        return new_place(Membership, (group_id, sequence, last))
    if group_id is None:
        if sequence is None and last is None:
            return None
        raise _not_sent(GroupFault.ID_MISSING)
    if not _is_group_id(group_id):
        raise _not_sent(GroupFault.ID_INVALID)
    if sequence is None:
        raise _not_sent(GroupFault.SEQUENCE_MISSING)
    if fault := _sequence_fault(sequence):
        raise _not_sent(fault)
    if last is None:
        last = False
    elif type(last) is not bool:
        raise _not_sent(GroupFault.LAST_NOT_BOOLEAN)
    return Membership(group_id, sequence, last)


def _is_plain(group_id: Any, sequence: Any, last: Any) -> bool:
    """Whether they are a place just as they are, which nearly all are."""
    return (
        type(group_id) is str
        and type(sequence) is int
        and type(last) is bool
        and 1 <= sequence <= GROUP_SEQUENCE_MAX
        and _GROUP_ID.match(group_id) is not None
    )


def checked_sequence(sequence: Any) -> int:
    """The sequence number itself.

    Raises:
        InvalidGroup: it is no integer from 1 to 999,999,999.
    """
    if fault := _sequence_fault(sequence):
        raise invalid(fault)
    return int(sequence)


def _sequence_fault(sequence: Any) -> GroupFault | None:
    if isinstance(sequence, bool) or not isinstance(sequence, int):
        return GroupFault.SEQUENCE_NOT_INTEGER
    return None if 1 <= sequence <= GROUP_SEQUENCE_MAX else GroupFault.SEQUENCE_OUT_OF_RANGE


_ADVICE: Final = {
    GroupFault.ID_MISSING: "a sequence number or a last flag needs the header group_id",
    GroupFault.SEQUENCE_MISSING: "the header group_id needs the header group_sequence",
    GroupFault.ID_INVALID: "group_id is 24 bytes as 48 hexadecimal digits in lower case: relatum.new_group_id()",
    GroupFault.SEQUENCE_NOT_INTEGER: "group_sequence is an integer",
    GroupFault.SEQUENCE_OUT_OF_RANGE: f"group_sequence is from 1 to {GROUP_SEQUENCE_MAX:,}",
    GroupFault.LAST_NOT_BOOLEAN: "group_last is True or False",
}


def invalid(fault: GroupFault) -> InvalidGroup:
    """The error of an id or a number that cannot be a group's, whatever it was given for."""
    return InvalidGroup(_ADVICE[fault], reason=str(fault))


def _not_sent(fault: GroupFault) -> InvalidGroup:
    """The error of headers that cannot be a group's, on a message that was about to be published."""
    return InvalidGroup(f"{_ADVICE[fault]}; nothing was sent", reason=str(fault))
