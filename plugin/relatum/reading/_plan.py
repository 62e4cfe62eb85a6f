"""The plan of a batched read: which offsets are read together, in how many chunks, and which results are held. Pure.

An attach costs about as much as reading on over many small chunks or a few large ones. Streams differ in the number of
records per chunk. So the plan starts with one attach, learns from the chunks that arrive, and decides each time whether
to read across the gap to the next wanted offset or to jump. The cost of an attach without its chunk is assumed, not
measured (decision 4).
"""

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

from relatum.common.checks import checked_name
from relatum.common.limits import INTEGER_MAX
from relatum.errors import AccessRefused, InvalidInput, NotFound, OffsetNotFound, StreamNotHere
from relatum.reading._bounds import check_integers, check_offset
from relatum.reading._message import Message

ATTACH_S: Final = 1e-3
"""Seconds for one attach, its first chunk included. On an idle machine 0.9 ms (4.3.6) to 1.5 ms (3.10.8)."""

CHUNK_S: Final = 30e-6
"""Seconds for reading on over a chunk of any size: 17 us (4.3.6) to 60 (3.10.8)."""

BYTE_S: Final = 1e-9
"""Seconds that each byte of it adds: 184 kB took 0.2 to 0.4 ms."""

CHUNKS_AHEAD_MAX: Final = 64
"""The most chunks that are asked for and have not come: enough that the broker never waits for a request."""

UNKNOWN_CHUNKS: Final = 2
"""Chunks asked for at first for neighbouring offsets of an unknown stream."""

_SIZE_WEIGHT_MIN: Final = 0.02
"""Weight of the newest chunk in the average size; sizes change with the publisher's pace."""

FIRST_CHUNKS_MAX: Final = 16
"""The most chunks asked for at first: the averages of a stream may be wrong for this part of it."""

GROWTH: Final = 2
"""The most chunks asked for ahead, as a multiple of those received so far."""

STRAY_CHUNKS_MIN: Final = 8
"""Chunks after which a request that finds smaller ones than expected may end early."""

STRAY_RATIO: Final = 1.5
"""How much wider than its limit a gap must be for that: a jump may find chunks that are not better."""


class Density:
    """The average size of one stream's chunks, as far as known."""

    __slots__ = ("_seen", "bytes_each", "records_each")

    def __init__(self) -> None:
        self._seen = 0
        self.records_each = 1.0
        self.bytes_each = 0.0

    @property
    def is_known(self) -> bool:
        """True once a chunk was received."""
        return self._seen > 0

    def learn(self, records: int, size: int) -> None:
        if records <= 0:
            return
        self._seen += 1
        weight = max(1 / self._seen, _SIZE_WEIGHT_MIN)
        self.records_each += weight * (records - self.records_each)
        self.bytes_each += weight * (size - self.bytes_each)

    @property
    def ratio(self) -> float:
        """The number of chunks that can be read on in the time of one attach."""
        # Not measured: a slow or busy machine slows both alike, and its pauses mislead more than a ratio that is wrong
        # by a factor of two or three, which costs little.
        return ATTACH_S / (CHUNK_S + BYTE_S * self.bytes_each)

    @property
    def gap_max(self) -> float:
        """The widest gap, in offsets, that is cheaper to read across than to jump."""
        return self.ratio * self.records_each

    def chunks_for(self, first: int, last: int) -> int:
        """Return how many chunks to ask for at first to get from one offset to another."""
        if first == last:
            return 1
        if not self.is_known:
            return UNKNOWN_CHUNKS
        # One more, because the first offset may be anywhere in its chunk.
        return min(FIRST_CHUNKS_MAX, 1 + round((last - first) / self.records_each))

    @property
    def chunks_ahead(self) -> int:
        """The number of further chunks that cost about as much as two attaches: they may save more."""
        return min(FIRST_CHUNKS_MAX, int(2 * self.ratio)) if self.is_known else UNKNOWN_CHUNKS


class PlannedAttach(NamedTuple):
    """One attach: its ascending offsets, and how many chunks to ask for."""

    offsets: Sequence[int]
    chunks: int


