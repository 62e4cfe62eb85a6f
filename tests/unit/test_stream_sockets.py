"""A stream connection whose other side takes nothing any more."""

import socket
from collections.abc import Iterator

import pytest

from relatum.errors import ConnectionLost
from relatum.reading import SocketConnection
from relatum.wire import Login

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
