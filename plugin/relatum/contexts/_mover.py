"""Moves of serialization contexts from one partition to another: their steps, and the movers that perform them.

A `Mover` performs each step, and may die between any two steps. The state of the move is in the database and the
streams: another mover reads it (`go_on`) and performs the rest. Two movers may do so at the same time: the database
accepts each step of a move once, and repeating a fence or marker changes nothing.

```
begin ── fencing ──────────────────────────────► fenced ──────────────────► switched
         publishers waited for, fence's epoch    marker in the target       placements are the target's
         taken, the fence in the source               │
              │                                       │
              └── abort ──────────────────────────────┴── target := source, under a new epoch ──► aborted
```

No fence is published while a publisher may rely on a query from before the move; see `MOVE_WAIT_S`. Until then the
fence has no epoch (0): a mover of an earlier release publishes a fence without effect.

An aborted move continues with its source as the target, since its fence may be in the source already: messages there
are valid again only after a marker with a higher epoch.
"""

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias, TypeVar

from relatum.contexts._control_streams import ControlStreams
from relatum.contexts._move_store import MoveStore, NothingToMove, logger
from relatum.contexts._partition_log import Control, Fence, Marker
from relatum.contexts._placements import Move, MoveProgress, MoveState, MoveStep, Progress, chunked
from relatum.contexts._publication import MOVE_WAIT_S, elapsed_s
from relatum.errors import (
    Conflict,
    MoveConflict,
    NotFound,
    PublishNacked,
    PublishUnroutable,
    RelatumError,
    StreamUnavailable,
    Transient,
)
from relatum.processes import new_holder
from relatum.store.members import LEASE_S, renewal_s
from relatum.waiting import Server, Threads, has_passed, log_failure

T = TypeVar("T")

RETRY_S: Final = 30.0
"""Seconds for which a step is retried while the broker or the database is unavailable."""

PAUSE_S: Final = 0.2
"""Seconds between two attempts."""

_PASSING: Final = (Transient, PublishNacked, PublishUnroutable)
"""Errors that are retried. A starting broker routes to its streams a second after it answers."""

WAIT_S: Final = 0.01
"""The wait before a fence is cut into steps of this many seconds; the mover renews its lease between them."""

LOOKS_MAX: Final = 5
"""How often to search for a confirmed control message before the stream counts as unavailable.

One search finds it, unless the replica that is read lags.
"""

LOOK_AGAIN_S: Final = 0.1
"""Seconds between such searches."""


def move(world: "Mover", source: str, target: str, contexts: frozenset[str]) -> MoveStep:
    scan_from = world.end_of(source)
    target_scan_from = world.end_of(target)
    begun = world.begin(source, target, contexts, scan_from, target_scan_from)
    found = _wait_for_publishers(world, begun.move_id)
    if found.state is MoveState.FENCING:
        world.publish(source, _fence(found))
    return _complete(world, found)


def go_on(world: "Mover", move_id: int) -> MoveStep:
    """Perform the remaining steps of a move. An ended move is returned unchanged."""
    return _complete(world, world.look(move_id))


def abort(world: "Mover", move_id: int) -> MoveStep:
    """Abort a move: its contexts stay in the source. A completed move raises `MoveConflict`."""
    found = world.set_aborting(move_id)
    if found.state is MoveState.SWITCHED:
        raise MoveConflict(
            f"move {move_id} was completed: move its contexts back to {found.source!r} instead",
            move_id=move_id,
            state=found.state.value,
        )
    return _complete(world, found)


def _wait_for_publishers(world: "Mover", move_id: int) -> MoveStep:
    """Wait until no publisher relies on a query from before the move; then it may be fenced."""
    began = world.elapsed_s()
    while world.elapsed_s() - began <= MOVE_WAIT_S:
        world.sleep(WAIT_S)
    return world.let_fence(move_id)


def _complete(world: "Mover", found: MoveStep) -> MoveStep:
    """Perform step after step. The database returns the state after each: another mover may be ahead."""
    while not found.state.is_ended:
        if not found.fence_epoch:
            found = _wait_for_publishers(world, found.move_id)
        elif found.state is MoveState.FENCING:
            at = _ensure(world, found.source, _fence(found), found.scan_from)
            found = world.set_fenced(found.move_id, found.attempt, at)
        else:
            assert found.fence_offset is not None, "a fenced move knows where its fence is"
            marker = Marker(found.move_id, found.epoch, found.names, found.source, found.fence_offset)
            at = _ensure(world, found.target, marker, found.target_scan_from)
            found = world.switch(found.move_id, found.attempt, at)
    return found


