"""The steps of a publication, performed in memory: where the message goes, what is told, and what becomes of strays."""

import os
from collections.abc import Callable, Generator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relatum.contexts import Move, MoveState
from relatum.contexts.placement._cache import PlacementCache, Unchecked
from relatum.contexts.placement._entries import Adoption, Data, Entry, Fence, Marker, Placed
from relatum.contexts.placement._model import Placement, PlacementState
from relatum.contexts.placement._publication import Publications, Unsettled
from relatum.contexts.placement._publication_requests import (
    Adopt,
    EndSession,
    FindMove,
    Place,
    ReadChanges,
    ReadGeneration,
    RenewSession,
    Search,
    Send,
    Sent,
    Sleep,
    StrayFinder,
    TakeOver,
)
from relatum.errors import BrokerUnavailable, ContextMoving, DatabaseUnavailable


class _World:
    """A database and a broker in memory, and a clock that only sleeping moves."""

    def __init__(self) -> None:
        self.now = 0.0
        self.generation = 7
        self.epoch = 0
        self.placements: dict[str, Placement] = {}
        self.streams: dict[str, list[Entry]] = {"a": [], "b": [], "c": []}
        self.moves: list[tuple[str, Move]] = []
        self.sessions: dict[str, int] = {}
        self.is_away = False
        self.refuses: list[Exception] = []
        self.takes_over: Callable[[], None] = lambda: None

    def perform(self, request: Any) -> Any:
        if isinstance(request, ReadGeneration | ReadChanges | Place | FindMove | RenewSession) and self.is_away:
            raise DatabaseUnavailable("away")
        return getattr(self, type(request).__name__)(request)

    def ReadGeneration(self, _request: ReadGeneration) -> int:  # noqa: N802
        return self.generation

    def ReadChanges(self, request: ReadChanges) -> Any:  # noqa: N802
        return self.generation, [each for each in self.placements.values() if each.generation > request.since]

    def Place(self, request: Place) -> Placement:  # noqa: N802
        if request.name not in self.placements:
            self.put(request.name, request.stream or "a")
        return self.placements[request.name]

    def Send(self, request: Send) -> str:  # noqa: N802
        self.streams[request.placement.stream].append(Data(request.placement.name, request.placed))
        return "confirmed"

    def FindMove(self, request: FindMove) -> Move | None:  # noqa: N802
        for name, move in self.moves:
            out = move.source == request.stream and move.fence_epoch > request.epoch
            into = move.target == request.stream and move.epoch > request.epoch
            if name == request.name and (out or into):
                return move
        return None

    def Search(self, request: Search) -> int | None:  # noqa: N802
        search = StrayFinder(request.sent, anywhere=request.anywhere)
        for offset, entry in enumerate(self.streams[request.sent.stream]):
            if offset >= request.from_offset and not search.is_over:
                at = search.look(offset, entry)
                if at is not None:
                    return at
        return None

    def Adopt(self, request: Adopt) -> None:  # noqa: N802
        refusal = self.refuses.pop() if self.refuses else None
        if refusal is None or refusal.args == ("arrives",):
            self.streams[request.stream].append(request.adoption)
        if refusal is not None:
            raise refusal

    def RenewSession(self, request: RenewSession) -> None:  # noqa: N802
        self.sessions["x"] = request.seen

    def EndSession(self, _request: EndSession) -> None:  # noqa: N802
        self.sessions.clear()

    def TakeOver(self, _request: TakeOver) -> None:  # noqa: N802
        self.takes_over()

    def Sleep(self, request: Sleep) -> None:  # noqa: N802
        self.now += request.seconds

    # --- what movers and others do --------------------------------------------------------------------------------

    def put(
        self, name: str, stream: str, state: PlacementState = PlacementState.OPEN, move_id: int | None = None
    ) -> None:
        self.epoch += 1
        self.placements[name] = Placement(name, 1, stream, stream, self.epoch, state, move_id, self.generation)

    def begin(self, name: str, target: str) -> Move:
        placement = self.placements[name]
        self.epoch += 1
        self.generation += 1
        source = placement.stream
        move = Move(
            len(self.moves) + 1, source, target, 1, 2, MoveState.FENCING, False, 1, 1, self.epoch, self.epoch,
            len(self.streams[source]), len(self.streams[target]), None, None, None, None, None, None, None, None,
        )  # fmt: skip
        self.moves.append((name, move))
        self.placements[name] = replace(
            placement, state=PlacementState.MOVING, move_id=move.move_id, generation=self.generation
        )
        return move

    def fence(self, name: str, move: Move) -> None:
        self.streams[move.source].append(Fence(move.move_id, move.fence_epoch, frozenset({name})))

    def switch(self, name: str, move: Move) -> None:
        self.streams[move.target].append(Marker(move.move_id, move.epoch, frozenset({name}), move.source, 0))
        self.generation += 1
        self.placements[name] = Placement(
            name, 2, move.target, move.target, move.epoch, PlacementState.OPEN, None, self.generation
        )

    def move(self, name: str, target: str) -> None:
        begun = self.begin(name, target)
        self.fence(name, begun)
        self.switch(name, begun)


