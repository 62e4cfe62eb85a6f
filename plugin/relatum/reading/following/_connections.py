"""The connections of a follower: up to 256 streams each, and at least one for each node that is read.

Streams are first subscribed to on the home node, the one that is connected first. If it has no replica of a stream, the
follower reads the stream from a node that has one.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Final

from relatum.common.waiting import Pauses
from relatum.errors import ConfigurationError, StreamNotHere
from relatum.reading import OUT_OF_REACH_S, NodeAddress, SocketConnection, StreamPlaces, other_nodes
from relatum.reading.following._connection import Connection, Interrupted, Subscription

if TYPE_CHECKING:
    from relatum.reading.following._followed import Followed

CONNECTIONS_MAX: Final = 32
"""Maximum connections of a follower, for 256 streams each; queries use their own connections."""

SPREAD_MAX: Final = 6
"""Connections to spread streams over if they delay each other; with the two for queries, eight."""

SETTLED_S: Final = 5.0
"""Seconds after which a connection or a stream counts as stable: its pauses start short again."""


class Node:
    """A node of the broker (None: the home node), and its connections, which are opened one after the other.

    `attempts`: How often a connection was opened, or failed and need not be. `error`: Why none opens `out_until`.
    """

    def __init__(self, where: NodeAddress | None) -> None:
        self.where = where
        self.connections: list[Connection] = []
        self.opening = asyncio.Lock()
        self.attempts = 0
        self.pauses = Pauses()
        self.pause_s = self.out_until = 0.0
        self.error: Exception | None = None

    def least_used(self) -> Connection | None:
        """Return the connection with the most room; None if all are full."""
        found = max(self.connections, key=lambda each: each.subscriptions.room, default=None)
        return found if found is not None and found.subscriptions.room > 0 else None


class Connections:
    """The connections of a follower.

    `link`: Opens a connection to a node. `places`: Queries the nodes of a stream.
    `away`: Called with the reason if no stream can be read. `back`: Called when streams can be read again.
    """

    def __init__(
        self,
        link: Callable[[NodeAddress | None], Awaitable[SocketConnection]],
        places: Callable[[str], Awaitable[StreamPlaces]],
        *,
        away: Callable[[Exception], None],
        back: Callable[[], None],
    ) -> None:
        self._link = link
        self._places = places
        self._away = away
        self._back = back
        self._spread_max = SPREAD_MAX
        self._home = Node(None)
        self._nodes: dict[NodeAddress | None, Node] = {None: self._home}
        self._dirty: dict[Connection, None] = {}
        self._is_paused = False
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
        """Subscribe over a connection to the stream's node, as soon as a connection has room."""
        node = self._node(followed.node)
        while True:
            connection = node.least_used()
            if connection is not None:
                subscriptions = connection.subscriptions
                if not subscriptions.is_crowded or len(self) >= self._spread_max:
                    subscription = subscriptions.add(followed, followed.begin())
                    subscription.connection = connection
                    self._touch(connection)
                    return subscription
            await self._open(node)

    def unsubscribe(self, subscription: Subscription) -> None:
        """End a subscription. Idempotent."""
        connection, subscription.connection = subscription.connection, None
        if connection is not None:
            connection.subscriptions.remove(subscription)
            self._touch(connection)

    def grant(self, subscription: Subscription) -> None:
        connection = subscription.connection
        if connection is not None and connection.subscriptions.grant(subscription):
            self._touch(connection)

    async def other_node(self, stream: str) -> NodeAddress:
        if not self._home.connections:
            raise Interrupted
        own = self._home.connections[0].session.own_node
        places, now = await self._places(stream), time.monotonic()
        for node in other_nodes(places, own):
            if self._node(node).out_until <= now:
                return node
        message = f"The stream {stream!r} has no replica on a reachable node."
        raise StreamNotHere(message, stream=stream)

    def pause(self, is_paused: bool) -> None:
        self._is_paused = is_paused
        for node in self._nodes.values():
            for connection in node.connections:
                connection.pause(is_paused)

    def close(self) -> None:
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
        for connection in connections:
            connection.subscriptions.set_barrier()
            connection.flush()

    # --- connections --------------------------------------------------------------------------------------------------

    async def _open(self, node: Node) -> None:
        """Open another connection, unless another stream does; to the home node, retry until that succeeds."""
        attempts = node.attempts
        async with node.opening:
            while node.attempts == attempts:
                if node.error is not None and time.monotonic() < node.out_until:
                    raise node.error
                if len(self) >= CONNECTIONS_MAX + sum(each.session.is_used_up for each in node.connections):
                    raise ConfigurationError(
                        f"To follow more streams takes more than {CONNECTIONS_MAX} connections: divide the streams "
                        "among more processes"
                    )
                pause_s, node.pause_s = node.pause_s, 0.0
                await asyncio.sleep(pause_s)
                try:
                    self._use(node, await self._link(node.where))
                except Exception as error:
                    if node.least_used() is not None:
                        # It was only to spread streams; the broker may limit connections.
                        self._spread_max = len(self)
                        node.attempts += 1
                    elif node is not self._home:
                        # The node may advertise a name that does not resolve here: look for other replicas.
                        node.error, node.out_until = error, time.monotonic() + OUT_OF_REACH_S
                        raise
                    else:
                        self._lose_all(error)

    def _lose_all(self, error: Exception) -> None:
        """Report that no stream can be read, and pause before the next attempt."""
        self._home.pause_s = self._home.pauses.after(error)
        self.is_away = True
        self._away(error)

    def _use(self, node: Node, opened: SocketConnection) -> None:
        connection = Connection(opened, lambda ended, error: self._lost(node, ended, error))
        node.connections.append(connection)
        self._spread_max = SPREAD_MAX
        self.is_away = False
        self._back()
        connection.pause(self._is_paused)
        for worn in [each for each in node.connections if each.session.is_used_up]:
            # The broker keeps too many files open for this connection.
            self._forget(node, worn)
            worn.close()
        node.attempts += 1

    def _lost(self, node: Node, connection: Connection, error: Exception) -> None:
        if connection not in node.connections:
            return
        if time.monotonic() - connection.opened_at >= SETTLED_S:
            node.pauses = Pauses()
        self._forget(node, connection)
        if node is self._home and not node.connections:
            # Reported once, with the last connection.
            self._lose_all(error)
        else:
            node.pause_s = node.pauses.after(error)

    def _forget(self, node: Node, connection: Connection) -> None:
        node.connections.remove(connection)
        self._dirty.pop(connection, None)
        connection.subscriptions.interrupt()
