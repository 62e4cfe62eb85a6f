"""A blocking connection of the stream protocol: a socket around a session."""

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Callable
from typing import Final, TypeVar

from relatum.errors import (
    AccessRefused,
    BrokerUnavailable,
    ConfigurationError,
    ConnectionLost,
    DataError,
    ReadTimeout,
    TlsRefused,
)
from relatum.processes import after_fork
from relatum.reading._address import BrokerAddress
from relatum.reading._handshake import has_hung_up, refusal_inside, why_hung_up
from relatum.reading._operations import StreamOperations
from relatum.wire import (
    STREAM,
    AnotherProtocol,
    Event,
    Login,
    Mechanism,
    Steps,
    StreamSession,
    frames,
    hint,
    is_another,
    unreached,
)

RECEIVE_BYTES: Final = 256 << 10
"""Bytes taken from the socket at a time: more than a socket buffer usually holds, so one call empties it."""

HEARTBEAT_S: Final = 10
"""Seconds of heartbeat asked for: a frozen broker is noticed in 1.5 times that."""

SEND_S_MIN: Final = 0.5
"""Seconds a send may take at least, however short the wait for an answer is."""

SILENCE_HEARTBEATS: Final = 1.5
"""Heartbeats without any byte after which the peer counts as gone; it sends two in each."""

_Result = TypeVar("_Result")


def login_for(address: BrokerAddress, heartbeat_s: int = HEARTBEAT_S, cluster_name: str | None = None) -> Login:
    """The login an address holds, for the cluster of that name alone where one is given."""
    mechanism = Mechanism(address.login.mechanism)
    return Login(address.user, address.password, address.vhost, mechanism, heartbeat_s, cluster_name)


def tls_context_for(address: BrokerAddress) -> ssl.SSLContext | None:
    """The TLS context of a stream connection; None for a plain one."""
    return address.login.tls_context() if address.stream_tls else None


def not_opened(error: BaseException, host: str, port: int) -> BaseException:
    """The error for a stream connection that could not be opened, as its caller can act on it."""
    where = f"{host}:{port}"
    if isinstance(error, AnotherProtocol):
        return AnotherProtocol(f"{is_another(error.service, where, STREAM)}.", service=error.service)
    if (refused := refusal_inside(error, where)) is not None:
        return refused
    if isinstance(error, ssl.SSLError):
        return BrokerUnavailable(f"TLS with {where} failed: {error.reason or 'it hung up'}.")
    if isinstance(error, (TimeoutError, ReadTimeout)):
        return BrokerUnavailable(f"Nothing at {where} answered as the stream protocol in time{hint(port, STREAM)}.")
    if isinstance(error, OSError):
        return BrokerUnavailable(f"No stream protocol at {where}{unreached(error, host)}{hint(port, STREAM)}.")
    return error


