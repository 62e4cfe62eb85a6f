"""Moves of serialization contexts on a real broker and a real database, from every state a crash leaves."""

import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest

from relatum import errors
from relatum.contexts import Move, MoveProgress, MoveState, SerializationContexts
from relatum.contexts import _mover as moving
from relatum.contexts._move_store import NothingToMove
from relatum.contexts._mover import Mover
from relatum.contexts._partition_log import Control, Fence, Marker, entry_of
from relatum.reading import StreamReader
from tests.support import declare_stream, delete_stream
from tests.support.raising import raising
from tests.support.standstill import SLACK_S

UNFINISHED = range(3, 13)
"""The steps after which a move has begun, and has not ended."""


class Crash(Exception):
    """The process that moves dies."""


class Crashing:
    """The world of a process that dies when so many steps are done."""

    def __init__(self, world: Mover, after: int) -> None:
        self._world, self._left = world, after
        self.elapsed_s = world.elapsed_s

    def __getattr__(self, step: str) -> Callable[..., Any]:
        def perform(*given: Any) -> Any:
            if not self._left:
                raise Crash
            self._left -= 1
            return getattr(self._world, step)(*given)

        return perform


def place(contexts: SerializationContexts, count: int, partition: int = 0, *, label: str = "") -> list[str]:
    names = [f"{label}{partition}/{number:03}" for number in range(count)]
    contexts.assign(names, f"{contexts.super_stream}-{partition}")
    return names


def where(contexts: SerializationContexts) -> dict[str, str]:
    return {each.context: each.partition.rpartition("-")[2] for each in contexts.assignments()}


def controls(reader: StreamReader, stream: str) -> list[tuple[int, Control]]:
    """The control messages of a partition with their offsets, read independently of the movers."""
    entries = ((message.offset, entry_of(message, "")) for message in reader.iterate(stream))
    return [(offset, entry) for offset, entry in entries if isinstance(entry, Fence | Marker)]


def run(contexts: SerializationContexts, steps: Callable[..., Move], *given: Any) -> Move:
    return Mover(contexts._store, contexts._control_streams()).run(steps, *given)


def crash(contexts: SerializationContexts, after: int, steps: Callable[..., Any], *given: Any) -> None:
    run(contexts, lambda world: steps(Crashing(world, after), *given))


def leave(contexts: SerializationContexts, names: list[str], after: int) -> int:
    """Begin a move from the first partition to the second and die after so many steps; gives its number."""
    source, target = (f"{contexts.super_stream}-{place}" for place in (0, 1))
    with pytest.raises(Crash):
        crash(contexts, after, moving.move, source, target, frozenset(names))
    return contexts._store.moves()[0].move_id


def check_ended(contexts: SerializationContexts, ended: Move, names: list[str]) -> None:
    """All places say the same of a move that has ended: placements, counts, fence and marker."""
    target = ended.source if ended.state is MoveState.ABORTED else f"{contexts.super_stream}-1"
    assert ended.target == target
    assert contexts.moves() == []
    found = {each.context: each for each in contexts.assignments()}
    assert {(found[name].partition, found[name].epoch, found[name].move_id) for name in names} == {
        (target, ended.epoch, None)
    }
    there = Counter(each.partition for each in found.values())
    assert {row.stream: row.open_sets for row in contexts.status().partitions if row.open_sets} == there
    with StreamReader.open(contexts._control_streams().address) as reader:
        in_source, in_target = controls(reader, ended.source), controls(reader, target)
    fence = Fence(ended.move_id, ended.fence_epoch, frozenset(names))
    fences = [offset for offset, control in in_source if control == fence]
    marker = Marker(ended.move_id, ended.epoch, frozenset(names), ended.source, fences[0])
    markers = [offset for offset, control in in_target if control == marker]
    assert (ended.fence_offset, ended.marker_offset) == (fences[0], markers[0])


