"""A connection of the stream protocol as a state machine: bytes in, events out, bytes to send. No I/O.

The session logs in, answers the server's Tune and Close, consumes its heartbeats, numbers requests, and cuts frames out
of the received bytes in linear time. Its owner sends `take_outgoing()` and feeds `receive()`.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Literal, NamedTuple, TypeAlias

from relatum.errors import (
    AccessRefused,
    BrokerUnavailable,
    ChunkCorrupt,
    ConfigurationError,
    ConnectionLost,
    ProtocolError,
)
from relatum.wire import _frames as frames
from relatum.wire._chunk import Chunk, decode_deliver
from relatum.wire._frames import Code, Command, Confirmed, Refused

CLIENT_PROPERTIES: Final = {"product": "Relatum", "platform": "Python", "connection_name": "relatum"}

EXTERNAL_SINCE: Final = (3, 12, 1)
"""The first version that is known to accept EXTERNAL by the stream protocol.

Before, a connection that asks for it ends with a crash report in the broker's log (seen with 3.10.8). The last versions
of 3.10 and 3.11 may accept it, and are not asked. Source: rabbitmq-server, pull request 8488.
"""

SUBSCRIPTIONS: Final = 256
"""Subscription ids of one connection: one byte."""

_SIZE: Final = struct.Struct(">I")
_KEYS: Final = struct.Struct(">HH")
_ANSWER: Final = struct.Struct(">HHIH")
_TUNE: Final = struct.Struct(">HHII")
_MAY_LACK_RESPONSE_BIT: Final = (Command.ROUTE, Command.PARTITIONS)
_OUTCOMES: Final = (Command.PUBLISH_CONFIRM, Command.PUBLISH_ERROR)


AuthMechanism: TypeAlias = Literal["PLAIN", "EXTERNAL"]
"""The SASL mechanism: a password, or the certificate of the TLS connection."""


class AnotherCluster(BrokerUnavailable):
    """Another cluster answers, or one that does not give its name; nothing of a login was sent."""


class AnotherProtocol(ConfigurationError):
    """The server does not speak the stream protocol; nothing of a login was sent."""


class MechanismNotTaken(ConfigurationError):
    """The server does not accept the mechanism by the stream protocol."""


@dataclass(frozen=True, slots=True)
class Login:
    """The login: its user, its target, and the options to request.

    Attributes:
        user: The user name.
        password: The password; never shown.
        vhost: The virtual host.
        mechanism: "PLAIN", or "EXTERNAL" for a client certificate.
        heartbeat_s: The requested interval in seconds; the smaller of this and the server's is used. 0: no heartbeats.
        cluster_name: User and password are sent only to the cluster of that name, which servers give before a login.
            None: any.
    """

    user: str
    password: str = field(repr=False)
    vhost: str = "/"
    mechanism: AuthMechanism = "PLAIN"
    heartbeat_s: int = 60
    cluster_name: str | None = None

    def sasl_response(self) -> bytes:
        """Return the response for SaslAuthenticate."""
        if self.mechanism == "EXTERNAL":
            return b""
        return f"\0{self.user}\0{self.password}".encode()


class Answer(NamedTuple):
    """The server's answer to the request with that correlation; `body` is what follows the code."""

    correlation: int
    code: int
    body: bytes


class StreamMoved(NamedTuple):
    """The server ended all subscriptions to a stream: it was moved or deleted."""

    stream: str
    code: int


class CreditRefused(NamedTuple):
    """The server has no such subscription, or no longer."""

    subscription: int
    code: int


class Damaged(NamedTuple):
    """A damaged chunk came for a subscription; an event only with `reports_damage`, else an error is raised."""

    subscription: int
    error: ChunkCorrupt


Event = Answer | Chunk | StreamMoved | CreditRefused | Confirmed | Refused | Damaged

