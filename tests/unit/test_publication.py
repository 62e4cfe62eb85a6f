"""Publications, performed step by step in memory: where messages go, what is reported, and strays."""

from collections.abc import Generator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relatum.contexts import AffinityOptions
from relatum.contexts._partition_log import Adoption, Data, Fence, Marker, Placed
from relatum.contexts._placement_cache import PlacementCache, Sent, Unchecked
from relatum.contexts._placements import MoveStep, Placement, PlacementState
from relatum.contexts._publication import Publications
from relatum.errors import BrokerUnavailable, DatabaseUnavailable
from tests.support import serial_world
from tests.support.serial_world import Asked, Unsettled, World, stepwise


class _World(World):
    """The database and the partitions of the model, and a clock that only sleeping moves."""

    def __init__(self) -> None:
        super().__init__((), routers=0)
        self.time = 0.0
        self.is_away = False
        self.refuses: list[Exception] = []

    def perform(self, request: Any) -> Any:
        match request:
            case Asked("changes" | "place" | "fence_after") if self.is_away:
                raise DatabaseUnavailable("away")
            case Asked("send", (placement, sent)):
                self.streams[placement.stream].append(Data(placement.name, sent.wanted))
            case Asked("adopt", (stream, adoption)):
                refusal = self.refuses.pop() if self.refuses else None
                if refusal is None or refusal.args == ("arrives",):
                    self.streams[stream].append(adoption)
                if refusal is not None:
                    raise refusal
            case Asked("sleep", (seconds,)):
                self.time += seconds
            case _:
                return self.answer(request)

    def begin(self, name: str, target: str) -> MoveStep:
        source = self.placements[name].stream
        ends = len(self.streams[source]), len(self.streams[target])
        begun = self.begin_move(source, target, frozenset({name}), *ends)
        return self.assign_fence_epoch(begun.move_id)

    def switch(self, move: MoveStep) -> None:
        self.streams[move.target].append(Marker(move.move_id, move.epoch, move.names, move.source, 0))
        self.generation += 1
        for name in move.names:
            self._set(name, stream=move.target, epoch=move.epoch, state=PlacementState.OPEN, move_id=None)

    def move(self, name: str, target: str) -> None:
        begun = self.begin(name, target)
        self.streams[begun.source].append(Fence(begun.move_id, begun.fence_epoch, begun.names))
        self.switch(begun)


class _Run:
    def __init__(self, world: _World, steps: Generator[Any, Any, Any]) -> None:
        self.world = world
        self.steps = steps
        self.asked: list[str] = []
        self.result: Any = None
        self.request: Any = None
        self._next(lambda: next(steps))

    def _next(self, go: Any) -> None:
        try:
            self.request = go()
            self.asked.append(self.request.what)
        except StopIteration as end:
            self.request, self.result = None, end.value

    def step(self) -> None:
        try:
            answer = self.world.perform(self.request)
        except Exception as raised:
            error = raised
            self._next(lambda: self.steps.throw(error))
        else:
            self._next(lambda: self.steps.send(answer))

    def until(self, what: str) -> "_Run":
        while self.request is None or self.request.what != what:
            assert self.request is not None, f"ended without {what}: {self.asked}"
            self.step()
        return self

    def end(self) -> "_Run":
        while self.request is not None:
            self.step()
        return self

    def end_unsettled(self, how: str) -> None:
        """Its adoption arrives, or is lost, and has no confirm."""
        self.world.refuses.append(BrokerUnavailable(how))
        with pytest.raises(Unsettled):
            self.end()


@pytest.fixture
def world() -> _World:
    return _World()


def routed(world: _World, **options: Any) -> Publications:
    """The publications of one router, which asks after each message unless it trusts its clock."""
    given: dict[str, Any] = {"trust_clock": False, "when_database_away": "wait"} | options
    return Publications(world.asking, lambda: world.time, AffinityOptions(**given))


def begun(world: _World, publications: Publications, name: str = "x") -> _Run:
    return _Run(world, stepwise(serial_world.publish, publications, world.asking, name))


def looking(world: _World, publications: Publications) -> _Run:
    return _Run(world, stepwise(publications.look))


def publish(world: _World, publications: Publications, name: str = "x") -> _Run:
    return begun(world, publications, name).end()


def started(world: _World, **options: Any) -> Publications:
    publications = routed(world, **options)
    publish(world, publications)
    return publications


def under_way(world: _World, publications: Publications) -> _Run:
    publish(world, publications)
    return begun(world, publications).until("send")


