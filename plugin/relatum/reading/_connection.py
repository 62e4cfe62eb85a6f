"""A blocking connection of the stream protocol: a socket, the login, requests, and attaches to streams."""

import contextlib
import math
import select
import socket
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
from relatum.reading._amqp import NamelessCluster, cluster_meant
from relatum.reading._bounds import moved, refusal
from relatum.reading._connecting import HEARTBEAT_S, WOULD_BLOCK, first_answering, is_ready, not_reached, open_socket
from relatum.waiting import has_passed, within
from relatum.wire import frames
from relatum.wire.chunk import Chunk
from relatum.wire.frames import Code, StartSpec
from relatum.wire.session import AnotherProtocol, Answer, Event, StreamMoved, StreamSession, code_name

CLIENT_PROPERTIES: Final = {"product": "Relatum", "platform": "Python", "connection_name": "relatum"}

EXTERNAL_SINCE: Final = (3, 12, 1)
"""The first version that is known to accept EXTERNAL over the stream protocol.

Before, a connection that asks for it ends with a crash report in the broker's log (seen with 3.10.8). The last versions
of 3.10 and 3.11 may accept it, and are not asked. Source: rabbitmq-server, pull request 8488.
"""


class AnotherCluster(BrokerUnavailable):
    """Another cluster answers, or a cluster that does not give its name; no login data was sent."""


class MechanismNotTaken(ConfigurationError):
    """The server does not accept the mechanism over the stream protocol."""


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

_ENABLE: Final = "If RabbitMQ runs there, enable its stream plugin: rabbitmq-plugins enable rabbitmq_stream."


