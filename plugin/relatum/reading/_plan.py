"""Plans a batched read: which offsets are read together, how many chunks to request, which results to hold. No I/O.

One attach costs about as much as reading many small chunks or a few large ones, and streams differ in the number of
records per chunk. So the plan starts with one attach, learns from the chunks that arrive, and decides each time whether
to read across the gap to the next requested offset or to attach again there. The costs are constants, not measured at
run time (docs/adr/0004).
"""

import math
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

from relatum.common.checks import checked_name
from relatum.common.limits import INTEGER_MAX
from relatum.errors import AccessRefused, InvalidInput, NotFound, OffsetNotFound, StreamNotHere
from relatum.reading._bounds import check_integers, check_offset
from relatum.reading._message import Message

ATTACH_S: Final = 1e-3
"""Seconds for one attach, including its first chunk. Measured on an idle machine: 0.9 ms (4.3.6) to 1.5 ms (3.10.8)."""

CHUNK_S: Final = 30e-6
"""Seconds for each further chunk, without its bytes. Measured: 17 µs (4.3.6) to 60 µs (3.10.8)."""

BYTE_S: Final = 1e-9
"""Seconds for each byte of a further chunk. Measured: 0.2 to 0.4 ms for 184 kB."""

CHUNKS_AHEAD_MAX: Final = 64
"""Maximum chunks that are requested and have not arrived: enough that the broker never waits for a request."""

UNKNOWN_CHUNKS: Final = 2
"""Chunks in the first request for neighbouring offsets of a stream without known chunk sizes."""

_SIZE_WEIGHT_MIN: Final = 0.02
"""Minimum weight of the newest chunk in the average sizes, which change with the publisher's rate."""

FIRST_CHUNKS_MAX: Final = 16
"""Maximum chunks in the first request, because the stream's averages may be wrong for this part of it."""

GROWTH: Final = 2
"""Maximum chunks requested ahead, as a multiple of those received so far."""

STRAY_CHUNKS_MIN: Final = 8
"""Minimum received chunks before a request may end early because its chunks are smaller than expected."""

STRAY_RATIO: Final = 1.5
"""Factor by which the gap must exceed its limit to end a request early: a new attach may find chunks as small."""


class Density:
    """The average sizes of one stream's chunks: records and bytes."""

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
        """The number of further chunks that can be read in the time of one attach."""
        # From constants: a slow or busy machine slows both equally. An error by a factor of two or three costs little,
        # and a busy machine's pauses would distort measurements more.
        return ATTACH_S / (CHUNK_S + BYTE_S * self.bytes_each)

    @property
    def gap_max(self) -> float:
        """The widest gap, in offsets, across which reading is cheaper than a new attach."""
        return self.ratio * self.records_each

    def chunks_for(self, first: int, last: int) -> int:
        """Return how many chunks to request at first to read from one offset to another."""
        if first == last:
            return 1
        if not self.is_known:
            return UNKNOWN_CHUNKS
        # One more, because the first offset may be at the end of its chunk.
        return min(FIRST_CHUNKS_MAX, 1 + round((last - first) / self.records_each))

    @property
    def chunks_ahead(self) -> int:
        """The number of chunks to read ahead, which cost about as much as two attaches and may save more."""
        return min(FIRST_CHUNKS_MAX, int(2 * self.ratio)) if self.is_known else UNKNOWN_CHUNKS


class PlannedAttach(NamedTuple):
    """A planned subscription: the offsets to read, ascending, and the number of chunks to request."""

    offsets: Sequence[int]
    chunks: int


