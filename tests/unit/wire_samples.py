"""Chunks and frames made by hand, for the tests of the wire."""

import struct
import zlib
from collections.abc import Sequence

from relatum.wire import frames


def record(raw: bytes) -> bytes:
    return struct.pack(">I", len(raw)) + raw


def batch(records: Sequence[bytes], codec: int, packed: bytes | None = None, size: int | None = None) -> bytes:
    """A sub-entry batch, its content packed by the caller; `size` overrides what it says of its unpacked size."""
    content = b"".join(record(raw) for raw in records)
    packed = content if packed is None else packed
    head = struct.pack(">BHII", 0x80 | codec << 4, len(records), len(content) if size is None else size, len(packed))
    return head + packed


def deliver(
    data: bytes, entries: int, records: int, *, first: int = 100, version: int = 1, checksum: int | None = None
) -> bytes:
    checksum = zlib.crc32(data) if checksum is None else checksum
    head = struct.pack(">HHB", 8, version, 7) + (struct.pack(">Q", 5) if version == 2 else b"")
    chunk = struct.pack(
        ">BBHIqQQIIII", 0x50, 0, entries & 0xFFFF, records & 0xFFFFFFFF, 1_700_000_000_000, 3, first, checksum,
        len(data), 0, 0,
    )  # fmt: skip
    return head + chunk + data


def sized(frame: bytes) -> bytes:
    return struct.pack(">I", len(frame)) + frame


def answered(command: int, correlation: int, code: int = 1, body: bytes = b"", *, old: bool = False) -> bytes:
    """An answer as the broker sends it; `old` without the answer bit, as 3.10 sends some."""
    key = command if old else command | frames.RESPONSE_BIT
    return sized(struct.pack(">HHIH", key, 1, correlation, code) + body)
