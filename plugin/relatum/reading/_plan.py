"""A batched read: which offsets are read in one go, in how many chunks, and what is held until all has come. Pure.

Attaching costs about as much as reading on over many small chunks or a few large ones. How many records lie in a
chunk is a stream's own affair, so the plan starts with one attach, learns from the chunks that come, and decides each
time whether the gap to the next offset wanted is cheaper to read across or to jump. What an attach takes beside a
chunk is assumed, not measured (decision 4).
"""

import math
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

from relatum.checks import checked_name
from relatum.errors import AccessRefused, InvalidInput, NotFound, OffsetNotFound, StreamNotHere
from relatum.ids import MessageId
from relatum.limits import INTEGER_MAX
from relatum.reading._bounds import check_integers, check_offset
from relatum.reading._message import Message

ATTACH_S: Final = 1e-3
"""Seconds one attach takes, its first chunk included. On an idle machine 0.9 ms (4.3.6) to 1.5 ms (3.10.8)."""

CHUNK_S: Final = 30e-6
"""Seconds reading on takes for each chunk, whatever its size: 17 us (4.3.6) to 60 (3.10.8)."""

BYTE_S: Final = 1e-9
"""Seconds each byte of it adds: 184 kB took 0.2 to 0.4 ms."""

CHUNKS_AHEAD_MAX: Final = 64
"""Chunks that are asked for and have not come, at most: enough that the broker never waits to be asked."""

UNKNOWN_CHUNKS: Final = 2
"""Chunks asked for at first for neighbouring offsets, while nothing is known of the stream."""

_SIZE_WEIGHT_MIN: Final = 0.02
"""Weight of the newest chunk in what is known of a stream's chunks; their size changes with the publisher's pace."""

FIRST_CHUNKS_MAX: Final = 16
"""Chunks asked for at first: what is known of a stream on the whole may be wrong for this part of it."""

GROWTH: Final = 2
"""How many times as many chunks as came so far are asked for ahead, at most."""

STRAY_CHUNKS_MIN: Final = 8
"""Chunks after which a request that meets smaller ones than expected may end early."""

STRAY_RATIO: Final = 1.5
"""How many times as wide as it should be a gap must turn out for that: the jump may be no better where it leads."""


class Density:
    """What is known of the chunks of one stream: how large they are."""

    __slots__ = ("_seen", "bytes_each", "records_each")

    def __init__(self) -> None:
        self._seen = 0
        self.records_each = 1.0
        self.bytes_each = 0.0

    @property
    def is_known(self) -> bool:
        """True once a chunk was seen."""
        return self._seen > 0

    def learn(self, records: int, size: int) -> None:
        """Take in that a chunk held so many records and bytes."""
        if records <= 0:
            return
        self._seen += 1
        weight = max(1 / self._seen, _SIZE_WEIGHT_MIN)
        self.records_each += weight * (records - self.records_each)
        self.bytes_each += weight * (size - self.bytes_each)

    @property
    def ratio(self) -> float:
        """How many chunks can be read on in the time of one attach."""
        # A slow or busy machine slows both alike, and its pauses mislead more than a ratio that is off by a factor of
        # two or three, which costs little.
        return ATTACH_S / (CHUNK_S + BYTE_S * self.bytes_each)

    @property
    def gap_max(self) -> float:
        """The widest gap, in offsets, that is cheaper to read across than to jump."""
        return self.ratio * self.records_each

    def chunks_for(self, first: int, last: int) -> int:
        """How many chunks to ask for at first to get from one offset to another."""
        if first == last:
            return 1
        if not self.is_known:
            return UNKNOWN_CHUNKS
        # One more: the first of the offsets lies anywhere in its chunk.
        return min(FIRST_CHUNKS_MAX, 1 + round((last - first) / self.records_each))

    @property
    def chunks_ahead(self) -> int:
        """How many chunks beyond what is asked for take about as long as two attaches: they may save more."""
        return min(FIRST_CHUNKS_MAX, int(2 * self.ratio)) if self.is_known else UNKNOWN_CHUNKS


class PlannedAttach(NamedTuple):
    """One attach: the offsets it is for, ascending, and how many chunks to ask for."""

    offsets: Sequence[int]
    chunks: int


