"""Decides under which placement a router publishes a message, and whether the message counts: placed, stray or adopted.

docs/contexts-protocol.md has the steps ("A publish") and the proof. All input and output goes through a `RouterCore`.
The router may be suspended for any time between two calls.

A router publishes one message of a name at a time, and the next one when that message is known to be valid, so strays
do not overtake each other.
"""

import itertools
import secrets
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Final, TypeVar

from relatum.common.checks import seconds_text
from relatum.common.waiting import LEAST_S, within
from relatum.contexts._partition_log import Adoption, Entry, Fence, Marker, Placed
from relatum.contexts._placement_cache import PlacementCache, Sent, Unchecked
from relatum.contexts._placements import Move, Placement, PlacementState
from relatum.errors import ContextMoving, DatabaseUnavailable
from relatum.metrics import Histogram

if TYPE_CHECKING:
    from relatum.contexts._context_options import RouterOptions
    from relatum.contexts._router_core import RouterCore

T = TypeVar("T")

UNCHECKED_MAX: Final = 10_000
"""How many messages may be unchecked while the database is unavailable."""

POLL_S: Final = 0.005
"""Seconds between two checks whether a move has ended."""

AWAY_S: Final = 1.0
"""Seconds without a refresh after a failed one, in the background and for publishers that can continue without it."""

RETRY_S: Final = 0.1
"""Seconds between two attempts to reach an unavailable database."""

TAKE_OVER_S: Final = 1.0
"""Seconds that a message waits for a move before its router takes over abandoned moves, and between two attempts."""

_NEVER: Final = float("-inf")

TRUST_S: Final = 0.2
"""Seconds for which a refresh is valid, from its start."""

DRIFT: Final = 0.01
"""The relative error of a clock's rate: quartz is within 0.0002, and NTP changes rates by up to 0.0005."""

STALL_S: Final = 0.14
"""Seconds for which a publisher's machine and clock may be paused between its refresh and the fence."""

MOVE_WAIT_S: Final = TRUST_S * (1 + DRIFT) / (1 - DRIFT) + STALL_S
"""Seconds between the commit of `moving` and the fence, by the mover's clock: 0.344."""

# On macOS, CLOCK_MONOTONIC counts sleep, but `time.monotonic` does not.
_CLOCK: Final = getattr(time, "CLOCK_BOOTTIME", getattr(time, "CLOCK_MONOTONIC", None))


def elapsed_s() -> float:
    """Return monotonic seconds, including time for which the machine was suspended, if the system counts it."""
    return time.clock_gettime(_CLOCK) if _CLOCK is not None else time.monotonic()


def find_stray(entries: Iterable[tuple[int, Entry]], sent: Sent, *, anywhere: bool) -> int | None:
    """Return the offset of a published message in a partition's entries, if it is behind the end of its placement.

    The end is a fence or marker of the message's name with a higher epoch. `anywhere` also finds a message before that.
    """
    is_behind = anywhere
    for offset, entry in entries:
        if isinstance(entry, Fence | Marker):
            is_behind |= entry.epoch > sent.wanted.epoch and sent.name in entry.contexts
        elif sent.wanted == (entry if isinstance(entry, Adoption) else entry.placed):
            return offset if is_behind else None
    return None


