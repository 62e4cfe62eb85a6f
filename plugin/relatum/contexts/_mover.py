"""Moves of serialization contexts from one partition to another: their steps, and the movers that perform them.

docs/contexts-protocol.md has a move's states. The database and the streams hold them: a `Mover` may die between any two
steps, and another one reads the state (`go_on`) and performs the remaining steps. Two movers may perform the same move
at the same time: the database accepts each step once, and a repeated fence or marker changes nothing.

A mover publishes no fence while a publisher may rely on a refresh from before the move; see `MOVE_WAIT_S`. Until then
the fence's epoch is 0, so a fence that a mover of an earlier release publishes has no effect.

An aborted move continues with its source as the target. Its fence may already be in the source: messages behind the
fence are valid again only after a marker with a higher epoch.
"""

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias, TypeVar

from relatum.common.processes import new_holder
from relatum.common.waiting import Server, Threads, has_passed, log_failure
from relatum.contexts._control_streams import ControlStreams
from relatum.contexts._move_store import MoveStore, NothingToMove, already_moving, logger
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
    StreamNotFound,
    StreamUnavailable,
    Transient,
)
from relatum.store.members import LEASE_S, renewal_s

T = TypeVar("T")

RETRY_S: Final = 30.0
"""Seconds for which a mover retries a step while the broker or the database is unavailable."""

PAUSE_S: Final = 0.2
"""Seconds between two attempts of a step."""

_RETRIED: Final = (Transient, PublishNacked, PublishUnroutable)
"""Errors after which a step is retried. A starting broker accepts connections a second before it routes to streams."""

WAIT_S: Final = 0.01
"""Seconds of one pause while the mover waits for publishers; it renews its lease between pauses."""

SEARCHES_MAX: Final = 5
"""How often to search for a confirmed control message. One search finds it, unless the replica lags."""

_SEARCH_PAUSE_S: Final = 0.1
"""Seconds between two searches."""


def move(world: "Mover", source: str, target: str, contexts: frozenset[str]) -> MoveStep:
    scan_from = world.end_of(source)
    target_scan_from = world.end_of(target)
    begun = world.begin(source, target, contexts, scan_from, target_scan_from)
    found = _wait_for_publishers(world, begun.move_id)
    if found.state is MoveState.FENCING:
        world.publish(source, _fence(found))
    return _complete(world, found)


def go_on(world: "Mover", move_id: int) -> MoveStep:
    """Perform the remaining steps of a move, and return the ended move."""
    return _complete(world, world.look(move_id))


def abort(world: "Mover", move_id: int, reason: str | None = None) -> MoveStep:
    """Abort a move: its contexts stay in the source. A completed move raises `MoveConflict`."""
    found = world.set_aborting(move_id, reason)
    if found.state is MoveState.SWITCHED:
        raise MoveConflict(
            f"move {move_id} was completed: move its contexts back to {found.source!r} instead",
            move_id=move_id,
            state=found.state.value,
        )
    return _complete(world, found)


def _wait_for_publishers(world: "Mover", move_id: int) -> MoveStep:
    """Wait until no publisher relies on a refresh from before the move, then assign the fence's epoch."""
    began = world.elapsed_s()
    while world.elapsed_s() - began <= MOVE_WAIT_S:
        world.sleep(WAIT_S)
    return world.assign_fence_epoch(move_id)


def _complete(world: "Mover", found: MoveStep) -> MoveStep:
    """Perform the steps of a move until it ends. Each step returns the state: another mover may be ahead."""
    while not found.state.is_ended:
        if not found.fence_epoch:
            found = _wait_for_publishers(world, found.move_id)
        elif found.state is MoveState.FENCING:
            at = _ensure(world, found.source, _fence(found), found.scan_from)
            found = world.set_fenced(found.move_id, found.attempt, at)
        else:
            assert found.fence_offset is not None, "a fenced move has the offset of its fence"
            marker = Marker(found.move_id, found.epoch, found.names, found.source, found.fence_offset)
            at = _ensure(world, found.target, marker, found.target_scan_from)
            found = world.switch(found.move_id, found.attempt, at)
    return found


