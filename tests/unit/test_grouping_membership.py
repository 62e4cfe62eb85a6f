"""Which headers make a message one of a group, and what the key made of them says."""

import pickle
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import relatum
from relatum.errors import InvalidGroup
from relatum.keys import bases
from relatum.limits import GROUP_SEQUENCE_MAX
from relatum.membership import (
    GROUP_KEY,
    GroupStatus,
    Membership,
    checked_membership,
    group_status,
    membership,
    new_group_id,
    parse_value,
    value_bounds,
)
from relatum.reading import Message

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
odd_headers = st.dictionaries(st.sampled_from(["group_id", "group_sequence", "group_last", "other"]), odd_values)


def message(headers: dict[str, Any]) -> Message:
    """A message with these headers."""
    properties = type("P", (), {"headers": headers, "__getattr__": lambda _self, _name: None})()
    return Message.from_amqp("stream", 0, properties, b"")


@given(memberships)
def test_headers_and_value_tell_the_same_place(place: Membership) -> None:
    """A place survives its headers and its key's value, and the key reads that value out of the headers."""
    assert membership(place.headers) == place
    assert checked_membership(place.headers) == place
    assert GROUP_KEY.read(bases(place.headers, {}.get, bytes)) == ([place.value], [])
    assert parse_value(place.value) == place


@given(odd_headers)
@example({"group_id": ID.encode(), "group_sequence": "7", "group_last": b"true"})
@example({"group_id": ID, "group_sequence": True, "group_last": False})
@example({"group_id": ID, "group_sequence": 1, "group_last": 1})
def test_a_message_is_in_the_group_its_row_says(headers: dict[str, Any]) -> None:
    """Whatever the headers hold, reading them and reading the row made of them agree."""
    values, _ = GROUP_KEY.read(bases(headers, {}.get, bytes))
    assert membership(headers) == (parse_value(values[0]) if values else None)


@given(odd_headers)
def test_what_is_let_out_can_be_found(headers: dict[str, Any]) -> None:
    """Headers that pass the check either name no group, or a place that readers see."""
    try:
        place = checked_membership(headers)
    except InvalidGroup:
        return
    if place is None:
        assert membership(headers) is None
    else:
        assert membership({**headers, "group_last": place.last}) == place


@given(memberships, group_ids)
def test_a_group_is_one_range_of_values(place: Membership, other: str) -> None:
    """A value lies within its own group's bounds, and in no other's."""
    low, high = value_bounds(place.group_id)
    assert low <= place.value < high
    if other != place.group_id:
        low, high = value_bounds(other)
        assert not low <= place.value < high


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


@pytest.mark.parametrize(
    ("headers", "reason"),
    [
        ({"group_sequence": 1}, "group_id_missing"),
        ({"group_last": True}, "group_id_missing"),
        ({"group_last": False}, "group_id_missing"),
        ({"group_id": None, "group_sequence": 1}, "group_id_missing"),
        ({"group_id": ID}, "group_sequence_missing"),
        ({"group_id": ID, "group_last": True}, "group_sequence_missing"),
        ({"group_id": ID[1:], "group_sequence": 1}, "group_id_not_48_hex_digits"),
        ({"group_id": ID + "0", "group_sequence": 1}, "group_id_not_48_hex_digits"),
        ({"group_id": ID.upper(), "group_sequence": 1}, "group_id_not_48_hex_digits"),
        ({"group_id": ID + "\n", "group_sequence": 1}, "group_id_not_48_hex_digits"),
        ({"group_id": "g" * 48, "group_sequence": 1}, "group_id_not_48_hex_digits"),
        ({"group_id": "", "group_sequence": 1}, "group_id_not_48_hex_digits"),
        ({"group_id": bytes(24), "group_sequence": 1}, "group_id_not_48_hex_digits"),
        ({"group_id": 1, "group_sequence": 1}, "group_id_not_48_hex_digits"),
        ({"group_id": ID, "group_sequence": True}, "group_sequence_not_an_integer"),
        ({"group_id": ID, "group_sequence": "1"}, "group_sequence_not_an_integer"),
        ({"group_id": ID, "group_sequence": 1.0}, "group_sequence_not_an_integer"),
        ({"group_id": ID, "group_sequence": 0}, "group_sequence_out_of_range"),
        ({"group_id": ID, "group_sequence": -1}, "group_sequence_out_of_range"),
        ({"group_id": ID, "group_sequence": GROUP_SEQUENCE_MAX + 1}, "group_sequence_out_of_range"),
        ({"group_id": ID, "group_sequence": 1, "group_last": 1}, "group_last_not_a_boolean"),
        ({"group_id": ID, "group_sequence": 1, "group_last": "true"}, "group_last_not_a_boolean"),
    ],
)
def test_bad_headers_are_refused_with_a_reason(headers: dict[str, Any], reason: str) -> None:
    """Each way in which the three headers cannot be what they are has a name of its own."""
    with pytest.raises(InvalidGroup) as caught:
        checked_membership(headers)
    assert caught.value.reason == reason
    assert type(caught.value.reason) is str
    assert pickle.loads(pickle.dumps(caught.value)).reason == reason


@pytest.mark.parametrize("sequence", [1, 2, GROUP_SEQUENCE_MAX])
@pytest.mark.parametrize("last", [True, False, None])
def test_good_headers_pass(sequence: int, last: bool | None) -> None:
    """Numbers from 1 to the limit pass; a flag that is not given is no last message."""
    headers = {"group_id": ID, "group_sequence": sequence, "group_last": last}
    assert checked_membership(headers) == Membership(ID, sequence, bool(last))


def test_no_group_headers_are_no_group() -> None:
    """Messages outside groups are nobody's business."""
    assert checked_membership({"order_id": "1"}) is None
    assert checked_membership({"group_id": None, "group_sequence": None, "group_last": None}) is None


def test_the_status_of_a_message() -> None:
    """In no group, in one, or the last of one."""
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
