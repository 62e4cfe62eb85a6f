"""Chunks of a stream: checked, unpacked, and split into records without decoding them. No I/O.

A chunk is what the broker wrote at once: up to 65,535 entries under one header. An entry is one record, or a
sub-entry batch of records, compressed or not. Every record takes one offset, counted from the chunk's first.
This is the recorder's hot path: a record costs one length, one slice, one append. Wrong lengths inside a chunk raise
`ChunkCorrupt`.

Source: PROTOCOL.adoc (Deliver) and osiris_log.erl of RabbitMQ.
"""

import importlib
import struct
import zlib
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

from relatum.errors import ChunkCorrupt, ProtocolError
from relatum.wire.plain_records import plain_records

PIECE_BYTES_MAX: Final = 4 << 20
"""Approximate bytes of records in one piece: a compressed batch is cut piece by piece."""

PIECE_RECORDS_MAX: Final = 8192
"""Approximate number of records in one piece. A record of one byte is an object of 40 bytes, and readers make one of
a few hundred bytes of it: 20 kB of gzip may hold four million of them."""

SUB_ENTRY_BYTES_MAX: Final = 64 << 20
"""The most bytes one sub-entry batch may unpack to: 64 times the 1 MiB frame it comes in, beyond any real one."""

_CODEC_NAMES: Final = {0: "none", 1: "gzip", 2: "snappy", 3: "lz4", 4: "zstd"}
_SNAPPY_FRAMED: Final = b"\xff\x06\x00\x00sNaPpY"

_HEADER: Final = struct.Struct(">BBHIqQQIIII")
_HEADER_V2_BYTES: Final = 8
_MAGIC: Final = 5
_VERSION: Final = 0
_USER_CHUNK: Final = 0
_LENGTH: Final = struct.Struct(">I")
_SUB_ENTRY: Final = struct.Struct(">BHII")
_SUB_ENTRY_BIT: Final = 0x80000000


class UnreadableRecord(bytes):
    """Placeholder for a record that cannot be unpacked: empty bytes, with the reason.

    `is_broken` is False if the record is intact: another installation may be able to read it.
    """

    reason: str
    is_broken: bool

    def __new__(cls, reason: str, *, is_broken: bool = True) -> "UnreadableRecord":
        """Make one with a reason."""
        record = super().__new__(cls)
        record.reason, record.is_broken = reason, is_broken
        return record


class Chunk(NamedTuple):
    """A chunk with a correct checksum, not split yet.

    Attributes:
        subscription: The subscription it was delivered to.
        first_offset: The offset of its first record.
        record_count: The number of its records, including those inside sub-entry batches.
        entry_count: The number of its entries; equal to `record_count` if there is no sub-entry batch.
        time_ms: When the leader wrote it, milliseconds since 1970, UTC.
        epoch: The leader's term; grows with every election.
        data: The frame that contains it.
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
        """The offset of its last record."""
        return self.first_offset + self.record_count - 1


def decode_deliver(frame: bytes) -> Chunk:
    """Decode the chunk in a Deliver frame (with key and version, without the size).

    Raises:
        ProtocolError: The frame is too short, or has another version.
        ChunkCorrupt: The header is invalid or the checksum is wrong.
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
        raise ChunkCorrupt(f"The chunk at offset {first} has invalid lengths.", offset=first)
    if zlib.crc32(memoryview(frame)[data_start:data_end]) != checksum:
        raise ChunkCorrupt(f"The chunk at offset {first} has a wrong checksum.", offset=first)
    return Chunk(subscription, first, records, entries, time_ms, epoch, frame, data_start, data_end)


def split(chunk: Chunk) -> Iterator[tuple[int, list[bytes]]]:
    """Yield the chunk's records as (offset of the first, records), ascending, in pieces of a limited size.

    Each compressed batch is unpacked when its turn comes, and cut piece by piece. A record whose batch cannot be
    unpacked is an `UnreadableRecord`, and keeps its offset.
    """
    first = chunk.first_offset
    plain = whole_records(chunk)
    if plain is not None:
        if len(plain) <= PIECE_RECORDS_MAX:
            yield first, plain
            return
        for start in range(0, len(plain), PIECE_RECORDS_MAX):
            yield first + start, plain[start : start + PIECE_RECORDS_MAX]
        return
    records: list[bytes] = []
    held = 0
    for entry in _entries(chunk):
        content, ends = _opened(chunk, entry)
        place, count = 0, len(entry.offsets)
        while place < count:
            most = min(count, place + PIECE_RECORDS_MAX)
            stop = bisect_right(ends, ends[place] + PIECE_BYTES_MAX, place + 1, most + 1) - 1
            stop = max(stop, place + 1)
            records += _cut(content, ends, place, stop)
            held += ends[stop] - ends[place]
            place = stop
            if held >= PIECE_BYTES_MAX or len(records) >= PIECE_RECORDS_MAX:
                yield first, records
                first, held, records = first + len(records), 0, []
    if records:
        yield first, records


def record_at(chunk: Chunk, offset: int) -> bytes | None:
    """Return the record at an offset, None if it is not in the chunk; other records are skipped, not copied."""
    if not chunk.first_offset <= offset <= chunk.last_offset:
        return None
    return next(records_at(chunk, [offset]))


