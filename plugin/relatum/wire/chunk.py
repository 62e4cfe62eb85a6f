"""Checks chunks of a stream, unpacks them, and splits them into records without decoding these. No I/O.

The broker writes a chunk in one go: up to 65,535 entries under one header. An entry is one record, or a sub-entry batch
of records, compressed or not. Each record takes one offset, counted from the chunk's first. This is the recorder's hot
path: a record costs one length, one slice, one append. Wrong lengths inside a chunk raise `ChunkCorrupt`.

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
"""Approximate maximum bytes of records in one piece. A compressed batch is split into pieces."""

PIECE_RECORDS_MAX: Final = 8192
"""Maximum records in one piece. A record of one byte is a Python object of 40 bytes, and a reader turns it into a
message of a few hundred bytes. 20 kB of gzip can unpack to four million such records."""

SUB_ENTRY_BYTES_MAX: Final = 64 << 20
"""Maximum bytes of an unpacked sub-entry batch: 64 times the default frame size of 1 MiB. Real batches are smaller."""

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

    `is_broken` is False if the record may be intact: its batch exceeds a limit, or its compression is unknown.
    """

    reason: str
    is_broken: bool

    def __new__(cls, reason: str, *, is_broken: bool = True) -> "UnreadableRecord":
        """Return a placeholder with this reason."""
        record = super().__new__(cls)
        record.reason, record.is_broken = reason, is_broken
        return record


class Chunk(NamedTuple):
    """A chunk with a correct checksum, not split yet. Its entries are in the frame `data`, up to `data_end`.

    `entry_count` equals `record_count` if there is no sub-entry batch. The leader wrote it at `time_ms`, milliseconds
    since 1970, UTC. `epoch` is the leader's term; it grows with every election.
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
    """Return the chunk in a Deliver frame, given from its key on (without the size).

    Raises `ProtocolError` for a short frame or an unknown version, `ChunkCorrupt` for a wrong header or checksum.
    """
    try:
        version = frame[3]
        start = 5 + _HEADER_V2_BYTES if version == 2 else 5
        header = _HEADER.unpack_from(frame, start)
        subscription = frame[4]
    except (IndexError, struct.error) as error:
        raise ProtocolError("A Deliver frame ends before its chunk begins.") from error
    if version not in (1, 2):
        raise ProtocolError(f"Version {version} of a Deliver frame is unknown; 1 and 2 are known.")
    magic, kind, entries, records, time_ms, epoch, first, checksum, length, _trailer, _filter = header
    data_start = start + _HEADER.size
    data_end = data_start + length
    if magic >> 4 != _MAGIC or magic & 0x0F != _VERSION or kind != _USER_CHUNK:
        raise ChunkCorrupt(f"A chunk begins with {magic:#04x}, type {kind}: it is not a chunk of messages.")
    if data_end > len(frame) or first + records > 1 << 63:
        raise ChunkCorrupt(f"The chunk at offset {first} has invalid lengths.", offset=first)
    if zlib.crc32(memoryview(frame)[data_start:data_end]) != checksum:
        raise ChunkCorrupt(f"The chunk at offset {first} has a wrong checksum.", offset=first)
    return Chunk(subscription, first, records, entries, time_ms, epoch, frame, data_start, data_end)


def split(chunk: Chunk) -> Iterator[tuple[int, list[bytes]]]:
    """Yield the chunk's records as (offset of the first, records), ascending, in pieces of a limited size.

    A compressed batch is unpacked when the iteration reaches it. If a batch cannot be unpacked, each of its records is
    an `UnreadableRecord` at its offset.
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
    piece_bytes = 0
    for entry in _entries(chunk):
        content, ends = _entry_content(chunk, entry)
        start, count = 0, len(entry.offsets)
        while start < count:
            limit = min(count, start + PIECE_RECORDS_MAX)
            stop = bisect_right(ends, ends[start] + PIECE_BYTES_MAX, start + 1, limit + 1) - 1
            stop = max(stop, start + 1)
            records += _copied(content, ends, start, stop)
            piece_bytes += ends[stop] - ends[start]
            start = stop
            if piece_bytes >= PIECE_BYTES_MAX or len(records) >= PIECE_RECORDS_MAX:
                yield first, records
                first, piece_bytes, records = first + len(records), 0, []
    if records:
        yield first, records


def record_at(chunk: Chunk, offset: int) -> bytes | None:
    """Return the record at an offset; None if the chunk does not contain the offset. Other records are not copied."""
    if not chunk.first_offset <= offset <= chunk.last_offset:
        return None
    return next(records_at(chunk, [offset]))


