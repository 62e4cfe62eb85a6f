"""What the page does with connections by which nothing comes, and with those that would hide a request."""

import socket
from collections.abc import Iterator

import pytest

from relatum_consumer.web import WebOptions, WebServer
from relatum_consumer.web import _access as access
from relatum_consumer.web import _guarded_connections as connections
from tests.support import wait_until

NOWHERE = ("amqp://127.0.0.1:1/", "postgresql://nobody@127.0.0.1:1/none")
ALIVE = b"GET /alive HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
OF_ONE = 6


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, int]]:
    """Where a page listens that is not patient."""
    monkeypatch.setattr(connections, "QUIET_S", 1.0)
    monkeypatch.setattr(connections, "LOOK_S", 0.1)
    monkeypatch.setattr(connections, "OF_ONE_MAX", OF_ONE)
    monkeypatch.setattr(access, "_FORM_S", 0.5)
    hashed = "scrypt$16384$8$1$AAAAAAAAAAAAAAAAAAAAAA==$AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA="
    with WebServer(WebOptions(*NOWHERE, port=0, password_hash=hashed)) as server:
        host, _, port = server.url.split("/")[2].rpartition(":")
        yield host, int(port)


def said(address: tuple[str, int], *parts: bytes) -> bytes:
    """All that is answered until the page ends the connection; nothing where it just ended it."""
    with socket.create_connection(address, timeout=60) as connection:
        answer = b""
        try:
            for part in parts:
                connection.sendall(part)
            while more := connection.recv(65_536):
                answer += more
        except ConnectionError:
            pass
        return answer


@pytest.mark.parametrize(
    "parts",
    [
        (),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nX: ",),
        (ALIVE.replace(b"Connection: close\r\n", b""), b"GET /"),
        (b"POST /login HTTP/1.1\r\nHost: localhost\r\nContent-Length: 20\r\n\r\npass",),
        (b"POST /streams HTTP/1.1\r\nHost: localhost\r\nContent-Length: 20\r\n\r\npass",),
    ],
)
def test_who_sends_nothing_more_is_left(address: tuple[str, int], parts: tuple[bytes, ...]) -> None:
    """No request, a part of one, a part of the next, a form that does not come: the connection ends by itself."""
    said(address, *parts)


def test_who_takes_no_answer_is_left(address: tuple[str, int]) -> None:
    """Also where answers are asked for, and not read."""
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4_096)
        connection.settimeout(60)
        connection.connect(address)
        requests = b"GET /static/x/page.css HTTP/1.1\r\nHost: localhost\r\n\r\n" * 100_000
        with pytest.raises(OSError, match=r"reset|Broken pipe"):
            connection.sendall(requests)


def test_one_client_has_not_all_connections(address: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """What is more than its part is ended at once; those that it has go on, and others may come in their place."""
    monkeypatch.setattr(connections, "QUIET_S", 600.0)
    held = [socket.create_connection(address, timeout=60) for _ in range(OF_ONE)]
    try:
        wait_until(lambda: said(address, ALIVE) == b"", what="one more is refused")
        held[0].sendall(ALIVE)
        assert held[0].recv(100).startswith(b"HTTP/1.1 200 OK")
    finally:
        for each in held:
            each.close()
    wait_until(lambda: said(address, ALIVE).startswith(b"HTTP/1.1 200 OK"), what="there is room again")


def test_no_answer_waits_for_an_acknowledgement() -> None:
    """A kept connection gets both parts of an answer at once: else 40 ms lie between them."""
    with WebServer(WebOptions(*NOWHERE, port=0)) as server:
        host, _, port = server.url.split("/")[2].rpartition(":")
        with socket.create_connection((host, int(port)), timeout=60) as connection:
            connection.sendall(ALIVE.replace(b"Connection: close\r\n", b""))
            assert connection.recv(100).startswith(b"HTTP/1.1 200 OK")
            (taken,) = server._server.server_state.connections
            link = taken.transport.get_extra_info("socket")
            assert link.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_a_request_within_another_is_none(address: tuple[str, int]) -> None:
    """A body whose length could be told in two ways is refused, and what follows it is not read."""
    lengths = b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    hidden = b"GET /alive HTTP/1.1\r\nHost: localhost\r\n\r\n"
    answer = said(address, b"POST /login HTTP/1.1\r\nHost: localhost\r\n" + lengths + hidden)
    assert answer.startswith(b"HTTP/1.1 411")
    assert answer.count(b"HTTP/1.1 ") == 1
