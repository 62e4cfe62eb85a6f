"""What is asked for a follower's thread: what is found when nobody takes it any more."""

import socket
from collections.abc import Callable
from queue import Queue

import pytest

from relatum.following._helpers import Helpers
from relatum.reading._connection import SocketConnection
from relatum.wire import Login


@pytest.mark.parametrize("is_taken", [True, False])
def test_a_connection_that_nobody_takes_is_closed(is_taken: bool) -> None:
    """It was opened, and its follower ended before it came to it."""
    told: Queue[Callable[[], None]] = Queue()
    helpers = Helpers(told.put)
    ours, theirs = socket.socketpair()
    with theirs:
        connection = SocketConnection(ours, Login("guest", "guest"))
        taken: list[object] = []
        helpers.ask(lambda: connection, taken.append)
        tell = told.get(timeout=90)
        if is_taken:
            tell()
        helpers.close()
        assert connection.is_usable == is_taken
        assert taken == [connection] * is_taken
        connection.close()
