"""The events of a follower. `stream` is the stream's name, `following` the number that `follow` returned."""

from dataclasses import dataclass, field
from typing import Any

from relatum.reading import Agreement, Position, RecordBatch, StreamBounds


@dataclass(frozen=True, slots=True)
class Attached:
    """The stream is being read, for the first time or again, and is the known one.

    `next_offset`: The next record's offset, or a smaller offset.
    """

    stream: str
    following: int
    next_offset: int


@dataclass(frozen=True, slots=True)
class Records:
    """Consecutive records that were not delivered before. `held` is only for `StreamFollower.done`."""

    stream: str
    following: int
    batch: RecordBatch
    held: Any = field(repr=False, compare=False)


@dataclass(frozen=True, slots=True)
class Hole:
    """Retention dropped the records in [from_offset, to_offset) before they were read, as the broker confirmed."""

    stream: str
    following: int
    from_offset: int
    to_offset: int


@dataclass(frozen=True, slots=True)
class Replaced:
    """The stream provably differs from what was read: it lost its end, or was declared again. The last event.

    `found`: `OTHER` if another message has the offset of `known`, `ENDS_BEFORE` if the leader says that the stream ends
    before it. `bounds`: The stream's bounds, if the follower queried them.
    """

    stream: str
    following: int
    known: Position
    found: Agreement
    bounds: StreamBounds | None


@dataclass(frozen=True, slots=True)
class CaughtUp:
    """All records of a node were delivered; once after each `Attached`. The node may lag behind the stream's end."""

    stream: str
    following: int
    next_offset: int


@dataclass(frozen=True, slots=True)
class Failed:
    """Reading failed, and is retried. `stream` is None if no stream can be read: no broker, or no login."""

    stream: str | None
    following: int
    error: Exception


Event = Attached | Records | Hole | Replaced | CaughtUp | Failed
