"""The connections of one reader, to all nodes: limited in number, lent to one call at a time, kept while idle.

A turn is the right to use one connection. Calls get turns in their order. A call with a turn never waits for another
turn, with one exception: the caller of an iteration (`Use.LENT`) may make a request between two messages. So iterations
never get the last quarter of the turns, which is left to requests. These end by themselves, so there is no deadlock.

Connections in use and idle together never exceed the limit: before another is opened, the one that was idle longest is
closed. A followed stream has a separate connection, outside the limit.
"""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, Final

from relatum.common.checks import seconds_text
from relatum.common.processes import after_fork, leave_to_parent
from relatum.common.waiting import LOOK_S
from relatum.errors import BrokerUnavailable, ConnectionsInUse, UsedAfterClose
from relatum.metrics import Counter, Gauge, reported
from relatum.reading._bounds import check_time
from relatum.reading._connection import SocketConnection
from relatum.wire.frames import NodeAddress

CONNECTIONS_MAX: Final = 16
"""The default limit of a reader's connections: about as many as keep one broker node busy."""

IDLE_MAX: Final = CONNECTIONS_MAX
"""Maximum idle connections that a reader keeps, of all nodes. With half as many, 64 concurrent lookups opened a new
connection for every thirtieth lookup, and a login takes as long as ten lookups."""

CONNECTIONS_MIN: Final = 2
"""The minimum limit: one connection for an iteration, and one for its caller's requests."""

IDLE_S: Final = 60.0
"""Seconds after which an idle connection is not reused but closed, because networks drop connections without traffic.
It is also these connections' minimum heartbeat interval, so that the broker closes those of a dead client."""

REFUSING: Final = "the reader was closed: open another one"
"""The default message of `UsedAfterClose`."""

RESERVED_DIVISOR: Final = 4
"""The limit divided by this is the number of turns that iterations never get; at least one."""


class Use(Enum):
    """The purpose of a connection."""

    ANSWER = "answer"
    """A request, which ends by itself."""

    LENT = "lent"
    """An iteration. Its caller decides when it continues."""

    FOLLOW = "follow"
    """A followed stream. It lasts until its caller ends it, and takes no turn."""


@reported()
@dataclass(frozen=True, slots=True)
class ReaderStatistics:
    """The connections of a reader to all nodes of the broker.

    Attributes:
        limit: Maximum connections in use and idle together: `broker_connections_max`.
        in_use: Connections that requests and iterations use now.
        idle: Open connections that no call uses now.
        waiting: Calls that wait for a connection.
        following: Streams followed now (`follow=True`), each over a connection outside the limit.
        opened: Connections opened so far.
    """

    limit: Annotated[int, Gauge("relatum_reader_connections_limit", "Maximum number of connections, in use or idle")]
    in_use: Annotated[int, Gauge("relatum_reader_connections_in_use", "Connections to the broker in use")]
    idle: Annotated[int, Gauge("relatum_reader_connections_idle", "Idle connections to the broker")]
    waiting: Annotated[int, Gauge("relatum_reader_waiting_calls", "Calls that wait for a connection")]
    following: Annotated[
        int, Gauge("relatum_reader_followed_streams", "Streams followed, each over its own connection")
    ]
    opened: Annotated[int, Counter("relatum_reader_connections_opened_total", "Connections opened to the broker")]

    @classmethod
    def of_none(cls, limit: int) -> "ReaderStatistics":
        """Return the statistics of a reader that has not been opened."""
        return cls(limit, in_use=0, idle=0, waiting=0, following=0, opened=0)


