"""What reading a stream in bulk gives: its ends, and batches of records that are not decoded."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

from relatum.reading._message import Message


class _Ends(NamedTuple):
    first: int | None
    last: int | None


class StreamBounds(_Ends):
    """Offsets of the first and the last message retained; both None where there is none.

    Attributes:
        is_proven: True where they are the word of the stream's leader: all that was confirmed before the question lies
            between them. False is what one node knows, where the leader cannot be reached from here. It is no part of
            the pair.
        is_silence: True where there is none because a leader that may have to wait for replicas showed none for a
            while: enough for a stream of which nothing is known, no proof that what lay there is gone.
    """

    is_proven: bool
    is_silence: bool

    def __new__(cls, first: int | None, last: int | None, *, is_proven: bool = False, is_silence: bool = False) -> Self:
        """Make one; what is not said to be proven is not."""
        bounds = super().__new__(cls, first, last)
        bounds.is_proven, bounds.is_silence = is_proven, is_silence
        return bounds

    @property
    def is_sure(self) -> bool:
        """Whether what was confirmed once, and does not lie between them, is gone."""
        return self.is_proven and not self.is_silence

    @property
    def end(self) -> int:
        """The offset behind the last message; 0 where there is none."""
        return 0 if self.last is None else self.last + 1

    def lag(self, position: int) -> int:
        """How many retained offsets there are from a position on."""
        return max(0, self.end - max(position, self.first or 0))


@dataclass(frozen=True, slots=True)
class RecordBatch:
    """Consecutive records of a stream, as they lie in one chunk.

    Attributes:
        stream: The stream's name.
        first_offset: Offset of the first record of the batch.
        offsets: Offset of each record, ascending.
        records: Each record's bytes (AMQP 1.0 sections, or whatever a publisher wrote), for `Message.from_record`; an
            `UnreadableRecord` where its batch cannot be unpacked.
        chunk_ms: When the chunk was written, milliseconds since 1970, UTC.
        epoch: The leader's term.
    """

    stream: str
    first_offset: int
    offsets: Sequence[int]
    records: Sequence[bytes]
    chunk_ms: int | None = None
    epoch: int | None = None

    def __len__(self) -> int:
        return len(self.offsets)

    @property
    def last_offset(self) -> int:
        """Offset of the last record of the batch."""
        return self.offsets[-1]

    def each_message(self) -> list[Message]:
        """The batch's messages, none of them decoded yet."""
        stream, chunk_ms = self.stream, self.chunk_ms
        pairs = zip(self.offsets, self.records, strict=True)
        return [Message.from_record(stream, offset, record, chunk_ms) for offset, record in pairs]
