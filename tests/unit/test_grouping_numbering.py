"""Which numbers messages get, and how far a group has come, each against a naive account of it."""

import pickle
import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relatum.errors import GroupConflict, IncompleteGroup, InvalidGroup
from relatum.limits import GROUP_SEQUENCE_MAX
from relatum.membership import Anomaly, Membership, assess
from relatum.publishing.numbering import Numbering

ID = "cd" * 24


@given(st.lists(st.sampled_from(["put", "put", "put", "last", "fail", "fail oldest"]), max_size=60))
def test_no_number_is_given_twice_and_no_gap_stays_unfilled(steps: list[str]) -> None:
    """Whatever fails, each number that is out is out once, and free numbers below the highest go out first."""
    numbers = Numbering()
    out: list[Membership] = []
    for step in steps:
        taken = {place.sequence for place in out}
        last_is_out = any(place.last for place in out)
        gaps = set(range(1, max(taken, default=0))) - taken
        if step.startswith("fail"):
            if out:
                numbers.give_back(out.pop(0 if step == "fail oldest" else -1))
            continue
        ends = step == "last"
        if last_is_out and (ends or not gaps):
            with pytest.raises(InvalidGroup) as caught:
                numbers.take(last=ends)
            assert caught.value.reason == "group_has_ended"
            continue
        place = numbers.take(last=ends)
        assert place.sequence == (max(taken, default=0) + 1 if ends or not gaps else min(gaps))
        assert place.last == ends
        out.append(place)
    position = assess(numbers.group_id, out)
    assert position.anomalies == ()
    assert numbers.is_complete == position.is_complete
    assert numbers.is_begun == bool(out)
    assert numbers.missing == position.missing
    assert numbers.last_sequence == position.last_sequence
    assert numbers.next_free == position.highest + 1


@given(st.sets(st.integers(1, 15)), st.booleans())
def test_going_on_from_a_position_completes_the_group(there: set[int], has_last: bool) -> None:
    """From any sound position, the messages put afterwards make the group whole, without a number twice."""
    members = [Membership(ID, number, has_last and number == max(there)) for number in there]
    numbers = Numbering(ID)
    numbers.resume(assess(ID, members))
    while not numbers.is_complete:
        last_is_due = numbers.last_sequence is None and not numbers.missing
        members.append(numbers.take(last=last_is_due))
    position = assess(ID, members)
    assert position.is_complete
    assert position.anomalies == ()


def test_numbers_begin_where_the_caller_says_and_end_at_the_limit() -> None:
    """The group counts as begun; the highest number is given, the one after it is refused, and stays refused."""
    numbers = Numbering(ID, GROUP_SEQUENCE_MAX)
    assert numbers.is_begun
    assert numbers.take() == Membership(ID, GROUP_SEQUENCE_MAX, False)
    for _ in range(2):
        with pytest.raises(InvalidGroup) as caught:
            numbers.take(last=True)
        assert caught.value.reason == "group_sequence_out_of_range"
    assert not numbers.is_complete


@pytest.mark.parametrize(
    ("group_id", "start", "reason"),
    [
        (None, 2, "option_invalid"),
        ("short", 1, "group_id_not_48_hex_digits"),
        (ID, 0, "group_sequence_out_of_range"),
        (ID, True, "group_sequence_not_an_integer"),
        (ID, GROUP_SEQUENCE_MAX + 1, "group_sequence_out_of_range"),
    ],
)
def test_impossible_beginnings_are_refused(group_id: str | None, start: int, reason: str) -> None:
    """A new group begins at 1; ids and numbers are checked before anything is put."""
    with pytest.raises(InvalidGroup) as caught:
        Numbering(group_id, start)
    assert caught.value.reason == reason


def test_another_group_is_not_gone_on_with_in_the_middle() -> None:
    """A group with messages keeps its id; one without takes over that of the position."""
    numbers = Numbering()
    numbers.resume(assess(ID, [Membership(ID, 1, False)]))
    assert (numbers.group_id, numbers.take().sequence) == (ID, 2)
    with pytest.raises(InvalidGroup) as caught:
        numbers.resume(assess("ef" * 24, []))
    assert caught.value.reason == "option_invalid"


@pytest.mark.parametrize(
    ("members", "gone", "anomaly"),
    [
        ([Membership(ID, 1, True), Membership(ID, 2, True)], [], Anomaly.TWO_LASTS),
        ([Membership(ID, 1, True), Membership(ID, 2, False)], [], Anomaly.PAST_LAST),
        ([Membership(ID, 2, False)], [Membership(ID, 1, False)], Anomaly.EXPIRED),
    ],
)
def test_a_group_that_cannot_become_whole_is_not_gone_on_with(
    members: list[Membership], gone: list[Membership], anomaly: Anomaly
) -> None:
    """What no further message can put right is an error with the anomaly's name, and changes nothing."""
    numbers = Numbering(ID, 7)
    with pytest.raises(GroupConflict) as caught:
        numbers.resume(assess(ID, members, expired=gone))
    assert (caught.value.group_id, caught.value.anomaly) == (ID, anomaly)
    assert numbers.take().sequence == 7


def test_an_incomplete_group_says_what_is_missing() -> None:
    """The error of leaving carries the gaps, joined, and the last number; it can be pickled."""
    numbers = Numbering(ID)
    places = [numbers.take() for _ in range(6)]
    numbers.take(last=True)
    for place in (places[4], places[1], places[2]):
        numbers.give_back(place)
    error = pickle.loads(pickle.dumps(numbers.incomplete()))
    assert isinstance(error, IncompleteGroup)
    assert (error.group_id, error.missing, error.last_sequence) == (ID, ((2, 3), (5, 5)), 7)


members_of_small_groups = st.lists(
    st.builds(Membership, st.just(ID), st.integers(1, 12), st.sampled_from([False, False, False, True])), max_size=20
)


def group(*numbers: int, last: int | None = None, name: str = ID) -> list[Membership]:
    return [Membership(name, number, number == last) for number in numbers]


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
    """A position agrees with a naive account of the members, in any order, and ignores those of another group."""
    position = assess(ID, members, expired=gone)
    there = {member.sequence for member in members}
    lasts = {member.sequence for member in members + [m for m in gone if m.sequence not in there] if member.last}
    end = min(lasts) if lasts else max(there, default=0)
    assert position.seen == len(there)
    assert position.highest == max(there, default=0)
    assert position.last_sequence == (min(lasts) if lasts else None)
    assert all(first <= last for first, last in position.missing)
    assert all(before[1] + 1 < after[0] for before, after in pairwise(position.missing))
    missing = {number for first, last in position.missing for number in range(first, last + 1)}
    assert missing == set(range(1, end + 1)) - there
    assert position.contiguous == next(number for number in range(14) if number + 1 not in there)
    assert position.next_sequence == position.contiguous + 1
    assert position.is_complete == (bool(lasts) and there >= set(range(1, end + 1)))
    found = naive_anomalies(members, gone)
    assert position.anomalies == tuple(each for each in Anomaly if each in found)
    shuffled = members + group(1, 2, 3, name="ef" * 24)
    shuffle.shuffle(shuffled)
    assert assess(ID, shuffled, expired=reversed(gone)) == position


def test_a_gap_of_a_thousand_million_numbers_costs_nothing() -> None:
    """What is missing is told as ranges, so the highest number allowed is no burden."""
    position = assess(ID, group(1, 999_999_999, last=999_999_999))
    assert position.missing == ((2, 999_999_998),)
    assert (position.contiguous, position.seen) == (1, 2)
