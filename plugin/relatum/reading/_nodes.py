"""The nodes of a broker for one reader: a connection for each request, to the node that has the answer.

A node is named as it advertises itself; None is the node at the address, or, of several addresses, at the one that
answered last.
"""

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Final, TypeAlias, TypeVar

from relatum.common.waiting import left_s
from relatum.errors import (
    AccessRefused,
    BrokerUnavailable,
    ConnectionLost,
    NotFound,
    ProtocolError,
    ReadTimeout,
    StreamNotFound,
    StreamNotHere,
    Transient,
    UsedAfterClose,
)
from relatum.reading._address import BrokerAddress
from relatum.reading._amqp import name_missing
from relatum.reading._bounds import check_time
from relatum.reading._connecting import CONNECT_S_MIN, HEARTBEAT_S, in_turn
from relatum.reading._connection import SocketConnection, stream_connection
from relatum.reading._plan import Density
from relatum.reading._pool import CONNECTIONS_MAX, IDLE_S, Pool, Use
from relatum.wire import frames
from relatum.wire.frames import Code, NodeAddress, StreamPlaces

OUT_OF_REACH_S: Final = 5.0
"""Seconds for which a node that could not be reached is not tried again."""

NODE_CONNECT_S: Final = 2.0
"""The most seconds for reaching another node: what a node advertises may be unreachable from here."""

PLACES_AT_ONCE: Final = 128
"""Streams in one request for their nodes: at most 33 kB of names."""

_BY_AMQP: Final = NodeAddress("AMQP 0.9.1", 0)
"""Stands for a node in the pool: an AMQP 0.9.1 connection, which is used once and never kept."""

_in_use: Final[set[SocketConnection]] = set()
"""Connections in use. Kept here, because the garbage collector, which ends the objects of a cycle in any order, would
close the socket of a dropped iteration before the iteration ends and returns it."""

_Result = TypeVar("_Result")
Node: TypeAlias = NodeAddress | None
Question = Callable[[SocketConnection], _Result]


class OutOfReach(BrokerUnavailable):
    """A node cannot be reached from here: behind a load balancer, nodes may advertise internal names."""


