"""A stream's first and last offset, as its leader knows them.

A query for the bounds asks for the leader in the same write. If the connected node does not lead the stream, the leader
is queried over another connection.

A leader may return no chunk at first, which proves nothing, so the query is repeated. A stream counts as empty

- if StreamStats says so, from RabbitMQ 3.11 on;
- on RabbitMQ 3.10, if the leader returned no chunk for `EMPTY_WAIT_S`: three times as long if other nodes exist but
  Metadata names no other replica, and three times longer if the stream had messages before. The result is trusted for
  `EMPTY_TRUST_S`, unless a connection to the node is lost. A node that showed no other node for all that time commits
  alone; its other streams need no such wait.

See docs/adr/0012.
"""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Final

from relatum.common.waiting import pause
from relatum.errors import AccessRefused, BrokerUnavailable, NotFound, ReadTimeout, StreamUnavailable
from relatum.reading._address import BrokerAddress
from relatum.reading._bounds import StreamBounds
from relatum.reading._connection import Attach, SocketConnection, until
from relatum.reading._many import LANES_MAX, ChunkCache
from relatum.reading._nodes import Node, Nodes, NodeUnreachable, places_in
from relatum.reading._pool import Use
from relatum.wire import frames
from relatum.wire.chunk import Chunk
from relatum.wire.frames import FIRST, LAST, Code, NodeAddress

STATS_SINCE: Final = (3, 11)
"""The first version that answers StreamStats."""

EMPTY_WAIT_S: Final = 1.0
"""Seconds without a chunk from its leader after which a stream counts as empty, if StreamStats is not available.

A leader returns no chunk between its election and the first answer of a replica: at most 0.3 s in 12 kills of three
nodes on a busy machine. In that time Metadata named no other replica.
"""

EMPTY_FACTOR: Final = 3.0
"""Factor of a longer wait, if the leader may just have been elected, or if the stream had messages: then it is empty
only if it was declared again."""

EMPTY_TRUST_S: Final = 30.0
"""Seconds for which such a result is trusted."""

PAUSE_S: Final = (0.002, 0.1)
"""Minimum and maximum seconds before a leader is queried again; the pause doubles. A chunk is committed within
milliseconds, a leader is elected within a second."""

STREAMS_MAX: Final = 10_000
"""Maximum streams whose leaders and emptiness are remembered."""

BOUNDS_AT_ONCE: Final = 8
"""Maximum streams whose bounds are requested in one write. Two chunks arrive for each."""

BOUNDS_OF_LANE: Final = 2
"""Streams whose bounds are requested over one connection before another one is used: up to two attaches each."""


class NotTheLeader(StreamUnavailable):
    """The queried node does not lead the stream. `leader` does; None while there is none."""

    leader: NodeAddress | None


class NotSettled(StreamUnavailable):
    """The leader has returned no chunk yet.

    `may_be_empty`: It has not returned a first message either. `is_alone`: Metadata names no other replica now.
    """

    may_be_empty: bool
    is_alone: bool


@dataclass(frozen=True, slots=True)
class _Known:
    """A stream's last known leader, and whether the stream was empty; `losses` is that of the node at that time."""

    node: Node
    is_empty: bool
    losses: int
    at: float


