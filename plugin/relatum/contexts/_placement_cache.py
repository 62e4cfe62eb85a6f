"""A router's cache of placements, its unchecked messages, and a lock for each name in use."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

from relatum.contexts._partition_log import Adoption, Placed
from relatum.contexts._placements import Placement, PlacementState


@dataclass(frozen=True, slots=True)
class Sent:
    """A message or adoption that was published to a partition."""

    name: str
    stream: str
    wanted: Placed | Adoption
    """The header that identifies the message."""
    is_doubtful: bool = False
    """Whether the message may not have arrived, such as an adoption without a confirm."""


class PlacementCache:
    """The most recently used placements, all in force at the cache's generation. Thread-safe."""

    def __init__(self, names_max: int) -> None:
        self._names_max = names_max
        self._lock = threading.Lock()
        self._placements: OrderedDict[str, Placement] = OrderedDict()
        self.generation: int | None = None

    def __len__(self) -> int:
        return len(self._placements)

    def get(self, name: str) -> Placement | None:
        with self._lock:
            placement = self._placements.get(name)
            if placement is not None:
                self._placements.move_to_end(name)
            return placement

    def add(self, placement: Placement, as_of: int) -> None:
        """Add a placement that was read while the cache had the generation `as_of`.

        If the cache has advanced since, nothing is added: a change that it skipped may have ended the placement.
        """
        with self._lock:
            if placement.state is PlacementState.RELEASED or self.generation != as_of:
                return
            self._placements[placement.name] = placement
            self._placements.move_to_end(placement.name)
            if len(self._placements) > self._names_max:
                self._placements.popitem(last=False)

    def advance(self, generation: int, changed: Iterable[Placement] | None) -> None:
        """Advance to a generation by the changes since the cache's, or an earlier one. `None` empties the cache."""
        with self._lock:
            if self.generation is not None and generation <= self.generation:
                return
            self.generation = generation
            if changed is None:
                self._placements.clear()
                return
            for placement in changed:
                if placement.state is PlacementState.RELEASED:
                    self._placements.pop(placement.name, None)
                elif placement.name in self._placements:
                    self._placements[placement.name] = placement

    def clear(self) -> None:
        with self._lock:
            self.generation = None
            self._placements.clear()

    def forget(self, names: Collection[str]) -> None:
        with self._lock:
            for name in names:
                self._placements.pop(name, None)

    def still(self, sent: Sent) -> bool:
        """Return whether the placement that a message was published under is known to be in force."""
        placement = self.get(sent.name)
        return placement is not None and placement.state is PlacementState.OPEN and placement.epoch == sent.wanted.epoch


class Unchecked:
    """Published messages that are not yet known to be valid, in order for each name. Thread-safe."""

    def __init__(self, messages_max: int) -> None:
        self._messages_max = messages_max
        self._lock = threading.Lock()
        self._sent: dict[str, list[tuple[int, Sent]]] = {}
        """For each name, in order: the number of the message's confirm, and the message."""
        self._count = 0
        self._tick = 0

    def __len__(self) -> int:
        return self._count

    @property
    def is_full(self) -> bool:
        return self._count >= self._messages_max

    def names(self) -> list[str]:
        with self._lock:
            return list(self._sent)

    def mark(self) -> int:
        """Return a mark. Messages added before the call were confirmed before it."""
        return self._tick

    def add(self, sent: Sent) -> None:
        with self._lock:
            self._tick += 1
            self._count += 1
            self._sent.setdefault(sent.name, []).append((self._tick, sent))

    def replace(self, sent: Sent, by: Sent) -> None:
        """Replace a message with one that was confirmed just now. The order does not change."""
        with self._lock:
            self._tick += 1
            of_name = self._sent.get(sent.name, [])
            of_name[:] = [(self._tick, by) if each is sent else (tick, each) for tick, each in of_name]

    def remove(self, sent: Sent) -> None:
        with self._lock:
            self._forget(sent.name, lambda _tick, each: each is sent)

    def of(self, name: str, mark: int | None = None) -> list[Sent]:
        """Return the unchecked messages of a name, in order. With a mark: only messages confirmed before it."""
        with self._lock:
            return [sent for tick, sent in self._sent.get(name, ()) if mark is None or tick <= mark]

    def checked(self, mark: int, cache: PlacementCache) -> None:
        """Remove the messages confirmed before the mark that the cache, refreshed after it, proves valid."""
        with self._lock:
            for name in list(self._sent):
                self._forget(name, lambda tick, sent: tick <= mark and not sent.is_doubtful and cache.still(sent))

    def _forget(self, name: str, which: Callable[[int, Sent], bool]) -> None:
        before = self._sent.get(name, [])
        after = [each for each in before if not which(*each)]
        self._count -= len(before) - len(after)
        if after:
            self._sent[name] = after
        else:
            self._sent.pop(name, None)


class NameLocks:
    """A lock for each name in use, for threads or tasks: `with locks(name):`. A lock without users is freed."""

    def __init__(self, make: Callable[[], Any]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._used: WeakValueDictionary[str, Any] = WeakValueDictionary()

    def __call__(self, name: str) -> Any:
        """Return the name's lock. Hold the reference while you use the lock or wait for it."""
        with self._lock:
            return self._used.setdefault(name, self._make())
