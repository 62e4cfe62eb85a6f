"""The connection's state machine, fed bytes by hand."""

import contextlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relatum.errors import AccessRefused, ConnectionLost, DataError, InvalidInput, ProtocolError
from relatum.wire import frames
from relatum.wire.chunk import Chunk
from relatum.wire.frames import Code, Command, NodeAddress
from relatum.wire.session import AnotherProtocol, Answer, CreditRefused, StreamMoved, StreamSession
from tests.unit.wire_samples import answered, deliver, record, sized


def keys_of(data: bytes) -> list[int]:
    """The keys of the frames in what a session sends."""
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
    assert whole[3] == StreamMoved("s", Code.STREAM_NOT_AVAILABLE)
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
    """Metadata says where streams lie; a leader that is away is none."""
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
    """Whatever a peer sends, only our own errors come out."""
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
    with pytest.raises(InvalidInput, match="half a surrogate pair"):
        frames.string("orders-\ud800")


@pytest.mark.parametrize(
    "answer",
    [b"AMQP\x00\x00\x09\x01", b"HTTP/1.1 400 Bad Request\r\n", b"\x15\x03\x03\x00\x02\x02\x46", b"E\0\0\0\x8dSFATAL\0"],
    ids=["AMQP 0.9.1", "HTTP", "TLS", "PostgreSQL"],
)
def test_another_servers_answer_is_known_by_its_first_bytes(answer: bytes) -> None:
    """The port is wrong, which no waiting cures; bytes that are no frame are a broken protocol once it has greeted."""
    with pytest.raises(AnotherProtocol):
        StreamSession().receive(answer)
    session = StreamSession()
    session.server_properties = {"version": "9"}
    with pytest.raises(ProtocolError, match="claims"):
        session.receive(answer)