def _ensure(world: "Mover", stream: str, control: Fence | Marker, from_offset: int) -> int:
    """Return the offset of the first such message; publish it if there is none.

    Once such a message was seen, the first cannot change: offsets only ascend.
    """
    at = world.find(stream, control, from_offset)
    if at is not None:
        return at
    world.publish(stream, control)
    for _ in range(LOOKS_MAX):
        at = world.find(stream, control, from_offset)
        if at is not None:
            return at
        world.sleep(LOOK_AGAIN_S)
    raise StreamUnavailable(
        f"the {type(control).__name__.lower()} of move {control.move_id} is confirmed, but is not found in "
        f"{stream!r}; resume the move later",
        stream=stream,
    )


def _fence(of: MoveStep) -> Fence:
    return Fence(of.move_id, of.fence_epoch, of.names)


class Mover:
    """Performs the steps of one move, and retries them while a server does not answer.

    Its public methods are the calls that the steps make; the tests' model implements them, too. Each may be repeated if
    its outcome is unknown: calls of the database return the present state of the move, whether they changed it or not.
    """

    def __init__(
        self,
        store: MoveStore,
        streams: ControlStreams,
        *,
        retry_s: float = RETRY_S,
        reason: str | None = None,
        tell: Callable[[Move], None] = lambda move: None,
    ) -> None:
        self._store = store
        self._streams = streams
        store.outages.name(Server.BROKER, str(streams.address))
        self._retry_s = retry_s
        self._reason = reason
        self._tell = tell
        # Unique for this move: a repeated `begin` finds the move of the first one by it.
        self._holder = new_holder()
        self._known: MoveStep | None = None
        self._attend_at = time.monotonic() + renewal_s(LEASE_S)

    def run(self, steps: Callable[..., MoveStep], *given: Any) -> MoveStep:
        """Perform all steps of `move`, `go_on` or `abort`, and return the ended move.

        If it stops, the error names the state of the move, and its field `move_id` has the number.
        """
        try:
            return steps(self, *given)
        except RelatumError as error:
            known = self._known
            if known is None or known.state.is_ended:
                raise
            stopped: RelatumError = type(error)(
                f"move {known.move_id} stopped in the state {known.state.value}: {error}; resume it, or abort it"
            )
            stopped.__dict__.update(error.__dict__, move_id=known.move_id)
            raise stopped from error

    def end_of(self, stream: str) -> int:
        return self._persist(self._streams.end_of, stream)

    def begin(self, *move: Any) -> MoveStep:
        return self._note(self._persist(self._store.begin, *move, self._holder))

    def look(self, move_id: int) -> MoveStep:
        self._persist(self._store.attend, move_id, self._holder)
        return self._note(self._persist(self._store.look, move_id))

    def let_fence(self, move_id: int) -> MoveStep:
        return self._note(self._persist(self._store.let_fence, move_id))

    def publish(self, stream: str, control: Control) -> None:
        self._persist(self._streams.publish, stream, control)

    def find(self, stream: str, control: Fence | Marker, from_offset: int) -> int | None:
        return self._persist(self._streams.find, stream, control, from_offset)

    def set_fenced(self, move_id: int, attempt: int, fence_offset: int) -> MoveStep:
        return self._note(self._persist(self._store.set_fenced, move_id, attempt, fence_offset))

    def switch(self, move_id: int, attempt: int, marker_offset: int) -> MoveStep:
        return self._note(self._persist(self._store.switch, move_id, attempt, marker_offset))

    def set_aborting(self, move_id: int) -> MoveStep:
        return self._note(self._persist(self._store.set_aborting, move_id, self._reason))

    def elapsed_s(self) -> float:
        return elapsed_s()

    def sleep(self, seconds: float) -> None:
        self._persist(time.sleep, seconds)

    def _persist(self, step: Callable[..., T], *given: Any) -> T:
        """Perform one step; retry transient errors for `retry_s`, or the call's time."""
        give_up_at, outages = time.monotonic() + self._retry_s, self._store.outages
        move = "a move to begin" if self._known is None else f"move {self._known.move_id}"
        who = f"the step {step.__name__} of {move}"
        while True:
            try:
                self._attend()
                answer = step(*given)
            except _PASSING as error:
                if time.monotonic() >= give_up_at or has_passed():
                    outages.forget(who)
                    raise
                outages.failed(who, error)
            except BaseException:
                outages.forget(who)
                raise
            else:
                outages.over(who)
                return answer
            time.sleep(PAUSE_S)

    def _attend(self) -> None:
        """Renew the move's lease when due. Without it others take over, which does no harm."""
        if self._known is not None and time.monotonic() >= self._attend_at:
            self._store.attend(self._known.move_id, self._holder)
            self._attend_at = time.monotonic() + renewal_s(LEASE_S)

    def _note(self, found: MoveStep) -> MoveStep:
        is_further = self._known is None or found.state is not self._known.state
        self._known = found
        if is_further:
            self._tell(found)
        return found