def records_at(chunk: Chunk, offsets: list[int]) -> Iterator[bytes]:
    """Yield the records at ascending offsets, which the chunk must contain. Other records are not copied."""
    plain = whole_records(chunk, offsets)
    if plain is not None:
        yield from plain
        return
    start = 0
    for entry in _entries(chunk):
        stop = bisect_left(offsets, entry.offsets.stop, start)
        if stop > start:
            # Only batches with a requested offset are unpacked.
            content, ends = _entry_content(chunk, entry)
            for offset in offsets[start:stop]:
                index = offset - entry.offsets.start
                yield from _copied(content, ends, index, index + 1)
        start = stop
        if start == len(offsets):
            return


def _corrupt(chunk: Chunk) -> ChunkCorrupt:
    first = chunk.first_offset
    return ChunkCorrupt(f"The chunk at offset {first} has entries of wrong lengths.", offset=first)


def whole_records(chunk: Chunk, offsets: list[int] | None = None) -> list[bytes] | None:
    """Return a chunk's records at some offsets (default: all); None if the chunk has sub-entry batches."""
    if chunk.entry_count != chunk.record_count:
        return None
    indexes = None
    if offsets is not None and len(offsets) < chunk.record_count:
        first = chunk.first_offset
        indexes = [offset - first for offset in offsets]
    try:
        found = plain_records(chunk.data, chunk.data_start, chunk.entry_count, indexes)
    except IndexError as error:
        raise _corrupt(chunk) from error
    if found is None:
        return None
    records, end = found
    if end > chunk.data_end or (indexes is None and end != chunk.data_end):
        raise _corrupt(chunk)
    return records


class _Entry(NamedTuple):
    """An entry of a chunk: its records' offsets, where its content starts and ends, its codec and its unpacked size.

    `codec` is None for a single record.
    """

    offsets: range
    start: int
    end: int
    codec: int | None
    size: int


def _entries(chunk: Chunk) -> Iterator[_Entry]:
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


def _entry_content(chunk: Chunk, entry: _Entry) -> tuple[memoryview | UnreadableRecord, Sequence[int]]:
    """Return an entry's unpacked content (each record after its length), and 0 followed by each record's end in it."""
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
        content = UnreadableRecord("a sub-entry batch has records of wrong lengths")
    return content, bytes(len(entry.offsets) + 1)


def _copied(content: memoryview | UnreadableRecord, ends: Sequence[int], start: int, stop: int) -> list[bytes]:
    """Copy the records with indexes from `start` to before `stop` out of an entry's content."""
    if isinstance(content, UnreadableRecord):
        return [content] * (stop - start)
    if stop - start == 1:
        return [bytes(content[ends[start] + _LENGTH.size : ends[stop]])]
    found = plain_records(bytes(content[ends[start] : ends[stop]]), 0, stop - start)
    assert found is not None, "a record inside a batch is never a batch"
    return found[0]


def _unpacked(codec: int, packed: bytes, size: int) -> bytes | bytearray | UnreadableRecord:
    """Unpack a batch to exactly `size` bytes, if that is within the limit."""
    name = _CODEC_NAMES.get(codec)
    if size > SUB_ENTRY_BYTES_MAX:
        reason = f"a sub-entry batch of {size} bytes is over the limit of {SUB_ENTRY_BYTES_MAX}"
        return UnreadableRecord(reason, is_broken=False)
    if name is None:
        return UnreadableRecord(f"compression {codec} is unknown", is_broken=False)
    content: bytes | bytearray = packed
    written = len(packed)
    if codec:
        # Unpacked into one buffer: an unpacker that joins its own pieces needs twice the memory.
        content = bytearray(size)
        # Imported on demand, because few streams have batches.
        unpacker: Any = getattr(importlib.import_module("cramjam"), name)
        is_raw = name == "snappy" and not packed.startswith(_SNAPPY_FRAMED)
        try:
            written = (unpacker.decompress_raw_into if is_raw else unpacker.decompress_into)(packed, content)
        except Exception:  # noqa: BLE001 - cramjam's error has no class of its own in all versions
            return UnreadableRecord(f"a sub-entry batch is not {name}, or is larger than the {size} bytes it claims")
    if written != size:
        return UnreadableRecord(f"a sub-entry batch unpacks to {written} bytes, not to the {size} bytes it claims")
    return content
