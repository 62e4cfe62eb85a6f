"""The sparse index of times, as arithmetic: which blocks can hold the next message in time, and how soon to stop.

A place is a pair (time in microseconds, offset); messages are in the order of their places. Looking backwards is
looking forwards in a mirror: with the signs of times and offsets changed, the last place before becomes the first one
after. So all that decides is written once, for `after`.
"""

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple, TypeAlias

Place: TypeAlias = tuple[int, int]

FIRST_OF_ITS_TIME: Final = -1
"""An offset before all others of the same time."""


class Block(NamedTuple):
    """One row of the index: some messages between two offsets; the earliest and the latest of their times."""

    min_us: int
    max_us: int
    first_offset: int
    last_offset: int

    def mirrored(self) -> "Block":
        """The block with the signs of times and offsets changed."""
        return Block(-self.max_us, -self.min_us, -self.last_offset, -self.first_offset)


def mirrored(place: Place) -> Place:
    """The place with the signs of time and offset changed."""
    return -place[0], -place[1]


def earliest(block: Block, beyond: Place) -> Place | None:
    """The earliest place after `beyond` a message of the block can have; None where all come before."""
    time_us, offset = beyond
    if block.min_us > time_us:
        return block.min_us, block.first_offset
    if block.max_us >= time_us and block.last_offset > offset:
        return time_us, max(block.first_offset, offset + 1)
    if block.max_us > time_us:
        return time_us + 1, block.first_offset
    return None


def surely_holds(block: Block, beyond: Place) -> bool:
    """Whether some message of the block comes after the place: its latest time is that of a message."""
    return block.max_us > beyond[0]


def in_order(blocks: Iterable[Block], beyond: Place) -> list[tuple[Place, Block]]:
    """The blocks that can hold something after the place, by the earliest they can hold."""
    promises = ((earliest(block, beyond), block) for block in blocks)
    return sorted((place, block) for place, block in promises if place is not None)


def agree(block: Block, times: Sequence[int | None]) -> bool:
    """Whether the times read between the block's offsets contain the two that the block must have."""
    return block.min_us in times and block.max_us in times


def joined(blocks: Iterable[Block], blocks_max: int) -> list[tuple[int, int, list[Block]]]:
    """Blocks in the order of their offsets, as runs to read in one go: first offset, last offset, blocks.

    Blocks whose offsets overlap are in one run; others are added up to `blocks_max`, while little lies between them.
    """
    runs: list[tuple[int, int, list[Block]]] = []
    for block in sorted(blocks, key=lambda each: (each.first_offset, each.last_offset)):
        if runs:
            first, last, members = runs[-1]
            overlaps = block.first_offset <= last
            if overlaps or (len(members) < blocks_max and block.first_offset - last <= _GAP_OFFSETS):
                members.append(block)
                runs[-1] = (first, max(last, block.last_offset), members)
                continue
        runs.append((block.first_offset, block.last_offset, [block]))
    return runs


_GAP_OFFSETS: Final = 512
"""Offsets between two blocks that are read over: about what is read in half the time of one more attach."""
