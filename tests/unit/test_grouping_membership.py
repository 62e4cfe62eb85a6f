"""Which headers make a message one of a group, which numbers messages get, and how far a group has come."""

import copy
import pickle
import random
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import relatum
from relatum.common.limits import GROUP_SEQUENCE_MAX
from relatum.errors import GroupConflict, IncompleteGroup, InvalidGroup
from relatum.keys import KeyDefinition, bases
from relatum.membership import (
    GROUP_KEY,
    Anomaly,
    GroupStatus,
    Membership,
    assess,
    checked_group_id,
    checked_membership,
    checked_sequence,
    group_status,
    membership,
    new_group_id,
    parse_value,
)
from relatum.publishing import Numbering, Stamper
from relatum.reading import Message
from tests.support.raising import raising

ID = "0123456789abcdef" * 3

group_ids = st.binary(min_size=24, max_size=24).map(bytes.hex)
memberships = st.builds(Membership, group_ids, st.integers(1, GROUP_SEQUENCE_MAX), st.booleans())
odd_values = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, GROUP_SEQUENCE_MAX + 2),
    st.floats(),
    st.sampled_from(
        [ID, ID.upper(), ID[1:], ID + "0", ID.encode(), "1", "01", b"7", "true", "True", "", "x|y", [1], {}]
    ),
    st.text(max_size=4),
)
BAD: list[tuple[dict[str, Any], str]] = [
    ({"group_sequence": 1}, "group_id_missing"),
    ({"group_last": True}, "group_id_missing"),
    ({"group_last": False}, "group_id_missing"),
    ({"group_id": None, "group_sequence": 1}, "group_id_missing"),
    ({"group_id": ID}, "group_sequence_missing"),
    ({"group_id": ID, "group_last": True}, "group_sequence_missing"),
    *(
        ({"group_id": wrong, "group_sequence": 1}, "group_id_not_48_hex_digits")
        for wrong in (ID[1:], ID + "0", ID.upper(), ID + "\n", "g" * 48, "", bytes(24), 1)
    ),
    *(({"group_id": ID, "group_sequence": wrong}, "group_sequence_not_an_integer") for wrong in (True, "1", 1.0)),
    *(
        ({"group_id": ID, "group_sequence": wrong}, "group_sequence_out_of_range")
        for wrong in (0, -1, GROUP_SEQUENCE_MAX + 1)
    ),
    ({"group_id": ID, "group_sequence": 1, "group_last": 1}, "group_last_not_a_boolean"),
    ({"group_id": ID, "group_sequence": 1, "group_last": "true"}, "group_last_not_a_boolean"),
]

odd_headers = st.dictionaries(st.sampled_from(["group_id", "group_sequence", "group_last", "other"]), odd_values)


def message(headers: dict[str, Any]) -> Message:
    properties = type("P", (), {"headers": headers, "__getattr__": lambda _self, _name: None})()
    return Message.from_amqp("stream", 0, properties, b"")


@given(memberships)
def test_headers_and_value_tell_the_same_place(place: Membership) -> None:
    """A place survives its headers and its key's value."""
    assert (membership(place.headers), checked_membership(place.headers)) == (place, place)
    assert GROUP_KEY.read(bases(place.headers, {}.get, bytes)) == ([place.value], [])
    assert parse_value(place.value) == place


@given(odd_headers)
@example({"group_id": ID.encode(), "group_sequence": "7", "group_last": b"true"})
@example({"group_id": ID, "group_sequence": True, "group_last": False})
@example({"group_id": ID, "group_sequence": 1, "group_last": 1})
def test_a_message_is_in_the_group_its_row_says(headers: dict[str, Any]) -> None:
    """A message's headers and its row say the same place; headers that pass the check have one, or no group."""
    values, _ = GROUP_KEY.read(bases(headers, {}.get, bytes))
    assert membership(headers) == (parse_value(values[0]) if values else None)
    try:
        place = checked_membership(headers)
    except InvalidGroup:
        return
    if place is None:
        assert membership(headers) is None
    else:
        assert membership({**headers, "group_last": place.last}) == place


@pytest.mark.parametrize(
    "value",
    [
        "",
        ID,
        f"{ID}|1",
        f"{ID}|0|true",
        f"{ID}|01|true",
        f"{ID}|-1|true",
        f"{ID}|1000000000|true",
        f"{ID}|1|True",
        f"{ID}|1|true ",
        f"{ID}|1|true\n",
        f"{ID}|1|true|",
        f"{ID.upper()}|1|true",
        f"{ID[1:]}|1|true",
        f"{ID}|١|true",
    ],
)
def test_other_values_tell_of_no_place(value: str) -> None:
    """Only what the key makes of valid headers is a place: what foreign messages left in the table is not."""
    assert parse_value(value) is None


