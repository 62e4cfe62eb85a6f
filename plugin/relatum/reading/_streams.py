"""Reading streams: what is asked where, and once more elsewhere."""

import math
import time
from collections import defaultdict
from collections.abc import Collection, Generator, Iterable, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import replace
from functools import partial
from typing import Final

from relatum.errors import (
    AccessRefused,
    NotFound,
    OffsetExpired,
    StreamNotFound,
    StreamNotHere,
    StreamUnavailable,
)
from relatum.reading import _questions as questions
from relatum.reading._batches import RecordBatch, StreamBounds
from relatum.reading._kept import KeptChunks
from relatum.reading._leading import NODES_TRIED_MAX, LedElsewhere, NotSettled, OutOfReach
from relatum.reading._many import LANES_MAX, ManyReader
from relatum.reading._message import Message
from relatum.reading._nodes import StreamNodes
from relatum.reading._once import once
from relatum.reading._plan import Result, Window
from relatum.reading._pool import Use
from relatum.reading._scan import Scan, batches_of, chunks_of
from relatum.reading._stream_errors import is_inside, not_there, proven_not_there
from relatum.waiting import pause
from relatum.wire import Broker, Chunk

BOUNDS_AT_ONCE: Final = 8
"""Streams whose ends are asked for in one write: two chunks come of each."""

BOUNDS_OF_LANE: Final = 2
"""Of so many of them the ends are asked for over one connection, where others can be had: up to two attaches each."""

PART_RECORDS: Final = 1000
"""Records that are given together at most, but for those of one batch."""


class Streams(StreamNodes):
    """What readers read. Threads may share it: each call has a connection to itself. Arguments as of `StreamNodes`."""

    def read(self, stream: str, offset: int) -> Message:
        """See `StreamReader.read`."""
        message = self._ask_about(stream, lambda connection: questions.find(connection, stream, offset))
        return message if message is not None else self._read_at_leader(stream, offset)

    def _read_at_leader(self, stream: str, offset: int) -> Message:
        """As `read`, where the connected node has nothing there: it may lag behind."""
        bounds = self.bounds(stream)
        if bounds.is_proven and is_inside(offset, bounds):
            node = self._reach(self._leaders.of(stream))
            message = node._ask(lambda connection: questions.find(connection, stream, offset))
            if message is not None:
                return message
            # Retention may have taken it since.
            bounds = self.bounds(stream)
        raise proven_not_there(stream, offset, bounds)

    def bounds(self, stream: str) -> StreamBounds:
        """See `StreamReader.bounds`."""
        return self._leaders.ends_of(stream, self.limit_s, partial(self._bounds_at, stream))

    def _bounds_at(self, stream: str, node: Broker | None, *, any_node: bool) -> StreamBounds:
        if any_node:
            return self._ask_about(stream, lambda connection: questions.bounds(connection, stream, any_node=True))
        return self._reach(node)._ask(lambda connection: questions.bounds(connection, stream))

    def all_bounds(self, streams: Sequence[str], kept: KeptChunks, lasts: Collection[str]) -> dict[str, StreamBounds]:
        """See `StreamReader.all_bounds`."""
        by_node: dict[Broker | None, list[str]] = defaultdict(list)
        for stream in streams:
            by_node[self._leaders.of(stream)].append(stream)
        found: dict[str, StreamBounds] = {}
        for node, led in by_node.items():
            # `bounds` waits for such a stream, and asks other nodes.
            with suppress(StreamUnavailable, OutOfReach):
                there = self._reach(node)
                for part in (led[start : start + BOUNDS_AT_ONCE] for start in range(0, len(led), BOUNDS_AT_ONCE)):
                    for stream, bounds in there._bounds_here(part, kept, lasts).items():
                        found[stream] = self._leaders.noted(stream, node, bounds)
        return found

    def _bounds_here(self, streams: Sequence[str], kept: KeptChunks, lasts: Collection[str]) -> dict[str, StreamBounds]:
        """The same of a few streams by this node, over a connection for each two of them where there are so many."""
        found: dict[str, StreamBounds] = {}
        most = min(LANES_MAX, math.ceil(len(streams) / BOUNDS_OF_LANE))
        with ExitStack() as stack:
            connections = [stack.enter_context(self.connection(Use.ANSWER))]
            while len(connections) < most and (further := self.further(stack, Use.ANSWER)) is not None:
                connections.append(further)
            asked = []
            for number, connection in enumerate(connections):
                asked.append(questions.ask_bounds(connection, streams[number :: len(connections)], lasts))
                connection.put_by(self.limit_s)
            for connection, pairs in zip(connections, asked, strict=True):
                connection.deadline = time.monotonic() + self.limit_s
                found |= questions.all_bounds(connection, pairs, kept.keep)
        return found

    def missing(self, streams: Sequence[str]) -> list[str]:
        """See `StreamReader.missing`."""
        return self._ask(lambda connection: questions.missing(connection, streams))

    def partitions(self, super_stream: str) -> list[str]:
        """See `StreamReader.bound`."""
        with once(self._address, super_stream):
            found, may_lack = self._ask(lambda connection: questions.partitions(connection, super_stream))
            while may_lack:
                pause(questions.RECOVERING_S)
                ask = partial(questions.partitions, super_stream=super_stream, before=found)
                found, may_lack = self._ask(ask)
            return found

    def routes(self, exchange: str, routing_key: str) -> list[str] | None:
        """See `StreamReader.routes`."""
        with once(self._address, exchange):
            return self._ask(lambda connection: questions.routes(connection, exchange, routing_key))

    def many(self, ids: Iterable[tuple[str, int]], window: int, use: Use, kept: KeptChunks | None = None) -> ManyReader:
        """See `StreamReader.read_many`. It has a connection while something is under way on it, and no longer."""
        return ManyReader(self, use, Window(ids, window), partial(self._settled, {}), kept)

    def _settled(self, begins: dict[str, int], result: Result | StreamNotHere) -> Result:
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

    def batches(
        self, stream: str, scan: Scan, idle_s: float, use: Use
    ) -> Generator[list[RecordBatch | None], None, None]:
        """See `StreamReader.batches`. Those that came together are given together, up to `PART_RECORDS`."""
        with closing(self._chunks(stream, scan, idle_s, use)) as given:
            for chunks in given:
                part: list[RecordBatch | None] = []
                count = 0
                for chunk in chunks or ():
                    for batch in batches_of(stream, chunk, scan):
                        part.append(batch)
                        count += len(batch)
                        if count >= PART_RECORDS:
                            yield part
                            part, count = [], 0
                if part or chunks is None:
                    yield part or [None]

    def _chunks(self, stream: str, scan: Scan, idle_s: float, use: Use) -> Generator[list[Chunk] | None, None, None]:
        """The chunks of a scan as they come, None when none came for `idle_s`.

        What a node refuses it refuses before the first chunk; then it is begun anew where the stream is.
        """
        node, hops = self, 0
        while True:
            try:
                with node.connection(use) as connection:
                    yield from chunks_of(connection, stream, scan, idle_s)
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
