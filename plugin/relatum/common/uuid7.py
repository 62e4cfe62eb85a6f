"""Generates ids, which contain the message's time, for messages without one. Precomputed parts keep publishing fast.

An id ends with `MARK`, so that readers know that its time is the message's: the time of another UUIDv7 may mean
anything. See docs/adr/0022-an-id-carries-the-time.md.
"""

import os
from collections.abc import Iterator
from typing import Any, Final

from relatum.common.limits import TIME_US_MAX
from relatum.common.processes import after_fork

MARK: Final = "c53a9e"
"""The end of each id, and by chance of one in 16 million other UUIDs. A random value, and part of the format."""

_FRACTIONS: Final = tuple(f"7{fraction:03x}-" for fraction in range(4096))
"""The version and the next 12 bits: the fraction of the millisecond."""

_COUNTERS: Final = tuple(f"{count:03x}-" for count in range(4096))

_moment: tuple[int, str] = (-1, "")
"""The latest millisecond, and the beginning of its ids."""

_block: tuple[str, Iterator[str], str] = ("", iter(()), "")
"""The parts of a block of 4,096 ids: variant with two random bits, unused counters, and random digits with the mark."""


def uuid7(time_ns: int) -> str:
    """Return a version 7 UUID of 36 characters. `time_us_of` returns its time.

    It has 48 bits of Unix milliseconds, 12 bits of their fraction, 26 random bits with a 12-bit counter between them,
    and the mark. The random bits change every 4,096 ids and in a forked child: a system call for each id would take
    longer than the rest. Thread-safe: taking from an iterator and replacing a tuple are atomic.
    Source: RFC 9562, sections 5.7 and 6.2 (methods 1 and 3).
    """
    global _moment
    milliseconds, rest_ns = divmod(time_ns, 1_000_000)
    cached_ms, head = _moment
    if cached_ms != milliseconds:
        text = f"{milliseconds:012x}"
        head = f"{text[:8]}-{text[8:]}-"
        _moment = (milliseconds, head)
    fraction = _FRACTIONS[(rest_ns << 12) // 1_000_000]
    variant, counters, tail = _block
    try:
        return f"{head}{fraction}{variant}{next(counters)}{tail}"
    except StopIteration:
        _begin_block()
        return uuid7(time_ns)


def time_us_of(message_id: Any) -> int | None:
    """Return the time in an id made by `uuid7`: microseconds since 1970, UTC, up to 1.25 us early; None for others."""
    if type(message_id) is not str or not message_id.endswith(MARK) or len(message_id) != _LENGTH:
        return None
    try:
        digits = int(message_id[:18].replace("-", ""), 16)
    except ValueError:
        return None
    time_us = (digits >> 16) * 1000 + ((digits & 0xFFF) * 1000 >> 12)
    return time_us if digits >> 12 & 0xF == _VERSION and 0 <= time_us <= TIME_US_MAX else None


_LENGTH: Final = 36
_VERSION: Final = 7


def _begin_block() -> None:
    global _block
    random = int.from_bytes(os.urandom(4))
    _block = (f"{random >> 24 & 0x3 | 0x8:x}", iter(_COUNTERS), f"{random & 0xFFFFFF:06x}{MARK}")


# With its copy of the parent's block, a child would generate the parent's ids again.
after_fork(uuid7, lambda _: _begin_block())
