"""The steps of a move of serialization contexts from one partition to another. No input or output.

Each function is a generator: it yields what is to be done, is sent what came of it (of most, the move as it is then,
whether that step changed it or not), and returns the move as it ended.
Whoever performs the steps may die between any two of them. The move is in the database and in the streams; another
looks there (`go_on`) and performs the rest. Two may do so side by side: the database takes each step of a move once,
and a fence or a marker that is published again changes nothing.

```
begin ── fencing ──────────────────────────────► fenced ──────────────────► switched
         publishers waited for, fence's epoch    marker in the target       placements are the target's
         taken, the fence in the source               │
              │                                       │
              └── abort ──────────────────────────────┴── target := source, under a new epoch ──► aborted
```

No fence is published while a publisher may rely on its last look from before the move, see `_trust` of placement.
Until then the fence has no epoch (0), so that whoever does not know of that rule publishes a fence that says nothing.

An aborted move goes on with its source as the target, since its fence may be in the source already: what the contexts
have there counts again only behind a marker of a higher epoch.
"""

from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

from relatum.contexts.placement._entries import Control, Fence, Marker
from relatum.contexts.placement._model import Move, MoveState
from relatum.contexts.placement._trust import MOVE_WAIT_S, elapsed_s
from relatum.contexts.steps import Request
from relatum.errors import MoveConflict, StreamUnavailable

WAIT_S: Final = 0.01
"""Seconds of one step of the wait before a fence: between two, the mover says that it lives."""

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


@dataclass(frozen=True, slots=True)
class FindEnd(Request[int]):
    """Find the offset behind a stream's last message, 0 where it is empty."""

    stream: str


@dataclass(frozen=True, slots=True)
class Begin(Request[MoveStep]):
    """Begin the move in the database, in one transaction.

    The placements of these contexts become `moving`, and the generation is raised. Those that are not open in the
    source any more are left out; where none is left, it fails and nothing is written.
    """

    source: str
    target: str
    contexts: frozenset[str]
    scan_from: int
    target_scan_from: int


@dataclass(frozen=True, slots=True)
class Look(Request[MoveStep]):
    """Read the move."""

    move_id: int


@dataclass(frozen=True, slots=True)
class LetFence(Request[MoveStep]):
    """Take the fence's epoch, unless that was done. The epoch that begins in the target is not below it."""

    move_id: int


@dataclass(frozen=True, slots=True)
class Sleep(Request[None]):
    """Let time pass."""

    seconds: float


@dataclass(frozen=True, slots=True)
class PublishControl(Request[None]):
    """Publish a control message to a stream and wait for the broker's confirm."""

    stream: str
    control: Control


@dataclass(frozen=True, slots=True)
class FindControl(Request[int | None]):
    """Find the first fence or marker of a move and an epoch, from an offset on, up to where the stream ends now."""

    stream: str
    kind: Literal["fence", "marker"]
    move_id: int
    epoch: int
    from_offset: int


@dataclass(frozen=True, slots=True)
class SetFenced(Request[MoveStep]):
    """From `fencing` to `fenced`, if the move is at that attempt."""

    move_id: int
    attempt: int
    fence_offset: int


@dataclass(frozen=True, slots=True)
class Switch(Request[MoveStep]):
    """From `fenced` to `switched` (or `aborted`), if at that attempt.

    In the same transaction the placements become the target's, open, under the move's epoch, and the generation is
    raised.
    """

    move_id: int
    attempt: int
    marker_offset: int


@dataclass(frozen=True, slots=True)
class SetAborting(Request[MoveStep]):
    """Make the source the target, under a new epoch and attempt, unless that was done or the move has ended."""

    move_id: int


MoveRequest: TypeAlias = (
    FindEnd | Begin | Look | LetFence | Sleep | PublishControl | FindControl | SetFenced | Switch | SetAborting
)
"""What a step asks for."""

Steps: TypeAlias = Generator[MoveRequest, Any, MoveStep]

Clock: TypeAlias = Callable[[], float]


def move(source: str, target: str, contexts: frozenset[str], *, clock: Clock = elapsed_s) -> Steps:
    """Move contexts from one partition to another."""
    scan_from = yield from FindEnd(source)
    target_scan_from = yield from FindEnd(target)
    begun = yield from Begin(source, target, contexts, scan_from, target_scan_from)
    found = yield from _wait_for_publishers(begun.move_id, clock)
    if found.state is MoveState.FENCING:
        yield from PublishControl(source, _fence(found))
    return (yield from _complete(found, clock))


def go_on(move_id: int, *, clock: Clock = elapsed_s) -> Steps:
    """Perform what is left of a move, from whatever state it is in. One that has ended stays as it is."""
    found = yield from Look(move_id)
    return (yield from _complete(found, clock))


def abort(move_id: int, *, clock: Clock = elapsed_s) -> Steps:
    """Take a move back: its contexts go on in the source. One that was aborted before stays so.

    Raises:
        MoveConflict: it was completed; another move brings its contexts back.
    """
    found = yield from SetAborting(move_id)
    if found.state is MoveState.SWITCHED:
        raise MoveConflict(
            f"move {move_id} was completed: move its contexts back to {found.source!r} instead",
            move_id=move_id,
            state=found.state.value,
        )
    return (yield from _complete(found, clock))


def _wait_for_publishers(move_id: int, clock: Clock) -> Steps:
    """Wait until no publisher relies on a look from before its contexts were stopped; then the move may be fenced."""
    began = clock()
    while clock() - began <= MOVE_WAIT_S:
        yield from Sleep(WAIT_S)
    return (yield from LetFence(move_id))


def _complete(found: MoveStep, clock: Clock) -> Steps:
    """Perform step after step. After each, the database says how far the move is: it may be further than we know."""
    while not found.state.is_ended:
        if not found.fence_epoch:
            found = yield from _wait_for_publishers(found.move_id, clock)
        elif found.state is MoveState.FENCING:
            at = yield from _ensure(found.source, _fence(found), found.scan_from)
            found = yield from SetFenced(found.move_id, found.attempt, at)
        else:
            at = yield from _ensure(found.target, _marker(found), found.target_scan_from)
            found = yield from Switch(found.move_id, found.attempt, at)
    return found


def _ensure(stream: str, control: Fence | Marker, from_offset: int) -> Generator[MoveRequest, Any, int]:
    """Where the first such message lies; it is published where there is none.

    Which one is the first cannot change once one was seen: offsets only ascend.
    """
    kind: Literal["fence", "marker"] = "fence" if isinstance(control, Fence) else "marker"
    find = FindControl(stream, kind, control.move_id, control.epoch, from_offset)
    at = yield from find
    if at is not None:
        return at
    yield from PublishControl(stream, control)
    for _ in range(LOOKS_MAX):
        at = yield from find
        if at is not None:
            return at
        yield from Sleep(LOOK_AGAIN_S)
    raise StreamUnavailable(
        f"the {kind} of move {control.move_id} is confirmed and not to be found in {stream!r}; go on with it later",
        stream=stream,
    )


def _fence(of: MoveStep) -> Fence:
    return Fence(of.move_id, of.fence_epoch, of.names)


def _marker(of: MoveStep) -> Marker:
    assert of.fence_offset is not None, "a fenced move knows where its fence is"
    return Marker(of.move_id, of.epoch, of.names, of.source, of.fence_offset)
