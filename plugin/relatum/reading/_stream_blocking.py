"""Reading streams over the stream protocol, blocking."""

import contextlib
import math
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Generator, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from relatum.errors import (
    AccessRefused,
    NotFound,
    OffsetExpired,
    StreamNotFound,
    StreamNotHere,
    StreamUnavailable,
    Transient,
)
from relatum.reading._batches import RecordBatch, StreamBounds
from relatum.reading._kept import KeptChunks
from relatum.reading._leading import (
    NODES_TRIED_MAX,
    Ask,
    LedElsewhere,
    NotSettled,
    OutOfReach,
    Pause,
)
from relatum.reading._many import LANES_MAX, ExchangeOn, ManyReader, ManyRequest, Settle, Take
from relatum.reading._message import Message
from relatum.reading._once import once
from relatum.reading._operations import BOUNDS_AT_ONCE, BOUNDS_OF_LANE, RECOVERING_S, StreamOperations
from relatum.reading._plan import Result, Window
from relatum.reading._scan import Scan, Watch, batches_of
from relatum.reading._socket import SocketConnection
from relatum.reading._stream_errors import check_time, is_inside, not_there, proven_not_there
from relatum.reading._stream_nodes import StreamNodes
from relatum.reading._turns import Use
from relatum.steps import each, run
from relatum.waiting import left_s, pause
from relatum.wire import Broker, Chunk, Event, Steps

_Result = TypeVar("_Result")
Operation = Callable[[StreamOperations], Steps[_Result]]


class _Lanes:
    """The connections of one batched read, by lane, for as long as the stack is open."""

    def __init__(self, nodes: StreamNodes, stack: contextlib.ExitStack, use: Use) -> None:
        self._nodes = nodes
        self._stack = stack
        self._use = use
        self._taken: dict[int, tuple[contextlib.ExitStack, SocketConnection]] = {}

    def take(self, lane: int) -> StreamOperations | None:
        """See `Take`."""
        if lane in self._taken:
            self._taken.pop(lane)[0].close()
        if lane and not self._nodes.has_plenty(self._use):
            return None
        # Others have something to do meanwhile.
        self.send()
        stack = self._stack.enter_context(contextlib.ExitStack())
        try:
            connection = stack.enter_context(self._nodes.connection(self._use))
        except (Transient, AccessRefused):
            if not lane:
                raise
            return None  # It goes on with what it has.
        self._taken[lane] = stack, connection
        return connection.operations

    def exchange(self, lane: int) -> list[Event]:
        """See `ExchangeOn`."""
        self.send(beside=lane)
        return self._taken[lane][1].exchange(time.monotonic() + self._nodes.limit_s)

    def run(self, lane: int, steps: Steps[_Result]) -> _Result:
        """Take steps of a lane to their end."""
        return run(steps, lambda _: self.exchange(lane))

    def send(self, beside: int | None = None) -> None:
        """Send what there is to send, on all lanes but one."""
        for lane, (_, connection) in self._taken.items():
            if lane != beside:
                connection.put_by(self._nodes.limit_s)

    def give_back(self) -> None:
        """Give all back."""
        self._taken.clear()
        self._stack.close()


