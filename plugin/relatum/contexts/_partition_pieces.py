"""What is read of a partition: consecutive messages, and what each of them is to a serial consumer. Pure."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace

from relatum.contexts._entries import CONTROL_BYTES, Adoption, Data, Entry, Marker, Placed, entry_of
from relatum.errors import UndecodableMessage
from relatum.headers import PLACED_HEADER
from relatum.reading import Message, RecordBatch, header_value
from relatum.wire import amqp10


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive messages of a partition, as they were read.

    Most are looked at by the application alone: each is made where it is needed, in the thread that goes on with it.
    """

    batch: RecordBatch
    bytes: int
    may_control: bool
    adopted: Mapping[int, Message | None] = field(default_factory=dict)
    """The messages that adoptions among them name, by the adoptions' offsets; None where one is gone."""
    foreign: Collection[int] = ()
    """The offsets of control messages that name no partition of this super stream: copied from elsewhere."""

    @classmethod
    def plain(cls, batch: RecordBatch) -> "Piece | None":
        """The piece in a batch of records that has no control message; None where it may have some."""
        # One search for all: joining them is faster than looking into each.
        joined = b"".join(batch.records)
        return None if CONTROL_BYTES in joined else cls(batch, len(joined), may_control=False)

    @classmethod
    def of(
        cls,
        batch: RecordBatch,
        read: Callable[[Adoption], Message | None],
        is_partition: Callable[[str], bool] = lambda stream: True,
    ) -> "Piece":
        """The piece in a batch of records, for which adopted messages are read."""
        piece = cls.plain(batch)
        if piece is not None:
            return piece
        adopted: dict[int, Message | None] = {}
        foreign: set[int] = set()
        for message in batch.each_message():
            entry = control_in(message)
            named = _partition_in(entry)
            if named is not None and not is_partition(named):
                foreign.add(message.offset)
            elif isinstance(entry, Adoption):
                adopted[message.offset] = read(entry)
        return cls(batch, sum(map(len, batch.records)), True, adopted, foreign)

    def __len__(self) -> int:
        return len(self.batch)

    def message(self, at: int) -> Message:
        """One of the messages."""
        [message] = self.cut(at, at + 1).each_message()
        return message

    def cut(self, start: int, end: int) -> RecordBatch:
        """Some of the messages."""
        batch, offsets = self.batch, self.batch.offsets[start:end]
        return replace(batch, first_offset=offsets[0], offsets=offsets, records=batch.records[start:end])


def control_in(message: Message) -> Entry | None:
    """What a control message says; None for any other message."""
    if message.raw is not None and CONTROL_BYTES not in message.raw:
        return None
    entry = entry_of(message.headers, message.body, "")
    return None if isinstance(entry, Data) else entry


def _partition_in(entry: Entry | None) -> str | None:
    """The partition a control message names."""
    if isinstance(entry, Marker):
        return entry.source
    return entry.stream if isinstance(entry, Adoption) else None


class EntryReader:
    """Tells what messages are, decoding no more of them than that takes."""

    def __init__(self, header: str) -> None:
        self._header = header
        self._wanted = {header.encode(): 0, PLACED_HEADER.encode(): 1}
        # Such headers are not where the others are from RabbitMQ 3.13 on.
        self._is_plain = not header.startswith("x-")

    def __call__(self, message: Message) -> Entry:
        raw = message.raw
        if raw is None or not self._is_plain or CONTROL_BYTES in raw:
            return entry_of(message.headers, message.body, self._header)
        found: list[object] = [None, None]
        try:
            for code, start, _ in amqp10.find_sections(raw):
                if code == amqp10.APPLICATION_PROPERTIES:
                    amqp10.pick(raw, start, self._wanted, found)
        except UndecodableMessage:
            found = [None, None]
        context = header_value(found[0])
        return Data(context if isinstance(context, str) else None, Placed.parse(header_value(found[1])))
