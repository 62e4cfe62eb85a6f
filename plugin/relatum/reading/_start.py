"""Where reading begins."""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final, Literal

from relatum.checks import shown
from relatum.errors import InvalidInput
from relatum.limits import INTEGER_MAX
from relatum.wire import StartSpec, frames

Start = int | datetime | Literal["first", "last", "next"]
"""An offset; a moment (by the broker's clock when it wrote the message); the first message; the first message of the
last chunk; or what is published from now on."""

_NAMED: Final = {"first": frames.FIRST, "last": frames.LAST, "next": frames.NEXT}
_NO_START: Final = "A start is an offset, a datetime, 'first', 'last' or 'next', not {}."
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_MILLISECOND: Final = timedelta(milliseconds=1)


@dataclass(frozen=True, slots=True)
class Beginning:
    """A start as readers use it.

    Attributes:
        offset: Messages below it are passed over; 0 for none.
        time_ms: Chunks written before it are passed over; None for none.
        spec: Where a stream subscription attaches.
    """

    offset: int
    time_ms: int | None
    spec: StartSpec


def beginning(start: Start) -> Beginning:
    """The beginning a caller asked for.

    Raises:
        InvalidInput: Not an offset, a moment, or one of the names.
    """
    if isinstance(start, str):
        if start not in _NAMED:
            raise InvalidInput(_NO_START.format(shown(start)))
        return Beginning(0, None, _NAMED[start])
    if isinstance(start, datetime):
        moment = start if start.tzinfo is not None else start.replace(tzinfo=UTC)
        # In whole numbers: as a float, 0.123 s may be a millisecond less.
        time_ms = max(0, (moment - _EPOCH) // _MILLISECOND)
        # The documentation says the broker attaches at the chunk before the moment, its code at the one after: a
        # second earlier, what is too early is passed over in both cases.
        spec = StartSpec(frames.Start.TIMESTAMP, max(0, time_ms - 1000))
        return Beginning(0, time_ms, spec)
    if isinstance(start, bool) or not isinstance(start, int) or not 0 <= start <= INTEGER_MAX:
        raise InvalidInput(_NO_START.format(shown(start)))
    return Beginning(start, None, StartSpec(frames.Start.OFFSET, start))
