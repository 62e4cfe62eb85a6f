"""The wire: chunks are split exactly and never trusted, and a session is fed bytes by hand."""

import contextlib
import gzip
import struct
import tracemalloc
from collections.abc import Callable
from typing import Any

import cramjam
import pytest
from hypothesis import given
from hypothesis import strategies as st

from relatum.errors import AccessRefused, ChunkCorrupt, ConnectionLost, DataError, InvalidInput, ProtocolError
from relatum.wire import chunk, frames
from relatum.wire.chunk import Chunk, UnreadableRecord, decode_deliver, record_at, records_at, split
from relatum.wire.frames import Code, Command, NodeAddress
from relatum.wire.session import AnotherProtocol, Answer, CreditRefused, StreamMoved, StreamSession
from tests.support.raising import raising
from tests.unit.wire_samples import answered, batch, deliver, record, sized

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


PACKERS: list[tuple[int, Callable[[bytes], Any]]] = [
    (0, bytes),
    (1, gzip.compress),
    (2, cramjam.snappy.compress),
    (2, cramjam.snappy.compress_raw),
    (3, cramjam.lz4.compress),
    (4, cramjam.zstd.compress),
]
"""The codecs of sub-entry batches; Snappy comes with and without its framing."""


@pytest.mark.parametrize(("codec", "pack"), PACKERS)
def test_sub_entry_batches(codec: int, pack: Callable[[bytes], Any]) -> None:
    """A batch takes an offset for each of its records, with any codec, and also between plain entries."""
    content = b"".join(map(record, RECORDS))
    data = record(b"before") + batch(RECORDS, codec, bytes(pack(content))) + record(b"after")
    frame = deliver(data, 3, 5)
    assert all_records(frame) == list(enumerate([b"before", *RECORDS, b"after"], 100))
    assert record_at(decode_deliver(frame), 103) == RECORDS[2]
    assert list(records_at(decode_deliver(frame), [100, 102, 104])) == [b"before", b"", b"after"]


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        (batch(RECORDS, 1, b"not gzip"), "gzip"),
        (batch(RECORDS, 4, b"not zstd"), "zstd"),
        (batch(RECORDS, 7, b""), "unknown"),
        (batch(RECORDS, 1, gzip.compress(b"\0" * 10_000_000, mtime=0)), "larger"),
        (batch(RECORDS, 1, gzip.compress(b"\0", mtime=0)), "unpacks to"),
        (batch(RECORDS, 4, bytes(cramjam.zstd.compress(b"\0" * 10_000_000))), "larger"),
        (batch(RECORDS, 1, gzip.compress(b"\0" * 100, mtime=0), size=chunk.SUB_ENTRY_BYTES_MAX + 1), "limit"),
        (batch(RECORDS, 0, b"\0\0\0\xff" * 3, size=12), "wrong length"),
    ],
)
def test_batches_that_cannot_be_unpacked(entry: bytes, reason: str) -> None:
    """Such records keep their offsets, say why, and do not hide their neighbours."""
    found = all_records(deliver(record(b"before") + entry + record(b"after"), 3, 5))
    assert [offset for offset, _ in found] == [100, 101, 102, 103, 104]
    assert (found[0][1], found[4][1]) == (b"before", b"after")
    unreadable = found[2][1]
    assert isinstance(unreadable, UnreadableRecord)
    assert reason in unreadable.reason


