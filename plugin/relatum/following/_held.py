"""A chunk that was read and is held for the taker.

It stays as it came, and is split and unpacked piece by piece when its turn to be taken comes: what is held has the size
that was sent, whatever it unpacks to.
"""

from collections.abc import Iterator

from relatum.reading import Message, RecordBatch
from relatum.wire import Chunk, record_at, small_records, split


class Held:
    """A chunk, given in pieces, and done when all of them are.

    Attributes:
        begin: Records before that offset are not given.
        bytes: Its bytes, as long as it is held.
        out: Pieces that were given and are not done.
        is_cut: Whether all were given.
        is_done: Whether it is held no more.
        round: See `Followed.round`.
    """

    __slots__ = (
        "_chunk",
        "_pieces",
        "begin",
        "bytes",
        "first_offset",
        "is_cut",
        "is_done",
        "last_offset",
        "out",
        "round",
    )

    def __init__(self, chunk: Chunk) -> None:
        self._chunk = chunk
        self.begin = 0
        self.bytes = len(chunk.data)
        self.first_offset = chunk.first_offset
        self.last_offset = chunk.first_offset + chunk.record_count - 1
        self.out = self.round = 0
        self.is_cut = self.is_done = False
        self._pieces: Iterator[RecordBatch] | None = None

    def at(self, offset: int) -> Message | None:
        """The message at an offset; None where none is held."""
        record = record_at(self._chunk, offset)
        return None if record is None else Message.from_record("", offset, record, self._chunk.time_ms)

    def piece(self, stream: str) -> RecordBatch | None:
        """The next piece; None where there is no other, which `is_cut` says after the last one already.

        Raises:
            ChunkCorrupt: lengths inside it are wrong.
        """
        if self._pieces is None and self.begin <= self.first_offset:
            chunk = self._chunk
            records = small_records(chunk)
            if records is not None:
                self.is_cut, self._pieces = True, iter(())
                first = self.first_offset
                return RecordBatch(
                    stream, first, range(first, first + len(records)), records, chunk.time_ms, chunk.epoch
                )
        if self._pieces is None:
            self._pieces = self._cut(stream)
        piece = next(self._pieces, None)
        self.is_cut = piece is None or piece.last_offset >= self.last_offset
        return piece

    def _cut(self, stream: str) -> Iterator[RecordBatch]:
        chunk, begin = self._chunk, self.begin
        for first, records in split(chunk):
            end = first + len(records)
            if first < begin:
                records, first = records[begin - first :], begin
            if records:
                yield RecordBatch(stream, first, range(first, end), records, chunk.time_ms, chunk.epoch)
