"""Reads one message; and many, with several attaches in flight over several connections, returned in order."""

import time
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import islice
from operator import attrgetter
from typing import Final

from relatum.errors import AccessRefused, NotFound, StreamNotHere
from relatum.reading._connection import Attach, SocketConnection, until
from relatum.reading._message import Message
from relatum.reading._nodes import Nodes
from relatum.reading._plan import Density, Part, Place, PlannedAttach, Result, StreamPlan
from relatum.reading._pool import Use
from relatum.wire.chunk import Chunk, record_at, records_at
from relatum.wire.frames import Code, Start, StartSpec
from relatum.wire.session import Event

ATTACHES_IN_FLIGHT: Final = 8
"""Maximum attaches in flight on a connection. The broker handles them one by one; several hide network latency."""

LANES_MAX: Final = 4
"""Maximum connections of one batched read. The broker runs a process for each, and an attach takes milliseconds of one
core. More connections than cores help, too: some wait for the disk or the client. See docs/adr/0004."""

LANE_ATTACHES_MIN: Final = 3
"""Attaches in flight on each connection before another connection is used. Small or dense reads need only one."""

DENSITIES_MAX: Final = 1024
"""Maximum streams whose chunk sizes are remembered."""

_first: Final = attrgetter("first_offset")

KEPT_BYTES_MAX: Final = 32 << 20
"""Maximum bytes of a cache; the oldest chunks are dropped first. A chunk rarely exceeds 1 MiB."""


class ChunkCache:
    """A cache of the chunks that one caller has read, of any streams. Use it for one answer only: it is never updated.

    With a cache, streams are read ahead: the cache's caller reads in rounds, and the next round mostly needs later
    messages, because related messages were published one after the other.
    """

    def __init__(self, bytes_max: int = KEPT_BYTES_MAX) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0
        self._chunks: dict[str, list[Chunk]] = {}
        self._oldest: deque[tuple[str, Chunk]] = deque()

    def keep(self, stream: str, chunk: Chunk) -> None:
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
        """Yield the chunks that contain some of the ascending offsets, each with these offsets."""
        chunks, begin = self._chunks.get(stream, ()), 0
        while chunks and begin < len(offsets):
            place = bisect_right(chunks, offsets[begin], key=_first) - 1
            last = chunks[place].last_offset if place >= 0 else -1
            if offsets[begin] > last:
                # No chunk contains the offset: skip to the first offset that the next chunk may contain.
                following = chunks[place + 1].first_offset if place + 1 < len(chunks) else offsets[-1] + 1
                begin = bisect_left(offsets, following, begin)
                continue
            end = bisect_right(offsets, last, begin)
            yield chunks[place], list(offsets[begin:end])
            begin = end


@dataclass(slots=True)
class _Lane:
    """A connection, lent until `stack` is closed, and its attaches in flight."""

    stack: ExitStack
    connection: SocketConnection
    in_flight: list[tuple[Attach, PlannedAttach]] = field(default_factory=list)

    @property
    def has_room(self) -> bool:
        """Whether the connection may send one more attach. False if it is used up."""
        return len(self.in_flight) < ATTACHES_IN_FLIGHT and not self.connection.session.is_used_up


