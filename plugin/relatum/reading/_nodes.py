"""The broker's nodes for one reader: each request gets a connection to the node that can answer it.

A node is identified by the address that it advertises. None is the connected node: the node at the given address or, of
several addresses, at the one that answered last.
"""

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Final, TypeAlias, TypeVar

from relatum.common.waiting import LEAST_S, left_s
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
)
from relatum.reading._address import BrokerAddress
from relatum.reading._amqp import name_missing
from relatum.reading._bounds import check_time
from relatum.reading._connecting import ordered_addresses
from relatum.reading._connection import SocketConnection, stream_connection
from relatum.reading._plan import Density
from relatum.reading._pool import IDLE_S, Pool, Use
from relatum.wire import frames
from relatum.wire.frames import Code, NodeAddress, StreamPlaces

UNREACHABLE_S: Final = 5.0
"""Seconds for which an unreachable node is not tried again."""

NODE_CONNECT_S: Final = 2.0
"""Maximum seconds for connecting to an advertised address, which may be unreachable from here."""

PLACES_AT_ONCE: Final = 128
"""Maximum streams in one Metadata request: at most 33 kB of names."""

_BY_AMQP: Final = NodeAddress("AMQP 0.9.1", 0)
"""The pool's key for connections over AMQP 0.9.1, which are used once and never kept."""

_in_use: Final[set[SocketConnection]] = set()
"""Connections in use, referenced here for the garbage collector: it finalizes the objects of a cycle in any order, and
could close the socket of a dropped iteration before that returns its connection."""

_Result = TypeVar("_Result")
Node: TypeAlias = NodeAddress | None
Request = Callable[[SocketConnection], _Result]


class NodeUnreachable(BrokerUnavailable):
    """A node cannot be reached from here. Nodes behind a load balancer may advertise internal names."""


