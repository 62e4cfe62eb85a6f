"""The steps of a move of serialization contexts from one partition to another.

A mover asks a `World` for each, and may die between any two. The move is in the database and in the streams; another
mover looks there (`go_on`) and performs the rest. Two may do so side by side: the database takes each step of a move
once, and a fence or a marker that is published again changes nothing.

```
begin ── fencing ──────────────────────────────► fenced ──────────────────► switched
         publishers waited for, fence's epoch    marker in the target       placements are the target's
         taken, the fence in the source               │
              │                                       │
              └── abort ──────────────────────────────┴── target := source, under a new epoch ──► aborted
```

No fence is published while a publisher may rely on its last look from before the move, see `MOVE_WAIT_S`.
Until then the fence has no epoch (0), so that a mover of an earlier release publishes a fence without effect.

An aborted move goes on with its source as the target, since its fence may be in the source already: what the contexts
have there counts again only behind a marker of a higher epoch.
"""

from dataclasses import dataclass
from typing import Final, Protocol

from relatum.contexts._entries import Control, Fence, Marker
from relatum.contexts._placements import Move, MoveState
from relatum.contexts._publication import MOVE_WAIT_S
from relatum.errors import MoveConflict, StreamUnavailable

WAIT_S: Final = 0.01
"""Seconds of one step of the wait before a fence: between two, the mover renews its lease."""

LOOKS_MAX: Final = 5
"""How often a control message is looked for that the broker has confirmed, before the stream counts as unavailable.

One look finds it, unless a replica that lags behind is the one that is read.
"""

LOOK_AGAIN_S: Final = 0.1
"""Seconds between such looks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveStep(Move):
    """A move with the names of its contexts, as its steps know it."""

    names: frozenset[str]


class World(Protocol):
    """What the steps of moves ask of the database and the broker. `Mover` performs it, and the model in the tests.

    Each may be repeated where its outcome is not known. Those of the database give the move as it is then, whether they
    changed it or not.
    """

    def end_of(self, stream: str) -> int:
        """The offset behind a stream's last message, 0 where it is empty."""

    def begin(
        self, source: str, target: str, contexts: frozenset[str], scan_from: int, target_scan_from: int
    ) -> MoveStep:
        """Begin a move in the database, in one transaction.

        The placements of these contexts become `moving`, and the generation is raised. Those that are not open in the
        source any more are left out; where none is left, it fails and nothing is written.
        """

    def look(self, move_id: int) -> MoveStep:
        """Read the move."""

    def let_fence(self, move_id: int) -> MoveStep:
        """Take the fence's epoch, unless that was done. The epoch that begins in the target is not below it."""

    def publish(self, stream: str, control: Control) -> None:
        """Publish a control message to a stream and wait for the broker's confirm."""

    def find(self, stream: str, control: Fence | Marker, from_offset: int) -> int | None:
        """The offset of the first such message, at or above an offset and up to the stream's present end."""

    def set_fenced(self, move_id: int, attempt: int, fence_offset: int) -> MoveStep:
        """From `fencing` to `fenced`, if the move is at that attempt."""

    def switch(self, move_id: int, attempt: int, marker_offset: int) -> MoveStep:
        """From `fenced` to `switched` (or `aborted`), if at that attempt.

        In the same transaction the placements become the target's, open, under the move's epoch, and the generation is
        raised.
        """

    def set_aborting(self, move_id: int) -> MoveStep:
        """Make the source the target, under a new epoch and attempt, unless that was done or the move has ended."""

    def elapsed_s(self) -> float:
        """The mover's clock."""

    def sleep(self, seconds: float) -> None:
        """Let time pass."""


def move(world: World, source: str, target: str, contexts: frozenset[str]) -> MoveStep:
    """Move contexts from one partition to another."""
    scan_from = world.end_of(source)
    target_scan_from = world.end_of(target)
    begun = world.begin(source, target, contexts, scan_from, target_scan_from)
    found = _wait_for_publishers(world, begun.move_id)
    if found.state is MoveState.FENCING:
        world.publish(source, _fence(found))
    return _complete(world, found)


def go_on(world: World, move_id: int) -> MoveStep:
    """Perform what is left of a move, from whatever state it is in. One that has ended stays as it is."""
    return _complete(world, world.look(move_id))


def abort(world: World, move_id: int) -> MoveStep:
    """Take a move back: its contexts go on in the source. One that was completed is a `MoveConflict`."""
    found = world.set_aborting(move_id)
    if found.state is MoveState.SWITCHED:
        raise MoveConflict(
            f"move {move_id} was completed: move its contexts back to {found.source!r} instead",
            move_id=move_id,
            state=found.state.value,
        )
    return _complete(world, found)


def _wait_for_publishers(world: World, move_id: int) -> MoveStep:
    """Wait until no publisher relies on a look from before its contexts were stopped; then the move may be fenced."""
    began = world.elapsed_s()
    while world.elapsed_s() - began <= MOVE_WAIT_S:
        world.sleep(WAIT_S)
    return world.let_fence(move_id)


def _complete(world: World, found: MoveStep) -> MoveStep:
    """Perform step after step. After each, the database says how far the move is: it may be further than we know."""
    while not found.state.is_ended:
        if not found.fence_epoch:
            found = _wait_for_publishers(world, found.move_id)
        elif found.state is MoveState.FENCING:
            at = _ensure(world, found.source, _fence(found), found.scan_from)
            found = world.set_fenced(found.move_id, found.attempt, at)
        else:
            at = _ensure(world, found.target, _marker(found), found.target_scan_from)
            found = world.switch(found.move_id, found.attempt, at)
    return found


def _ensure(world: World, stream: str, control: Fence | Marker, from_offset: int) -> int:
    """The offset of the first such message, which is published if there is none.

    Which one is the first cannot change once one was seen: offsets only ascend.
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
        f"the {type(control).__name__.lower()} of move {control.move_id} is confirmed and not to be found in "
        f"{stream!r}; go on with it later",
        stream=stream,
    )


def _fence(of: MoveStep) -> Fence:
    return Fence(of.move_id, of.fence_epoch, of.names)


def _marker(of: MoveStep) -> Marker:
    assert of.fence_offset is not None, "a fenced move knows where its fence is"
    return Marker(of.move_id, of.epoch, of.names, of.source, of.fence_offset)
