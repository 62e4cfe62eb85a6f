"""Reading many messages: attaches in flight over several connections, and results in order."""

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
from relatum.reading._connection import Attach, SocketConnection
from relatum.reading._message import Message
from relatum.reading._nodes import Nodes
from relatum.reading._plan import Density, Part, Place, PlannedAttach, Result, StreamPlan
from relatum.reading._pool import Use
from relatum.wire.chunk import Chunk, records_at
from relatum.wire.frames import Code, Start, StartSpec
from relatum.wire.session import Event

ATTACHES_IN_FLIGHT: Final = 8
"""Attaches in flight on a connection. The broker handles them one by one; more only hide the network's latency."""

LANES_MAX: Final = 4
"""Connections of one batched read: the broker has a process for each, and an attach costs it milliseconds of one core.
More than its cores help as well: while one waits for the disk or for us, others run. See docs/adr/0004."""

LANE_ATTACHES: Final = 3
"""Attaches in flight on each connection before another one is taken: small or dense reads need only one."""

DENSITIES_MAX: Final = 1024
"""The most streams whose chunk sizes are remembered."""


_first: Final = attrgetter("first_offset")

KEPT_BYTES_MAX: Final = 32 << 20
"""Bytes of kept chunks; the oldest are dropped first. A chunk has at most 1 MiB unless a publisher batches more."""


