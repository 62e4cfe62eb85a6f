"""The steps of a move of serialization contexts from one partition to another.

A `Mover` performs each step, and may die between any two. The state of the move is in the database and
the streams: another mover reads it (`go_on`) and performs the rest. Two movers may do so at the same time: the database
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

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from relatum.contexts._partition_log import Fence, Marker
from relatum.contexts._placements import Move, MoveState
from relatum.contexts._publication import MOVE_WAIT_S
from relatum.errors import MoveConflict, StreamUnavailable

if TYPE_CHECKING:
    from relatum.contexts._mover import Mover

WAIT_S: Final = 0.01
"""The wait before a fence is cut into steps of so many seconds; the mover renews its lease between them."""

LOOKS_MAX: Final = 5
"""How often to search for a confirmed control message before the stream counts as unavailable.

One search finds it, unless the replica that is read lags.
"""

LOOK_AGAIN_S: Final = 0.1
"""Seconds between such searches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MoveStep(Move):
    """A move with the names of its contexts."""

    names: frozenset[str]


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
            at = _ensure(world, found.target, _marker(found), found.target_scan_from)
            found = world.switch(found.move_id, found.attempt, at)
    return found


def _ensure(world: "Mover", stream: str, control: Fence | Marker, from_offset: int) -> int:
    """Return the offset of the first such message; publish it if there is none.

    Once one was seen, the first cannot change: offsets only ascend.
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


def _marker(of: MoveStep) -> Marker:
    assert of.fence_offset is not None, "a fenced move knows where its fence is"
    return Marker(of.move_id, of.epoch, of.names, of.source, of.fence_offset)
