"""A blocking connection of the stream protocol: its socket, login, requests, and short subscriptions (attaches)."""

import math
import select
import socket
import time
from collections.abc import Callable
from typing import Any, Final

from relatum.common.processes import after_fork
from relatum.common.waiting import LEAST_S, has_passed, within
from relatum.errors import (
    AccessRefused,
    BrokerUnavailable,
    ConfigurationError,
    ConnectionLost,
    DataError,
    ReadTimeout,
    TlsRefused,
)
from relatum.reading._address import BrokerAddress
from relatum.reading._amqp import UnnamedCluster, expected_cluster
from relatum.reading._bounds import refusal, stream_moved
from relatum.reading._connecting import HEARTBEAT_S, WOULD_BLOCK, first_answering, open_socket, reach_error, wait_ready
from relatum.wire import frames
from relatum.wire.chunk import Chunk
from relatum.wire.frames import Code, StartSpec
from relatum.wire.session import AnotherProtocol, Answer, Damaged, Event, StreamMoved, StreamSession, code_name

CLIENT_PROPERTIES: Final = {"product": "Relatum", "platform": "Python", "connection_name": "relatum"}

EXTERNAL_SINCE: Final = (3, 12, 1)
"""The first version that certainly accepts EXTERNAL over the stream protocol. In 3.10.8, such a login ends with a
crash report in the broker's log. The last versions of 3.10 and 3.11 may accept it, but it is not tried. Source:
rabbitmq-server, pull request 8488."""


class AnotherCluster(BrokerUnavailable):
    """Another cluster answers on a guessed port, or a cluster without a name. No credentials were sent."""


class MechanismRefused(ConfigurationError):
    """The server does not accept the login mechanism over the stream protocol."""


STREAM_PORT_ERRORS: Final = (AnotherProtocol, TlsRefused, MechanismRefused, UnnamedCluster)
"""Errors that are final for a configured stream port. With a guessed port, they mean that streams cannot be read."""

SILENCE_HEARTBEATS: Final = 1.5
"""Heartbeat intervals without any byte after which the peer counts as lost. It sends two heartbeats in each."""

RECEIVE_BYTES: Final = 256 << 10
"""Maximum bytes of one read: more than a socket buffer usually holds, so one call empties it."""

CLOSE_TIMEOUT_S: Final = 1.0
"""Time limit in seconds for sending the last bytes of a connection or subscription."""

_ENABLE: Final = "If RabbitMQ runs there, enable its stream plugin: rabbitmq-plugins enable rabbitmq_stream."


