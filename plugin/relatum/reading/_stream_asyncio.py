# The blocking face of this, _stream_blocking.py, is made by tools/make-twins.
"""Reading streams over the stream protocol, with asyncio."""

import asyncio
import contextlib
import math
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final, TypeVar

from relatum.errors import (
    AccessRefused,
    NotFound,
    OffsetExpired,
    StreamNotFound,
    StreamNotHere,
    StreamUnavailable,
    Transient,
)
from relatum.reading._async_socket import AsyncSocketConnection
from relatum.reading._async_stream_nodes import AsyncStreamNodes
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
from relatum.reading._stream_errors import check_time, is_inside, not_there, proven_not_there
from relatum.reading._turns import Use
from relatum.steps import async_each, async_run
from relatum.waiting import left_s
from relatum.wire import Broker, Chunk, Event, Steps

_Result = TypeVar("_Result")
Operation = Callable[[StreamOperations], Steps[_Result]]

# asyncio only:
SLICE: Final = 50
"""Messages after which others go on: what has come already never waits, and decoding so many takes about 3 ms."""
# both:


class _Lanes:
    """The connections of one batched read, by lane, for as long as the stack is open."""

    def __init__(self, nodes: AsyncStreamNodes, stack: contextlib.AsyncExitStack, use: Use) -> None:
        self._nodes = nodes
        self._stack = stack
        self._use = use
        self._taken: dict[int, tuple[contextlib.AsyncExitStack, AsyncSocketConnection]] = {}

    async def take(self, lane: int) -> StreamOperations | None:
        """See `Take`."""
        if lane in self._taken:
            await self._taken.pop(lane)[0].aclose()
        if lane and not self._nodes.has_plenty(self._use):
            return None
        # Others have something to do meanwhile.
        await self.send()
        stack = await self._stack.enter_async_context(contextlib.AsyncExitStack())
        try:
            connection = await stack.enter_async_context(self._nodes.connection(self._use))
        except (Transient, AccessRefused):
            if not lane:
                raise
            return None  # It goes on with what it has.
        self._taken[lane] = stack, connection
        return connection.operations

    async def exchange(self, lane: int) -> list[Event]:
        """See `ExchangeOn`."""
        await self.send(beside=lane)
        return await self._taken[lane][1].exchange(time.monotonic() + self._nodes.limit_s)

    async def run(self, lane: int, steps: Steps[_Result]) -> _Result:
        """Take steps of a lane to their end."""
        return await async_run(steps, lambda _: self.exchange(lane))

    async def send(self, beside: int | None = None) -> None:
        """Send what there is to send, on all lanes but one."""
        for lane, (_, connection) in self._taken.items():
            if lane != beside:
                await connection.put_by(self._nodes.limit_s)

    async def give_back(self) -> None:
        """Give all back."""
        self._taken.clear()
        await self._stack.aclose()