class Publications:
    """The messages that one router publishes under placements.

    The caller may publish messages of different names at the same time, but only one of each name.
    """

    def __init__(self, world: "RouterCore", clock: Callable[[], float], options: "RouterOptions") -> None:
        self.cache = PlacementCache(options.names_max)
        self.unchecked = Unchecked(UNCHECKED_MAX)
        self.name = secrets.token_hex(8)
        """The router's id in its messages."""
        self._numbers = itertools.count(1)
        self._world = world
        self._clock = clock
        self._options = options
        self._lock = threading.Lock()
        self._looked_at = _NEVER
        self._checked_mark = 0
        self._away_until = 0.0
        self.adopted = 0
        self.asked = 0
        self.move_wait_s = Histogram()

    def at_hand(self, name: str) -> Placement | None:
        """Return the placement under which a message of a name can be sent without I/O; None: call `place`."""
        placement = None if self.unchecked.is_full or not self._has_recent_refresh() else self.cache.get(name)
        if placement is None or placement.state is not PlacementState.OPEN:
            return None
        return None if self._must_settle_first(name, placement) else placement

    def place(self, name: str, stream: str | None = None) -> Placement:
        """Return the placement under which to send a message of a name. `ContextMoving`: a move did not end in time."""
        deadline = self._clock() + self._options.timeout_s
        placement = self._open_placement(name, deadline, stream)
        if self._must_settle_first(name, placement):
            self.settle(name, deadline - self._clock())
            placement = self._open_placement(name, deadline, stream)
        return placement

    def next_of(self, placement: Placement) -> Sent:
        placed = Placed(placement.epoch, self.name, next(self._numbers))
        return Sent(placement.name, placement.stream, placed)

    def is_known_valid(self, sent: Sent) -> bool:
        """Return whether a message confirmed just now is known to be valid. If not, call `settle`."""
        # Check the refresh before the cache: a later refresh proves nothing about an earlier state of the cache.
        if self._trusts() and self.cache.still(sent):
            return True
        self.unchecked.add(sent)
        self.asked += 1
        return False

    def settle(self, name: str, timeout_s: float | None = None, *, must: bool = True) -> None:
        """Settle all unchecked messages of a context or set, in publishing order: adopt those that are strays.

        With `must=False` and `when_database_away="known"`, they stay unchecked while the database is unavailable.
        """
        deadline = self._clock() + (self._options.timeout_s if timeout_s is None else timeout_s)
        if self._look(deadline, must=must):
            for sent in self.unchecked.of(name, self._checked_mark):
                self._settle(sent, deadline)

    def look(self) -> None:
        """Refresh the cache once, which proves messages with unchanged placements valid."""
        self._look(self._clock(), must=True)

    def counts(self, sent: Sent, timeout_s: float | None = None) -> bool:
        """Return whether a message with an unknown outcome, found in its partition, is valid there."""
        deadline = self._clock() + (self._options.timeout_s if timeout_s is None else timeout_s)
        self._look(deadline, must=True)
        return self._in_time(deadline, self._stray, sent) is None

    def _trusts(self) -> bool:
        """Return whether the last refresh is recent enough to prove that an already confirmed message is valid."""
        return self._options.trust_clock and self._has_recent_refresh()

    def _has_recent_refresh(self) -> bool:
        return self._clock() - self._looked_at < TRUST_S

    def _looked(self, mark: int, began: float) -> None:
        """Store the mark and start time of a refresh, unless those of a later refresh are stored."""
        with self._lock:
            self._checked_mark = max(mark, self._checked_mark)
            self._looked_at = max(began, self._looked_at)

    def _open_placement(self, name: str, deadline: float, stream: str | None = None) -> Placement:
        must_refresh, began = False, self._clock()
        take_over_at = began + TAKE_OVER_S
        while True:
            # After a recent refresh, a message rarely becomes a stray: a mover waits longer before its fence.
            if must_refresh or self.unchecked.is_full or not self._has_recent_refresh():
                self._look(deadline, must=self.unchecked.is_full)
            placement = self.cache.get(name) or self._place(name, stream, deadline)
            if placement.state is PlacementState.OPEN:
                if must_refresh:
                    self.move_wait_s.observe(self._clock() - began)
                return placement
            if self._clock() >= deadline:
                raise ContextMoving(
                    f"a move of {name!r} did not end within {seconds_text(self._options.timeout_s)}; nothing was sent: "
                    "publish again",
                    context=name,
                    move_id=placement.move_id,
                )
            if self._clock() >= take_over_at:
                self._world.take_over(deadline - self._clock())
                take_over_at = self._clock() + TAKE_OVER_S
            self._world.sleep(POLL_S)
            must_refresh = True

    def _place(self, name: str, stream: str | None, deadline: float) -> Placement:
        """Read the placement of a name that is not cached from the database, or create it there."""
        while True:
            as_of = self.cache.generation
            if as_of is None:
                self._look(deadline, must=True)
                continue
            try:
                placement = self._world.place(name, stream)
            except DatabaseUnavailable:
                if self._options.when_database_away != "wait" or self._clock() >= deadline:
                    raise
                self._world.sleep(RETRY_S)
                continue
            self.cache.add(placement, as_of)
            return placement

    def _must_settle_first(self, name: str, placement: Placement) -> bool:
        """Return whether messages of a name must be settled before another one is sent under `placement`.

        These are messages that a refresh left unchecked, adoptions that may not have arrived, and all messages under
        another placement: behind its end they are strays, which the next message would overtake.
        """
        unchecked = self.unchecked.of(name)
        return bool(unchecked) and (
            any(sent.is_doubtful or sent.wanted.epoch != placement.epoch for sent in unchecked)
            or bool(self.unchecked.of(name, self._checked_mark))
        )

    def _look(self, deadline: float, *, must: bool = False) -> bool:
        """Refresh the cache. Returns False if the database is unavailable and the message can be sent without it."""
        is_optional = self._options.when_database_away == "known" and not must
        if is_optional and self._clock() < self._away_until:
            return False
        while True:
            mark, began, since = self.unchecked.mark(), self._clock(), self.cache.generation
            try:
                generation, changed = self._world.changes(since)
            except DatabaseUnavailable:
                if self._options.when_database_away == "known":
                    self._away_until = self._clock() + AWAY_S
                if is_optional:
                    return False
                if self._options.when_database_away != "wait" or self._clock() >= deadline:
                    raise
                self._world.sleep(RETRY_S)
                continue
            if since is not None and generation < since:
                # The database was restored to an earlier state: its next changes have generations that the cache has.
                self.cache.clear()
                continue
            self.cache.advance(generation, changed)
            self.unchecked.checked(mark, self.cache)
            self._looked(mark, began)
            return True

    def _settle(self, sent: Sent, deadline: float) -> None:
        """Make a message valid, in its partition or by an adoption in another one. Call this after a refresh."""
        if sent.is_doubtful:
            if self._in_time(deadline, self._is_there, sent):
                # It may have arrived after the last refresh, behind the fence of a later move.
                self._look(deadline, must=True)
            else:
                sent = self._adopt(sent, None, deadline)
        while (at := self._in_time(deadline, self._stray, sent)) is not None:
            sent = self._adopt(sent, at, deadline)
        self.unchecked.remove(sent)

    def _adopt(self, sent: Sent, at: int | None, deadline: float) -> Sent:
        """Adopt a stray into its context's current partition. The adoption replaces it among the unchecked messages."""
        placement = self._open_placement(sent.name, deadline)
        if isinstance(sent.wanted, Adoption):
            adoption = replace(sent.wanted, epoch=placement.epoch)
        else:
            assert at is not None, "only an adoption can be missing from its partition"
            adoption = Adoption(sent.name, placement.epoch, sent.stream, at)
        adopted = Sent(sent.name, placement.stream, adoption)
        # Add the adoption before publishing it: without a confirm, the next attempt first searches for it.
        doubtful = replace(adopted, is_doubtful=True)
        self.unchecked.replace(sent, doubtful)
        self._world.adopt(placement.stream, adoption)
        with self._lock:
            self.adopted += 1
        self.unchecked.replace(doubtful, adopted)
        self._look(deadline, must=True)
        return adopted

    def _in_time(self, deadline: float, search: Callable[[Sent], T], sent: Sent) -> T:
        # The longer this process was suspended, the longer it takes to read the partition.
        with within(max(deadline - self._clock(), LEAST_S)):
            return search(sent)

    def _is_there(self, sent: Sent) -> bool:
        """Return whether an unconfirmed adoption is in its partition, behind the marker of its epoch."""
        move = self._world.fence_after(sent.name, sent.wanted.epoch - 1, sent.stream)
        # The epoch of a set that was placed anew has no marker, and a later move may begin behind the adoption.
        has_marker = move is not None and (move.target, move.epoch) == (sent.stream, sent.wanted.epoch)
        from_offset = _scan_from(move, sent.stream) if move is not None and has_marker else 0
        return self._world.search(sent, from_offset, True) is not None

    def _stray(self, sent: Sent) -> int | None:
        """Return the offset of a message behind the end of its placement; None: valid. Call this after a refresh."""
        if self.cache.still(sent):
            return None
        move = self._world.fence_after(sent.name, sent.wanted.epoch, sent.stream)
        if move is None:
            return None
        is_out = move.source == sent.stream and move.fence_epoch > sent.wanted.epoch
        end = move.fence_offset if is_out else move.marker_offset
        # If the offset of the fence or marker is known, start there: retention may have dropped that message.
        from_offset = _scan_from(move, sent.stream) if end is None else end
        return self._world.search(sent, from_offset, end is not None)


def _scan_from(move: Move, stream: str) -> int:
    """Return the offset from which a read of the stream finds everything that the move wrote to it."""
    offsets = [at for end, at in ((move.source, move.scan_from), (move.target, move.target_scan_from)) if end == stream]
    return min(offsets)