def test_contexts_are_moved(contexts: SerializationContexts) -> None:
    """A move goes to a partition under a higher epoch and gives its pause; contexts that are there already stay."""
    names = place(contexts, 3)
    before = contexts.assignment_of(names[0])
    [move] = contexts.move(names, f"{contexts.super_stream}-1")
    assert (move.state, move.contexts, move.aborting, move.is_attended) == (MoveState.SWITCHED, 3, False, False)
    assert move.pause_s is not None
    assert moving.MOVE_WAIT_S < move.pause_s < moving.MOVE_WAIT_S + SLACK_S
    assert contexts.assignment_of(names[0]).epoch > before.epoch
    check_ended(contexts, move, names)
    assert contexts.moves(latest=5) == [move]
    names = [name for there, count in enumerate((2, 2, 1)) for name in place(contexts, count, there, label="b")]
    moves = contexts.move(names, f"{contexts.super_stream}-1")
    assert sorted((move.source[-1], move.contexts) for move in moves) == [("0", 2), ("2", 1)]
    assert set(where(contexts).values()) == {"1"}
    assert contexts.move(names, f"{contexts.super_stream}-1") == []


@pytest.mark.parametrize("is_aborted", [False, True], ids=["completed", "taken back"])
def test_a_move_is_ended_from_wherever_it_was_left(contexts: SerializationContexts, is_aborted: bool) -> None:
    """A move left at any step is completed by `resume`; `abort` leaves its contexts in the source under a new epoch."""
    end = partial(contexts.abort, reason="not today") if is_aborted else contexts.resume
    for after in UNFINISHED:
        names = place(contexts, 2, label=f"{after}/")
        move_id = leave(contexts, names, after)
        ended = end(move_id)
        wanted = (MoveState.ABORTED, "not today", True) if is_aborted else (MoveState.SWITCHED, None, False)
        assert (ended.state, ended.reason, ended.epoch > ended.fence_epoch) == wanted
        check_ended(contexts, ended, names)
        assert end(move_id) == contexts.resume(move_id) == ended


def test_an_abort_that_was_left_is_gone_on_with(contexts: SerializationContexts) -> None:
    """An abort that was left at any step is completed by `resume`."""
    for before, after in product((3, 8, 10), (1, 3, 5, 7)):
        names = place(contexts, 1, label=f"{before}/{after}/")
        move_id = leave(contexts, names, before)
        try:
            crash(contexts, after, moving.abort, move_id)
        except Crash:
            [left] = contexts.moves()
            assert (left.aborting, left.target) == (True, left.source)
        ended = contexts.resume(move_id)
        assert ended.state is MoveState.ABORTED
        check_ended(contexts, ended, names)


def test_a_broker_without_its_stream_for_a_moment_is_waited_for(contexts: SerializationContexts, amqp_url: str) -> None:
    """A mover publishes again while the broker, just started, does not know the stream yet."""
    names = place(contexts, 2)
    source, target = (f"{contexts.super_stream}-{place}" for place in (0, 1))
    back = threading.Timer(0.3, declare_stream, [amqp_url, source])

    class WithoutSource(Mover):
        def publish(self, stream: str, control: Control) -> None:
            if not back.ident:
                delete_stream(amqp_url, source)
                back.start()
            super().publish(stream, control)

    mover = WithoutSource(contexts._store, contexts._control_streams())
    ended = mover.run(moving.move, source, target, frozenset(names))
    back.join()
    check_ended(contexts, contexts._store.move(ended.move_id), names)


def test_a_beginning_whose_outcome_is_not_known_is_repeated(contexts: SerializationContexts) -> None:
    """Beginning a move again with the same holder gives the same move; another holder gets a conflict."""
    names = place(contexts, 2)
    wanted = f"{contexts.super_stream}-0", f"{contexts.super_stream}-1", frozenset(names), 0, 0
    begun = contexts._store.begin(*wanted, "me")
    assert contexts._store.begin(*wanted, "me") == begun
    with raising(errors.MoveConflict, match=f"move {begun.move_id}", move_id=begun.move_id, state="fencing"):
        contexts._store.begin(*wanted, "another")
    contexts.resume(begun.move_id)


def test_what_keeps_a_move_from_beginning_is_raised_as_it_is(contexts: SerializationContexts) -> None:
    """The error of a move that has not begun names no move and no other cause."""
    names = place(contexts, 1)
    with pytest.raises(errors.StreamNotFound) as caught:
        run(contexts, moving.move, f"{contexts.super_stream}-0", f"{contexts.super_stream}-9", frozenset(names))
    assert caught.value.__cause__ is not caught.value
    assert not hasattr(caught.value, "move_id")