class AsyncStreams(AsyncStreamNodes):
    """The asyncio face over the stream protocol. Tasks may share it: each call has a connection to itself."""

    async def read(self, stream: str, offset: int) -> Message:
        message = await self._ask_about(stream, lambda operations: operations.find(stream, offset))
        return message if message is not None else await self._read_at_leader(stream, offset)

    async def _read_at_leader(self, stream: str, offset: int) -> Message:
        """As `read`, where the connected node has nothing there: it may lag behind."""
        bounds = await self.bounds(stream)
        if bounds.is_proven and is_inside(offset, bounds):
            node = await self._reach(self._leaders.of(stream))
            message = await node._ask(lambda operations: operations.find(stream, offset))
            if message is not None:
                return message
            # Retention may have taken it since.
            bounds = await self.bounds(stream)
        raise proven_not_there(stream, offset, bounds)

    async def bounds(self, stream: str) -> StreamBounds:
        async def perform(request: Ask | Pause) -> Any:
            if isinstance(request, Pause):
                return await asyncio.sleep(left_s(request.seconds))
            return await self._bounds_at(request.node, stream, any_node=request.any_node)

        return await async_run(self._leaders.ends_of(stream, self.limit_s), perform)

    async def all_bounds(
        self, streams: Sequence[str], kept: KeptChunks, lasts: Collection[str]
    ) -> dict[str, StreamBounds]:
        """See `AsyncStreamReader.all_bounds`."""
        by_node: dict[Broker | None, list[str]] = defaultdict(list)
        for stream in streams:
            by_node[self._leaders.of(stream)].append(stream)
        found: dict[str, StreamBounds] = {}
        for node, led in by_node.items():
            # Whoever asks for one alone has the patience that it takes, and asks other nodes.
            with contextlib.suppress(StreamUnavailable, OutOfReach):
                there = await self._reach(node)
                for part in (led[start : start + BOUNDS_AT_ONCE] for start in range(0, len(led), BOUNDS_AT_ONCE)):
                    for stream, bounds in (await there._bounds_here(part, kept, lasts)).items():
                        found[stream] = self._leaders.noted(stream, node, bounds)
        return found

    async def _bounds_here(
        self, streams: Sequence[str], kept: KeptChunks, lasts: Collection[str]
    ) -> dict[str, StreamBounds]:
        """The same of a few streams by this node, over a connection for each two of them where there are so many."""
        found: dict[str, StreamBounds] = {}
        async with contextlib.AsyncExitStack() as stack:
            lanes = _Lanes(self, stack, Use.ANSWER)
            asked = []
            for lane in range(min(LANES_MAX, math.ceil(len(streams) / BOUNDS_OF_LANE))):
                operations = await lanes.take(lane)
                if operations is None:
                    break
                asked.append(operations)
            pairs = [operations.ask_bounds(streams[lane :: len(asked)], lasts) for lane, operations in enumerate(asked)]
            for lane, operations in enumerate(asked):
                found |= await lanes.run(lane, operations.all_bounds(pairs[lane], kept.keep))
        return found

    async def _bounds_at(self, broker: Broker | None, stream: str, *, any_node: bool) -> StreamBounds:
        def ask(operations: StreamOperations) -> Steps[StreamBounds]:
            return operations.bounds(stream, any_node=any_node)

        if any_node:
            return await self._ask_about(stream, ask)
        return await (await self._reach(broker))._ask(ask)

    async def missing(self, streams: Sequence[str]) -> list[str]:
        return await self._ask(lambda operations: operations.missing(streams))

    async def partitions(self, super_stream: str) -> list[str]:
        with once(self._address, super_stream):
            found, may_lack = await self._ask(lambda operations: operations.partitions(super_stream))
            while may_lack:
                await asyncio.sleep(left_s(RECOVERING_S))
                ask = partial(StreamOperations.partitions, super_stream=super_stream, before=found)
                found, may_lack = await self._ask(ask)
            return found

    async def routes(self, exchange: str, routing_key: str) -> list[str] | None:
        with once(self._address, exchange):
            return await self._ask(lambda operations: operations.routes(exchange, routing_key))

    async def read_many(
        self, ids: Iterable[tuple[str, int]], window: int, use: Use, kept: KeptChunks | None = None
    ) -> AsyncGenerator[Result, None]:
        """See `AsyncStreamReader.read_many`. It has a connection while something is under way on it, and no longer."""
        begins: dict[str, int] = {}
        async with contextlib.AsyncExitStack() as stack:
            lanes = _Lanes(self, stack, use)

            async def perform(request: ManyRequest) -> Any:
                if isinstance(request, ExchangeOn):
                    return await lanes.exchange(request.lane)
                if isinstance(request, Settle):
                    return await self._settled(request.result, begins)
                if isinstance(request, Take):
                    return await lanes.take(request.lane)
                return await lanes.give_back()

            steps = ManyReader(Window(ids, window), self._densities, kept).run()
            try:
                given: AsyncGenerator[list[Result], None] = async_each(steps, perform)
                # asyncio only:
                count = 0
                # both:
                async with contextlib.aclosing(given) as results:
                    async for part in results:
                        for result in part:
                            yield result
                            # asyncio only:
                            count += 1
                            if not count % SLICE:
                                await asyncio.sleep(0)
                            # both:
            finally:
                await lanes.send()

    async def _settled(self, result: Result | StreamNotHere, begins: dict[str, int]) -> Result:
        """What a batched read's result that is no message amounts to: the leader's answer, another name.

        `begins`: First offsets of streams, learned on the way: they only grow, so what is below one has expired.
        """
        if isinstance(result, StreamNotFound):
            return await self._named(result)
        if not isinstance(result, StreamNotHere):
            return result
        stream, offset = result.stream, result.offset
        if offset < begins.get(stream, 0):
            return not_there(stream, offset, StreamBounds(begins[stream], None, is_proven=True))
        try:
            return await self.read(stream, offset)
        except OffsetExpired as error:
            if error.is_proven:
                begins[stream] = error.first
            return error
        except (NotFound, AccessRefused) as error:
            return error

    async def chunks(self, stream: str, scan: Scan, idle_s: float, use: Use) -> AsyncGenerator[Chunk | None, None]:
        """The chunks of a scan as they come, None when none came for `idle_s`.

        What a node refuses it refuses before the first chunk; then it is begun anew where the stream is.
        """
        node, hops = self, 0
        while True:
            try:
                async with contextlib.aclosing(node._chunks_here(stream, scan, idle_s, use)) as chunks:
                    async for chunk in chunks:
                        yield chunk
            except (LedElsewhere, NotSettled):
                # Where it is read is where its end is known.
                bounds = await self.bounds(stream)
                if bounds.first is None:
                    return
                node = await self._reach(self._leaders.of(stream)) if bounds.is_proven else self
                scan = replace(scan, any_node=not bounds.is_proven)
            except StreamNotHere:
                found, hops = await self._node_with(stream, node), hops + 1
                if found is None or hops > NODES_TRIED_MAX:
                    raise
                node = found
            except StreamNotFound as error:
                raise await self._named(error) from None
            else:
                return

    async def _chunks_here(
        self, stream: str, scan: Scan, idle_s: float, use: Use
    ) -> AsyncGenerator[Chunk | None, None]:
        async with self.connection(use) as connection:

            async def wait(_: Watch) -> list[Event] | None:
                check_time()
                return await connection.wait(left_s(idle_s))

            steps = connection.operations.chunks(stream, scan)
            try:
                async with contextlib.aclosing(async_each(steps, wait)) as chunks:
                    async for chunk in chunks:
                        yield chunk
            finally:
                await connection.put_by(self.limit_s)

    async def batches(
        self, stream: str, scan: Scan, idle_s: float, use: Use
    ) -> AsyncGenerator[RecordBatch | None, None]:
        """See `AsyncStreamReader.batches`."""
        async with contextlib.aclosing(self.chunks(stream, scan, idle_s, use)) as chunks:
            async for chunk in chunks:
                if chunk is None:
                    yield None
                    continue
                for batch in batches_of(stream, chunk, scan):
                    yield batch