class Leaders:
    """Queries the bounds of streams, and remembers the leaders of at most `STREAMS_MAX` streams."""

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes
        self._node_address: BrokerAddress | None = None
        self._known: dict[str, _Known] = {}
        self._has_others = False
        self._alone: dict[Node, int] = {}

    def of(self, stream: str) -> Node:
        """Return the node that last led a stream; None if that is the connected node, or unknown."""
        if self._nodes.current is not self._node_address:
            # Another address answers now: leaders and replicas that were seen from the previous node do not count.
            self._node_address, self._has_others = self._nodes.current, bool(self._nodes.address.others)
            self._known, self._alone = {}, {}
        known = self._known.get(stream)
        return known.node if known is not None else None

    def bounds(self, stream: str) -> StreamBounds:
        """Return a stream's bounds, from the leader, or from another node if the leader is unreachable."""
        deadline, pause_s, empty_since, losses = time.monotonic() + self._nodes.limit_s, PAUSE_S[0], None, 0
        node, any_node, hops = self.of(stream), False, 0
        while True:
            error: Exception
            try:
                return self._remembered(stream, node, self._query(stream, node, any_node=any_node))
            except NotTheLeader as elsewhere:
                self._has_others = True
                error, empty_since, hops = elsewhere, None, hops + 1
                # No pause before the first hop. A second hop means that two nodes disagree about the leader.
                goes_on = elsewhere.leader is not None and elsewhere.leader != node
                node, any_node = elsewhere.leader if goes_on else None, False
                if goes_on and hops % 2:
                    continue
            except NotSettled as unsettled:
                error, now = unsettled, time.monotonic()
                self._has_others |= not unsettled.is_alone
                # A lost connection restarts the wait: the next one may lead to another node or a new leader.
                before, losses = losses, self._nodes.losses[node]
                is_on = unsettled.may_be_empty and losses == before and empty_since is not None
                empty_since = empty_since if is_on else now if unsettled.may_be_empty else None
                if empty_since is not None and self._is_empty(stream, node, unsettled, now, now - empty_since):
                    is_silence = self._has_others or not unsettled.is_alone
                    empty = StreamBounds(None, None, is_proven=not any_node, is_silence=is_silence)
                    return self._remembered(stream, node, empty)
            except NodeUnreachable as unreachable:
                error, node, any_node = unreachable, None, True
                continue
            except (StreamUnavailable, ReadTimeout, BrokerUnavailable) as lost:
                if node is None and not isinstance(lost, StreamUnavailable):
                    raise
                error, empty_since, node, any_node = lost, None, None, False
            if time.monotonic() >= deadline:
                raise error
            pause(pause_s)
            pause_s = min(pause_s * 2, PAUSE_S[1])

    def _query(self, stream: str, node: Node, *, any_node: bool) -> StreamBounds:
        if any_node:
            return self._nodes.query_replica(stream, lambda connection: _bounds(connection, stream, any_node=True))
        return self._nodes.query(lambda connection: _bounds(connection, stream), node)

    def _is_empty(self, stream: str, node: Node, answer: NotSettled, now: float, waited_s: float) -> bool:
        """Whether a stream counts as empty whose leader returned no chunk for `waited_s` seconds."""
        known, wait_s = self._known.get(stream), EMPTY_WAIT_S
        if answer.is_alone and not self._has_others:
            if waited_s >= wait_s:
                self._alone[node] = self._nodes.losses[node]
            elif self._alone.get(node) == self._nodes.losses[node]:
                wait_s = 0.0
        elif answer.is_alone:
            wait_s *= EMPTY_FACTOR
        if known is not None and not known.is_empty:
            return waited_s >= max(wait_s, EMPTY_WAIT_S) * EMPTY_FACTOR
        return waited_s >= wait_s or (known is not None and self._is_trusted(known, node, now))

    def _is_trusted(self, known: _Known, node: Node, now: float) -> bool:
        is_recent = known.is_empty and now - known.at < EMPTY_TRUST_S
        return is_recent and (known.node, known.losses) == (node, self._nodes.losses[node])

    def _remembered(self, stream: str, node: Node, bounds: StreamBounds) -> StreamBounds:
        known, is_empty, now = self._known.get(stream), bounds.first is None, time.monotonic()
        if is_empty and known is not None and self._is_trusted(known, node, now):
            # An earlier result was trusted, so the time of trust does not restart.
            return bounds
        if len(self._known) >= STREAMS_MAX and stream not in self._known:
            self._known.clear()
        self._known[stream] = _Known(node, is_empty, self._nodes.losses[node], now)
        return bounds

    def all_bounds(self, streams: Sequence[str], kept: ChunkCache, lasts: Collection[str]) -> dict[str, StreamBounds]:
        by_node: dict[Node, list[str]] = defaultdict(list)
        for stream in streams:
            by_node[self.of(stream)].append(stream)
        found: dict[str, StreamBounds] = {}
        for node, led in by_node.items():
            # Streams that are missing from the result are left to `bounds`, which waits and queries other nodes.
            with suppress(StreamUnavailable, NodeUnreachable):
                for part in (led[start : start + BOUNDS_AT_ONCE] for start in range(0, len(led), BOUNDS_AT_ONCE)):
                    for stream, bounds in self._all_at(node, part, kept, lasts).items():
                        found[stream] = self._remembered(stream, node, bounds)
        return found

    def _all_at(
        self, node: Node, streams: Sequence[str], kept: ChunkCache, lasts: Collection[str]
    ) -> dict[str, StreamBounds]:
        """Query one node for the bounds of a few streams, over several connections if these are available."""
        found: dict[str, StreamBounds] = {}
        most = min(LANES_MAX, math.ceil(len(streams) / BOUNDS_OF_LANE))
        with ExitStack() as stack:
            connections = [stack.enter_context(self._nodes.connection(Use.ANSWER, node))]
            while len(connections) < most and (spare := self._nodes.spare_connection(stack, node)) is not None:
                connections.append(spare)
            requests = []
            for number, connection in enumerate(connections):
                share = streams[number :: len(connections)]
                firsts = {each: None if each in lasts else Attach.once(connection, each, FIRST) for each in share}
                requests.append({each: (first, attach_at_end(connection, each)) for each, first in firsts.items()})
                connection.flush_or_abandon(self._nodes.limit_s)
            for connection, pairs in zip(connections, requests, strict=True):
                connection.deadline = time.monotonic() + self._nodes.limit_s
                found |= _ends_of(connection, pairs, kept.keep)
        return found