def resume_abandoned(moves: MoveStore, streams: ControlStreams, *, retry_s: float = RETRY_S) -> None:
    """Complete all moves whose mover died, one after the other; a move that fails stays as it is."""
    while (move_id := moves.take_abandoned()) is not None:
        logger.warning("resuming move %d: its mover no longer renews the lease", move_id, extra={"move_id": move_id})
        try:
            Mover(moves, streams, retry_s=retry_s).run(go_on, move_id)
        except (Conflict, NotFound) as error:
            # Another mover has completed or aborted it.
            log_failure(logger, error, f"another mover completed or aborted move {move_id}", level=logging.INFO)


MOVES_AT_ONCE: Final = 4
"""The default number of moves that run at the same time."""

CONTEXTS_MAX: Final = 500
"""The most contexts of one move: its fence and marker list them, and should stay small."""

ROUNDS_MAX: Final = 10
"""How often contexts that had left the source before their move began are looked up again."""

_Wanted: TypeAlias = tuple[str, str, frozenset[str]]
"""A move to begin: source, target, and contexts that were in the source when they were looked up."""


@dataclass
class Movers:
    store: MoveStore
    streams: ControlStreams
    at_once: int
    retry_s: float
    progress: Progress | None
    _contexts_all: int = 0
    _contexts_done: int = 0
    _telling: threading.Lock = field(default_factory=threading.Lock)

    def move_all(self, contexts: Mapping[str, Collection[str]]) -> list[Move]:
        """Move contexts, by target. Contexts without a placement are skipped."""
        try:
            # First, because contexts of moves that have not ended are a conflict.
            resume_abandoned(self.store, self.streams, retry_s=self.retry_s)
        except RelatumError as error:
            log_failure(logger, error, "an abandoned move was not completed here")
        ended: list[Move] = []
        moved: set[str] = set()
        for _ in range(ROUNDS_MAX):
            wanted = [
                each
                for target, names in contexts.items()
                for each in self._needed([name for name in names if name not in moved], target)
            ]
            if not wanted:
                return ended
            self._contexts_all = self._contexts_done + sum(len(names) for _, _, names in wanted)
            for step in self._perform_all(wanted):
                ended.append(self.store.move(step.move_id))
                moved |= step.names
        raise Conflict("other movers move these contexts to other streams at the same time: repeat the call later")

    def perform(self, steps: Callable[[Mover, int], MoveStep], move_id: int, *, reason: str | None = None) -> Move:
        return self.store.move(self._mover(reason).run(steps, move_id).move_id)

    def _mover(self, reason: str | None = None) -> Mover:
        return Mover(self.store, self.streams, retry_s=self.retry_s, reason=reason, tell=self._tell)

    def _tell(self, move: Move) -> None:
        with self._telling:
            if move.state.is_ended:
                self._contexts_done += move.contexts
            if self.progress is not None:
                self.progress(MoveProgress(move, self._contexts_done, self._contexts_all or move.contexts))

    def _needed(self, names: Collection[str], target: str) -> list[_Wanted]:
        leaving: dict[str, list[str]] = {}
        for placement in self.store.find(names).values():
            found = None if placement.move_id is None else self.store.move(placement.move_id)
            if found is not None and not found.state.is_ended:
                raise MoveConflict(
                    f"{placement.name!r} is already part of move {found.move_id}: resume or abort that move",
                    move_id=found.move_id,
                    state=found.state.value,
                )
            if placement.stream != target:
                leaving.setdefault(placement.stream, []).append(placement.name)
        return [
            (source, target, frozenset(some))
            for source, those in leaving.items()
            for some in chunked(those, CONTEXTS_MAX)
        ]

    def _perform_all(self, wanted: Sequence[_Wanted]) -> list[MoveStep]:
        """Perform several moves at a time. If one stops, running moves are completed and no other begins.

        Moves are left out if all their contexts have left the source by then.
        """
        threads = Threads(self.at_once, "relatum-move")
        moves = [threads.submit(self._perform_one, *each) for each in wanted]
        try:
            return [ended for move in moves if (ended := move.result()) is not None]
        finally:
            for move in moves:
                move.cancel()
            threads.shutdown(wait=True)

    def _perform_one(self, source: str, target: str, contexts: frozenset[str]) -> MoveStep | None:
        try:
            return self._mover().run(move, source, target, contexts)
        except NothingToMove:
            return None
