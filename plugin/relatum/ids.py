"""The place of a message; how a stream and a broker are recognised."""

import zlib
from dataclasses import dataclass
from typing import Final, NamedTuple
from uuid import UUID

IDENTITY_STREAM: Final = "relatum.broker"
"""The stream of each virtual host whose first message holds the broker's id. See ADR 0043."""


class MessageId(NamedTuple):
    """The place of a message: the stream's name and the offset in it.

    The AMQP property `message_id` is another thing and is called by its full name everywhere.
    """

    stream: str
    offset: int

    def __str__(self) -> str:
        return f"{self.stream}@{self.offset}"


def fingerprint(message_id: str | None, body: bytes) -> int:
    """A 32-bit sum of the AMQP property `message_id` and the body: the same in records and deliveries.

    Two messages with one fingerprint are possible (1 in 4 billion, or equal twins without `message_id`): compare
    offsets as well and, where both are known, chunk times.
    """
    return zlib.crc32(body, zlib.crc32((message_id or "").encode("utf-8", "surrogatepass") + b"\0"))


@dataclass(frozen=True, slots=True)
class Position:
    """What was read at an offset, to know the stream again.

    Attributes:
        offset: The offset.
        fingerprint: What was there, by `fingerprint`.
        chunk_ms: When its chunk was written, milliseconds since 1970, UTC; None where that is not known.
    """

    offset: int
    fingerprint: int
    chunk_ms: int | None

    def agrees(self, fingerprint: int, chunk_ms: int | None) -> bool:
        """Whether the same is there now; chunk times count where both are known."""
        same_chunk = None in (chunk_ms, self.chunk_ms) or chunk_ms == self.chunk_ms
        return same_chunk and fingerprint == self.fingerprint


@dataclass(frozen=True, slots=True)
class BrokerIdentity:
    """Which broker a virtual host is of.

    Attributes:
        broker_id: The id that its stream `relatum.broker` holds; None where that is not known.
        cluster_name: What the cluster calls itself, for people: default names collide, and may be changed.
    """

    broker_id: UUID | None
    cluster_name: str

    def __str__(self) -> str:
        # The beginning of an id is enough to tell a few brokers of one name apart.
        known = "its id is not known" if self.broker_id is None else self.broker_id.hex[:8]
        return f"{self.cluster_name!r} ({known})"

    def contradicts(self, other: "BrokerIdentity") -> bool:
        """Whether both are known, and are two brokers."""
        return None not in (self.broker_id, other.broker_id) and self.broker_id != other.broker_id


def broker_id_of(body: bytes) -> UUID | None:
    """The id that the message holds; None where it holds something else."""
    try:
        return UUID(body.decode())
    except ValueError:
        return None
