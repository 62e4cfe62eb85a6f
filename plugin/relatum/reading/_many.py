"""Reading many messages over the stream protocol: several attaches in flight, results in order. No I/O."""

from collections.abc import Collection, Generator
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from relatum.errors import AccessRefused, NotFound, StreamNotHere
from relatum.reading._attach import Attach
from relatum.reading._kept import KeptChunks
from relatum.reading._message import Message
from relatum.reading._operations import StreamOperations
from relatum.reading._plan import Density, PlannedAttach, Result, StreamPlan, Window
from relatum.steps import Request
from relatum.wire import Chunk, Code, Event, Start, StartSpec, records_at

ATTACHES_IN_FLIGHT: Final = 8
"""Attaches under way at once on a connection. The broker works them off one by one; more only hide the way there."""

LANES_MAX: Final = 4
"""Connections of one batched read: the broker has a process for each, and an attach takes it milliseconds of one core.
More than its cores help as well: while one waits for the disk or for us, others do not. See docs/adr/0039."""

LANE_ATTACHES: Final = 3
"""Attaches under way on each connection before another one is taken: what is near, or little, needs none."""

DENSITIES_MAX: Final = 1024
"""Streams whose chunk sizes are remembered."""


@dataclass(frozen=True, slots=True)
class Take(Request[StreamOperations | None]):
    """Give a lane's connection back, if it has one, and take another; answered with its operations.

    Nothing is under way on it. None where it is not the first lane, and others may need what connections there are.
    """

    lane: int


@dataclass(frozen=True, slots=True)
class GiveBack(Request[None]):
    """Give all connections back: what follows is results that have come already. Nothing is under way."""


@dataclass(frozen=True, slots=True)
class ExchangeOn(Request[list[Event]]):
    """As `Exchange`, on one lane; what there is to send on the others is sent as well."""

    lane: int


@dataclass(frozen=True, slots=True)
class Settle(Request[Result]):
    """Find out what a result that is no message amounts to: the leader's answer, another name."""

    result: Result | StreamNotHere


ManyRequest: TypeAlias = ExchangeOn | Take | GiveBack | Settle
Results: TypeAlias = Generator[ManyRequest | list[Result], Any, None]
"""Gives results, in their order, as many at a time as are there."""


@dataclass(slots=True)
class _Lane:
    """A connection, and what is under way on it."""

    number: int
    operations: StreamOperations
    in_flight: list[tuple[Attach, PlannedAttach]] = field(default_factory=list)

    @property
    def has_room(self) -> bool:
        """Whether an attach more may be sent; none over a worn connection."""
        return len(self.in_flight) < ATTACHES_IN_FLIGHT and not self.operations.is_worn


