"""Chunks of a stream: checked, then split into records without decoding them. No I/O.

A chunk is what the broker wrote at once: up to 65,535 entries under one header. An entry is one record, or a
sub-entry batch of records, compressed or not; every record takes one offset, counted from the chunk's first.
This is the recorder's hot path: a record costs one length, one slice, one append.

Source: PROTOCOL.adoc (Deliver) and osiris_log.erl of RabbitMQ.
"""

import gzip
import importlib
import struct
import zlib
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, Final, NamedTuple

from relatum.errors import ChunkCorrupt, ProtocolError

SUB_ENTRY_BYTES_MAX: Final = 64 << 20
"""Bytes one sub-entry batch may unpack to; a batch travels in one frame of 1 MiB, 64 times is past any real one."""

PIECE_BYTES_MAX: Final = 16 << 20
"""Bytes of unpacked records held at one time; a chunk of many compressed batches is handed on in pieces."""

_HEADER: Final = struct.Struct(">BBHIqQQIIII")
_HEADER_V2_BYTES: Final = 8
_MAGIC: Final = 5
_VERSION: Final = 0
_USER_CHUNK: Final = 0
_LENGTH: Final = struct.Struct(">I")
_SUB_ENTRY: Final = struct.Struct(">BHII")
_SUB_ENTRY_BIT: Final = 0x80000000

_CODEC_NAMES: Final = {0: "none", 1: "gzip", 2: "snappy", 3: "lz4", 4: "zstd"}
_SNAPPY_FRAMED: Final = b"\xff\x06\x00\x00sNaPpY"


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
    if data_end > len(frame) or records < entries or first + records > 1 << 63:
        raise ChunkCorrupt(f"The chunk at offset {first} has lengths that cannot be.", offset=first)
    if zlib.crc32(memoryview(frame)[data_start:data_end]) != checksum:
        raise ChunkCorrupt(f"The chunk at offset {first} has a wrong checksum.", offset=first)
    return Chunk(subscription, first, records, entries, time_ms, epoch, frame, data_start, data_end)


def split(chunk: Chunk) -> Iterator[tuple[int, list[bytes]]]:
    """The chunk's records as (offset of the first, records), in one piece unless unpacking makes them large.

    A record whose batch cannot be unpacked is an `UnreadableRecord`; it keeps its offset.

    Raises:
        ChunkCorrupt: Lengths inside the chunk are wrong.
    """
    if chunk.entry_count == chunk.record_count:
        records = _plain_records(chunk)
        if records is not None:
            yield chunk.first_offset, records
            return
    yield from _pieces(chunk)


def record_at(chunk: Chunk, offset: int) -> bytes | None:
    """The record at one offset, None where the chunk does not hold it; the others are passed over, not copied.

    Raises:
        ChunkCorrupt: Lengths inside the chunk are wrong.
    """
    if not chunk.first_offset <= offset <= chunk.last_offset:
        return None
    return records_at(chunk, [offset])[0]


def records_at(chunk: Chunk, offsets: list[int]) -> list[bytes]:
    """The records at offsets, ascending, that all lie in the chunk; the others are passed over, not copied.

    Raises:
        ChunkCorrupt: Lengths inside the chunk are wrong.
    """
    if chunk.entry_count == chunk.record_count:
        is_whole = len(offsets) == chunk.record_count
        found = _plain_records(chunk) if is_whole else _plain_records_at(chunk, offsets)
        if found is not None:
            return found
    records: list[bytes] = []
    for first, piece in _pieces(chunk):
        end = first + len(piece)
        while len(records) < len(offsets) and offsets[len(records)] < end:
            records.append(piece[offsets[len(records)] - first])
    if len(records) != len(offsets):
        raise _corrupt(chunk)
    return records


def _corrupt(chunk: Chunk) -> ChunkCorrupt:
    first = chunk.first_offset
    return ChunkCorrupt(f"The chunk at offset {first} has entries of wrong length.", offset=first)


def _plain_records(chunk: Chunk) -> list[bytes] | None:
    """Records of a chunk without sub-entry batches; None where there is one after all."""
    data, position = chunk.data, chunk.data_start
    unpack = _LENGTH.unpack_from
    records: list[bytes] = []
    append = records.append
    try:
        for _ in range(chunk.entry_count):
            (length,) = unpack(data, position)
            if length & _SUB_ENTRY_BIT:
                return None
            position += 4
            end = position + length
            append(data[position:end])
            position = end
    except struct.error as error:
        raise _corrupt(chunk) from error
    # A slice that was cut short leaves the position past the end: one test here instead of one a record.
    if position != chunk.data_end:
        raise _corrupt(chunk)
    return records


def _plain_records_at(chunk: Chunk, offsets: list[int]) -> list[bytes] | None:
    """Some records of a chunk without sub-entry batches; None where a batch comes before the last of them."""
    data, position = chunk.data, chunk.data_start
    unpack = _LENGTH.unpack_from
    records: list[bytes] = []
    at = chunk.first_offset
    try:
        for offset in offsets:
            for _ in range(offset - at):
                (length,) = unpack(data, position)
                if length & _SUB_ENTRY_BIT:
                    return None
                position += 4 + length
            (length,) = unpack(data, position)
            if length & _SUB_ENTRY_BIT:
                return None
            records.append(data[position + 4 : position + 4 + length])
            position += 4 + length
            at = offset + 1
    except struct.error as error:
        raise _corrupt(chunk) from error
    if position > chunk.data_end:
        raise _corrupt(chunk)
    return records