class Turns:
    """One reader's turns, each the right to use a connection, and the calls that wait for a turn. Thread-safe."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        # Reentrant, because the garbage collector may end dropped iterations while this thread has the lock.
        self.lock = threading.RLock()
        self.in_use = self.lent = self.following = 0
        self._lent_max = limit - max(1, limit // RESERVED_DIVISOR)
        self._waiting: list[tuple[Use, Future[None]]] = []

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def enter(self, use: Use) -> "Future[None]":
        """Return a future that is done when the call gets its turn."""
        turn: Future[None] = Future()
        with self.lock:
            if use is Use.FOLLOW or self._has_room(use):
                self._take(use)
                turn.set_result(None)
            else:
                self._waiting.append((use, turn))
        return turn

    def leave(self, use: Use) -> None:
        """Return a turn. Of the waiting calls that may use it, the first one gets it."""
        with self.lock:
            if use is Use.FOLLOW:
                self.following -= 1
                return
            self.in_use -= 1
            self.lent -= use is Use.LENT
            place = 0
            while self.in_use < self.limit and place < len(self._waiting):
                kind, turn = self._waiting[place]
                if not self._has_room(kind):
                    place += 1
                    continue
                del self._waiting[place]
                if turn.set_running_or_notify_cancel():
                    self._take(kind)
                    turn.set_result(None)

    def withdraw(self, use: Use, turn: "Future[None]") -> None:
        """Stop waiting. If the call got its turn in the meantime, return it."""
        with self.lock:
            if turn.done() and not turn.cancelled():
                self.leave(use)
            else:
                turn.cancel()
                self._waiting = [each for each in self._waiting if each[1] is not turn]

    def no_turn_error(self, waited_s: float) -> ConnectionsInUse:
        """Return the error of a call that got no turn in time."""
        return ConnectionsInUse(
            f"all {self.limit} connections that this reader may have to the broker are in use, and none became free "
            f"within {seconds_text(max(0.0, waited_s))}: make fewer concurrent calls, close iterations that you leave "
            f"early, or raise broker_connections_max= (now {self.limit})",
            limit=self.limit,
            waiting=self.waiting,
        )

    def _has_room(self, use: Use) -> bool:
        return self.in_use < self.limit and (use is not Use.LENT or self.lent < self._lent_max)

    def _take(self, use: Use) -> None:
        self.following += use is Use.FOLLOW
        self.in_use += use is not Use.FOLLOW
        self.lent += use is Use.LENT


class Pool:
    """The turns and the idle connections of one reader, least recently used first. Thread-safe.

    In a forked child, all turns are free and there is no connection: the connections belong to the parent.
    """

    def __init__(self, limit: int = CONNECTIONS_MAX, refusing: str = REFUSING) -> None:
        self._turns = Turns(limit)
        self._refusing = refusing
        self._idle: list[tuple[NodeAddress | None, SocketConnection]] = []
        self._opened = self._connections_out = 0
        self.is_closed = False
        after_fork(self, Pool._renew)

    def _renew(self) -> None:
        # A turn taken in the parent goes back to the parent's turns.
        self._turns = Turns(self._turns.limit)
        leave_to_parent(*self._idle)
        self._idle, self._connections_out = [], 0

    @property
    def has_plenty(self) -> bool:
        """Whether a call may get one more connection: less than half are in use, and no call waits."""
        return 2 * self._turns.in_use < self._turns.limit and not self._turns.waiting

    def check_open(self) -> None:
        if self.is_closed:
            raise UsedAfterClose(self._refusing)

    def statistics(self) -> ReaderStatistics:
        turns = self._turns
        return ReaderStatistics(
            turns.limit, turns.in_use, len(self._idle), turns.waiting, turns.following, opened=self._opened
        )

    @contextmanager
    def lend(
        self, node: NodeAddress | None, use: Use, deadline: float, connect: Callable[[], SocketConnection | None]
    ) -> Iterator[Any]:
        """Provide a connection to a node: the most recently used idle one, or the result of `connect`.

        Waits for a turn until `deadline`. After the block, the connection is kept for other calls, or closed.
        """
        self.check_open()
        check_time()
        turns, connection, is_followed = self._turns, None, use is Use.FOLLOW
        try:
            _wait(turns, use, turns.enter(use), deadline)
        except ConnectionsInUse as error:
            if self._opened:
                raise
            raise BrokerUnavailable("earlier calls still connect to the broker, which did not answer") from error
        with turns.lock:
            self._connections_out += not is_followed
            for index in () if is_followed else reversed(range(len(self._idle))):
                if self._idle[index][0] == node and not self._idle[index][1].is_idle_for(IDLE_S):
                    connection = self._idle.pop(index)[1]
                    break
        try:
            if connection is None:
                self._make_room()
                connection = connect()
                with self._turns.lock:
                    self._opened += connection is not None
            yield connection
        finally:
            with self._turns.lock:
                self._connections_out -= not is_followed
                if connection is not None and not is_followed and self._should_keep(connection):
                    self._idle.append((node, connection))
                    connection = None
            if connection is not None:
                connection.close()
            turns.leave(use)

    def _make_room(self) -> None:
        """Close idle connections that are too old, or exceed the limit together with the one to be opened."""
        with self._turns.lock:
            count = max(0, self._connections_out + len(self._idle) - self._turns.limit)
            while count < len(self._idle) and self._idle[count][1].is_idle_for(IDLE_S):
                count += 1
            surplus, self._idle = self._idle[:count], self._idle[count:]
        for _, connection in surplus:
            connection.close()

    def _should_keep(self, connection: SocketConnection) -> bool:
        turns, idle = self._turns, len(self._idle)
        if not connection.is_usable or connection.session.is_used_up:
            return False
        if self.is_closed or self._connections_out + idle >= turns.limit:
            return False
        connection.is_reused = True
        # More are kept if calls that have a turn, or wait for one, are about to use them.
        return idle < IDLE_MAX or idle < turns.in_use - self._connections_out + turns.waiting

    def close(self) -> None:
        """Close all idle connections. A connection in use is closed when its call returns it."""
        with self._turns.lock:
            self.is_closed = True
            idle, self._idle = self._idle, []
        for _, connection in idle:
            connection.close()


def _wait(turns: Turns, use: Use, turn: "Future[None]", deadline: float) -> None:
    """Wait for a turn, and check the call's deadline regularly."""
    asked_at = time.monotonic()
    try:
        while not turn.done():
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise turns.no_turn_error(deadline - asked_at)  # noqa: TRY301 - the handler below withdraws the turn
            check_time()
            wait([turn], min(left_s, LOOK_S))
    except BaseException:
        turns.withdraw(use, turn)
        raise
