"""What readers do when the network or the broker does not."""

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from relatum.errors import AccessRefused, BrokerUnavailable, ConfigurationError, ConnectionLost, ReadTimeout
from relatum.reading import BrokerAddress, Message
from tests.contract._faces import Face, open_face
from tests.support import LIMIT_S, in_a_try, publish_plain, until_answered, wait_until
from tests.support.proxy import Proxy
from tests.support.standstill import in_time

TIMEOUT_S = 1.0
HEARTBEAT_S = 1
AWAY = 129
"""A port where nobody listens, nor 120 below it."""

LAST = 2
"""The offset of the last message."""


@pytest.fixture
def face(face_name: str, stream_url: str, proxy: Proxy) -> Iterator[Face]:
    """A reader that goes through the proxy."""
    address = BrokerAddress.parse(proxy.url(stream_url))
    with open_face(face_name, address, timeout_s=TIMEOUT_S, heartbeat_s=HEARTBEAT_S) as opened:
        yield opened


@pytest.fixture
def stream(amqp_url: str, stream_name: str) -> str:
    """A stream with three messages."""
    publish_plain(amqp_url, stream_name, [b"0", b"1", b"2"])
    return stream_name


def test_a_frozen_broker_is_a_time_out(face: Face, proxy: Proxy, stream: str) -> None:
    """A read without an answer ends in time, and the reader works again when the broker does."""
    assert until_answered(lambda: face.read(stream, 1)).body == b"1"
    proxy.mode = "frozen"
    with in_time(TIMEOUT_S), pytest.raises((ReadTimeout, ConnectionLost, BrokerUnavailable)):
        face.read(stream, 1)
    proxy.mode = "pass"
    assert until_answered(lambda: face.read(stream, 2)).body == b"2"


def test_a_connection_that_ended_while_idle(face: Face, proxy: Proxy, stream: str) -> None:
    """The next read opens another one, unseen by the caller."""
    for offset in range(LAST + 1):
        assert until_answered(lambda offset=offset: face.read(stream, offset)).body == str(offset).encode()
        proxy.cut()


@pytest.mark.parametrize("fault", ["frozen", "cut"])
def test_a_reader_that_waits_learns_that_nobody_is_there(face: Face, proxy: Proxy, stream: str, fault: str) -> None:
    """At the end of its connection, or by missing heartbeats; it can go on from where it was."""

    def break_behind(message: Message) -> None:
        if message.offset == LAST and fault == "cut":
            proxy.cut()
        elif message.offset == LAST:
            proxy.mode = "frozen"

    with pytest.raises(ConnectionLost):
        face.follow(stream, break_behind, idle_timeout_s=LIMIT_S)
    proxy.mode = "pass"
    assert [message.offset for message in until_answered(lambda: face.iterate(stream, 1))] == [1, 2]


# With asyncio, the loop does not run between the calls of this suite.
@pytest.mark.parametrize("face_name", ["blocking"])
def test_an_idle_connection_is_kept(face: Face, proxy: Proxy, stream: str) -> None:
    """Heartbeats keep an idle stream connection open past the time the broker would close it."""

    def is_kept() -> bool:
        until_answered(lambda: face.read(stream, 0))
        before, until = proxy.opened, time.monotonic() + 4 * HEARTBEAT_S
        wait_until(lambda: time.monotonic() > until)
        until_answered(lambda: face.read(stream, 1))
        return proxy.opened == before

    in_a_try(is_kept, what="the connection is kept")


@pytest.mark.parametrize("scheme", ["rabbitmq-stream", "amqp"])
def test_nobody_there(face_name: str, scheme: str) -> None:
    """A port where nobody listens is an error."""
    with pytest.raises(BrokerUnavailable), open_face(face_name, f"{scheme}://127.0.0.1:{AWAY}/", timeout_s=TIMEOUT_S):
        pass


def test_wrong_password_and_virtual_host(face_name: str, stream_url: str) -> None:
    """Both are refusals, and no message shows the password."""
    parts = urlsplit(stream_url)
    host = parts.netloc.rpartition("@")[2]
    wrong = parts._replace(netloc=f"{parts.username}:canary-7f3a@{host}").geturl()
    with pytest.raises(AccessRefused) as caught, open_face(face_name, wrong):
        pass
    assert "canary" not in str(caught.value)
    with pytest.raises(AccessRefused), open_face(face_name, parts._replace(path="/no-such-vhost").geturl()):
        pass


