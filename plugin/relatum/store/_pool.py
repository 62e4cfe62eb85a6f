"""Connections that are kept at hand for statements by themselves: a pool's own ways take as long as the statement.

What is kept counts as taken from the pool, so there are no more connections than it allows; half of them at most are
kept, and one is given back before a transaction begins, so that nobody waits for one that does nothing. Of a shared
pool none is kept.
"""

import threading
from typing import Any, Final

import psycopg
import sqlalchemy as sa
from psycopg.rows import namedtuple_row

from relatum.processes import after_fork, leave_to_parent

_USED: Final = "relatum.used"
"""Marks a connection that something was asked of before: it may be of a server that was restarted since."""


class Lent:
    """A connection of the pool as it is used for statements by themselves."""

    __slots__ = ("_before", "driver", "is_new", "pooled")

    def __init__(self, engine: sa.Engine) -> None:
        pooled: Any = engine.raw_connection()
        driver = pooled.driver_connection
        info = pooled.info
        self.pooled, self.driver = pooled, driver
        self.is_new, info[_USED] = _USED not in info, True
        self._before = driver.is_alone, driver.row_factory
        # For itself, each statement is a transaction.
        driver.is_alone, driver.row_factory = True, namedtuple_row

    def give_back(self) -> None:
        """Let the pool have it as it was."""
        self.driver.is_alone, self.driver.row_factory = self._before
        self.pooled.close()


class Kept:
    """The connections of one component for statements by themselves. Thread-safe.

    `most`: How many are kept; 0 for those of another `Database`.
    """

    def __init__(self, engine: sa.Engine, most: int) -> None:
        self._engine = engine
        self.most = most
        self._lock = threading.Lock()
        self._idle: list[Lent] = []
        self._waiting = 0
        after_fork(self, Kept._renew)

    def _renew(self) -> None:
        """In a child: these are the parent's. The engine sees to its pool itself."""
        self._lock = threading.Lock()
        leave_to_parent(*self._idle)
        self._idle, self._waiting = [], 0

    def take_idle(self) -> Lent | None:
        """One that is idle, without a wait; None where there is none."""
        with self._lock:
            return self._idle.pop() if self._idle else None

    def take(self) -> Lent:
        """One that is idle, or one of the pool, which may have to be waited for."""
        with self._lock:
            if self._idle:
                return self._idle.pop()
            self._waiting += 1
        try:
            return Lent(self._engine)
        finally:
            with self._lock:
                self._waiting -= 1

    def give_back(self, lent: Lent) -> None:
        """Keep it for the next, unless somebody waits for one."""
        with self._lock:
            if len(self._idle) < self.most and not self._waiting:
                lent.is_new = False
                self._idle.append(lent)
                return
        lent.give_back()

    def spare(self) -> None:
        """Let the pool have one that is idle, for who is about to ask it for one."""
        lent = self.take_idle()
        if lent is not None:
            lent.give_back()

    def forget(self, lent: Lent, error: psycopg.Error) -> None:
        """Give all up that are as old as this one: of a server that is no more, or takes no writes."""
        pool: Any = self._engine.pool
        # As SQLAchemy does for what it runs itself: those that are older are replaced as they are taken.
        pool._invalidate(lent.pooled, error)
        self.drop()

    def drop(self) -> None:
        """Give all back that are idle."""
        with self._lock:
            idle, self._idle = self._idle, []
        for lent in idle:
            lent.give_back()
