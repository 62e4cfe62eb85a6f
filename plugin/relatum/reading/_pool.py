"""The connections of one reader: used in turns, kept while idle, limited in number over all nodes.

A turn is the right to have one connection; turns are given in the order of the calls. A call that holds one never waits
for another, with one exception: the caller of an iteration (`Use.LENT`) may make another request between two messages.
So iterations never get the last quarter of the turns: requests end by themselves, and always make progress.

Connections in use and idle together never exceed the limit: before another is opened, the one that was idle longest is
closed. A followed stream has a connection of its own, outside the limit.
"""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, Final

from relatum.checks import checked_count, seconds_text
from relatum.errors import ConnectionsInUse, UsedAfterClose
from relatum.metrics import Counter, Gauge, reported
from relatum.processes import after_fork, leave_to_parent
from relatum.reading._bounds import check_time
from relatum.reading._connection import SocketConnection
from relatum.waiting import LOOK_S
from relatum.wire.frames import NodeAddress

CONNECTIONS_MAX: Final = 16
"""The default limit of a reader's connections: about what keeps one broker node busy."""

CONNECTIONS_KEPT: Final = CONNECTIONS_MAX
"""Idle connections that a reader keeps, of all nodes. With half of them, 64 concurrent lookups closed one and opened
another for each thirty; and a login takes as long as ten lookups."""

CONNECTIONS_MIN: Final = 2
"""The least limit: one connection for an iteration, and one for its caller's requests."""

IDLE_S: Final = 60.0
"""Seconds after which an idle connection is closed, not used again: networks forget connections without traffic. It is
also the heartbeat interval of these connections, so that the broker closes those of a client that is gone."""

NEVER_LENT: Final = 4
"""The divisor of the share of turns that iterations never get; at least one turn."""


def check_limit(broker_connections_max: int) -> None:
    """Raise `InvalidInput` for a limit that is not an integer of at least 2."""
    checked_count("broker_connections_max", broker_connections_max, least=CONNECTIONS_MIN)


class Use(Enum):
    """The purpose of a connection."""

    ANSWER = "answer"
    """A request, which ends by itself."""

    LENT = "lent"
    """An iteration: its caller decides when it continues."""

    FOLLOW = "follow"
    """A followed stream: it lasts until its caller ends it, and takes no turn."""