def records_at(chunk: Chunk, offsets: list[int]) -> Iterator[bytes]:
    """Yield the records at ascending offsets, which must be in the chunk; other records are skipped, not copied."""
    plain = whole_records(chunk, offsets)
    if plain is not None:
        yield from plain
        return
    given, asked = 0, len(offsets)
    for entry in _entries(chunk):
        stop = bisect_left(offsets, entry.offsets.stop, given)
        if stop > given:
            # Only batches with a wanted offset are unpacked.
            content, ends = _opened(chunk, entry)
            for offset in offsets[given:stop]:
                place = offset - entry.offsets.start
                yield from _cut(content, ends, place, place + 1)
        given = stop
        if given == asked:
            return


def _corrupt(chunk: Chunk) -> ChunkCorrupt:
    first = chunk.first_offset
    return ChunkCorrupt(f"The chunk at offset {first} has entries of wrong length.", offset=first)


def whole_records(chunk: Chunk, offsets: list[int] | None = None) -> list[bytes] | None:
    """Return the records at some offsets, by default all, of a chunk; None if it has sub-entry batches."""
    if chunk.entry_count != chunk.record_count:
        return None
    places = None
    if offsets is not None and len(offsets) < chunk.record_count:
        first = chunk.first_offset
        places = [offset - first for offset in offsets]
    try:
        found = plain_records(chunk.data, chunk.data_start, chunk.entry_count, places)
    except IndexError as error:
        raise _corrupt(chunk) from error
    if found is None:
        return None
    records, end = found
    if end > chunk.data_end or (places is None and end != chunk.data_end):
        raise _corrupt(chunk)
    return records


class _Entry(NamedTuple):
    """An entry of a chunk: its records' offsets, the position of its content, its codec, its unpacked size."""

    offsets: range
    start: int
    end: int
    codec: int | None
    size: int


def _entries(chunk: Chunk) -> Iterator[_Entry]:
    """Yield each entry of a chunk, without unpacking."""
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
        yield _Entry(range(offset, offset + count), start, position, codec, size)
        offset += count
    if position != data_end or offset != stop:
        raise _corrupt(chunk)


def _opened(chunk: Chunk, entry: _Entry) -> tuple[memoryview | UnreadableRecord, Sequence[int]]:
    """Return an entry's records, each after its length, and where they end there, with a 0 before the first."""
    if entry.codec is None:
        return memoryview(chunk.data)[entry.start - _LENGTH.size : entry.end], (0, _LENGTH.size + entry.size)
    content = _unpacked(entry.codec, chunk.data[entry.start : entry.end], entry.size)
    if not isinstance(content, UnreadableRecord):
        position, unpack = 0, _LENGTH.unpack_from
        ends = array("Q", [0])
        append = ends.append
        try:
            for _ in entry.offsets:
                position += 4 + unpack(content, position)[0]
                append(position)
        except struct.error:
            position = -1
        if position == len(content):
            return memoryview(content), ends
        content = UnreadableRecord("a sub-entry batch has records of wrong length")
    return content, bytes(len(entry.offsets) + 1)


def _cut(content: memoryview | UnreadableRecord, ends: Sequence[int], place: int, stop: int) -> list[bytes]:
    """Copy the records of an entry from one index to before another out of its unpacked content."""
    if isinstance(content, UnreadableRecord):
        return [content] * (stop - place)
    if stop - place == 1:
        return [bytes(content[ends[place] + _LENGTH.size : ends[stop]])]
    found = plain_records(bytes(content[ends[place] : ends[stop]]), 0, stop - place)
    assert found is not None, "lengths were compared with what they lie in"
    return found[0]


def _unpacked(codec: int, packed: bytes, size: int) -> bytes | bytearray | UnreadableRecord:
    """Unpack a batch to exactly `size` bytes; never more than the batch states, nor than the limit."""
    name = _CODEC_NAMES.get(codec)
    if size > SUB_ENTRY_BYTES_MAX:
        reason = f"a sub-entry batch of {size} bytes is over the limit of {SUB_ENTRY_BYTES_MAX}"
        return UnreadableRecord(reason, is_broken=False)
    if name is None:
        return UnreadableRecord(f"compression {codec} is not known", is_broken=False)
    content: bytes | bytearray = packed
    written = len(packed)
    if codec:
        # Unpacked in place: an unpacker that joins its own pieces needs twice as much memory at the end.
        content = bytearray(size)
        # Imported late, because few streams have batches.
        unpacker: Any = getattr(importlib.import_module("cramjam"), name)
        is_raw = name == "snappy" and not packed.startswith(_SNAPPY_FRAMED)
        try:
            written = (unpacker.decompress_raw_into if is_raw else unpacker.decompress_into)(packed, content)
        except Exception:  # noqa: BLE001 - cramjam's error has no class of its own in all versions
            return UnreadableRecord(f"a sub-entry batch is not {name}, or larger than it says")
    if written != size:
        return UnreadableRecord(f"a sub-entry batch unpacks to another size than the {size} bytes it says")
    return content
