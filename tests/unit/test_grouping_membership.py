"""Which headers make a message one of a group, what the interceptor makes of them, and what the key says of them."""

import copy
import pickle
from functools import partial
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import relatum
from relatum.errors import InvalidGroup
from relatum.keys import KeyDefinition, bases
from relatum.limits import GROUP_SEQUENCE_MAX
from relatum.membership import (
    GROUP_KEY,
    GroupStatus,
    Membership,
    checked_group_id,
    checked_membership,
    checked_sequence,
    group_status,
    membership,
    new_group_id,
    parse_value,
    value_bounds,
)
from relatum.publishing import Stamper
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


@given(memberships, group_ids)
def test_headers_and_value_tell_the_same_place(place: Membership, other: str) -> None:
    """A place survives its headers and its key's value, which is in its own group's range and in no other's."""
    assert membership(place.headers) == place
    assert checked_membership(place.headers) == place
    assert GROUP_KEY.read(bases(place.headers, {}.get, bytes)) == ([place.value], [])
    assert parse_value(place.value) == place
    low, high = value_bounds(place.group_id)
    assert low <= place.value < high
    if other != place.group_id:
        low, high = value_bounds(other)
        assert not low <= place.value < high


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
        with pytest.raises(InvalidGroup) as caught:
            check(headers)
        assert caught.value.reason == reason
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
