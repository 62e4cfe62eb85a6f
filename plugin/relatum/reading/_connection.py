"""A blocking connection of the stream protocol: a socket, and the session it carries."""

import contextlib
import math
import socket
import ssl
import time
from collections.abc import Callable
from typing import Any, Final

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
from relatum.reading._amqp import NamelessCluster, cluster_meant, forget_cluster
from relatum.reading._connecting import HEARTBEAT_S, first_answering, not_reached, open_socket, slice_s
from relatum.waiting import LOOK_S, has_passed
from relatum.wire import (
    AnotherCluster,
    AnotherProtocol,
    Answer,
    Event,
    Login,
    MechanismNotTaken,
    NodeAddress,
    StreamSession,
    frames,
    is_before,
)

NOT_BY_STREAMS: Final = (AnotherProtocol, TlsRefused, MechanismNotTaken, NamelessCluster)
"""Errors that are final for a stream port that was given; a guessed port with one of them is another server's."""

SILENCE_HEARTBEATS: Final = 1.5
"""Heartbeats without any byte after which the peer counts as gone; it sends two in each."""

RECEIVE_BYTES: Final = 256 << 10
"""Bytes taken from the socket at a time: more than a socket buffer usually holds, so one call empties it."""

SEND_S_MIN: Final = 0.5
"""Seconds a send may take at least, however short the wait for an answer is."""

GOODBYE_S: Final = 1.0
"""Seconds for the last bytes to leave."""

ATTACHES_MAX: Final = 500
"""Attaches after which a connection to a broker that leaks is replaced; a new one takes as long as a few."""

CLOSES_SINCE: Final = (3, 12)
"""Version from which Unsubscribe surely closes the file it read. RabbitMQ 3.10.8 keeps one open for each attach until
the connection ends, up to the node's limit, and then the node fails. Source: rabbitmq-server issue 6317, mended in
patch releases of 3.10 and 3.11 that came after November 2022; those are taken for leaking, too, which costs little."""

_ENABLE: Final = "Where RabbitMQ runs there, its stream plugin does not: rabbitmq-plugins enable rabbitmq_stream."