def test_large_batches_come_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch that unpacks to many bytes is handed on in pieces."""
    monkeypatch.setattr(chunk, "PIECE_BYTES_MAX", 100)
    records = [b"x" * 30] * 3
    data = batch(records, 0) * 5
    pieces = list(split(decode_deliver(deliver(data, 5, 15))))
    assert [first for first, _ in pieces] == [100, 103, 106, 109, 112]
    assert list(records_at(decode_deliver(deliver(data, 5, 15)), [101, 114])) == [b"x" * 30] * 2


def test_a_wrong_checksum() -> None:
    """A chunk whose bytes changed is refused, with its offset."""
    with raising(ChunkCorrupt, offset=100):
        decode_deliver(deliver(record(b"a"), 1, 1, checksum=1))


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
def test_random_chunks(data: bytes) -> None:
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

PACKED = [many(codec, MOST, len(CONTENT), bytes(pack(CONTENT))) for codec, pack in PACKERS]

MANY = {
    **{f"packed {number}": (record(b"before") + entry * 2, 3, 1 + 2 * MOST) for number, entry in enumerate(PACKED)},
    "what cannot be unpacked": (many(1, MOST, 9, b"bad"), 1, MOST),
    "no batch": (record(b"r") * MOST, MOST, MOST),
}


@pytest.mark.parametrize("what", MANY)
def test_many_small_records_come_in_pieces(what: str) -> None:
    """A batch of many small records comes in pieces of a few thousand objects, readable or not."""
    data, entries, count = MANY[what]
    found = 0
    for first, records in split(decode_deliver(deliver(data, entries, count))):
        assert first == 100 + found
        assert len(records) <= 2 * chunk.PIECE_RECORDS_MAX
        found += len(records)
    assert found == count


def keys_of(data: bytes) -> list[int]:
    found = []
    while data:
        size, key = struct.unpack_from(">IH", data)
        found.append(key)
        data = data[4 + size :]
    return found


def test_frames_arrive_in_any_pieces() -> None:
    """Events are the same however the bytes are cut."""
    data = (
        answered(Command.SUBSCRIBE, 5)
        + sized(deliver(record(b"a") + record(b"b"), 2, 2))
        + sized(struct.pack(">HH", Command.HEARTBEAT, 1))
        + answered(Command.ROUTE, 6, old=True)
        + sized(struct.pack(">HHH", Command.METADATA_UPDATE, 1, Code.STREAM_NOT_AVAILABLE) + frames.string("s"))
        + sized(struct.pack(">HHHB", Command.CREDIT | 0x8000, 1, Code.SUBSCRIPTION_ID_DOES_NOT_EXIST, 3))
        + answered(Command.UNSUBSCRIBE, 7)
    )
    whole = StreamSession().receive(data)
    assert [type(event) for event in whole] == [Answer, Chunk, Answer, StreamMoved, CreditRefused, Answer]
    assert whole[3] == StreamMoved("s")
    for size in (1, 2, 3, 7, 50):
        session = StreamSession()
        pieces = [data[start : start + size] for start in range(0, len(data), size)]
        assert [event for piece in pieces for event in session.receive(piece)] == whole


def test_close_is_answered_and_raised() -> None:
    """When the server closes, it gets its answer, and the reason is in the error."""
    session = StreamSession()
    with pytest.raises(ConnectionLost, match="going down"):
        session.receive(sized(struct.pack(">HHIH", Command.CLOSE, 1, 9, 1) + frames.string("going down")))
    with pytest.raises(AccessRefused, match="virtual host"):
        StreamSession().receive(
            sized(struct.pack(">HHIH", Command.CLOSE, 1, 9, Code.VHOST_ACCESS_FAILURE) + frames.string("no"))
        )
    assert keys_of(session.take_outgoing()) == [Command.CLOSE | frames.RESPONSE_BIT]


def test_metadata() -> None:
    """Metadata says where streams are; a leader that is away is none."""
    body = struct.pack(">I", 2)
    for reference, host in ((0, "a"), (1, "b")):
        body += struct.pack(">H", reference) + frames.string(host) + struct.pack(">I", 5552)
    body += struct.pack(">I", 1) + frames.string("s") + struct.pack(">HHI", 1, 0xFFFF, 2) + struct.pack(">HH", 0, 1)
    (places,) = frames.decode_metadata(body)
    assert (places.stream, places.code, places.leader) == ("s", 1, None)
    assert places.replicas == (NodeAddress("a", 5552), NodeAddress("b", 5552))


@pytest.mark.parametrize("size", [0, 3, frames.HANDSHAKE_FRAME_BYTES_MAX + 1, 2**32 - 1])
def test_sizes_that_cannot_be(size: int) -> None:
    """A frame's size is refused before memory is taken for it."""
    with pytest.raises(AnotherProtocol):
        StreamSession().receive(struct.pack(">I", size))


@given(st.lists(st.binary(max_size=60), max_size=5))
def test_random_frames(bodies: list[bytes]) -> None:
    """Frames of random bytes raise our own errors only."""
    session = StreamSession()
    try:
        for body in bodies:
            session.receive(sized(body))
    except (DataError, ConnectionLost, AccessRefused, AnotherProtocol):
        pass


@given(st.sampled_from(list(Command)), st.booleans(), st.binary(max_size=60))
def test_random_bodies(command: int, is_answer: bool, body: bytes) -> None:
    """Any known frame with any body is an event or our own error."""
    key = command | (frames.RESPONSE_BIT if is_answer else 0)
    with contextlib.suppress(DataError, ConnectionLost, AccessRefused):
        StreamSession().receive(sized(struct.pack(">HH", key, 1) + body))


@given(st.binary(max_size=200))
def test_random_answers(body: bytes) -> None:
    """The decoders of answers' bodies raise our own error only."""
    for decode in (frames.decode_metadata, frames.decode_strings, frames.decode_table, frames.decode_stats):
        with contextlib.suppress(DataError):
            decode(body)


def test_names_that_are_too_long() -> None:
    """A name the protocol cannot hold is refused before anything is sent, and by our error, not the codec's."""
    with pytest.raises(ProtocolError):
        frames.string("x" * 40_000)
    with pytest.raises(InvalidInput, match="lone surrogate"):
        frames.string("orders-\ud800")


@pytest.mark.parametrize(
    "answer",
    [b"AMQP\x00\x00\x09\x01", b"HTTP/1.1 400 Bad Request\r\n", b"\x15\x03\x03\x00\x02\x02\x46", b"E\0\0\0\x8dSFATAL\0"],
    ids=["AMQP 0.9.1", "HTTP", "TLS", "PostgreSQL"],
)
def test_another_servers_answer_is_known_by_its_first_bytes(answer: bytes) -> None:
    """The port is wrong, which no waiting cures; bytes that are not a frame break the protocol after the greeting."""
    with pytest.raises(AnotherProtocol):
        StreamSession().receive(answer)
    session = StreamSession()
    session.server_properties = {"version": "9"}
    with pytest.raises(ProtocolError, match="claims"):
        session.receive(answer)
