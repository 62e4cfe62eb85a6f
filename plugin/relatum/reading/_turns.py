"""Whose turn it is to use a connection, where a reader may have so many of them and no more. No I/O, no lock.

A turn is the right to have one connection. It is given in the order in which it was asked for. Nobody who holds one
waits for another, with one exception: who iterates (`Use.LENT`) may ask something else between two messages. So what is
lent never takes the last quarter of the turns: what ends by itself always goes on, and gives its turn back.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from itertools import count
from typing import Annotated, Final

from relatum.checks import checked_count, seconds_text
from relatum.errors import ConnectionsInUse
from relatum.metrics import Counter, Gauge, reported

CONNECTIONS_MAX: Final = 16
"""Connections a reader has at most unless the caller says otherwise: about what keeps one broker node busy."""

CONNECTIONS_MIN: Final = 2
"""The least limit: one connection to lend, and one to ask something else by meanwhile."""

NEVER_LENT: Final = 4
"""One part in so many of the turns, at least one, is never lent."""


def check_limit(connections_max: int) -> None:
    """Raise `InvalidInput` for a limit that is no whole number from 2 on."""
    checked_count("connections_max", connections_max, least=CONNECTIONS_MIN)


class Use(Enum):
    """What a connection is wanted for."""

    ANSWER = "answer"
    """A question that ends by itself."""

    LENT = "lent"
    """An iteration: its caller says when it goes on."""

    FOLLOW = "follow"
    """Following a stream: it lasts until its caller ends it, so it takes no turn. There are as many as are followed."""


@reported("reader")
@dataclass(frozen=True, slots=True)
class ReaderStatistics:
    """The connections of a reader to the broker, of all its nodes.

    Attributes:
        limit: How many may be in use, or kept open, at once: `connections_max`.
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
    """The turns of one reader, and those who wait for one."""

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
            f"set connections_max= (now {self.limit}) higher",
            limit=self.limit,
            waiting=self.waiting,
        )

    def _has_room(self, use: Use) -> bool:
        return self.in_use < self.limit and (use is not Use.LENT or self.lent < self._lent_max)

    def _take(self, use: Use) -> None:
        self.in_use += 1
        self.lent += use is Use.LENT