class SocketConnection:
    """One connection, for one thread at a time; `keep_alive` may be called from another.

    Attributes:
        session: The session it carries.
        operations: What can be asked over it.
        is_usable: False once it failed or timed out: what comes next on the socket is then unknown.
        has_received: True when bytes came since the last `forget_received`.
    """

    def __init__(self, stream: socket.socket, login: Login) -> None:
        self._socket = stream
        self._buffer = bytearray(RECEIVE_BYTES)
        self._view = memoryview(self._buffer)
        self._send_lock = threading.Lock()
        self.session = StreamSession(login)
        self.operations = StreamOperations(self.session)
        self.is_usable = True
        self.has_received = False
        self._sent_at = self._received_at = time.monotonic()
        after_fork(self, SocketConnection._leave)

    def _leave(self) -> None:
        """In a child: the connection is the parent's. Closing our descriptor of it sends nothing."""
        self._send_lock = threading.Lock()
        self.abandon()

    @classmethod
    def open(cls, address: BrokerAddress, login: Login, timeout_s: float) -> "SocketConnection":
        """Connect and log in.

        Args:
            address: Where to, and what TLS trusts and shows.
            login: Who logs in.
            timeout_s: Seconds for all of it.

        Raises:
            BrokerUnavailable: Nothing answers, or not in time, or not the cluster that is meant.
            AccessRefused: The broker refuses the user or the virtual host.
            TlsRefused: TLS cannot be, for a reason that it names; nothing of the login was sent.
            ConfigurationError: A file of TLS cannot be used, the mechanism is not taken, or another kind of server
                answers (`AnotherProtocol`).
        """
        host, port = address.stream_host, address.stream_port
        if port is None:
            raise ConfigurationError("The address has no stream port.")
        tls = tls_context_for(address)
        deadline = time.monotonic() + timeout_s
        try:
            stream = socket.create_connection((host, port), timeout_s)
            stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            stream.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        except OSError as error:
            raise not_opened(error, host, port) from error
        try:
            if tls is not None:
                stream.settimeout(max(SEND_S_MIN, deadline - time.monotonic()))
                stream = tls.wrap_socket(stream, server_hostname=address.login.server_name_for(host))
            connection = cls(stream, login)
            connection.run(connection.session.connecting(), deadline)
        except BaseException as error:
            stream.close()
            told = not_opened(error, host, port)
            if tls is not None and has_hung_up(error) and not isinstance(told, TlsRefused):
                told = why_hung_up(host, port, address.login) or told
            if told is error:
                raise
            raise told from error
        return connection

    def run(self, steps: Steps[_Result], deadline: float) -> _Result:
        """Drive an operation to its end.

        Raises:
            ReadTimeout: The deadline passed; the connection is of no use any more.
            ConnectionLost: The connection ended.
        """
        try:
            next(steps)
            while True:
                steps.send(self.exchange(deadline))
        except StopIteration as done:
            return done.value  # type: ignore[no-any-return]

    def exchange(self, deadline: float) -> list[Event]:
        """Send what is to be sent, then wait for bytes and return what they amount to (maybe nothing yet)."""
        left = deadline - time.monotonic()
        if left <= 0:
            self.abandon()
            raise ReadTimeout("The broker did not answer in time.")
        try:
            self.flush(left)
            self._socket.settimeout(left)
            count = self._socket.recv_into(self._buffer)
        except TimeoutError as error:
            self.abandon()
            raise ReadTimeout("The broker did not answer in time.") from error
        except OSError as error:
            raise self._lost(error) from error
        return self._received(count)

    def wait(self, idle_s: float) -> list[Event] | None:
        """As `exchange`, but None when nothing came for so long; heartbeats go both ways meanwhile.

        Raises:
            ConnectionLost: The connection ended, or the broker was silent for longer than its heartbeats allow.
        """
        idle_at = time.monotonic() + idle_s
        while True:
            heartbeat_s = self.session.heartbeat_s
            left = idle_at - time.monotonic()
            try:
                self.keep_alive()
                self.flush(heartbeat_s or idle_s)
                # 0 does not block at all: what has come is taken.
                self._socket.settimeout(max(0.0, min(left, heartbeat_s / 2) if heartbeat_s else left))
                return self._received(self._socket.recv_into(self._buffer))
            except (TimeoutError, BlockingIOError, ssl.SSLWantReadError):
                now = time.monotonic()
                if heartbeat_s and now - self._received_at > heartbeat_s * SILENCE_HEARTBEATS:
                    raise self._lost(None) from None
                if now >= idle_at:
                    return None
            except OSError as error:
                raise self._lost(error) from error

    def _received(self, count: int) -> list[Event]:
        if not count:
            raise self._lost(None)
        self.has_received = True
        self._received_at = time.monotonic()
        try:
            return self.session.receive(self._view[:count])
        except ConnectionLost:
            self._send_last_words()
            raise
        except (DataError, AccessRefused):
            self.abandon()
            raise

    def flush(self, timeout_s: float) -> None:
        """Send what the session has to send."""
        with self._send_lock:
            outgoing = self.session.take_outgoing()
            if outgoing:
                self._socket.settimeout(max(timeout_s, SEND_S_MIN))
                self._socket.sendall(outgoing)
                self._sent_at = time.monotonic()

    def put_by(self, timeout_s: float) -> None:
        """Send what is left over from an operation that was ended early; a connection that has ended is abandoned."""
        if self.is_usable:
            try:
                self.flush(timeout_s)
            except OSError:
                self.abandon()

    def keep_alive(self) -> None:
        """Send a heartbeat when nothing was sent for half of one."""
        heartbeat_s = self.session.heartbeat_s
        if heartbeat_s and time.monotonic() - self._sent_at > heartbeat_s / 2:
            self.session.send(frames.heartbeat())
            self.flush(heartbeat_s)

    def _lost(self, error: OSError | None) -> ConnectionLost:
        self.abandon()
        reason = (error.strerror or str(error)) if error is not None else "it fell silent or hung up"
        return ConnectionLost(f"The stream connection to the broker was lost: {reason}.")

    def _send_last_words(self) -> None:
        with contextlib.suppress(OSError):
            self.flush(1.0)
        self.abandon()

    def hand_over(self) -> socket.socket:
        """The socket, not blocking from now on, for whoever exchanges the session's bytes by a loop of its own."""
        self._socket.setblocking(False)
        return self._socket

    def abandon(self) -> None:
        """Close the socket without a word: what would come next on it belongs to nobody."""
        self.is_usable = False
        self.session.is_open = False
        self._socket.close()

    def close(self) -> None:
        """Say goodbye, best effort, and close."""
        if self.is_usable:
            self.session.leave()
            self._send_last_words()


Opener = Callable[[float], SocketConnection]
