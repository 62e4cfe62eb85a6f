"""Reading many messages over one stream-protocol connection: several attaches in flight, results in order. No I/O."""

import time
from collections.abc import Callable, Generator
from typing import Final

from relatum._ids import MessageId
from relatum.errors import AccessRefused, NotFound, OffsetNotFound
from relatum.reading._batches import StreamBounds
from relatum.reading._message import Message
from relatum.reading._operations import Attach, StreamNotHere, StreamOperations, not_there
from relatum.reading._plan import Density, Request, StreamPlan
from relatum.reading._window import Result, Window
from relatum.wire._chunk import Chunk, records_at
from relatum.wire._frames import Code, Start, StartSpec
from relatum.wire._session import Event

ATTACHES_IN_FLIGHT: Final = 8
"""Attaches under way at once on a connection. The broker works them off one by one; more only hide the way there."""

DENSITIES_MAX: Final = 1024
"""Streams whose chunk sizes are remembered."""

Results = Generator[Result | StreamNotHere | None, list[Event], None]
"""Yields results, and None where bytes must be exchanged; is sent the events that came."""


class ManyReader:
    """Reads the ids of a window.

    Args:
        operations: A connection's operations; nothing else may use them meanwhile.
        window: What is asked for.
        densities: What is known of streams, kept between calls.
        clock: Seconds, to learn what attaching and reading on take.
    """

    def __init__(
        self,
        operations: StreamOperations,
        window: Window,
        densities: dict[str, Density],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._clock = clock
        self._idle_since = clock()
        self._operations = operations
        self._window = window
        self._densities = densities
        self._plans: dict[str, StreamPlan] = {}
        self._in_flight: list[tuple[Attach, Request]] = []

    def run(self) -> Results:
        """Read part after part until no id is left."""
        while wanted := self._window.open():
            self._plans = {
                stream: StreamPlan(offsets, self._density(stream))
                for stream, offsets in self._window.valid(wanted).items()
            }
            yield from self._part()
            yield from self._explain()
            yield from self._window.ready()
            self._window.close()

    def _density(self, stream: str) -> Density:
        if stream not in self._densities and len(self._densities) >= DENSITIES_MAX:
            self._densities.clear()
        return self._densities.setdefault(stream, Density())

    def _part(self) -> Results:
        self._ask()
        while self._in_flight:
            events = yield None
            self._take(events)
            yield from self._window.ready()
            self._ask()

    def _ask(self) -> None:
        """Send attaches until enough are in flight, each stream in its turn."""
        for stream, plan in self._plans.items():
            while len(self._in_flight) < ATTACHES_IN_FLIGHT and not self._window.is_full:
                request = plan.next_request()
                if request is None:
                    break
                start = StartSpec(Start.OFFSET, request.offsets[0])
                make = self._operations.attach if len(request.offsets) == 1 else self._operations.attach_to_go_on
                attach = make(stream, start, request.chunks)
                attach.sent_at = self._clock()
                self._in_flight.append((attach, request))

    def _take(self, events: list[Event]) -> None:
        now = self._clock()
        is_any_at_barrier = False
        for event in events:
            for attach, request in self._in_flight:
                attach.take(event)
                if attach.chunks:
                    self._keep(attach, request, attach.chunks.pop(), now)
                is_any_at_barrier |= attach.is_at_barrier
        if is_any_at_barrier:
            self._in_flight = [pair for pair in self._in_flight if not self._is_over(*pair, now)]

    def _is_over(self, attach: Attach, request: Request, now: float) -> bool:
        """Go on with a subscription that is at its barrier and not at its goal; True for one that is over."""
        if not attach.is_at_barrier:
            return False
        has_more = attach.chunks_seen == attach.granted and attach.code == Code.OK
        if has_more and not attach.is_done and not self._window.is_full and attach.reached is not None:
            chunks = self._plans[attach.stream].more(request, attach.reached, attach.chunks_seen)
            if chunks:
                self._operations.go_on(attach, chunks)
                return False
        self._operations.end(attach)
        self._close(attach, request, now, is_at_end=not has_more)
        return True

    def _keep(self, attach: Attach, request: Request, chunk: Chunk, now: float) -> None:
        stream = attach.stream
        if not attach.chunks_seen:
            attach.first_at = now
        attach.chunks_seen += 1
        attach.reached = chunk.last_offset
        size = chunk.data_end - chunk.data_start
        offsets = self._plans[stream].arrived(request, chunk.first_offset, chunk.record_count, size)
        put, from_record, time_ms = self._window.put, Message.from_record, chunk.time_ms
        for offset, record in zip(offsets, records_at(chunk, offsets), strict=True):
            put(stream, offset, from_record(stream, offset, record, time_ms), len(record))

    def _close(self, attach: Attach, request: Request, now: float, is_at_end: bool) -> None:
        if attach.chunks_seen:
            # The broker works attaches off one by one: this one's time begins where the one before ended.
            attach_s = attach.first_at - max(self._idle_since, attach.sent_at)
            self._density(attach.stream).learn_times(attach_s, attach.chunks_seen, now - attach.first_at)
        self._idle_since = now
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

    def _explain(self) -> Results:
        """Say of each id that got no message why there is none; not when the window ran full."""
        if self._window.is_full:
            return
        missing = self._window.missing()
        for stream in dict.fromkeys(stream for stream, _ in missing):
            bounds = yield from self._operations.bounds(stream)
            for asked in missing:
                if asked.stream == stream:
                    yield from self._explain_one(asked, bounds)

    def _explain_one(self, asked: MessageId, bounds: StreamBounds) -> Results:
        stream, offset = asked
        if bounds.first is not None and bounds.last is not None and bounds.first <= offset <= bounds.last:
            # Between the ends there are few offsets without a message: asked for alone before it is said.
            try:
                found = yield from self._operations.read(stream, offset)
                self._window.put(stream, offset, found)
            except OffsetNotFound as error:
                self._window.put(stream, offset, error)
        else:
            self._window.put(stream, offset, not_there(stream, offset, bounds))