def data_in(world: _World, stream: str) -> list[int]:
    return [each.placed.number for each in world.streams[stream] if isinstance(each, Data) and each.placed]


def test_a_first_message_is_placed_sent_and_checked(world: _World) -> None:
    """A name's first message asks for its placement; a message counts after a look that follows its confirm."""
    publications = routed(world)
    run = publish(world, publications)
    assert (run.asked, run.result.name) == (["changes", "place", "send", "changes"], "x")
    assert world.streams["p0"] == [Data("x", run.result.wanted)]
    assert publish(world, publications).asked == ["send", "changes"]
    assert not len(publications.unchecked)


def test_an_older_look_is_repeated_before_the_message(world: _World) -> None:
    """A router that was suspended looks before it sends, so that a move it missed makes no stray."""
    publications = started(world)
    world.move("x", "p1")
    world.time += 1.0
    run = publish(world, publications)
    assert run.asked == ["changes", "send", "changes"]
    assert data_in(world, "p1") == [2]


def test_a_move_after_a_restore_of_the_database_is_noticed(world: _World) -> None:
    """A database restored from a backup has a lower generation, and so have its next changes."""
    world.generation = 50
    publications = started(world)
    world.generation = 1
    world.move("x", "p1")
    world.time += 1.0
    publish(world, publications)
    assert data_in(world, "p1") == [2]


def slept(world: _World, **facts: Any) -> _Run:
    """A publication whose context moved between placement and confirm, up to its search; what is known of the move."""
    publications = routed(world)
    run = under_way(world, publications)
    world.move("x", "p1")
    world.change(1, **facts)
    return run.until("search")


ENDS: dict[str, tuple[dict[str, Any], bool]] = {
    "behind a fence": ({"fence_offset": 1}, True),
    "behind a marker": (
        {
            "source": "p2",
            "target": "p0",
            "scan_from": 90,
            "target_scan_from": 0,
            "fence_offset": 95,
            "marker_offset": 1,
        },
        True,
    ),
    "before a fence, or dropped with it": ({"fence_offset": 5}, True),
    "not known": ({}, False),
}
"""What is known about the end of a placement, and whether an offset alone then shows what is a stray."""


@pytest.mark.parametrize("what", ENDS)
def test_what_lies_behind_an_end_is_a_stray(world: _World, what: str) -> None:
    """A message behind a known end of its placement is a stray; for an unknown end the partition is searched."""
    facts, is_known = ENDS[what]
    run = slept(world, **facts)
    if facts.get("fence_offset") != 5:
        assert run.request.given[1:] == (1, is_known)
    run.end()
    assert (world.streams["p1"][-1] == Adoption("x", 2, "p0", 2)) == (facts.get("fence_offset") != 5)


@pytest.mark.parametrize("trust_clock", [False, True])
@pytest.mark.parametrize("how", ["cancelled", "arrives", "is lost"])
def test_nothing_overtakes_an_adoption_whose_confirm_did_not_come(world: _World, how: str, trust_clock: bool) -> None:
    """The next message follows an unconfirmed adoption, also if a recent look spares it its own."""
    publications = started(world, trust_clock=trust_clock)
    run = begun(world, publications).until("send")
    world.move("x", "p1")
    looking(world, publications).end()
    run.until("adopt")
    if how == "cancelled":
        run.steps.close()
    else:
        run.end_unsettled(how)
    publish(world, publications)
    assert world.streams["p1"][1:] == [Adoption("x", 2, "p0", 2), Data("x", Placed(2, publications.name, 3))]
    assert not len(publications.unchecked)


def test_an_adoption_without_a_confirm_is_found_in_front_of_a_later_move(world: _World) -> None:
    """A set was placed anew, so no move began its epoch: its adoption is searched for from the partition's start."""
    publications = started(world)
    run = begun(world, publications).until("send")
    world.move("x", "p1")
    world.generation += 1
    world._set("x", stream="p2", epoch=world.next_epoch())
    run.until("adopt")
    run.end_unsettled("arrives")
    world.streams["p2"].append(Data("y", None))
    world.move("x", "p0")
    publish(world, publications)
    adoptions = [each for stream in world.streams.values() for each in stream if isinstance(each, Adoption)]
    assert adoptions == [Adoption("x", 3, "p0", 2)]


