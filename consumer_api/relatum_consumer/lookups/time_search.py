"""Lookups by time: what they are about, and which blocks of the sparse index of times can hold the next message. Pure.

A place is a pair (time in microseconds, offset); messages are in the order of their places. Looking backwards is
looking forwards in a mirror: with the signs of times and offsets changed, the last place before becomes the first one
after. So all that decides is written once, for `after`.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, TypeAlias

from relatum.errors import TimeNotRecorded
from relatum.ids import MessageId
from relatum.limits import INTEGER_MAX
from relatum.reading import Message
from relatum.store.coverage import TIME
from relatum_consumer.lookups.answer import Hit
from relatum_consumer.lookups.answering import Found, Lost
from relatum_consumer.lookups.catalog import Catalog, PresentStream, Wanted, in_partition_order

Place: TypeAlias = tuple[int, int]
Direction: TypeAlias = Literal["after", "before"]

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


def in_order(blocks: Iterable[Block], beyond: Place) -> list[tuple[Place, Block]]:
    """The blocks that can hold something after the place, by the earliest they can hold."""
    promises = ((earliest(block, beyond), block) for block in blocks)
    return sorted((place, block) for place, block in promises if place is not None)


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


class Side(NamedTuple):
    """One direction to look in, and whether an equal time in another stream counts as beyond the moment."""

    direction: Direction
    inclusive: bool = False


@dataclass(frozen=True, slots=True)
class Moment:
    """The moment looked from: microseconds since 1970, and the id of the message whose moment it is, if any."""

    time_us: int
    id: MessageId | None = None

    def edge(self, stream: str, among: Collection[str], side: Side) -> Place:
        """The place in a stream beyond which messages are sought.

        Equal times in the message's own stream are ordered by offset; where that is one of several partitions, by
        partition and offset; elsewhere they are beyond if the side includes them.
        """
        if self.id is not None and stream == self.id.stream:
            return self.time_us, self.id.offset
        if self.id is not None and self.id.stream in among:
            comes_later = in_partition_order(stream) > in_partition_order(self.id.stream)
            return self.time_us, FIRST_OF_ITS_TIME if comes_later else INTEGER_MAX
        begins_at_it = side.inclusive == (side.direction == "after")
        return self.time_us, FIRST_OF_ITS_TIME if begins_at_it else INTEGER_MAX


@dataclass(frozen=True, slots=True)
class Search:
    """Where to look: streams and super streams, and the value of a key that messages must carry, if any.

    Names of None are all streams that are recorded.
    """

    catalog: Catalog
    names: tuple[str, ...] | None
    by: Wanted | None = None

    def targets(self) -> list[PresentStream]:
        """The recorded streams meant; where none is named, those whose times are recorded."""
        streams = self.catalog.streams(self.names)
        if self.names is None:
            return [stream for stream in streams if stream.record_time]
        for stream in streams:
            if not stream.record_time:
                raise TimeNotRecorded(f"times are not recorded for the stream {stream.name!r}", stream=stream.name)
        return streams

    @property
    def key_ids(self) -> list[int]:
        """What must be recorded: times, and the key."""
        return [TIME] if self.by is None else [TIME, self.by.key_id]

    def shares_key(self, message: Message) -> bool:
        """Whether a message carries the key's value, where one is asked by."""
        return self.by is None or self.by.is_of(message)

    def found(self, messages: Iterable[Message], lost: Lost) -> Found:
        """What was found, with what of it is lost."""
        keys = () if self.by is None else (self.by.definition.name,)
        hits = tuple(Hit(message, keys) for message in messages)
        return Found(hits, lost)


def rank(message: Message) -> tuple[int, tuple[int, str], int]:
    """Where a message that has a time stands: its time, then its partition, then its offset."""
    return time_of(message), in_partition_order(message.stream), message.offset


def time_of(message: Message) -> int:
    """The time of a message that has one."""
    assert message.time_us is not None, "messages without a time were left out"
    return message.time_us


class Nearest:
    """Keeps the nearest of the messages it is shown. Places are in the direction's coordinates: see `_blocks`."""

    def __init__(self, search: Search, edge: Place, direction: Direction) -> None:
        self._search = search
        self._is_after = direction == "after"
        self.beyond = self.turned(edge)
        self.message: Message | None = None
        self.place: Place | None = None
        """Where the nearest stands in time; None while there is none."""

    def turned(self, place: Place) -> Place:
        """A place in the direction's coordinates, or such a one as it is in the table."""
        return place if self._is_after else mirrored(place)

    def turned_block(self, block: Block) -> Block:
        """The same of a block."""
        return block if self._is_after else block.mirrored()

    def consider(self, message: Message) -> None:
        """Look at one message."""
        if message.time_us is not None and self._search.shares_key(message):
            place = self.turned((message.time_us, message.offset))
            if place > self.beyond and (self.place is None or place < self.place):
                self.message, self.place = message, place


@dataclass(frozen=True, slots=True)
class Window:
    """A span of time around a moment, both ends included, and the message in it that is not meant."""

    at: int
    low: int
    high: int
    beside: MessageId | None

    def holds(self, search: Search, message: Message) -> bool:
        """Whether a message is meant."""
        time_us = message.time_us
        if time_us is None or not self.low <= time_us <= self.high:
            return False
        return message.id != self.beside and search.shares_key(message)
