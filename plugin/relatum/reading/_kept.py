"""Chunks that one course of questions has read, so that it reads none of them a second time. No I/O."""

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Final

from relatum.wire import Chunk

KEPT_BYTES_MAX: Final = 32 << 20
"""Bytes of chunks that are kept; the oldest go first. A chunk has 1 MiB at most unless a publisher batches more."""


class KeptChunks:
    """The chunks that one caller has met, of any streams.

    Who asks with it takes a stream for what it was when the chunk came, so it lives as long as one answer is sought.

    Attributes:
        visited: Streams of which messages were sought in an earlier round of questions, whether or not they had to be
            read for it; who asks in rounds adds them. They are read ahead: more of them will be sought, and mostly
            further on, as what belongs together was published one after the other.
    """

    def __init__(self, bytes_max: int = KEPT_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0
        self._chunks: dict[str, list[Chunk]] = {}
        self.visited: set[str] = set()
        self._oldest: deque[tuple[str, Chunk]] = deque()

    def keep(self, stream: str, chunk: Chunk) -> None:
        """Keep a chunk of a stream."""
        chunks = self._chunks.setdefault(stream, [])
        place = bisect_left(chunks, chunk.first_offset, key=_first)
        if place < len(chunks) and chunks[place].first_offset == chunk.first_offset:
            return
        chunks.insert(place, chunk)
        self._oldest.append((stream, chunk))
        self._bytes += len(chunk.data)
        while self._bytes > self._bytes_max:
            name, dropped = self._oldest.popleft()
            held = self._chunks[name]
            del held[bisect_left(held, dropped.first_offset, key=_first)]
            self._bytes -= len(dropped.data)

    def holding(self, stream: str, offsets: Sequence[int]) -> Iterator[tuple[Chunk, list[int]]]:
        """The chunks that hold some of the offsets, which ascend, each with those it holds."""
        chunks, begin = self._chunks.get(stream, ()), 0
        while chunks and begin < len(offsets):
            place = bisect_right(chunks, offsets[begin], key=_first) - 1
            last = chunks[place].last_offset if place >= 0 else -1
            if offsets[begin] > last:
                # In none: on to the first offset that may be in the next one.
                following = chunks[place + 1].first_offset if place + 1 < len(chunks) else offsets[-1] + 1
                begin = bisect_left(offsets, following, begin)
                continue
            end = bisect_right(offsets, last, begin)
            yield chunks[place], list(offsets[begin:end])
            begin = end


def _first(chunk: Chunk) -> int:
    return chunk.first_offset
