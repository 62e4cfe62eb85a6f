"""Chunks of a stream: checked, then split into records without decoding them. No I/O.

A chunk is what the broker wrote at once: up to 65,535 entries under one header. An entry is one record, or a
sub-entry batch of records, compressed or not; every record takes one offset, counted from the chunk's first.
This is the recorder's hot path: a record costs one length, one slice, one append.

Source: PROTOCOL.adoc (Deliver) and osiris_log.erl of RabbitMQ.
"""

import struct
import zlib
from collections.abc import Iterator
from typing import Final, NamedTuple

from relatum.errors import ChunkCorrupt, ProtocolError
from relatum.wire._plain_records import plain_records, plain_records_at
from relatum.wire._unpacking import UnpackError, unpacked

PIECE_BYTES_MAX: Final = 4 << 20
"""Bytes of records handed on at one time, about: a compressed batch is cut up piece by piece."""

PIECE_RECORDS_MAX: Final = 8192
"""Records handed on at one time, about. A record of one byte is an object of 40, and what readers make of it is one of
some hundred: 20 kB of gzip may hold four million of them."""

_HEADER: Final = struct.Struct(">BBHIqQQIIII")
_HEADER_V2_BYTES: Final = 8
_MAGIC: Final = 5
_VERSION: Final = 0
_USER_CHUNK: Final = 0
_LENGTH: Final = struct.Struct(">I")
_SUB_ENTRY: Final = struct.Struct(">BHII")
_SUB_ENTRY_BIT: Final = 0x80000000


class UnreadableRecord(bytes):
    """Stands for a record that cannot be unpacked: empty bytes, with the reason why.

    `is_broken` is False where it is no fault of the record: another installation may read it.
    """

    reason: str
    is_broken: bool

    def __new__(cls, reason: str, *, is_broken: bool = True) -> "UnreadableRecord":
        record = super().__new__(cls)
        record.reason, record.is_broken = reason, is_broken
        return record


class Chunk(NamedTuple):
    """A chunk whose checksum is right, not split yet.

    Attributes:
        subscription: The subscription it was delivered to.
        first_offset: Offset of its first record.
        record_count: Records in it, those inside sub-entry batches counted.
        entry_count: Entries in it; equal to `record_count` where there is no sub-entry batch.
        time_ms: When the leader wrote it, milliseconds since 1970, UTC.
        epoch: The leader's term; grows with every election.
        data: The frame it came in.
        data_start: Where its entries begin in `data`.
        data_end: Where they end.
    """

    subscription: int
    first_offset: int
    record_count: int
    entry_count: int
    time_ms: int
    epoch: int
    data: bytes
    data_start: int
    data_end: int

    @property
    def last_offset(self) -> int:
        """Offset of its last record."""
        return self.first_offset + self.record_count - 1


def decode_deliver(frame: bytes) -> Chunk:
    """The chunk in a Deliver frame (key and version included, the size not).

    Raises:
        ProtocolError: The frame is too short, or of another version.
        ChunkCorrupt: The header makes no sense or the checksum is wrong.
    """
    try:
        version = frame[3]
        start = 5 + _HEADER_V2_BYTES if version == 2 else 5
        header = _HEADER.unpack_from(frame, start)
        subscription = frame[4]
    except (IndexError, struct.error) as error:
        raise ProtocolError("A Deliver frame ends before its chunk begins.") from error
    if version not in (1, 2):
        raise ProtocolError(f"A Deliver frame of version {version} is not known.")
    return _checked(frame, start + _HEADER.size, subscription, header)


def _checked(frame: bytes, data_start: int, subscription: int, header: tuple[int, ...]) -> Chunk:
    magic, kind, entries, records, time_ms, epoch, first, checksum, length, _trailer, _filter = header
    data_end = data_start + length
    if magic >> 4 != _MAGIC or magic & 0x0F != _VERSION or kind != _USER_CHUNK:
        raise ChunkCorrupt(f"A chunk begins with {magic:#04x}, type {kind}: not a chunk of messages.")
    if data_end > len(frame) or first + records > 1 << 63:
        raise ChunkCorrupt(f"The chunk at offset {first} has lengths that cannot be.", offset=first)
    if zlib.crc32(memoryview(frame)[data_start:data_end]) != checksum:
        raise ChunkCorrupt(f"The chunk at offset {first} has a wrong checksum.", offset=first)
    return Chunk(subscription, first, records, entries, time_ms, epoch, frame, data_start, data_end)


