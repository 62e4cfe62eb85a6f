"""Moves of contexts: their steps, the spread that they bring about, and partitions over members."""

import math
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relatum.contexts import MoveState
from relatum.contexts import _mover as moving
from relatum.contexts._partition_log import Control
from relatum.contexts._placements import MoveStep, spread
from relatum.contexts._publication import TRUST_S
from relatum.errors import InvalidInput, StreamUnavailable
from relatum.store.members import target

C = frozenset("ab")
NOW = datetime.fromtimestamp(0, UTC)
STATE = (MoveState.FENCING, False, 1, 2, 0, 0, 10, 20, None, None, None, None, NOW, None, None, None)
STOPPED = MoveStep(7, "s", "t", 1, 2, *STATE, names=C)
BEGUN = replace(STOPPED, fence_epoch=40, epoch=40)


class _World:
    """A world that finds nothing in streams, with a clock that only sleeping moves."""

    def __init__(self, found: MoveStep) -> None:
        self.found = found
        self.now = 100.0
        self.fenced_at: float | None = None
        self.asked: list[str] = []

    def elapsed_s(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def look(self, move_id: int) -> MoveStep:
        return self.found

    def assign_fence_epoch(self, move_id: int) -> MoveStep:
        return BEGUN

    def publish(self, stream: str, control: Control) -> None:
        self.asked.append("publish")
        self.fenced_at = self.now

    def find(self, stream: str, control: Control, from_offset: int) -> int | None:
        self.asked.append("find")
        return None


def stopped(found: MoveStep) -> tuple[Any, StreamUnavailable]:
    """A world in which another mover continued a move whose fence does not show, and the error of that."""
    world: Any = _World(found)
    with pytest.raises(StreamUnavailable, match="was confirmed, but was not found") as caught:
        moving.go_on(world, 7)
    return world, caught.value


def waited(found: MoveStep) -> float:
    """How long another mover waits before it publishes its fence."""
    fenced_at: float = stopped(found)[0].fenced_at
    return fenced_at - 100.0


def test_a_fence_waits_for_as_long_as_a_look_serves() -> None:
    """A fence waits until no clock trusts an earlier look, whichever mover began the move; an epoch means it did."""
    assert TRUST_S * 1.01 / 0.99 + 0.1 < waited(STOPPED) < 0.36
    assert waited(BEGUN) == 0


def test_a_message_that_is_confirmed_and_not_there_ends_the_steps() -> None:
    """A fence that is confirmed and not found is looked for a few times, then the move is left to a later attempt."""
    world, error = stopped(BEGUN)
    assert world.asked == ["find", "publish", *["find"] * moving.SEARCHES_MAX]
    assert error.stream == "s"


counts = st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 40))


def named(sizes: dict[str, int]) -> dict[str, list[str]]:
    return {stream: [f"{stream}{number}" for number in range(size)] for stream, size in sizes.items()}


def after(placed: dict[str, list[str]], moves: dict[str, tuple[str, ...]]) -> dict[str, set[str]]:
    result = {stream: set(names) for stream, names in placed.items()}
    for stream, names in moves.items():
        for name in names:
            next(there for there in result.values() if name in there).remove(name)
        result.setdefault(stream, set()).update(names)
    return result


@given(counts, st.sets(st.sampled_from("abcdefgh"), min_size=1))
def test_contexts_are_spread_evenly_with_the_fewest_moves(sizes: dict[str, int], over: set[str]) -> None:
    """Every context stays somewhere, partitions differ by one at most, others are empty, and only the excess moves."""
    placed = named(sizes)
    moves = spread(placed, dict.fromkeys(sorted(over), 1.0))
    result = after(placed, moves)
    here = [len(result.get(stream, ())) for stream in over]
    assert max(here) - min(here) <= 1
    assert not any(names for stream, names in result.items() if stream not in over)
    assert set().union(*result.values()) == {name for names in placed.values() for name in names}
    share, extra = divmod(sum(sizes.values()), len(over))
    kept = sorted((sizes.get(stream, 0) for stream in over), reverse=True)
    stay = sum(min(size, share + (place < extra)) for place, size in enumerate(kept))
    assert sum(map(len, moves.values())) == sum(sizes.values()) - stay


@given(
    counts, st.dictionaries(st.sampled_from("abcd"), st.floats(0, 100), min_size=1).filter(lambda w: any(w.values()))
)
def test_shares_follow_weights(sizes: dict[str, int], weights: dict[str, float]) -> None:
    """Each partition has its exact share, rounded up or down; one of weight 0 has nothing."""
    placed = named(sizes)
    result = after(placed, spread(placed, weights))
    for stream, weight in weights.items():
        exact = sum(sizes.values()) * (weight / sum(weights.values()))
        assert math.floor(exact - 1e-6) <= len(result.get(stream, ())) <= math.ceil(exact + 1e-6)
        assert weight or not result.get(stream)


@pytest.mark.parametrize("weights", [{}, {"a": 0.0}, {"a": 2.0, "b": -1.0}])
def test_weights_that_cannot_be_are_refused(weights: dict[str, float]) -> None:
    """Weights without a positive one, or with a negative one, are refused."""
    with pytest.raises(InvalidInput, match="weights"):
        spread({"a": ["x"]}, weights)


@given(st.dictionaries(st.text(max_size=3), st.integers(0, 9), min_size=1, max_size=9), st.integers(0, 40))
def test_shares_add_up_and_differ_by_one_at_most(held: dict[str, int], partitions: int) -> None:
    """The members' targets add up to all partitions and differ by one at most."""
    targets = [target(held, member, partitions) for member in held]
    assert sum(targets) == partitions
    assert max(targets) - min(targets) <= 1


@given(st.integers(1, 9), st.integers(0, 40))
def test_fair_shares_stay_as_they_are(members: int, partitions: int) -> None:
    """Fair shares stay as they are; a member that joins gets its share from the one that has most."""
    share, extra = divmod(partitions, members)
    held = {f"m{number}": share + (number < extra) for number in range(members)}
    assert {member: target(held, member, partitions) for member in held} == held
    assert [target({"a": 3, "b": 1, "c": 0}, member, 4) for member in "abc"] == [2, 1, 1]
