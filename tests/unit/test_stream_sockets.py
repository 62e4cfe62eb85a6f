"""A stream connection whose other side takes nothing any more, or lets nobody in."""

import contextlib
import socket
import ssl
import struct
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest

from relatum.errors import AccessRefused, BrokerUnavailable, ConfigurationError, ConnectionLost
from relatum.reading import AuthMechanism, BrokerAddress, BrokerLogin, NodeAddress, SocketConnection
from relatum.waiting import within
from relatum.wire import frames
from relatum.wire.frames import Code, Command
from tests.contract._node import Node
from tests.support.standstill import in_time
from tests.unit.wire_samples import answered

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
    connection = SocketConnection(near)
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


def test_a_resolver_that_hangs_holds_nobody(silent: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    """It knows no time-out of its own that is as short as a call's."""
    gate = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: gate.wait(60))
    with in_time(0.5):
        opened(silent, 0.5)
    gate.set()


def test_connecting_ends_where_its_deadline_is_brought_forward(silent: socket.socket) -> None:
    """As that of a task is, which was cancelled."""
    with within(None) as deadline, in_time(0.3):
        threading.Timer(0.1, deadline.end_in, [0.0]).start()
        opened(silent, 60.0)


# --- login ------------------------------------------------------------------------------------------------

PROPERTIES = frames.table({"cluster_name": "rabbit@here", "version": "3.12.0"})
KEYS = (Command.PEER_PROPERTIES, Command.SASL_HANDSHAKE, Command.SASL_AUTHENTICATE, Command.TUNE, Command.OPEN)


class Server(Node):
    """Lets a client log in step by step, or refuses a step with a code."""

    def __init__(self, *mechanisms: str, heartbeat_s: int = 60, **codes: int) -> None:
        self._offered = struct.pack(">I", len(mechanisms)) + b"".join(map(frames.string, mechanisms))
        self._heartbeat_s = heartbeat_s
        self._codes = codes
        self.keys: list[int] = []
        super().__init__()

    def _answer(self, key: int, body: bytes) -> bytes:
        self.keys.append(key)
        if key == Command.TUNE:
            return b""
        rest = {Command.PEER_PROPERTIES: PROPERTIES, Command.SASL_HANDSHAKE: self._offered}.get(Command(key), b"")
        if key == Command.OPEN:
            rest = frames.table({"advertised_host": "h", "advertised_port": "1"})
        code = self._codes.get(Command(key).name.lower(), Code.OK)
        tune = frames.tune(1 << 20, self._heartbeat_s) if key == Command.SASL_AUTHENTICATE and code == Code.OK else b""
        return answered(key, struct.unpack_from(">I", body)[0], code, rest) + tune

    def log_in(self, heartbeat_s: int = 10, mechanism: AuthMechanism = "PLAIN") -> SocketConnection:
        login = BrokerLogin(mechanism, ssl_context=None if mechanism == "PLAIN" else ssl.create_default_context())
        address = BrokerAddress("127.0.0.1", "user", "secret", "vhost", amqp_tls=True, login=login)
        return SocketConnection.open(replace(address, stream_host="127.0.0.1", stream_port=self.port), 5, heartbeat_s)


@pytest.mark.parametrize(("ours", "theirs", "agreed"), [(10, 60, 10), (60, 10, 10), (10, 0, 10), (0, 60, 0)])
def test_login(ours: int, theirs: int, agreed: int) -> None:
    """Step by step; the smaller heartbeat is agreed on; zero of the server means that it leaves it to us."""
    with Server("PLAIN", heartbeat_s=theirs) as server, contextlib.closing(server.log_in(ours)) as connection:
        session = connection.session
        assert server.keys == list(KEYS)
        assert (session.heartbeat_s, session.is_open) == (agreed, True)
        assert session.server_properties["cluster_name"] == "rabbit@here"
        assert session.own_node == NodeAddress("h", 1)


@pytest.mark.parametrize(
    ("refused", "match"),
    [
        ({"sasl_authenticate": Code.AUTHENTICATION_FAILURE}, "user"),
        ({"sasl_authenticate": Code.AUTHENTICATION_FAILURE_LOOPBACK}, "user"),
        ({"sasl_authenticate": Code.SASL_ERROR}, "user"),
        ({"sasl_authenticate": Code.SASL_CHALLENGE}, "user"),
        ({"open": Code.VHOST_ACCESS_FAILURE}, "vhost"),
    ],
)
def test_refused_login(refused: dict[str, int], match: str) -> None:
    """A refused login is a refusal that names the user and not the password."""
    with Server("PLAIN", **refused) as server, pytest.raises(AccessRefused, match=match) as caught:
        server.log_in()
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("mechanisms", [("PLAIN",), ("PLAIN", "EXTERNAL")])
def test_external_login(mechanisms: tuple[str, ...]) -> None:
    """EXTERNAL needs a server that offers it, and a version that does not crash over it; nothing is sent before."""
    with Server(*mechanisms) as server, pytest.raises(ConfigurationError, match="EXTERNAL"):
        server.log_in(mechanism="EXTERNAL")
    assert server.keys == list(KEYS[:2])


def test_nothing_of_a_login_is_sent_to_a_server_that_speaks_otherwise() -> None:
    """Its first bytes show it."""
    with Web() as server, pytest.raises(ConfigurationError, match="stream protocol"):
        server.log_in()
    assert server.keys == [Command.PEER_PROPERTIES]


class Web(Server):
    """A server of HTTP."""

    def _answer(self, key: int, body: bytes) -> bytes:
        self.keys.append(key)
        return b"HTTP/1.1 400 Bad Request\r\n"