def split(chunk: Chunk) -> Iterator[tuple[int, list[bytes]]]:
    """The chunk's records as (offset of the first, records), ascending, in pieces of a bounded size.

    A compressed batch is unpacked when its turn comes, and cut up as its pieces are asked for. A record whose batch
    cannot be unpacked is an `UnreadableRecord`; it keeps its offset.

    Raises:
        ChunkCorrupt: Lengths inside the chunk are wrong.
    """
    if chunk.entry_count == chunk.record_count:
        records = _plain_records(chunk)
        if records is not None:
            if len(records) <= PIECE_RECORDS_MAX:
                yield chunk.first_offset, records
                return
            for start in range(0, len(records), PIECE_RECORDS_MAX):
                yield chunk.first_offset + start, records[start : start + PIECE_RECORDS_MAX]
            return
    yield from _pieces(chunk)


def small_records(chunk: Chunk) -> list[bytes] | None:
    """All records of a chunk of few, at once; None where `split` gives them: of many, and of batches.

    Raises:
        ChunkCorrupt: Lengths inside the chunk are wrong.
    """
    is_small = chunk.entry_count == chunk.record_count <= PIECE_RECORDS_MAX
    return _plain_records(chunk) if is_small else None


def record_at(chunk: Chunk, offset: int) -> bytes | None:
    """The record at one offset, None where the chunk does not hold it; the others are passed over, not copied.

    Raises:
        ChunkCorrupt: Lengths inside the chunk are wrong.
    """
    if not chunk.first_offset <= offset <= chunk.last_offset:
        return None
    return next(records_at(chunk, [offset]))


def records_at(chunk: Chunk, offsets: list[int]) -> Iterator[bytes]:
    """The records at offsets, ascending, that all lie in the chunk; the others are passed over, not copied.

    Raises:
        ChunkCorrupt: Lengths inside the chunk are wrong.
    """
    if chunk.entry_count == chunk.record_count:
        is_whole = len(offsets) == chunk.record_count
        found = _plain_records(chunk) if is_whole else _plain_records_at(chunk, offsets)
        if found is not None:
            yield from found
            return
    given, asked = 0, len(offsets)
    for first, entry in _entries(chunk):
        begin = given
        while given < asked and offsets[given] < first + entry.records:
            given += 1
        if given > begin:
            # Only batches that hold what is asked for are unpacked.
            yield from _records_of(chunk, entry, [offset - first for offset in offsets[begin:given]])
        if given == asked:
            return
    raise _corrupt(chunk)


def _corrupt(chunk: Chunk) -> ChunkCorrupt:
    first = chunk.first_offset
    return ChunkCorrupt(f"The chunk at offset {first} has entries of wrong length.", offset=first)


def _plain_records(chunk: Chunk) -> list[bytes] | None:
    """Records of a chunk without sub-entry batches; None where there is one after all."""
    try:
        found = plain_records(chunk.data, chunk.data_start, chunk.entry_count)
    except IndexError as error:
        raise _corrupt(chunk) from error
    if found is None:
        return None
    records, end = found
    if end != chunk.data_end:
        raise _corrupt(chunk)
    return records


def _plain_records_at(chunk: Chunk, offsets: list[int]) -> list[bytes] | None:
    """Some records of a chunk without sub-entry batches; None where a batch comes before the last of them."""
    first = chunk.first_offset
    try:
        found = plain_records_at(chunk.data, chunk.data_start, [offset - first for offset in offsets])
    except IndexError as error:
        raise _corrupt(chunk) from error
    if found is None:
        return None
    records, end = found
    if end > chunk.data_end:
        raise _corrupt(chunk)
    return records