class SocketConnection:
    """One connection, for one thread at a time. Its socket never blocks.

    Answers must have come by `deadline`, which the caller sets. It is not usable once it failed or timed out: the next
    bytes are then unknown. If it is reused, it may have ended while idle. `settled` has the exchanges whose bindings
    are all recovered.
    """

    def __init__(self, stream: socket.socket, heartbeat_s: int = 0) -> None:
        stream.setblocking(False)
        self.socket = stream
        self._buffer = memoryview(bytearray(RECEIVE_BYTES))
        self.session = StreamSession(heartbeat_s)
        self.deadline = math.inf
        self.is_usable = True
        self.is_reused = False
        self.settled: set[str] = set()
        self._sent_at = self._received_at = time.monotonic()
        # A child closes its descriptor and sends nothing: the connection is the parent's.
        after_fork(self, SocketConnection.abandon)

    @classmethod
    def open(cls, address: BrokerAddress, timeout_s: float, heartbeat_s: int = HEARTBEAT_S) -> "SocketConnection":
        """Connect to one address, and log in. Errors are those of `StreamReader.open`, and `NOT_BY_STREAMS`."""
        host, port = address.stream_host, address.stream_port
        if port is None:
            raise ConfigurationError(
                f"Streams are read over the stream protocol, and its port cannot be guessed from {address.where}: give "
                "a rabbitmq-stream:// URL."
            )
        with within(timeout_s):
            cluster = cluster_meant(address) if address.stream_port_guessed else None
        secret = address.secret()
        tls = address.login.tls_context() if address.stream_tls else None
        deadline = time.monotonic() + timeout_s
        stream: socket.socket | None = None
        try:
            stream = open_socket(host, port, tls, address.login.server_name_for(host), timeout_s)
            connection = cls(stream, heartbeat_s)
            connection.deadline = deadline
            connection._log_in(address, secret, cluster)
        except BaseException as error:
            if stream is not None:
                stream.close()
            if isinstance(error, AnotherCluster):
                # The broker may have been reinstalled.
                cluster_meant.cache_clear()
            explained = _not_opened(error, host, port)
            if explained is error:
                raise
            raise explained from error
        return connection

    def _log_in(self, address: BrokerAddress, secret: str, cluster: str | None) -> None:
        """Log in, to the cluster of that name (None: any): servers name theirs before they get user and password."""
        session, mechanism = self.session, address.login.mechanism
        greeting = self.answer(frames.peer_properties, CLIENT_PROPERTIES)
        session.server_properties = frames.decode_table(_body(greeting, "greets"))
        if cluster is not None and session.server_properties.get("cluster_name") != cluster:
            raise AnotherCluster(f"The server of the stream protocol there is not the cluster {cluster!r}.")
        # One at a time: RabbitMQ (3.10 and 4.3) closes the connection if frames are sent ahead during the login.
        handshake = self.answer(frames.named_request, frames.Command.SASL_HANDSHAKE)
        offered = frames.decode_strings(_body(handshake, "offers mechanisms"))
        if mechanism not in offered:
            raise MechanismNotTaken(f"The broker does not offer {mechanism}, only {', '.join(offered)}.")
        if mechanism == "EXTERNAL" and session.is_older_than(EXTERNAL_SINCE):
            raise MechanismNotTaken(
                f"RabbitMQ {session.server_properties['version']} does not accept EXTERNAL over the stream protocol: "
                "update it to 3.12.1 or later, or log in by PLAIN."
            )
        response = b"" if mechanism == "EXTERNAL" else f"\0{address.user}\0{secret}".encode()
        answer = self.answer(frames.sasl_authenticate, mechanism, response)
        if answer.code == Code.AUTHENTICATION_FAILURE_LOOPBACK:
            raise AccessRefused(f"The user {address.user!r} may connect to the broker from its own machine only.")
        if answer.code in (Code.AUTHENTICATION_FAILURE, Code.SASL_ERROR, Code.SASL_CHALLENGE):
            raise AccessRefused(
                f"The broker refuses the user {address.user!r} (virtual host {address.vhost!r}): the name, the "
                "password or the certificate is wrong; RabbitMQ does not say which."
            )
        _body(answer, "logs in")
        while not session.is_tuned:
            self.exchange()
        opened = self.answer(frames.named_request, frames.Command.OPEN, address.vhost)
        if opened.code in (Code.VHOST_ACCESS_FAILURE, Code.ACCESS_REFUSED):
            raise AccessRefused(
                f"The user {address.user!r} may not use the virtual host {address.vhost!r}, or there is none."
            )
        session.connection_properties = frames.decode_table(_body(opened, "opens the virtual host"))
        session.is_open = True

    def exchange(self) -> list[Event]:
        """Send pending bytes, wait for bytes, and return their events, possibly none yet.

        After `ReadTimeout`, when the deadline has passed, the connection is unusable.
        """
        events = self.wait(self.deadline - time.monotonic())
        if events is None:
            self.abandon()
            raise ReadTimeout("The broker did not answer in time.")
        return events

    def wait(self, idle_s: float) -> list[Event] | None:
        """Like `exchange`, but return None if nothing came for `idle_s`; heartbeats are exchanged during the wait."""
        idle_at = time.monotonic() + idle_s
        while True:
            # During the login RabbitMQ takes nothing but the next step.
            heartbeat_s = self.session.heartbeat_s if self.session.is_open else 0
            if heartbeat_s and self.is_idle_for(heartbeat_s / 2):
                self.session.send(frames.heartbeat())
            try:
                self.flush(max(idle_s, heartbeat_s))
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
        while True:
            try:
                return self._buffer[: self.socket.recv_into(self._buffer)]
            except WOULD_BLOCK:
                is_ready(self.socket, select.POLLIN, until)

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
        """Send the session's pending bytes; after `TimeoutError`, how much was sent is unknown."""
        outgoing = self.session.take_outgoing()
        if outgoing:
            self._send(outgoing, time.monotonic() + max(timeout_s, SEND_S_MIN))
            self._sent_at = time.monotonic()

    def _send(self, data: bytes, until: float) -> None:
        unsent = memoryview(data)
        while unsent:
            try:
                unsent = unsent[self.socket.send(unsent) :]
            except WOULD_BLOCK:
                is_ready(self.socket, select.POLLOUT, until)

    def is_idle_for(self, seconds: float) -> bool:
        """Whether nothing was sent for so long."""
        return time.monotonic() - self._sent_at >= seconds

    def put_by(self, timeout_s: float) -> None:
        """Send pending bytes without waiting for an answer; abandon a connection that has ended."""
        if self.is_usable:
            try:
                self.flush(timeout_s)
            except OSError:
                self.abandon()

    def _lost(self, error: OSError | None) -> ConnectionLost:
        self.abandon()
        reason = (error.strerror or str(error)) if error is not None else "it was silent or closed the connection"
        return ConnectionLost(f"The stream connection to the broker was lost: {reason}.")

    def answer(self, request: Callable[..., bytes], *arguments: Any) -> Answer:
        """Send one request, and return its answer; other events are dropped."""
        correlation = self.session.next_correlation()
        self.session.send(request(correlation, *arguments))
        return self.answers(correlation)[0]

    def answers(self, *correlations: int) -> list[Answer]:
        """Wait for the answers to sent requests; other events are dropped."""
        answers: dict[int, Answer] = {}
        while len(answers) < len(correlations):
            for event in self.exchange():
                if type(event) is Answer and event.correlation in correlations:
                    answers[event.correlation] = event
        return [answers[correlation] for correlation in correlations]

    def abandon(self) -> None:
        """Close the socket without a Close frame: a late answer would be taken for another request's."""
        self.is_usable = self.session.is_open = False
        self.socket.close()

    def close(self) -> None:
        """Send a Close, best effort, and close the socket."""
        if self.is_usable:
            self.session.send_close()
            self._send_last_words()

    def _send_last_words(self) -> None:
        with contextlib.suppress(OSError):
            self.flush(GOODBYE_S)
        self.abandon()


