"""Connections of the stream protocol: turns in the pool, sockets that hang, and the login."""

import contextlib
import socket
import ssl
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from relatum.common.waiting import within
from relatum.errors import AccessRefused, BrokerUnavailable, ConfigurationError, ConnectionLost
from relatum.reading import CONNECTIONS_MAX, AuthMechanism, BrokerAddress, BrokerLogin, NodeAddress, SocketConnection
from relatum.reading._pool import Pool, Turns, Use
from relatum.wire import frames
from relatum.wire.frames import Code, Command
from relatum.wire.session import StreamSession
from tests.contract._node import Node, deaf
from tests.support.standstill import in_time
from tests.unit.wire_samples import answered

MORE_THAN_FITS = b"\0" * (16 << 20)


@pytest.fixture
def near(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """A connected socket whose other side never reads."""
    monkeypatch.setattr("relatum.reading._connection.LEAST_S", 0.05)
    near, far = socket.socketpair()
    with near, far:
        yield near


def test_what_cannot_be_sent_in_time_ends_the_connection(near: socket.socket) -> None:
    """A connection is lost when a frame cannot be sent in time, since a part of it may have left."""
    connection = SocketConnection(near)
    connection.session.send(MORE_THAN_FITS)
    with pytest.raises(ConnectionLost):
        connection.wait(0.0)
    assert not connection.is_usable


@pytest.fixture
def silent() -> Iterator[socket.socket]:
    with deaf() as listener:
        yield listener


def opened(listener: socket.socket, timeout_s: float, host: str = "127.0.0.1") -> None:
    address = BrokerAddress(host, stream_host=host, stream_port=listener.getsockname()[1])
    with pytest.raises(BrokerUnavailable):
        SocketConnection.open(address, timeout_s)


def test_the_next_address_of_a_host_is_tried_in_time(silent: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    """A host's next address is tried in time, also if the first one swallows all packets."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.0)
        found = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", each.getsockname()) for each in (silent, listener)]
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
        with in_time(1.0):
            opened(listener, 1.0)
        listener.accept()[0].close()


def test_resolvers_that_hang_hold_nobody(silent: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sixteen calls end in time while the resolver hangs for their host, and another host is resolved."""
    gate, resolve = threading.Event(), socket.getaddrinfo

    def resolving(host: str, *args: Any, **options: Any) -> Any:
        return gate.wait(60) if host == "gone" else resolve(host, *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", resolving)
    callers = [threading.Thread(target=opened, args=(silent, 0.5, "gone")) for _ in range(16)]
    with in_time(0.5):
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.0)
        opened(listener, 0.5)
        listener.accept()[0].close()
    gate.set()


def test_connecting_ends_where_its_deadline_is_brought_forward(silent: socket.socket) -> None:
    """Connecting ends once its deadline is brought forward, as for a cancelled task."""
    with within(None) as deadline, in_time(0.3):
        threading.Timer(0.1, deadline.end_in, [0.0]).start()
        opened(silent, 60.0)


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
    """A login takes its five steps and agrees on the smaller heartbeat; 0 leaves the choice to the other side."""
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
    """A refused login names the user and not the password."""
    with Server("PLAIN", **refused) as server, pytest.raises(AccessRefused, match=match) as caught:
        server.log_in()
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("mechanisms", [("PLAIN",), ("PLAIN", "EXTERNAL")])
def test_external_login(mechanisms: tuple[str, ...]) -> None:
    """EXTERNAL is refused, before anything is sent, by a server that lacks it or would crash over it."""
    with Server(*mechanisms) as server, pytest.raises(ConfigurationError, match="EXTERNAL"):
        server.log_in(mechanism="EXTERNAL")
    assert server.keys == list(KEYS[:2])


def test_nothing_of_a_login_is_sent_to_a_server_that_speaks_otherwise() -> None:
    """No credentials are sent to a server whose first bytes are of another protocol."""
    with _Web() as server, pytest.raises(ConfigurationError, match="stream protocol"):
        server.log_in()
    assert server.keys == [Command.PEER_PROPERTIES]


class _Web(Server):
    def _answer(self, key: int, body: bytes) -> bytes:
        self.keys.append(key)
        return b"HTTP/1.1 400 Bad Request\r\n"


class Calls(RuleBasedStateMachine):
    """Calls that come, wait, give up and leave, in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.turns = Turns(5)
        self.held: list[Use] = []
        self.waiting: list[tuple[Use, Future[None]]] = []

    @rule(use=st.sampled_from([Use.ANSWER, Use.LENT]))
    def enter(self, use: Use) -> None:
        turn = self.turns.enter(use)
        if turn.done():
            self.held.append(use)
        else:
            self.waiting.append((use, turn))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        """A call gives its turn back: the first of those that can use it gets it."""
        use = data.draw(st.sampled_from(self.held))
        self.held.remove(use)
        self.turns.leave(use)
        for each in [each for each in self.waiting if each[1].done()]:
            first = next(waiting for waiting in self.waiting if waiting[0] is each[0])
            assert each is first, "a call was overtaken by one of its own kind"
            self.waiting.remove(each)
            self.held.append(each[0])

    @precondition(lambda self: self.waiting)
    @rule(data=st.data(), is_cancelled=st.booleans())
    def give_up(self, data: st.DataObject, is_cancelled: bool) -> None:
        """A call waits no longer; a task's future is cancelled before."""
        waiting = data.draw(st.sampled_from(self.waiting))
        self.waiting.remove(waiting)
        if is_cancelled:
            waiting[1].cancel()
        self.turns.withdraw(*waiting)

    @invariant()
    def within_bounds(self) -> None:
        """No more turns than there are, and no call waits that could continue."""
        lent = self.held.count(Use.LENT)
        assert (self.turns.in_use, self.turns.lent, self.turns.waiting) == (len(self.held), lent, len(self.waiting))
        assert len(self.held) <= 5
        assert lent <= 4
        assert len(self.held) == 5 or not any(use is Use.ANSWER for use, _ in self.waiting)
        assert len(self.held) == 5 or lent == 4 or not self.waiting


TestCalls = Calls.TestCase


def test_a_turn_that_comes_as_its_owner_gives_up_goes_on_to_the_next() -> None:
    """A turn that is given to a call that gives up goes to the next one."""
    turns = Turns(2)
    assert all(turns.enter(Use.ANSWER).done() for _ in range(2))
    first, cancelled, second = (turns.enter(Use.ANSWER) for _ in range(3))
    turns.leave(Use.ANSWER)
    assert first.done()
    cancelled.cancel()
    turns.withdraw(Use.ANSWER, first)
    assert second.done()
    turns.withdraw(Use.ANSWER, cancelled)
    assert (turns.in_use, turns.waiting) == (2, 0)


class _Nothing:
    is_closed, is_usable, is_reused = False, True, False
    session = StreamSession()

    def is_idle_for(self, _seconds: float) -> bool:
        return False

    def close(self) -> None:
        self.is_closed = True


def returned(connection: Any) -> Any:
    return connection


def test_what_many_at_once_have_opened_is_kept_for_the_next() -> None:
    """As many idle connections are kept as a reader has by default; the others are closed."""
    for limit in (CONNECTIONS_MAX, 2 * CONNECTIONS_MAX):
        pool, opened = Pool(limit), [_Nothing() for _ in range(limit)]
        with contextlib.ExitStack() as stack:
            for each in opened:
                assert stack.enter_context(pool.lend(None, Use.ANSWER, 0.0, partial(returned, each))) is each
        kept = [connection for connection in opened if not connection.is_closed]
        assert len(kept) == pool.statistics().idle == CONNECTIONS_MAX


@pytest.mark.parametrize(("limit", "most"), [(16, 8), (4, 2), (2, 1)])
def test_who_has_a_connection_may_have_others_while_there_are_plenty(limit: int, most: int) -> None:
    """A call may take further connections up to half of the limit, and none while another one waits."""
    pool = Pool(limit)
    lent = partial(pool.lend, None, Use.ANSWER, 0.0, partial(returned, _Nothing()))
    with lent():
        with contextlib.ExitStack() as stack:
            while pool.has_plenty:
                stack.enter_context(lent())
            assert pool.statistics().in_use == most
        while pool._turns.enter(Use.ANSWER).done():
            pass
        assert not pool.has_plenty
