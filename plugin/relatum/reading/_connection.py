"""A blocking connection of the stream protocol: a socket and its session."""

import contextlib
import math
import socket
import ssl
import struct
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
"""Heartbeat intervals without any byte after which the peer counts as gone; it sends two in each."""

RECEIVE_BYTES: Final = 256 << 10
"""Bytes read from the socket at once: more than a socket buffer usually holds, so one call empties it."""

SEND_S_MIN: Final = 0.5
"""The least seconds for a send, however short the wait for an answer is."""

GOODBYE_S: Final = 1.0
"""Time limit in seconds for sending the last bytes."""

ATTACHES_MAX: Final = 500
"""Attaches after which a connection to a leaking broker is replaced; a new one takes as long as a few attaches."""

CLOSES_SINCE: Final = (3, 12)
"""The version from which Unsubscribe certainly closes the file that was read. RabbitMQ 3.10.8 keeps one open for each
attach until the connection ends, up to the node's limit, and then the node fails. Source: rabbitmq-server issue 6317,
fixed in patch releases of 3.10 and 3.11 after November 2022; those count as leaking, too, which costs little."""

_ENABLE: Final = "If RabbitMQ runs there, enable its stream plugin: rabbitmq-plugins enable rabbitmq_stream."


class SocketConnection:
    """One connection, for one thread at a time.

    Attributes:
        session: The session on it.
        deadline: When answers must have come, by `time.monotonic`; set by the caller.
        is_usable: False once it failed or timed out: the next bytes on the socket are then unknown.
        is_reused: It was used before, and may have ended since.
        settled: Exchanges whose bindings are all recovered.
    """

    def __init__(self, stream: socket.socket, login: Login) -> None:
        self._socket = stream
        self._slice_s = LOOK_S
        # The kernel's time-outs are free; Python's, which TLS needs, cost a system call more each time.
        self._has_kernel_timeouts = not isinstance(stream, ssl.SSLSocket)
        stream.settimeout(None if self._has_kernel_timeouts else LOOK_S)
        if self._has_kernel_timeouts:
            for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                stream.setsockopt(socket.SOL_SOCKET, option, _timeval(LOOK_S))
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
        """Close the descriptor in a forked child, which sends nothing: the connection is the parent's."""
        self.abandon()

    @classmethod
    def open(cls, address: BrokerAddress, timeout_s: float, heartbeat_s: int = HEARTBEAT_S) -> "SocketConnection":
        """Connect to one address, and log in.

        Raises:
            BrokerUnavailable: Nothing answers in time, or another cluster answers.
            AccessRefused: The broker refuses the user or the virtual host.
            TlsRefused: TLS failed; the message says why. Nothing of the login was sent.
            ConfigurationError: A TLS file cannot be used, the broker does not offer the mechanism, or another kind of
                server answers (`AnotherProtocol`).
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
        """Send pending bytes, wait for bytes, and return their events, possibly none yet.

        After `ReadTimeout`, when the deadline has passed, the connection is unusable.
        """
        left_s = self.deadline - time.monotonic()
        try:
            if left_s <= 0:
                raise TimeoutError  # noqa: TRY301 - handled below, like those of send and receive
            self.flush(left_s)
            data = self._receive(left_s)
        except TimeoutError as error:
            self.abandon()
            raise ReadTimeout("The broker did not answer in time.") from error
        except OSError as error:
            raise self._lost(error) from error
        return self._received(data)

    def wait(self, idle_s: float) -> list[Event] | None:
        """As `exchange`, but return None if nothing came for `idle_s`; heartbeats are exchanged during the wait.

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
                # Also after a time-out: a part of a frame may have been sent, and nothing may follow it.
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
        """Receive bytes, valid until the next call; empty if the peer hung up. 0 takes what has arrived."""
        until = time.monotonic() + timeout_s
        self._wait_for(min(timeout_s, LOOK_S))
        flags = socket.MSG_DONTWAIT if self._has_kernel_timeouts and not timeout_s else 0
        while True:
            try:
                return self._buffer[: self._socket.recv_into(self._buffer, 0, flags)]
            except (BlockingIOError, ssl.SSLWantReadError, TimeoutError) as error:
                self._wait_for(slice_s(until, error))

    def _wait_for(self, seconds: float) -> None:
        """Set the time-out of the next call. It costs a system call, so it is set only if it changes."""
        if seconds == self._slice_s:
            return
        if not self._has_kernel_timeouts:
            self._socket.settimeout(seconds)
        elif seconds:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(seconds))
        else:
            return  # The kernel takes 0 for no time-out.
        self._slice_s = seconds

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
        """Send the session's pending bytes.

        Raises:
            TimeoutError: It took longer than `timeout_s`, but at least half a second; how much was sent is unknown.
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
        """Send pending bytes without waiting for an answer; abandon a connection that has ended."""
        if self.is_usable:
            try:
                self.flush(timeout_s)
            except OSError:
                self.abandon()

    def _keep_alive(self) -> None:
        """Send a heartbeat if nothing was sent for half an interval."""
        heartbeat_s = self.session.heartbeat_s
        if heartbeat_s and time.monotonic() - self._sent_at > heartbeat_s / 2:
            self.session.send(frames.heartbeat())
            self.flush(heartbeat_s)

    def _lost(self, error: OSError | None) -> ConnectionLost:
        self.abandon()
        reason = (error.strerror or str(error)) if error is not None else "it was silent or closed the connection"
        return ConnectionLost(f"The stream connection to the broker was lost: {reason}.")

    # --- requests -----------------------------------------------------------------------------------------

    def answer(self, request: Callable[..., bytes], *arguments: Any) -> Answer:
        """Send one request, and return its answer; other events are dropped."""
        correlation = self.session.next_correlation()
        self.session.send(request(correlation, *arguments))
        return self.answers(correlation)[0]

    def answers(self, *correlations: int) -> list[Answer]:
        """Wait for the answers to sent requests; other events are dropped."""
        return self.session.answers_to(self.exchange, *correlations)

    def next_subscription(self) -> int:
        """Return a number for a subscription, and count it for `is_worn`."""
        self._attaches += 1
        return self.session.take_subscription()

    @property
    def is_worn(self) -> bool:
        """True if the connection should be replaced: the broker holds too many files open for it."""
        return self._attaches >= ATTACHES_MAX and self.is_of_before(CLOSES_SINCE)

    def is_of_before(self, version: tuple[int, ...]) -> bool:
        """Whether the broker is older than a version."""
        return is_before(self.session.server_properties.get("version", ""), version)

    @property
    def own_node(self) -> NodeAddress:
        """The node of this connection, as it advertises itself."""
        properties = self.session.connection_properties
        port = properties.get("advertised_port", "")
        return NodeAddress(properties.get("advertised_host", ""), int(port) if port.isdecimal() else 0)

    # --- the end ------------------------------------------------------------------------------------------

    def hand_over(self) -> socket.socket:
        """Return the socket, non-blocking from now on, for a loop that exchanges the session's bytes itself."""
        self._socket.setblocking(False)
        return self._socket

    def abandon(self) -> None:
        """Close the socket without a Close frame: a late answer would be taken for another request's."""
        self.is_usable = self.session.is_open = False
        self._socket.close()

    def close(self) -> None:
        """Send a Close, best effort, and close the socket."""
        if self.is_usable:
            self.session.leave()
            self._send_last_words()

    def _send_last_words(self) -> None:
        with contextlib.suppress(OSError):
            self.flush(GOODBYE_S)
        self.abandon()


def _timeval(seconds: float) -> bytes:
    """Encode a time-out for the kernel."""
    whole = int(seconds)
    return struct.pack("@ll", whole, max(1, round((seconds - whole) * 1_000_000)))


def stream_connection(address: BrokerAddress, timeout_s: float, heartbeat_s: int = HEARTBEAT_S) -> SocketConnection:
    """Return a connection to the first address that answers. Errors are those of `SocketConnection.open`."""
    return first_answering(address, timeout_s, lambda one, share_s: SocketConnection.open(one, share_s, heartbeat_s))


def _not_opened(error: BaseException, host: str, port: int) -> BaseException:
    """Translate the error of a stream connection that could not be opened."""
    where = f"{host}:{port}"
    if isinstance(error, AnotherProtocol):
        return AnotherProtocol(f"{where} does not speak RabbitMQ's stream protocol, which usually has port 5552.")
    if isinstance(error, AccessRefused):
        return AccessRefused(f"{where}: {error}")
    told = not_reached(error, "the stream protocol", host, port)
    if isinstance(error, ConnectionRefusedError):
        return BrokerUnavailable(f"{told} {_ENABLE}")
    return told if isinstance(told, TlsRefused) or isinstance(error, OSError | ReadTimeout) else error