class _Run:
    """Steps that are performed one by one."""

    def __init__(self, world: _World, steps: Generator[Any, Any, Any]) -> None:
        self.world = world
        self.steps = steps
        self.asked: list[type] = []
        self.result: Any = None
        self.request: Any = None
        self._next(lambda: next(steps))

    def _next(self, go: Any) -> None:
        try:
            self.request = go()
            self.asked.append(type(self.request))
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

    def until(self, kind: type) -> "_Run":
        while not isinstance(self.request, kind):
            assert self.request is not None, f"ended without {kind.__name__}: {self.asked}"
            self.step()
        return self

    def end(self) -> "_Run":
        while self.request is not None:
            self.step()
        return self


@pytest.fixture
def world() -> _World:
    """A world without placements."""
    return _World()


def routed(world: _World, **options: Any) -> Publications:
    """The publications of one router."""
    return Publications(lambda: world.now, **options)


def publish(world: _World, publications: Publications, name: str = "x") -> _Run:
    """One message published, to the end."""
    return _Run(world, publications.publish(name)).end()


def started(world: _World, **options: Any) -> Publications:
    """The publications of a router that has published the first message of "x"."""
    publications = routed(world, **options)
    publish(world, publications)
    return publications


def under_way(world: _World, publications: Publications) -> _Run:
    """A second message of a name, about to be sent."""
    publish(world, publications)
    return _Run(world, publications.publish("x")).until(Send)


def data_in(world: _World, stream: str) -> list[int]:
    """The numbers of the messages in a stream."""
    return [each.placed.number for each in world.streams[stream] if isinstance(each, Data) and each.placed]


def test_a_first_message_is_placed_sent_and_checked(world: _World) -> None:
    """The first message of a name asks for its placement; each is told only after a look that follows its confirm."""
    publications = routed(world)
    run = publish(world, publications)
    assert run.asked == [ReadGeneration, Place, Send, ReadGeneration]
    assert run.result.result == "confirmed"
    assert world.streams["a"] == [Data("x", run.result.placed)]
    assert publish(world, publications).asked == [Send, ReadGeneration]
    assert not len(publications.unchecked)


def test_an_older_look_is_repeated_before_the_message(world: _World) -> None:
    """A router that stood still looks before it sends, so that a move it missed makes no stray."""
    publications = started(world)
    world.move("x", "b")
    world.now += 1.0
    run = publish(world, publications)
    assert run.asked == [ReadGeneration, ReadChanges, Send, ReadGeneration]
    assert data_in(world, "b") == [2]


def test_a_router_takes_over_a_move_that_its_message_waits_for(world: _World) -> None:
    """After a second, and then once a second: the move may be abandoned."""
    publications = started(world)
    move = world.begin("x", "b")
    world.now += 1.0
    world.takes_over = lambda: world.switch("x", move) if world.now > 2.5 else None
    run = publish(world, publications)
    assert run.asked.count(TakeOver) == 2
    assert data_in(world, "b") == [2]
    assert world.now == pytest.approx(3.0, abs=0.05)


def test_a_move_that_does_not_end_fails_with_nothing_sent(world: _World) -> None:
    """After `timeout_s` the error names the context and the move, and the message is in no stream."""
    publications = started(world, timeout_s=1.0)
    world.begin("x", "b")
    world.now += 1.0
    with pytest.raises(ContextMoving) as caught:
        publish(world, publications)
    assert (caught.value.context, caught.value.move_id) == ("x", 1)
    assert data_in(world, "a") == [1]
    assert world.now == pytest.approx(2.0, abs=0.01)