class SocketConnection:
    """One connection, for one thread at a time. Its socket is non-blocking.

    The caller sets `deadline` for answers. `is_usable` is False after an error or timeout, because unknown bytes may
    follow. `is_reused`: the pool has lent it before, so it may have ended while idle. `recovered`: the exchanges whose
    bindings the broker has recovered completely.
    """

    def __init__(self, stream: socket.socket, heartbeat_s: int = 0) -> None:
        stream.setblocking(False)
        self.socket = stream
        self._buffer = memoryview(bytearray(RECEIVE_BYTES))
        self.session = StreamSession(heartbeat_s)
        self.deadline = math.inf
        self.is_usable = True
        self.is_reused = False
        self.recovered: set[str] = set()
        self._sent_at = self._received_at = time.monotonic()
        # A forked child closes its descriptor and sends nothing: the connection is the parent's.
        after_fork(self, SocketConnection.abandon)

    @classmethod
    def open(cls, address: BrokerAddress, timeout_s: float, heartbeat_s: int = HEARTBEAT_S) -> "SocketConnection":
        """Return a logged-in connection to one address. Raises as `StreamReader.open`, and `STREAM_PORT_ERRORS`."""
        host, port = address.stream_host, address.stream_port
        if port is None:
            raise ConfigurationError(
                f"Reading streams needs the stream port, which cannot be guessed from {address.where}: give a "
                "rabbitmq-stream:// URL."
            )
        with within(timeout_s):
            cluster = expected_cluster(address) if address.stream_port_guessed else None
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
                # The cached name is outdated if the broker was reinstalled.
                expected_cluster.cache_clear()
            explained = _not_opened(error, host, port)
            if explained is error:
                raise
            raise explained from error
        return connection

    def _log_in(self, address: BrokerAddress, secret: str, cluster: str | None) -> None:
        """Log in, if the server's cluster has this name (None: any). Servers name it before they get credentials."""
        session, mechanism = self.session, address.login.mechanism
        greeting = self.answer(frames.peer_properties, CLIENT_PROPERTIES)
        session.server_properties = frames.decode_table(_body(greeting, "PeerProperties"))
        if cluster is not None and session.server_properties.get("cluster_name") != cluster:
            raise AnotherCluster(
                f"The guessed stream port does not belong to the cluster {cluster!r}: give a rabbitmq-stream:// URL."
            )
        # Each request waits for its answer: RabbitMQ (3.10 and 4.3) closes a connection that sends ahead in the login.
        handshake = self.answer(frames.named_request, frames.Command.SASL_HANDSHAKE)
        offered = frames.decode_strings(_body(handshake, "SaslHandshake"))
        if mechanism not in offered:
            raise MechanismRefused(f"The broker does not accept auth_mechanism={mechanism}, only {', '.join(offered)}.")
        if mechanism == "EXTERNAL" and session.is_older_than(EXTERNAL_SINCE):
            raise MechanismRefused(
                f"RabbitMQ {session.server_properties['version']} does not accept EXTERNAL over the stream protocol: "
                "update it to 3.12.1 or later, or log in with PLAIN."
            )
        response = b"" if mechanism == "EXTERNAL" else f"\0{address.user}\0{secret}".encode()
        answer = self.answer(frames.sasl_authenticate, mechanism, response)
        if answer.code == Code.AUTHENTICATION_FAILURE_LOOPBACK:
            raise AccessRefused(f"The user {address.user!r} may connect only from the broker's machine: use another.")
        if answer.code in (Code.AUTHENTICATION_FAILURE, Code.SASL_ERROR, Code.SASL_CHALLENGE):
            raise AccessRefused(
                f"The broker refuses the user {address.user!r} (virtual host {address.vhost!r}): the name, the "
                "password or the certificate is wrong; RabbitMQ does not say which."
            )
        _body(answer, "SaslAuthenticate")
        while not session.is_tuned:
            self.exchange()
        opened = self.answer(frames.named_request, frames.Command.OPEN, address.vhost)
        if opened.code in (Code.VHOST_ACCESS_FAILURE, Code.ACCESS_REFUSED):
            where = f"The virtual host {address.vhost!r}"
            raise AccessRefused(f"{where} does not exist, or the user {address.user!r} may not use it.")
        session.connection_properties = frames.decode_table(_body(opened, "Open"))
        session.is_open = True

    def exchange(self) -> list[Event]:
        """Send pending bytes, wait for received bytes, and return their events, which may be none.

        Raises `ReadTimeout` at the deadline; the connection is then unusable.
        """
        events = self.wait(self.deadline - time.monotonic())
        if events is None:
            self.abandon()
            raise ReadTimeout("The broker did not answer in time: try again.")
        return events

    def wait(self, idle_s: float) -> list[Event] | None:
        """Return events as `exchange` does, or None after `idle_s` without a byte. Heartbeats continue."""
        idle_at = time.monotonic() + idle_s
        while True:
            # During the login, RabbitMQ accepts no heartbeats.
            heartbeat_s = self.session.heartbeat_s if self.session.is_open else 0
            if heartbeat_s and self.is_idle_for(heartbeat_s / 2):
                self.session.send(frames.heartbeat())
            try:
                self.flush(max(idle_s, heartbeat_s))
            except OSError as error:
                # A timeout counts, too: nothing may be sent after a part of a frame.
                raise self._lost(error) from error
            try:
                data = self._receive(min(idle_at, time.monotonic() + heartbeat_s / 2) if heartbeat_s else idle_at)
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

    def _receive(self, until: float) -> memoryview:
        """Return received bytes, valid until the next call. Empty: the peer closed. A past `until` does not wait."""
        while True:
            try:
                return self._buffer[: self.socket.recv_into(self._buffer)]
            except WOULD_BLOCK:
                wait_ready(self.socket, select.POLLIN, until)

    def _received(self, data: memoryview) -> list[Event]:
        if not data:
            raise self._lost(None)
        self._received_at = time.monotonic()
        try:
            return self.session.receive(data)
        except ConnectionLost:
            # The broker's Close is answered.
            self.flush_or_abandon(CLOSE_TIMEOUT_S)
            self.abandon()
            raise
        except (DataError, AccessRefused):
            self.abandon()
            raise

    def flush(self, timeout_s: float) -> None:
        """Send the session's pending bytes. After `TimeoutError`, some of them may have been sent."""
        outgoing = self.session.take_outgoing()
        if outgoing:
            self._send(outgoing, time.monotonic() + max(timeout_s, LEAST_S))
            self._sent_at = time.monotonic()

    def _send(self, data: bytes, until: float) -> None:
        unsent = memoryview(data)
        while unsent:
            try:
                unsent = unsent[self.socket.send(unsent) :]
            except WOULD_BLOCK:
                wait_ready(self.socket, select.POLLOUT, until)

    def is_idle_for(self, seconds: float) -> bool:
        """Whether nothing was sent in the last `seconds`."""
        return time.monotonic() - self._sent_at >= seconds

    def flush_or_abandon(self, timeout_s: float) -> None:
        """Send pending bytes without waiting for an answer. A connection that fails is abandoned, without an error."""
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
        """Send one request, and return its answer. Other events are dropped."""
        correlation = self.session.next_correlation()
        self.session.send(request(correlation, *arguments))
        return self.answers(correlation)[0]

    def answers(self, *correlations: int) -> list[Answer]:
        """Return the answers to requests that were sent, by correlation id. Other events are dropped."""
        answers: dict[int, Answer] = {}
        while len(answers) < len(correlations):
            for event in self.exchange():
                if type(event) is Answer and event.correlation in correlations:
                    answers[event.correlation] = event
        return [answers[correlation] for correlation in correlations]

    def abandon(self) -> None:
        """Close the socket without a Close frame. The connection is not usable any more."""
        self.is_usable = self.session.is_open = False
        self.socket.close()

    def close(self) -> None:
        """Close the connection, after trying to send Close."""
        if self.is_usable:
            self.session.send_close()
            self.flush_or_abandon(CLOSE_TIMEOUT_S)
            self.abandon()