def test_the_status_of_a_message() -> None:
    """A message is in no group, in one, or the last of one; without an id and a number it is in none."""
    for headers in ({"order_id": "1"}, {"group_id": None, "group_sequence": None, "group_last": None}):
        assert checked_membership(headers) is None
    assert group_status(message({})) is GroupStatus.NOT_IN_GROUP
    assert group_status(message({"group_id": ID, "group_sequence": 1})) is GroupStatus.NOT_IN_GROUP
    assert group_status(message(Membership(ID, 1, False).headers)) is GroupStatus.IN_GROUP
    assert group_status(message(Membership(ID, 2, True).headers)) is GroupStatus.LAST_IN_GROUP


def test_new_ids_are_24_bytes_that_differ_and_sort_by_time() -> None:
    """Ids are 48 hexadecimal digits, no two the same, and later milliseconds sort later."""
    ids = [new_group_id() for _ in range(10_000)]
    assert len(set(ids)) == len(ids)
    assert all(checked_membership({"group_id": text, "group_sequence": 1}) for text in ids)
    moments = [text[:12] for text in ids]
    assert moments == sorted(moments)
    assert relatum.new_group_id is new_group_id


KEYS: list[list[KeyDefinition]] = [[GROUP_KEY], [KeyDefinition("order_id"), relatum.GROUP_KEY]]


def stamp(stamper: Stamper, headers: dict[str, Any]) -> Any:
    return stamper.stamp(headers, None, 0, None, b"")


@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize(
    ("headers", "added"),
    [
        (Membership(ID, 1, True).headers, ()),
        (Membership(ID, GROUP_SEQUENCE_MAX, False).headers, ()),
        ({"group_id": ID, "group_sequence": 3}, ("group_last",)),
        ({"group_id": ID, "group_sequence": 3, "group_last": None}, ("group_last",)),
        ({"order_id": "1"}, ()),
        ({"group_id": None, "group_sequence": None}, ()),
    ],
)
def test_a_flag_that_is_missing_is_added_as_false(
    keys: list[KeyDefinition], headers: dict[str, Any], added: tuple[str, ...]
) -> None:
    """The key has a value only where all three are there, so it is added, in a copy; to nothing else is it added."""
    before = copy.deepcopy(headers)
    got = stamp(Stamper(keys), headers)
    assert got.headers == headers | dict.fromkeys(added, False)
    assert headers == before


@pytest.mark.parametrize(("headers", "reason"), BAD)
def test_bad_headers_are_refused_with_a_reason(headers: dict[str, Any], reason: str) -> None:
    """The interceptor refuses bad headers with a reason, or counts and sends them; without the key it ignores them."""
    for check in (checked_membership, *(partial(stamp, Stamper(keys)) for keys in KEYS)):
        with raising(InvalidGroup, reason=reason) as caught:
            check(headers)
        assert type(caught.value.reason) is str
        assert pickle.loads(pickle.dumps(caught.value)).reason == reason
    skipping = Stamper([GROUP_KEY], on_invalid="skip")
    for stamper in (Stamper([KeyDefinition("order_id")]), skipping, skipping):
        got = stamp(stamper, headers)
        assert got.headers == headers
    assert skipping.skipped == {("message_group", reason): 2}


def test_a_flag_is_checked_where_the_id_comes_from_the_body() -> None:
    """A header that is lifted out of the body takes part in the check."""
    stamper = Stamper([KeyDefinition("group_id", lambda body: body.decode()), GROUP_KEY])
    got = stamper.stamp({"group_sequence": 1}, None, 0, None, ID.encode())
    assert got.headers == {"group_sequence": 1, "group_id": ID, "group_last": False}
    with pytest.raises(InvalidGroup):
        stamper.stamp({"group_sequence": 1}, None, 0, None, b"short")


def test_only_what_was_to_be_sent_was_not_sent() -> None:
    """A reader that gives a wrong id or number sends nothing anyway; a publisher wants to know."""
    for check, wrong in ((checked_group_id, "x"), (checked_sequence, 0), (checked_sequence, "1")):
        with pytest.raises(InvalidGroup) as caught:
            check(wrong)
        assert "sent" not in str(caught.value)
    group_id = relatum.new_group_id()
    for headers in ({"group_id": "x"}, {"group_id": group_id, "group_sequence": 0}, {"group_sequence": 1}):
        with pytest.raises(InvalidGroup, match="nothing was sent"):
            checked_membership(headers)