def test_an_adoption_whose_confirm_was_lost_may_be_a_stray_by_then(world: _World) -> None:
    """An adoption that arrived unconfirmed, behind the next fence, is repeated where the context is."""
    publications = routed(world)
    run = under_way(world, publications)
    world.move("x", "b")
    run.until(Adopt)
    world.move("x", "c")
    world.refuses.append(BrokerUnavailable("arrives"))
    with pytest.raises(Unsettled):
        run.end()
    _Run(world, publications.settle("x")).end()
    assert world.streams["c"][1:] == [Adoption("x", 3, "a", 2)]


def test_a_message_of_unknown_outcome_counts_only_before_the_fence(world: _World) -> None:
    """A message that was found in its partition counts where no fence is before it, and not behind one."""
    publications = routed(world)
    first = publish(world, publications)
    early = Sent("x", "a", first.result.placed, 7)
    world.move("x", "b")
    world.streams["a"].append(Data("x", Placed(1, publications.name, 9)))
    late = Sent("x", "a", Placed(1, publications.name, 9), 7)
    assert _Run(world, publications.counts(early)).end().result is True
    assert _Run(world, publications.counts(late)).end().result is False


# --- ends that retention has dropped while the publisher slept --------------------------------------------------------


def slept(world: _World, **facts: Any) -> _Run:
    """A publication whose context moved between placement and confirm, up to its search; what is known of the move."""
    publications = routed(world)
    run = under_way(world, publications)
    world.move("x", "b")
    name, move = world.moves[0]
    world.moves[0] = name, replace(move, **facts)
    return run.until(Search)


@pytest.mark.parametrize(
    "facts",
    [
        {"fence_offset": 1},
        {"source": "c", "target": "a", "scan_from": 90, "target_scan_from": 0, "fence_offset": 95, "marker_offset": 1},
    ],
    ids=["fence", "marker"],
)
def test_what_lies_behind_a_known_end_is_a_stray(world: _World, facts: dict[str, Any]) -> None:
    """Its offset alone tells: no fence or marker need be met on the way."""
    run = slept(world, **facts)
    assert (run.request.from_offset, run.request.anywhere) == (1, True)
    run.end()
    assert world.streams["b"][-1] == Adoption("x", 2, "a", 2)


def test_what_is_not_behind_a_known_end_counts(world: _World) -> None:
    """It lies before the fence, or retention has dropped it with the fence."""
    assert Adopt not in slept(world, fence_offset=5).end().asked


def test_an_end_that_is_not_known_is_looked_for(world: _World) -> None:
    """The search begins where the fence can lie at the earliest, and goes by the fence it meets."""
    request = slept(world).request
    assert (request.from_offset, request.anywhere) == (1, False)


# --- sessions: what the publisher's own clock tells -------------------------------------------------------------------


def keep(world: _World, publications: Publications, published: int = 2) -> _Run:
    """What the thread of a router does now and then."""
    return _Run(world, publications.keep(published)).end()


def kept(world: _World, *, session_s: float = 2.0) -> Publications:
    """Publications whose session is kept."""
    publications = started(world, session_s=session_s)
    keep(world, publications)
    return publications


def test_while_a_session_holds_nobody_is_asked(world: _World) -> None:
    """Neither before a message nor behind its confirm; when it has lapsed, the database is asked again."""
    publications = started(world, session_s=2.0)
    assert keep(world, publications).asked == [ReadGeneration, RenewSession, ReadGeneration]
    assert publish(world, publications).asked == [Send]
    world.now += 1.97
    assert publish(world, publications).asked == [Send]
    assert publications.asked == 1
    world.now += 0.01
    assert publish(world, publications).asked == [ReadGeneration, Send, ReadGeneration]
    assert publications.asked == 2


def test_a_session_speaks_for_no_placement_that_is_over(world: _World) -> None:
    """What was sent before its publisher learned of a move is looked at, however well its session holds."""
    publications = kept(world, session_s=2.0)
    run = _Run(world, publications.publish("x")).until(Send)
    world.begin("x", "b")
    assert keep(world, publications).asked == [
        ReadGeneration, ReadChanges, RenewSession, ReadGeneration
    ]  # fmt: skip
    assert world.sessions == {"x": world.generation}
    assert FindMove in run.end().asked


