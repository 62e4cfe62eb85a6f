"""What a router knows of placements, and which of its messages are not checked yet. Pure; threads may share both."""

import threading
from collections import OrderedDict, deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Final, NamedTuple

from relatum.contexts.placement._entries import Adoption, Placed
from relatum.contexts.placement._model import Placement, PlacementState


@dataclass(frozen=True, slots=True)
class Sent:
    """A message, or an adoption, that is published.

    Attributes:
        name: The context or affinity set.
        stream: The partition it is published to.
        wanted: What it is found by.
        as_of: The generation its placement was right as of.
        is_doubtful: Whether it may not have arrived: an adoption that is not confirmed.
    """

    name: str
    stream: str
    wanted: Placed | Adoption
    as_of: int
    is_doubtful: bool = False


class Known(NamedTuple):
    """A placement, and the generation it is known to be right as of."""

    placement: Placement
    as_of: int


_ADVANCES: Final = 8
"""Changes of the generation that are remembered, for placements that were under way meanwhile."""

_ADVANCE_NAMES_MAX: Final = 1_000
"""Names that are remembered of each."""


class PlacementCache:
    """The placements used last, all of them right as of one generation."""

    def __init__(self, names_max: int) -> None:
        self._names_max = names_max
        self._lock = threading.Lock()
        self._placements: OrderedDict[str, Placement] = OrderedDict()
        self._generation: int | None = None
        self._advances: deque[tuple[int | None, frozenset[str] | None]] = deque(maxlen=_ADVANCES)
        """The generations gone on from, and the names that changed then; None where those are too many."""

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

    def begin(self, generation: int) -> None:
        """Take the first generation that was read; without effect once there is one."""
        with self._lock:
            if self._generation is None:
                self._generation = generation

    def add(self, placement: Placement, as_of: int) -> None:
        """Keep a placement that was read when the cache was of that generation.

        Had it gone on meanwhile, the change that makes this placement wrong might be behind it: then it is not kept,
        unless the changes are known, and none is of its name.
        """
        with self._lock:
            if placement.state is PlacementState.RELEASED or not self._is_unchanged(placement.name, as_of):
                return
            self._placements[placement.name] = placement
            self._placements.move_to_end(placement.name)
            if len(self._placements) > self._names_max:
                self._placements.popitem(last=False)

    def advance(self, generation: int, changed: Iterable[Placement] | None) -> None:
        """Go on to a generation.

        Args:
            generation: The generation that was read together with the changes.
            changed: The placements that changed since the cache's own generation, or an earlier one; None where that
                cannot be told any more: then all are dropped.
        """
        with self._lock:
            if self._generation is not None and generation <= self._generation:
                return
            since, self._generation = self._generation, generation
            if changed is None:
                self._advances.append((since, None))
                self._placements.clear()
                return
            changed = list(changed)
            is_many = len(changed) > _ADVANCE_NAMES_MAX
            self._advances.append((since, None if is_many else frozenset(each.name for each in changed)))
            for placement in changed:
                if placement.state is PlacementState.RELEASED:
                    self._placements.pop(placement.name, None)
                elif placement.name in self._placements:
                    self._placements[placement.name] = placement

    def _is_unchanged(self, name: str, as_of: int) -> bool:
        """Whether no change of a name is behind the cache that was of that generation."""
        if self._generation == as_of:
            return True
        for since, names in reversed(self._advances):
            if names is None or name in names:
                return False
            if since == as_of:
                return True
        return False

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
    """What was sent, in its order for each name, and is not known yet to count where it lies.

    Each is looked at once, after the first look at the database that follows its confirm; what stays then is settled
    one by one.

    Args:
        most: How many there may be.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._sent: dict[str, dict[int, tuple[int, Sent]]] = {}
        """By name and place in the name's order: when it was confirmed, and what it is."""
        self._confirmed: deque[tuple[int, str, int]] = deque()
        """When, of which name and at which place: what no look has followed yet."""
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
            self._put(sent, self._tick + 1)
            self._count += 1

    def replace(self, sent: Sent, by: Sent) -> None:
        """Remember another instead, in the same place of the order, as confirmed just now."""
        with self._lock:
            place = self._place_of(sent)
            if place is not None:
                self._put(by, place)

    def remove(self, sent: Sent) -> None:
        """Forget one, which counts now."""
        with self._lock:
            place = self._place_of(sent)
            if place is not None:
                self._forget(sent.name, place)

    def of(self, name: str, mark: int | None = None) -> list[Sent]:
        """What is unchecked of a name, in the order it was sent; with a mark, only what was confirmed before that."""
        with self._lock:
            return [sent for tick, sent in self._sent.get(name, {}).values() if mark is None or tick <= mark]

    def checked(self, mark: int, cache: PlacementCache) -> None:
        """Forget what counts: confirmed before the mark, while what the cache read later still has its placement."""
        generation = cache.generation
        with self._lock:
            while self._confirmed and self._confirmed[0][0] <= mark:
                tick, name, place = self._confirmed.popleft()
                at, sent = self._sent.get(name, {}).get(place, (None, None))
                if at != tick or sent is None or sent.is_doubtful:
                    continue
                if sent.as_of == generation or cache.still(sent):
                    self._forget(name, place)

    def _put(self, sent: Sent, place: int) -> None:
        self._tick += 1
        self._sent.setdefault(sent.name, {})[place] = (self._tick, sent)
        self._confirmed.append((self._tick, sent.name, place))

    def _place_of(self, sent: Sent) -> int | None:
        return next((place for place, (_, one) in self._sent.get(sent.name, {}).items() if one is sent), None)

    def _forget(self, name: str, place: int) -> None:
        self._count -= 1
        del self._sent[name][place]
        if not self._sent[name]:
            del self._sent[name]
