"""Where a stream that lost its end, or was declared again, still is what was collected of it. No I/O."""

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

from relatum.collecting._message_ids import id_of, id_of_place
from relatum.reading import Message, StreamBounds
from relatum.steps import Request


@dataclass(frozen=True, slots=True)
class LastCollected(Request[tuple[int, str] | None]):
    """Answer with the store's `last_collected`."""

    until: int


@dataclass(frozen=True, slots=True)
class ReadAt(Request[Message | None]):
    """Read the stream at an offset: answer with the message, or None where there is none."""

    offset: int


def last_agreed(bounds: StreamBounds) -> Generator[LastCollected | ReadAt, Any, int | None]:
    """The offset of the last collected message that lies in the stream as it was collected; None where none does.

    Found by halving: what agrees is a prefix. A message agrees by its own `message_id`; one without speaks for nothing.
    """
    if bounds.first is None or bounds.last is None:
        return None
    agreed: int | None = None
    low, high = bounds.first, bounds.last
    middle = high
    while low <= high:
        row = yield from LastCollected(middle)
        if row is None or row[0] < low:
            low = middle + 1
        else:
            found = yield from ReadAt(row[0])
            if found is not None and id_of(found) == row[1] != id_of_place(found.id):
                agreed, low = row[0], middle + 1
            else:
                high = row[0] - 1
        middle = (low + high) // 2
    return agreed
