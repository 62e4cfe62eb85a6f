"""The events of a follower. Each has the stream's name, and in `following` the number that `follow` returned."""

from dataclasses import dataclass, field
from typing import Any

from relatum.reading import Agreement, Position, RecordBatch, StreamBounds


@dataclass(frozen=True, slots=True)
class Attached:
    """The stream is read, for the first time or again, and is the known one.

    Attributes:
        next_offset: The next record's offset, or a smaller one.
    """

    stream: str
    following: int
    next_offset: int


@dataclass(frozen=True, slots=True)
class Records:
    """Consecutive records that were not delivered before.

    Attributes:
        batch: The records, as in `StreamReader.batches`.
    """

    stream: str
    following: int
    batch: RecordBatch
    held: Any = field(repr=False, compare=False)
    """For `StreamFollower.done` only."""


@dataclass(frozen=True, slots=True)
class Hole:
    """Retention dropped records before they were read, as the broker confirmed.

    Attributes:
        from_offset: The first missing offset.
        to_offset: The offset where records go on.
    """

    stream: str
    following: int
    from_offset: int
    to_offset: int


@dataclass(frozen=True, slots=True)
class Replaced:
    """The stream is proven to differ from what was read: it lost its end, or was declared again.

    The last event of this following.

    Attributes:
        known: The position it was known by.
        found: `OTHER` if another message has that offset, `ENDS_BEFORE` if the leader says that the stream ends before.
        bounds: Its ends, if they were asked for.
    """

    stream: str
    following: int
    known: Position
    found: Agreement
    bounds: StreamBounds | None


@dataclass(frozen=True, slots=True)
class CaughtUp:
    """All that a node has was delivered; once after each `Attached`. The node may lag: this is not the stream's end.

    Attributes:
        next_offset: The next record's offset, or a smaller one.
    """

    stream: str
    following: int
    next_offset: int


@dataclass(frozen=True, slots=True)
class Failed:
    """Reading failed. The follower retries for ever, after growing pauses.

    If no stream can be read, as the broker is away or refuses the login, `stream` is None and `following` 0.
    """

    stream: str | None
    following: int
    error: Exception


Event = Attached | Records | Hole | Replaced | CaughtUp | Failed
