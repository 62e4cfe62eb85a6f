"""TLS: certificates are verified unless the caller made a context that says otherwise."""

import contextlib
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from relatum.errors import BrokerUnavailable, ConfigurationError, TlsRefused
from tests.contract._faces import open_face
from tests.support import publish_plain

FILES = Path(__file__).parent / "tls"
"""A certificate for localhost that signed itself, valid until 2126, and its key: for these tests only."""


def trusting() -> ssl.SSLContext:
    """A context that trusts the tests' certificate."""
    return ssl.create_default_context(cafile=FILES / "certificate.pem")


def _pass_on(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)


def _serve(listener: socket.socket, context: ssl.SSLContext, port: int, opened: list[socket.socket]) -> None:
    with contextlib.suppress(ValueError):
        while True:
            try:
                client, _ = listener.accept()
            except OSError:
                return
            try:
                secure = context.wrap_socket(client, server_side=True)
            except OSError:
                client.close()
                continue
            server = socket.create_connection(("127.0.0.1", port))
            opened += [secure, server]
            for pair in ((secure, server), (server, secure)):
                threading.Thread(target=_pass_on, args=pair, daemon=True).start()


@pytest.fixture
def tls_url(stream_url: str) -> Iterator[str]:
    """The broker's URL with TLS, ended by a proxy before the broker."""
    parts = urlsplit(stream_url)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(FILES / "certificate.pem", FILES / "key.pem")
    opened: list[socket.socket] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        serving = threading.Thread(target=_serve, args=(listener, context, parts.port or 0, opened), daemon=True)
        serving.start()
        credentials = parts.netloc.rpartition("@")[0]
        yield f"rabbitmq-stream+tls://{credentials}@localhost:{listener.getsockname()[1]}/"
        listener.shutdown(socket.SHUT_RDWR)
        serving.join(timeout=90)
    for each in opened:
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)
        each.close()


def test_a_trusted_certificate(face_name: str, tls_url: str, amqp_url: str, stream_name: str) -> None:
    """With a context that trusts the broker's certificate, reading works."""
    publish_plain(amqp_url, stream_name, [b"x" * 100_000] * 20)
    with open_face(face_name, tls_url, ssl_context=trusting()) as face:
        assert len(face.iterate(stream_name)) == 20
        assert face.read(stream_name, 3).body == b"x" * 100_000


def test_a_certificate_nobody_vouches_for(face_name: str, tls_url: str) -> None:
    """By default the certificate is verified, and the error says so."""
    with pytest.raises(ConfigurationError, match="not trusted"), open_face(face_name, tls_url):
        pass


def test_a_certificate_for_another_host(face_name: str, tls_url: str) -> None:
    """The host's name is verified, too."""
    elsewhere = tls_url.replace("@localhost:", "@127.0.0.2:")
    with (
        pytest.raises((ConfigurationError, BrokerUnavailable)),
        open_face(face_name, elsewhere, ssl_context=trusting(), timeout_s=2),
    ):
        pass


def test_no_tls_where_it_was_asked_for(face_name: str, stream_url: str) -> None:
    """A port without TLS is not used in the clear."""
    plain = urlsplit(stream_url)._replace(scheme="rabbitmq-stream+tls").geturl()
    with pytest.raises((BrokerUnavailable, TlsRefused)), open_face(face_name, plain, timeout_s=2):
        pass
