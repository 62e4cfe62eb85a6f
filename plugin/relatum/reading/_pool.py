"""The connections of one reader: used by turns, kept while idle, bounded over all nodes.

A turn is the right to have one connection. It is given in the order in which it was asked for. Nobody who holds one
waits for another, with one exception: who iterates (`Use.LENT`) may ask something else between two messages. So what is
lent never takes the last quarter of the turns: what ends by itself always goes on, and gives its turn back.

What is in use and what is kept open are never more than the limit: to open one where that is reached, the one that was
idle for longest is closed. Who follows a stream has a connection beside that.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from enum import Enum
from itertools import count
from typing import Annotated, Final, Generic, Protocol, TypeVar

from relatum.checks import checked_count, seconds_text
from relatum.errors import ConnectionsInUse
from relatum.metrics import Counter, Gauge, reported
from relatum.processes import after_fork, leave_to_parent
from relatum.reading._stream_errors import check_time
from relatum.waiting import LOOK_S

CONNECTIONS_MAX: Final = 16
"""Connections a reader has at most unless the caller says otherwise: about what keeps one broker node busy."""

CONNECTIONS_KEPT: Final = CONNECTIONS_MAX
"""Idle connections a reader keeps, of all nodes: all that it may have by default. With half of them, 64 look-ups at
once closed one and opened another for each thirty; and to log in takes as long as ten."""

CONNECTIONS_MIN: Final = 2
"""The least limit: one connection to lend, and one to ask something else by meanwhile."""

NEVER_LENT: Final = 4
"""One part in so many of the turns, at least one, is never lent."""


def check_limit(broker_connections_max: int) -> None:
    """Raise `InvalidInput` for a limit that is no whole number from 2 on."""
    checked_count("broker_connections_max", broker_connections_max, least=CONNECTIONS_MIN)


class Use(Enum):
    """What a connection is wanted for."""

    ANSWER = "answer"
    """A question that ends by itself."""

    LENT = "lent"
    """An iteration: its caller says when it goes on."""

    FOLLOW = "follow"
    """Following a stream: it lasts until its caller ends it, so it takes no turn. There are as many as are followed."""


@reported()
@dataclass(frozen=True, slots=True)
class ReaderStatistics:
    """The connections of a reader to the broker, of all its nodes.

    Attributes:
        limit: How many may be in use, or kept open, at once: `broker_connections_max`.
        in_use: How many are in use by calls that end by themselves, and by iterations.
        idle: How many are kept open and not used now.
        waiting: Calls that wait for one.
        following: Streams followed now (`follow=True`): a connection each, beside the limit.
        opened: How many were opened so far.
    """

    limit: Annotated[int, Gauge("relatum_reader_connections_limit", "Connections that may be in use or kept at once")]
    in_use: Annotated[int, Gauge("relatum_reader_connections_in_use", "Connections to the broker in use")]
    idle: Annotated[int, Gauge("relatum_reader_connections_idle", "Connections to the broker kept and not used")]
    waiting: Annotated[int, Gauge("relatum_reader_waiting_calls", "Calls that wait for a connection")]
    following: Annotated[int, Gauge("relatum_reader_followed_streams", "Streams followed, a connection each")]
    opened: Annotated[int, Counter("relatum_reader_connections_opened_total", "Connections opened to the broker")]

    @classmethod
    def of_none(cls, limit: int) -> "ReaderStatistics":
        """Those of a reader that has not been opened."""
        return cls(limit, in_use=0, idle=0, waiting=0, following=0, opened=0)


class Waiter:
    """One who waits for a turn.

    Attributes:
        use: What for.
        number: His place in the line.
        wake: Called once he has it.
        has_turn: Whether he has it.
    """

    __slots__ = ("has_turn", "number", "use", "wake")

    def __init__(self, use: Use, number: int, wake: Callable[[], None]) -> None:
        self.use = use
        self.number = number
        self.wake = wake
        self.has_turn = False


class Line:
    """The turns of one reader, and those who wait for one. No lock: who shares it has one."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.in_use = self.lent = self.following = 0
        self._lent_max = limit - max(1, limit // NEVER_LENT)
        self._waiting: dict[Use, deque[Waiter]] = {Use.ANSWER: deque(), Use.LENT: deque()}
        self._numbers = count()

    @property
    def waiting(self) -> int:
        """How many wait."""
        return sum(map(len, self._waiting.values()))

    def enter_at_once(self, use: Use) -> bool:
        """Have a turn, where whoever could use it and waits has one already; False where it is to be waited for."""
        if use is Use.FOLLOW:
            self.following += 1
            return True
        if not self._has_room(use):
            return False
        self._take(use)
        return True

    def enter(self, use: Use, wake: Callable[[], None]) -> Waiter | None:
        """Ask for a turn.

        Returns:
            None: it is had at once. Else the place in the line.
        """
        if self.enter_at_once(use):
            return None
        waiter = Waiter(use, next(self._numbers), wake)
        self._waiting[use].append(waiter)
        return waiter

    def leave(self, use: Use) -> None:
        """Give a turn back; whoever has waited longest for one of its kind has it."""
        if use is Use.FOLLOW:
            self.following -= 1
            return
        self.in_use -= 1
        self.lent -= use is Use.LENT
        while heads := [waiters[0] for kind, waiters in self._waiting.items() if waiters and self._has_room(kind)]:
            waiter = min(heads, key=lambda head: head.number)
            self._waiting[waiter.use].popleft()
            self._take(waiter.use)
            waiter.has_turn = True
            waiter.wake()

    def withdraw(self, waiter: Waiter) -> None:
        """Wait no more; a turn that came at the last moment is given back."""
        if waiter.has_turn:
            self.leave(waiter.use)
        else:
            self._waiting[waiter.use].remove(waiter)

    def none_free(self, waited_s: float) -> ConnectionsInUse:
        """The error for a turn that did not come in time."""
        return ConnectionsInUse(
            f"all {self.limit} connections that this reader may have to the broker are in use, and none became free "
            f"within {seconds_text(max(0.0, waited_s))}: ask less at once, close iterations that are left early, or "
            f"set broker_connections_max= (now {self.limit}) higher",
            limit=self.limit,
            waiting=self.waiting,
        )

    def _has_room(self, use: Use) -> bool:
        return self.in_use < self.limit and (use is not Use.LENT or self.lent < self._lent_max)

    def _take(self, use: Use) -> None:
        self.in_use += 1
        self.lent += use is Use.LENT


class _Closable(Protocol):
    def close(self) -> object: ...


_Connection = TypeVar("_Connection", bound=_Closable)


class Pool(Generic[_Connection]):
    """The line, and the idle connections by node, least recently used first. Threads share it.

    In a child, all turns are free again and no connection is there: they are the parent's.
    """

    def __init__(self, limit: int = CONNECTIONS_MAX) -> None:
        self._line = Line(limit)
        self._idle: list[tuple[Hashable, _Connection]] = []
        self._opened = self._out = 0
        self._is_closed = False
        # One thread may come twice: the garbage collector ends readings that were dropped, wherever it runs.
        self._lock = threading.RLock()
        after_fork(self, Pool._renew)

    def _renew(self) -> None:
        # Who holds a turn in the parent gives it back to the parent's line.
        self._lock, self._line = threading.RLock(), Line(self._line.limit)
        leave_to_parent(*self.idle)
        self._idle, self._out = [], 0

    @property
    def idle(self) -> list[_Connection]:
        """Those that are idle."""
        return [connection for _, connection in self._idle]

    def has_plenty(self, use: Use) -> bool:
        """Whether less than half of them are in use, and nobody waits: who has one may have another beside it.

        Less than a quarter, where it is lent: an iteration may stand still for ever, and others are to have theirs.
        """
        share = 4 if use is Use.LENT else 2
        return share * self._line.in_use < self._line.limit and not self._line.waiting

    def statistics(self) -> ReaderStatistics:
        """How it stands now."""
        line = self._line
        return ReaderStatistics(
            line.limit, line.in_use, len(self._idle), line.waiting, line.following, opened=self._opened
        )

    def take(self, node: Hashable, use: Use, deadline: float) -> tuple[Line, _Connection | None]:
        """Wait for a turn, and have the idle connection to a node that was used last.

        Args:
            node: The node.
            use: What for.
            deadline: When to give up waiting, as `time.monotonic` counts.

        Returns:
            The line that the turn is of, for `give_back`. None: a connection is to be opened, there is room for it.

        Raises:
            ConnectionsInUse: No turn came in time.
            ReadTimeout: The call has no time left.
        """
        check_time()
        line = self._line
        with self._lock:
            if line.enter_at_once(use):
                return line, self._idle_to(node, use)
            came = threading.Event()
            waiter = line.enter(use, came.set)
        if waiter is not None:
            self._wait(line, waiter, came, deadline)
        with self._lock:
            return line, self._idle_to(node, use)

    def _wait(self, line: Line, waiter: Waiter, came: threading.Event, deadline: float) -> None:
        has_come, asked_at = False, time.monotonic()
        try:
            while not has_come:
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    raise line.none_free(deadline - asked_at)
                check_time()
                has_come = came.wait(min(left_s, LOOK_S))
        finally:
            if not has_come:
                with self._lock:
                    line.withdraw(waiter)

    def _idle_to(self, node: Hashable, use: Use) -> _Connection | None:
        self._out += use is not Use.FOLLOW
        for index in reversed(range(len(self._idle))):
            if self._idle[index][0] == node:
                return self._idle.pop(index)[1]
        return None

    def make_room(self) -> None:
        """Close what is too much with the one that is about to be opened."""
        with self._lock:
            count = max(0, self._out + len(self._idle) - self._line.limit)
            surplus, self._idle = self._idle[:count], self._idle[count:]
        for _, connection in surplus:
            connection.close()

    def note_opened(self) -> None:
        """Count one that was opened."""
        with self._lock:
            self._opened += 1

    def give_back(
        self, line: Line | None, use: Use, node: Hashable = None, connection: _Connection | None = None
    ) -> None:
        """Give a turn back, and keep a connection that is usable for others, or close it.

        Args:
            line: The line that the turn is of; None where none was taken.
            use: What it was for.
            node: The node.
            connection: The connection; None for none that others could use.
        """
        with self._lock:
            self._out -= use is not Use.FOLLOW
            if connection is not None and self._keeps_one_more():
                self._idle.append((node, connection))
                connection = None
            if connection is None and line is not None:
                line.leave(use)
        if connection is not None:
            connection.close()
            if line is not None:
                with self._lock:
                    line.leave(use)

    def _keeps_one_more(self) -> bool:
        line, idle = self._line, len(self._idle)
        if self._is_closed or self._out + idle >= line.limit:
            return False
        # Those who have their turn by now, or wait for it, are about to take one.
        return idle < CONNECTIONS_KEPT or idle < line.in_use - self._out + line.waiting

    def take_oldest(self) -> tuple[Hashable, _Connection] | None:
        """The one that has been idle for longest, with its node, without a turn; None where there is none."""
        with self._lock:
            self._out += bool(self._idle)
            return self._idle.pop(0) if self._idle else None

    def end(self) -> list[_Connection]:
        """Keep none from now on; those that were idle."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self.idle, []
            return idle
