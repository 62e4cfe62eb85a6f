"""Rates of streams, in messages a second, computed from earlier positions of their ends."""

import time
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Final

SPAN_S: Final = 60.0
"""Seconds over which a rate is averaged."""

_LEAST_S: Final = 0.5
"""The shortest time between two positions that make a rate, in seconds."""

_STREAMS_MAX: Final = 5_000


class Rates:
    """Stores streams' last offsets for a minute. Gaps in offsets count as messages; they are mostly small."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: OrderedDict[str, deque[tuple[float, int]]] = OrderedDict()

    def of(self, stream: str, last: int | None) -> float | None:
        """Return messages a second; None until two positions are known."""
        if last is None:
            self._seen.pop(stream, None)
            return None
        now = self._clock()
        seen = self._seen.pop(stream, None) or deque()
        self._seen[stream] = seen
        while len(self._seen) > _STREAMS_MAX:
            self._seen.popitem(last=False)
        if seen and last < seen[-1][1]:
            seen.clear()  # the stream was declared again, or lost its tail
        # Keep the positions of the span, and the last one before it.
        while len(seen) > 1 and now - seen[1][0] > SPAN_S:
            seen.popleft()
        if not seen or now - seen[-1][0] >= _LEAST_S:
            seen.append((now, last))
        then, before = seen[0]
        return None if now - then < _LEAST_S else (last - before) / (now - then)
