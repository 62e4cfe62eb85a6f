"""A chunk that was read, given to the owner in pieces and held until it is done with all of them. Pure."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from relatum.reading import Message, RecordBatch, UnreadableRecord
from relatum.wire import Chunk, record_at, small_records, split

if TYPE_CHECKING:
    from relatum.following._followed import Followed
    from relatum.following._subscriptions import Subscription

RECORD_BYTES: Final = 64
"""Bytes that a record takes in memory beside its own, about."""

PIECE_RECORDS: Final = 512
"""Records of one piece at most: some milliseconds' work for the owner, whose loop has other streams, and a lease."""


class Held:
    """A chunk, split and unpacked piece by piece as it is given: what waits has the size that was sent.

    Records before `begin` are not given; `out` pieces were, and the owner is not done with them; `is_cut` says that
    there is no other to give.
    """

    def __init__(self, chunk: Chunk, followed: "Followed", subscription: "Subscription") -> None:
        self._chunk = chunk
        self.followed = followed
        self.subscription = subscription
        self.begin = 0
        self.bytes = len(chunk.data)
        self.first_offset = chunk.first_offset
        self.last_offset = chunk.first_offset + chunk.record_count - 1
        self.out = 0
        self.is_cut = self.is_released = False
        self._pieces: Iterator[RecordBatch] | None = None

    def at(self, offset: int) -> Message | None:
        """The message at an offset; None where none is held."""
        record = record_at(self._chunk, offset)
        return None if record is None else Message.from_record("", offset, record, self._chunk.time_ms)

    def piece(self) -> tuple[RecordBatch, int] | None:
        """The next piece and the bytes it takes; None where there is no other, as `is_cut` says with the last one."""
        if self._pieces is None and self.begin <= self.first_offset and self._chunk.record_count <= PIECE_RECORDS:
            records = small_records(self._chunk)
            if records is not None:
                self.is_cut = True
                return self._batch(self.first_offset, records), self.bytes + RECORD_BYTES * len(records)
        if self._pieces is None:
            self._pieces = self._cut()
        piece = next(self._pieces, None)
        self.is_cut = piece is None or piece.last_offset >= self.last_offset
        return None if piece is None else (piece, sum(map(len, piece.records)) + RECORD_BYTES * len(piece))

    def _cut(self) -> Iterator[RecordBatch]:
        for first, records in split(self._chunk):
            # What cannot be unpacked is no work, and passed over as a whole.
            most = len(records) if UnreadableRecord in set(map(type, records)) else PIECE_RECORDS
            start = max(0, self.begin - first)
            while start < len(records):
                yield self._batch(first + start, records[start : start + most])
                start += most

    def _batch(self, first: int, records: list[bytes]) -> RecordBatch:
        chunk, offsets = self._chunk, range(first, first + len(records))
        return RecordBatch(self.followed.stream, first, offsets, records, chunk.time_ms, chunk.epoch)


class Given:
    """A piece that was given, with the bytes it takes unpacked: what `done` releases, once."""

    __slots__ = ("bytes", "held", "is_done")

    def __init__(self, held: Held, bytes_: int) -> None:
        self.held = held
        self.bytes = bytes_
        self.is_done = False