@pytest.mark.parametrize("session_s", [0.0, 2.0])
@pytest.mark.parametrize("how", ["cancelled", "arrives", "is lost"])
def test_nothing_overtakes_an_adoption_whose_confirm_did_not_come(world: _World, how: str, session_s: float) -> None:
    """Also where the next message need not look, just after a look or in a session, it comes behind the adoption."""
    publications = kept(world, session_s=session_s)
    run = _Run(world, publications.publish("x")).until(Send)
    world.move("x", "b")
    keep(world, publications)
    run.until(Adopt)
    if how == "cancelled":
        run.steps.close()
    else:
        world.refuses.append(BrokerUnavailable(how))
        with pytest.raises(Unsettled):
            run.end()
    publish(world, publications)
    assert world.streams["b"][1:] == [Adoption("x", 2, "a", 2), Data("x", Placed(2, publications.name, 3))]
    assert not len(publications.unchecked)


@pytest.mark.parametrize("how", ["cancelled", "away"])
def test_nothing_overtakes_a_stray_that_was_not_looked_for(world: _World, how: str) -> None:
    """A look that began before its confirm brings the new placement to the router, and says nothing of the stray."""
    publications = routed(world, when_away="fail")
    run = under_way(world, publications)
    world.move("x", "b")
    look = _Run(world, publications.look())
    run.until(ReadGeneration)
    look.end()
    if how == "cancelled":
        run.steps.close()
    else:
        world.is_away = True
        with pytest.raises(Unsettled):
            run.end()
        world.is_away = False
    publish(world, publications)
    assert world.streams["b"][1:] == [Adoption("x", 2, "a", 2), Data("x", Placed(2, publications.name, 3))]
    assert not len(publications.unchecked)


def test_nothing_overtakes_what_went_unchecked_while_the_database_was_away(world: _World) -> None:
    """With "known", too: a look that began before its confirm says nothing of it."""
    publications = routed(world, when_away="known")
    run = under_way(world, publications)
    world.move("x", "b")
    look = _Run(world, publications.look())
    run.until(ReadGeneration)
    world.is_away = True
    run.end()
    world.is_away = False
    look.end()
    publish(world, publications)
    assert world.streams["b"][1:] == [Adoption("x", 2, "a", 2), Data("x", Placed(2, publications.name, 3))]


def test_movers_are_told_at_once(world: _World) -> None:
    """A session that is not due is renewed where somebody may wait for it, also where the first try fails."""
    publications = kept(world, session_s=2.0)
    assert keep(world, publications).asked == [ReadGeneration]
    world.begin("x", "b")
    run = _Run(world, publications.keep(1)).until(RenewSession)
    world.is_away = True
    with pytest.raises(DatabaseUnavailable):
        run.end()
    world.is_away = False
    assert RenewSession in keep(world, publications, 0).asked


def test_who_publishes_little_has_no_session(world: _World) -> None:
    """A session begins with the second message between two looks, and ends a moment after the last one."""
    publications = started(world, session_s=2.0)
    assert keep(world, publications, 1).asked == []
    assert keep(world, publications, 2).result is True
    world.now += 0.5
    assert keep(world, publications, 0).asked == [ReadGeneration]
    world.now += 0.5
    run = keep(world, publications, 0)
    assert (run.asked, run.result, world.sessions) == ([EndSession], False, {})
    assert publish(world, publications).asked == [ReadGeneration, Send, ReadGeneration]


def test_a_renewal_brings_no_session_back_that_was_ended(world: _World) -> None:
    """Closing the router ends it for good, whatever its thread does just then."""
    publications = started(world, session_s=2.0)
    run = _Run(world, publications.keep(2)).until(RenewSession)
    assert _Run(world, publications.end_session(for_good=True)).end().asked == [EndSession]
    run.end()
    assert not publications.session.holds()
    assert keep(world, publications).result is False


def test_a_child_has_no_session(world: _World) -> None:
    """In a process that was forked off nobody renews it, and the row is the parent's."""
    publications = kept(world, session_s=2.0)
    assert publications.session.holds()
    child = os.fork()
    if not child:
        os._exit(int(publications.session.holds()))
    assert os.waitpid(child, 0)[1] == 0


# --- a database that is away --------------------------------------------------------------------------------------


def test_known_placements_go_on_without_the_database(world: _World) -> None:
    """With "known", so many messages of known names go out unchecked; they are checked when the database is back."""
    publications = started(world, when_away="known", unchecked_max=2)
    world.is_away = True
    world.now += 1.0
    publish(world, publications)
    assert len(publications.unchecked) == 1
    world.now += 0.5
    assert publish(world, publications).asked == [Send]
    for name in ("x", "unknown"):
        with pytest.raises(DatabaseUnavailable):
            publish(world, publications, name)
    assert data_in(world, "a") == [1, 2, 3]
    world.is_away = False
    world.move("x", "b")
    world.now += 1.0
    publish(world, publications)
    assert data_in(world, "b") == [4]
    assert not len(publications.unchecked)