def test_a_port_by_which_no_stream_port_is_guessed(face_name: str) -> None:
    """It needs a URL of its own, says the error."""
    with pytest.raises(ConfigurationError, match="rabbitmq-stream"), open_face(face_name, "amqp://127.0.0.1:100/"):
        pass


# --- what ends an opening for good, and what only looks like it: a broker that stops meanwhile ------------------------

# How the frames begin that a client sends: AMQP's Start-Ok and Open, the stream protocol's SaslAuthenticate and Open.
MOMENTS = {"amqp": (b"\0\x0a\0\x0b", b"\0\x0a\0\x28"), "stream": (b"\0\x13\0\1", b"\0\x15\0\1")}

OPENING_S = 10.0


@contextlib.contextmanager
def stopping(url: str, moment: bytes, close: tuple[int, str] | None = None) -> Iterator[str]:
    """A broker's URL that goes away when a client sends a certain frame: without a word, or with an AMQP Close."""
    target = urlsplit(url).hostname or "", urlsplit(url).port or 0
    listener = socket.create_server(("127.0.0.1", 0))

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = listener.accept()
                server = socket.create_connection(target)
                threading.Thread(target=answers, args=[server, client], daemon=True).start()
                threading.Thread(target=questions, args=[client, server], daemon=True).start()

    def answers(server: socket.socket, client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := server.recv(65536):
                client.sendall(data)

    def questions(client: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError), client, server:
            while data := client.recv(65536):
                if moment not in data:
                    server.sendall(data)
                    continue
                if close is not None:
                    client.sendall(close_frame(*close))
                # Both directions: the thread that waits for the other must end too.
                client.shutdown(socket.SHUT_WR)
                server.shutdown(socket.SHUT_RDWR)
                while client.recv(65536):
                    pass
                return

    threading.Thread(target=accept, daemon=True).start()
    parts = urlsplit(url)
    credentials = parts.netloc.rpartition("@")[0]
    yield parts._replace(netloc=f"{credentials}@127.0.0.1:{listener.getsockname()[1]}").geturl()
    listener.close()


def close_frame(code: int, text: str) -> bytes:
    """AMQP 0.9.1's Connection.Close."""
    payload = struct.pack(">HHHB", 10, 50, code, len(text)) + text.encode() + struct.pack(">HH", 10, 40)
    return struct.pack(">BHI", 1, 0, len(payload)) + payload + b"\xce"


@pytest.mark.parametrize("protocol", MOMENTS)
@pytest.mark.parametrize("moment", [0, 1], ids=["logging-in", "opening"])
def test_a_broker_that_hangs_up_while_a_connection_opens_refuses_nobody(
    face_name: str, protocol: str, moment: int, amqp_url: str, stream_url: str
) -> None:
    """A connection cut in the middle of its opening is safe to try again, whatever clients guess from it."""
    url = {"stream": stream_url, "amqp": amqp_url}[protocol]
    with (
        stopping(url, MOMENTS[protocol][moment]) as broken,
        pytest.raises(BrokerUnavailable),
        open_face(face_name, broken, timeout_s=OPENING_S),
    ):
        pass


@pytest.mark.parametrize(
    ("code", "text", "expected", "said"),
    [
        (320, "CONNECTION_FORCED - broker forced connection closure with reason 'shutdown'", BrokerUnavailable, None),
        (541, "INTERNAL_ERROR - access to vhost '/' refused for user 'u': vhost is down", BrokerUnavailable, None),
        (530, "NOT_ALLOWED - access to vhost '/' refused: connection limit (10) is reached", BrokerUnavailable, None),
        (530, "NOT_ALLOWED - vhost /limit not found", AccessRefused, "'relatum' in .*: there is no such virtual host"),
        (403, "ACCESS_REFUSED - Login was refused", AccessRefused, "'relatum' in .*RabbitMQ does not say which"),
    ],
)
def test_only_the_brokers_own_word_is_a_refusal(
    face_name: str, code: int, text: str, expected: type[Exception], said: str | None, amqp_url: str
) -> None:
    """A Close says by its code whether waiting helps: a node that stops and a full virtual host pass."""
    with (
        stopping(amqp_url, MOMENTS["amqp"][1], (code, text)) as broken,
        pytest.raises(expected, match=said),
        open_face(face_name, broken, timeout_s=OPENING_S),
    ):
        pass