class Nodes:
    """The connections of one reader to all nodes. Thread-safe: each request has a connection to itself.

    `at` is the one of several addresses that answered last, `losses` how often connections to each node were lost,
    `densities` the chunk sizes of streams, and `server_properties` the node's when the reader was opened.
    """

    def __init__(
        self,
        address: BrokerAddress,
        *,
        timeout_s: float,
        heartbeat_s: int = HEARTBEAT_S,
        connections_max: int = CONNECTIONS_MAX,
    ) -> None:
        self.address = address
        self.at = in_turn(address)[0]
        self.losses: Counter[Node] = Counter()
        self.densities: dict[str, Density] = {}
        self.server_properties: dict[str, str] = {}
        self._timeout_s = timeout_s
        self._heartbeat_s = heartbeat_s
        self.pool = Pool(connections_max)
        self._reached: set[NodeAddress] = set()
        self._out_of_reach: dict[NodeAddress, float] = {}

    def open(self) -> None:
        """Connect once, so that setup errors show at once."""
        with self._held(Use.ANSWER, None, time.monotonic() + self.limit_s) as connection:
            self.server_properties = connection.session.server_properties

    @property
    def limit_s(self) -> float:
        """Seconds that an answer may take; less if the call has less left."""
        return left_s(self._timeout_s)

    @contextlib.contextmanager
    def _held(self, use: Use, node: Node, deadline: float) -> Iterator[SocketConnection]:
        """Hold a connection in its turn while the block runs; a reused one may have ended since."""

        def connect() -> SocketConnection:
            # Nothing exchanges heartbeats on an idle connection, so they are rare: see `IDLE_S`.
            is_followed = use is Use.FOLLOW or not self._heartbeat_s
            heartbeat_s = self._heartbeat_s if is_followed else max(self._heartbeat_s, int(IDLE_S))
            return self._open(node, max(CONNECT_S_MIN, deadline - time.monotonic()), heartbeat_s)

        with self.pool.lend(node, use, deadline, connect) as connection:
            connection.deadline = deadline
            _in_use.add(connection)
            try:
                yield connection
            finally:
                _in_use.discard(connection)
                if not connection.is_usable:
                    self.losses[node] += 1

    def _open(self, node: Node, within_s: float, heartbeat_s: int) -> SocketConnection:
        """Connect to a node. `OutOfReach`: it was never reached, and is down, or advertises a name known elsewhere."""
        within_s = left_s(within_s)
        if node is None:
            connection = stream_connection(self.address, within_s, heartbeat_s)
            at = in_turn(self.address)[0]
            if at != self.at:
                self.at = at
                self.losses[None] += 1
            return connection
        message = (
            f"The node that advertises {node.host}:{node.port} is unreachable from here: it is down, or "
            "stream.advertised_host and stream.advertised_port in its rabbitmq.conf must name a reachable address."
        )
        if time.monotonic() < self._out_of_reach.get(node, 0.0):
            raise OutOfReach(message)
        # A node that knows the password already has named it, so nothing is guessed.
        there = replace(self.at, stream_host=node.host, stream_port=node.port, stream_port_guessed=False)
        try:
            connection = SocketConnection.open(there, min(NODE_CONNECT_S, within_s), heartbeat_s)
        except (BrokerUnavailable, ReadTimeout) as error:
            # A call that ran out of time proves nothing about the node.
            check_time()
            if node in self._reached:
                raise
            self._out_of_reach[node] = time.monotonic() + OUT_OF_REACH_S
            raise OutOfReach(message) from error
        self._reached.add(node)
        return connection

    @contextlib.contextmanager
    def connection(self, use: Use, node: Node = None) -> Iterator[SocketConnection]:
        """Hold a connection that has not ended while idle, so that long work need not restart for that."""
        deadline = time.monotonic() + self.limit_s
        while True:
            with self._held(use, node, deadline) as connection:
                if _is_there(connection):
                    yield connection
                    return

    def further(self, stack: contextlib.ExitStack, node: Node = None) -> SocketConnection | None:
        """Hold a further connection until the stack is closed; None if others may need it, or none can be opened."""
        if self.pool.has_plenty:
            with contextlib.suppress(Transient, AccessRefused):
                return stack.enter_context(self.connection(Use.ANSWER, node))
        return None

    def link(self, node: Node) -> SocketConnection:
        """Return a logged-in connection to a node, which the caller owns and no limit counts. Errors as for `ask`."""
        if self.pool.is_closed:
            raise UsedAfterClose("the reader was closed: open another one")
        return self._open(node, self._timeout_s, self._heartbeat_s)

    def ask(self, question: Question[_Result], node: Node = None) -> _Result:
        """Ask a node; repeat on a new connection if an idle one has been closed."""
        deadline = time.monotonic() + self.limit_s
        try:
            while True:
                with self._held(Use.ANSWER, node, deadline) as connection:
                    try:
                        return question(connection)
                    except ConnectionLost:
                        # Reading changes nothing, so it can be repeated, within the deadline. Bytes received before the
                        # end prove nothing: they may be old heartbeats, or belong to the request before.
                        if not connection.is_reused or time.monotonic() >= deadline:
                            raise
        except StreamNotFound as error:
            raise self.named(error) from None

    def ask_about(self, stream: str, question: Question[_Result]) -> _Result:
        """Ask a node that has a replica of the stream."""
        try:
            return self.ask(question)
        except StreamNotHere:
            node = self.other_node(stream)
            if node is None:
                raise
            return self.ask(question, node)

    def named(self, error: StreamNotFound) -> NotFound:
        """Return `NotAStream` for another kind of queue, which AMQP 0.9.1 distinguishes."""
        if self.address.amqp_port is None:
            return error
        with self.pool.lend(_BY_AMQP, Use.ANSWER, time.monotonic() + self.limit_s, lambda: None):
            return name_missing(error, self.address, self.limit_s)

    def other_node(self, stream: str, asked: Node = None) -> Node:
        """Return a node other than the one asked that has the stream; None if no other has it.

        `StreamNotHere`: others have it, but none can be reached.
        """

        def others(connection: SocketConnection) -> list[NodeAddress]:
            answer = connection.answer(frames.metadata, [stream])
            return other_nodes(places_in(answer.body, stream), connection.session.own_node)

        out: BrokerUnavailable | None = None
        for broker in self.ask(others, asked):
            try:
                self.ask(lambda _: None, broker)
            except BrokerUnavailable as error:
                out = error
            else:
                return broker
        if out is not None:
            raise StreamNotHere(f"The stream {stream!r} has no replica on this node. {out}", stream=stream) from out
        return None


def missing(connection: SocketConnection, streams: list[str]) -> list[str]:
    """Return the streams that the broker does not know, in few round trips; other kinds of queues are among them."""
    found: list[str] = []
    for start in range(0, len(streams), PLACES_AT_ONCE):
        answer = connection.answer(frames.metadata, streams[start : start + PLACES_AT_ONCE])
        known = frames.decode_metadata(answer.body)
        found += [each.stream for each in known if each.code == Code.STREAM_DOES_NOT_EXIST]
    return found


def other_nodes(places: StreamPlaces, own: NodeAddress) -> list[NodeAddress]:
    """Return the other nodes with a replica of a stream; replicas come first, as they have less to do than leaders."""
    if places.code != Code.OK:
        return []
    leader = (places.leader,) if places.leader is not None else ()
    return [node for node in dict.fromkeys((*places.replicas, *leader)) if node != own]


def places_in(body: bytes, stream: str) -> StreamPlaces:
    """Return the nodes of a stream from an answer to Metadata."""
    for places in frames.decode_metadata(body):
        if places.stream == stream:
            return places
    raise ProtocolError(f"The broker did not answer for the stream {stream!r}.")


def _is_there(connection: SocketConnection) -> bool:
    """Whether the peer has not hung up."""
    try:
        while connection.wait(0.0) is not None:
            pass  # Heartbeats that arrived while this program was stopped; the end may follow them.
    except ConnectionLost:
        return False
    except BaseException:
        connection.abandon()
        raise
    return True
