"""What a follower tells of streams: values, each with one meaning.

Each has the stream, and `following`: the number that `follow` gave.
"""

from dataclasses import dataclass, field
from typing import Any

from relatum.reading import Agreement, Position, RecordBatch, StreamBounds


@dataclass(frozen=True, slots=True)
class Attached:
    """The stream is followed, for the first time or again, and is the one that is known.

    Attributes:
        next_offset: Where the next record lies, or behind it.
    """

    stream: str
    following: int
    next_offset: int


@dataclass(frozen=True, slots=True)
class Records:
    """Consecutive records, none of them given before.

    Attributes:
        batch: The records, as `StreamReader.batches` gives them.
    """

    stream: str
    following: int
    batch: RecordBatch
    held: Any = field(repr=False, compare=False)
    """What `done` releases; nobody else's business."""


@dataclass(frozen=True, slots=True)
class Hole:
    """Retention has taken what lay at these offsets before it was read; the broker was asked.

    Attributes:
        from_offset: The first offset that was to be read.
        to_offset: Where records go on.
    """

    stream: str
    following: int
    from_offset: int
    to_offset: int


@dataclass(frozen=True, slots=True)
class Replaced:
    """The stream is not what was read of it, surely: it lost its end, or is another one of that name.

    Nothing more is given of this following.

    Attributes:
        known: What it was known by.
        found: `OTHER` where something else lies there, `ENDS_BEFORE` where its leader says that it ends before.
        bounds: Its ends, where they were asked for.
    """

    stream: str
    following: int
    known: Position
    found: Agreement
    bounds: StreamBounds | None


@dataclass(frozen=True, slots=True)
class CaughtUp:
    """All that a node has was given: once after each `Attached`. The node may lag, so this is no stream's end.

    Attributes:
        next_offset: Where the next record lies, or behind it.
    """

    stream: str
    following: int
    next_offset: int


@dataclass(frozen=True, slots=True)
class Failed:
    """A try to follow has failed; it is tried again, for ever, after pauses that grow.

    Where no stream can be followed, as the broker is away or lets nobody in, it names no stream, and following 0.
    """

    stream: str | None
    following: int
    error: Exception


Event = Attached | Records | Hole | Replaced | CaughtUp | Failed
