"""How many messages a second a stream gets, by what was seen of its end before."""

import time
from collections import OrderedDict, deque
from collections.abc import Callable
from typing import Final

SPAN_S: Final = 60.0
"""Seconds over which a rate is taken."""

_LEAST_S: Final = 0.5
"""Seconds between two looks that say something of a rate."""

_STREAMS_MAX: Final = 5_000


class Rates:
    """Remembers streams' last offsets, for a minute. Offsets have gaps, which count as messages: mostly few."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._seen: OrderedDict[str, deque[tuple[float, int]]] = OrderedDict()

    def of(self, stream: str, last: int | None) -> float | None:
        """Messages a second; None where it was not looked at before."""
        if last is None:
            self._seen.pop(stream, None)
            return None
        now = self._clock()
        seen = self._seen.pop(stream, None) or deque()
        self._seen[stream] = seen
        while len(self._seen) > _STREAMS_MAX:
            self._seen.popitem(last=False)
        if seen and last < seen[-1][1]:
            seen.clear()  # declared again, or its tail was lost
        # The oldest that is still in the span stays, and one before it.
        while len(seen) > 1 and now - seen[1][0] > SPAN_S:
            seen.popleft()
        if not seen or now - seen[-1][0] >= _LEAST_S:
            seen.append((now, last))
        then, before = seen[0]
        return None if now - then < _LEAST_S else (last - before) / (now - then)
