"""Frames of the RabbitMQ stream protocol: encodes requests and decodes answers, without I/O.

A frame is `size uint32 | key uint16 | version uint16 | rest`. Decoding raises `ProtocolError` for invalid bytes, and no
other error.

Source: PROTOCOL.adoc of RabbitMQ's rabbitmq_stream plugin.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, NamedTuple

from relatum.errors import InvalidInput, ProtocolError


class Command(IntEnum):
    """The protocol's command keys. Bit 15 is set in the key of an answer."""

    DECLARE_PUBLISHER = 1
    PUBLISH = 2
    PUBLISH_CONFIRM = 3
    PUBLISH_ERROR = 4
    QUERY_PUBLISHER_SEQUENCE = 5
    SUBSCRIBE = 7
    DELIVER = 8
    CREDIT = 9
    UNSUBSCRIBE = 12
    CREATE = 13
    METADATA = 15
    METADATA_UPDATE = 16
    PEER_PROPERTIES = 17
    SASL_HANDSHAKE = 18
    SASL_AUTHENTICATE = 19
    TUNE = 20
    OPEN = 21
    CLOSE = 22
    HEARTBEAT = 23
    ROUTE = 24
    PARTITIONS = 25
    STREAM_STATS = 28


class Code(IntEnum):
    """Response codes in answers."""

    OK = 1
    STREAM_DOES_NOT_EXIST = 2
    SUBSCRIPTION_ID_EXISTS = 3
    SUBSCRIPTION_ID_DOES_NOT_EXIST = 4
    STREAM_EXISTS = 5
    STREAM_NOT_AVAILABLE = 6
    SASL_MECHANISM_NOT_SUPPORTED = 7
    AUTHENTICATION_FAILURE = 8
    SASL_ERROR = 9
    SASL_CHALLENGE = 10
    AUTHENTICATION_FAILURE_LOOPBACK = 11
    VHOST_ACCESS_FAILURE = 12
    UNKNOWN_FRAME = 13
    FRAME_TOO_LARGE = 14
    INTERNAL_ERROR = 15
    ACCESS_REFUSED = 16
    PRECONDITION_FAILED = 17
    PUBLISHER_DOES_NOT_EXIST = 18
    NO_OFFSET = 19


RESPONSE_BIT: Final = 0x8000
"""The bit that marks the key of an answer. RabbitMQ 3.10 omits it in its answers to Route and Partitions."""

FRAME_BYTES_MAX: Final = 1 << 30
"""Maximum bytes of a received frame. The broker's chunks may exceed the tuned frame size, which limits only clients."""

HANDSHAKE_FRAME_BYTES_MAX: Final = 1 << 20
"""Maximum bytes of a frame before the connection is open: the protocol's default frame size."""

PUBLISH_BYTES: Final = 4 + 2 + 2 + 1 + 4
"""Bytes of a Publish frame before its entries: size, key, version, publisher id, entry count."""

_ENTRY: Final = struct.Struct(">QI")
ENTRY_BYTES: Final = _ENTRY.size
"""Bytes of an entry before its message: publishing id and message length."""

_HEAD: Final = struct.Struct(">IHH")
_HEAD_CORRELATED: Final = struct.Struct(">IHHI")
_U16: Final = struct.Struct(">H")
_U32: Final = struct.Struct(">I")
_COUNT: Final = struct.Struct(">BI")
_REFUSAL: Final = struct.Struct(">QH")


class Start(IntEnum):
    """Where a subscription begins. OFFSET needs an offset, TIMESTAMP needs milliseconds; the others take no value."""

    FIRST = 1
    LAST = 2
    NEXT = 3
    OFFSET = 4
    TIMESTAMP = 5


class StartSpec(NamedTuple):
    """The start of a subscription as encoded in Subscribe."""

    kind: Start
    value: int = 0


FIRST: Final = StartSpec(Start.FIRST)
LAST: Final = StartSpec(Start.LAST)
NEXT: Final = StartSpec(Start.NEXT)


@dataclass(frozen=True, slots=True)
class NodeAddress:
    """The host and port that a node advertises in the answer to Metadata."""

    host: str
    port: int


@dataclass(frozen=True, slots=True)
class StreamPlaces:
    """The nodes of a stream. If `code` is not `OK`, the broker names none. `leader` is None during an election."""

    stream: str
    code: int
    leader: NodeAddress | None
    replicas: tuple[NodeAddress, ...]


