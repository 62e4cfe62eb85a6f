"""The place of a message, and the identities by which Relatum recognises streams and brokers."""

import zlib
from dataclasses import dataclass
from typing import Final, NamedTuple
from uuid import UUID

IDENTITY_STREAM: Final = "relatum.broker"
"""The stream of each virtual host whose first message holds the broker's id. See ADR 0043."""


class MessageId(NamedTuple):
    """The place of a message: the stream's name and the offset in it.

    It is not the AMQP property `message_id`, which Relatum always calls by that name.
    """

    stream: str
    offset: int

    def __str__(self) -> str:
        return f"{self.stream}@{self.offset}"


def fingerprint(message_id: str | None, body: bytes) -> int:
    """Return a 32-bit checksum of the AMQP property `message_id` and the body, the same over both protocols.

    Two messages may have the same fingerprint (by a chance of 1 in 4 billion, or because they have equal bodies and no
    `message_id`): also compare offsets and, if both are known, chunk times.
    """
    return zlib.crc32(body, zlib.crc32((message_id or "").encode("utf-8", "surrogatepass") + b"\0"))


@dataclass(frozen=True, slots=True)
class Position:
    """A message that was read at an offset. A stream that still has the message there is the same stream.

    Attributes:
        offset: The offset.
        fingerprint: The message's `fingerprint`.
        chunk_ms: When the message's chunk was written, in milliseconds since 1970, UTC; None if unknown.
    """

    offset: int
    fingerprint: int
    chunk_ms: int | None

    def agrees(self, fingerprint: int, chunk_ms: int | None) -> bool:
        """Return whether the message now at the offset is the same. Chunk times are compared if both are known."""
        same_chunk = None in (chunk_ms, self.chunk_ms) or chunk_ms == self.chunk_ms
        return same_chunk and fingerprint == self.fingerprint


@dataclass(frozen=True, slots=True)
class BrokerIdentity:
    """The broker of a virtual host.

    Attributes:
        broker_id: The id in the stream `relatum.broker`; None if unknown.
        cluster_name: The cluster's name, for people: default names collide, and names may change.
    """

    broker_id: UUID | None
    cluster_name: str

    def __str__(self) -> str:
        # Eight digits distinguish brokers that have the same name.
        id_text = "its id is not known" if self.broker_id is None else self.broker_id.hex[:8]
        return f"{self.cluster_name!r} ({id_text})"

    def contradicts(self, other: "BrokerIdentity") -> bool:
        """Return whether both ids are known and differ."""
        return None not in (self.broker_id, other.broker_id) and self.broker_id != other.broker_id


def broker_id_of(body: bytes) -> UUID | None:
    """Return the broker's id in the body of a message of `relatum.broker`; None if the body is not an id."""
    try:
        return UUID(body.decode())
    except ValueError:
        return None
