"""What ends an opening for good, and what only looks like it: a broker that stops meanwhile."""

import contextlib
import socket
import struct
import threading
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from relatum.errors import AccessRefused, BrokerUnavailable
from tests.contract._faces import open_face

# How the frames begin that a client sends: AMQP's Start-Ok and Open, the stream protocol's SaslAuthenticate and Open.
MOMENTS = {"amqp": (b"\0\x0a\0\x0b", b"\0\x0a\0\x28"), "stream": (b"\0\x13\0\1", b"\0\x15\0\1")}

TIMEOUT_S = 10.0


class StoppingBroker:
    """A broker that goes away when a client sends a certain frame: without a word, or with an AMQP Close."""

    def __init__(self, url: str, moment: bytes, close: tuple[int, str] | None = None) -> None:
        parts = urlsplit(url)
        self._target = parts.hostname or "", parts.port or 0
        self._moment, self._close = moment, close
        self._listener = socket.create_server(("127.0.0.1", 0))
        credentials = parts.netloc.rpartition("@")[0]
        self.url = parts._replace(netloc=f"{credentials}@127.0.0.1:{self._listener.getsockname()[1]}").geturl()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._target)
                threading.Thread(target=self._answers, args=[server, client], daemon=True).start()
                threading.Thread(target=self._questions, args=[client, server], daemon=True).start()

    def _answers(self, server: socket.socket, client: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := server.recv(65536):
                client.sendall(data)

    def _questions(self, client: socket.socket, server: socket.socket) -> None:
        with contextlib.suppress(OSError), client, server:
            while data := client.recv(65536):
                if self._moment in data:
                    if self._close is not None:
                        client.sendall(close_frame(*self._close))
                    # Both directions: the thread that waits for the other must end too.
                    client.shutdown(socket.SHUT_WR)
                    server.shutdown(socket.SHUT_RDWR)
                    while client.recv(65536):
                        pass
                    return
                server.sendall(data)

    def stop(self) -> None:
        """Take no more connections."""
        self._listener.close()


def close_frame(code: int, text: str) -> bytes:
    """AMQP 0.9.1's Connection.Close."""
    payload = struct.pack(">HHHB", 10, 50, code, len(text)) + text.encode() + struct.pack(">HH", 10, 40)
    return struct.pack(">BHI", 1, 0, len(payload)) + payload + b"\xce"


@contextlib.contextmanager
def stopping(url: str, moment: bytes, close: tuple[int, str] | None = None) -> Iterator[str]:
    """The URL of a broker that stops in the middle of an opening."""
    broker = StoppingBroker(url, moment, close)
    try:
        yield broker.url
    finally:
        broker.stop()


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
        open_face(face_name, broken, timeout_s=TIMEOUT_S),
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
        open_face(face_name, broken, timeout_s=TIMEOUT_S),
    ):
        pass