def _bounds(connection: SocketConnection, stream: str, *, any_node: bool = False) -> StreamBounds:
    """Return a stream's bounds, in one round trip if this node leads the stream.

    `any_node`: Accept this node's answer even if it does not lead; the bounds are then not proven.
    """
    first, last = Attach.once(connection, stream, FIRST), attach_at_end(connection, stream)
    until(connection, first, last)
    check_leading(connection, last, any_node=any_node)
    shown = _bounds_shown(first, last, is_proven=not any_node)
    if shown is not None:
        return shown
    may_be_empty = not first.chunks
    if may_be_empty and not any_node and not connection.session.is_older_than(STATS_SINCE):
        if _has_no_message(connection, stream):
            return StreamBounds(None, None, is_proven=True)
        # The stream has messages. A new leader returns none until another replica has answered.
        may_be_empty = False
    raise not_settled(last, may_be_empty=may_be_empty)


def _ends_of(
    connection: SocketConnection,
    pairs: Mapping[str, tuple[Attach | None, Attach]],
    keep: Callable[[str, Chunk], object],
) -> dict[str, StreamBounds]:
    """Return the bounds of the streams that this node leads and whose chunks arrived, in one round trip.

    The first offset is 0 if it was not requested. `keep` is called with each received chunk.
    """
    until(connection, *(attach for pair in pairs.values() for attach in pair if attach is not None))
    found: dict[str, StreamBounds] = {}
    for stream, (first, last) in pairs.items():
        # A stream with an error is left out; a separate query reports the error.
        with suppress(NotFound, AccessRefused, StreamUnavailable):
            check_leading(connection, last, any_node=False)
            shown = _bounds_shown(first, last, is_proven=True)
            if shown is not None:
                found[stream] = shown
                for chunk in (*(first.chunks if first is not None else ()), *last.chunks):
                    keep(stream, chunk)
    return found


def _bounds_shown(first: Attach | None, last: Attach, *, is_proven: bool) -> StreamBounds | None:
    """Return the bounds that first and last chunk show; None if one is missing. Without `first`, the first is 0."""
    requested = [last] if first is None else [first, last]
    for attach in requested:
        attach.check()
    if not all(attach.chunks for attach in requested):
        return None
    end = last.chunks[-1].last_offset
    if end < 0:
        # The only chunk may consist of empty batches, and so have no message.
        return StreamBounds(None, None, is_proven=is_proven)
    return StreamBounds(0 if first is None else first.chunks[0].first_offset, end, is_proven=is_proven)


def attach_at_end(connection: SocketConnection, stream: str) -> Attach:
    """Request a stream's last chunk and its leader. Does not wait."""
    last = Attach(connection, stream, LAST)
    last.end()
    connection.session.send(frames.metadata(last.barrier, [stream]))
    return last


def check_leading(connection: SocketConnection, last: Attach, *, any_node: bool) -> None:
    """Raise `NotTheLeader` if this node does not lead the stream, by the answers to `attach_at_end`."""
    if last.code not in (Code.OK, Code.STREAM_NOT_AVAILABLE):
        last.check()
    places = places_in(last.answer, last.stream)
    if not any_node and (places.code != Code.OK or places.leader != connection.session.own_node):
        message = f"Another node leads the stream {last.stream!r}, or no node does at present: try again."
        raise NotTheLeader(message, stream=last.stream, leader=places.leader)


def _has_no_message(connection: SocketConnection, stream: str) -> bool:
    """Whether the leader's log has no message, committed or not. Needs RabbitMQ 3.11.

    The broker writes its own records to the log, such as stored offsets of readers, which it counts but never delivers.
    Retention may leave only such records.
    """
    before = _stats(connection, stream)
    if before.get("first_chunk_id", 0) < 0:
        return True
    if before.get("committed_chunk_id", -1) != before.get("last_chunk_id"):
        return False
    # All chunks are committed, so this attach receives the first message, if there is one. Only the election of a new
    # leader in the meantime could prevent this; it resets the committed chunk.
    first = Attach.once(connection, stream, FIRST)
    until(connection, first)
    first.check()
    return not first.chunks and before == _stats(connection, stream)


def _stats(connection: SocketConnection, stream: str) -> dict[str, int]:
    """Return the leader's statistics of its log; empty if it gives none."""
    answer = connection.answer(frames.named_request, frames.Command.STREAM_STATS, stream)
    return frames.decode_stats(answer.body) if answer.code == Code.OK else {}


def not_settled(last: Attach, *, may_be_empty: bool) -> NotSettled:
    """Return the error for a leader that has returned no chunk yet, by the answers to `attach_at_end`."""
    message = f"The stream {last.stream!r} is starting, or its messages are not committed yet: try again."
    places = places_in(last.answer, last.stream)
    is_alone = not set(places.replicas) - {places.leader}
    return NotSettled(message, stream=last.stream, may_be_empty=may_be_empty, is_alone=is_alone)
