"""Connections of the stream protocol to a broker's nodes: one for each question, a turn for each."""

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Final, Self, TypeVar

from relatum.errors import (
    AccessRefused,
    BrokerUnavailable,
    ConnectionLost,
    NotFound,
    ReadTimeout,
    RelatumError,
    StreamNotFound,
    StreamNotHere,
    Transient,
    UsedAfterClose,
)
from relatum.processes import after_fork
from relatum.reading._address import BrokerAddress
from relatum.reading._connecting import (
    CONNECT_S_MIN,
    HEARTBEAT_S,
    PASSED_OVER,
    answered,
    cluster_meant,
    connect_left_s,
    forget_cluster,
    in_turn,
    login_for,
    none_answered,
    shares,
)
from relatum.reading._connection import SocketConnection
from relatum.reading._leading import (
    NODE_CONNECT_S,
    OUT_OF_REACH_S,
    Leaders,
    OutOfReach,
)
from relatum.reading._missing_streams import name_missing
from relatum.reading._plan import Density
from relatum.reading._pool import CONNECTIONS_MAX, Line, Pool, ReaderStatistics, Use
from relatum.reading._questions import elsewhere
from relatum.reading._stream_errors import check_time
from relatum.waiting import Keeper, left_s
from relatum.wire import AnotherCluster, Broker

_Result = TypeVar("_Result")
Question = Callable[[SocketConnection], _Result]


_ASIDE: Final = "aside"
"""As a node: a connection that is used once, of another kind, and never kept."""