Exchange: TypeAlias = Callable[[], list[Event]]
"""Sends pending bytes, waits for bytes, and returns their events, possibly none yet."""


class StreamSession:
    """The state of a connection. For one user at a time; it has no socket and reads no clock.

    Attributes:
        server_properties: The server's properties (`cluster_name`, `version`, ...), once connected.
        connection_properties: Its properties for the virtual host (`advertised_host`, `advertised_port`).
        heartbeat_s: The negotiated heartbeat interval in seconds; 0 means none.
        send_bytes_max: The most bytes of a frame to the server, as it demands; 0 means no limit.
        is_open: True between login and close.
        reports_damage: True reports a damaged chunk as `Damaged`, and goes on: other streams share the connection.
    """

    def __init__(self, login: Login) -> None:
        self._login = login
        self._buffer = bytearray()
        self._outgoing = bytearray()
        self._correlation = 0
        self._subscriptions: set[int] = set()
        self._ending: dict[int, int] = {}
        self._frame_bytes_max = frames.HANDSHAKE_FRAME_BYTES_MAX
        self._tuned = False
        self.server_properties: dict[str, str] = {}
        self.connection_properties: dict[str, str] = {}
        self.heartbeat_s = login.heartbeat_s
        self.send_bytes_max = frames.HANDSHAKE_FRAME_BYTES_MAX
        self.is_open = False
        self.reports_damage = False

    # --- bytes --------------------------------------------------------------------------------------------

    def take_outgoing(self) -> bytes:
        """Return the pending bytes to send, once."""
        outgoing = bytes(self._outgoing)
        self._outgoing.clear()
        return outgoing

    def send(self, frame: bytes) -> None:
        """Append an encoded frame to the bytes to send."""
        self._outgoing += frame

    def next_correlation(self) -> int:
        """Return a number for the next request."""
        self._correlation = (self._correlation + 1) & 0x7FFFFFFF
        return self._correlation

    def take_subscription(self) -> int:
        """Return the lowest free subscription id; it is free again when the broker has answered `unsubscribe`.

        Always the lowest: RabbitMQ keeps a counter for each id of each connection until it restarts (3.10.8).

        Raises:
            BrokerUnavailable: all are in use: the broker has not answered for a long time.
        """
        for number in range(SUBSCRIPTIONS):
            if number not in self._subscriptions:
                self._subscriptions.add(number)
                return number
        raise BrokerUnavailable(f"All {SUBSCRIPTIONS} subscriptions of a connection are in use.")

    @property
    def subscription_count(self) -> int:
        """The number of ids in use, including those that are ending."""
        return len(self._subscriptions)

    def unsubscribe(self, number: int, correlation: int | None = None) -> None:
        """End a subscription. The broker answers in order: chunks in flight for its id come before the answer."""
        correlation = self.next_correlation() if correlation is None else correlation
        self._ending[correlation] = number
        self.send(frames.unsubscribe(correlation, number))

    def receive(self, data: bytes | memoryview) -> list[Event]:
        """Return the events in the received bytes, in order; incomplete frames are kept.

        Raises:
            ProtocolError: The bytes are no frames, or invalid ones.
            ChunkCorrupt: A chunk is damaged.
            ConnectionLost: The server closed the connection; the message has its reason.
            AnotherProtocol: The server's first bytes are no frame.
        """
        buffer = self._buffer
        buffer += data
        events: list[Event] = []
        position, available = 0, len(buffer)
        with memoryview(buffer) as view:
            while available - position >= 4:
                (size,) = _SIZE.unpack_from(view, position)
                if not 4 <= size <= self._frame_bytes_max:
                    if not self.server_properties:
                        raise AnotherProtocol("The first bytes of the answer are no frame of the stream protocol.")
                    raise ProtocolError(f"A frame of the stream protocol claims {size} bytes.")
                end = position + 4 + size
                if end > available:
                    break
                event = self._event(bytes(view[position + 4 : end]))
                if event is not None:
                    events.append(event)
                position = end
        if position:
            del buffer[:position]
        return events

    def _event(self, frame: bytes) -> Event | None:
        key, _version = _KEYS.unpack_from(frame)
        if key == Command.DELIVER:
            return self._chunk(frame)
        if key & frames.RESPONSE_BIT or key in _MAY_LACK_RESPONSE_BIT:
            return self._answer(key & ~frames.RESPONSE_BIT, frame)
        if key in _OUTCOMES:
            return frames.decode_outcome(frame)
        self._command(key, frame)
        if key == Command.METADATA_UPDATE:
            cursor = frames.Cursor(frame, 4)
            code = cursor.uint16()
            return StreamMoved(cursor.string(), code)
        return None

    def _chunk(self, frame: bytes) -> Event:
        try:
            return decode_deliver(frame)
        except ChunkCorrupt as error:
            if not self.reports_damage:
                raise
            return Damaged(frame[4], error)

    def _answer(self, key: int, frame: bytes) -> Event | None:
        if key == Command.CREDIT:
            cursor = frames.Cursor(frame, 4)
            code = cursor.uint16()
            return CreditRefused(cursor.take(1)[0], code)
        if key == Command.METADATA:
            cursor = frames.Cursor(frame, 4)
            return Answer(cursor.uint32(), Code.OK, cursor.rest())
        if len(frame) < _ANSWER.size:
            raise ProtocolError("An answer of the stream protocol ends too early.")
        _, _, correlation, code = _ANSWER.unpack_from(frame)
        if correlation in self._ending:
            self._subscriptions.discard(self._ending.pop(correlation))
        return Answer(correlation, code, frame[_ANSWER.size :])

    def _command(self, key: int, frame: bytes) -> None:
        """Handle a request of the server: answer Tune, answer Close and raise, ignore heartbeats."""
        if key == Command.TUNE:
            if len(frame) < _TUNE.size:
                raise ProtocolError("A Tune frame ends too early.")
            _, _, frame_bytes_max, heartbeat_s = _TUNE.unpack_from(frame)
            self.heartbeat_s = min(self._login.heartbeat_s, heartbeat_s or self._login.heartbeat_s)
            self.send_bytes_max = frame_bytes_max
            self.send(frames.tune(frame_bytes_max, self.heartbeat_s))
            self._tuned = True
        elif key == Command.CLOSE:
            cursor = frames.Cursor(frame, 4)
            correlation, code, reason = cursor.uint32(), cursor.uint16(), cursor.string()
            self.send(frames.answer(Command.CLOSE, correlation, Code.OK))
            self.is_open = False
            if code == Code.VHOST_ACCESS_FAILURE:
                raise _vhost_refused(self._login)
            raise ConnectionLost(f"The broker closed the stream connection: {reason or 'no reason given'} ({code}).")

    # --- login --------------------------------------------------------------------------------------------

    def log_in(self, exchange: Exchange) -> None:
        """Log in.

        Raises:
            AccessRefused: User, password, virtual host or mechanism are refused.
            MechanismNotTaken: The server does not offer the mechanism.
            ProtocolError: The peer does not speak the stream protocol.
            AnotherCluster: It is another cluster than expected; nothing of the login was sent.
            AnotherProtocol: The peer's first bytes are no frame; nothing of the login was sent.
        """
        properties = self.next_correlation()
        self.send(frames.peer_properties(properties, CLIENT_PROPERTIES))
        self.server_properties = frames.decode_table(_expect(self._answer_to(exchange, properties), "greets"))
        meant = self._login.cluster_name
        if meant is not None and self.server_properties.get("cluster_name") != meant:
            raise AnotherCluster(f"The server of the stream protocol there is not the cluster {meant!r}.")
        # One at a time: RabbitMQ (3.10 and 4.3) closes the connection if frames are sent ahead during the login.
        handshake = self.next_correlation()
        self.send(frames.about(handshake, Command.SASL_HANDSHAKE))
        offered = _expect(self._answer_to(exchange, handshake), "offers mechanisms")
        self._authenticate(exchange, frames.decode_strings(offered))
        while not self._tuned:
            exchange()
        opened = self.next_correlation()
        self.send(frames.about(opened, Command.OPEN, self._login.vhost))
        answer = self._answer_to(exchange, opened)
        if answer.code in (Code.VHOST_ACCESS_FAILURE, Code.ACCESS_REFUSED):
            raise _vhost_refused(self._login)
        self.connection_properties = frames.decode_table(_expect(answer, "opens the virtual host"))
        self._frame_bytes_max = frames.FRAME_BYTES_MAX
        self.is_open = True

    def _authenticate(self, exchange: Exchange, offered: list[str]) -> None:
        login = self._login
        if login.mechanism not in offered:
            message = f"The broker does not offer {login.mechanism}, only {', '.join(offered)}."
            raise MechanismNotTaken(message)
        version = self.server_properties.get("version", "")
        if login.mechanism == "EXTERNAL" and is_before(version, EXTERNAL_SINCE):
            raise MechanismNotTaken(
                f"RabbitMQ {version} cannot take EXTERNAL by the stream protocol: update it to 3.12.1 or later, or log "
                "in by PLAIN."
            )
        correlation = self.next_correlation()
        self.send(frames.sasl_authenticate(correlation, login.mechanism, login.sasl_response()))
        answer = self._answer_to(exchange, correlation)
        if answer.code == Code.AUTHENTICATION_FAILURE_LOOPBACK:
            raise AccessRefused(f"The user {login.user!r} may connect to the broker from its own machine only.")
        if answer.code in (Code.AUTHENTICATION_FAILURE, Code.SASL_ERROR, Code.SASL_CHALLENGE):
            raise AccessRefused(
                f"The broker refuses the user {login.user!r} (virtual host {login.vhost!r}): the name, the password or "
                "the certificate is wrong; RabbitMQ does not say which."
            )
        _expect(answer, "logs in")

    def answers_to(self, exchange: Exchange, *correlations: int) -> list[Answer]:
        """Wait for answers, and drop other events. Only for use while nothing is subscribed."""
        answers: dict[int, Answer] = {}
        while len(answers) < len(correlations):
            for event in exchange():
                if type(event) is Answer and event.correlation in correlations:
                    answers[event.correlation] = event
        return [answers[correlation] for correlation in correlations]

    def _answer_to(self, exchange: Exchange, correlation: int) -> Answer:
        return self.answers_to(exchange, correlation)[0]

    def leave(self) -> None:
        """Append Close to the bytes to send; its answer need not be waited for."""
        if self.is_open:
            self.send(frames.close(self.next_correlation()))
            self.is_open = False


def _expect(answer: Answer, what: str) -> bytes:
    """Return the body of an answer that must be OK, or raise its error."""
    if answer.code == Code.OK:
        return answer.body
    if answer.code == Code.ACCESS_REFUSED:
        raise AccessRefused("The broker refuses this user.")
    raise BrokerUnavailable(f"The broker answered {code_name(answer.code)} where a connection {what}.")


def is_before(version: str, release: tuple[int, ...]) -> bool:
    """Whether a broker is older than a release; one whose version cannot be parsed counts as new."""
    parts = version.split(".")[: len(release)]
    return all(part.isdecimal() for part in parts) and tuple(map(int, parts)) < release


def _vhost_refused(login: Login) -> AccessRefused:
    return AccessRefused(f"The user {login.user!r} may not use the virtual host {login.vhost!r}, or there is none.")


def code_name(code: int) -> str:
    """Return a code of the protocol in words, for messages."""
    try:
        return Code(code).name.lower().replace("_", " ")
    except ValueError:
        return f"code {code}"