class Nodes:
    """The connections of one reader to all nodes. Thread-safe: no two requests share a connection.

    `current`: Of several addresses, the one that answered last. `losses`: The number of lost connections to each node.
    `densities`: The chunk sizes of streams. `server_properties`: Those of the node that was connected first.
    """

    def __init__(self, address: BrokerAddress, pool: Pool, *, timeout_s: float, heartbeat_s: int) -> None:
        self.address = address
        self.current = ordered_addresses(address)[0]
        self.losses: Counter[Node] = Counter()
        self.densities: dict[str, Density] = {}
        self.server_properties: dict[str, str] = {}
        self._timeout_s = timeout_s
        self._heartbeat_s = heartbeat_s
        self.pool = pool
        self._reached: set[NodeAddress] = set()
        self._unreachable_until: dict[NodeAddress, float] = {}

    @property
    def limit_s(self) -> float:
        """Maximum seconds for an answer: the reader's timeout, or the call's remaining time if that is less."""
        return left_s(self._timeout_s)

    @contextlib.contextmanager
    def _lent(self, use: Use, node: Node, deadline: float) -> Iterator[SocketConnection]:
        """Provide a connection from the pool. A reused one may have ended while idle."""

        def connect() -> SocketConnection:
            # An idle connection sends no heartbeats, so the broker must not expect any before `IDLE_S`.
            is_followed = use is Use.FOLLOW or not self._heartbeat_s
            heartbeat_s = self._heartbeat_s if is_followed else max(self._heartbeat_s, int(IDLE_S))
            return self._open(node, max(LEAST_S, deadline - time.monotonic()), heartbeat_s)

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
        """Connect to a node. `NodeUnreachable` if it cannot be reached now and never was."""
        within_s = left_s(within_s)
        if node is None:
            connection = stream_connection(self.address, within_s, heartbeat_s)
            self.server_properties = self.server_properties or connection.session.server_properties
            at = ordered_addresses(self.address)[0]
            if at != self.current:
                self.current = at
                self.losses[None] += 1
            return connection
        message = (
            f"The node that advertises {node.host}:{node.port} is unreachable from here: it is down, or "
            "stream.advertised_host and stream.advertised_port in its rabbitmq.conf must name a reachable address."
        )
        if time.monotonic() < self._unreachable_until.get(node, 0.0):
            raise NodeUnreachable(message)
        # The connected node has named this address, so it is no guess.
        address = replace(self.current, stream_host=node.host, stream_port=node.port, stream_port_guessed=False)
        try:
            connection = SocketConnection.open(address, min(NODE_CONNECT_S, within_s), heartbeat_s)
        except (BrokerUnavailable, ReadTimeout) as error:
            # A call without time left proves nothing about the node.
            check_time()
            if node in self._reached:
                raise
            self._unreachable_until[node] = time.monotonic() + UNREACHABLE_S
            raise NodeUnreachable(message) from error
        self._reached.add(node)
        return connection

    @contextlib.contextmanager
    def connection(self, use: Use, node: Node = None) -> Iterator[SocketConnection]:
        """Provide a connection that has not ended while idle, for work that is costly to restart."""
        deadline = time.monotonic() + self.limit_s
        while True:
            with self._lent(use, node, deadline) as connection:
                if _is_alive(connection):
                    yield connection
                    return

    def spare_connection(self, stack: contextlib.ExitStack, node: Node = None) -> SocketConnection | None:
        """Return one more connection, until `stack` is closed. None if other calls may need it, or connecting fails."""
        if self.pool.has_plenty:
            with contextlib.suppress(Transient, AccessRefused):
                return stack.enter_context(self.connection(Use.ANSWER, node))
        return None

    def link(self, node: Node) -> SocketConnection:
        """Return a new logged-in connection to a node. The caller owns it; no limit counts it. Raises as `query`."""
        self.pool.check_open()
        return self._open(node, self._timeout_s, self._heartbeat_s)

    def query(self, request: Request[_Result], node: Node = None) -> _Result:
        """Send a request to a node, and return its result. If a reused connection had ended, repeat it on another."""
        deadline = time.monotonic() + self.limit_s
        try:
            while True:
                with self._lent(Use.ANSWER, node, deadline) as connection:
                    try:
                        return request(connection)
                    except ConnectionLost:
                        # Requests can be repeated: they change nothing. Received bytes do not show that the connection
                        # was alive: they may be old heartbeats, or belong to an earlier request.
                        if not connection.is_reused or time.monotonic() >= deadline:
                            raise
        except StreamNotFound as error:
            raise self.missing_error(error) from None

    def query_replica(self, stream: str, request: Request[_Result]) -> _Result:
        """Send a request to a node that has a replica of the stream, and return its result."""
        try:
            return self.query(request)
        except StreamNotHere:
            node = self.other_node(stream)
            if node is None:
                raise
            return self.query(request, node)

    def missing_error(self, error: StreamNotFound) -> NotFound:
        """Return the error of a missing stream, or `NotAStream` if AMQP 0.9.1 finds another kind of queue."""
        if self.address.amqp_port is None:
            return error
        with self.pool.lend(_BY_AMQP, Use.ANSWER, time.monotonic() + self.limit_s, lambda: None):
            return name_missing(error, self.address, self.limit_s)

    def other_node(self, stream: str, queried: Node = None) -> Node:
        """Return a node that has the stream, other than `queried`; None if no other node has it.

        Raises `StreamNotHere` if other nodes have it, but none can be reached.
        """

        def others(connection: SocketConnection) -> list[NodeAddress]:
            answer = connection.answer(frames.metadata, [stream])
            return other_nodes(places_in(answer.body, stream), connection.session.own_node)

        unreachable: BrokerUnavailable | None = None
        for broker in self.query(others, queried):
            try:
                self.query(lambda _: None, broker)
            except BrokerUnavailable as error:
                unreachable = error
            else:
                return broker
        if unreachable is not None:
            message = f"The stream {stream!r} has replicas only on nodes that do not answer. {unreachable}"
            raise StreamNotHere(message, stream=stream) from unreachable
        return None


def missing(connection: SocketConnection, streams: list[str]) -> list[str]:
    """Return the names that no stream has, in few round trips. Other queues may have them."""
    found: list[str] = []
    for start in range(0, len(streams), PLACES_AT_ONCE):
        answer = connection.answer(frames.metadata, streams[start : start + PLACES_AT_ONCE])
        known = frames.decode_metadata(answer.body)
        found += [each.stream for each in known if each.code == Code.STREAM_DOES_NOT_EXIST]
    return found


def other_nodes(places: StreamPlaces, own: NodeAddress) -> list[NodeAddress]:
    """Return the other nodes that have a stream, its leader last, since replicas have less to do than a leader."""
    if places.code != Code.OK:
        return []
    leader = (places.leader,) if places.leader is not None else ()
    return [node for node in dict.fromkeys((*places.replicas, *leader)) if node != own]


def places_in(body: bytes, stream: str) -> StreamPlaces:
    """Return the nodes of a stream from an answer to Metadata."""
    for places in frames.decode_metadata(body):
        if places.stream == stream:
            return places
    raise ProtocolError(f"The broker's answer to Metadata lacks the stream {stream!r}.")


def _is_alive(connection: SocketConnection) -> bool:
    """Whether the peer has not closed the connection."""
    try:
        while connection.wait(0.0) is not None:
            pass  # Heartbeats may have arrived while this process was suspended, and then the connection's end.
    except ConnectionLost:
        return False
    return True