class ChunkCache:
    """The chunks that one caller has read, of any streams; valid for one answer, because they are not read again.

    A caller that keeps chunks reads in rounds, so streams are read ahead: the next round mostly wants later messages,
    because messages that belong together were published one after the other.
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
        """Yield the chunks that hold some of the ascending offsets, each with the offsets it holds."""
        chunks, begin = self._chunks.get(stream, ()), 0
        while chunks and begin < len(offsets):
            place = bisect_right(chunks, offsets[begin], key=_first) - 1
            last = chunks[place].last_offset if place >= 0 else -1
            if offsets[begin] > last:
                # In no chunk: skip to the first offset that may be in the next one.
                following = chunks[place + 1].first_offset if place + 1 < len(chunks) else offsets[-1] + 1
                begin = bisect_left(offsets, following, begin)
                continue
            end = bisect_right(offsets, last, begin)
            yield chunks[place], list(offsets[begin:end])
            begin = end


@dataclass(slots=True)
class _Lane:
    """A connection, held until the stack is closed, and its attaches in flight."""

    stack: ExitStack
    connection: SocketConnection
    in_flight: list[tuple[Attach, PlannedAttach]] = field(default_factory=list)

    @property
    def has_room(self) -> bool:
        """Whether one more attach may be sent; False for a worn connection."""
        return len(self.in_flight) < ATTACHES_IN_FLIGHT and not self.connection.session.is_used_up


class ManyReader:
    """Reads many ids at the connected node, part by part; between two parts it holds no connection.

    `settle` resolves a result that is not a message: it queries the leader, or another name.
    """

    def __init__(
        self, nodes: Nodes, settle: Callable[[Result | StreamNotHere], Result], kept: ChunkCache | None = None
    ) -> None:
        self._nodes = nodes
        self._settle = settle
        self._kept = kept
        self._part = Part([])
        self._plans: dict[str, StreamPlan] = {}
        self._lanes: list[_Lane] = []
        self._may_widen = True

    def run(self, ids: Iterable[Place], window: int) -> Generator[list[Result], None, None]:
        """Yield the results in the order of the ids, some at a time; `window` ids are planned together."""
        source, rest, size = iter(ids), list[Place](), window
        while places := rest[:size] + list(islice(source, max(0, size - len(rest)))):
            part = self._part = Part(places)
            self._read()
            for results in part.results():
                # Settling takes a connection: reads that still held theirs could wait for each other.
                yield results if isinstance(results[0], Message) else [self._settle(results[0])]
            rest, size = part.rest + rest[size:], part.following_size(window)

    def _read(self) -> None:
        """Read a part. No subscription is left behind."""
        self._plans = {
            stream: StreamPlan(offsets, self._density(stream), is_ahead=self._kept is not None)
            for stream, valid in self._part.wanted.items()
            if (offsets := self._not_kept(stream, valid))
        }
        self._may_widen = True
        try:
            while self._plans:
                self._renew()
                self._ask()
                busy = [lane for lane in self._lanes if lane.in_flight]
                if not busy:
                    break
                # In turns: the broker works on the other lanes while one waits, and their sockets buffer the results.
                for lane in busy:
                    self._send(beside=lane)
                    lane.connection.deadline = time.monotonic() + self._nodes.limit_s
                    self._take(lane, lane.connection.exchange())
        finally:
            self._give_back()

    def _give_back(self) -> None:
        lanes, self._lanes = self._lanes, []
        with ExitStack() as stack:
            for lane in lanes:
                stack.push(lane.stack)
            for lane in lanes:
                # The broker refuses a number that is still attached when this connection uses it again.
                for attach, _ in lane.in_flight:
                    attach.end()
                lane.connection.put_by(self._nodes.limit_s)

    def _not_kept(self, stream: str, offsets: list[int]) -> list[int]:
        """Take a stream's messages from kept chunks, and return the remaining offsets."""
        taken: set[int] = set()
        for chunk, inside in self._kept.holding(stream, offsets) if self._kept is not None else ():
            self._part.put_records(stream, inside, records_at(chunk, inside), chunk.time_ms)
            taken.update(inside)
        return [offset for offset in offsets if offset not in taken] if taken else offsets

    def _density(self, stream: str) -> Density:
        densities = self._nodes.densities
        if stream not in densities and len(densities) >= DENSITIES_MAX:
            densities.clear()
        return densities.setdefault(stream, Density())

    def _send(self, beside: _Lane | None = None) -> None:
        """Send what is pending on all lanes but one."""
        for lane in self._lanes:
            if lane is not beside:
                lane.connection.put_by(self._nodes.limit_s)

    def _renew(self) -> None:
        """Give worn connections back, and make sure that there is one."""
        for lane in self._lanes.copy():
            if lane.connection.session.is_used_up and not lane.in_flight:
                self._lanes.remove(lane)
                lane.stack.close()
        if not self._lanes:
            with ExitStack() as stack:
                connection = stack.enter_context(self._nodes.connection(Use.ANSWER))
                self._lanes.append(_Lane(stack.pop_all(), connection))

    def _lane(self) -> _Lane:
        """Return the lane for the next attach: the lane with the fewest in flight, or a new lane if these are many.

        No lane is added if other callers may need the free connections, or if none can be opened.
        """
        least = min((lane for lane in self._lanes if lane.has_room), key=lambda lane: len(lane.in_flight))
        if self._may_widen and len(self._lanes) < LANES_MAX and len(least.in_flight) >= LANE_ATTACHES:
            # So that the broker has work while this connects.
            self._send()
            stack = ExitStack()
            connection = self._nodes.further(stack)
            self._may_widen = connection is not None
            if connection is not None:
                least = _Lane(stack, connection)
                self._lanes.append(least)
        return least

    def _ask(self) -> None:
        """Send attaches until enough are in flight, each stream in its turn."""
        for stream, plan in self._plans.items():
            while not self._part.is_full and any(lane.has_room for lane in self._lanes):
                request = plan.next_request()
                if request is None:
                    break
                lane = self._lane()
                start = StartSpec(Start.OFFSET, request.offsets[0])
                attach_to = Attach.once if len(request.offsets) == 1 else Attach.to_go_on
                lane.in_flight.append((attach_to(lane.connection, stream, start, request.chunks), request))

    def _take(self, lane: _Lane, events: list[Event]) -> None:
        is_any_at_barrier = False
        for event in events:
            for attach, request in lane.in_flight:
                attach.take(event)
                if attach.chunks:
                    self._keep(attach, request, attach.chunks.pop())
                    self._continues(attach, request)
                is_any_at_barrier |= attach.is_at_barrier
        if is_any_at_barrier:
            lane.in_flight = [pair for pair in lane.in_flight if not self._is_over(*pair)]

    def _is_over(self, attach: Attach, request: PlannedAttach) -> bool:
        """Continue a subscription at its barrier that has not reached its goal. Returns whether it is over."""
        if not attach.is_at_barrier:
            return False
        has_more = attach.chunks_seen == attach.granted and attach.code == Code.OK
        if has_more and self._continues(attach, request):
            return False
        attach.end()
        self._close(attach, request, is_at_end=not has_more)
        return True

    def _continues(self, attach: Attach, request: PlannedAttach) -> bool:
        """Ask for the further chunks that a subscription needs. Returns whether there were any."""
        if attach.is_done or self._part.is_full or attach.reached is None:
            return False
        ahead = attach.granted - attach.chunks_seen
        chunks = self._plans[attach.stream].more(request, attach.reached, attach.chunks_seen, ahead)
        if chunks:
            attach.go_on(chunks)
        return chunks > 0

    def _keep(self, attach: Attach, request: PlannedAttach, chunk: Chunk) -> None:
        stream = attach.stream
        if self._kept is not None:
            self._kept.keep(stream, chunk)
        attach.chunks_seen += 1
        attach.reached = chunk.last_offset
        size = chunk.data_end - chunk.data_start
        offsets = self._plans[stream].arrived(request, chunk.first_offset, chunk.record_count, size)
        self._part.put_records(stream, offsets, records_at(chunk, offsets), chunk.time_ms)

    def _close(self, attach: Attach, request: PlannedAttach, is_at_end: bool) -> None:
        plan = self._plans[attach.stream]
        try:
            attach.check()
        except StreamNotHere:
            # They have no result here: the caller reads them on another node.
            plan.abandon()
            return
        except (NotFound, AccessRefused) as error:
            for offset in [*request.offsets, *plan.abandon()]:
                self._part.put(attach.stream, offset, error)
            return
        plan.answered(request, None if is_at_end else attach.reached)
