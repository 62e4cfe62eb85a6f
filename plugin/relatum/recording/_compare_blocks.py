"""What the index of times should hold of messages, and where it differs. Pure.

Each message with a time lies in exactly one block, and a block's ends are exactly those of its messages: the messages
between its offsets whose times lie between its times. At most 128 messages lie between a block's offsets.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from relatum.limits import TIME_BLOCK_MESSAGES_MAX
from relatum.reading import Message
from relatum.recording._compare import Block, Difference, Expected
from relatum.recording._time_blocks import width_class
from relatum.store import TIME, Range

MARGIN_MESSAGES: Final = TIME_BLOCK_MESSAGES_MAX
"""Messages behind a window that a block which begins in it may hold."""


@dataclass(slots=True)
class Held:
    """A block and the messages it holds: their offsets, and the least and greatest of their times."""

    block: Block
    offsets: list[int] = field(default_factory=list)
    times: list[int] = field(default_factory=list)

    def is_exact(self, first_retained: int) -> bool:
        """Whether the block's row is what its messages make it; as far as they are retained."""
        block = self.block
        if not self.offsets or len(self.offsets) > TIME_BLOCK_MESSAGES_MAX:
            return False
        if block.width_class != width_class(block.max_us - block.min_us) or block.last_offset != self.offsets[-1]:
            return False
        if block.first_offset < first_retained:
            return block.first_offset >= 0
        low, high = min(self.times), max(self.times)
        return (block.first_offset, block.min_us, block.max_us) == (self.offsets[0], low, high)


def compare_blocks(
    messages: Sequence[Message],
    blocks: Iterable[Block],
    expected: Expected,
    window: Range,
    first_retained: int,
) -> Iterator[Difference]:
    """Where the time index is not what a window's messages make it, in the order of offsets."""
    counts = Counter(blocks)
    held = {block: Held(block) for block in counts}
    found: list[Difference] = []
    shared: set[tuple[Block, ...]] = set()
    start, end = window
    for message, active in walk(messages, sorted(counts)):
        time_us = message.time_us
        if time_us is None:
            continue
        mine = [block for block in active if block.min_us <= time_us <= block.max_us]
        for block in mine:
            held[block].offsets.append(message.offset)
            held[block].times.append(time_us)
        if len(mine) > 1:
            shared.add(tuple(mine))
        if not mine and start <= message.offset < end and expected.covers(message.offset, TIME):
            found.append(Difference("time_missing", message.offset, "time", "", time_us, "time_blocks"))
    # A block that is wrong may claim anything: only right ones hold a message twice.
    exact = [[block for block in blocks if held[block].is_exact(first_retained)] for blocks in shared]
    twice = {block for blocks in exact for block in blocks[1:]}
    for block, count in counts.items():
        # One that begins before what is retained belongs to the first window it reaches into.
        if start <= block.first_offset < end or block.first_offset < first_retained == start:
            found += _judged(held[block], count, expected, first_retained, is_twice=block in twice)
    yield from sorted(found, key=lambda each: (each.offset, each.kind, each.detail))


def walk(messages: Sequence[Message], blocks: Sequence[Block]) -> Iterator[tuple[Message, list[Block]]]:
    """Each message with the blocks between whose offsets it lies. Both are walked in order."""
    waiting = list(reversed(blocks))
    active: list[Block] = []
    for message in messages:
        while waiting and waiting[-1].first_offset <= message.offset:
            active.append(waiting.pop())
        active = [block for block in active if block.last_offset >= message.offset]
        yield message, active


def _judged(held: Held, count: int, expected: Expected, first_retained: int, *, is_twice: bool) -> Iterator[Difference]:
    block = held.block
    place = {"table": "time_blocks", "to_offset": block.last_offset + 1, "time_us": block.min_us}
    if not held.is_exact(first_retained):
        yield Difference("time_wrong", block.first_offset, detail=f"{tuple(block)}", **place)  # type: ignore[arg-type]
        return
    if count > 1 or is_twice:
        yield Difference("time_duplicate", block.first_offset, **place)  # type: ignore[arg-type]
    if not all(expected.covers(offset, TIME) for offset in held.offsets):
        yield Difference("uncovered", block.first_offset, "time", **place)  # type: ignore[arg-type]