def test_an_adoption_that_arrives_behind_the_next_fence_is_a_stray(world: _World) -> None:
    """An unconfirmed adoption arrives, and its context moves on, after the look and before the search that finds it."""
    publications = started(world)
    run = begun(world, publications).until("send")
    world.move("x", "p1")
    run.until("adopt")
    run.end_unsettled("is lost")
    run = begun(world, publications).until("search")
    world.move("x", "p2")
    world.streams["p1"].append(Adoption("x", 2, "p0", 2))
    run.end()
    assert world.streams["p2"][1:] == [Adoption("x", 3, "p0", 2), Data("x", Placed(3, publications.name, 3))]


@pytest.mark.parametrize("how", ["cancelled", "away", "away and known"])
def test_nothing_overtakes_a_stray_that_was_not_looked_for(world: _World, how: str) -> None:
    """A look that began before its confirm brings the new placement to the router, and says nothing of the stray."""
    publications = routed(world, when_database_away="known" if "known" in how else "fail")
    run = under_way(world, publications)
    world.move("x", "p1")
    look = looking(world, publications)
    run.until("changes")
    if "known" not in how:
        look.end()
    if how == "cancelled":
        run.steps.close()
    else:
        world.is_away = True
        with nullcontext() if "known" in how else pytest.raises(Unsettled):
            run.end()
        world.is_away = False
    look.end()
    publish(world, publications)
    assert world.streams["p1"][1:] == [Adoption("x", 2, "p0", 2), Data("x", Placed(2, publications.name, 3))]
    assert ("known" in how) or not len(publications.unchecked)


def test_a_look_serves_for_a_moment(world: _World) -> None:
    """A message relies on the look before it for less than 0.2 s from the start of that look."""
    publications = started(world, trust_clock=True)
    world.time += 0.19
    assert publish(world, publications).asked == ["send"]
    run = begun(world, publications).until("send")
    world.time += 0.01
    assert run.end().asked == ["send", "changes"]
    world.time += 0.2
    assert publish(world, publications).asked == ["changes", "send"]
    assert publications.asked == 1
    world = _World()
    publications = started(world, trust_clock=True)
    world.time += 0.2
    look = looking(world, publications)
    world.time += 0.19
    look.end()
    assert publish(world, publications).asked == ["send"]
    world.time += 0.01
    assert publish(world, publications).asked[0] == "changes"


def test_where_the_database_is_far_away_each_message_asks(world: _World) -> None:
    """No look is ever young enough then: messages take two of them, and count anyway."""
    publications = started(world, trust_clock=True)
    for _ in range(3):
        world.time += 1.0
        run = begun(world, publications)
        while run.request is not None:
            world.time += 0.25 * (run.request.what == "changes")
            run.step()
    assert data_in(world, "p0") == [1, 2, 3, 4]
    assert publications.asked == 3
    assert not len(publications.unchecked)


def test_a_message_of_a_placement_that_is_over_counts_by_no_clock(world: _World) -> None:
    """A look that shows a move says nothing for what was sent under the placement before."""
    publications = started(world, trust_clock=True)
    run = begun(world, publications).until("send")
    world.begin("x", "p1")
    looking(world, publications).end()
    assert "changes" in run.end().asked


def test_known_placements_go_on_without_the_database(world: _World, monkeypatch: pytest.MonkeyPatch) -> None:
    """With "known", so many messages of known names go out unchecked; they are checked when the database is back."""
    monkeypatch.setattr("relatum.contexts._publication.UNCHECKED_MAX", 2)
    publications = started(world, when_database_away="known")
    world.is_away = True
    world.time += 1.0
    publish(world, publications)
    assert len(publications.unchecked) == 1
    world.time += 0.5
    assert publish(world, publications).asked == ["send"]
    for name in ("x", "unknown"):
        with pytest.raises(DatabaseUnavailable):
            publish(world, publications, name)
    assert data_in(world, "p0") == [1, 2, 3]
    world.is_away = False
    world.move("x", "p1")
    world.time += 1.0
    publish(world, publications)
    assert data_in(world, "p1") == [4]
    assert not len(publications.unchecked)


def test_a_suspected_stray_waits_for_the_database(world: _World) -> None:
    """Once a message is known to be of a placement that is over, nothing of its name is sent before it is settled."""
    publications = routed(world, when_database_away="known", timeout_s=0.0)
    run = under_way(world, publications)
    world.move("x", "p1")
    world.is_away = True
    run.end()
    world.is_away = False
    world.time += 1.0
    publish(world, publications, "y")
    world.is_away = True
    with pytest.raises(DatabaseUnavailable):
        publish(world, publications)
    assert data_in(world, "p1") == []


