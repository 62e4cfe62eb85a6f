"""The plan of a batched read: which offsets are read in one go, and how many chunks that takes. Pure.

Attaching costs about as much as reading on over many small chunks or a few large ones. How many records lie in a
chunk is a stream's own affair, so the plan starts with one attach, learns from the chunks that come, and decides each
time whether the gap to the next offset wanted is cheaper to read across or to jump.
"""

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from typing import Final, NamedTuple

ATTACH_COST: Final = 1000.0
"""What one attach costs, the unit of the costs below: about 1 us each on an idle machine.

Measured against RabbitMQ 3.10.8 and 4.3.6 on two cores, pipelined: attaching took 1.6 to 3.5 ms under load while a
chunk of one record took 17 to 130 us and one of 184 to 310 kB 360 to 770 us. Only the ratios matter.
"""

CHUNK_COST: Final = 25.0
"""What reading on over one more chunk costs, whatever its size."""

BYTE_COST: Final = 0.001
"""What each byte of it adds."""

CHUNKS_MAX: Final = 4096
"""Chunks asked for at once: at 25 of 1,000, attaching again then adds 1 %."""

_LEARNING: Final = 0.3
"""Weight of the newest chunks in what is known of a stream; chunk sizes change with the publisher's pace."""

_UNDERSTATE: Final = 0.95
"""Share of the estimated chunks that is asked for. Too few cost a short second attach, too many are wasted."""


class Density:
    """What is known of the chunks of one stream."""

    __slots__ = ("bytes_each", "is_known", "records_each")

    def __init__(self) -> None:
        self.is_known = False
        self.records_each = 1.0
        self.bytes_each = 0.0

    def learn(self, chunks: int, records: int, size: int) -> None:
        """Take in that so many chunks held so many records and bytes."""
        if chunks <= 0 or records <= 0:
            return
        weight = 1 - (1 - _LEARNING) ** chunks if self.is_known else 1.0
        self.records_each += weight * (records / chunks - self.records_each)
        self.bytes_each += weight * (size / chunks - self.bytes_each)
        self.is_known = True

    @property
    def gap_max(self) -> float:
        """The widest gap, in offsets, that is cheaper to read across than to jump."""
        return ATTACH_COST / (CHUNK_COST + BYTE_COST * self.bytes_each) * self.records_each

    def chunks_for(self, first: int, last: int) -> int:
        """How many chunks to ask for to get from one offset to another."""
        if first == last:
            return 1
        expected = (last - first) / self.records_each * _UNDERSTATE + 0.5
        return max(1, min(CHUNKS_MAX, round(expected)))


class Request(NamedTuple):
    """One attach: the offsets it is for, ascending, and how many chunks to ask for."""

    offsets: Sequence[int]
    chunks: int


class StreamPlan:
    """The reads of one stream.

    Args:
        offsets: The offsets wanted, ascending, each once.
        density: What is known of the stream; it learns from what is read.
    """

    def __init__(self, offsets: Sequence[int], density: Density) -> None:
        self._pending = deque(offsets)
        self._density = density
        self._in_flight = 0

    def next_request(self) -> Request | None:
        """The next attach to make now; None while there is nothing to ask, or not before an answer has come."""
        pending = self._pending
        if not pending or (self._in_flight and not self._density.is_known):
            return None
        offsets = [pending.popleft()]
        gap_max = self._density.gap_max if self._density.is_known else 0
        while pending and pending[0] - offsets[-1] <= gap_max:
            offsets.append(pending.popleft())
        self._in_flight += 1
        return Request(offsets, self._density.chunks_for(offsets[0], offsets[-1]))

    def arrived(self, request: Request, first: int, records: int, size: int) -> list[int]:
        """The wanted offsets, ascending, that lie in a chunk the request brought, read further than asked included."""
        self._density.learn(1, records, size)
        last = first + records - 1
        offsets = request.offsets
        wanted = list(offsets[bisect_right(offsets, first - 1) : bisect_right(offsets, last)])
        # What was read beyond the request serves what would have been asked for next.
        while self._pending and self._pending[0] <= last and self._pending[0] >= first:
            wanted.append(self._pending.popleft())
        return wanted

    def answered(self, request: Request, reached: int | None) -> list[int]:
        """Close a request that brought chunks up to an offset, or None; what it did not reach is asked for again.

        Returns:
            The offsets beyond the end of the stream: those asked for where nothing came.
        """
        self._in_flight -= 1
        if reached is None:
            return list(request.offsets)
        rest = request.offsets[bisect_right(request.offsets, reached) :]
        self._pending.extendleft(reversed(rest))
        return []

    def abandon(self) -> list[int]:
        """Ask for nothing more; what was still to be asked for."""
        rest = list(self._pending)
        self._pending.clear()
        return rest