def _pieces(chunk: Chunk) -> Iterator[tuple[int, list[bytes]]]:
    """Records of a chunk with sub-entry batches, in pieces of about `PIECE_BYTES_MAX`."""
    first, held = chunk.first_offset, 0
    records: list[bytes] = []
    position = chunk.data_start
    for _ in range(chunk.entry_count):
        more, position, size = _entry(chunk, position)
        records += more
        held += size
        if held >= PIECE_BYTES_MAX:
            yield first, records
            first, held, records = first + len(records), 0, []
    if records:
        yield first, records
    if position != chunk.data_end or first + len(records) != chunk.first_offset + chunk.record_count:
        raise _corrupt(chunk)


def _entry(chunk: Chunk, position: int) -> tuple[list[bytes], int, int]:
    """The records of the entry at a position, where the next entry begins, and how many bytes were unpacked."""
    data = chunk.data
    try:
        (length,) = _LENGTH.unpack_from(data, position)
        if not length & _SUB_ENTRY_BIT:
            end = position + 4 + length
            if end > chunk.data_end:
                raise _corrupt(chunk)
            return [data[position + 4 : end]], end, length
        kind, count, unpacked, packed = _SUB_ENTRY.unpack_from(data, position)
    except struct.error as error:
        raise _corrupt(chunk) from error
    start = position + _SUB_ENTRY.size
    end = start + packed
    if end > chunk.data_end:
        raise _corrupt(chunk)
    try:
        content = _unpack(kind >> 4 & 0x07, data[start:end], unpacked)
        return _batch_records(content, count), end, len(content)
    except _UnpackError as error:
        # Eight bytes are what a list takes for each: a few bytes may claim any number of records.
        return [UnreadableRecord(str(error), is_broken=error.is_broken)] * count, end, 8 * count


class _UnpackError(Exception):
    """Why a sub-entry batch cannot be unpacked; by nobody, or only by us, here and now."""

    is_broken = True


class _NotHereError(_UnpackError):
    is_broken = False


def _batch_records(content: bytes, count: int) -> list[bytes]:
    """The records of an unpacked batch; they may not be batches themselves."""
    records: list[bytes] = []
    position, unpack = 0, _LENGTH.unpack_from
    try:
        for _ in range(count):
            (length,) = unpack(content, position)
            position += 4
            records.append(content[position : position + length])
            position += length
    except struct.error as error:
        raise _UnpackError("a sub-entry batch ends before its last record") from error
    if position != len(content):
        raise _UnpackError("a sub-entry batch has records of wrong length")
    return records


def _unpack(codec: int, packed: bytes, size: int) -> bytes:
    """A batch's content, exactly `size` bytes; never unpacks more than it says, nor more than the limit."""
    if size > SUB_ENTRY_BYTES_MAX:
        raise _NotHereError(f"a sub-entry batch of {size} bytes is over the limit of {SUB_ENTRY_BYTES_MAX}")
    if codec == 0:
        content = packed
    elif codec == 1:
        content = _gunzip(packed, size)
    else:
        content = _unpack_by_cramjam(codec, packed, size)
    if len(content) != size:
        raise _UnpackError(f"a sub-entry batch unpacks to another size than the {size} bytes it says")
    return content


def _gunzip(packed: bytes, size: int) -> bytes:
    try:
        return zlib.decompressobj(wbits=31).decompress(packed, size + 1)
    except (zlib.error, gzip.BadGzipFile) as error:
        raise _UnpackError("a sub-entry batch is not gzip") from error


def _unpack_by_cramjam(codec: int, packed: bytes, size: int) -> bytes:
    name = _CODEC_NAMES.get(codec)
    if name is None:
        raise _NotHereError(f"compression {codec} is not known")
    unpack = _cramjam(name)
    if unpack is None:
        raise _NotHereError(f"compression {name} needs cramjam, which is not installed")
    content = bytearray(size)
    try:
        written = unpack(packed, content)
    except Exception as error:
        raise _UnpackError(f"a sub-entry batch is not {name}, or larger than it says") from error
    return bytes(content[:written])


@cache
def _cramjam(name: str) -> Callable[[bytes, bytearray], int] | None:
    """The codec's `decompress_into`, which stops at the end of its buffer; None where cramjam is not installed."""
    try:
        module: Any = importlib.import_module("cramjam")
    except ImportError:
        return None
    if name != "snappy":
        return getattr(module, name).decompress_into  # type: ignore[no-any-return]

    def unsnap(packed: bytes, content: bytearray) -> int:
        framed = packed.startswith(_SNAPPY_FRAMED)
        unpack = module.snappy.decompress_into if framed else module.snappy.decompress_raw_into
        return int(unpack(packed, content))

    return unsnap
