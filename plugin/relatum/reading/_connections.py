"""The connections of one reader: used by turns, kept while idle, bounded over all nodes.

What is in use and what is kept open are never more than the limit: to open one where that is reached, the one that was
idle for longest is closed. Who follows a stream has a connection beside that.
"""

import threading
import time
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from typing import Final, Generic, Protocol, TypeVar

from relatum.processes import after_fork, leave_to_parent
from relatum.reading._stream_errors import check_time
from relatum.reading._turns import CONNECTIONS_MAX, Line, ReaderStatistics, Use, Waiter
from relatum.waiting import LOOK_S

CONNECTIONS_KEPT: Final = CONNECTIONS_MAX
"""Idle connections a reader keeps, of all nodes: all that it may have by default. With half of them, 64 look-ups at
once closed one and opened another for each thirty; and to log in takes as long as ten."""


ASIDE: Final = "aside"
"""As a node: a connection that is used once, of another kind, and never kept."""


class _Closable(Protocol):
    def close(self) -> object: ...


_Connection = TypeVar("_Connection", bound=_Closable)


class Connections(Generic[_Connection]):
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
        after_fork(self, Connections._renew)

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

    def leave(self, line: Line, use: Use) -> None:
        """Give a turn back to the line it is of."""
        with self._lock:
            line.leave(use)

    def note_opened(self) -> None:
        """Count one that was opened."""
        with self._lock:
            self._opened += 1

    def put(self, node: Hashable, connection: _Connection, use: Use) -> bool:
        """Keep a usable connection for others; False where it is to be closed."""
        with self._lock:
            # Those who have their turn by now, or wait for it, are about to take one.
            wanted = self._line.in_use - self._out + self._line.waiting
            self._out -= use is not Use.FOLLOW
            is_kept = not self._is_closed and len(self._idle) < max(wanted, CONNECTIONS_KEPT)
            if is_kept and self._out + len(self._idle) < self._line.limit:
                self._idle.append((node, connection))
                return True
            return False

    def drop(self, use: Use) -> None:
        """Give up one that is of no use any more, or could not be opened."""
        with self._lock:
            self._out -= use is not Use.FOLLOW

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

    def enter(self, use: Use, deadline: float) -> Line:
        """Have a turn of a line, to be given back by `leave`.

        `deadline`: When to give up waiting, as of `time.monotonic`.

        Raises:
            ConnectionsInUse: none came in time.
            ReadTimeout: the call has no time left.
        """
        check_time()
        line = self._line
        with self._lock:
            if line.enter_at_once(use):
                return line
            came, asked_at = threading.Event(), time.monotonic()
            waiter = line.enter(use, came.set)
        if waiter is not None:
            self._wait(line, waiter, came, asked_at, deadline)
        return line

    @contextmanager
    def turn(self, use: Use, deadline: float) -> Iterator[None]:
        """Have a turn inside; see `enter`."""
        line = self.enter(use, deadline)
        try:
            yield
        finally:
            self.leave(line, use)

    def _wait(self, line: Line, waiter: Waiter, came: threading.Event, asked_at: float, deadline: float) -> None:
        has_come = False
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

    def take(self, node: Hashable, use: Use) -> _Connection | None:
        """The idle connection to a node that was used last; None where one is to be opened: there is room for it.

        What is taken or opened is given back by `put` or `drop`.
        """
        with self._lock:
            self._out += use is not Use.FOLLOW
            for index in reversed(range(len(self._idle))):
                if self._idle[index][0] == node:
                    return self._idle.pop(index)[1]
            count = max(0, self._out + len(self._idle) - self._line.limit)
            surplus, self._idle = self._idle[:count], self._idle[count:]
        for _, connection in surplus:
            connection.close()
        return None
