"""The protocol of moved contexts under chance: actors sleep, die, come late; RELATUM_MODEL_EXAMPLES says how often."""

import os
import random
from contextlib import closing, nullcontext
from typing import Any

import pytest

from relatum.contexts import MoveState
from relatum.contexts import _mover as moving
from relatum.contexts import _publication as publication
from relatum.contexts._partition_log import Entry, Fence, Marker, PartitionLog
from relatum.contexts._placement_cache import Sent as CheckedSent
from relatum.contexts._publication import MOVE_WAIT_S, STALL_S
from tests.support.serial_world import PARTITIONS, STALL, STEP_S, Router, World, Wrong, stepwise

EXAMPLES = int(os.environ.get("RELATUM_MODEL_EXAMPLES", "25"))
CONTEXTS = ("a", "b")
APART = int(1.1 * MOVE_WAIT_S / STEP_S)
"""Steps between two times at which a clock is suspended: one move waits for one of them."""


def start_move(world: World, moved: frozenset[str], target: str) -> None:
    placed = sorted(context for context in moved if context in world.placements)
    if not placed:
        return
    source = world.placements[placed[0]].stream
    together = frozenset(context for context in placed if world.placements[context].stream == source)
    if source != target:
        world.start("mover", stepwise(moving.move, world.asking, source, target, together))


def old_go_on(world: Any, move_id: int) -> moving.MoveStep:
    """What a mover of an earlier release does first with a move that it finds."""
    found = world.look(move_id)
    if found.state is MoveState.FENCING:
        fence = Fence(move_id, found.fence_epoch, found.names)
        world.publish(found.source, fence)
        at = world.find(found.source, fence, found.scan_from)
        found = world.set_fenced(move_id, found.attempt, at or 0)
    return found


def act(  # noqa: C901 - one case for each thing that can happen
    one: World,
    seed: int,
    contexts: tuple[str, ...],
    *,
    steps: int,
    releases: int = 1,
    failures: int = 1,
    frozen: int = 0,
    late: float = 0.0,
    stalls: bool = False,
) -> None:
    """Choose actors and actions at random; releases and failures are as frequent as is said, of about 115.

    One actor at a time is `frozen` for so many choices, a share of answers is `late`, and `stalls` stops clocks.
    """
    chance = random.Random(seed)
    for name in ("first", "second"):
        one.add_consumer(name, at_end=False)
    later = 0
    still = None
    stalled_at = -1_000
    since = 0
    for step in range(steps):
        if frozen and one.running and step % frozen == 0:
            if stalls and still is not None and isinstance(still.what, Router) and one.clock > stalled_at + APART:
                stalled_at = one.clock
                still.what.stood_still += min(one.clock - since, STALL)
                one.counts["stood still"] += 1
            since = one.clock
            still = chance.choice(one.running)
            if late and chance.random() < 0.5:
                # It is suspended just before it receives an answer that has arrived.
                one.step(one.running.index(still), late=True)
        match chance.choices(range(12), (12, 6, 2, 2, 6, releases, 1, 3, failures, 1, 80, 12))[0]:
            case 0 if len(one.running) < 14:
                one.publish(chance.randrange(9), chance.choice(contexts), chance.choice(PARTITIONS))
            case 1 if len(one.running) < 14:
                moved = frozenset(context for context in contexts if chance.random() < 0.6)
                start_move(one, moved, chance.choice(PARTITIONS))
            case 2 if one.moves:
                go_on = old_go_on if chance.random() < 0.2 else moving.go_on
                one.start("mover", stepwise(go_on, one.asking, chance.randint(1, len(one.moves))))
            case 3 if one.moves:
                last = len(one.moves)
                one.start("aborter", stepwise(moving.abort, one.asking, chance.randint(max(1, last - 1), last)))
            case 4 if len(one.running) < 14:
                one.start("member", one.consume(chance.choice(sorted(one.consumers)), chance.choice(PARTITIONS)))
            case 5:
                one.release(chance.choice(contexts))
            case 6 if later < 3:
                later += 1
                one.add_consumer(f"later{later}", at_end=True)
            case 7:
                one.kill(chance.randrange(99), arrives=chance.random() < 0.5)
            case 8:
                one.fail(chance.randrange(99), arrives=chance.random() < 0.5)
            case 9:
                one.arrive(chance.randrange(99))
                one.cancel(chance.randrange(99), arrives=chance.random() < 0.5)
            case 11:
                one.look(chance.randrange(9))
            case _ if one.running:
                which = chance.randrange(len(one.running)) if chance.random() < 0.7 else len(one.running) - 1
                for _ in range(chance.choice((1, 1, 2, 4))):
                    if one.running and one.running[which % len(one.running)] is not still:
                        one.step(which, chance.randint(1, 5), late=late > 0 and chance.random() < late)


