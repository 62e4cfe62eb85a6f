"""How members of a serial consumer share its partitions."""

from hypothesis import given
from hypothesis import strategies as st

from relatum.store._members import target


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
