"""Chunks are split exactly, checked, and never trusted."""

import contextlib
import gzip
import struct
import tracemalloc

import cramjam
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relatum.errors import ChunkCorrupt, DataError, ProtocolError
from relatum.wire import chunk
from relatum.wire.chunk import UnreadableRecord, decode_deliver, record_at, records_at, split
from tests.unit.wire_samples import batch, deliver, record

RECORDS = [b"one", b"", b"three" * 100]

MOST = 65_535
"""Records of a batch, or entries of a chunk, at most."""


def all_records(frame: bytes) -> list[tuple[int, bytes]]:
    found = []
    for first, records in split(decode_deliver(frame)):
        found += list(enumerate(records, first))
    return found


@given(st.lists(st.binary(max_size=50), max_size=30), st.integers(0, 2**62), st.sampled_from([1, 2]))
def test_plain_records(records: list[bytes], first: int, version: int) -> None:
    """A chunk gives back its records with consecutive offsets, whichever version of Deliver it came in."""
    data = b"".join(map(record, records))
    frame = deliver(data, len(records), len(records), first=first, version=version)
    assert all_records(frame) == list(enumerate(records, first))


def _pack(codec: int, content: bytes) -> bytes:
    packers = {
        0: bytes,
        1: gzip.compress,
        2: lambda data: bytes(cramjam.snappy.compress(data)),
        3: lambda data: bytes(cramjam.lz4.compress(data)),
        4: lambda data: bytes(cramjam.zstd.compress(data)),
    }
    return packers[codec](content)


@pytest.mark.parametrize("codec", range(5))
def test_sub_entry_batches(codec: int) -> None:
    """A batch of records counts as that many offsets, whatever packs it, among plain entries too."""
    content = b"".join(map(record, RECORDS))
    data = record(b"before") + batch(RECORDS, codec, _pack(codec, content)) + record(b"after")
    frame = deliver(data, 3, 5)
    assert all_records(frame) == list(enumerate([b"before", *RECORDS, b"after"], 100))
    assert record_at(decode_deliver(frame), 103) == RECORDS[2]
    assert list(records_at(decode_deliver(frame), [100, 102, 104])) == [b"before", b"", b"after"]


def test_raw_snappy() -> None:
    """Snappy without its framing is understood as well."""
    content = b"".join(map(record, RECORDS))
    packed = bytes(cramjam.snappy.compress_raw(content))
    assert [raw for _, raw in all_records(deliver(batch(RECORDS, 2, packed), 1, 3))] == RECORDS


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        (batch(RECORDS, 1, b"not gzip"), "gzip"),
        (batch(RECORDS, 4, b"not zstd"), "zstd"),
        (batch(RECORDS, 7, b""), "not known"),
        (batch(RECORDS, 1, gzip.compress(b"\0" * 10_000_000, mtime=0)), "another size"),
        (batch(RECORDS, 4, bytes(cramjam.zstd.compress(b"\0" * 10_000_000))), "larger"),
        (batch(RECORDS, 1, gzip.compress(b"\0" * 100, mtime=0), size=chunk.SUB_ENTRY_BYTES_MAX + 1), "limit"),
        (batch(RECORDS, 0, b"\0\0\0\xff" * 3, size=12), "ends before|wrong length"),
    ],
)
def test_batches_that_cannot_be_unpacked(entry: bytes, reason: str) -> None:
    """Such records keep their offsets, say why, and do not hide their neighbours."""
    found = all_records(deliver(record(b"before") + entry + record(b"after"), 3, 5))
    assert [offset for offset, _ in found] == [100, 101, 102, 103, 104]
    assert (found[0][1], found[4][1]) == (b"before", b"after")
    unreadable = found[2][1]
    assert isinstance(unreadable, UnreadableRecord)
    assert any(part in unreadable.reason for part in reason.split("|"))


