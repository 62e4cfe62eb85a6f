"""Numbers a group's messages as they are published. Pure: the caller sends, and reports failures."""

import heapq

from relatum.errors import GroupConflict, IncompleteGroup
from relatum.limits import GROUP_SEQUENCE_MAX
from relatum.membership import (
    Anomaly,
    GroupFault,
    GroupPosition,
    Membership,
    Ranges,
    checked_group_id,
    checked_sequence,
    new_group_id,
    new_place,
)

_CANNOT_GO_ON = (Anomaly.TWO_LASTS, Anomaly.PAST_LAST, Anomaly.EXPIRED)
"""Anomalies that no further message can repair."""


class Numbering:
    """The sequence numbers of one group that is being published, from `start` on; lower ones count as published.

    A number is taken before its message is sent, and freed if the message is certainly in no stream. The next message
    gets the freed number, so no gap is left.
    """

    def __init__(self, group_id: str | None = None, start: int = 1) -> None:
        if group_id is None and start != 1:
            raise GroupFault.OPTION_INVALID.error("start= continues a group: pass its group_id=")
        self.group_id = new_group_id() if group_id is None else checked_group_id(group_id)
        self.next_free = checked_sequence(start)
        """The number after the highest taken one."""
        self.last_sequence: int | None = None
        """The number of the last message; None before it is taken."""
        self._gaps: list[tuple[int, int]] = []  # a heap of ranges below next_free
        self._has_ended = False

    def resume(self, position: GroupPosition) -> None:
        """Continue from a position: with the missing numbers, then with numbers above the highest."""
        if not isinstance(position, GroupPosition):
            raise GroupFault.OPTION_INVALID.error(
                f"position= takes a result of group_position(…), not {type(position).__name__}"
            )
        if position.group_id != self.group_id and self.is_begun:
            raise GroupFault.OPTION_INVALID.error(
                f"group {self.group_id} has messages already: continue another group with a new MessageGroup"
            )
        for anomaly in _CANNOT_GO_ON:
            if anomaly in position.anomalies:
                raise GroupConflict(
                    f"group {position.group_id} cannot be continued: {anomaly}",
                    group_id=position.group_id,
                    anomaly=str(anomaly),
                )
        self.group_id = position.group_id
        self.last_sequence = position.last_sequence
        self.next_free = (position.last_sequence or position.highest) + 1
        self._gaps = list(position.missing)  # sorted, so a heap

    def take(self, *, last: bool = False) -> Membership:
        """Return the next message's place: the lowest free number; for the last message, one above all others."""
        if self._has_ended or (self.last_sequence is not None and (last or not self._gaps)):
            raise GroupFault.ENDED.error(f"group {self.group_id} has ended; nothing was sent")
        if self._gaps and not last:
            first, end = heapq.heappop(self._gaps)
            if first < end:
                heapq.heappush(self._gaps, (first + 1, end))
            return Membership(self.group_id, first, False)
        number = self.next_free
        if number > GROUP_SEQUENCE_MAX:
            checked_sequence(number)
        self.next_free = number + 1
        if last:
            self.last_sequence = number
        return new_place(Membership, (self.group_id, number, last))

    def give_back(self, place: Membership) -> None:
        """Free the number of a message that is in no stream."""
        if place.last:
            self.last_sequence = None
        heapq.heappush(self._gaps, (place.sequence, place.sequence))
        if self.last_sequence is not None:
            return
        # Free numbers at the end are no gaps.
        ranges = sorted(self._gaps)
        while ranges and ranges[-1][1] == self.next_free - 1:
            self.next_free = ranges.pop()[0]
        self._gaps = ranges

    def end(self) -> None:
        """Assign no more numbers."""
        self._has_ended = True

    @property
    def is_begun(self) -> bool:
        """Whether a number has been taken."""
        return self.next_free > 1

    @property
    def is_complete(self) -> bool:
        """Whether the last message has a number, and no lower number is free."""
        return self.last_sequence is not None and not self._gaps

    @property
    def missing(self) -> Ranges:
        """The free numbers below the highest taken one: ranges (first, last), ascending."""
        joined: list[tuple[int, int]] = []
        for first, last in sorted(self._gaps):
            if joined and joined[-1][1] == first - 1:
                joined[-1] = (joined[-1][0], last)
            else:
                joined.append((first, last))
        return tuple(joined)

    def incomplete(self) -> IncompleteGroup:
        """Return the error for a group that ends incomplete."""
        lacks = "its last message" if self.last_sequence is None else f"{self.missing}"
        return IncompleteGroup(
            f"group {self.group_id} ended without {lacks}: resume it from its position, or put its last message",
            group_id=self.group_id,
            missing=self.missing,
            last_sequence=self.last_sequence,
        )
