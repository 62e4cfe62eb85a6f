"""The connections of a follower: each serves up to 256 streams of one node.

The follower subscribes to streams on the home node, the first node that it connected to. If the home node has no
replica of a stream, the follower reads the stream from a node that has one.
"""

import asyncio
import time
from typing import TYPE_CHECKING, Final

from relatum.common.waiting import Pauses
from relatum.errors import ConfigurationError, StreamNotHere
from relatum.reading import NodeAddress, SocketConnection
from relatum.reading._nodes import UNREACHABLE_S, other_nodes
from relatum.reading.following._connection import Connection, Interrupted, Subscription

if TYPE_CHECKING:
    from relatum.reading.following._followed import Followed
    from relatum.reading.following._follower import StreamFollower

CONNECTIONS_MAX: Final = 32
"""Maximum connections of a follower, for 256 streams each. Queries use the reader's connections, not these."""

SPREAD_MAX: Final = 6
"""Maximum connections over which streams that delay each other are spread. Together with two for queries: eight."""

SETTLED_S: Final = 5.0
"""Seconds after which a connection or a stream counts as stable, so that its backoff starts anew."""


class Node:
    """A node of the broker (None: the home node), and its connections, which are opened one after the other.

    `attempts`: The number of connections that were opened, or failed and were not needed.
    `error`: Why the node could not be reached. It is not tried again before `unreachable_until`.
    """

    def __init__(self, address: NodeAddress | None) -> None:
        self.address = address
        self.connections: list[Connection] = []
        self.opening = asyncio.Lock()
        self.attempts = 0
        self.pauses = Pauses()
        self.pause_s = self.unreachable_until = 0.0
        self.error: Exception | None = None

    def least_used(self) -> Connection | None:
        """Return the connection with the most free subscription ids; None if all are full."""
        found = max(self.connections, key=lambda each: each.subscriptions.room, default=None)
        return found if found is not None and found.subscriptions.room > 0 else None


class Connections:
    """The connections of a follower."""

    def __init__(self, follower: "StreamFollower") -> None:
        self._follower = follower
        self._spread_max = SPREAD_MAX
        self._home = Node(None)
        self._nodes: dict[NodeAddress | None, Node] = {None: self._home}
        self._is_paused = False
        self.is_away = False
        """Whether the home node is unreachable, so that no stream can be read now."""

    def __len__(self) -> int:
        # The thread that exports metrics calls this, too.
        return sum(len(node.connections) for node in list(self._nodes.values()))

    def _node(self, address: NodeAddress | None) -> Node:
        return self._nodes.setdefault(address, Node(address))

    # --- subscriptions ------------------------------------------------------------------------------------------------

    async def subscribe(self, followed: "Followed") -> Subscription:
        """Subscribe to a stream on its node, over a connection with a free subscription id; open one if needed."""
        node = self._node(followed.node)
        while True:
            connection = node.least_used()
            if connection is not None:
                subscriptions = connection.subscriptions
                if not subscriptions.is_crowded or len(self) >= self._spread_max:
                    return subscriptions.add(followed, followed.begin())
            await self._open(node)

    async def other_node(self, stream: str, tried: NodeAddress | None) -> NodeAddress:
        """Return the next reachable node that has a stream. `tried`: The last one that was tried; None: the home node.

        The leader comes last. Raises `StreamNotHere` after it.
        """
        if not self._home.connections:
            raise Interrupted
        own = self._home.connections[0].session.own_node
        places, now = await self._follower.nodes_of(stream), time.monotonic()
        nodes = other_nodes(places, own)
        for node in nodes[nodes.index(tried) + 1 if tried in nodes else 0 :]:
            if self._node(node).unreachable_until <= now:
                return node
        message = f"No reachable node has a replica of the stream {stream!r}."
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

    # --- connections --------------------------------------------------------------------------------------------------

    async def _open(self, node: Node) -> None:
        """Open another connection, unless another stream does so. For the home node, retry until this succeeds."""
        attempts = node.attempts
        async with node.opening:
            while node.attempts == attempts:
                if node.error is not None and time.monotonic() < node.unreachable_until:
                    raise node.error
                if len(self) >= CONNECTIONS_MAX + sum(each.session.is_used_up for each in node.connections):
                    why = f"the streams need more than {CONNECTIONS_MAX} connections, the limit of a follower"
                    raise ConfigurationError(f"{why}: divide them among more processes")
                pause_s, node.pause_s = node.pause_s, 0.0
                await asyncio.sleep(pause_s)
                try:
                    self._add(node, await self._follower.connect(node.address))
                except Exception as error:
                    if node.least_used() is not None:
                        # The connection was only to spread streams. The broker may limit connections.
                        self._spread_max = len(self)
                        node.attempts += 1
                    elif node is not self._home:
                        # The node may advertise a name that does not resolve here. Streams then try other replicas.
                        node.error, node.unreachable_until = error, time.monotonic() + UNREACHABLE_S
                        raise
                    else:
                        self._report_outage(error)

    def _report_outage(self, error: Exception) -> None:
        """Report that no stream can be read, and set the pause before the next attempt."""
        self._home.pause_s = self._home.pauses.after(error)
        self.is_away = True
        self._follower.on_outage(error)

    def _add(self, node: Node, opened: SocketConnection) -> None:
        connection = Connection(opened, lambda ended, error: self._on_lost(node, ended, error))
        node.connections.append(connection)
        self._spread_max = SPREAD_MAX
        self.is_away = False
        self._follower.on_recovery()
        connection.pause(self._is_paused)
        for used_up in [each for each in node.connections if each.session.is_used_up]:
            # The broker keeps too many files open for this connection.
            self._remove(node, used_up)
            used_up.close()
        node.attempts += 1

    def _on_lost(self, node: Node, connection: Connection, error: Exception) -> None:
        if time.monotonic() - connection.opened_at >= SETTLED_S:
            node.pauses = Pauses()
        self._remove(node, connection)
        if node is self._home and not node.connections:
            # The outage is reported once, when the last connection is lost.
            self._report_outage(error)
        else:
            node.pause_s = node.pauses.after(error)

    def _remove(self, node: Node, connection: Connection) -> None:
        node.connections.remove(connection)
        connection.subscriptions.interrupt()
