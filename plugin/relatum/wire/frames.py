"""Frames of the RabbitMQ stream protocol: requests are encoded, answers decoded, no I/O.

A frame is `size uint32 | key uint16 | version uint16 | rest`. For any bytes, decoding raises no other error than
`ProtocolError`.

Source: PROTOCOL.adoc of RabbitMQ's rabbitmq_stream plugin.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, NamedTuple

from relatum.errors import InvalidInput, ProtocolError


class Command(IntEnum):
    """Keys of the protocol's commands; an answer's key has bit 15 set."""

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
"""Bit in the key of an answer; answers to Route and Partitions of RabbitMQ 3.10 lack it."""

FRAME_BYTES_MAX: Final = 1 << 30
"""The most bytes of a frame. A chunk may exceed the tuned frame size, which limits only clients."""

HANDSHAKE_FRAME_BYTES_MAX: Final = 1 << 20
"""The most bytes of a frame before the connection is open: the protocol's default frame size."""

PUBLISH_BYTES: Final = 4 + 2 + 2 + 1 + 4
"""Bytes of a Publish frame without its entries: size, key, version, publisher, count."""

_ENTRY: Final = struct.Struct(">QI")
ENTRY_BYTES: Final = _ENTRY.size
"""Bytes of an entry without its message: publishing id and length."""

_HEAD: Final = struct.Struct(">IHH")
_HEAD_CORRELATED: Final = struct.Struct(">IHHI")
_U16: Final = struct.Struct(">H")
_U32: Final = struct.Struct(">I")
_COUNT: Final = struct.Struct(">BI")
_SEQUENCE: Final = struct.Struct(">Q")
_REFUSAL: Final = struct.Struct(">QH")


class Start(IntEnum):
    """Where a subscription begins. FIRST, LAST and NEXT take no value, OFFSET an offset, TIMESTAMP milliseconds."""

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
    """A node as advertised by Metadata."""

    host: str
    port: int


@dataclass(frozen=True, slots=True)
class StreamPlaces:
    """The nodes of a stream: code `OK` with a leader (None while there is none) and replicas, or an error code."""

    stream: str
    code: int
    leader: NodeAddress | None
    replicas: tuple[NodeAddress, ...]


class Confirmed(NamedTuple):
    """The broker has stored messages of a publisher, now or before."""

    publisher: int
    publishing_ids: tuple[int, ...]


class Refused(NamedTuple):
    """The broker has not stored messages of a publisher: (publishing id, code) for each message."""

    publisher: int
    refusals: tuple[tuple[int, int], ...]


class Cursor:
    """Decodes the protocol's types from a frame; every read beyond its end raises `ProtocolError`."""

    __slots__ = ("_data", "_position")

    def __init__(self, data: bytes, position: int = 0) -> None:
        self._data = data
        self._position = position

    def unpack(self, layout: struct.Struct) -> tuple[int, ...]:
        try:
            values = layout.unpack_from(self._data, self._position)
        except struct.error as error:
            raise ProtocolError("A frame of the stream protocol is truncated.") from error
        self._position += layout.size
        return values

    def uint16(self) -> int:
        return self.unpack(_U16)[0]

    def uint32(self) -> int:
        return self.unpack(_U32)[0]

    def count(self, bytes_each: int) -> int:
        """Read the length of an array whose elements take at least `bytes_each` bytes; -1 (none) counts as 0."""
        count = self.uint32()
        if count == 0xFFFFFFFF:
            return 0
        if count * bytes_each > len(self._data) - self._position:
            raise ProtocolError(f"An array of the stream protocol claims {count} elements, more than fit its frame.")
        return count

    def take(self, length: int) -> bytes:
        end = self._position + length
        if end > len(self._data):
            raise ProtocolError("A string of the stream protocol is longer than its frame.")
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
    """Encode a string with its length; over 32,767 bytes or with a lone surrogate it is invalid."""
    try:
        encoded = value.encode()
    except UnicodeEncodeError:
        raise InvalidInput(f"The name {ascii(value)[:80]} contains a lone surrogate.") from None
    if len(encoded) > 0x7FFF:
        raise ProtocolError(f"A name of {len(encoded)} bytes is too long for the stream protocol.")
    return _U16.pack(len(encoded)) + encoded


def frame(command: int, body: bytes = b"") -> bytes:
    """Encode a frame without a correlation: Credit, Heartbeat, Tune."""
    return _HEAD.pack(4 + len(body), command, 1) + body


def request(command: int, correlation: int, body: bytes = b"") -> bytes:
    """Encode a frame that the peer answers with the same correlation."""
    return _HEAD_CORRELATED.pack(8 + len(body), command, 1, correlation) + body


def about(correlation: int, command: int, *names: str) -> bytes:
    """Encode a request that carries only names: Open, Route, Partitions, StreamStats; SaslHandshake carries none."""
    return request(command, correlation, b"".join(map(string, names)))


def answer(command: int, correlation: int, code: int) -> bytes:
    """Encode our answer to the server's Close."""
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
    """Declare publisher 0 to 255 of this connection; the broker drops what its reference has published before."""
    return request(Command.DECLARE_PUBLISHER, correlation, bytes((publisher,)) + string(reference) + string(stream))


def query_publisher_sequence(correlation: int, reference: str, stream: str) -> bytes:
    """Encode a query for the last publishing id of a reference in a stream."""
    return request(Command.QUERY_PUBLISHER_SEQUENCE, correlation, string(reference) + string(stream))


def entry(publishing_id: int, message: bytes) -> bytes:
    """Encode a message with its publishing id, for `publish`."""
    return _ENTRY.pack(publishing_id, len(message)) + message


def publish(publisher: int, entries: Sequence[bytes]) -> bytes:
    """Publish entries in order."""
    return frame(Command.PUBLISH, _COUNT.pack(publisher, len(entries)) + b"".join(entries))


# --- decoding ---------------------------------------------------------------------------------------------


def decode_strings(body: bytes) -> list[str]:
    """Decode an array of strings: mechanisms, streams of a route, partitions."""
    cursor = Cursor(body)
    return [cursor.string() for _ in range(cursor.count(2))]


def decode_table(body: bytes) -> dict[str, str]:
    """Decode a map of strings: peer properties, connection properties."""
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
    """Decode statistics of a stream by name; the names depend on the broker's version."""
    cursor = Cursor(body)
    signed = struct.Struct(">q")
    return {cursor.string(): cursor.unpack(signed)[0] for _ in range(cursor.count(10))}


def decode_sequence(body: bytes) -> int:
    """Decode the last publishing id in the answer to QueryPublisherSequence; 0 if there is none."""
    return Cursor(body).unpack(_SEQUENCE)[0]


def decode_outcome(data: bytes) -> Confirmed | Refused:
    """Decode a PublishConfirm or PublishError frame (with key and version, without the size)."""
    key = int.from_bytes(data[:2], "big")
    publisher, count = Cursor(data, 4).unpack(_COUNT)
    start = 4 + _COUNT.size
    each = _SEQUENCE.size if key == Command.PUBLISH_CONFIRM else _REFUSAL.size
    if len(data) - start < count * each:
        raise ProtocolError("A confirm of the stream protocol is truncated.")
    end = start + count * each
    if key == Command.PUBLISH_CONFIRM:
        return Confirmed(publisher, struct.unpack_from(f">{count}Q", data, start))
    return Refused(publisher, tuple(_REFUSAL.iter_unpack(data[start:end])))
