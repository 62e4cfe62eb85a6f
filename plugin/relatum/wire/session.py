"""A stream protocol connection as a state machine: received bytes become events and bytes to send. No I/O.

The session answers the server's Tune and Close, ignores its heartbeats, numbers requests, and splits received bytes
into frames in linear time. Its owner logs in, sends what `take_outgoing()` returns, and passes bytes to `receive()`.
"""

from typing import Final, NamedTuple

from relatum.errors import (
    AccessRefused,
    BrokerUnavailable,
    ChunkCorrupt,
    ConfigurationError,
    ConnectionLost,
    ProtocolError,
)
from relatum.wire import frames
from relatum.wire.chunk import Chunk, decode_deliver
from relatum.wire.frames import Code, Command, Confirmed, NodeAddress, Refused

SUBSCRIPTIONS: Final = 256
"""Number of subscription ids of one connection: an id is one byte."""

ATTACHES_MAX: Final = 500
"""Subscriptions after which a connection to a broker that leaks files is replaced. A new one costs as much as a few."""

FILES_CLOSED_SINCE: Final = (3, 12)
"""First version in which Unsubscribe certainly closes the segment file. RabbitMQ 3.10.8 keeps one file open for each
subscription until the connection ends; at its limit of open files the node fails. Source: rabbitmq-server issue 6317,
fixed in patch releases of 3.10 and 3.11 after November 2022. They are treated as leaking, too, which costs little."""

_MAY_LACK_RESPONSE_BIT: Final = (Command.ROUTE, Command.PARTITIONS)
_OUTCOMES: Final = (Command.PUBLISH_CONFIRM, Command.PUBLISH_ERROR)


class AnotherProtocol(ConfigurationError):
    """The server does not speak the stream protocol. No credentials were sent."""


class Answer(NamedTuple):
    """The server's answer to the request with the same correlation id. `body` has the bytes after the code."""

    correlation: int
    code: int
    body: bytes


class StreamMoved(NamedTuple):
    """The server ended all subscriptions to a stream, which was moved or deleted."""

    stream: str


class CreditRefused(NamedTuple):
    """The server refused credit: it has no subscription of this id, or has ended it."""

    subscription: int


class Damaged(NamedTuple):
    """A damaged chunk arrived for a subscription. Others share the connection, and continue."""

    subscription: int
    error: ChunkCorrupt


Event = Answer | Chunk | StreamMoved | CreditRefused | Confirmed | Refused | Damaged


