"""A stream connection whose other side takes nothing any more, or lets nobody in."""

import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest

from relatum.errors import BrokerUnavailable, ConnectionLost
from relatum.reading import BrokerAddress, SocketConnection
from relatum.waiting import within
from relatum.wire import Login
from tests.support.standstill import in_time

LOGIN = Login("guest", "guest", "/", heartbeat_s=0)
MORE_THAN_FITS = b"\0" * (16 << 20)


@pytest.fixture
def near(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """A connected socket whose other side never reads."""
    monkeypatch.setattr("relatum.reading._connection.SEND_S_MIN", 0.05)
    near, far = socket.socketpair()
    with near, far:
        yield near


def test_what_cannot_be_sent_in_time_ends_the_connection(near: socket.socket) -> None:
    """Part of a frame may have left: the connection is lost, and not taken for one on which nothing came."""
    connection = SocketConnection(near, LOGIN)
    connection.session.send(MORE_THAN_FITS)
    with pytest.raises(ConnectionLost):
        connection.wait(0.0)
    assert not connection.is_usable


@pytest.fixture
def silent() -> Iterator[socket.socket]:
    """A socket at which nobody is let in any more: who connects there hears nothing."""
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listener.getsockname())
        yield listener


def opened(listener: socket.socket, timeout_s: float) -> None:
    """Open a connection to it, which fails."""
    address = BrokerAddress("127.0.0.1", stream_port=listener.getsockname()[1])
    with pytest.raises(BrokerUnavailable):
        SocketConnection.open(address, timeout_s)


def test_the_next_address_of_a_host_is_tried_in_time(silent: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the first swallows what is sent to it, as one of IPv6 may that leads nowhere."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.0)
        found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", each.getsockname()) for each in (silent, listener)]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
        with in_time(1.0):
            opened(listener, 1.0)
        listener.accept()[0].close()


def test_connecting_ends_where_its_deadline_is_brought_forward(silent: socket.socket) -> None:
    """As that of a task is, which was cancelled."""
    with within(None) as deadline, in_time(0.3):
        threading.Timer(0.1, deadline.end_in, [0.0]).start()
        opened(silent, 60.0)
