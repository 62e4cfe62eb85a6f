"""Where a message lies, and the ids given to messages that have none."""

import os
import time
from typing import NamedTuple


class MessageId(NamedTuple):
    """Where a message lies: the stream's name and the offset in it.

    The AMQP property `message_id` is another thing and is called by its full name everywhere.
    """

    stream: str
    offset: int

    def __str__(self) -> str:
        return f"{self.stream}@{self.offset}"


def uuid7() -> str:
    """A version 7 UUID as its 36 characters: 48 bits of Unix milliseconds, then 74 random bits.

    Source: RFC 9562, section 5.7. Written out because the standard library has it only from Python 3.14 on
    and it stands on the publish path.
    """
    value = (time.time_ns() // 1_000_000 << 80) | int.from_bytes(os.urandom(10), "big")
    # Bits 76-79 hold the version, bits 62-63 the variant.
    value = value & ~(0xF << 76) | 0x7 << 76
    value = value & ~(0x3 << 62) | 0x2 << 62
    text = f"{value:032x}"
    return f"{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"