class Confirmed(NamedTuple):
    """The broker has stored these messages of a publisher. Duplicates of stored messages are confirmed, too."""

    publisher: int
    publishing_ids: tuple[int, ...]


class Refused(NamedTuple):
    """The broker has refused messages of a publisher: (publishing id, response code) of each message."""

    publisher: int
    refusals: tuple[tuple[int, int], ...]


class Cursor:
    """Decodes the protocol's types from a frame. A read beyond the frame's end raises `ProtocolError`."""

    __slots__ = ("_data", "_position")

    def __init__(self, data: bytes, position: int = 0) -> None:
        self._data = data
        self._position = position

    def uint16(self) -> int:
        return int.from_bytes(self.take(2))

    def uint32(self) -> int:
        return int.from_bytes(self.take(4))

    def count(self, bytes_each: int) -> int:
        """Read the length of an array whose elements take at least `bytes_each` bytes. -1 (no array) counts as 0."""
        count = self.uint32()
        if count == 0xFFFFFFFF:
            return 0
        if count * bytes_each > len(self._data) - self._position:
            raise ProtocolError(f"An array of the stream protocol claims {count} elements, too many for its frame.")
        return count

    def take(self, length: int) -> bytes:
        end = self._position + length
        if end > len(self._data):
            raise ProtocolError("A frame of the stream protocol is truncated.")
        value = self._data[self._position : end]
        self._position = end
        return value

    def string(self) -> str:
        """Read a string; null counts as empty."""
        length = self.uint16()
        if length == 0xFFFF:
            return ""
        try:
            return self.take(length).decode()
        except UnicodeDecodeError as error:
            raise ProtocolError("A string of the stream protocol is not UTF-8.") from error

    def rest(self) -> bytes:
        return self._data[self._position :]


# --- encoding ---------------------------------------------------------------------------------------------


def string(value: str) -> bytes:
    """Encode a string with its length: 32,767 bytes at most (`ProtocolError`), no lone surrogate (`InvalidInput`)."""
    try:
        encoded = value.encode()
    except UnicodeEncodeError:
        raise InvalidInput(f"The name {ascii(value)[:80]} contains a lone surrogate.") from None
    if len(encoded) > 0x7FFF:
        raise ProtocolError(f"A name of {len(encoded)} bytes is too long for the stream protocol.")
    return _U16.pack(len(encoded)) + encoded


def frame(command: int, body: bytes = b"") -> bytes:
    """Encode a frame without a correlation id: Credit, Heartbeat, Tune, Publish."""
    return _HEAD.pack(4 + len(body), command, 1) + body


def request(command: int, correlation: int, body: bytes = b"") -> bytes:
    """Encode a frame that the peer answers with the same correlation id."""
    return _HEAD_CORRELATED.pack(8 + len(body), command, 1, correlation) + body


def named_request(correlation: int, command: int, *names: str) -> bytes:
    """Encode a request whose body is only names: Open, Route, Partitions, StreamStats, and SaslHandshake (no name)."""
    return request(command, correlation, b"".join(map(string, names)))


def answer(command: int, correlation: int, code: int) -> bytes:
    """Encode an answer without a body, such as to the server's Close."""
    return _HEAD_CORRELATED.pack(10, command | RESPONSE_BIT, 1, correlation) + _U16.pack(code)


def table(values: dict[str, str]) -> bytes:
    """Encode a map of strings."""
    return _U32.pack(len(values)) + b"".join(string(name) + string(value) for name, value in values.items())


def peer_properties(correlation: int, properties: dict[str, str]) -> bytes:
    return request(Command.PEER_PROPERTIES, correlation, table(properties))


def sasl_authenticate(correlation: int, mechanism: str, response: bytes) -> bytes:
    body = string(mechanism) + _U32.pack(len(response)) + response
    return request(Command.SASL_AUTHENTICATE, correlation, body)


def tune(frame_bytes_max: int, heartbeat_s: int) -> bytes:
    return frame(Command.TUNE, struct.pack(">II", frame_bytes_max, heartbeat_s))


def close(correlation: int) -> bytes:
    return request(Command.CLOSE, correlation, _U16.pack(Code.OK) + string("OK"))


def heartbeat() -> bytes:
    return frame(Command.HEARTBEAT)