def run(seed: int, *, contexts: tuple[str, ...] = CONTEXTS, **options: Any) -> World:
    chances = ("steps", "releases", "failures", "frozen", "late", "stalls")
    of_chance = {name: options.pop(name) for name in chances if name in options}
    with closing(World(contexts, **options)) as one:
        act(one, seed, contexts, **of_chance)
        one.finish()
    return one


def test_chance_finds_nothing_wrong() -> None:
    """No run breaks a promise, and together they meet what the protocol is there for."""
    met: dict[str, int] = {}
    for seed in range(4 * EXAMPLES):
        print(f"seed {seed}")
        one = run(
            seed,
            steps=400,
            contexts=CONTEXTS[: 1 + seed % 2],
            releases=(0, 0, 1, 4)[seed % 4],
            failures=(1, 5)[seed % 2],
            frozen=(0, 40)[seed // 2 % 2],
            late=(0.0, 0.2)[seed // 4 % 2],
            stalls=seed % 3 == 0,
        )
        for what, count in one.counts.items():
            met[what] = met.get(what, 0) + count
    wanted = ("adoptions delivered", "switched", "aborted", "arrived late", "released", "killed publisher")
    for what in (*wanted, "told by a clock", "answered late", "stood still"):
        assert met[what] > EXAMPLES // 4, met


def broken(**methods: Any) -> Any:
    """A log of a partition that breaks a rule by these methods."""
    return type("Broken", (PartitionLog,), methods)


class _FencesIgnored(PartitionLog):
    def judge(self, offset: int, entry: Entry) -> Any:
        nobody = frozenset[str]()
        return super().judge(offset, Fence(entry.move_id, 0, nobody) if isinstance(entry, Fence) else entry)


class _MarkersRaiseNothing(PartitionLog):
    def _begin(self, offset: int, marker: Marker) -> None:
        floors = dict(self.floors)
        super()._begin(offset, marker)
        self.floors = floors


class _CursorsForgotten(PartitionLog):
    def __init__(self, floors: Any = None, *, open_holds: Any = None, position: int = 0) -> None:
        super().__init__(floors, open_holds=dict.fromkeys(open_holds or {}, 0), position=position)


class _EndedHoldsBeginAgain(PartitionLog):
    def _begin(self, offset: int, marker: Marker) -> None:
        self._open.setdefault(marker.move_id, 0)
        super()._begin(offset, marker)


class _EndedHoldsTakeNobody(PartitionLog):
    def _begin(self, offset: int, marker: Marker) -> None:
        before = dict(self._held_in)
        super()._begin(offset, marker)
        self._held_in = before | self._held_in


class _PositionForgotten(PartitionLog):
    def __init__(self, floors: Any = None, *, open_holds: Any = None, position: int = 0) -> None:
        super().__init__(floors, open_holds=open_holds)


class _NothingChecked(publication.Publications):
    def _stray(self, sent: CheckedSent) -> Any:
        self._world.sleep(0)
        return None


class _AdoptionsNotChecked(publication.Publications):
    def _stray(self, sent: CheckedSent) -> Any:
        return None if not hasattr(sent.wanted, "session") else super()._stray(sent)


class _DoubtfulAdoptionsSentAgain(publication.Publications):
    def _is_there(self, sent: CheckedSent) -> Any:
        self._world.sleep(0)
        return False


class _LooksServeForEver(publication.Publications):
    def _trusts(self) -> bool:
        return self._options.trust_clock and self._looked_at > 0


class _CountedFromTheEnd(publication.Publications):
    def _looked(self, mark: int, began: float) -> None:
        super()._looked(mark, self._clock())


_FAILING: dict[str, Any] = {"releases": 0, "failures": 15}
_FROZEN: dict[str, Any] = {"releases": 0, "failures": 0, "frozen": 40}

BROKEN: dict[str, dict[str, Any]] = {
    "strays are delivered": {"log": broken(_is_stray=lambda self, entry: False)},
    "fences say nothing": {"log": _FencesIgnored},
    "markers raise no floor": {"log": _MarkersRaiseNothing, "first": 109},
    "nothing is held": {
        "log": broken(_begin=lambda self, _, marker: self._raise_floors(marker.contexts, marker.epoch))
    },
    "a hold's cursor is forgotten": {"log": _CursorsForgotten},
    "holds that have ended begin again": {"log": _EndedHoldsBeginAgain},
    "the position is forgotten": {"log": _PositionForgotten},
    "a hold that has ended takes nobody out of one before it": {"log": _EndedHoldsTakeNobody, "first": 790},
    "holds end before all was read again": {"log": broken(is_caught_up=True), "omit": ("wait for the rescan",)},
    "nothing is checked after the confirm": {"publications": _NothingChecked},
    "adoptions are not checked": {"publications": _AdoptionsNotChecked},
    "an adoption in doubt is sent again": {"publications": _DoubtfulAdoptionsSentAgain, **_FAILING, "first": 242},
    "publishers go on before the fence": {"omit": ("stop before the fence",)},
    "a step of another attempt is taken": {"omit": ("attempt",)},
    "publishers do not ask for markers": {"omit": ("floor by markers",), **_FAILING, "releases": 6},
    "reading begins behind open holds' markers": {"omit": ("rescan holds",)},
    "reading begins behind a fence nobody knows": {"omit": ("rescan fences",), "releases": 6, "first": 976},
    "no floors where reading begins": {"omit": ("floors from moves",)},
    "holds end before the source is read": {"omit": ("source position",)},
    "holds end before those of the source": {"omit": ("holds of the source",)},
    "two members write": {"omit": ("version",)},
    "moves wait for nobody's look": {"wait": 0.0},
    "moves wait for a fifth of the time": {"wait": 0.2, **_FROZEN},
    "looks serve for ever": {"publications": _LooksServeForEver, **_FROZEN},
    "looks serve from where they ended": {"publications": _CountedFromTheEnd, **_FROZEN, "late": 0.3},
    "a name begins wherever the partitions end": {"omit": ("consistent starts",), **_FROZEN},
}


def seeds_to_failure(broken: dict[str, Any], most: int) -> int | None:
    """How many runs it takes until the world notices, from the first of those that are tried; None: it does not."""
    first: int = broken.get("first", 0)
    options = {name: value for name, value in broken.items() if name != "first"}
    for seed in range(first, first + most):
        try:
            run(seed, steps=500, contexts=CONTEXTS[: 1 + seed % 2], **{"releases": seed % 2, **options})
        except (Wrong, AssertionError, ValueError):
            return seed + 1 - first
    return None


@pytest.mark.parametrize("what", BROKEN)
def test_each_rule_is_needed(what: str) -> None:
    """With a rule left out, promises are broken, and the world notices."""
    # Moves that wait for publishers leave few strays: test rules that are not about looks without such waits.
    without = {} if "look" in what or "wait" in what else {"trust": False}
    assert seeds_to_failure({**without, **BROKEN[what]}, 400) is not None


def begun(world: World, begin: Any, *given: Any) -> Any:
    begin(*given)
    return world.running[-1]


def go_on(world: World, actor: Any, until: str | None = None) -> None:
    while actor in world.running and not (until and actor.request.what == until):
        world._perform(actor)


def finish(world: World, *, is_wrong: bool) -> None:
    with pytest.raises(Wrong) if is_wrong else nullcontext():
        world.finish()
    assert is_wrong or world.counts["told by a clock"] == 1  # the first message alone


@pytest.mark.parametrize("wait", [1.0, 1 - STALL_S / MOVE_WAIT_S], ids=["with the margin", "without"])
def test_a_move_waits_for_a_clock_that_stood_still(wait: float) -> None:
    """A publisher's machine is paused with its clock between look and confirm, for as long as that may be."""
    world = World(("a",), wait=wait)
    world.add_consumer("first", at_end=False)
    slow = world.routers[1]
    go_on(world, begun(world, world.publish, 1, "a", "p0"))
    publication_of_a = begun(world, world.publish, 1, "a", "p0")
    go_on(world, publication_of_a, "send")
    go_on(world, begun(world, world.look, 1))
    mover = begun(world, start_move, world, frozenset("a"), "p1")
    go_on(world, mover, "publish")
    world._perform(mover)
    slow.stood_still += STALL
    go_on(world, publication_of_a)
    finish(world, is_wrong=wait < 1)


def test_a_fence_of_an_earlier_release_is_not_taken_for_the_moves() -> None:
    """A mover of that release published one without an epoch, and says where it is once the move has its own."""
    world = World(("a",))
    go_on(world, begun(world, world.publish, 0, "a", "p0"))
    mover = begun(world, start_move, world, frozenset("a"), "p1")
    go_on(world, mover, "assign_fence_epoch")
    old = begun(world, world.start, "mover", stepwise(old_go_on, world.asking, 1))
    go_on(world, old, "set_fenced")
    world._perform(mover)
    go_on(world, old)
    go_on(world, mover)
    move = world.moves[1]
    assert move.fence_offset is not None
    assert world.streams["p0"][move.fence_offset] == Fence(1, move.fence_epoch, frozenset("a"))
