"""How a router publishes a message where its context, or affinity set, is.

It asks a `World` for everything, and may sleep between any two questions for any time:

1. The placement is looked up, or made. While its context moves, the router waits.
2. The message is published to that partition, and confirmed.
3. Only then the router reads its clock. If its last look began a moment ago and the placement is still in force, the
   message counts: a mover waits for longer before its fence (`MOVE_WAIT_S`). Otherwise the router looks again. If the
   generation is the same, no move of the context had begun: a mover writes `moving` into the database before it
   publishes its fence, so the message is before any fence that follows.
4. If the context has changed, the partition decides. It is read from the lowest offset that the move's fence can have:
   a message behind the fence is a stray, which consumers pass over. Then an `Adoption`, published to where the context
   is now, takes it into the context again. It is checked like any message, since the context may have moved once more.

A router publishes one message of a name at a time, and the next only when that is known to count, so strays do not
overtake each other. The only clock that matters is the publisher's own in step 3, and of that only the rate:

A publisher relies on a look for `TRUST_S` from where it began. A mover that knows `moving` to be committed waits for
`MOVE_WAIT_S` before its fence. So no fence precedes a message that counts by step 3: a look that began after that
commit shows `moving`, and one that began before it is too old by the time the fence is published. Nobody registers for
that, and no clock is compared with another one. Clocks must go on at nearly the same rate, and must not stand still
while the world goes on. Source: docs/adr/0051.
"""

import itertools
import os
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final, Literal, Protocol, TypeAlias

from relatum.checks import seconds_text
from relatum.contexts._entries import CONTROL_BYTES, Adoption, Entry, Fence, Marker, Placed
from relatum.contexts._placement_cache import Known, PlacementCache, Sent, Unchecked
from relatum.contexts._placements import Move, Placement, PlacementState
from relatum.errors import ContextMoving, DatabaseUnavailable
from relatum.metrics import Histogram
from relatum.processes import after_fork

WhenAway: TypeAlias = Literal["known", "wait", "fail"]
"""What to do while the database is away: go on with known placements, wait, or fail."""

POLL_S: Final = 0.005
"""Seconds between two looks whether a move has ended."""

RETRY_S: Final = 0.1
"""Seconds between two tries to reach a database that is away."""

WAITED_S: Final = 1.0
"""Seconds that a message waits for a move before its router looks for moves whose mover is gone, and looks again."""

AWAY_S: Final = 1.0
"""Seconds for which a database that was away is not asked again where publishing can go on without it."""

_NEVER: Final = float("-inf")

TRUST_S: Final = 0.2
"""Seconds for which a look serves, from where it began."""

DRIFT: Final = 0.01
"""By how much a clock may be faster or slower than it should: quartz is within 0.0002, NTP changes rates by 0.0005."""

STALL_S: Final = 0.14
"""Seconds for which a publisher's clock may stand still with its machine, between its look and the fence."""

MOVE_WAIT_S: Final = TRUST_S * (1 + DRIFT) / (1 - DRIFT) + STALL_S
"""Seconds between the moment contexts are known to stop and the fence: 0.344, by the mover's clock."""

_CLOCK: Final = getattr(time, "CLOCK_BOOTTIME", None) if os.name == "posix" else None


def elapsed_s() -> float:
    """Seconds since some moment, including time in which the machine was suspended, where its system counts that."""
    return time.clock_gettime(_CLOCK) if _CLOCK is not None else time.monotonic()


