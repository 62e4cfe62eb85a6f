"""A guessed stream port: who listens there is told no password before saying to be the same broker."""

import contextlib
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

import pytest

from relatum.errors import BrokerUnavailable
from relatum.reading import BrokerAddress
from relatum.wire import _frames as frames
from relatum.wire._frames import Command
from tests.contract._faces import FACES, open_face
from tests.support import publish_plain
from tests.support.ports import STREAM_OFFSET, free_port
from tests.support.proxy import Proxy
from tests.support.tls import FILES, Ending
from tests.unit.wire_samples import answered

ANSWERS = {
    "another": frames.table({"cluster_name": "another@host", "version": "4.3"}),
    "nameless": frames.table({"version": "4.3"}),
    "silent": None,
}
MECHANISMS = struct.pack(">I", 1) + frames.string("PLAIN")


ANSWER_S = 12.0
"""A busy machine answers within; who is silent is waited for a third of it."""


class Stranger:
    """Listens where a stream port is guessed, answers as a broker would, and writes down what it is told."""

    def __init__(self, port: int, properties: bytes | None, tls: ssl.SSLContext | None = None) -> None:
        self.told = b""
        self.visits = 0
        self._properties = properties
        self._tls = tls
        self._listener = socket.create_server(("127.0.0.1", port))
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
                if self._tls is not None:
                    client = self._tls.wrap_socket(client, server_side=True)
            except ssl.SSLError:
                continue
            except OSError:
                return
            self.visits += 1
            with client, contextlib.suppress(OSError):
                self._answer(client)

    def _answer(self, client: socket.socket) -> None:
        client.settimeout(90)
        buffer = b""
        while data := client.recv(65536):
            self.told += data
            buffer += data
            while len(buffer) >= 4 and len(buffer) >= 4 + int.from_bytes(buffer[:4]):
                size = int.from_bytes(buffer[:4])
                key, _, correlation = struct.unpack_from(">HHI", buffer, 4)
                buffer = buffer[4 + size :]
                if self._properties is None:
                    continue
                body = {Command.PEER_PROPERTIES: self._properties, Command.SASL_HANDSHAKE: MECHANISMS}.get(key, b"")
                client.sendall(answered(key, correlation, body=body))

    def close(self) -> None:
        """Listen no more."""
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(90)


@pytest.fixture
def listening(amqp_url: str) -> Iterator[Callable[..., tuple[str, Stranger]]]:
    """Puts a stranger where the stream port of a way to the broker is guessed; gives that way's URL."""
    parts = urlsplit(amqp_url)
    with contextlib.ExitStack() as stack:

        def listen(properties: bytes | None) -> tuple[str, Stranger]:
            port = free_port((0, STREAM_OFFSET))
            stack.enter_context(Proxy(parts.hostname or "", parts.port or 0, listens_on=port))
            stranger = Stranger(port + STREAM_OFFSET, properties)
            stack.callback(stranger.close)
            return parts._replace(netloc=f"{parts.username}:{parts.password}@127.0.0.1:{port}").geturl(), stranger

        yield listen


def login_in(url: str) -> bytes:
    """What a login of PLAIN sends."""
    parts = urlsplit(url)
    return f"\0{parts.username}\0{parts.password}".encode()


@pytest.mark.parametrize("face", FACES)
@pytest.mark.parametrize("answer", ANSWERS)
def test_a_stranger_on_the_guessed_port_is_told_no_password(
    face: str, answer: str, listening: Any, amqp_url: str
) -> None:
    """Who is another broker, does not say who it is, or says nothing gets no login, and is an error."""
    url, stranger = listening(ANSWERS[answer])
    words = "in time" if answer == "silent" else "not the cluster"
    with pytest.raises(BrokerUnavailable, match=words), open_face(face, url, timeout_s=ANSWER_S):
        pass
    assert stranger.visits == 1
    assert login_in(amqp_url) not in stranger.told


@pytest.mark.parametrize("face", FACES)
def test_who_takes_the_guessed_port_over_is_told_no_password(
    face: str, amqp_url: str, stream_url: str, stream_name: str
) -> None:
    """A reader that connects again asks again: the one that listens now may be another than before."""
    publish_plain(amqp_url, stream_name, [b"a"])
    amqp, stream = urlsplit(amqp_url), urlsplit(stream_url)
    port = free_port((0, STREAM_OFFSET))
    url = amqp._replace(netloc=f"{amqp.username}:{amqp.password}@127.0.0.1:{port}").geturl()
    with Proxy(amqp.hostname or "", amqp.port or 0, listens_on=port):
        before = Proxy(stream.hostname or "", stream.port or 0, listens_on=port + STREAM_OFFSET)
        with before, open_face(face, url, timeout_s=ANSWER_S) as reader:
            assert reader.read(stream_name, 0).body == b"a"
            before.close()
            stranger = Stranger(port + STREAM_OFFSET, ANSWERS["another"])
            with contextlib.closing(stranger), pytest.raises(BrokerUnavailable):
                reader.read(stream_name, 0)
    assert stranger.visits == 1
    assert login_in(amqp_url) not in stranger.told


def test_a_stranger_with_a_trusted_certificate_is_told_no_password(amqp_url: str) -> None:
    """With TLS too: a certificate says who owns a name, not that the broker is the one AMQP leads to."""
    parts = urlsplit(amqp_url)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(FILES / "certificate.pem", FILES / "key.pem")
    port = free_port((0, STREAM_OFFSET))
    trusting = ssl.create_default_context(cafile=FILES / "certificate.pem")
    stranger = Stranger(port + STREAM_OFFSET, ANSWERS["another"], context)
    with contextlib.closing(stranger), contextlib.closing(Ending(context, {port: parts.port or 0})):
        url = f"amqps://{parts.username}:{parts.password}@localhost:{port}/"
        with (
            pytest.raises(BrokerUnavailable, match="not the cluster"),
            open_face("blocking", url, ssl_context=trusting, timeout_s=ANSWER_S),
        ):
            pass
    assert stranger.visits == 1
    assert login_in(amqp_url) not in stranger.told


def test_brokers_are_compared_once(amqp_url: str, stream_url: str) -> None:
    """The AMQP port is asked once whether the stream port is the same broker's, however many readers open."""
    stream = urlsplit(stream_url)
    with Proxy.to(amqp_url) as proxy:
        address = replace(
            BrokerAddress.parse(proxy.url(amqp_url), stream_url),
            stream_host=stream.hostname or "",
            stream_port_guessed=True,
        )
        for face in FACES * 3:
            with open_face(face, address):
                pass
        assert proxy.opened == 1
