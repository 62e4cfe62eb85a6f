"""What look-ups by time are about: the moment and the side of it, the streams meant, what retention took meanwhile."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from relatum.errors import TimeNotRecorded
from relatum.ids import MessageId
from relatum.limits import INTEGER_MAX
from relatum.reading import Message
from relatum.store import TIME
from relatum_consumer.lookups._answer import Hit
from relatum_consumer.lookups._answering import Found
from relatum_consumer.lookups._blocks import FIRST_OF_ITS_TIME, Block, Place, mirrored
from relatum_consumer.lookups._catalog import Catalog, PresentStream, Wanted, in_partition_order
from relatum_consumer.lookups._lookup_statements import Direction
from relatum_consumer.lookups._requests import Steps

Rank = tuple[int, tuple[int, str], int]
"""Where a message stands in time: its time, then its partition, then its offset."""


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


@dataclass(slots=True)
class Lost:
    """What a look-up learns of retention on its way.

    Attributes:
        floors: The first offset retained, by stream, where it mattered.
        ids: Where messages lay that were sought.
        deleted: Where messages lay that were sought and whose streams are gone.
        unread: Where messages lie that were sought, that could not be read, and that are not surely gone.
        is_sure: Whether a message that was sought has expired, its id known or not.
    """

    floors: dict[str, int] = field(default_factory=dict)
    ids: dict[MessageId, None] = field(default_factory=dict)
    deleted: dict[MessageId, None] = field(default_factory=dict)
    unread: dict[MessageId, None] = field(default_factory=dict)
    is_sure: bool = False

    def take(self, where: MessageId, first: int, *, is_sure: bool) -> None:
        """Take in that retention took a message, up to the first offset retained; surely, or as this node knows it."""
        self.floors[where.stream] = first
        if is_sure and first == INTEGER_MAX:
            self.deleted[where] = None
        elif is_sure:
            self.ids[where] = None
            self.is_sure = True
        else:
            self.unread[where] = None


@dataclass(frozen=True, slots=True)
class Search:
    """Where to look: streams and super streams, and the value of a key that messages must carry, if any.

    Names of None are all streams that are recorded.
    """

    catalog: Catalog
    names: tuple[str, ...] | None
    by: Wanted | None = None

    def targets(self) -> Steps[list[PresentStream]]:
        """The recorded streams meant; where none is named, those whose times are recorded."""
        streams = yield from self.catalog.streams(self.names)
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
        return Found(hits, tuple(lost.ids), tuple(lost.unread), lost.is_sure, tuple(lost.deleted))


def rank(message: Message) -> Rank:
    """Where a message that has a time stands."""
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
    """A span of time, both ends included, and the message in it that is not meant."""

    low: int
    high: int
    beside: MessageId | None

    def holds(self, search: Search, message: Message) -> bool:
        """Whether a message is meant."""
        time_us = message.time_us
        if time_us is None or not self.low <= time_us <= self.high:
            return False
        return message.id != self.beside and search.shares_key(message)
