"""What a router knows of placements, which of its messages are not checked yet, and a lock for each name in use."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from relatum.contexts._entries import Adoption, Placed
from relatum.contexts._placements import Placement, PlacementState

_Lock = TypeVar("_Lock")


@dataclass(frozen=True, slots=True)
class Sent:
    """A message, or an adoption, that is published to a partition."""

    name: str
    stream: str
    wanted: Placed | Adoption
    """What it is found by."""
    as_of: int
    """The generation that its placement was right as of."""
    is_doubtful: bool = False
    """Whether it may not have arrived: an adoption that is not confirmed."""


class Known(NamedTuple):
    """A placement, and the generation it is known to be right as of."""

    placement: Placement
    as_of: int


class PlacementCache:
    """The placements used last, all of them right as of one generation. Threads may share it."""

    def __init__(self, names_max: int) -> None:
        self._names_max = names_max
        self._lock = threading.Lock()
        self._placements: OrderedDict[str, Placement] = OrderedDict()
        self._generation: int | None = None

    def __len__(self) -> int:
        return len(self._placements)

    @property
    def generation(self) -> int | None:
        """The generation all of them are right as of; None before the first was read."""
        return self._generation

    def get(self, name: str) -> Known | None:
        """The placement of a name; None where it is not known."""
        with self._lock:
            placement = self._placements.get(name)
            if placement is None or self._generation is None:
                return None
            self._placements.move_to_end(name)
            return Known(placement, self._generation)

    def add(self, placement: Placement, as_of: int) -> None:
        """Keep a placement that was read when the cache was of that generation.

        If it has advanced since, the change that makes this placement wrong may be behind it: then it is not kept.
        """
        with self._lock:
            if placement.state is PlacementState.RELEASED or self._generation != as_of:
                return
            self._placements[placement.name] = placement
            self._placements.move_to_end(placement.name)
            if len(self._placements) > self._names_max:
                self._placements.popitem(last=False)

    def advance(self, generation: int, changed: Iterable[Placement] | None) -> None:
        """Go on to a generation, with what changed since the cache's own or an earlier one.

        None for what changed drops everything.
        """
        with self._lock:
            if self._generation is not None and generation <= self._generation:
                return
            self._generation = generation
            if changed is None:
                self._placements.clear()
                return
            for placement in changed:
                if placement.state is PlacementState.RELEASED:
                    self._placements.pop(placement.name, None)
                elif placement.name in self._placements:
                    self._placements[placement.name] = placement

    def forget(self, names: Collection[str]) -> None:
        """Drop placements: the next use reads them anew."""
        with self._lock:
            for name in names:
                self._placements.pop(name, None)

    def still(self, sent: Sent) -> bool:
        """Whether the placement something was sent under is known to be in force."""
        known = self.get(sent.name)
        return (
            known is not None
            and known.placement.state is PlacementState.OPEN
            and known.placement.epoch == sent.wanted.epoch
        )


class Unchecked:
    """What was sent, in its order for each name, and is not known yet to count where it is; at most so many.

    A look forgets what counts by it; what stays then is settled one by one. Threads may share it.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._sent: dict[str, list[tuple[int, Sent]]] = {}
        """By name, in the name's order: when each was confirmed, and what it is."""
        self._count = 0
        self._tick = 0

    def __len__(self) -> int:
        return self._count

    @property
    def is_full(self) -> bool:
        """Whether no more may be added."""
        return self._count >= self._most

    def names(self) -> list[str]:
        """The names with something unchecked."""
        with self._lock:
            return list(self._sent)

    def mark(self) -> int:
        """A moment: what is added before it was confirmed before it."""
        return self._tick

    def add(self, sent: Sent) -> None:
        """Remember what the broker has just confirmed."""
        with self._lock:
            self._tick += 1
            self._count += 1
            self._sent.setdefault(sent.name, []).append((self._tick, sent))

    def replace(self, sent: Sent, by: Sent) -> None:
        """Remember another instead, in the same place of the order, as confirmed just now."""
        with self._lock:
            self._tick += 1
            of_name = self._sent.get(sent.name, [])
            of_name[:] = [(self._tick, by) if each is sent else (tick, each) for tick, each in of_name]

    def remove(self, sent: Sent) -> None:
        """Forget one, which counts now."""
        with self._lock:
            self._forget(sent.name, lambda _tick, each: each is sent)

    def of(self, name: str, mark: int | None = None) -> list[Sent]:
        """What is unchecked of a name, in the order it was sent; with a mark, only what was confirmed before that."""
        with self._lock:
            return [sent for tick, sent in self._sent.get(name, ()) if mark is None or tick <= mark]

    def checked(self, mark: int, cache: PlacementCache) -> None:
        """Forget what counts: confirmed before the mark, while what the cache read later still has its placement."""
        generation = cache.generation

        def counts(tick: int, sent: Sent) -> bool:
            return tick <= mark and not sent.is_doubtful and (sent.as_of == generation or cache.still(sent))

        with self._lock:
            for name in list(self._sent):
                self._forget(name, counts)

    def _forget(self, name: str, which: Callable[[int, Sent], bool]) -> None:
        before = self._sent.get(name, [])
        after = [each for each in before if not which(*each)]
        self._count -= len(before) - len(after)
        if after:
            self._sent[name] = after
        else:
            self._sent.pop(name, None)


class NameLocks(Generic[_Lock]):
    """Locks of names, of threads or of tasks, made as they are needed: `with locks(name) as lock, lock:`."""

    def __init__(self, make: Callable[[], _Lock]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._used: dict[str, tuple[_Lock, int]] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[_Lock]:
        """The name's lock; it is forgotten when the last block that uses it ends."""
        with self._lock:
            lock, users = self._used.get(name) or (self._make(), 0)
            self._used[name] = (lock, users + 1)
        try:
            yield lock
        finally:
            with self._lock:
                users = self._used[name][1] - 1
                if users:
                    self._used[name] = (lock, users)
                else:
                    del self._used[name]
