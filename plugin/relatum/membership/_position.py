"""How far a group has come: what is there of it, what is missing, and what should not be. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias

Place: TypeAlias = tuple[str, int, bool]
"""The fields of a `Membership`."""

Ranges: TypeAlias = tuple[tuple[int, int], ...]
"""Ranges of sequence numbers, each with its first and its last, in ascending order."""


class Anomaly(StrEnum):
    """What can be wrong with a group besides being incomplete. Several can hold at once."""

    DUPLICATE = "duplicate"
    """A sequence number that several messages have."""
    TWO_LASTS = "two_lasts"
    """Several sequence numbers whose message says that it is the last. The lowest counts."""
    PAST_LAST = "past_last"
    """A message, not a last one itself, with a number above that of the last."""
    EXPIRED = "expired"
    """A message of the group was there, and retention has dropped it."""


@dataclass(frozen=True, slots=True)
class GroupPosition:
    """How far a group has come.

    Attributes:
        group_id: The group.
        contiguous: The highest number up to which none is missing; 0 where even the first is.
        highest: The highest number seen; 0 for none.
        missing: The numbers that are missing below the last, or below the highest where the last is not seen: ranges
            of first and last, ascending.
        last_sequence: The last message's number; None where it is not seen. Of several, the lowest.
        seen: How many different numbers are there.
        anomalies: What else is wrong, in the order of `Anomaly`.
        streams: The streams and super streams it was looked for in, sorted; None: whoever made it did not say.
        is_of_all: Whether those are all that the database knew then, as nobody named any. Of others it says nothing.
        is_proven: Whether all they held then was looked at, up to their leaders' ends. False where only what is
            recorded was, or the broker could not tell the end: there may be more of the group.
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
        """Whether it says how far the group is where messages of an exchange and a routing key go.

        Which streams an exchange leads to that is no super stream is known to the caller, who names them when asking.
        """
        if self.streams is None:
            return True
        if exchange == "":
            return routing_key in self.streams
        return exchange in self.streams or not self.is_of_all

    @property
    def next_sequence(self) -> int:
        """Where to go on: the lowest number that is not there."""
        return self.contiguous + 1

    @property
    def is_complete(self) -> bool:
        """Whether the last message and all before it are there, whatever else is."""
        return self.last_sequence is not None and self.contiguous >= self.last_sequence


def assess(group_id: str, members: Iterable[Place], *, expired: Iterable[Place] = ()) -> GroupPosition:
    """How far a group has come, from the places of its messages.

    Args:
        group_id: The group; members of others are left out.
        members: One place for each message, in any order. What an exchange has routed to several streams is one
            message, and is to be given once.
        expired: Places of messages that retention has dropped. They count as missing, unless another message has the
            same number; that one of them was the last still counts.

    Returns:
        The position. It does not depend on the order.
    """
    numbers: set[int] = set()
    lasts: set[int] = set()
    count = 0
    for of_group, sequence, last in members:
        if of_group == group_id:
            count += 1
            numbers.add(sequence)
            if last:
                lasts.add(sequence)
    gone = [place for place in expired if place[0] == group_id and place[1] not in numbers]
    lasts.update(sequence for _, sequence, last in gone if last)
    last_sequence = min(lasts, default=None)
    highest = max(numbers, default=0)
    is_whole = count == len(numbers) == highest and min(numbers, default=0) == 1
    if is_whole and not gone and (not lasts or lasts == {highest}):
        # As nearly all are, and looked at for each group that is read.
        return GroupPosition(group_id, highest, highest, (), last_sequence, count)
    missing = _missing(sorted(numbers), highest if last_sequence is None else last_sequence)
    past = last_sequence is not None and any(number > last_sequence for number in numbers - lasts)
    found = {
        Anomaly.DUPLICATE: count > len(numbers),
        Anomaly.TWO_LASTS: len(lasts) > 1,
        Anomaly.PAST_LAST: past,
        Anomaly.EXPIRED: bool(gone),
    }
    return GroupPosition(
        group_id=group_id,
        contiguous=_contiguous(numbers, missing),
        highest=highest,
        missing=missing,
        last_sequence=last_sequence,
        seen=len(numbers),
        anomalies=tuple(anomaly for anomaly, holds in found.items() if holds),
    )


def _contiguous(numbers: set[int], missing: Ranges) -> int:
    """The number before the first that is missing. Past the last, numbers may go on."""
    if missing:
        return missing[0][0] - 1
    number = 0
    while number + 1 in numbers:
        number += 1
    return number


def _missing(numbers: list[int], end: int) -> Ranges:
    """The ranges of numbers from 1 to `end` that are not among the sorted ones."""
    ranges = []
    expected = 1
    for number in numbers:
        if number > end:
            break
        if number > expected:
            ranges.append((expected, number - 1))
        expected = number + 1
    if expected <= end:
        ranges.append((expected, end))
    return tuple(ranges)