def _body(answer: Answer, step: str) -> bytes:
    """Return the body of an answer during the login, or raise its error."""
    if answer.code == Code.OK:
        return answer.body
    if answer.code == Code.ACCESS_REFUSED:
        raise AccessRefused("The broker refuses this user: check its name, password and permissions.")
    raise BrokerUnavailable(f"The login failed: the broker answered {code_name(answer.code)!r} to {step}. Try again.")


def stream_connection(address: BrokerAddress, timeout_s: float, heartbeat_s: int = HEARTBEAT_S) -> SocketConnection:
    """Return a connection to the first address that answers. Errors are those of `SocketConnection.open`."""
    return first_answering(address, timeout_s, lambda one, share_s: SocketConnection.open(one, share_s, heartbeat_s))


def _not_opened(error: BaseException, host: str, port: int) -> BaseException:
    """Translate the error of a stream connection that could not be opened."""
    where = f"{host}:{port}"
    if isinstance(error, AnotherProtocol):
        return AnotherProtocol(f"{where} does not speak RabbitMQ's stream protocol: give its port, usually 5552.")
    if isinstance(error, AccessRefused):
        return AccessRefused(f"{where}: {error}")
    translated = reach_error(error, "the stream protocol", host, port)
    if isinstance(error, ConnectionRefusedError):
        return BrokerUnavailable(f"{translated} {_ENABLE}")
    return translated if isinstance(translated, TlsRefused) or isinstance(error, OSError | ReadTimeout) else error


class Attach:
    """A subscription for a few chunks, and the chunks that it received. Its methods never wait; see `until`.

    The broker handles a connection's commands in order. So after a Subscribe or Credit, the answer to the next command
    is a barrier: all granted chunks that exist have arrived by then. `once` sends Unsubscribe as that command;
    `continuable` sends an empty Metadata, which costs the broker nothing. So a query for the chunk at an offset takes
    one round trip without a timeout, and many can be in flight. But a missing chunk does not prove that no message
    exists: see `_leaders`.
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
        self.last_offset: int | None = None
        self.chunks_received = 0
        self.is_at_barrier = self.is_done = False
        session.send(frames.subscribe(self.subscribed, self.subscription, stream, start, chunks))

    @classmethod
    def once(cls, connection: SocketConnection, stream: str, start: StartSpec, chunks: int = 1) -> "Attach":
        """Return an attach that requests at most `chunks` chunks from a start on, and then unsubscribes."""
        attach = cls(connection, stream, start, chunks)
        connection.session.unsubscribe(attach.subscription, attach.barrier)
        attach.is_done = True
        return attach

    @classmethod
    def continuable(cls, connection: SocketConnection, stream: str, start: StartSpec, chunks: int) -> "Attach":
        """Return an attach that keeps its subscription at the barrier, until `request_more` or `end`."""
        # RabbitMQ 4 acts on a Credit only once half of the first credit is available again. So the first credit is 1;
        # with more, chunks would arrive after the barrier.
        attach = cls(connection, stream, start)
        if chunks > 1:
            attach.request_more(chunks - 1)
        else:
            connection.session.send(frames.metadata(attach.barrier, []))
        return attach

    def request_more(self, chunks: int) -> None:
        """Request more chunks."""
        self.barrier = self._session.next_correlation()
        self.granted += chunks
        self.is_at_barrier = False
        self._session.send(frames.credit(self.subscription, chunks) + frames.metadata(self.barrier, []))

    def end(self) -> None:
        """Unsubscribe. Chunks that still arrive are dropped."""
        if not self.is_done:
            self.is_done = True
            self._session.unsubscribe(self.subscription)

    def take(self, event: Event) -> None:
        """Handle one event. Events of other subscriptions are ignored."""
        if type(event) is Chunk:
            if event.subscription == self.subscription:
                self.chunks.append(event)
        elif type(event) is Answer:
            if event.correlation == self.subscribed:
                self.code = event.code
            elif event.correlation == self.barrier:
                self.is_at_barrier, self.answer = True, event.body
        elif type(event) is StreamMoved and event.stream == self.stream:
            raise stream_moved(self.stream)
        elif type(event) is Damaged and event.subscription == self.subscription:
            raise event.error

    def check(self) -> None:
        """Raise the error if the broker refused the subscription."""
        if self.code != Code.OK:
            raise refusal(self.stream, self.code)


def until(connection: SocketConnection, *attaches: Attach) -> None:
    """Wait until all attaches are at their barriers: all existing chunks that they requested have arrived."""
    for awaited in attaches:
        while not awaited.is_at_barrier:
            for event in connection.exchange():
                for attach in attaches:
                    attach.take(event)
