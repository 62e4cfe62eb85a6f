"""The connection's state machine, fed bytes by hand."""

import contextlib
import struct
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relatum.errors import AccessRefused, ConfigurationError, ConnectionLost, DataError, InvalidInput, ProtocolError
from relatum.wire import (
    AnotherProtocol,
    Answer,
    CreditRefused,
    Event,
    Login,
    StreamMoved,
    StreamSession,
)
from relatum.wire import _frames as frames
from relatum.wire._chunk import Chunk
from relatum.wire._frames import Code, Command, NodeAddress
from tests.unit.wire_samples import answered, deliver, record, sized

LOGIN = Login("user", "secret", "vhost", heartbeat_s=10)
MECHANISMS = struct.pack(">I", 2) + frames.string("PLAIN") + frames.string("EXTERNAL")
PROPERTIES = frames.table({"cluster_name": "rabbit@here", "version": "9"})


def keys_of(data: bytes) -> list[int]:
    """The keys of the frames in what a session sends."""
    found = []
    while data:
        size, key = struct.unpack_from(">IH", data)
        found.append(key)
        data = data[4 + size :]
    return found


def server(*, heartbeat_s: int = 60, code: int = Code.OK, vhost_code: int = Code.OK) -> Iterator[bytes]:
    """What a broker sends during a login, exchange by exchange."""
    yield answered(Command.PEER_PROPERTIES, 1, body=PROPERTIES)
    yield answered(Command.SASL_HANDSHAKE, 2, body=MECHANISMS)
    tune = sized(struct.pack(">HHII", Command.TUNE, 1, 1 << 20, heartbeat_s))
    yield answered(Command.SASL_AUTHENTICATE, 3, code) + (tune if code == Code.OK else b"")
    yield answered(Command.OPEN, 4, vhost_code, frames.table({"advertised_host": "h", "advertised_port": "1"}))


def log_in(session: StreamSession, replies: Iterator[bytes]) -> list[int]:
    """Drive a login; the keys the session sent."""
    sent: list[int] = []

    def exchange() -> list[Event]:
        sent.extend(keys_of(session.take_outgoing()))
        return session.receive(next(replies))

    with contextlib.suppress(StopIteration):
        session.log_in(exchange)
    return sent


@pytest.mark.parametrize(("ours", "theirs", "agreed"), [(10, 60, 10), (60, 10, 10), (10, 0, 10), (0, 60, 0)])
def test_login(ours: int, theirs: int, agreed: int) -> None:
    """Step by step; the smaller heartbeat is agreed on; zero of the server means that it leaves it to us."""
    session = StreamSession(Login("u", "p", heartbeat_s=ours))
    steps = (Command.PEER_PROPERTIES, Command.SASL_HANDSHAKE, Command.SASL_AUTHENTICATE, Command.TUNE, Command.OPEN)
    assert log_in(session, server(heartbeat_s=theirs)) == list(steps)
    assert session.heartbeat_s == agreed
    assert session.is_open
    assert session.server_properties["cluster_name"] == "rabbit@here"
    assert session.connection_properties["advertised_host"] == "h"


@pytest.mark.parametrize(
    "code", [Code.AUTHENTICATION_FAILURE, Code.AUTHENTICATION_FAILURE_LOOPBACK, Code.SASL_ERROR, Code.SASL_CHALLENGE]
)
def test_refused_login(code: int) -> None:
    """A refused login is a refusal that names the user and not the password."""
    with pytest.raises(AccessRefused, match="user") as caught:
        log_in(StreamSession(LOGIN), server(code=code))
    assert "secret" not in str(caught.value)
    assert "secret" not in repr(LOGIN)


def test_refused_virtual_host() -> None:
    """A virtual host that may not be used is a refusal, as an answer or as a Close."""
    with pytest.raises(AccessRefused, match="vhost"):
        log_in(StreamSession(LOGIN), server(vhost_code=Code.VHOST_ACCESS_FAILURE))
    session = StreamSession(LOGIN)
    body = struct.pack(">HHIH", Command.CLOSE, 1, 9, Code.VHOST_ACCESS_FAILURE) + frames.string("no")
    with pytest.raises(AccessRefused, match="vhost"):
        session.receive(sized(body))


def test_external_login() -> None:
    """EXTERNAL sends no password, and needs a server that offers it."""
    login = Login("u", "secret", mechanism="EXTERNAL")
    assert login.sasl_response() == b""
    only_plain = struct.pack(">I", 1) + frames.string("PLAIN")
    replies = iter([answered(17, 1, body=PROPERTIES), answered(18, 2, body=only_plain)])
    with pytest.raises(ConfigurationError, match="EXTERNAL"):
        log_in(StreamSession(login), replies)


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
    whole = StreamSession(LOGIN).receive(data)
    assert [type(event) for event in whole] == [Answer, Chunk, Answer, StreamMoved, CreditRefused, Answer]
    assert whole[3] == StreamMoved("s", Code.STREAM_NOT_AVAILABLE)
    for size in (1, 2, 3, 7, 50):
        session = StreamSession(LOGIN)
        pieces = [data[start : start + size] for start in range(0, len(data), size)]
        assert [event for piece in pieces for event in session.receive(piece)] == whole


def test_close_is_answered_and_raised() -> None:
    """When the server closes, it gets its answer, and the reason is in the error."""
    session = StreamSession(LOGIN)
    with pytest.raises(ConnectionLost, match="going down"):
        session.receive(sized(struct.pack(">HHIH", Command.CLOSE, 1, 9, 1) + frames.string("going down")))
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
        StreamSession(LOGIN).receive(struct.pack(">I", size))


@given(st.lists(st.binary(max_size=60), max_size=5))
def test_random_frames(bodies: list[bytes]) -> None:
    """Whatever a peer sends, only our own errors come out."""
    session = StreamSession(LOGIN)
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
        StreamSession(LOGIN).receive(sized(struct.pack(">HH", key, 1) + body))


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
def test_another_servers_answer_is_known_before_anything_of_the_login_is_sent(answer: bytes) -> None:
    """The port is wrong, which no waiting cures; bytes that are no frame are a broken protocol once it has greeted."""
    session = StreamSession(LOGIN)
    assert log_in(session, iter(())) == [Command.PEER_PROPERTIES]
    with pytest.raises(AnotherProtocol):
        session.receive(answer)
    assert session.take_outgoing() == b""
    session = StreamSession(LOGIN)
    session.server_properties = {"version": "9"}
    with pytest.raises(ProtocolError, match="claims"):
        session.receive(answer)