class World(Protocol):
    """What publications ask of the database and the broker. Routers perform it, and the model in the tests."""

    def changes(self, since: int | None) -> tuple[int, Sequence[Placement] | None]:
        """The generation, and what changed since another; None instead where there is none, or it is not known."""

    def place(self, name: str, stream: str | None) -> Placement:
        """The placement of a name, open or moving; made where there is none, in a stream or by the rule."""

    def fence_after(self, name: str, epoch: int, stream: str) -> Move | None:
        """The first move of a name out of or into a stream whose fence or marker has a higher epoch."""

    def search(self, sent: Sent, from_offset: int, anywhere: bool) -> int | None:
        """The offset of what was sent, if it is behind a fence or a marker of its name with a higher epoch.

        Read from an offset up to where the stream ends now. What is met before such a fence or marker, or not at all,
        is no stray, unless `anywhere` asks for it in any place.
        """

    def adopt(self, stream: str, adoption: Adoption) -> None:
        """Publish an adoption to a stream and wait for the broker's confirm."""

    def take_over(self, seconds: float) -> None:
        """Go on with moves of the super stream whose mover is gone, if there are any, for so many seconds at most."""

    def sleep(self, seconds: float) -> None:
        """Let time pass."""


class StrayFinder:
    """What a `search` finds: fed with the entries of a partition, one after the other."""

    def __init__(self, sent: Sent, *, anywhere: bool) -> None:
        self._sent = sent
        self._is_behind = anywhere
        self._needle = (str(sent.wanted) if not isinstance(sent.wanted, Adoption) else sent.wanted.stream).encode()
        self.is_over = False
        """Whether what follows cannot matter."""

    def may_matter(self, record: bytes) -> bool:
        """Whether a record's bytes need a look."""
        return CONTROL_BYTES in record or self._needle in record

    def look(self, offset: int, entry: Entry) -> int | None:
        """The entry's offset, where it is what is looked for, behind the end of its placement."""
        if isinstance(entry, Fence | Marker):
            self._is_behind |= entry.epoch > self._sent.wanted.epoch and self._sent.name in entry.contexts
            return None
        found = entry if isinstance(entry, Adoption) else entry.placed
        if found is None or found != self._sent.wanted:
            return None
        self.is_over = True
        return offset if self._is_behind else None