def _ensure(world: "Mover", stream: str, control: Fence | Marker, from_offset: int) -> int:
    """Return the offset of the first fence or marker with the move and epoch of `control`; publish it if needed.

    Repeated messages have higher offsets, so the first one does not change.
    """
    at = world.find(stream, control, from_offset)
    if at is not None:
        return at
    world.publish(stream, control)
    for _ in range(SEARCHES_MAX):
        at = world.find(stream, control, from_offset)
        if at is not None:
            return at
        world.sleep(_SEARCH_PAUSE_S)
    raise StreamUnavailable(
        f"the {type(control).__name__.lower()} of move {control.move_id} was confirmed, but was not found in "
        f"{stream!r}, whose replica may lag; resume the move later",
        stream=stream,
    )


def _fence(of: MoveStep) -> Fence:
    return Fence(of.move_id, of.fence_epoch, of.names)


class Mover:
    """Performs the steps of one move, and retries them while a server does not answer.

    The steps call its public methods, which the tests' model implements, too. A call with an unknown outcome can be
    repeated: database calls return the move's current state, even if they change nothing.
    """

    def __init__(
        self,
        store: MoveStore,
        streams: ControlStreams,
        *,
        retry_s: float = RETRY_S,
        on_progress: Callable[[Move], None] = lambda move: None,
    ) -> None:
        self._store = store
        self._streams = streams
        store.outages.name(Server.BROKER, str(streams.address))
        self._retry_s = retry_s
        self._on_progress = on_progress
        # Unique for this move: it lets a repeated `begin` find the move of the first call.
        self._holder = new_holder()
        self._last_state: MoveStep | None = None
        self._attend_at = time.monotonic() + renewal_s(LEASE_S)

    def run(self, steps: Callable[..., MoveStep], *given: Any) -> MoveStep:
        """Perform all steps of `move`, `go_on` or `abort`, and return the ended move."""
        try:
            return steps(self, *given)
        except RelatumError as error:
            last = self._last_state
            if last is None or last.state.is_ended:
                raise
            stopped: RelatumError = type(error)(
                f"move {last.move_id} stopped in the state {last.state.value}: {error}; resume or abort it"
            )
            stopped.__dict__.update(error.__dict__, move_id=last.move_id)
            raise stopped from error

    def end_of(self, stream: str) -> int:
        return self._persist(self._streams.end_of, stream)

    def begin(self, *move: Any) -> MoveStep:
        return self._advance(self._store.begin, *move, self._holder)

    def look(self, move_id: int) -> MoveStep:
        self._persist(self._store.attend, move_id, self._holder)
        return self._advance(self._store.look, move_id)

    def assign_fence_epoch(self, move_id: int) -> MoveStep:
        return self._advance(self._store.assign_fence_epoch, move_id)

    def publish(self, stream: str, control: Control) -> None:
        self._persist(self._streams.publish, stream, control)

    def find(self, stream: str, control: Fence | Marker, from_offset: int) -> int | None:
        return self._persist(self._streams.find, stream, control, from_offset)

    def set_fenced(self, move_id: int, attempt: int, fence_offset: int) -> MoveStep:
        return self._advance(self._store.set_fenced, move_id, attempt, fence_offset)

    def switch(self, move_id: int, attempt: int, marker_offset: int) -> MoveStep:
        return self._advance(self._store.switch, move_id, attempt, marker_offset)

    def set_aborting(self, move_id: int, reason: str | None) -> MoveStep:
        return self._advance(self._store.set_aborting, move_id, reason)

    def elapsed_s(self) -> float:
        return elapsed_s()

    def sleep(self, seconds: float) -> None:
        self._persist(time.sleep, seconds)

    def _persist(self, step: Callable[..., T], *given: Any) -> T:
        """Perform one step. Retry transient errors for `retry_s`, at most until the call's deadline."""
        give_up_at, outages = time.monotonic() + self._retry_s, self._store.outages
        move = "a new move" if self._last_state is None else f"move {self._last_state.move_id}"
        step_name = f"the step {step.__name__} of {move}"
        while True:
            try:
                self._attend()
                answer = step(*given)
            except BaseException as error:
                if not isinstance(error, _RETRIED) or time.monotonic() >= give_up_at or has_passed():
                    outages.forget(step_name)
                    raise
                outages.failed(step_name, error)
            else:
                outages.over(step_name)
                return answer
            time.sleep(PAUSE_S)

    def _attend(self) -> None:
        """Renew the move's lease if it is time. Without a lease another mover takes over, which does no harm."""
        if self._last_state is not None and time.monotonic() >= self._attend_at:
            self._store.attend(self._last_state.move_id, self._holder)
            self._attend_at = time.monotonic() + renewal_s(LEASE_S)

    def _advance(self, step: Callable[..., MoveStep], *given: Any) -> MoveStep:
        """Perform a step that returns the move, and report a new state."""
        found = self._persist(step, *given)
        has_advanced = self._last_state is None or found.state is not self._last_state.state
        self._last_state = found
        if has_advanced:
            self._on_progress(found)
        return found