class ManyReader:
    """Reads many ids from the connected node, part by part. It has no connection between two parts.

    If an id yields no message, `resolve` returns its final result, from the leader or, for other queues, AMQP 0.9.1.
    """

    def __init__(
        self, nodes: Nodes, resolve: Callable[[Result | StreamNotHere], Result], kept: ChunkCache | None = None
    ) -> None:
        self._nodes = nodes
        self._resolve = resolve
        self._cache = kept
        self._part = Part([])
        self._plans: dict[str, StreamPlan] = {}
        self._lanes: list[_Lane] = []
        self._may_add_lane = True

    def run(self, ids: Iterable[Place], window: int) -> Generator[list[Result], None, None]:
        """Yield the results in the order of the ids, in lists. `window` ids are planned together."""
        source, rest, size = iter(ids), list[Place](), window
        while places := rest[:size] + list(islice(source, max(0, size - len(rest)))):
            part = self._part = Part(places)
            self._read()
            for results in part.results():
                # This needs a connection. If reads kept theirs meanwhile, they could wait for each other.
                yield results if isinstance(results[0], Message) else [self._resolve(results[0])]
            rest, size = part.rest + rest[size:], part.following_size(window)

    def _read(self) -> None:
        """Read a part, and end all its subscriptions."""
        self._plans = {
            stream: StreamPlan(offsets, self._density(stream), is_ahead=self._cache is not None)
            for stream, valid in self._part.wanted.items()
            if (offsets := self._not_kept(stream, valid))
        }
        self._may_add_lane = True
        try:
            while self._plans:
                self._renew()
                self._send_attaches()
                busy = [lane for lane in self._lanes if lane.in_flight]
                if not busy:
                    break
                # Round robin: while one lane waits, the broker works on the others, whose sockets buffer the results.
                for lane in busy:
                    self._send(beside=lane)
                    lane.connection.deadline = time.monotonic() + self._nodes.limit_s
                    self._handle(lane, lane.connection.exchange())
        finally:
            self._return_lanes()

    def _return_lanes(self) -> None:
        lanes, self._lanes = self._lanes, []
        with ExitStack() as stack:
            for lane in lanes:
                stack.push(lane.stack)
            for lane in lanes:
                # The broker refuses to subscribe with an id that is still in use.
                for attach, _ in lane.in_flight:
                    attach.end()
                lane.connection.flush_or_abandon(self._nodes.limit_s)

    def _not_kept(self, stream: str, offsets: list[int]) -> list[int]:
        """Take messages from the cache, and return the remaining offsets."""
        taken: set[int] = set()
        for chunk, inside in self._cache.holding(stream, offsets) if self._cache is not None else ():
            self._part.put_records(stream, inside, records_at(chunk, inside), chunk.time_ms)
            taken.update(inside)
        return [offset for offset in offsets if offset not in taken] if taken else offsets

    def _density(self, stream: str) -> Density:
        densities = self._nodes.densities
        if stream not in densities and len(densities) >= DENSITIES_MAX:
            densities.clear()
        return densities.setdefault(stream, Density())

    def _send(self, beside: _Lane | None = None) -> None:
        """Send the pending bytes of all lanes except `beside`."""
        for lane in self._lanes:
            if lane is not beside:
                lane.connection.flush_or_abandon(self._nodes.limit_s)

    def _renew(self) -> None:
        """Return used-up connections to the pool, and borrow one if none is left."""
        for lane in self._lanes.copy():
            if lane.connection.session.is_used_up and not lane.in_flight:
                self._lanes.remove(lane)
                lane.stack.close()
        if not self._lanes:
            with ExitStack() as stack:
                connection = stack.enter_context(self._nodes.connection(Use.ANSWER))
                self._lanes.append(_Lane(stack.pop_all(), connection))

    def _lane(self) -> _Lane:
        """Return the lane for the next attach: the one with the fewest in flight, or a new lane if these are many.

        There is no new lane if other callers may need the free connections, or if connecting fails.
        """
        least = min((lane for lane in self._lanes if lane.has_room), key=lambda lane: len(lane.in_flight))
        if self._may_add_lane and len(self._lanes) < LANES_MAX and len(least.in_flight) >= LANE_ATTACHES_MIN:
            # The broker can work on these while this connects.
            self._send()
            stack = ExitStack()
            connection = self._nodes.spare_connection(stack)
            self._may_add_lane = connection is not None
            if connection is not None:
                least = _Lane(stack, connection)
                self._lanes.append(least)
        return least

    def _send_attaches(self) -> None:
        """Send attaches, stream after stream, until enough are in flight."""
        for stream, plan in self._plans.items():
            while not self._part.is_full and any(lane.has_room for lane in self._lanes):
                request = plan.next_request()
                if request is None:
                    break
                lane = self._lane()
                start = StartSpec(Start.OFFSET, request.offsets[0])
                attach_to = Attach.once if len(request.offsets) == 1 else Attach.continuable
                lane.in_flight.append((attach_to(lane.connection, stream, start, request.chunks), request))

    def _handle(self, lane: _Lane, events: list[Event]) -> None:
        is_any_at_barrier = False
        for event in events:
            for attach, request in lane.in_flight:
                attach.take(event)
                if attach.chunks:
                    self._store(attach, request, attach.chunks.pop())
                    self._requests_more(attach, request)
                is_any_at_barrier |= attach.is_at_barrier
        if is_any_at_barrier:
            lane.in_flight = [pair for pair in lane.in_flight if not self._is_over(*pair)]

    def _is_over(self, attach: Attach, request: PlannedAttach) -> bool:
        """Return whether an attach is over. If it is at its barrier and needs more chunks, request them."""
        if not attach.is_at_barrier:
            return False
        has_more = attach.chunks_received == attach.granted and attach.code == Code.OK
        if has_more and self._requests_more(attach, request):
            return False
        attach.end()
        self._finish(attach, request, is_at_end=not has_more)
        return True

    def _requests_more(self, attach: Attach, request: PlannedAttach) -> bool:
        """Request the chunks that a subscription still needs. Returns whether it needed any."""
        if attach.is_done or self._part.is_full or attach.last_offset is None:
            return False
        ahead = attach.granted - attach.chunks_received
        chunks = self._plans[attach.stream].more(request, attach.last_offset, attach.chunks_received, ahead)
        if chunks:
            attach.request_more(chunks)
        return chunks > 0

    def _store(self, attach: Attach, request: PlannedAttach, chunk: Chunk) -> None:
        stream = attach.stream
        if self._cache is not None:
            self._cache.keep(stream, chunk)
        attach.chunks_received += 1
        attach.last_offset = chunk.last_offset
        size = chunk.data_end - chunk.data_start
        offsets = self._plans[stream].arrived(request, chunk.first_offset, chunk.record_count, size)
        self._part.put_records(stream, offsets, records_at(chunk, offsets), chunk.time_ms)

    def _finish(self, attach: Attach, request: PlannedAttach, is_at_end: bool) -> None:
        plan = self._plans[attach.stream]
        try:
            attach.check()
        except StreamNotHere:
            # This node gives no results: the caller reads these messages on another node.
            plan.abandon()
            return
        except (NotFound, AccessRefused) as error:
            for offset in [*request.offsets, *plan.abandon()]:
                self._part.put(attach.stream, offset, error)
            return
        plan.answered(request, None if is_at_end else attach.last_offset)


def message_at(stream: str, offset: int, connection: SocketConnection) -> Message | None:
    """Return the message at an offset, in one round trip; None if this node has none there."""
    attach = Attach.once(connection, stream, StartSpec(Start.OFFSET, offset))
    until(connection, attach)
    attach.check()
    for chunk in attach.chunks:
        record = record_at(chunk, offset)
        if record is not None:
            return Message.from_record(stream, offset, record, chunk.time_ms)
    return None