def subscribe(correlation: int, subscription: int, stream: str, start: StartSpec, credit: int) -> bytes:
    kind, value = start
    if kind is Start.OFFSET:
        spec = struct.pack(">HQ", kind, value)
    elif kind is Start.TIMESTAMP:
        spec = struct.pack(">Hq", kind, value)
    else:
        spec = _U16.pack(kind)
    body = bytes((subscription,)) + string(stream) + spec + _U16.pack(credit)
    return request(Command.SUBSCRIBE, correlation, body)


def credit(subscription: int, chunks: int) -> bytes:
    return frame(Command.CREDIT, struct.pack(">BH", subscription, chunks))


def unsubscribe(correlation: int, subscription: int) -> bytes:
    return request(Command.UNSUBSCRIBE, correlation, bytes((subscription,)))


def create(correlation: int, stream: str, arguments: dict[str, str]) -> bytes:
    return request(Command.CREATE, correlation, string(stream) + table(arguments))


def metadata(correlation: int, streams: list[str]) -> bytes:
    body = _U32.pack(len(streams)) + b"".join(string(stream) for stream in streams)
    return request(Command.METADATA, correlation, body)


def declare_publisher(correlation: int, publisher: int, reference: str, stream: str) -> bytes:
    """Encode a declaration of publisher 0 to 255. The broker drops messages that its reference has published before."""
    return request(Command.DECLARE_PUBLISHER, correlation, bytes((publisher,)) + string(reference) + string(stream))


def query_publisher_sequence(correlation: int, reference: str, stream: str) -> bytes:
    """Encode a query for the last publishing id that a stream has of a reference."""
    return request(Command.QUERY_PUBLISHER_SEQUENCE, correlation, string(reference) + string(stream))


def entry(publishing_id: int, message: bytes) -> bytes:
    """Encode a message with its publishing id, for `publish`."""
    return _ENTRY.pack(publishing_id, len(message)) + message


def publish(publisher: int, entries: Sequence[bytes]) -> bytes:
    """Encode a Publish of entries in order."""
    return frame(Command.PUBLISH, _COUNT.pack(publisher, len(entries)) + b"".join(entries))


# --- decoding ---------------------------------------------------------------------------------------------


def decode_strings(body: bytes) -> list[str]:
    """Decode an array of strings: SASL mechanisms, the streams of a route, or partitions."""
    cursor = Cursor(body)
    return [cursor.string() for _ in range(cursor.count(2))]


def decode_table(body: bytes) -> dict[str, str]:
    """Decode a map of strings: peer properties or connection properties."""
    cursor = Cursor(body)
    return {cursor.string(): cursor.string() for _ in range(cursor.count(4))}


def decode_metadata(body: bytes) -> list[StreamPlaces]:
    """Decode the nodes of each requested stream."""
    cursor = Cursor(body)
    brokers = {cursor.uint16(): NodeAddress(cursor.string(), cursor.uint32()) for _ in range(cursor.count(8))}
    return [_decode_places(cursor, brokers) for _ in range(cursor.count(10))]


def _decode_places(cursor: Cursor, brokers: dict[int, NodeAddress]) -> StreamPlaces:
    stream, code, leader = cursor.string(), cursor.uint16(), cursor.uint16()
    replicas = [cursor.uint16() for _ in range(cursor.count(2))]
    known = tuple(brokers[reference] for reference in replicas if reference in brokers)
    return StreamPlaces(stream, code, brokers.get(leader), known)


def decode_stats(body: bytes) -> dict[str, int]:
    """Decode the statistics of a stream by name. The names depend on the broker's version."""
    cursor = Cursor(body)
    return {cursor.string(): int.from_bytes(cursor.take(8), signed=True) for _ in range(cursor.count(10))}


def decode_sequence(body: bytes) -> int:
    """Decode the last publishing id in the answer to QueryPublisherSequence. 0 means none."""
    return int.from_bytes(Cursor(body).take(8))


def decode_outcome(data: bytes) -> Confirmed | Refused:
    """Decode a PublishConfirm or PublishError frame, from its key on (without the size)."""
    cursor = Cursor(data, 4)
    publisher = cursor.take(1)[0]
    if int.from_bytes(data[:2]) == Command.PUBLISH_CONFIRM:
        count = cursor.count(8)
        return Confirmed(publisher, struct.unpack(f">{count}Q", cursor.take(8 * count)))
    refusals = cursor.take(_REFUSAL.size * cursor.count(_REFUSAL.size))
    return Refused(publisher, tuple(_REFUSAL.iter_unpack(refusals)))
