"""What all waits of one object ask the index together: one statement for all of them, at a pace that adapts. No I/O.

The statement says which waits to look at more closely, and nothing else: each then probes by itself, as a look-up does.
So it may say too much, and a wait that it overlooked is told the truth by its own last probe. See docs/adr/0026.
"""

import time
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, Final, Generic, TypeVar

import sqlalchemy as sa

from relatum.errors import Transient
from relatum.store import arrays, compiled, may_hold_values, relationships, streams
from relatum.waiting import has_passed
from relatum_consumer.lookups._limits import POLL_S_MAX, POLL_S_MIN
from relatum_consumer.lookups._requests import Select, Watch

SHARE: Final = 2
"""How many times as long as the statement took nothing is asked at least: many waits in many streams cost what they
cost, and the database is there for others, too."""

_Waiter = TypeVar("_Waiter")

_ONE: Final[Any] = sa.literal_column("1")


@lru_cache
def watched() -> str:
    """The numbers of those waits for which the index has a row: one probe for each value and stream, the first counts.

    Sets of streams are given once each, by their names; a name of NULL stands for all that are recorded.
    """
    given = arrays("given", set_number=sa.Integer, set_name=sa.Text)
    # By an index each; one condition for all three would compare every name with every other.
    ways = (given.c.set_name == streams.c.name, given.c.set_name == streams.c.super_stream, given.c.set_name.is_(None))
    meant = (
        sa.union(
            *(
                sa.select(given.c.set_number, streams.c.stream_id, streams.c.name).where(
                    way, streams.c.vhost == sa.bindparam("vhost", type_=sa.Text), streams.c.replaced_at.is_(None)
                )
                for way in ways
            )
        )
        .cte("meant")
        .prefix_with("MATERIALIZED")
    )
    wait = arrays(
        "wait",
        number=sa.Integer,
        among=sa.Integer,
        key_id=sa.SmallInteger,
        value=sa.Text,
        own_stream=sa.Text,
        own_offset=sa.BigInteger,
    )
    rows, value = relationships.c, wait.c.value.collate("C")
    # A limit inside keeps PostgreSQL from joining it in another way than row by row, by the index.
    row = (
        sa.select(_ONE)
        .where(
            rows.key_id == wait.c.key_id,
            rows.value == value,
            rows.stream_id == meant.c.stream_id,
            sa.or_(meant.c.name != wait.c.own_stream, rows.stream_offset != wait.c.own_offset),
            may_hold_values(wait.c.key_id, value, value),
        )
        .correlate(wait, meant)
        .limit(_ONE)
        .lateral("row")
    )
    among = (
        sa.select(_ONE)
        .select_from(meant.join(row, sa.true()))
        .where(meant.c.set_number == wait.c.among)
        .correlate(wait)
        .limit(_ONE)
        .lateral("among")
    )
    return compiled(sa.select(wait.c.number).select_from(wait.join(among, sa.true())))


def parameters_of(vhost: str, watches: Sequence[Watch]) -> dict[str, Any]:
    """The parameters of `watched` for waits, which have their places in the sequence as numbers."""
    sets: dict[tuple[str, ...] | None, int] = {}
    rows: list[tuple[int, int, int, str, str, int]] = []
    for number, watch in enumerate(watches):
        among = sets.setdefault(watch.names, len(sets))
        own = watch.beside or ("", -1)
        rows += [(number, among, key_id, value, *own) for key_id, value in watch.values]
    meant = [(number, name) for names, number in sets.items() for name in (names or (None,))]
    columns = ("numbers", "amongs", "key_ids", "values", "own_streams", "own_offsets")
    return {
        "vhost": vhost,
        "set_numbers": [number for number, _ in meant],
        "set_names": [name for _, name in meant],
        **{name: list(column) for name, column in zip(columns, zip(*rows, strict=True), strict=True)},
    }


def is_of_all(error: Exception) -> bool:
    """Whether what one met who asked for others is theirs, too. That his own time is over says nothing of them."""
    return not (isinstance(error, Transient) and has_passed())


class Pace:
    """When the index is asked next: soon after a wait began or one was over, then at growing intervals."""

    def __init__(self) -> None:
        self._pause_s = POLL_S_MIN
        self._asked_at = 0.0
        self._least_s = 0.0

    def stir(self, *, is_first: bool) -> None:
        """Begin with short pauses again, for one who begins to wait, and has just asked for himself."""
        self._pause_s = POLL_S_MIN
        if is_first:
            self._asked_at, self._least_s = time.monotonic(), 0.0

    @property
    def next_at(self) -> float:
        """The moment, as of `time.monotonic`."""
        return self._asked_at + max(self._pause_s, self._least_s)

    def note(self, began: float, *, has_found: bool) -> None:
        """Take in that it was asked, from a moment until now."""
        self._asked_at = time.monotonic()
        self._least_s = SHARE * (self._asked_at - began)
        self._pause_s = POLL_S_MIN if has_found else min(2 * self._pause_s, POLL_S_MAX)


class Waits(Generic[_Waiter]):
    """The waits of one object, in the order in which they began. It is used by one thread at a time."""

    def __init__(self, vhost: str) -> None:
        self._vhost = vhost
        self._watches: dict[_Waiter, Watch] = {}
        self._leader: _Waiter | None = None
        self.pace = Pace()

    def __len__(self) -> int:
        return len(self._watches)

    def __iter__(self) -> Iterator[_Waiter]:
        return iter(list(self._watches))

    def enter(self, waiter: _Waiter, watch: Watch) -> _Waiter | None:
        """Wait from now on. Who asks for all, and is to be told that somebody has come; None for nobody."""
        self.pace.stir(is_first=not self._watches)
        self._watches[waiter] = watch
        return self._leader

    def leads(self, waiter: _Waiter) -> bool:
        """Whether this one asks for all: nobody else does, or it does so already."""
        if self._leader is None:
            self._leader = waiter
        return self._leader is waiter

    def leave(self, waiter: _Waiter) -> _Waiter | None:
        """Wait no more. Who is to be told, because it asks for all from now on; None for nobody."""
        self._watches.pop(waiter, None)
        if self._leader is not waiter:
            return None
        self._leader = next(iter(self._watches), None)
        return self._leader

    def question(self) -> tuple[list[_Waiter], Select]:
        """What to ask for all who wait now, and who they are: the answer names them by their places."""
        return list(self._watches), Select(watched(), parameters_of(self._vhost, list(self._watches.values())))