def placed(name: str, epoch: int, state: PlacementState = PlacementState.OPEN) -> Placement:
    return Placement(name, 1, "p0", "p0", epoch, state)


def test_a_placement_that_was_under_way_is_not_kept_where_something_changed_meanwhile() -> None:
    """The change may be its own; it is read again by the next message."""
    cache = PlacementCache(10)
    cache.advance(1, None)
    cache.advance(2, [placed("y", 5)])
    cache.add(placed("x", 4), 1)
    assert cache.get("x") is None
    cache.add(placed("x", 4), 2)
    assert cache.get("x") is not None
    cache.advance(3, None)
    assert cache.get("x") is None


def test_the_cache_drops_what_was_not_used_longest() -> None:
    """Above its bound the name that was not asked for longest goes."""
    cache = PlacementCache(2)
    cache.advance(1, None)
    for name in "xy":
        cache.add(placed(name, 1), 1)
    cache.get("x")
    cache.add(placed("z", 1), 1)
    assert [cache.get(name) is not None for name in "xyz"] == [True, False, True]


@given(st.data())
def test_the_cache_is_right_as_of_its_generation(data: st.DataObject) -> None:
    """Whatever reads and changes overlap, what the cache holds is what the database held at the cache's generation."""
    names = "xyz"
    history: list[dict[str, tuple[int, int]]] = [dict.fromkeys(names, (1, 0))]
    cache = PlacementCache(2)
    cache.advance(0, None)
    reads: list[tuple[str, int, int]] = []
    changes: list[tuple[int, list[Placement]]] = []
    for _ in range(data.draw(st.integers(1, 30))):
        match data.draw(st.sampled_from(["change", "read", "keep", "ask", "advance"])):
            case "change":
                name = data.draw(st.sampled_from(names))
                history.append({**history[-1], name: (history[-1][name][0] + 1, len(history))})
            case "read":
                name = data.draw(st.sampled_from(names))
                reads.append((name, history[-1][name][0], cache.generation or 0))
            case "keep" if reads:
                name, epoch, as_of = reads.pop(data.draw(st.integers(0, len(reads) - 1)))
                cache.add(placed(name, epoch), as_of)
            case "ask":
                since = cache.generation or 0
                changed = [placed(name, epoch) for name, (epoch, at) in history[-1].items() if at > since]
                changes.append((len(history) - 1, changed))
            case "advance" if changes:
                cache.advance(*changes.pop(data.draw(st.integers(0, len(changes) - 1))))
        for name in names:
            kept = cache.get(name)
            if kept is not None:
                # Rows that were read later than the generation are newer than it, never older.
                assert kept.epoch >= history[cache.generation or 0][name][0]


def sent_of(name: str, number: int, epoch: int = 1) -> Sent:
    return Sent(name, "p0", Placed(epoch, "0" * 16, number))


def test_a_look_forgets_what_was_confirmed_before_it_and_counts() -> None:
    """What is confirmed after the mark, or under a placement that is over, or not surely there, stays in its order."""
    cache, unchecked = PlacementCache(10), Unchecked(10)
    cache.advance(2, None)
    cache.add(placed("x", 2), 2)
    old, doubtful, good = sent_of("x", 1), replace(sent_of("x", 2, 2), is_doubtful=True), sent_of("x", 3, 2)
    for each in (old, doubtful, good):
        unchecked.add(each)
    mark = unchecked.mark()
    late = sent_of("x", 4, 2)
    unchecked.add(late)
    unchecked.checked(mark, cache)
    assert (unchecked.of("x"), unchecked.of("x", mark)) == ([old, doubtful, late], [old, doubtful])
    unchecked.checked(unchecked.mark(), cache)
    assert unchecked.of("x") == [old, doubtful]


def test_what_replaces_another_keeps_its_place_and_is_confirmed_anew() -> None:
    """An adoption stands where its message stood; a look that began before its confirm says nothing about it."""
    cache, unchecked = PlacementCache(10), Unchecked(10)
    cache.advance(1, None)
    cache.add(placed("x", 2), 1)
    first, second, by = sent_of("x", 1), sent_of("x", 2), sent_of("x", 3, 2)
    unchecked.add(first)
    unchecked.add(second)
    mark = unchecked.mark()
    unchecked.replace(first, by)
    unchecked.checked(mark, cache)
    assert unchecked.of("x") == [by, second]
    unchecked.checked(unchecked.mark(), cache)
    assert unchecked.of("x") == [second]
    unchecked.remove(second)
    unchecked.remove(second)
    assert (unchecked.names(), len(unchecked)) == ([], 0)