class StreamPlan:
    """The reads of one stream, which update `density`. `is_ahead`: the furthest read requests some more chunks."""

    def __init__(self, offsets: Sequence[int], density: Density, *, is_ahead: bool = False) -> None:
        self._pending = deque(offsets)
        self._density = density
        self._is_ahead = is_ahead
        self._in_flight = 0

    def next_request(self) -> PlannedAttach | None:
        """Return the next attach to send now; None if there is none, or none until an answer arrives."""
        pending = self._pending
        if not pending or (self._in_flight and not self._density.is_known):
            return None
        offsets = [pending.popleft()]
        gap_max = self._density.gap_max
        while pending and pending[0] - offsets[-1] <= gap_max:
            offsets.append(pending.popleft())
        self._in_flight += 1
        ahead = self._density.chunks_ahead if self._is_ahead and not pending else 0
        return PlannedAttach(offsets, self._density.chunks_for(offsets[0], offsets[-1]) + ahead)

    def arrived(self, request: PlannedAttach, first: int, records: int, size: int) -> list[int]:
        """Return the wanted offsets, ascending, in a request's chunk, including offsets beyond the request's own."""
        self._density.learn(records, size)
        last = first + records - 1
        offsets = request.offsets
        wanted = list(offsets[bisect_right(offsets, first - 1) : bisect_right(offsets, last)])
        # A chunk beyond the request's offsets serves the ones that would be requested next.
        while self._pending and self._pending[0] <= last and self._pending[0] >= first:
            wanted.append(self._pending.popleft())
        return wanted

    def more(self, request: PlannedAttach, reached: int, chunks: int, ahead: int) -> int:
        """Return how many more chunks to request once a request has reached an offset; 0 for none.

        Chunks are requested before all earlier chunks have arrived, so that neither side waits. A request ends when it
        has all its offsets, or if chunks are so small that jumping is cheaper after all. `chunks` have arrived up to
        the offset `reached`; `ahead` more were requested and have not arrived.
        """
        first, last = request.offsets[0], request.offsets[-1]
        if reached >= last:
            return 0
        records_each = (reached + 1 - first) / chunks
        if chunks >= STRAY_CHUNKS_MIN:
            gap = request.offsets[bisect_right(request.offsets, reached)] - reached
            if gap > STRAY_RATIO * self._density.ratio * records_each:
                return 0
        else:
            # The first chunk is used in part, so alone it says little.
            records_each = max(records_each, self._density.records_each)
        expected = math.ceil((last - reached) / records_each)
        wanted = min(CHUNKS_AHEAD_MAX, GROWTH * chunks, expected)
        # Several at once: each request costs both sides a system call.
        return wanted - ahead if 2 * ahead <= wanted else 0

    def answered(self, request: PlannedAttach, reached: int | None) -> None:
        """Close a request that received chunks up to an offset; offsets beyond it are requested again.

        None: the stream ends there, so that later offsets are not requested again.
        """
        self._in_flight -= 1
        if reached is None:
            last = request.offsets[-1]
            self._pending = deque(offset for offset in self._pending if offset < last)
            return
        rest = request.offsets[bisect_right(request.offsets, reached) :]
        if rest:
            # Requests are answered in any order, so the rest of one may come after another's.
            self._pending = deque(sorted([*rest, *self._pending]))

    def abandon(self) -> list[int]:
        rest = list(self._pending)
        self._pending.clear()
        return rest


WINDOW_MESSAGES: Final = 1024
"""Default number of ids planned together: more find more neighbours; a held message takes about 1 kB."""

WINDOW_MAX: Final = 1_000_000
"""The most ids planned together: each takes a few hundred bytes before anything is read."""

WINDOW_BYTES_MAX: Final = 64 << 20
"""The most bytes of records held for ids that are planned together; beyond it, they are read in smaller parts."""

TAKEN_BYTES: Final = 1 << 17
"""Bytes of results delivered together, about: few enough that most are freed before the garbage collector meets them.
With 1 MiB, reading 100,000 messages of groups took a tenth more processor time."""

Place: TypeAlias = tuple[str, int]

Result: TypeAlias = Message | NotFound | AccessRefused
"""The result of an id: its message, or why there is none."""