class SocketConnection:
    """One connection, for one thread at a time.

    Attributes:
        session: The session it carries.
        deadline: When answers must have come, as `time.monotonic` counts; set by the caller.
        is_usable: False once it failed or timed out: what comes next on the socket is then unknown.
        is_reused: It was used before, and may have ended since.
        settled: Exchanges of which all bindings are recovered.
    """

    def __init__(self, stream: socket.socket, login: Login) -> None:
        self._socket = stream
        self._slice_s = LOOK_S
        stream.settimeout(LOOK_S)
        self._buffer = memoryview(bytearray(RECEIVE_BYTES))
        self._attaches = 0
        self.session = StreamSession(login)
        self.deadline = math.inf
        self.is_usable = True
        self.is_reused = False
        self.settled: set[str] = set()
        self._sent_at = self._received_at = time.monotonic()
        after_fork(self, SocketConnection._leave)

    def _leave(self) -> None:
        """In a child: the connection is the parent's. Closing our descriptor of it sends nothing."""
        self.abandon()

    @classmethod
    def open(cls, address: BrokerAddress, timeout_s: float, heartbeat_s: int = HEARTBEAT_S) -> "SocketConnection":
        """Connect to one address, and log in.

        Raises:
            BrokerUnavailable: Nothing answers, or not in time, or not the cluster that is meant.
            AccessRefused: The broker refuses the user or the virtual host.
            TlsRefused: TLS cannot be, for a reason that it names; nothing of the login was sent.
            ConfigurationError: A file of TLS cannot be used, the mechanism is not taken, or another kind of server
                answers (`AnotherProtocol`).
        """
        host, port = address.stream_host, address.stream_port
        if port is None:
            raise ConfigurationError(
                f"Streams are read by the stream protocol, and its port cannot be guessed from {address.where}: give a "
                "rabbitmq-stream:// URL."
            )
        cluster = cluster_meant(address, timeout_s=timeout_s) if address.stream_port_guessed else None
        mechanism = address.login.mechanism
        login = Login(address.user, address.secret(), address.vhost, mechanism, heartbeat_s, cluster)
        tls = address.login.tls_context() if address.stream_tls else None
        deadline = time.monotonic() + timeout_s
        stream: socket.socket | None = None
        try:
            stream = open_socket(host, port, tls, address.login.server_name_for(host), deadline)
            connection = cls(stream, login)
            connection.deadline = deadline
            connection.session.log_in(connection.exchange)
        except BaseException as error:
            if stream is not None:
                stream.close()
            if isinstance(error, AnotherCluster):
                forget_cluster(address)
            explained = _not_opened(error, host, port)
            if explained is error:
                raise
            raise explained from error
        return connection

    # --- bytes --------------------------------------------------------------------------------------------

    def exchange(self) -> list[Event]:
        """Send what is to be sent, then wait for bytes and return what they amount to (maybe nothing yet).

        After `ReadTimeout`, when the deadline has passed, the connection is of no use any more.
        """
        left_s = self.deadline - time.monotonic()
        try:
            if left_s <= 0:
                raise TimeoutError  # noqa: TRY301 - it is one time-out, whichever of the three meets it
            self.flush(left_s)
            data = self._receive(left_s)
        except TimeoutError as error:
            self.abandon()
            raise ReadTimeout("The broker did not answer in time.") from error
        except OSError as error:
            raise self._lost(error) from error
        return self._received(data)

    def wait(self, idle_s: float) -> list[Event] | None:
        """As `exchange`, but None when nothing came for so long; heartbeats go both ways meanwhile.

        Raises:
            ConnectionLost: The connection ended, or the broker was silent for longer than its heartbeats allow.
        """
        idle_at = time.monotonic() + idle_s
        while True:
            heartbeat_s = self.session.heartbeat_s
            try:
                self._keep_alive()
                self.flush(heartbeat_s or idle_s)
            except OSError as error:
                # Also where it took too long: part of a frame may have left, and nothing may come behind that.
                raise self._lost(error) from error
            left_s = idle_at - time.monotonic()
            try:
                data = self._receive(max(0.0, min(left_s, heartbeat_s / 2) if heartbeat_s else left_s))
            except TimeoutError:
                now = time.monotonic()
                if heartbeat_s and now - self._received_at > heartbeat_s * SILENCE_HEARTBEATS:
                    raise self._lost(None) from None
                if now >= idle_at or has_passed():
                    return None
            except OSError as error:
                raise self._lost(error) from error
            else:
                return self._received(data)

    def _receive(self, timeout_s: float) -> memoryview:
        """What has come, valid until the next call; nothing where the other side hung up. 0 takes what is there."""
        until = time.monotonic() + timeout_s
        self._wait_for(min(timeout_s, LOOK_S))
        while True:
            try:
                return self._buffer[: self._socket.recv_into(self._buffer)]
            except (BlockingIOError, ssl.SSLWantReadError, TimeoutError) as error:
                self._wait_for(slice_s(until, error))

    def _wait_for(self, seconds: float) -> None:
        """Have the next call wait for so long. To say so costs a system call, so it is said where it changes."""
        if seconds != self._slice_s:
            self._slice_s = seconds
            self._socket.settimeout(seconds)

    def _received(self, data: memoryview) -> list[Event]:
        if not data:
            raise self._lost(None)
        self._received_at = time.monotonic()
        try:
            return self.session.receive(data)
        except ConnectionLost:
            self._send_last_words()
            raise
        except (DataError, AccessRefused):
            self.abandon()
            raise

    def flush(self, timeout_s: float) -> None:
        """Send what the session has to send.

        Raises:
            TimeoutError: It took longer than allowed, half a second at least; how much has left is not known.
            OSError: The connection ended.
        """
        outgoing = self.session.take_outgoing()
        if outgoing:
            self._send(outgoing, time.monotonic() + max(timeout_s, SEND_S_MIN))
            self._sent_at = time.monotonic()

    def _send(self, data: bytes, until: float) -> None:
        self._wait_for(LOOK_S)
        unsent = memoryview(data)
        while unsent:
            try:
                unsent = unsent[self._socket.send(unsent) :]
            except (BlockingIOError, ssl.SSLWantWriteError, TimeoutError) as error:
                slice_s(until, error)

    def put_by(self, timeout_s: float) -> None:
        """Send what is to be sent and wait for nothing; a connection that has ended is abandoned."""
        if self.is_usable:
            try:
                self.flush(timeout_s)
            except OSError:
                self.abandon()

    def _keep_alive(self) -> None:
        """Send a heartbeat when nothing was sent for half of one."""
        heartbeat_s = self.session.heartbeat_s
        if heartbeat_s and time.monotonic() - self._sent_at > heartbeat_s / 2:
            self.session.send(frames.heartbeat())
            self.flush(heartbeat_s)

    def _lost(self, error: OSError | None) -> ConnectionLost:
        self.abandon()
        reason = (error.strerror or str(error)) if error is not None else "it fell silent or hung up"
        return ConnectionLost(f"The stream connection to the broker was lost: {reason}.")

    # --- questions ----------------------------------------------------------------------------------------

    def answer(self, request: Callable[..., bytes], *arguments: Any) -> Answer:
        """Ask one question, and wait for its answer; what else comes meanwhile is dropped."""
        correlation = self.session.next_correlation()
        self.session.send(request(correlation, *arguments))
        return self.answers(correlation)[0]

    def answers(self, *correlations: int) -> list[Answer]:
        """Wait for answers to what was asked; what else comes meanwhile is dropped."""
        return self.session.answers_to(self.exchange, *correlations)

    def next_subscription(self) -> int:
        """A number for a subscription, which is counted: see `is_worn`."""
        self._attaches += 1
        return self.session.take_subscription()

    @property
    def is_worn(self) -> bool:
        """True where the connection should be replaced: the broker holds too many files open for it."""
        return self._attaches >= ATTACHES_MAX and self.is_of_before(CLOSES_SINCE)

    def is_of_before(self, version: tuple[int, ...]) -> bool:
        """Whether the broker is older than a version."""
        return is_before(self.session.server_properties.get("version", ""), version)

    @property
    def own_node(self) -> NodeAddress:
        """The node this connection leads to, as it advertises itself."""
        properties = self.session.connection_properties
        port = properties.get("advertised_port", "")
        return NodeAddress(properties.get("advertised_host", ""), int(port) if port.isdecimal() else 0)

    # --- the end ------------------------------------------------------------------------------------------

    def hand_over(self) -> socket.socket:
        """The socket, not blocking from now on, for a loop that exchanges the session's bytes itself."""
        self._socket.setblocking(False)
        return self._socket

    def abandon(self) -> None:
        """Close the socket without a Close frame: an answer that comes later would be taken for another's."""
        self.is_usable = self.session.is_open = False
        self._socket.close()

    def close(self) -> None:
        """Say goodbye, best effort, and close."""
        if self.is_usable:
            self.session.leave()
            self._send_last_words()

    def _send_last_words(self) -> None:
        with contextlib.suppress(OSError):
            self.flush(GOODBYE_S)
        self.abandon()


def stream_connection(address: BrokerAddress, timeout_s: float, heartbeat_s: int = HEARTBEAT_S) -> SocketConnection:
    """A connection to the first of the addresses that answers. Errors as of `SocketConnection.open`."""
    return first_answering(address, timeout_s, lambda one, share_s: SocketConnection.open(one, share_s, heartbeat_s))


def _not_opened(error: BaseException, host: str, port: int) -> BaseException:
    """The error for a stream connection that could not be opened, as its caller can act on it."""
    where = f"{host}:{port}"
    if isinstance(error, AnotherProtocol):
        return AnotherProtocol(f"{where} does not speak RabbitMQ's stream protocol, which usually has port 5552.")
    if isinstance(error, AccessRefused):
        return AccessRefused(f"{where}: {error}")
    told = not_reached(error, "the stream protocol", host, port)
    if isinstance(error, ConnectionRefusedError):
        return BrokerUnavailable(f"{told} {_ENABLE}")
    return told if isinstance(told, TlsRefused) or isinstance(error, OSError | ReadTimeout) else error
