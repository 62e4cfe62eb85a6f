"""One connection of the stream protocol as a state machine: bytes in, events out, bytes to send. No I/O.

The session logs in, answers the server's Tune and Close, swallows its heartbeats, numbers requests, and cuts frames
out of what arrives in time linear in the bytes. Who holds it sends `take_outgoing()` and feeds `receive()`.
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
"""The first version that is known to take EXTERNAL by the stream protocol.

Before, a connection that asks for it ends with a crash report in the broker's log (seen with 3.10.8); the last ones of
3.10 and 3.11 may take it, and are not asked. Source: rabbitmq-server, pull request 8488.
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
"""How to log in: with a password, or with the certificate of the TLS connection."""


class AnotherCluster(BrokerUnavailable):
    """Another cluster answers, or one that does not say its name; nothing of a login was sent."""


class AnotherProtocol(ConfigurationError):
    """The server does not speak the stream protocol; nothing of a login was sent."""


class MechanismNotTaken(ConfigurationError):
    """The server does not take that mechanism by the stream protocol."""


@dataclass(frozen=True, slots=True)
class Login:
    """Who logs in, where to, and what is asked for.

    Attributes:
        user: User name.
        password: Password; never shown.
        vhost: Virtual host.
        mechanism: "PLAIN", or "EXTERNAL" for a client certificate.
        heartbeat_s: Seconds asked for; the smaller of this and the server's is used. 0 switches heartbeats off.
        cluster_name: User and password are sent only to the cluster of that name, which servers say before a login.
            None: any.
    """

    user: str
    password: str = field(repr=False)
    vhost: str = "/"
    mechanism: AuthMechanism = "PLAIN"
    heartbeat_s: int = 60
    cluster_name: str | None = None

    def sasl_response(self) -> bytes:
        """What SaslAuthenticate carries."""
        if self.mechanism == "EXTERNAL":
            return b""
        return f"\0{self.user}\0{self.password}".encode()


class Answer(NamedTuple):
    """The server's answer to the request of that correlation; `body` is what follows the code."""

    correlation: int
    code: int
    body: bytes


class StreamMoved(NamedTuple):
    """The server ended all subscriptions to a stream: it moved, or was deleted."""

    stream: str
    code: int


class CreditRefused(NamedTuple):
    """The server has no such subscription (any more)."""

    subscription: int
    code: int


class Damaged(NamedTuple):
    """A chunk that is damaged came for a subscription; only where `reports_damage` asks for it, else that is raised."""

    subscription: int
    error: ChunkCorrupt


Event = Answer | Chunk | StreamMoved | CreditRefused | Confirmed | Refused | Damaged

Exchange: TypeAlias = Callable[[], list[Event]]
"""Sends what there is to send, and waits for bytes: the events that came of them, maybe none yet."""


class StreamSession:
    """A connection's state. One user at a time; it holds no socket and reads no clock.

    Attributes:
        server_properties: What the server said of itself (`cluster_name`, `version`, ...), once connected.
        connection_properties: What it said on opening the virtual host (`advertised_host`, `advertised_port`).
        heartbeat_s: The heartbeat agreed on, in seconds; 0 means none.
        send_bytes_max: Bytes a frame of ours may have, as the server said; 0 means no limit.
        is_open: True between login and close.
        reports_damage: True gives a damaged chunk as `Damaged`, and goes on: other streams share the connection.
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
        """The bytes to send now; they are handed out once."""
        outgoing = bytes(self._outgoing)
        self._outgoing.clear()
        return outgoing

    def send(self, frame: bytes) -> None:
        """Put an encoded frame among the bytes to send."""
        self._outgoing += frame

    def next_correlation(self) -> int:
        """A number for the next request."""
        self._correlation = (self._correlation + 1) & 0x7FFFFFFF
        return self._correlation

    def take_subscription(self) -> int:
        """The least id that no subscription has; it is free again when the broker has answered `unsubscribe`.

        Always the least: RabbitMQ keeps a counter for each id of each connection until it restarts (3.10.8).

        Raises:
            BrokerUnavailable: all are taken: the broker has not answered for a long time.
        """
        for number in range(SUBSCRIPTIONS):
            if number not in self._subscriptions:
                self._subscriptions.add(number)
                return number
        raise BrokerUnavailable(f"All {SUBSCRIPTIONS} subscriptions of a connection are in use.")

    @property
    def subscription_count(self) -> int:
        """How many ids are taken: those that are ending, too."""
        return len(self._subscriptions)

    def unsubscribe(self, number: int, correlation: int | None = None) -> None:
        """End a subscription. The broker answers in order: what is still under way for its id comes before that."""
        correlation = self.next_correlation() if correlation is None else correlation
        self._ending[correlation] = number
        self.send(frames.unsubscribe(correlation, number))

    def receive(self, data: bytes | memoryview) -> list[Event]:
        """What the bytes that arrived amount to, in order; frames that are not complete yet are kept.

        Raises:
            ProtocolError: The bytes are no frames, or frames that make no sense.
            ChunkCorrupt: A chunk is damaged.
            ConnectionLost: The server closed the connection; its reason is in the message.
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
        """What the server asks of us: Tune is answered, Close too and then raised, heartbeats need nothing."""
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
            AnotherCluster: It is not the cluster that is meant; it was told nothing of the login.
            AnotherProtocol: The peer's first bytes are no frame; nothing of the login was sent.
        """
        properties = self.next_correlation()
        self.send(frames.peer_properties(properties, CLIENT_PROPERTIES))
        self.server_properties = frames.decode_table(_expect(self._answer_to(exchange, properties), "greets"))
        meant = self._login.cluster_name
        if meant is not None and self.server_properties.get("cluster_name") != meant:
            raise AnotherCluster(f"What answers the stream protocol there is not the cluster {meant!r}.")
        # One at a time: RabbitMQ (3.10 and 4.3 alike) hangs up on frames that are written ahead during the login.
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
        """Wait for answers; whatever else arrives meanwhile is dropped. For use while nothing is subscribed."""
        answers: dict[int, Answer] = {}
        while len(answers) < len(correlations):
            for event in exchange():
                if type(event) is Answer and event.correlation in correlations:
                    answers[event.correlation] = event
        return [answers[correlation] for correlation in correlations]

    def _answer_to(self, exchange: Exchange, correlation: int) -> Answer:
        return self.answers_to(exchange, correlation)[0]

    def leave(self) -> None:
        """Put Close among the bytes to send; the answer need not be waited for."""
        if self.is_open:
            self.send(frames.close(self.next_correlation()))
            self.is_open = False


def _expect(answer: Answer, what: str) -> bytes:
    """The body of an answer that must be OK, else the error it amounts to."""
    if answer.code == Code.OK:
        return answer.body
    if answer.code == Code.ACCESS_REFUSED:
        raise AccessRefused("The broker refuses this user.")
    raise BrokerUnavailable(f"The broker answered {code_name(answer.code)} where a connection {what}.")


def is_before(version: str, release: tuple[int, ...]) -> bool:
    """Whether a broker is older than a release; one whose version cannot be read counts as a new one."""
    parts = version.split(".")[: len(release)]
    return all(part.isdecimal() for part in parts) and tuple(map(int, parts)) < release


def _vhost_refused(login: Login) -> AccessRefused:
    return AccessRefused(f"The user {login.user!r} may not use the virtual host {login.vhost!r}, or there is none.")


def code_name(code: int) -> str:
    """A code of the protocol in words, for messages."""
    try:
        return Code(code).name.lower().replace("_", " ")
    except ValueError:
        return f"code {code}"