class Publications:
    """The messages one router publishes under placements.

    Names may be published side by side, each of them one message at a time: that is for the caller to see to.
    """

    def __init__(
        self,
        world: World,
        clock: Callable[[], float],
        *,
        timeout_s: float = 10.0,
        trust_clock: bool = True,
        names_max: int = 100_000,
        unchecked_max: int = 10_000,
        when_away: WhenAway = "wait",
    ) -> None:
        self.cache = PlacementCache(names_max)
        self.unchecked = Unchecked(unchecked_max)
        self.name = secrets.token_hex(8)
        """What the messages of this publisher name it by."""
        self._numbers = itertools.count(1)
        self._world = world
        self._clock = clock
        self._trust_clock = trust_clock
        self._timeout_s = timeout_s
        self._when_away = when_away
        self._lock = threading.Lock()
        self._looked_at = _NEVER
        self._checked_mark = 0
        self._away_until = 0.0
        self.adopted = 0
        self.asked = 0
        self.move_wait_s = Histogram()
        # A child has looked at nothing.
        after_fork(self, Publications._forget_look)

    def at_hand(self, name: str) -> Known | None:
        """The placement under which a message of a name may be sent at once; None where `place` has to be asked."""
        known = None if self.unchecked.is_full or not self._looked_lately() else self.cache.get(name)
        if known is None or known.placement.state is not PlacementState.OPEN:
            return None
        return None if self._comes_first(name, known.placement) else known

    def place(self, name: str, stream: str | None = None) -> Known:
        """The placement under which a message of a name may be sent now; `ContextMoving` where a move does not end."""
        deadline = self._clock() + self._timeout_s
        known = self._placed(name, deadline, stream)
        if self._comes_first(name, known.placement):
            self._settle_all(name, deadline, must=True)
            known = self._placed(name, deadline, stream)
        return known

    def next_of(self, known: Known) -> Sent:
        """What the next message is, sent under a placement."""
        placement = known.placement
        placed = Placed(placement.epoch, self.name, next(self._numbers))
        return Sent(placement.name, placement.stream, placed, known.as_of)

    def counts_at_once(self, sent: Sent) -> bool:
        """Whether what the broker has confirmed just now is known to count; else `settle` has to be called."""
        # In this order: were the cache asked first, a look that came since would speak for what it was.
        if self._trusts() and self.cache.still(sent):
            return True
        self.unchecked.add(sent)
        self.asked += 1
        return False

    def settle(self, name: str, timeout_s: float | None = None, *, must: bool = True) -> None:
        """Have all that was sent of a name count, in the order it was sent.

        With `must` false and "known", it may stay unchecked for now while the database is away.
        """
        timeout_s = self._timeout_s if timeout_s is None else timeout_s
        self._settle_all(name, self._clock() + timeout_s, must=must)

    def look(self) -> None:
        """Check what one look at the database proves to count: where the placement is still the same."""
        self._look(self._clock(), must=True)

    def counts(self, sent: Sent) -> bool:
        """Whether what was sent with an unknown outcome, and was found in its partition, counts there."""
        self._look(self._clock() + self._timeout_s, must=True)
        return self._stray(sent) is None

    # --- what the last look is good for ---------------------------------------------------------------------------

    def _trusts(self) -> bool:
        """Whether what the last look showed proves something of a message that was confirmed before this was asked."""
        return self._trust_clock and self._looked_lately()

    def _looked_lately(self) -> bool:
        return self._clock() - self._looked_at < TRUST_S

    def _looked(self, mark: int, began: float) -> None:
        """Note what a look followed, and when it began; the latest of all counts."""
        with self._lock:
            self._checked_mark = max(mark, self._checked_mark)
            self._looked_at = max(began, self._looked_at)

    def _forget_look(self) -> None:
        self._looked_at = _NEVER

    # --- before the message ---------------------------------------------------------------------------------------

    def _placed(self, name: str, deadline: float, stream: str | None = None) -> Known:
        """The open placement of a name."""
        must_look, began = False, self._clock()
        take_over_at = began + WAITED_S
        while True:
            # So that hardly a message is a stray: a mover waits for longer before its fence.
            if must_look or self.unchecked.is_full or not self._looked_lately():
                self._look(deadline, must=self.unchecked.is_full)
            known = self.cache.get(name)
            if known is None:
                known = self._place(name, stream, deadline)
            placement = known.placement
            if placement.state is PlacementState.OPEN:
                if must_look:
                    self.move_wait_s.observe(self._clock() - began)
                return known
            if self._clock() >= deadline:
                raise ContextMoving(
                    f"a move of {name!r} did not end within {seconds_text(self._timeout_s)}; nothing was sent",
                    context=name,
                    move_id=placement.move_id,
                )
            if self._clock() >= take_over_at:
                self._world.take_over(deadline - self._clock())
                take_over_at = self._clock() + WAITED_S
            self._world.sleep(POLL_S)
            must_look = True

    def _place(self, name: str, stream: str | None, deadline: float) -> Known:
        """Read or make the placement of a name that is not known; not even a database that is away changes that."""
        while True:
            if self.cache.generation is None:
                self._look(deadline, must=True)
            as_of = self.cache.generation
            assert as_of is not None
            try:
                placement = self._world.place(name, stream)
            except DatabaseUnavailable:
                if self._when_away != "wait" or self._clock() >= deadline:
                    raise
                self._world.sleep(RETRY_S)
                continue
            self.cache.add(placement, as_of)
            return Known(placement, as_of)

    def _comes_first(self, name: str, placement: Placement) -> bool:
        """Whether something of a name is to be settled before anything is sent under a placement.

        That is what a look has left unchecked, an adoption that may not have arrived, and, looked at or not, what was
        sent under another placement: behind the end of that it is a stray, which what is sent now would overtake.
        """
        unchecked = self.unchecked.of(name)
        return bool(unchecked) and (
            any(sent.is_doubtful or sent.wanted.epoch != placement.epoch for sent in unchecked)
            or bool(self.unchecked.of(name, self._checked_mark))
        )

    # --- the look at the database ---------------------------------------------------------------------------------

    def _look(self, deadline: float, *, must: bool = False) -> bool:
        """Read the generation and what changed; False where the database is away and may be (unless `must`)."""
        may_be_away = self._when_away == "known" and not must
        if may_be_away and self._clock() < self._away_until:
            return False
        while True:
            mark, began = self.unchecked.mark(), self._clock()
            try:
                generation, changed = self._world.changes(self.cache.generation)
            except DatabaseUnavailable:
                if self._when_away == "known":
                    self._away_until = self._clock() + AWAY_S
                if may_be_away:
                    return False
                if self._when_away != "wait" or self._clock() >= deadline:
                    raise
                self._world.sleep(RETRY_S)
                continue
            self.cache.advance(generation, changed)
            self.unchecked.checked(mark, self.cache)
            self._looked(mark, began)
            return True

    # --- after the confirm ----------------------------------------------------------------------------------------

    def _settle_all(self, name: str, deadline: float, *, must: bool = False) -> None:
        """Return once all of a name counts, in the order it was sent, or may go unchecked for now."""
        if self._look(deadline, must=must):
            for sent in self.unchecked.of(name, self._checked_mark):
                self._settle(sent, deadline)

    def _settle(self, sent: Sent, deadline: float) -> None:
        """Return once something sent counts, here or as an adoption elsewhere. After a look."""
        if sent.is_doubtful and not self._is_there(sent):
            sent = self._adopt(sent, _origin(sent), deadline)
        while (at := self._stray(sent)) is not None:
            sent = self._adopt(sent, _origin(sent) or (sent.stream, at), deadline)
        self.unchecked.remove(sent)

    def _adopt(self, sent: Sent, origin: tuple[str, int] | None, deadline: float) -> Sent:
        """Take a stray into its context where that is now; what is unchecked is the adoption then."""
        assert origin is not None, "what an adoption stands for is known"
        known = self._placed(sent.name, deadline)
        adoption = Adoption(sent.name, known.placement.epoch, *origin)
        adopted = Sent(sent.name, known.placement.stream, adoption, known.as_of)
        # Remembered before it is published: should its confirm not come, it is looked for before the next try.
        doubtful = replace(adopted, is_doubtful=True)
        self.unchecked.replace(sent, doubtful)
        self._world.adopt(known.placement.stream, adoption)
        with self._lock:
            self.adopted += 1
        self.unchecked.replace(doubtful, adopted)
        self._look(deadline, must=True)
        return adopted

    def _is_there(self, sent: Sent) -> bool:
        """Whether an adoption whose confirm did not come is in its partition, behind the marker of its epoch."""
        move = self._world.fence_after(sent.name, sent.wanted.epoch - 1, sent.stream)
        from_offset = 0 if move is None else _scan_from(move, sent.stream)
        return self._world.search(sent, from_offset, True) is not None

    def _stray(self, sent: Sent) -> int | None:
        """The offset of something sent that is behind the end of its placement; None where it counts. After a look."""
        if sent.as_of == self.cache.generation or self.cache.still(sent):
            return None
        move = self._world.fence_after(sent.name, sent.wanted.epoch, sent.stream)
        if move is None:
            return None
        end = _end_of(move, sent)
        # By the fence's offset, where it is known: retention may have dropped the fence itself while this router slept.
        from_offset = _scan_from(move, sent.stream) if end is None else end
        return self._world.search(sent, from_offset, end is not None)


def _end_of(move: Move, sent: Sent) -> int | None:
    """The offset of the fence or marker behind which something sent is a stray; None while it is not known."""
    is_out = move.source == sent.stream and move.fence_epoch > sent.wanted.epoch
    return move.fence_offset if is_out else move.marker_offset


def _origin(sent: Sent) -> tuple[str, int] | None:
    """Where the message is that an adoption stands for; None for a message itself."""
    return (sent.wanted.stream, sent.wanted.offset) if isinstance(sent.wanted, Adoption) else None


def _scan_from(move: Move, stream: str) -> int:
    """From where on a stream is read to meet all that a move wrote there."""
    offsets = [at for end, at in ((move.source, move.scan_from), (move.target, move.target_scan_from)) if end == stream]
    return min(offsets)