def _body(answer: Answer, step: str) -> bytes:
    """Return the body of an answer in the login that must be OK, or raise its error."""
    if answer.code == Code.OK:
        return answer.body
    if answer.code == Code.ACCESS_REFUSED:
        raise AccessRefused("The broker refuses this user.")
    raise BrokerUnavailable(f"The broker answered {code_name(answer.code)} where a connection {step}.")


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


class Attach:
    """One subscription for a few chunks, and the chunks received. It never waits; see `until`.

    The broker handles a connection's commands in order. So after a Subscribe or a Credit, the answer to the next
    command is a barrier: all granted chunks that exist have arrived by then. In a pair, the Unsubscribe is that
    command; a subscription that may continue sends an empty Metadata, which costs the broker nothing. So a query such
    as "what is at or after this offset" takes one round trip and no time-out, and many can be in flight. Yet if nothing
    arrives, this does not prove that nothing is there: see `_leaders`.
    """

    def __init__(self, connection: SocketConnection, stream: str, start: StartSpec, chunks: int = 1) -> None:
        self._session = session = connection.session
        self.stream = stream
        self.subscription = session.take_subscription()
        self.subscribed = session.next_correlation()
        self.barrier = session.next_correlation()
        self.granted = chunks
        self.chunks: list[Chunk] = []
        self.code: int = Code.OK
        self.answer = b""
        self.reached: int | None = None
        self.chunks_seen = 0
        self.is_at_barrier = self.is_done = False
        session.send(frames.subscribe(self.subscribed, self.subscription, stream, start, chunks))

    @classmethod
    def once(cls, connection: SocketConnection, stream: str, start: StartSpec, chunks: int = 1) -> "Attach":
        """Request at most `chunks` chunks from a start on, and end there."""
        attach = cls(connection, stream, start, chunks)
        connection.session.unsubscribe(attach.subscription, attach.barrier)
        attach.is_done = True
        return attach

    @classmethod
    def to_go_on(cls, connection: SocketConnection, stream: str, start: StartSpec, chunks: int) -> "Attach":
        """Like `once`, but keep the subscription at its barrier until `go_on` or `end`."""
        # RabbitMQ 4 sends for a Credit only when half of the first credit is back. So the first credit is the least,
        # else the chunks would not come before the barrier.
        attach = cls(connection, stream, start)
        if chunks > 1:
            attach.go_on(chunks - 1)
        else:
            connection.session.send(frames.metadata(attach.barrier, []))
        return attach

    def go_on(self, chunks: int) -> None:
        """Request more chunks."""
        self.barrier = self._session.next_correlation()
        self.granted += chunks
        self.is_at_barrier = False
        self._session.send(frames.credit(self.subscription, chunks) + frames.metadata(self.barrier, []))

    def end(self) -> None:
        """Unsubscribe: chunks that still come are dropped."""
        if not self.is_done:
            self.is_done = True
            self._session.unsubscribe(self.subscription)

    def take(self, event: Event) -> None:
        """Handle one event, which may belong to another subscription."""
        if type(event) is Chunk:
            if event.subscription == self.subscription:
                self.chunks.append(event)
        elif type(event) is Answer:
            if event.correlation == self.subscribed:
                self.code = event.code
            elif event.correlation == self.barrier:
                self.is_at_barrier, self.answer = True, event.body
        elif type(event) is StreamMoved and event.stream == self.stream:
            raise moved(self.stream)

    def check(self) -> None:
        """Raise the error in the answer to Subscribe, if any."""
        if self.code != Code.OK:
            raise refusal(self.stream, self.code)


def until(connection: SocketConnection, *attaches: Attach) -> None:
    """Wait until all existing chunks that subscriptions requested have arrived."""
    for awaited in attaches:
        while not awaited.is_at_barrier:
            for event in connection.exchange():
                for attach in attaches:
                    attach.take(event)
