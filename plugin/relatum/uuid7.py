"""Ids for messages that have none. They stand on the publish path: made of parts that are ready."""

import os
from collections.abc import Iterator
from typing import Final

from relatum.processes import after_fork

_COUNTERS: Final = tuple(f"7{count:03x}" for count in range(4096))
"""The version and the 12 bits after it, counting."""

_moment: tuple[int, str] = (-1, "")
"""A millisecond, and how the ids of that millisecond begin."""

_block: tuple[Iterator[str], str] = (iter(()), "")
"""The counters not used yet, and the random end of the ids that go with them."""


def uuid7(time_ns: int) -> str:
    """A version 7 UUID as its 36 characters: 48 bits of Unix milliseconds, a 12-bit counter, 62 random bits.

    The random bits are new for every 4,096 ids, and in a child process: the kernel's call for them would cost more
    than all the rest. Safe in threads: taking from an iterator and replacing a tuple are single steps.

    Args:
        time_ns: Now, as `time.time_ns()` gives it.

    Source: RFC 9562, sections 5.7 and 6.2 (method 1).
    """
    global _moment
    milliseconds = time_ns // 1_000_000
    known, head = _moment
    if known != milliseconds:
        text = f"{milliseconds:012x}"
        head = f"{text[:8]}-{text[8:]}-"
        _moment = (milliseconds, head)
    counters, tail = _block
    try:
        return head + next(counters) + tail
    except StopIteration:
        _begin_block()
        counters, tail = _block
        return head + next(counters) + tail


def _begin_block() -> None:
    global _block
    digits = f"{int.from_bytes(os.urandom(8)) & ~(0x3 << 62) | 0x2 << 62:016x}"
    _block = (iter(_COUNTERS), f"-{digits[:4]}-{digits[4:]}")


# A child that went on with the parent's block would make the parent's ids.
after_fork(uuid7, lambda _: _begin_block())