class _Entry(NamedTuple):
    """An entry of a chunk: how many records it is, where its content lies, how it is packed, its size unpacked."""

    records: int
    start: int
    end: int
    codec: int | None
    size: int


def _entries(chunk: Chunk) -> Iterator[tuple[int, _Entry]]:
    """Each entry of a chunk with the offset of its first record; nothing is unpacked."""
    data, data_end = chunk.data, chunk.data_end
    position, offset, stop = chunk.data_start, chunk.first_offset, chunk.first_offset + chunk.record_count
    for _ in range(chunk.entry_count):
        try:
            (length,) = _LENGTH.unpack_from(data, position)
            if length & _SUB_ENTRY_BIT:
                kind, count, size, length = _SUB_ENTRY.unpack_from(data, position)
                start, codec = position + _SUB_ENTRY.size, kind >> 4 & 0x07
            else:
                start, count, codec, size = position + 4, 1, None, length
        except struct.error as error:
            raise _corrupt(chunk) from error
        position = start + length
        if position > data_end or offset + count > stop:
            raise _corrupt(chunk)
        yield offset, _Entry(count, start, position, codec, size)
        offset += count
    if position != data_end or offset != stop:
        raise _corrupt(chunk)


def _pieces(chunk: Chunk) -> Iterator[tuple[int, list[bytes]]]:
    """Records of a chunk with sub-entry batches, in pieces: entries of one record together, batches cut up."""
    first, held = chunk.first_offset, 0
    records: list[bytes] = []
    for _, entry in _entries(chunk):
        for part, size in _parts(chunk, entry):
            records += part
            held += size
            if held >= PIECE_BYTES_MAX or len(records) >= PIECE_RECORDS_MAX:
                yield first, records
                first, held, records = first + len(records), 0, []
    if records:
        yield first, records


def _parts(chunk: Chunk, entry: _Entry) -> Iterator[tuple[list[bytes], int]]:
    """The records of an entry, a bounded number at a time, with the bytes they take."""
    if entry.codec is None:
        yield [chunk.data[entry.start : entry.end]], entry.size
        return
    left = entry.records
    try:
        content = _content(chunk, entry)
    except UnpackError as error:
        unreadable = UnreadableRecord(str(error), is_broken=error.is_broken)
        while left:
            count = min(left, PIECE_RECORDS_MAX)
            yield [unreadable] * count, 0
            left -= count
        return
    position, unpack = 0, _LENGTH.unpack_from
    while left:
        records: list[bytes] = []
        begin = position
        while left and len(records) < PIECE_RECORDS_MAX and position - begin < PIECE_BYTES_MAX:
            end = position + 4 + unpack(content, position)[0]
            records.append(bytes(content[position + 4 : end]))
            position = end
            left -= 1
        yield records, position - begin


def _records_of(chunk: Chunk, entry: _Entry, places: list[int]) -> Iterator[bytes]:
    """The records at some places of an entry, ascending; the others are passed over."""
    if entry.codec is None:
        yield chunk.data[entry.start : entry.end]
        return
    try:
        content = _content(chunk, entry)
    except UnpackError as error:
        yield from [UnreadableRecord(str(error), is_broken=error.is_broken)] * len(places)
        return
    position, at, unpack = 0, 0, _LENGTH.unpack_from
    for place in places:
        for _ in range(place - at):
            position += 4 + unpack(content, position)[0]
        end = position + 4 + unpack(content, position)[0]
        yield bytes(content[position + 4 : end])
        position, at = end, place + 1


def _content(chunk: Chunk, entry: _Entry) -> memoryview:
    """The unpacked content of a batch, whose records have lengths that fit it."""
    assert entry.codec is not None, "only batches are unpacked"
    content = memoryview(unpacked(entry.codec, chunk.data[entry.start : entry.end], entry.size))
    position, unpack = 0, _LENGTH.unpack_from
    try:
        for _ in range(entry.records):
            position += 4 + unpack(content, position)[0]
    except struct.error as error:
        raise UnpackError("a sub-entry batch ends before its last record") from error
    if position != len(content):
        raise UnpackError("a sub-entry batch has records of wrong length")
    return content
