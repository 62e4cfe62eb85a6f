"""The connections of a follower: up to 256 streams each, and at least one for each node that is read.

Streams are first subscribed to on the home node, the one that is connected first. If it has no replica of a stream, the
follower asks it for the stream's places (many streams in one query), and reads from a node with a replica.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Final

from relatum.errors import ConfigurationError, StreamNotHere
from relatum.following._connection import Connection
from relatum.following._subscriptions import Interrupted, Subscription
from relatum.reading import OUT_OF_REACH_S, PLACES_AT_ONCE, NodeAddress, SocketConnection, StreamPlaces, other_nodes
from relatum.waiting import ComponentLoop, Pauses

if TYPE_CHECKING:
    from relatum.following._followed import Followed

SPREAD_MAX: Final = 6
"""Connections to spread streams over if they delay each other; with the two for queries, eight."""

SETTLED_S: Final = 5.0
"""Seconds after which a connection or a stream counts as stable: its pauses start short again."""


class Node:
    """A node of the broker (None: the home node), its connections, and the streams that wait for one."""

    def __init__(self, where: NodeAddress | None) -> None:
        self.where = where
        self.connections: list[Connection] = []
        self.waiting: set[asyncio.Future[None]] = set()
        self.is_opening = False
        self.pauses = Pauses()
        self.pause_s = 0.0
        self.out_until = 0.0

    def least_used(self) -> Connection | None:
        """Return the connection with the most room; None if all are full."""
        found = max(self.connections, key=lambda each: each.subscriptions.room, default=None)
        return found if found is not None and found.subscriptions.room > 0 else None

    async def wait(self) -> None:
        """Wait until a connection was opened; raise the error if that failed."""
        opened = asyncio.get_running_loop().create_future()
        self.waiting.add(opened)
        try:
            await opened
        finally:
            self.waiting.discard(opened)

    def wake(self, error: Exception | None = None) -> None:
        """Resume the waiting streams, or raise an error in them."""
        for each in self.waiting:
            if not each.done():
                each.set_result(None) if error is None else each.set_exception(error)


class Connections:
    """The connections of a follower.

    `away`: Called with the reason if no stream can be read. `back`: Called when streams can be read again.
    """

    def __init__(
        self,
        loop: ComponentLoop,
        link: Callable[[NodeAddress | None], Awaitable[SocketConnection]],
        *,
        connections_max: int,
        window_bytes: int,
        away: Callable[[Exception], None],
        back: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._link = link
        self._connections_max = connections_max
        self._window_bytes = window_bytes
        self._away = away
        self._back = back
        self._spread_most = self._spread_max = min(SPREAD_MAX, connections_max)
        self._home = Node(None)
        self._nodes: dict[NodeAddress | None, Node] = {None: self._home}
        self._misplaced: dict[str, asyncio.Future[StreamPlaces]] = {}
        self._unasked: list[str] = []
        self._dirty: dict[Connection, None] = {}
        self._is_paused = self._is_closed = False
        self.is_away = False
        """Whether `away` was called, and no stream can be read now."""

    def __len__(self) -> int:
        # The thread that exports metrics calls this, too.
        return sum(len(node.connections) for node in list(self._nodes.values()))

    def _node(self, where: NodeAddress | None) -> Node:
        if where not in self._nodes:
            self._nodes[where] = Node(where)
        return self._nodes[where]

    # --- subscriptions ------------------------------------------------------------------------------------------------

    async def subscribe(self, followed: "Followed") -> Subscription:
        """Subscribe over a connection to the stream's node, as soon as one has room."""
        node = self._node(followed.node)
        while True:
            connection = node.least_used()
            if connection is not None:
                subscriptions = connection.subscriptions
                if not subscriptions.is_crowded or len(self) >= self._spread_max:
                    subscription = subscriptions.add(followed, followed.begin(), self._window_bytes)
                    subscription.connection = connection
                    self._touch(connection)
                    return subscription
            self._open(node)
            await node.wait()

    def unsubscribe(self, subscription: Subscription) -> None:
        """End a subscription. Idempotent."""
        connection, subscription.connection = subscription.connection, None
        if connection is not None:
            connection.subscriptions.remove(subscription)
            self._touch(connection)

    def grant(self, subscription: Subscription) -> None:
        """Grant a subscription's available credit to the broker."""
        connection = subscription.connection
        if connection is not None and connection.subscriptions.grant(subscription):
            self._touch(connection)

    async def other_node(self, stream: str) -> NodeAddress:
        """Find another reachable node with a replica of a stream; one query serves many streams."""
        if not self._home.connections:
            raise Interrupted
        asked = self._misplaced[stream] = asyncio.get_running_loop().create_future()
        self._unasked.append(stream)
        home = self._home.connections[0]
        self._touch(home)
        try:
            places = await asked
        finally:
            if self._misplaced.get(stream) is asked:
                del self._misplaced[stream]
        now = time.monotonic()
        for node in other_nodes(places, home.session.own_node):
            if self._node(node).out_until <= now:
                return node
        message = f"The stream {stream!r} has no replica on a reachable node."
        raise StreamNotHere(message, stream=stream)

    def _placed(self, _connection: Connection, all_places: list[StreamPlaces]) -> None:
        for places in all_places:
            asked = self._misplaced.get(places.stream)
            if asked is not None and not asked.done():
                asked.set_result(places)

    def pause(self, is_paused: bool) -> None:
        """Stop or resume reading."""
        self._is_paused = is_paused
        for node in self._nodes.values():
            for connection in node.connections:
                connection.pause(is_paused)

    def close(self) -> None:
        """Close all connections."""
        self._is_closed = True
        for node in self._nodes.values():
            connections, node.connections = node.connections, []
            for connection in connections:
                connection.close()

    # --- sending ------------------------------------------------------------------------------------------------------

    def _touch(self, connection: Connection) -> None:
        """Flush a connection at the end of this turn of the loop."""
        if not self._dirty:
            asyncio.get_running_loop().call_soon(self._flush)
        self._dirty[connection] = None

    def _flush(self) -> None:
        connections, self._dirty = self._dirty, {}
        names, self._unasked = self._unasked, []
        for start in range(0, len(names), PLACES_AT_ONCE):
            # Without a connection, the streams that asked were interrupted.
            for home in self._home.connections[:1]:
                home.subscriptions.ask_places(names[start : start + PLACES_AT_ONCE])
        for connection in connections:
            connection.subscriptions.set_barrier()
            connection.flush()

    # --- connections --------------------------------------------------------------------------------------------------

    def _open(self, node: Node) -> None:
        """Start to open another connection; raise if `connections_max` is reached."""
        if node.is_opening or self._is_closed:
            return
        if len(self) >= self._connections_max + sum(each.session.is_used_up for each in node.connections):
            raise ConfigurationError(
                f"To follow more streams takes more than connections_max={self._connections_max} connections: "
                "divide the streams among more processes"
            )
        node.is_opening = True
        self._loop.spawn(self._connect(node))

    async def _connect(self, node: Node) -> None:
        """Open a connection; to the home node, retry until that succeeds."""
        try:
            while True:
                pause_s, node.pause_s = node.pause_s, 0.0
                await asyncio.sleep(pause_s)
                if not node.waiting:
                    return
                try:
                    self._use(node, await self._link(node.where))
                except Exception as error:  # noqa: BLE001 - reported, and retried
                    self._not_opened(node, error)
                if not node.pause_s:
                    return
        finally:
            node.is_opening = False

    def _not_opened(self, node: Node, error: Exception) -> None:
        if self._is_closed:
            return
        if node.least_used() is not None:
            # It was only to spread streams; the broker may limit connections.
            self._spread_max = len(self)
            node.wake()
        elif node.where is not None:
            # The node may advertise a name that does not resolve here: look for other replicas.
            node.out_until = time.monotonic() + OUT_OF_REACH_S
            node.wake(error)
        else:
            node.pause_s = node.pauses.after(error)
            self.is_away = True
            self._away(error)

    def _use(self, node: Node, opened: SocketConnection) -> None:
        if self._is_closed:
            opened.abandon()
            return
        connection = Connection(opened, self._placed, lambda ended, error: self._lost(node, ended, error))
        node.connections.append(connection)
        self._spread_max = self._spread_most
        self.is_away = False
        self._back()
        connection.pause(self._is_paused)
        for worn in [each for each in node.connections if each.session.is_used_up]:
            # The broker keeps too many files open for this connection.
            self._forget(node, worn)
            worn.close()
        node.wake()

    def _lost(self, node: Node, connection: Connection, error: Exception) -> None:
        if connection not in node.connections:
            return
        if time.monotonic() - connection.opened_at >= SETTLED_S:
            node.pauses = Pauses()
        node.pause_s = node.pauses.after(error)
        self._forget(node, connection)
        if node is self._home and not node.connections:
            # Reported once, with the last connection.
            self.is_away = True
            self._away(error)

    def _forget(self, node: Node, connection: Connection) -> None:
        node.connections.remove(connection)
        self._dirty.pop(connection, None)
        connection.subscriptions.interrupt()
        if node is self._home:
            for asked in self._misplaced.values():
                if not asked.done():
                    asked.set_exception(Interrupted())
