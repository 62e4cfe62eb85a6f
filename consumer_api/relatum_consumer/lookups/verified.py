"""Messages that rows of the index name: each read, and checked against its row; and what became of the others."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from relatum.errors import (
    AccessRefused,
    NotAStream,
    NotFound,
    OffsetExpired,
    OffsetNotFound,
    RelatumError,
    StreamNotFound,
    StreamReplaced,
    StreamUnavailable,
)
from relatum.ids import MessageId
from relatum.limits import INTEGER_MAX
from relatum.reading import KeptChunks, Message
from relatum_consumer.lookups.answer import Hit
from relatum_consumer.lookups.catalog import Catalog, Wanted
from relatum_consumer.lookups.servers import Servers
from relatum_consumer.lookups.stream_states import coverage_by_stream, replaced


@dataclass(slots=True)
class Row:
    """Where the table says a message lies, and by which keys."""

    id: MessageId
    time_us: int | None
    key_ids: set[int] = field(default_factory=set)


class HasPlace(Protocol):
    """What says where a message lies."""

    @property
    def id(self) -> MessageId:
        """Where it lies."""


_Placed = TypeVar("_Placed", bound=HasPlace)


@dataclass(slots=True)
class Lost:
    """What became of messages that the index names and that are not there.

    Attributes:
        floors: The first offset retained, by stream, where it mattered; `INTEGER_MAX` where nothing is to be asked for.
        expired: Where messages lay that retention surely took.
        deleted: Where messages lay whose streams are surely gone.
        unread: Where messages lie that could not be read and are not surely gone.
        is_sure: Whether retention surely took a message that was sought, its id known or not.
    """

    floors: dict[str, int] = field(default_factory=dict)
    expired: dict[MessageId, None] = field(default_factory=dict)
    deleted: dict[MessageId, None] = field(default_factory=dict)
    unread: dict[MessageId, None] = field(default_factory=dict)
    is_sure: bool = False

    def __len__(self) -> int:
        return len(self.expired) + len(self.deleted) + len(self.unread)

    def take(self, where: MessageId, first: int, *, is_sure: bool) -> None:
        """Note a message that is not there, and the first offset retained: surely, or as this node knows it."""
        self.floors[where.stream] = first
        if is_sure and first == INTEGER_MAX:
            self.deleted[where] = None
        elif is_sure:
            self.expired[where] = None
            self.is_sure = True
        else:
            self.unread[where] = None


def read_rows(
    servers: Servers,
    rows: Sequence[_Placed],
    take: Callable[[_Placed, Message], object],
    lost: Lost,
    *,
    is_named: bool,
    kept: KeptChunks | None = None,
) -> None:
    """Show each row with its message to `take`, which checks it. Those without one are noted in `lost`."""
    if not rows:
        return
    messages = servers.read([row.id for row in rows], kept)
    for row, message in zip(rows, messages, strict=True):
        if isinstance(message, Message):
            take(row, message)
        elif isinstance(message, AccessRefused) and not is_named:
            # All of a stream that was not asked for is unread: nothing of it is asked for again.
            lost.take(row.id, INTEGER_MAX, is_sure=False)
        else:
            first = first_retained(row.id, message, is_named=is_named)
            lost.take(row.id, first, is_sure=is_sure(message))


def verified(
    catalog: Catalog, wanted: Sequence[Wanted], rows: Sequence[Row], lost: Lost, *, is_named: bool
) -> tuple[Hit, ...]:
    """The rows' messages, each checked against its row. Those that are gone, or are others, are noted in `lost`."""
    hits: list[Hit] = []
    others: dict[MessageId, StreamReplaced] = {}

    def take(row: Row, message: Message) -> None:
        found = [each for each in wanted if each.is_of(message)]
        # A row that was recorded over AMQP 0.9.1 may lack the time; what both have must agree.
        is_other = row.time_us is not None and message.time_us is not None and row.time_us != message.time_us
        if is_other or not {each.key_id for each in found}.issuperset(row.key_ids):
            others[row.id] = replaced(*row.id)
        else:
            # A message may share several values of one key.
            hits.append(Hit(message, tuple(dict.fromkeys(each.definition.name for each in found))))

    read_rows(catalog.servers, rows, take, lost, is_named=is_named)
    for where in seen_over_amqp(catalog, others):
        # As if retention had taken it, for all that is known: what is asked for again comes behind it.
        lost.take(where, where.offset + 1, is_sure=False)
    return tuple(hits)


def seen_over_amqp(catalog: Catalog, others: Mapping[MessageId, StreamReplaced]) -> Collection[MessageId]:
    """The places of messages that are not as their rows say: AMQP 0.9.1 showed them otherwise, a number of 42.7 as 42.

    Releases up to 0.4 recorded over it.

    Raises:
        StreamReplaced: One was not recorded so.
    """
    for where, error in others.items():
        ranges = coverage_by_stream(catalog.servers, catalog.streams([where.stream]))
        rows = (row for of_stream in ranges.values() for row in of_stream)
        if not any(row.over_amqp and row.from_offset <= where.offset < row.to_offset for row in rows):
            raise error
    return others.keys()


def first_retained(where: MessageId, error: RelatumError, *, is_named: bool) -> int:
    """The first offset the stream retains, after a row's message was not there; see `is_sure`.

    Raises:
        StreamReplaced: it is not retention that took it, and the leader says so.
        StreamNotFound, NotAStream: the stream was deleted, and was asked for by name.
        AccessRefused: this user may not read the stream.
        Transient: nothing can be known now. The whole answer is this error then: a message that is there, on a node
            that is behind or starting, must not be left out of it.
    """
    if isinstance(error, OffsetExpired):
        return error.first
    if isinstance(error, (StreamNotFound, NotAStream)):
        if is_named:
            raise error
        # All of a deleted stream is gone: nothing of it is asked for again.
        return INTEGER_MAX
    if isinstance(error, OffsetNotFound):
        if is_sure(error):
            raise replaced(*where) from error
        message = f"the message at {where} is recorded, and this node does not have it yet: repeat it later"
        raise StreamUnavailable(message, stream=where.stream) from error
    raise error


def is_sure(error: RelatumError) -> bool:
    """Whether nobody need doubt that a message is not there: its stream is gone, or the stream's leader says so."""
    if isinstance(error, OffsetNotFound):
        return error.is_proven
    return isinstance(error, NotFound)