RECORD_BYTES: Final = 256
"""Approximate overhead of a held record, in bytes."""

_Held: TypeAlias = tuple[bytes, int] | NotFound | AccessRefused
"""A record with the time of its chunk, or why there is none.

A hundred thousand are held at once, and Python's garbage collector visits messages again and again, but not plain
tuples of bytes and numbers: so messages are made when they are delivered."""


class Part:
    """Ids that are read together, and their results.

    Some thousand ids pass through in the time of one attach, so this does little for each.

    Attributes:
        wanted: The offsets to read by stream, ascending.
        rest: The ids from the first without a result, once `results` has yielded those before it.
        is_full: More arrived than can be held: some messages were dropped, and must be requested again.
    """

    def __init__(self, places: list[Place], bytes_max: int = WINDOW_BYTES_MAX) -> None:
        self._places = places
        self._bytes_max = bytes_max
        self._held = self._came = self._came_bytes = 0
        self.rest: list[Place] = []
        self.is_full = False
        # By stream and offset: the result, None until it comes.
        self._results: dict[str, dict[int, _Held | None]] = {}
        try:
            for stream, offset in places:
                if stream in self._results:
                    self._results[stream][offset] = None
                else:
                    self._results[stream] = {offset: None}
        except (TypeError, ValueError):
            raise InvalidInput("ids= takes pairs of a stream's name and an offset (MessageId)") from None
        self.wanted = {checked_name("stream", stream): self._valid(stream) for stream in self._results}

    def _valid(self, stream: str) -> list[int]:
        """Return the valid offsets; the others get their error at once."""
        results = self._results[stream]
        # The types are checked together, because most are plain integers.
        if set(map(type, results)) != {int}:
            check_integers(results)
        offsets = sorted(results)
        if offsets[0] >= 0 and offsets[-1] <= INTEGER_MAX:
            return offsets
        valid = []
        for offset in offsets:
            try:
                check_offset(stream, offset)
            except OffsetNotFound as error:
                self.put(stream, offset, error)
            else:
                valid.append(offset)
        return valid

    def put(self, stream: str, offset: int, error: NotFound | AccessRefused) -> None:
        results = self._results[stream]
        # None: it was requested and has not come.
        if results.get(offset, 0) is None:
            results[offset] = error

    def put_records(self, stream: str, offsets: list[int], records: Iterable[bytes], time_ms: int) -> None:
        """Store messages of a chunk, and drop those that exceed the limit."""
        results, bytes_max = self._results[stream], self._bytes_max
        held = self._held
        for offset, record in zip(offsets, records, strict=True):
            size = RECORD_BYTES + len(record)
            if results.get(offset, 0) is not None:
                continue
            self._came += 1
            self._came_bytes += size
            if held and held + size > bytes_max:
                self.is_full = True
                continue
            held += size
            results[offset] = record, time_ms
        self._held = held

    def results(self) -> Iterator[list[Any]]:
        """Yield the results in the order of the ids; if the part is full, up to the first that was dropped.

        Messages come about `TAKEN_BYTES` at a time, each error alone. A message that did not arrive yields
        `StreamNotHere`: only the leader knows why.
        """
        given: list[Any] = []
        message, of_streams, taken = Message.from_record, self._results, 0
        for number, (stream, offset) in enumerate(self._places):
            held = of_streams[stream][offset]
            if held is None and self.is_full:
                self.rest = self._places[number:]
                break
            if isinstance(held, tuple):
                if taken >= TAKEN_BYTES:
                    yield given
                    given, taken = [], 0
                given.append(message(stream, offset, *held))
                taken += RECORD_BYTES + len(held[0])
                continue
            if given:
                yield given
                given, taken = [], 0
            reason = f"This node has no message at offset {offset} of {stream!r}."
            yield [held or StreamNotHere(reason, stream=stream, offset=offset)]
        if given:
            yield given

    def following_size(self, most: int) -> int:
        """Return how many ids the next part should have, so that their results can be held."""
        each = max(1, self._came_bytes // max(1, self._came))
        fitting = self._bytes_max * 3 // 4 // each
        return max(1, min(most, fitting, len(self._places) // 2 if self.is_full else most))