class StreamPlan:
    """The attaches of one stream. Arriving chunks update `density`. `is_ahead`: the last attach reads chunks ahead."""

    def __init__(self, offsets: Sequence[int], density: Density, *, is_ahead: bool = False) -> None:
        self._pending = deque(offsets)
        self._density = density
        self._is_ahead = is_ahead
        self._in_flight = 0

    def next_request(self) -> PlannedAttach | None:
        """Return the next attach to send; None if all are sent, or the next one depends on an answer."""
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
        """Return the wanted offsets in a chunk, ascending, also those planned for later, which are then done."""
        self._density.learn(records, size)
        last = first + records - 1
        offsets = request.offsets
        wanted = list(offsets[bisect_right(offsets, first - 1) : bisect_right(offsets, last)])
        while self._pending and self._pending[0] <= last and self._pending[0] >= first:
            wanted.append(self._pending.popleft())
        return wanted

    def more(self, request: PlannedAttach, reached: int, chunks: int, ahead: int) -> int:
        """Return how many more chunks to request for a request; 0 for none.

        `chunks` have arrived, up to the offset `reached`; `ahead` more were requested and have not arrived. Chunks are
        requested before all earlier ones have arrived, so that neither side waits. A request ends when it has all its
        offsets, or if its chunks are so small that a new attach is cheaper.
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
            # Only a part of the first chunk counts, so alone it is not representative.
            records_each = max(records_each, self._density.records_each)
        expected = math.ceil((last - reached) / records_each)
        wanted = min(CHUNKS_AHEAD_MAX, GROWTH * chunks, expected)
        # Several at a time, because each request costs both sides a system call.
        return wanted - ahead if 2 * ahead <= wanted else 0

    def answered(self, request: PlannedAttach, reached: int | None) -> None:
        """Close a request that received chunks up to the offset `reached`; later offsets are requested again.

        `reached` is None if the stream ended: then later offsets are not requested.
        """
        self._in_flight -= 1
        if reached is None:
            last = request.offsets[-1]
            self._pending = deque(offset for offset in self._pending if offset < last)
            return
        rest = request.offsets[bisect_right(request.offsets, reached) :]
        if rest:
            # Sorted, because requests are answered in any order.
            self._pending = deque(sorted([*rest, *self._pending]))

    def abandon(self) -> list[int]:
        rest = list(self._pending)
        self._pending.clear()
        return rest


WINDOW_MESSAGES: Final = 1024
"""Default number of ids planned together. More ids have more neighbours, but a held message takes about 1 kB."""

WINDOW_MAX: Final = 1_000_000
"""Maximum ids planned together. Each takes a few hundred bytes before anything is read."""

WINDOW_BYTES_MAX: Final = 64 << 20
"""Maximum bytes of records held for ids that are planned together. Beyond it, the ids are read in smaller parts."""

YIELD_BYTES: Final = 1 << 17
"""Approximate bytes of results yielded together. They are so few that most are freed before a garbage collection. With
1 MiB, reading 100,000 messages of groups took a tenth more processor time."""

Place: TypeAlias = tuple[str, int]

Result: TypeAlias = Message | NotFound | AccessRefused
"""The result of an id: its message, or the error that says why there is none."""

RECORD_BYTES: Final = 256
"""Approximate overhead of a held record, in bytes."""

_HeldRecord: TypeAlias = tuple[bytes, int] | NotFound | AccessRefused
"""A record with the time of its chunk, or the error that says why there is none.

A hundred thousand may be held. Python's garbage collector would visit so many messages repeatedly, but it skips tuples
of bytes and numbers. So messages are created when they are yielded."""


class Part:
    """Ids that are read together, and their results. It handles some thousand ids in the time of one attach.

    `wanted`: The offsets to read by stream, ascending. `is_full`: More arrived than may be held, so some messages were
    dropped and must be read again. `rest`: Once `results` has ended, the ids from the first dropped one on.
    """

    def __init__(self, places: list[Place], bytes_max: int = WINDOW_BYTES_MAX) -> None:
        self._places = places
        self._bytes_max = bytes_max
        self._held = self._held_bytes = 0
        self.rest: list[Place] = []
        self.is_full = False
        # By stream and offset: the result, or None until it arrives.
        self._results: dict[str, dict[int, _HeldRecord | None]] = defaultdict(dict)
        try:
            for stream, offset in places:
                self._results[stream][offset] = None
        except (TypeError, ValueError):
            raise InvalidInput("ids= takes pairs of a stream's name and an offset (MessageId)") from None
        self.wanted = {checked_name("stream", stream): self._valid(stream) for stream in self._results}

    def _valid(self, stream: str) -> list[int]:
        """Return the valid offsets, ascending. The others get an error as their result."""
        results = self._results[stream]
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
        # None: it was requested and has not arrived.
        if results.get(offset, 0) is None:
            results[offset] = error

    def put_records(self, stream: str, offsets: list[int], records: Iterable[bytes], time_ms: int) -> None:
        """Store records of a chunk. Records beyond the limit are dropped."""
        results, bytes_max = self._results[stream], self._bytes_max
        held, held_bytes = self._held, self._held_bytes
        for offset, record in zip(offsets, records, strict=True):
            if results.get(offset, 0) is not None:
                continue
            size = RECORD_BYTES + len(record)
            if held and held_bytes + size > bytes_max:
                self.is_full = True
                continue
            held += 1
            held_bytes += size
            results[offset] = record, time_ms
        self._held, self._held_bytes = held, held_bytes

    def results(self) -> Iterator[list[Any]]:
        """Yield the results in the order of the ids; if the part is full, up to the first that was dropped.

        A list has messages of about `YIELD_BYTES`, or one error. A message that did not arrive yields `StreamNotHere`,
        since only the leader knows why.
        """
        batch: list[Any] = []
        message, of_streams, batch_bytes = Message.from_record, self._results, 0
        for number, (stream, offset) in enumerate(self._places):
            held = of_streams[stream][offset]
            if held is None and self.is_full:
                self.rest = self._places[number:]
                break
            if isinstance(held, tuple):
                if batch_bytes >= YIELD_BYTES:
                    yield batch
                    batch, batch_bytes = [], 0
                batch.append(message(stream, offset, *held))
                batch_bytes += RECORD_BYTES + len(held[0])
                continue
            if batch:
                yield batch
                batch, batch_bytes = [], 0
            reason = f"This node has no message at offset {offset} of {stream!r}."
            yield [held or StreamNotHere(reason, stream=stream, offset=offset)]
        if batch:
            yield batch

    def following_size(self, most: int) -> int:
        """Return how many ids the next part should have, so that their results probably fit."""
        each = max(1, self._held_bytes // max(1, self._held))
        fitting = self._bytes_max * 3 // 4 // each
        return max(1, min(most, fitting, len(self._places) // 2 if self.is_full else most))
