"""The sparse index of times: how its rows are made from the times of recorded messages. Pure.

A row for each message would cost as much as a key's row and slow the recorder down by a third. A row for each 128
messages costs less than a byte a message, and reading 128 messages takes less time than one attach. Invariants that
keep a lookup by time exact, even if publishers' times are not in offset order:

- every message with a time has a block whose [min_us, max_us] includes its time and whose offsets include its offset;
- both ends of a block's range are times of messages in it;
- a block of class c is at most 4**c microseconds wide, so blocks that can include a time t begin within 4**c before it.

If times are in order, a block is one row of any width. If not, its messages are grouped by time, and a group is at
most a second wide, so that a lookup never has to read blocks that span a day of disorder.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

from relatum.limits import TIME_BLOCK_DISORDER_US_MAX, TIME_BLOCK_MESSAGES_MAX


class TimeBlock(NamedTuple):
    """One row of the time index. Times and offsets are inclusive at both ends."""

    min_us: int
    max_us: int
    first_offset: int
    last_offset: int

    @property
    def width_class(self) -> int:
        """0 for a single moment, else the smallest c with max_us - min_us <= 4**c."""
        return width_class(self.max_us - self.min_us)


def width_class(width_us: int) -> int:
    """Return the class of a width in microseconds: 0 for 0, else the smallest c >= 1 with width_us <= 4**c."""
    if width_us == 0:
        return 0
    return max(1, ((width_us - 1).bit_length() + 1) // 2)


def time_blocks(
    offsets: Sequence[int], times: Sequence[int], high_us: int | None
) -> tuple[list[TimeBlock], int | None]:
    """Return the blocks of consecutive messages, and the greatest time up to and including theirs."""
    if len(times) == 1:
        # Common: most streams of a large commit have one message.
        (at,) = times
        return [TimeBlock(at, at, offsets[0], offsets[0])], at if high_us is None or at > high_us else high_us
    blocks: list[TimeBlock] = []
    for start in range(0, len(offsets), TIME_BLOCK_MESSAGES_MAX):
        part = times[start : start + TIME_BLOCK_MESSAGES_MAX]
        places = offsets[start : start + TIME_BLOCK_MESSAGES_MAX]
        low, high = min(part), max(part)
        in_order = (high_us is None or low >= high_us) and all(a <= b for a, b in pairwise(part))
        if in_order or high - low <= TIME_BLOCK_DISORDER_US_MAX:
            blocks.append(TimeBlock(low, high, places[0], places[-1]))
        else:
            blocks.extend(_grouped(places, part))
        high_us = high if high_us is None else max(high_us, high)
    return blocks, high_us


def _grouped(offsets: Sequence[int], times: Sequence[int]) -> list[TimeBlock]:
    """Group messages by time; no group is wider than disorder may be."""
    groups: list[TimeBlock] = []
    members: list[int] = []
    first = last = 0
    for time_us, offset in sorted(zip(times, offsets, strict=True)):
        if members and time_us - first > TIME_BLOCK_DISORDER_US_MAX:
            groups.append(TimeBlock(first, last, min(members), max(members)))
            members = []
        if not members:
            first = time_us
        last = time_us
        members.append(offset)
    groups.append(TimeBlock(first, last, min(members), max(members)))
    return groups