def resume_abandoned(moves: MoveStore, streams: ControlStreams, *, retry_s: float = RETRY_S) -> None:
    """Complete all moves with an expired lease, one after the other. Skips moves that another mover has ended."""
    while (move_id := moves.take_abandoned()) is not None:
        logger.warning("resuming move %d: its mover no longer renews the lease", move_id, extra={"move_id": move_id})
        try:
            Mover(moves, streams, retry_s=retry_s).run(go_on, move_id)
        except StreamNotFound as error:
            log_failure(logger, error, f"move {move_id} cannot be completed")
        except (Conflict, NotFound) as error:
            log_failure(logger, error, f"another mover completed or aborted move {move_id}", level=logging.INFO)


MOVES_AT_ONCE: Final = 4
"""The default number of moves that run at the same time."""

CONTEXTS_MAX: Final = 500
"""The most contexts of one move: its fence and marker list them, and should stay small."""

ROUNDS_MAX: Final = 10
"""How often to look up contexts again that left the source before their move began."""

_PlannedMove: TypeAlias = tuple[str, str, frozenset[str]]
"""A move to begin: source, target, and contexts that were in the source at their lookup."""


@dataclass
class Movers:
    store: MoveStore
    streams: ControlStreams
    at_once: int
    retry_s: float
    progress: Progress | None
    _contexts_all: int = 0
    _contexts_done: int = 0
    _progress_lock: threading.Lock = field(default_factory=threading.Lock)

    def move_all(self, contexts: Mapping[str, Collection[str]]) -> list[Move]:
        """Move contexts, given by target, and return the ended moves. Skips contexts without a placement."""
        try:
            # Otherwise the contexts of abandoned moves would raise a conflict.
            resume_abandoned(self.store, self.streams, retry_s=self.retry_s)
        except RelatumError as error:
            log_failure(logger, error, "could not complete an abandoned move")
        ended: list[Move] = []
        moved: set[str] = set()
        for _ in range(ROUNDS_MAX):
            planned = [
                each
                for target, names in contexts.items()
                for each in self._plan([name for name in names if name not in moved], target)
            ]
            if not planned:
                return ended
            self._contexts_all = self._contexts_done + sum(len(names) for _, _, names in planned)
            for step in self._perform_all(planned):
                ended.append(self.store.move(step.move_id))
                moved |= step.names
        raise Conflict("other movers are moving the same contexts to other partitions: call again later")

    def perform(self, steps: Callable[..., MoveStep], *given: Any) -> Move:
        return self.store.move(self._mover().run(steps, *given).move_id)

    def _mover(self) -> Mover:
        return Mover(self.store, self.streams, retry_s=self.retry_s, on_progress=self._report_progress)

    def _report_progress(self, move: Move) -> None:
        with self._progress_lock:
            if move.state.is_ended:
                self._contexts_done += move.contexts
            if self.progress is not None:
                self.progress(MoveProgress(move, self._contexts_done, self._contexts_all or move.contexts))

    def _plan(self, names: Collection[str], target: str) -> list[_PlannedMove]:
        leaving: dict[str, list[str]] = {}
        for placement in self.store.find(names).values():
            found = None if placement.move_id is None else self.store.move(placement.move_id)
            if found is not None and not found.state.is_ended:
                raise already_moving(placement.name, found)
            if placement.stream != target:
                leaving.setdefault(placement.stream, []).append(placement.name)
        return [
            (source, target, frozenset(page))
            for source, names_there in leaving.items()
            for page in chunked(names_there, CONTEXTS_MAX)
        ]

    def _perform_all(self, planned: Sequence[_PlannedMove]) -> list[MoveStep]:
        """Perform several moves at a time, and return the ended ones. If one stops, no other begins."""
        threads = Threads(self.at_once, "relatum-move")
        moves = [threads.submit(self._perform_one, *each) for each in planned]
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