def test_a_suspected_stray_waits_for_the_database(world: _World) -> None:
    """Once a message is known to be of a placement that is over, nothing of its name is sent before it is settled."""
    publications = routed(world, when_away="known", timeout_s=0.0)
    run = under_way(world, publications)
    world.move("x", "b")
    world.is_away = True
    run.end()
    world.is_away = False
    world.now += 1.0
    publish(world, publications, "y")
    world.is_away = True
    with pytest.raises(DatabaseUnavailable):
        publish(world, publications)
    assert data_in(world, "b") == []


def test_a_router_that_waits_goes_on_when_the_database_is_back(world: _World) -> None:
    """With "wait", a look that found no database is repeated until there is one."""
    publications = started(world)
    world.is_away = True
    world.now += 1.0
    run = _Run(world, publications.publish("x")).until(Sleep)
    world.is_away = False
    run.end()
    assert data_in(world, "a") == [1, 2]


@pytest.mark.parametrize("when_away", ["wait", "fail"])
def test_a_confirmed_message_without_a_look_is_unsettled(world: _World, when_away: Any) -> None:
    """Where the database goes away between confirm and look, the message is not told as published."""
    publications = routed(world, when_away=when_away, timeout_s=0.5)
    run = _Run(world, publications.publish("x")).until(Send)
    run.step()
    world.is_away = True
    with pytest.raises(Unsettled) as caught:
        run.end()
    assert isinstance(caught.value.__cause__, DatabaseUnavailable)
    assert publications.unchecked.names() == ["x"]


# --- the cache ----------------------------------------------------------------------------------------------------


def placed(name: str, epoch: int, state: PlacementState = PlacementState.OPEN) -> Placement:
    """A placement of a name."""
    return Placement(name, 1, "a", "a", epoch, state)


def test_a_placement_is_kept_where_others_changed_meanwhile() -> None:
    """Changes of other names alone do not make a placement wrong that was under way; unknown ones may."""
    cache = PlacementCache(10)
    cache.begin(1)
    cache.advance(2, [placed("y", 5)])
    cache.advance(4, [])
    cache.add(placed("x", 4), 1)
    cache.add(placed("y", 4), 1)
    assert cache.get("x") is not None
    assert cache.get("y") is None
    cache.advance(5, None)
    cache.add(placed("x", 4), 4)
    assert cache.get("x") is None
    cache.add(placed("x", 4), 5)
    assert cache.get("x") is not None


def test_the_cache_drops_what_was_not_used_longest() -> None:
    """Above its bound the name that was not asked for longest goes."""
    cache = PlacementCache(2)
    cache.begin(1)
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
    cache.begin(0)
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
            known = cache.get(name)
            if known is not None:
                # Rows that were read later than the generation are newer than it, never older.
                assert known.placement.epoch >= history[known.as_of][name][0]


def sent_of(name: str, number: int, epoch: int = 1, as_of: int = 1) -> Sent:
    """A message of a name."""
    return Sent(name, "a", Placed(epoch, "0" * 16, number), as_of)


def test_a_look_forgets_what_was_confirmed_before_it_and_counts() -> None:
    """What is confirmed after the mark, or under a placement that is over, or not surely there, stays in its order."""
    cache, unchecked = PlacementCache(10), Unchecked(10)
    cache.begin(2)
    cache.add(placed("x", 2), 2)
    old, doubtful, good = sent_of("x", 1), replace(sent_of("x", 2, 2), is_doubtful=True), sent_of("x", 3, 2)
    for each in (old, doubtful, good):
        unchecked.add(each)
    mark = unchecked.mark()
    late = sent_of("x", 4, 2)
    unchecked.add(late)
    unchecked.checked(mark, cache)
    assert unchecked.of("x") == [old, doubtful, late]
    assert unchecked.of("x", mark) == [old, doubtful]
    unchecked.checked(unchecked.mark(), cache)
    assert unchecked.of("x") == [old, doubtful]


def test_what_replaces_another_keeps_its_place_and_is_confirmed_anew() -> None:
    """An adoption stands where its message stood; a look that began before its confirm says nothing about it."""
    cache, unchecked = PlacementCache(10), Unchecked(10)
    cache.begin(1)
    first, second, by = sent_of("x", 1, as_of=0), sent_of("x", 2, as_of=0), sent_of("x", 3)
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