@reported()
@dataclass(frozen=True, slots=True)
class ReaderStatistics:
    """The connections of a reader to all nodes of the broker.

    Attributes:
        limit: The most connections in use and idle at once: `broker_connections_max`.
        in_use: Connections used by calls that end by themselves, and by iterations.
        idle: Connections kept open and unused now.
        waiting: Calls that wait for a connection.
        following: Streams followed now (`follow=True`): a connection each, beside the limit.
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
    """The turns of one reader, and the calls that wait for one, from threads or tasks. Thread-safe."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        # Reentrant: the garbage collector may end dropped iterations in any thread, including this one.
        self.lock = threading.RLock()
        self.in_use = self.lent = self.following = 0
        self._lent_max = limit - max(1, limit // NEVER_LENT)
        self._waiting: list[tuple[Use, Future[None]]] = []

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def enter(self, use: Use) -> "Future[None] | None":
        """Take a turn; if none is free, return a future that is done when the turn has come."""
        with self.lock:
            if use is Use.FOLLOW:
                self.following += 1
            elif self._has_room(use):
                self._take(use)
            else:
                turn: Future[None] = Future()
                self._waiting.append((use, turn))
                return turn
        return None

    def leave(self, use: Use) -> None:
        """Return a turn; it goes to the call that has waited longest of all that can use it."""
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
        """Stop waiting; a turn that has just come is given back."""
        with self.lock:
            if turn.done() and not turn.cancelled():
                self.leave(use)
            else:
                turn.cancel()
                self._waiting = [each for each in self._waiting if each[1] is not turn]

    def none_free(self, waited_s: float) -> ConnectionsInUse:
        """Return the error for a turn that did not come in time."""
        return ConnectionsInUse(
            f"all {self.limit} connections that this reader may have to the broker are in use, and none became free "
            f"within {seconds_text(max(0.0, waited_s))}: make fewer calls at once, close iterations you leave early, "
            f"or set broker_connections_max= (now {self.limit}) higher",
            limit=self.limit,
            waiting=self.waiting,
        )

    def _has_room(self, use: Use) -> bool:
        return self.in_use < self.limit and (use is not Use.LENT or self.lent < self._lent_max)

    def _take(self, use: Use) -> None:
        self.in_use += 1
        self.lent += use is Use.LENT


class Pool:
    """The turns, and the idle connections by node, least recently used first. Thread-safe.

    In a forked child all turns are free and there is no connection: the connections are the parent's.
    """

    def __init__(self, limit: int = CONNECTIONS_MAX) -> None:
        self._turns = Turns(limit)
        self._idle: list[tuple[NodeAddress | None, SocketConnection]] = []
        self._opened = self._out = 0
        self.is_closed = False
        after_fork(self, Pool._renew)

    def _renew(self) -> None:
        # A turn taken in the parent goes back to the parent's turns.
        self._turns = Turns(self._turns.limit)
        leave_to_parent(*self._idle)
        self._idle, self._out = [], 0

    @property
    def has_plenty(self) -> bool:
        """Whether a call may have a further connection: less than half are in use, and no call waits."""
        return 2 * self._turns.in_use < self._turns.limit and not self._turns.waiting

    def statistics(self) -> ReaderStatistics:
        turns = self._turns
        return ReaderStatistics(
            turns.limit, turns.in_use, len(self._idle), turns.waiting, turns.following, opened=self._opened
        )

    @contextmanager
    def lend(
        self, node: NodeAddress | None, use: Use, deadline: float, connect: Callable[[], SocketConnection | None]
    ) -> Iterator[Any]:
        """Hold a connection to a node while the block runs: the idle one that was used last, or what `connect` returns.

        Waits for a turn until `deadline`. Afterwards a usable connection is kept for others, or closed.
        """
        if self.is_closed:
            raise UsedAfterClose("the reader was closed: open another one")
        check_time()
        turns, connection, is_followed = self._turns, None, use is Use.FOLLOW
        turn = turns.enter(use)
        if turn is not None:
            _wait(turns, use, turn, deadline)
        with turns.lock:
            self._out += not is_followed
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
                self._out -= not is_followed
                if connection is not None and not is_followed and self._keeps(connection):
                    self._idle.append((node, connection))
                    connection = None
            if connection is not None:
                connection.close()
            turns.leave(use)

    def _make_room(self) -> None:
        """Close old idle connections, and those that would exceed the limit with the one about to be opened."""
        with self._turns.lock:
            count = max(0, self._out + len(self._idle) - self._turns.limit)
            while count < len(self._idle) and self._idle[count][1].is_idle_for(IDLE_S):
                count += 1
            surplus, self._idle = self._idle[:count], self._idle[count:]
        for _, connection in surplus:
            connection.close()

    def _keeps(self, connection: SocketConnection) -> bool:
        turns, idle = self._turns, len(self._idle)
        if not connection.is_usable or connection.session.is_used_up:
            return False
        if self.is_closed or self._out + idle >= turns.limit:
            return False
        connection.is_reused = True
        # Calls that have their turn by now, or wait for it, are about to take one.
        return idle < CONNECTIONS_KEPT or idle < turns.in_use - self._out + turns.waiting

    def close(self) -> None:
        """Close all idle connections; connections in use are closed when they are given back."""
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
                raise turns.none_free(deadline - asked_at)  # noqa: TRY301 - as any error, it ends the waiting
            check_time()
            wait([turn], min(left_s, LOOK_S))
    except BaseException:
        turns.withdraw(use, turn)
        raise
