"""The connections that streams are read over: up to 256 on a connection, and a connection for each node that has some.

A stream is asked for where the follower is connected first. Only where it has no replica there, it is asked where it
lies (many streams in one question), and read from a node that has one.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Final

from relatum.errors import ConfigurationError, StreamNotHere
from relatum.following._connection import Connection
from relatum.following._subscriptions import Interrupted, Subscription
from relatum.reading import OUT_OF_REACH_S, PLACES_AT_ONCE, Broker, SocketConnection, StreamPlaces, other_nodes
from relatum.waiting import ComponentLoop, Pauses

if TYPE_CHECKING:
    from relatum.following._followed import Followed

SPREAD_MAX: Final = 6
"""Connections that streams are spread over where those of one wait for each other: eight, with two to ask by."""

SETTLED_S: Final = 5.0
"""Seconds that a connection, or the following of a stream, lasts before the pauses after failures begin anew."""


class Node:
    """A node of the broker (None: the one that is connected first): its connections, and who waits for one."""

    def __init__(self, where: Broker | None) -> None:
        self.where = where
        self.connections: list[Connection] = []
        self.waiting: set[asyncio.Future[None]] = set()
        self.is_opening = False
        self.pauses = Pauses()
        self.pause_s = 0.0
        self.out_until = 0.0

    def roomiest(self) -> Connection | None:
        """The connection that has most room; None where none has any."""
        found = max(self.connections, key=lambda each: each.subscriptions.room, default=None)
        return found if found is not None and found.subscriptions.room > 0 else None

    async def wait(self) -> None:
        """Wait until a connection was opened; raises why none was."""
        opened = asyncio.get_running_loop().create_future()
        self.waiting.add(opened)
        try:
            await opened
        finally:
            self.waiting.discard(opened)

    def wake(self, error: Exception | None = None) -> None:
        """Let the streams that wait go on, or raise an error there."""
        for each in self.waiting:
            if not each.done():
                each.set_result(None) if error is None else each.set_exception(error)


class Connections:
    """The connections of a follower. `away` is called with why nothing can be read, `back` when it can."""

    def __init__(
        self,
        loop: ComponentLoop,
        link: Callable[[Broker | None], Awaitable[SocketConnection]],
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
        self._nodes: dict[Broker | None, Node] = {None: self._home}
        self._misplaced: dict[str, asyncio.Future[StreamPlaces]] = {}
        self._unasked: list[str] = []
        self._dirty: dict[Connection, None] = {}
        self._is_paused = self._is_closed = False
        self.is_away = False
        """Whether no stream can be read now, as was told."""

    def __len__(self) -> int:
        # Also asked by the thread that tells metrics.
        return sum(len(node.connections) for node in list(self._nodes.values()))

    def _node(self, where: Broker | None) -> Node:
        if where not in self._nodes:
            self._nodes[where] = Node(where)
        return self._nodes[where]

    # --- what is asked for --------------------------------------------------------------------------------------------

    async def subscribe(self, followed: "Followed") -> Subscription:
        """Subscribe over a connection to the stream's node that has room, as soon as there is one."""
        node = self._node(followed.node)
        while True:
            connection = node.roomiest()
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
        """Grant a subscription what credit there is."""
        connection = subscription.connection
        if connection is not None and connection.subscriptions.grant(subscription):
            self._touch(connection)

    async def other_node(self, stream: str) -> Broker:
        """Another node that has a stream and can be reached; it is asked for many streams at once."""
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
        for node in other_nodes(places, home.subscriptions.own_node):
            if self._node(node).out_until <= now:
                return node
        message = f"The stream {stream!r} has no replica on a node that can be reached from here."
        raise StreamNotHere(message, stream=stream)

    def _placed(self, _connection: Connection, all_places: list[StreamPlaces]) -> None:
        for places in all_places:
            asked = self._misplaced.get(places.stream)
            if asked is not None and not asked.done():
                asked.set_result(places)

    def pause(self, is_paused: bool) -> None:
        """Read nothing for now, or again."""
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

    # --- what is sent -------------------------------------------------------------------------------------------------

    def _touch(self, connection: Connection) -> None:
        """Send what is to be sent, once for all that comes up in this turn of the loop."""
        if not self._dirty:
            asyncio.get_running_loop().call_soon(self._flush)
        self._dirty[connection] = None

    def _flush(self) -> None:
        connections, self._dirty = self._dirty, {}
        names, self._unasked = self._unasked, []
        for start in range(0, len(names), PLACES_AT_ONCE):
            # Whoever asked is interrupted where there is none.
            for home in self._home.connections[:1]:
                home.subscriptions.ask_places(names[start : start + PLACES_AT_ONCE])
        for connection in connections:
            connection.subscriptions.set_barrier()
            connection.flush()

    # --- connections --------------------------------------------------------------------------------------------------

    def _open(self, node: Node) -> None:
        """Have another connection opened, unless there are as many as there may be: that is raised."""
        if node.is_opening or self._is_closed:
            return
        if len(self) >= self._connections_max + sum(each.subscriptions.is_worn for each in node.connections):
            raise ConfigurationError(
                f"More streams need more than connections_max={self._connections_max} connections to the broker: "
                "divide the streams among more processes"
            )
        node.is_opening = True
        self._loop.spawn(self._connect(node))

    async def _connect(self, node: Node) -> None:
        """Open a connection; to the node that is connected first as often as it takes."""
        try:
            while True:
                pause_s, node.pause_s = node.pause_s, 0.0
                await asyncio.sleep(pause_s)
                if not node.waiting:
                    return
                try:
                    self._use(node, await self._link(node.where))
                except Exception as error:  # noqa: BLE001 - told, and tried again
                    self._not_opened(node, error)
                if not node.pause_s:
                    return
        finally:
            node.is_opening = False

    def _not_opened(self, node: Node, error: Exception) -> None:
        if self._is_closed:
            return
        if node.roomiest() is not None:
            # It was only to spread them, and the broker may let no more in.
            self._spread_max = len(self)
            node.wake()
        elif node.where is not None:
            # It may advertise a name that only it knows: the streams are looked for elsewhere.
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
        for worn in [each for each in node.connections if each.subscriptions.is_worn]:
            # The broker holds too many files open for it.
            self._forget(node, worn)
            worn.close()
        node.wake()

    def _lost(self, node: Node, connection: Connection, error: Exception) -> None:
        """A connection has ended by itself."""
        if connection not in node.connections:
            return
        if time.monotonic() - connection.opened_at >= SETTLED_S:
            node.pauses = Pauses()
        node.pause_s = node.pauses.after(error)
        self._forget(node, connection)
        if node is self._home and not node.connections:
            # Told once, of the last connection that the broker takes along.
            self.is_away = True
            self._away(error)

    def _forget(self, node: Node, connection: Connection) -> None:
        """Read over a connection no more: its streams wait for another one."""
        node.connections.remove(connection)
        self._dirty.pop(connection, None)
        connection.subscriptions.interrupt()
        if node is self._home:
            for asked in self._misplaced.values():
                if not asked.done():
                    asked.set_exception(Interrupted())
