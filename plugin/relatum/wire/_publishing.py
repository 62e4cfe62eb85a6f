"""Publishing by the stream protocol: its frames encoded, its confirms decoded. No I/O.

Source: PROTOCOL.adoc of RabbitMQ's rabbitmq_stream plugin (DeclarePublisher, Publish, PublishConfirm, PublishError,
QueryPublisherSequence).
"""

import struct
from collections.abc import Sequence
from typing import Final, NamedTuple

from relatum.errors import ProtocolError
from relatum.wire._frames import Command, Cursor, frame, request, string

PUBLISH_BYTES: Final = 4 + 2 + 2 + 1 + 4
"""Bytes of a Publish frame beside its entries: size, key, version, publisher, count."""

_ENTRY: Final = struct.Struct(">QI")
ENTRY_BYTES: Final = _ENTRY.size
"""Bytes of an entry beside its message: publishing id and length."""

_COUNT: Final = struct.Struct(">BI")
_SEQUENCE: Final = struct.Struct(">Q")
_REFUSAL: Final = struct.Struct(">QH")


class Confirmed(NamedTuple):
    """The broker has stored messages of a publisher, or had stored them before."""

    publisher: int
    publishing_ids: tuple[int, ...]


class Refused(NamedTuple):
    """The broker did not store messages of a publisher: (publishing id, code) of each."""

    publisher: int
    refusals: tuple[tuple[int, int], ...]


def declare_publisher(correlation: int, publisher: int, reference: str, stream: str) -> bytes:
    """Declares publisher 0 to 255 of this connection; the broker drops what a reference has published before."""
    return request(Command.DECLARE_PUBLISHER, correlation, bytes((publisher,)) + string(reference) + string(stream))


def query_publisher_sequence(correlation: int, reference: str, stream: str) -> bytes:
    """Asks for the last publishing id of a reference in a stream."""
    return request(Command.QUERY_PUBLISHER_SEQUENCE, correlation, string(reference) + string(stream))


def entry(publishing_id: int, message: bytes) -> bytes:
    """A message with its publishing id, as `publish` takes it."""
    return _ENTRY.pack(publishing_id, len(message)) + message


def publish(publisher: int, entries: Sequence[bytes]) -> bytes:
    """Publishes entries in order."""
    return frame(Command.PUBLISH, _COUNT.pack(publisher, len(entries)) + b"".join(entries))


def decode_sequence(body: bytes) -> int:
    """The last publishing id in the answer to QueryPublisherSequence; 0 where there is none."""
    return Cursor(body).unpack(_SEQUENCE)[0]


def decode_outcome(data: bytes) -> Confirmed | Refused:
    """A PublishConfirm or PublishError frame (key and version included, the size not)."""
    key = int.from_bytes(data[:2], "big")
    publisher, count = Cursor(data, 4).unpack(_COUNT)
    start = 4 + _COUNT.size
    each = _SEQUENCE.size if key == Command.PUBLISH_CONFIRM else _REFUSAL.size
    if len(data) - start < count * each:
        raise ProtocolError("A confirm of the stream protocol ends too early.")
    end = start + count * each
    if key == Command.PUBLISH_CONFIRM:
        return Confirmed(publisher, struct.unpack_from(f">{count}Q", data, start))
    return Refused(publisher, tuple(_REFUSAL.iter_unpack(data[start:end])))