class Streams(StreamNodes):
    """The blocking face over the stream protocol. Threads may share it: each call has a connection to itself."""

    def read(self, stream: str, offset: int) -> Message:
        message = self._ask_about(stream, lambda operations: operations.find(stream, offset))
        return message if message is not None else self._read_at_leader(stream, offset)

    def _read_at_leader(self, stream: str, offset: int) -> Message:
        """As `read`, where the connected node has nothing there: it may lag behind."""
        bounds = self.bounds(stream)
        if bounds.is_proven and is_inside(offset, bounds):
            node = self._reach(self._leaders.of(stream))
            message = node._ask(lambda operations: operations.find(stream, offset))
            if message is not None:
                return message
            # Retention may have taken it since.
            bounds = self.bounds(stream)
        raise proven_not_there(stream, offset, bounds)

    def bounds(self, stream: str) -> StreamBounds:
        def perform(request: Ask | Pause) -> Any:
            if isinstance(request, Pause):
                return pause(request.seconds)
            return self._bounds_at(request.node, stream, any_node=request.any_node)

        return run(self._leaders.ends_of(stream, self.limit_s), perform)

    def all_bounds(self, streams: Sequence[str], kept: KeptChunks, lasts: Collection[str]) -> dict[str, StreamBounds]:
        """See `StreamReader.all_bounds`."""
        by_node: dict[Broker | None, list[str]] = defaultdict(list)
        for stream in streams:
            by_node[self._leaders.of(stream)].append(stream)
        found: dict[str, StreamBounds] = {}
        for node, led in by_node.items():
            # Whoever asks for one alone has the patience that it takes, and asks other nodes.
            with contextlib.suppress(StreamUnavailable, OutOfReach):
                there = self._reach(node)
                for part in (led[start : start + BOUNDS_AT_ONCE] for start in range(0, len(led), BOUNDS_AT_ONCE)):
                    for stream, bounds in there._bounds_here(part, kept, lasts).items():
                        found[stream] = self._leaders.noted(stream, node, bounds)
        return found

    def _bounds_here(self, streams: Sequence[str], kept: KeptChunks, lasts: Collection[str]) -> dict[str, StreamBounds]:
        """The same of a few streams by this node, over a connection for each two of them where there are so many."""
        found: dict[str, StreamBounds] = {}
        with contextlib.ExitStack() as stack:
            lanes = _Lanes(self, stack, Use.ANSWER)
            asked = []
            for lane in range(min(LANES_MAX, math.ceil(len(streams) / BOUNDS_OF_LANE))):
                operations = lanes.take(lane)
                if operations is None:
                    break
                asked.append(operations)
            pairs = [operations.ask_bounds(streams[lane :: len(asked)], lasts) for lane, operations in enumerate(asked)]
            for lane, operations in enumerate(asked):
                found |= lanes.run(lane, operations.all_bounds(pairs[lane], kept.keep))
        return found

    def _bounds_at(self, broker: Broker | None, stream: str, *, any_node: bool) -> StreamBounds:
        def ask(operations: StreamOperations) -> Steps[StreamBounds]:
            return operations.bounds(stream, any_node=any_node)

        if any_node:
            return self._ask_about(stream, ask)
        return self._reach(broker)._ask(ask)

    def missing(self, streams: Sequence[str]) -> list[str]:
        return self._ask(lambda operations: operations.missing(streams))

    def partitions(self, super_stream: str) -> list[str]:
        with once(self._address, super_stream):
            found, may_lack = self._ask(lambda operations: operations.partitions(super_stream))
            while may_lack:
                pause(RECOVERING_S)
                ask = partial(StreamOperations.partitions, super_stream=super_stream, before=found)
                found, may_lack = self._ask(ask)
            return found

    def routes(self, exchange: str, routing_key: str) -> list[str] | None:
        with once(self._address, exchange):
            return self._ask(lambda operations: operations.routes(exchange, routing_key))

    def read_many(
        self, ids: Iterable[tuple[str, int]], window: int, use: Use, kept: KeptChunks | None = None
    ) -> Generator[list[Result], None, None]:
        """See `StreamReader.read_many`. It has a connection while something is under way on it, and no longer."""
        begins: dict[str, int] = {}
        with contextlib.ExitStack() as stack:
            lanes = _Lanes(self, stack, use)

            def perform(request: ManyRequest) -> Any:
                if isinstance(request, ExchangeOn):
                    return lanes.exchange(request.lane)
                if isinstance(request, Settle):
                    return self._settled(request.result, begins)
                if isinstance(request, Take):
                    return lanes.take(request.lane)
                return lanes.give_back()

            steps = ManyReader(Window(ids, window), self._densities, kept).run()
            try:
                given: Generator[list[Result], None, None] = each(steps, perform)
                with contextlib.closing(given):
                    yield from given
            finally:
                lanes.send()

    def _settled(self, result: Result | StreamNotHere, begins: dict[str, int]) -> Result:
        """What a batched read's result that is no message amounts to: the leader's answer, another name.

        `begins`: First offsets of streams, learned on the way: they only grow, so what is below one has expired.
        """
        if isinstance(result, StreamNotFound):
            return self._named(result)
        if not isinstance(result, StreamNotHere):
            return result
        stream, offset = result.stream, result.offset
        if offset < begins.get(stream, 0):
            return not_there(stream, offset, StreamBounds(begins[stream], None, is_proven=True))
        try:
            return self.read(stream, offset)
        except OffsetExpired as error:
            if error.is_proven:
                begins[stream] = error.first
            return error
        except (NotFound, AccessRefused) as error:
            return error

    def chunks(self, stream: str, scan: Scan, idle_s: float, use: Use) -> Generator[Chunk | None, None, None]:
        """The chunks of a scan as they come, None when none came for `idle_s`.

        What a node refuses it refuses before the first chunk; then it is begun anew where the stream is.
        """
        node, hops = self, 0
        while True:
            try:
                with contextlib.closing(node._chunks_here(stream, scan, idle_s, use)) as chunks:
                    yield from chunks
            except (LedElsewhere, NotSettled):
                # Where it is read is where its end is known.
                bounds = self.bounds(stream)
                if bounds.first is None:
                    return
                node = self._reach(self._leaders.of(stream)) if bounds.is_proven else self
                scan = replace(scan, any_node=not bounds.is_proven)
            except StreamNotHere:
                found, hops = self._node_with(stream, node), hops + 1
                if found is None or hops > NODES_TRIED_MAX:
                    raise
                node = found
            except StreamNotFound as error:
                raise self._named(error) from None
            else:
                return

    def _chunks_here(self, stream: str, scan: Scan, idle_s: float, use: Use) -> Generator[Chunk | None, None, None]:
        with self.connection(use) as connection:

            def wait(_: Watch) -> list[Event] | None:
                check_time()
                return connection.wait(left_s(idle_s))

            steps = connection.operations.chunks(stream, scan)
            try:
                with contextlib.closing(each(steps, wait)) as chunks:
                    yield from chunks
            finally:
                connection.put_by(self.limit_s)

    def batches(
        self, stream: str, scan: Scan, idle_s: float, use: Use
    ) -> Generator[list[RecordBatch | None], None, None]:
        """See `StreamReader.batches`: in parts."""
        with contextlib.closing(self.chunks(stream, scan, idle_s, use)) as chunks:
            for chunk in chunks:
                if chunk is None:
                    yield [None]
                    continue
                for batch in batches_of(stream, chunk, scan):
                    yield [batch]