class StreamSession:
    """The protocol state of one connection, without socket and clock. Not thread-safe.

    The server may lower `heartbeat_s` and limits sent frames to `send_bytes_max` (0: no limit). `is_tuned` becomes True
    with the server's Tune, after authentication. The owner sets `is_open` after the login; Close resets it.
    """

    def __init__(self, heartbeat_s: int = 0) -> None:
        self._buffer = bytearray()
        self._outgoing = bytearray()
        self._correlation = 0
        self._subscriptions: set[int] = set()
        self._unsubscribing: dict[int, int] = {}
        self._attaches = 0
        self.server_properties: dict[str, str] = {}
        self.connection_properties: dict[str, str] = {}
        self.heartbeat_s = heartbeat_s
        self.send_bytes_max = frames.HANDSHAKE_FRAME_BYTES_MAX
        self.is_tuned = self.is_open = False

    def take_outgoing(self) -> bytes:
        """Return the pending bytes to send, and clear them."""
        outgoing = bytes(self._outgoing)
        self._outgoing.clear()
        return outgoing

    def send(self, frame: bytes) -> None:
        """Append an encoded frame to the pending bytes."""
        self._outgoing += frame

    def next_correlation(self) -> int:
        """Return a correlation id for the next request."""
        self._correlation = (self._correlation + 1) & 0x7FFFFFFF
        return self._correlation

    def take_subscription(self) -> int:
        """Return the lowest free subscription id. It becomes free again with the broker's answer to `unsubscribe`.

        It is the lowest, because RabbitMQ 3.10.8 keeps a counter for each used id of a connection until it restarts.
        """
        for number in range(SUBSCRIPTIONS):
            if number not in self._subscriptions:
                self._subscriptions.add(number)
                self._attaches += 1
                return number
        raise BrokerUnavailable(f"All {SUBSCRIPTIONS} subscriptions of a connection are in use.")

    @property
    def subscription_count(self) -> int:
        """The number of subscription ids in use, including those whose Unsubscribe is not answered yet."""
        return len(self._subscriptions)

    @property
    def attaches_left(self) -> int:
        """How many more subscriptions are allowed before the broker has too many files open for the connection."""
        return ATTACHES_MAX - self._attaches if self.is_older_than(FILES_CLOSED_SINCE) else SUBSCRIPTIONS

    @property
    def is_used_up(self) -> bool:
        """Whether no subscriptions are left, so that the connection should be replaced."""
        return self._attaches >= ATTACHES_MAX and self.attaches_left <= 0

    def is_older_than(self, release: tuple[int, ...]) -> bool:
        """Whether the broker is older than a release. A version that cannot be parsed counts as newer."""
        parts = self.server_properties.get("version", "").split(".")[: len(release)]
        return all(part.isdecimal() for part in parts) and tuple(map(int, parts)) < release

    @property
    def own_node(self) -> NodeAddress:
        """The node of this connection, as it advertises itself."""
        properties = self.connection_properties
        port = properties.get("advertised_port", "")
        return NodeAddress(properties.get("advertised_host", ""), int(port) if port.isdecimal() else 0)

    def unsubscribe(self, number: int, correlation: int | None = None) -> None:
        """End a subscription. Chunks in flight for its id still arrive, but before the answer."""
        correlation = self.next_correlation() if correlation is None else correlation
        self._unsubscribing[correlation] = number
        self.send(frames.unsubscribe(correlation, number))

    def receive(self, data: bytes | memoryview) -> list[Event]:
        """Return the events in the received bytes, in order. An incomplete frame is kept for the next call.

        Raises `ProtocolError` for invalid frames, `AnotherProtocol` if the first bytes are no frame, and, if the server
        closed the connection, `AccessRefused` (of the virtual host) or `ConnectionLost`.
        """
        buffer = self._buffer
        buffer += data
        events: list[Event] = []
        position, available = 0, len(buffer)
        size_max = frames.FRAME_BYTES_MAX if self.is_open else frames.HANDSHAKE_FRAME_BYTES_MAX
        with memoryview(buffer) as view:
            while available - position >= 4:
                size = int.from_bytes(view[position : position + 4])
                if not 4 <= size <= size_max:
                    if not self.server_properties:
                        raise AnotherProtocol("The first bytes of the answer are not a frame of the stream protocol.")
                    raise ProtocolError(f"A frame of the stream protocol claims {size} bytes, not 4 to {size_max}.")
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
        key = int.from_bytes(frame[:2])
        if key == Command.DELIVER:
            try:
                return decode_deliver(frame)
            except ChunkCorrupt as error:
                return Damaged(frame[4], error)
        if key & frames.RESPONSE_BIT or key in _MAY_LACK_RESPONSE_BIT:
            return self._answer(key & ~frames.RESPONSE_BIT, frame)
        if key in _OUTCOMES:
            return frames.decode_outcome(frame)
        return self._command(key, frame)

    def _answer(self, key: int, frame: bytes) -> Event | None:
        cursor = frames.Cursor(frame, 4)
        if key == Command.CREDIT:
            return CreditRefused(frames.Cursor(frame, 6).take(1)[0])
        if key == Command.METADATA:
            return Answer(cursor.uint32(), Code.OK, cursor.rest())
        correlation, code = cursor.uint32(), cursor.uint16()
        if correlation in self._unsubscribing:
            self._subscriptions.discard(self._unsubscribing.pop(correlation))
        return Answer(correlation, code, cursor.rest())

    def _command(self, key: int, frame: bytes) -> Event | None:
        """Handle a server's command: answer Tune; answer Close, then raise; ignore most others."""
        cursor = frames.Cursor(frame, 4)
        if key == Command.METADATA_UPDATE:
            return StreamMoved(frames.Cursor(frame, 6).string())
        if key == Command.TUNE:
            frame_bytes_max, heartbeat_s = cursor.uint32(), cursor.uint32()
            self.heartbeat_s = min(self.heartbeat_s, heartbeat_s or self.heartbeat_s)
            self.send_bytes_max = frame_bytes_max
            self.send(frames.tune(frame_bytes_max, self.heartbeat_s))
            self.is_tuned = True
        elif key == Command.CLOSE:
            correlation, code, reason = cursor.uint32(), cursor.uint16(), cursor.string()
            self.send(frames.answer(Command.CLOSE, correlation, Code.OK))
            self.is_open = False
            if code == Code.VHOST_ACCESS_FAILURE:
                raise AccessRefused("The virtual host does not exist, or this user may not use it.")
            reason = reason or "it gave no reason"
            raise ConnectionLost(f"The broker closed the stream connection: {reason} ({code_name(code)}).")
        return None

    def send_close(self) -> None:
        """Append Close to the pending bytes. The caller need not wait for the answer."""
        if self.is_open:
            self.send(frames.close(self.next_correlation()))
            self.is_open = False


def code_name(code: int) -> str:
    """Return a response code in words, for error messages."""
    try:
        return Code(code).name.lower().replace("_", " ")
    except ValueError:
        return f"code {code}"
