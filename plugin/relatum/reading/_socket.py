"""A blocking connection of the stream protocol: bytes around a session."""

import contextlib
import socket
import threading
import time
from typing import TypeVar

from relatum.errors import (
    AccessRefused,
    ConfigurationError,
    ConnectionLost,
    DataError,
    ReadTimeout,
)
from relatum.processes import after_fork
from relatum.reading._address import BrokerAddress
from relatum.reading._channels import GOODBYE_S, Channel
from relatum.reading._connecting import SILENCE_HEARTBEATS, not_opened
from relatum.reading._operations import StreamOperations
from relatum.steps import run
from relatum.waiting import has_passed
from relatum.wire import Event, Login, Steps, StreamSession, frames

_Result = TypeVar("_Result")


class SocketConnection:
    """One connection, for one thread at a time; `keep_alive` may be called from another.

    Attributes:
        session: The session it carries.
        operations: What can be asked over it.
        is_usable: False once it failed or timed out: what comes next on the socket is then unknown.
        is_reused: Others had it before, and it may have ended since.
    """

    def __init__(self, channel: Channel, login: Login) -> None:
        self._channel = channel
        self._sending = threading.Lock()
        self.session = StreamSession(login)
        self.operations = StreamOperations(self.session)
        self.is_usable = True
        self.is_reused = False
        self._sent_at = self._received_at = time.monotonic()
        after_fork(self, SocketConnection._leave)

    def _leave(self) -> None:
        """In a child: the connection is the parent's. Closing our descriptor of it sends nothing."""
        self._sending = threading.Lock()
        self.abandon()

    @classmethod
    def open(cls, address: BrokerAddress, login: Login, timeout_s: float) -> "SocketConnection":
        """Connect and log in.

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
        tls = address.login.tls_context() if address.stream_tls else None
        name = address.login.server_name_for(host)
        deadline = time.monotonic() + timeout_s
        channel: Channel | None = None
        try:
            channel = Channel.open(host, port, tls, name, timeout_s)
            connection = cls(channel, login)
            connection.run(connection.session.connecting(), deadline)
        except BaseException as error:
            if channel is not None:
                channel.abort()
            told = not_opened(error, host, port)
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
        return run(steps, lambda _: self.exchange(deadline))

    def exchange(self, deadline: float) -> list[Event]:
        """Send what is to be sent, then wait for bytes and return what they amount to (maybe nothing yet)."""
        left_s = deadline - time.monotonic()
        try:
            if left_s <= 0:
                raise TimeoutError  # noqa: TRY301 - it is one time-out, whichever of the three meets it
            self.flush(left_s)
            data = self._channel.receive(left_s)
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
                self.keep_alive()
                self.flush(heartbeat_s or idle_s)
            except OSError as error:
                # Also where it took too long: part of a frame may have left, and nothing may come behind that.
                raise self._lost(error) from error
            left_s = idle_at - time.monotonic()
            try:
                data = self._channel.receive(max(0.0, min(left_s, heartbeat_s / 2) if heartbeat_s else left_s))
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

    def _received(self, data: bytes | memoryview) -> list[Event]:
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
        """Send what the session has to send."""
        with self._sending:
            outgoing = self.session.take_outgoing()
            if outgoing:
                self._channel.send(outgoing, timeout_s)
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
            self.flush(GOODBYE_S)
        self.is_usable = self.session.is_open = False
        self._channel.close()

    def hand_over(self) -> socket.socket:
        """The socket, not blocking from now on, for whoever exchanges the session's bytes by a loop of its own."""
        return self._channel.hand_over()

    def abandon(self) -> None:
        """Close the socket without a word: what would come next on it belongs to nobody."""
        self.is_usable = self.session.is_open = False
        self._channel.abort()

    def close(self) -> None:
        """Say goodbye, best effort, and close."""
        if self.is_usable:
            self.session.leave()
            self._send_last_words()
