"""Spreading contexts over partitions, evenly, by weight, with as few moves as there can be; partitions over members."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relatum.contexts._placements import spread
from relatum.errors import InvalidInput
from relatum.store.members import target

counts = st.dictionaries(st.sampled_from("abcdef"), st.integers(0, 40))


def named(sizes: dict[str, int]) -> dict[str, list[str]]:
    """Contexts of some partitions, so many in each."""
    return {stream: [f"{stream}{number}" for number in range(size)] for stream, size in sizes.items()}


def after(placed: dict[str, list[str]], moves: dict[str, tuple[str, ...]]) -> dict[str, set[str]]:
    result = {stream: set(names) for stream, names in placed.items()}
    for stream, names in moves.items():
        for name in names:
            next(there for there in result.values() if name in there).remove(name)
        result.setdefault(stream, set()).update(names)
    return result


@given(counts, st.sets(st.sampled_from("abcdefgh"), min_size=1))
def test_all_contexts_are_spread_evenly_and_none_is_lost(sizes: dict[str, int], over: set[str]) -> None:
    """Afterwards no two partitions differ by more than one, others are empty, and every context is somewhere."""
    placed = named(sizes)
    result = after(placed, spread(placed, dict.fromkeys(sorted(over), 1.0)))
    here = [len(result.get(stream, ())) for stream in over]
    assert max(here) - min(here) <= 1
    assert not any(names for stream, names in result.items() if stream not in over)
    assert set().union(*result.values()) == {name for names in placed.values() for name in names}


@given(counts, st.sets(st.sampled_from("abcdefgh"), min_size=1))
def test_no_fewer_moves_would_do(sizes: dict[str, int], over: set[str]) -> None:
    """As many move as are too many: what is above the even share, with the extra ones where most are."""
    placed = named(sizes)
    moved = sum(map(len, spread(placed, dict.fromkeys(sorted(over), 1.0)).values()))
    share, extra = divmod(sum(sizes.values()), len(over))
    kept = sorted((sizes.get(stream, 0) for stream in over), reverse=True)
    stay = sum(min(size, share + (place < extra)) for place, size in enumerate(kept))
    assert moved == sum(sizes.values()) - stay


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
    """Contexts must have somewhere to go."""
    with pytest.raises(InvalidInput, match="weights"):
        spread({"a": ["x"]}, weights)


# --- partitions over members ---


@given(st.dictionaries(st.text(max_size=3), st.integers(0, 9), min_size=1, max_size=9), st.integers(0, 40))
def test_shares_add_up_and_differ_by_one_at_most(held: dict[str, int], partitions: int) -> None:
    """All partitions are somebody's, and nobody should have more than one above another."""
    targets = [target(held, member, partitions) for member in held]
    assert sum(targets) == partitions
    assert max(targets) - min(targets) <= 1


@given(st.integers(1, 9), st.integers(0, 40))
def test_fair_shares_stay_as_they_are(members: int, partitions: int) -> None:
    """Where shares are fair, nobody gives or takes."""
    share, extra = divmod(partitions, members)
    held = {f"m{number}": share + (number < extra) for number in range(members)}
    assert {member: target(held, member, partitions) for member in held} == held


def test_who_has_most_gives() -> None:
    """A member that joins gets from the one that has most."""
    assert [target({"a": 3, "b": 1, "c": 0}, member, 4) for member in "abc"] == [2, 1, 1]
