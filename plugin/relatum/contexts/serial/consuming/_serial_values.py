"""What the database says of a serial consumer's partitions, as values."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from relatum.errors import PartitionLost
from relatum.store import Position


@dataclass(frozen=True, slots=True)
class Opened:
    """What is stored of a partition this member has now.

    Attributes:
        position: Where to go on delivering.
        version: The position's version.
        known_by: What lay at the last offset read; None where nothing was.
        holds: The cursor of each open hold, by move.
        since: For how long each has been open, seconds.
        read_from: Where to go on reading: what is held lies before the position.
    """

    position: int
    version: int
    known_by: Position | None
    holds: Mapping[int, int]
    since: Mapping[int, float]
    read_from: int


@dataclass(frozen=True, slots=True)
class Share:
    """What a member has.

    Attributes:
        holder: Its name. Another one than before where its lease had run out: what it had, it has no more.
        partitions: The streams of the partitions it has, by their ids.
        surplus: How many of them others should have.
    """

    holder: str
    partitions: Mapping[int, str]
    surplus: int


Initial = Callable[[Sequence[str]], Mapping[str, int]]
"""Finds where to begin in each of these streams."""


def known_by(position: Position) -> dict[str, int | None]:
    """What lay at an offset, as parameters."""
    return {
        "known_offset": position.offset,
        "known_fingerprint": position.fingerprint,
        "known_chunk_ms": position.chunk_ms,
    }


def lost(stream: str, name: str) -> PartitionLost:
    """The error of a member that has a partition no more."""
    return PartitionLost(
        f"another member of {name!r} has {stream!r} now, or it was opened anew; nothing was written, and what was not "
        "acknowledged is delivered again",
        stream=stream,
    )
