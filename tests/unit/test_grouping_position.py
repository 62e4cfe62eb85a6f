"""How far a group has come, against a naive account of it."""

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relatum.membership import Anomaly, GroupPosition, Membership, assess

ID = "ab" * 24

members_of_small_groups = st.lists(
    st.builds(Membership, st.just(ID), st.integers(1, 12), st.sampled_from([False, False, False, True])), max_size=20
)


def group(*numbers: int, last: int | None = None, name: str = ID) -> list[Membership]:
    """Members with these numbers, one of which may be the last."""
    return [Membership(name, number, number == last) for number in numbers]


def expanded(ranges: tuple[tuple[int, int], ...]) -> set[int]:
    """All numbers of some ranges."""
    return {number for first, last in ranges for number in range(first, last + 1)}


def naive_anomalies(members: list[Membership], gone: list[Membership]) -> set[Anomaly]:
    """What is wrong, written down as the words say it."""
    there = {member.sequence for member in members}
    dropped = [member for member in gone if member.sequence not in there]
    lasts = {member.sequence for member in members + dropped if member.last}
    found = set()
    if len(members) != len(there):
        found.add(Anomaly.DUPLICATE)
    if len(lasts) >= 2:
        found.add(Anomaly.TWO_LASTS)
    if lasts and any(number > min(lasts) and number not in lasts for number in there):
        found.add(Anomaly.PAST_LAST)
    if dropped:
        found.add(Anomaly.EXPIRED)
    return found


@given(members_of_small_groups, members_of_small_groups, st.randoms())
def test_it_says_what_a_naive_account_says(
    members: list[Membership], gone: list[Membership], shuffle: random.Random
) -> None:
    """Numbers there and missing, the last, and all anomalies, whatever came in whatever order."""
    position = assess(ID, members, expired=gone)
    there = {member.sequence for member in members}
    lasts = {member.sequence for member in members + [m for m in gone if m.sequence not in there] if member.last}
    end = min(lasts) if lasts else max(there, default=0)
    assert position.seen == len(there)
    assert position.highest == max(there, default=0)
    assert position.last_sequence == (min(lasts) if lasts else None)
    assert expanded(position.missing) == set(range(1, end + 1)) - there
    assert position.contiguous == next(number for number in range(14) if number + 1 not in there)
    assert position.next_sequence == position.contiguous + 1
    assert position.is_complete == (bool(lasts) and there >= set(range(1, end + 1)))
    assert set(position.anomalies) == naive_anomalies(members, gone)
    shuffled = members[:]
    shuffle.shuffle(shuffled)
    assert assess(ID, shuffled, expired=reversed(gone)) == position


@given(members_of_small_groups)
def test_missing_ranges_are_in_order_and_apart(members: list[Membership]) -> None:
    """Neighbouring ranges have a number between them, each first is at most its last."""
    missing = assess(ID, members).missing
    assert all(first <= last for first, last in missing)
    assert all(before[1] + 1 < after[0] for before, after in pairwise(missing))


def test_nothing_is_the_beginning() -> None:
    """Of an empty group nothing is there and nothing known to be missing."""
    assert assess(ID, []) == GroupPosition(ID, 0, 0, (), None, 0, ())
    assert assess(ID, []).next_sequence == 1
    assert not assess(ID, []).is_complete


def test_other_groups_do_not_count() -> None:
    """Members of another group change nothing."""
    assert assess(ID, [*group(1, 2, last=2), *group(1, 2, 3, name="cd" * 24)]).is_complete


def test_a_complete_group_is_complete() -> None:
    """All numbers up to the last one's."""
    position = assess(ID, group(3, 1, 2, last=3))
    assert position.is_complete
    assert (position.contiguous, position.missing, position.last_sequence, position.anomalies) == (3, (), 3, ())


def test_a_gap_of_a_thousand_million_numbers_costs_nothing() -> None:
    """What is missing is told as ranges, so the highest number allowed is no burden."""
    position = assess(ID, group(1, 999_999_999, last=999_999_999))
    assert position.missing == ((2, 999_999_998),)
    assert (position.contiguous, position.seen) == (1, 2)


@pytest.mark.parametrize(
    ("members", "gone", "anomalies", "last", "complete"),
    [
        (group(1, 2, 2, 3, last=3), [], (Anomaly.DUPLICATE,), 3, True),
        ([*group(1, 2, last=2), Membership(ID, 2, False)], [], (Anomaly.DUPLICATE,), 2, True),
        ([*group(1, 2, last=2), *group(4, last=4)], [], (Anomaly.TWO_LASTS,), 2, True),
        (group(1, 2, 3, last=2), [], (Anomaly.PAST_LAST,), 2, True),
        ([*group(1, 2, 3, last=2), *group(4, last=4)], [], (Anomaly.TWO_LASTS, Anomaly.PAST_LAST), 2, True),
        (group(2, 3, last=3), group(1), (Anomaly.EXPIRED,), 3, False),
        (group(2), group(1, 3, last=3), (Anomaly.EXPIRED,), 3, False),
        (group(1, 2, last=2), group(1), (), 2, True),
    ],
)
def test_each_anomaly_has_its_name(
    members: list[Membership], gone: list[Membership], anomalies: tuple[Anomaly, ...], last: int | None, complete: bool
) -> None:
    """Twice the same number, two lasts, a number past the last, a member that retention took: each by itself."""
    position = assess(ID, members, expired=gone)
    assert (position.anomalies, position.last_sequence, position.is_complete) == (anomalies, last, complete)