class StreamPlan:
    """The reads of one stream, of which `density` learns. `is_ahead`: the furthest one asks for some chunks more."""

    def __init__(self, offsets: Sequence[int], density: Density, *, is_ahead: bool = False) -> None:
        self._pending = deque(offsets)
        self._density = density
        self._is_ahead = is_ahead
        self._in_flight = 0

    def next_request(self) -> PlannedAttach | None:
        """The next attach to make now; None while there is nothing to ask, or not before an answer has come."""
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
        """The wanted offsets, ascending, that lie in a chunk the request brought, read further than asked included."""
        self._density.learn(records, size)
        last = first + records - 1
        offsets = request.offsets
        wanted = list(offsets[bisect_right(offsets, first - 1) : bisect_right(offsets, last)])
        # What was read beyond the request serves what would have been asked for next.
        while self._pending and self._pending[0] <= last and self._pending[0] >= first:
            wanted.append(self._pending.popleft())
        return wanted

    def more(self, request: PlannedAttach, reached: int, chunks: int, ahead: int) -> int:
        """How many chunks to ask for on top, once a request has come up to an offset; 0 for none.

        They are asked for before all that was asked for has come, so that neither side waits for the other. There are
        no more to ask for when it has all it wants, and where chunks are so small that jumping is cheaper after all.
        `chunks` have come up to the offset `reached`; `ahead` were asked for beside those, and have not come.
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
            # The first chunk is there in part; it says little by itself.
            records_each = max(records_each, self._density.records_each)
        expected = math.ceil((last - reached) / records_each)
        wanted = min(CHUNKS_AHEAD_MAX, GROWTH * chunks, expected)
        # Several together: each question costs both sides a call of the kernel.
        return wanted - ahead if 2 * ahead <= wanted else 0

    def answered(self, request: PlannedAttach, reached: int | None) -> None:
        """Close a request that brought chunks up to an offset; what it did not reach is asked for again.

        None says that the stream ends there: what lies behind is asked for no more.
        """
        self._in_flight -= 1
        if reached is None:
            last = request.offsets[-1]
            self._pending = deque(offset for offset in self._pending if offset < last)
            return
        rest = request.offsets[bisect_right(request.offsets, reached) :]
        if rest:
            # Requests are answered in any order, so what one leaves may lie behind what another did.
            self._pending = deque(sorted([*rest, *self._pending]))

    def abandon(self) -> list[int]:
        """Ask for nothing more; what was still to be asked for."""
        rest = list(self._pending)
        self._pending.clear()
        return rest


WINDOW_MESSAGES: Final = 1024
"""Ids planned together: the more, the more neighbours are found; a held message takes about 1 kB with its record."""

WINDOW_MAX: Final = 1_000_000
"""The most ids that can be planned together: each takes some hundred bytes before anything is read."""

WINDOW_BYTES_MAX: Final = 64 << 20
"""Bytes of records held for ids that are planned together; past it, they are read in smaller parts."""

TAKEN_BYTES: Final = 1 << 20
"""Bytes of results that are handed on together, about: whoever goes through them holds them all."""

Place: TypeAlias = tuple[str, int]

Result: TypeAlias = Message | NotFound | AccessRefused
"""What comes of one id: its message, or why there is none."""

RECORD_BYTES: Final = 256
"""Bytes that a record which is held takes beside its own, about."""

_Held: TypeAlias = tuple[bytes, int] | Result | StreamNotHere
"""A record with the time of its chunk, or why there is none.

A hundred thousand are held at once, and Python's garbage collector, which visits a message again and again, leaves out
plain tuples of bytes and numbers: so messages are made when it is their turn."""


class Part:
    """Ids that are read together, and what came of them.

    Some thousand ids pass through in the time of one attach, so this is written to do little for each.

    Attributes:
        wanted: The offsets to read by stream, ascending.
        rest: The ids from the first on that has no result, once `results` has given those before it.
        is_full: More came than can be held: some was dropped, and is to be asked for again.
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
        """The offsets that a message can have; the others get their error at once."""
        results = self._results[stream]
        # One look at the types of all: most are plain integers.
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

    def put(self, stream: str, offset: int, error: NotFound | AccessRefused | StreamNotHere) -> None:
        """Hold why there is no message."""
        results = self._results[stream]
        # None: it is asked for and has not come.
        if results.get(offset, 0) is None:
            results[offset] = error

    def put_records(self, stream: str, offsets: list[int], records: Iterable[bytes], time_ms: int) -> None:
        """Hold messages of a chunk; what is too much is dropped."""
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

    def missing(self) -> list[MessageId]:
        """The ids without a result, ascending."""
        return sorted(
            MessageId(stream, offset)
            for stream, results in self._results.items()
            for offset, held in results.items()
            if held is None
        )

    def results(self) -> Iterator[list[Any]]:
        """The results in the order of the ids, up to the first that has none.

        Messages come about `TAKEN_BYTES` at a time, what is none alone.
        """
        given: list[Any] = []
        message, of_streams, taken = Message.from_record, self._results, 0
        for number, (stream, offset) in enumerate(self._places):
            held = of_streams[stream][offset]
            if held is None:
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
            yield [held]
        if given:
            yield given

    def following_size(self, most: int) -> int:
        """How many ids the next part should have, so that what comes of them can be held."""
        each = max(1, self._came_bytes // max(1, self._came))
        fitting = self._bytes_max * 3 // 4 // each
        return max(1, min(most, fitting, len(self._places) // 2 if self.is_full else most))