class ManyReader:
    """Reads the ids of a window.

    Args:
        kept: Chunks that need not be read again; what is read is kept there.
    """

    def __init__(self, window: Window, densities: dict[str, Density], kept: KeptChunks | None = None) -> None:
        self._window = window
        self._densities = densities
        self._kept = kept
        self._plans: dict[str, StreamPlan] = {}
        self._lanes: list[_Lane] = []
        self._may_widen = True

    def run(self) -> Results:
        """Read part after part until no id is left. Left early, nothing stays attached."""
        try:
            while wanted := self._window.open():
                visited: Collection[str] = self._kept.visited if self._kept is not None else ()
                self._plans = {
                    stream: StreamPlan(offsets, self._density(stream), is_ahead=stream in visited)
                    for stream, valid in self._window.valid(wanted).items()
                    if (offsets := self._not_kept(stream, valid))
                }
                if self._plans:
                    self._lanes, self._may_widen = [_Lane(0, (yield from _first()))], True
                    yield from self._part()
                    # Before the last results: who takes them may take his time, ask something else, or never ask for
                    # more.
                    yield from GiveBack()
                self._explain()
                yield from self._ready()
                self._window.close()
        finally:
            # Their numbers come again on this connection, and the broker refuses one that is still attached.
            for lane in self._lanes:
                for attach, _ in lane.in_flight:
                    lane.operations.end(attach)

    def _not_kept(self, stream: str, offsets: list[int]) -> list[int]:
        """Take what was kept of a stream; the offsets that are left."""
        taken: set[int] = set()
        for chunk, inside in self._kept.holding(stream, offsets) if self._kept is not None else ():
            self._window.put_records(stream, inside, records_at(chunk, inside), chunk.time_ms)
            taken.update(inside)
        return [offset for offset in offsets if offset not in taken] if taken else offsets

    def _density(self, stream: str) -> Density:
        if stream not in self._densities and len(self._densities) >= DENSITIES_MAX:
            self._densities.clear()
        return self._densities.setdefault(stream, Density())

    def _part(self) -> Results:
        while True:
            yield from self._renew()
            yield from self._ask()
            busy = [lane for lane in self._lanes if lane.in_flight]
            if not busy:
                return
            # In turns: while one is waited for, the broker works on the others, and what it sends is held.
            for lane in busy:
                if self._window.lacks_any:
                    yield from self._ready()
                self._take(lane, (yield from ExchangeOn(lane.number)))

    def _renew(self) -> Generator[ManyRequest, Any, None]:
        """Have other connections for those that are worn."""
        for lane in self._lanes.copy():
            if lane.operations.is_worn and not lane.in_flight:
                operations = yield from Take(lane.number)
                if operations is None:
                    self._lanes.remove(lane)
                    self._may_widen = False
                else:
                    lane.operations = operations

    def _ready(self) -> Results:
        while results := self._window.ready():
            begin = 0
            for place, result in enumerate(results):
                if not isinstance(result, Message):
                    # What comes before is given first: the answer may be an error.
                    yield results[begin:place]
                    yield [(yield from Settle(result))]
                    begin = place + 1
            yield results[begin:] if begin else results

    def _ask(self) -> Generator[ManyRequest, Any, None]:
        """Send attaches until enough are in flight, each stream in its turn."""
        for stream, plan in self._plans.items():
            while not self._window.is_full and any(lane.has_room for lane in self._lanes):
                request = plan.next_request()
                if request is None:
                    break
                lane = yield from self._lane()
                start = StartSpec(Start.OFFSET, request.offsets[0])
                operations = lane.operations
                make = operations.attach if len(request.offsets) == 1 else operations.attach_to_go_on
                lane.in_flight.append((make(stream, start, request.chunks), request))

    def _lane(self) -> Generator[ManyRequest, Any, _Lane]:
        """Where to send the next attach: where the least are under way, on a further connection where that are many."""
        least = min((lane for lane in self._lanes if lane.has_room), key=lambda lane: len(lane.in_flight))
        if self._may_widen and len(self._lanes) < LANES_MAX and len(least.in_flight) >= LANE_ATTACHES:
            operations = yield from Take(len(self._lanes))
            if operations is not None:
                least = _Lane(len(self._lanes), operations)
                self._lanes.append(least)
            self._may_widen = operations is not None
        return least

    def _take(self, lane: _Lane, events: list[Event]) -> None:
        is_any_at_barrier = False
        for event in events:
            for attach, request in lane.in_flight:
                attach.take(event)
                if attach.chunks:
                    self._keep(attach, request, attach.chunks.pop())
                    self._went_on(lane, attach, request)
                is_any_at_barrier |= attach.is_at_barrier
        if is_any_at_barrier:
            lane.in_flight = [pair for pair in lane.in_flight if not self._is_over(lane, *pair)]

    def _is_over(self, lane: _Lane, attach: Attach, request: PlannedAttach) -> bool:
        """Go on with a subscription that is at its barrier and not at its goal; whether it is over."""
        if not attach.is_at_barrier:
            return False
        has_more = attach.chunks_seen == attach.granted and attach.code == Code.OK
        if has_more and self._went_on(lane, attach, request):
            return False
        lane.operations.end(attach)
        self._close(attach, request, is_at_end=not has_more)
        return True

    def _went_on(self, lane: _Lane, attach: Attach, request: PlannedAttach) -> bool:
        """Ask for what a subscription needs beside what was asked for; whether there was any."""
        if attach.is_done or self._window.is_full or attach.reached is None:
            return False
        ahead = attach.granted - attach.chunks_seen
        chunks = self._plans[attach.stream].more(request, attach.reached, attach.chunks_seen, ahead)
        if chunks:
            lane.operations.go_on(attach, chunks)
        return chunks > 0

    def _keep(self, attach: Attach, request: PlannedAttach, chunk: Chunk) -> None:
        stream = attach.stream
        if self._kept is not None:
            self._kept.keep(stream, chunk)
        attach.chunks_seen += 1
        attach.reached = chunk.last_offset
        size = chunk.data_end - chunk.data_start
        offsets = self._plans[stream].arrived(request, chunk.first_offset, chunk.record_count, size)
        self._window.put_records(stream, offsets, records_at(chunk, offsets), chunk.time_ms)

    def _close(self, attach: Attach, request: PlannedAttach, is_at_end: bool) -> None:
        plan = self._plans[attach.stream]
        try:
            attach.check()
        except StreamNotHere as error:
            # Handed on one by one: who holds the connections reads them on another node.
            for offset in [*request.offsets, *plan.abandon()]:
                elsewhere = StreamNotHere(str(error), stream=attach.stream, offset=offset)
                self._window.put(attach.stream, offset, elsewhere)
            return
        except (NotFound, AccessRefused) as error:
            for offset in [*request.offsets, *plan.abandon()]:
                self._window.put(attach.stream, offset, error)
            return
        plan.answered(request, None if is_at_end else attach.reached)

    def _explain(self) -> None:
        """Hand on each id that got no message: who holds the connections asks the leader why."""
        if self._window.is_full:
            return
        for stream, offset in self._window.missing():
            message = f"This node has no message at offset {offset} of {stream!r}."
            self._window.put(stream, offset, StreamNotHere(message, stream=stream, offset=offset))


def _first() -> Generator[ManyRequest, Any, StreamOperations]:
    operations = yield from Take(0)
    assert operations is not None, "the first lane has a connection"
    return operations