class StreamNodes:
    """The connections by which one reader asks a node, and the readers of other nodes that it asks.

    Args:
        connect_s: Seconds for the connection that `open` opens; None: `timeout_s`.
        connections: At most how many, or the connections of the reader that asks this node, too.
        node: The node, where another reader's connections are used; None for the one that the address leads to.
    """

    def __init__(
        self,
        address: BrokerAddress,
        *,
        timeout_s: float,
        heartbeat_s: int = HEARTBEAT_S,
        connect_s: float | None = None,
        connections: "int | Pool[SocketConnection]" = CONNECTIONS_MAX,
        node: Broker | None = None,
    ) -> None:
        self._address = address
        self._at = in_turn(address)[0]
        """The one of several addresses that answered last."""
        self._limit_s = timeout_s
        self._connect_s = connect_s
        self._heartbeat_s = heartbeat_s
        self._pool = connections if isinstance(connections, Pool) else Pool(connections)
        self._node = node
        self.densities: dict[str, Density] = {}
        self._nodes: dict[Broker, Self] = {}
        self._leaders = Leaders(time.monotonic, self._losses_of, has_others=bool(self._address.others))
        self.losses = 0
        self._out_of_reach: dict[Broker, float] = {}
        self._is_closed = False
        self._keeper: Keeper | None = None
        self.server_properties: dict[str, str] = {}
        self._lock = threading.Lock()
        after_fork(self, StreamNodes._renew)

    def _renew(self) -> None:
        """In a child: connections and the thread are the parent's; the next question opens and starts others."""
        self._lock, self._keeper, self._nodes = threading.Lock(), None, {}

    def open(self) -> None:
        """Connect once, so that what is wrong shows at once."""
        deadline = time.monotonic() + self.limit_s
        line, connection = self._acquire(Use.ANSWER, deadline, self._connect_s or self.limit_s)
        self._release(line, Use.ANSWER, connection)
        self.server_properties = connection.session.server_properties

    def _keep(self) -> None:
        """Exchange heartbeats on idle connections from now on."""
        # Other nodes' connections are kept with those of the reader that asks them.
        if not self._heartbeat_s or self._node is not None:
            return
        with self._lock:
            if self._keeper is None and not self._is_closed:
                every_s = self._heartbeat_s / 4
                self._keeper = Keeper(self, StreamNodes.beat, every_s=every_s, name="relatum-heartbeats")

    def _acquire(self, use: Use, deadline: float, connect_s: float | None = None) -> tuple[Line, SocketConnection]:
        """A turn and a connection, which may have ended while it was idle; both are given back by `_release`."""
        if self._is_closed:
            raise UsedAfterClose("the reader was closed: open another one")
        line, connection = self._pool.take(self._node, use, deadline)
        if connection is not None:
            connection.is_reused = True
        else:
            try:
                self._pool.make_room()
                connection = self._connect(connect_left_s(connect_s or max(CONNECT_S_MIN, deadline - time.monotonic())))
            except BaseException:
                self._pool.give_back(line, use)
                raise
            self._pool.note_opened()
            self._keep()
        connection.deadline = deadline
        return line, connection

    def _release(self, line: Line | None, use: Use, connection: SocketConnection) -> None:
        """Give a turn back, and the connection where others can use it."""
        if not connection.is_usable:
            self.losses += 1
            self._pool.give_back(line, use)
        elif self._is_closed or connection.is_worn:
            connection.close()
            self._pool.give_back(line, use)
        else:
            self._pool.give_back(line, use, self._node, connection)

    def _connect(self, within_s: float) -> SocketConnection:
        """A connection to the node; of several addresses, to the one that answered last, else to the next that does."""
        errors: list[RelatumError] = []
        for address, share_s in shares(self._address, within_s):
            try:
                connection = self._connect_to(address, share_s)
            except PASSED_OVER as error:
                errors.append(error)
            else:
                answered(self._address, address, errors)
                self._be_at(address)
                return connection
        raise none_answered(errors)

    def _connect_to(self, address: BrokerAddress, within_s: float) -> SocketConnection:
        name = None
        # Other nodes are named by one that knows the password already, so nothing is guessed; and each node of a
        # cluster may say another name, until somebody sets one.
        if address.stream_port is not None and address.stream_port_guessed and self._node is None:
            name_s = within_s if self._address.others else left_s(self._limit_s)
            name = cluster_meant(address, timeout_s=name_s)
        try:
            login = login_for(address, self._heartbeat_s, name)
            return SocketConnection.open(address, login, within_s)
        except AnotherCluster:
            forget_cluster(address)
            raise

    def _be_at(self, address: BrokerAddress) -> None:
        with self._lock:
            if address != self._at:
                # What the other node led, and whether it was alone, says nothing of this one.
                self._at = address
                self.losses += 1
                self._leaders = Leaders(time.monotonic, self._losses_of, has_others=bool(self._address.others))

    def beat(self) -> None:
        """Exchange heartbeats on the idle connections; one that has ended is dropped."""
        for _ in range(len(self._pool.idle)):
            # Taken out meanwhile: a connection is for one thread at a time.
            taken = self._pool.take_oldest()
            if taken is None:
                return
            node, connection = taken
            holder = self._nodes.get(node, self) if isinstance(node, Broker) else self
            try:
                connection.wait(0.0)
            except RelatumError:
                pass  # It is abandoned, and dropped below.
            finally:
                holder._release(None, Use.ANSWER, connection)

    @property
    def limit_s(self) -> float:
        """Seconds that an answer may take; less where the call has less left."""
        return left_s(self._limit_s)

    def statistics(self) -> ReaderStatistics:
        """The connections, of all nodes."""
        return self._pool.statistics()

    def close(self) -> None:
        """Close all idle connections; those in use close when they are given back."""
        with self._lock:
            self._is_closed = True
        if self._keeper is not None:
            self._keeper.end()
        for node in list(self._nodes.values()):
            node._is_closed = True
        for connection in self._pool.end():
            connection.close()

    def link(self, node: Broker | None) -> SocketConnection:
        """A connection to a node (None: the connected one), logged in, that is the caller's: it is counted nowhere.

        Raises:
            OutOfReach: the node cannot be reached from here.
            BrokerUnavailable, AccessRefused, ConfigurationError: as of `SocketConnection.open`.
        """
        if self._is_closed:
            raise UsedAfterClose("the reader was closed: open another one")
        there = self._reach(node)
        return there._connect(connect_left_s(self._limit_s))

    def _ask_about(self, stream: str, question: Question[_Result]) -> _Result:
        """Ask a node that has the stream."""
        try:
            return self._ask(question)
        except StreamNotHere:
            node = self._node_with(stream, self)
            if node is None:
                raise
            return node._ask(question)

    def _node_with(self, stream: str, asked: Self) -> Self | None:
        """A reader on another node that has the stream and can be reached; None where no other has it.

        Raises:
            StreamNotHere: others have it, and none can be reached.
        """
        out: OutOfReach | None = None
        for broker in asked._ask(lambda connection: elsewhere(connection, stream)):
            try:
                return self._reach(broker)
            except OutOfReach as error:
                out = error
        if out is not None:
            raise StreamNotHere(f"The stream {stream!r} has no replica on this node. {out}", stream=stream) from out
        return None

    def _reach(self, broker: Broker | None) -> Self:
        """The reader on a node; this one for None.

        Raises:
            OutOfReach: the node cannot be reached from here: it is down, or advertises a name that only it knows.
        """
        if broker is None:
            return self
        if broker in self._nodes:
            return self._nodes[broker]
        message = (
            f"The node that advertises {broker.host}:{broker.port} cannot be reached there from here: it is down, or "
            "stream.advertised_host and stream.advertised_port in its rabbitmq.conf are to name what can be reached."
        )
        if time.monotonic() < self._out_of_reach.get(broker, 0.0):
            raise OutOfReach(message)
        try:
            node = type(self)(
                replace(self._at, stream_host=broker.host, stream_port=broker.port),
                timeout_s=self._limit_s,
                heartbeat_s=self._heartbeat_s,
                connect_s=left_s(min(NODE_CONNECT_S, self._limit_s)),
                connections=self._pool,
                node=broker,
            )
            node.open()
        except (BrokerUnavailable, ReadTimeout) as error:
            # That a call ran out of time says nothing of the node.
            check_time()
            self._out_of_reach[broker] = time.monotonic() + OUT_OF_REACH_S
            raise OutOfReach(message) from error
        # Another thread may have been faster; what it made is used by others already.
        with self._lock:
            return self._nodes.setdefault(broker, node)

    def _ask(self, question: Question[_Result]) -> _Result:
        """Ask; once more on a new connection if the idle one turns out to have been closed."""
        deadline = time.monotonic() + self.limit_s
        try:
            while True:
                line, connection = self._acquire(Use.ANSWER, deadline)
                try:
                    return question(connection)
                except ConnectionLost:
                    # Reading changes nothing, so it can be asked again; but not for ever. What came before the end says
                    # nothing: it may be heartbeats, of when this program stood still, or of the question before.
                    if not connection.is_reused or time.monotonic() >= deadline:
                        raise
                finally:
                    self._release(line, Use.ANSWER, connection)
        except StreamNotFound as error:
            raise self._named(error) from None

    def _named(self, error: StreamNotFound) -> NotFound:
        """`NotAStream` for a queue of another kind: by a blocking question, it is an error's path."""
        if self._address.amqp_port is None:
            return error
        line, _ = self._pool.take(_ASIDE, Use.ANSWER, time.monotonic() + self.limit_s)
        try:
            self._pool.make_room()
            return name_missing(error, self._address, self.limit_s)
        finally:
            self._pool.give_back(line, Use.ANSWER)

    @contextlib.contextmanager
    def connection(self, use: Use) -> Iterator[SocketConnection]:
        """A connection that has not ended while it was idle: what takes long is not begun anew for that."""
        deadline = time.monotonic() + self.limit_s
        while True:
            line, connection = self._acquire(use, deadline)
            try:
                if _is_there(connection):
                    yield connection
                    return
            finally:
                self._release(line, use, connection)

    def further(self, stack: contextlib.ExitStack, use: Use) -> SocketConnection | None:
        """A further connection for one caller, until the stack is closed.

        None where others may need the rest, or none can be opened: the caller goes on with what it has.
        """
        if self._pool.has_plenty(use):
            with contextlib.suppress(Transient, AccessRefused):
                return stack.enter_context(self.connection(use))
        return None

    def _losses_of(self, broker: Broker | None) -> int:
        """How often a connection to a node was lost, of those that single questions use."""
        node = self if broker is None else self._nodes.get(broker)
        return node.losses if node is not None else 0


def _is_there(connection: SocketConnection) -> bool:
    """Whether the other side has not hung up."""
    try:
        while connection.wait(0.0) is not None:
            pass  # Heartbeats, of when this program stood still; its end may be behind them.
    except ConnectionLost:
        return False
    except BaseException:
        connection.abandon()
        raise
    return True