def test_a_move_that_is_late_takes_what_is_left(contexts: SerializationContexts) -> None:
    """Contexts that went elsewhere before their move began are left out; with none left nothing begins."""
    names = place(contexts, 3)
    contexts.move(names[:1], f"{contexts.super_stream}-2")
    source, target = f"{contexts.super_stream}-0", f"{contexts.super_stream}-1"
    begun = contexts._store.begin(source, target, frozenset([*names, "nobody"]), 0, 0, "me")
    assert begun.names == frozenset(names[1:])
    contexts.resume(begun.move_id)
    generation = contexts.status().generation
    with pytest.raises(NothingToMove):
        contexts._store.begin(source, target, frozenset(names), 0, 0, "me")
    assert contexts.status().generation == generation


def test_what_cannot_be_moved_is_refused(contexts: SerializationContexts) -> None:
    """Unknown contexts, partitions and moves, and contexts that are on their way, are refused."""
    names = place(contexts, 2)
    for call, arguments, error, said in (
        (contexts.move, ([*names, "nobody"], f"{contexts.super_stream}-1"), errors.PlacementNotFound, "'nobody'"),
        (contexts.move, (names, "elsewhere"), errors.StreamNotFound, "'elsewhere'"),
        (contexts.resume, ("12345",), errors.InvalidInput, "move_id= takes an integer"),
        (contexts.resume, (12345,), errors.NotFound, "no move 12345"),
        (contexts.assign, (names[0], f"{contexts.super_stream}-2"), errors.Conflict, "move it"),
    ):
        with pytest.raises(error, match=said):
            call(*arguments)  # type: ignore[operator]
    assert contexts.moves(latest=1) == []
    move_id = leave(contexts, names[:1], 4)
    with pytest.raises(errors.MoveConflict, match=f"move {move_id}"):
        contexts.move(names, f"{contexts.super_stream}-2")
    contexts.resume(move_id)
    with raising(errors.MoveConflict, match="move its contexts back", move_id=move_id, state="switched"):
        contexts.abort(move_id)


def test_looking_needs_no_broker(contexts: SerializationContexts, database_url: str) -> None:
    """Where contexts are is in the database; moving them without a broker is refused at once."""
    [name] = place(contexts, 1)
    with SerializationContexts(contexts.super_stream, database_url) as other:
        assert other.assignment_of(name) == contexts.assignment_of(name)
        assert len(other.status().partitions) == 3
        with pytest.raises(errors.ConfigurationError, match="broker"):
            other.move(name, f"{contexts.super_stream}-1")


def test_all_contexts_of_partitions_are_consolidated(contexts: SerializationContexts) -> None:
    """Everything in the sources comes to the target, in moves of at most 500, each step reported."""
    place(contexts, 510), place(contexts, 20, 1), place(contexts, 5, 2)
    told: list[MoveProgress] = []
    streams = [f"{contexts.super_stream}-{place}" for place in range(3)]
    moves = contexts.consolidate(streams, streams[2], progress=told.append)
    assert sorted(move.contexts for move in moves) == [10, 20, 500]
    assert set(where(contexts).values()) == {"2"}
    assert {each.contexts_all for each in told} == {530}
    assert [each.contexts_done for each in told] == sorted(each.contexts_done for each in told)
    assert told[-1].contexts_done == 530
    states = [each.move.state for each in told if each.move.move_id == moves[0].move_id]
    assert states == [MoveState.FENCING, MoveState.FENCED, MoveState.SWITCHED]


def test_contexts_are_spread_evenly(contexts: SerializationContexts) -> None:
    """A plan is what a rebalancing does; afterwards there is nothing left to move."""
    place(contexts, 30)
    plan = contexts.plan()
    assert {target[-1]: len(names) for target, names in plan.moves.items()} == {"1": 10, "2": 10}
    contexts.rebalance(plan)
    assert sorted(where(contexts).values()) == ["0"] * 10 + ["1"] * 10 + ["2"] * 10
    assert len(contexts.plan()) == 0
    contexts.rebalance(contexts.plan([f"{contexts.super_stream}-1"]))
    assert set(where(contexts).values()) == {"1"}
