"""Knowing a message again: what is compared to tell whether a stream is still the one that was recorded."""

import zlib
from dataclasses import dataclass


def fingerprint(message_id: str | None, body: bytes) -> int:
    """A 32-bit sum of the AMQP property `message_id` and the body: the same through every transport and version.

    Two messages with one fingerprint are possible (1 in 4 billion, or equal twins without `message_id`); whoever
    compares also compares offsets and, where both are known, chunk times.
    """
    return zlib.crc32(body, zlib.crc32((message_id or "").encode("utf-8", "surrogatepass") + b"\0"))


@dataclass(frozen=True, slots=True)
class Position:
    """What lay at an offset, to know the stream again.

    Attributes:
        offset: The offset.
        fingerprint: What lay there, by `fingerprint`.
        chunk_ms: When its chunk was written, milliseconds since 1970, UTC; None where that is not known.
    """

    offset: int
    fingerprint: int
    chunk_ms: int | None

    def agrees(self, fingerprint: int, chunk_ms: int | None) -> bool:
        """Whether what lies there now is what lay there; chunk times count where both are known."""
        same_chunk = None in (chunk_ms, self.chunk_ms) or chunk_ms == self.chunk_ms
        return same_chunk and fingerprint == self.fingerprint