@given(st.lists(st.sampled_from(["put", "put", "put", "last", "fail", "fail oldest"]), max_size=60))
def test_no_number_is_given_twice_and_no_gap_stays_unfilled(steps: list[str]) -> None:
    """Whatever fails, each number is out once at most, and free numbers below the highest are given first."""
    numbers = Numbering()
    out: list[Membership] = []
    for step in steps:
        taken = {place.sequence for place in out}
        last_is_out = any(place.last for place in out)
        gaps = set(range(1, max(taken, default=0))) - taken
        if step.startswith("fail"):
            if out:
                numbers._give_back(out.pop(0 if step == "fail oldest" else -1))
            continue
        ends = step == "last"
        if last_is_out and (ends or not gaps):
            with raising(InvalidGroup, reason="group_has_ended"):
                numbers._take(last=ends)
            continue
        place = numbers._take(last=ends)
        assert place.sequence == (max(taken, default=0) + 1 if ends or not gaps else min(gaps))
        assert place.last == ends
        out.append(place)
    position = assess(numbers.group_id, out)
    assert position.anomalies == ()
    assert (numbers.is_complete, numbers._is_begun) == (position.is_complete, bool(out))
    assert (numbers._missing, numbers.last_sequence) == (position.missing, position.last_sequence)
    assert numbers._next_free == position.highest + 1


@given(st.sets(st.integers(1, 15)), st.booleans())
def test_going_on_from_a_position_completes_the_group(there: set[int], has_last: bool) -> None:
    """From any sound position, further messages complete the group without a number twice."""
    members = [Membership(ID, number, has_last and number == max(there)) for number in there]
    numbers = Numbering(ID)
    numbers._resume(assess(ID, members))
    while not numbers.is_complete:
        last_is_due = numbers.last_sequence is None and not numbers._missing
        members.append(numbers._take(last=last_is_due))
    position = assess(ID, members)
    assert (position.is_complete, position.anomalies) == (True, ())


def test_numbers_begin_where_the_caller_says_and_end_at_the_limit() -> None:
    """A group may begin at a number; the highest one is given, and the one after it is refused."""
    numbers = Numbering(ID, GROUP_SEQUENCE_MAX)
    assert numbers._is_begun
    assert numbers._take() == Membership(ID, GROUP_SEQUENCE_MAX, False)
    for _ in range(2):
        with raising(InvalidGroup, reason="group_sequence_out_of_range"):
            numbers._take(last=True)
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
    """A new group begins at 1, and an id or a number that cannot be is refused."""
    with raising(InvalidGroup, reason=reason):
        Numbering(group_id, start)


def test_another_group_is_not_gone_on_with_in_the_middle() -> None:
    """A group without messages takes over a position's id; one with messages keeps its own."""
    numbers = Numbering()
    numbers._resume(assess(ID, [Membership(ID, 1, False)]))
    assert (numbers.group_id, numbers._take().sequence) == (ID, 2)
    with raising(InvalidGroup, reason="option_invalid"):
        numbers._resume(assess("cd" * 24, []))


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
    """A group with an anomaly that no message can cure is refused, and nothing changes."""
    numbers = Numbering(ID, 7)
    with raising(GroupConflict, group_id=ID, anomaly=anomaly):
        numbers._resume(assess(ID, members, expired=gone))
    assert numbers._take().sequence == 7


def test_an_incomplete_group_says_what_is_missing() -> None:
    """The error of an incomplete group has its gaps, joined, and its last number, also after pickling."""
    numbers = Numbering(ID)
    places = [numbers._take() for _ in range(6)]
    numbers._take(last=True)
    for place in (places[4], places[1], places[2]):
        numbers._give_back(place)
    error = pickle.loads(pickle.dumps(numbers._incomplete()))
    assert isinstance(error, IncompleteGroup)
    assert (error.group_id, error.missing, error.last_sequence) == (ID, ((2, 3), (5, 5)), 7)


members_of_small_groups = st.lists(
    st.builds(Membership, st.just(ID), st.integers(1, 12), st.sampled_from([False, False, False, True])), max_size=20
)


def group(*numbers: int, last: int | None = None, name: str = ID) -> list[Membership]:
    return [Membership(name, number, number == last) for number in numbers]


def naive_anomalies(members: list[Membership], gone: list[Membership]) -> set[Anomaly]:
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
    assert (position.seen, position.highest) == (len(there), max(there, default=0))
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
    shuffled = members + group(1, 2, 3, name="cd" * 24)
    shuffle.shuffle(shuffled)
    assert assess(ID, shuffled, expired=reversed(gone)) == position


def test_a_gap_of_a_thousand_million_numbers_costs_nothing() -> None:
    """A gap of any size is one range."""
    position = assess(ID, group(1, 999_999_999, last=999_999_999))
    assert (position.missing, position.contiguous, position.seen) == (((2, 999_999_998),), 1, 2)