def test_a_codec_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without cramjam its codecs are unreadable, with the name of what to install."""
    monkeypatch.setattr(chunk, "_cramjam", lambda name: None)
    ((_, unreadable), *_) = all_records(deliver(batch([b"a"], 3, b"?"), 1, 1))
    assert isinstance(unreadable, UnreadableRecord)
    assert "cramjam" in unreadable.reason


def test_large_batches_come_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """What unpacks to much is handed on in parts, so that it never lies in memory at once."""
    monkeypatch.setattr(chunk, "PIECE_BYTES_MAX", 100)
    records = [b"x" * 30] * 3
    data = batch(records, 0) * 5
    pieces = list(split(decode_deliver(deliver(data, 5, 15))))
    assert [first for first, _ in pieces] == [100, 103, 106, 109, 112]
    assert list(records_at(decode_deliver(deliver(data, 5, 15)), [101, 114])) == [b"x" * 30] * 2


def test_a_wrong_checksum() -> None:
    """A chunk whose bytes changed is refused, with its offset."""
    with pytest.raises(ChunkCorrupt) as caught:
        decode_deliver(deliver(record(b"a"), 1, 1, checksum=1))
    assert caught.value.offset == 100


@pytest.mark.parametrize(
    ("data", "entries", "records"),
    [
        (record(b"abc")[:-1], 1, 1),
        (record(b"abc") + b"x", 1, 1),
        (record(b"abc"), 2, 2),
        (b"\0\0\0", 1, 1),
        (batch(RECORDS, 0)[:-1], 1, 3),
        (batch(RECORDS, 0), 1, 4),
        (batch(RECORDS, 0), 1, 1),
        (b"", 0, 1),
    ],
)
def test_lengths_that_contradict_each_other(data: bytes, entries: int, records: int) -> None:
    """A chunk whose inner lengths are wrong is corrupt, not shorter."""
    with pytest.raises(ChunkCorrupt):
        all_records(deliver(data, entries, records))


@given(st.binary(max_size=200))
def test_random_frames(data: bytes) -> None:
    """Random bytes are our data error or a chunk, nothing else."""
    for start in (b"", b"\0\x08\0\x01", b"\0\x08\0\x02\0" + b"\0" * 8 + b"\x50\0"):
        with contextlib.suppress(DataError):
            list(split(decode_deliver(start + data)))


@given(st.data())
def test_mutated_chunks(data: st.DataObject) -> None:
    """A chunk with changed bytes and a right checksum splits into records or is our data error."""
    content = bytearray(record(b"plain") + batch(RECORDS, 1, gzip.compress(b"".join(map(record, RECORDS)))))
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    entries, records = data.draw(st.sampled_from([(2, 4), (4, 4), (1, 1), (2, 70_000)]))
    try:
        chunk = decode_deliver(deliver(bytes(content), entries, records))
        total = sum(len(piece) for _, piece in split(chunk))
        assert total == chunk.record_count
    except DataError:
        pass


def test_truncated_frames() -> None:
    """A frame cut anywhere is our data error."""
    frame = deliver(record(b"abc"), 1, 1, version=2)
    for length in range(len(frame)):
        with pytest.raises((ProtocolError, ChunkCorrupt)):
            decode_deliver(frame[:length])


def many(codec: int, count: int, size: int, packed: bytes) -> bytes:
    """A sub-entry batch that claims so many records of so many bytes in all."""
    return struct.pack(">BHII", 0x80 | codec << 4, count, size, len(packed)) + packed


def test_records_beside_those_asked_for_are_not_unpacked() -> None:
    """Reading one record unpacks the batch that holds it, and makes objects of no other: a chunk may hold millions."""
    entry = many(1, MOST, 5 * MOST, gzip.compress(record(b"r") * MOST))
    chunk = decode_deliver(deliver(entry * 64, 64, 64 * MOST))
    tracemalloc.start()
    try:
        assert list(records_at(chunk, [100 + 63 * MOST, 100 + 64 * MOST - 1])) == [b"r", b"r"]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 << 20


CONTENT = record(b"a record") * MOST

PACKED = [many(codec, MOST, len(CONTENT), _pack(codec, CONTENT)) for codec in range(5)]

MANY = {
    **{f"codec {codec}": (record(b"before") + entry * 2, 3, 1 + 2 * MOST) for codec, entry in enumerate(PACKED)},
    "what cannot be unpacked": (many(1, MOST, 9, b"bad"), 1, MOST),
    "no batch": (record(b"r") * MOST, MOST, MOST),
}


@pytest.mark.parametrize("what", MANY)
def test_many_small_records_come_in_pieces(what: str) -> None:
    """However few bytes they are, no more than some thousand are objects at one time, nor such as nobody can read."""
    data, entries, count = MANY[what]
    found = 0
    for first, records in split(decode_deliver(deliver(data, entries, count))):
        assert first == 100 + found
        assert len(records) <= 2 * chunk.PIECE_RECORDS_MAX
        found += len(records)
    assert found == count
