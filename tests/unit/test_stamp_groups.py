"""What the interceptor makes of the headers of a group."""

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import relatum
from relatum.errors import InvalidGroup
from relatum.keys import KeyDefinition
from relatum.limits import GROUP_SEQUENCE_MAX
from relatum.membership import GROUP_KEY, Membership, membership
from relatum.publishing import Stamper

ID = "0123456789abcdef" * 3

KEYS: list[list[KeyDefinition]] = [[GROUP_KEY], [KeyDefinition("order_id"), relatum.GROUP_KEY]]


def stamp(stamper: Stamper, headers: dict[str, Any]) -> Any:
    """Stamp a message of these headers."""
    return stamper.stamp(headers, None, 0, None, b"")


@pytest.mark.parametrize("keys", KEYS)
@given(st.integers(1, GROUP_SEQUENCE_MAX), st.booleans())
def test_the_headers_of_a_place_go_out_as_they_are(keys: list[KeyDefinition], sequence: int, last: bool) -> None:
    """All three given: nothing is added."""
    headers = Membership(ID, sequence, last).headers
    got = stamp(Stamper(keys), headers)
    assert (got.headers, got.added) == (headers, ())


@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize("missing", [{}, {"group_last": None}])
def test_a_missing_flag_is_added_as_false(keys: list[KeyDefinition], missing: dict[str, Any]) -> None:
    """The key has a value only where all three are there, so the flag is added, named as added, in a copy."""
    headers = {"group_id": ID, "group_sequence": 3, **missing}
    before = copy.deepcopy(headers)
    got = stamp(Stamper(keys), headers)
    assert got.headers["group_last"] is False
    assert got.added == ("group_last",)
    assert headers == before
    assert membership(got.headers) == Membership(ID, 3, False)


@pytest.mark.parametrize("keys", KEYS)
def test_other_messages_get_no_headers_of_a_group(keys: list[KeyDefinition]) -> None:
    """A message without them, or with None in their place, is sent without a flag."""
    assert stamp(Stamper(keys), {"order_id": "1"}).headers == {"order_id": "1"}
    nothing = {"group_id": None, "group_sequence": None}
    assert stamp(Stamper(keys), nothing).headers == nothing


BAD: list[tuple[dict[str, Any], str]] = [
    ({"group_id": ID}, "group_sequence_missing"),
    ({"group_sequence": 1}, "group_id_missing"),
    ({"group_last": True}, "group_id_missing"),
    ({"group_id": "short", "group_sequence": 1}, "group_id_not_48_hex_digits"),
    ({"group_id": ID, "group_sequence": 0}, "group_sequence_out_of_range"),
    ({"group_id": ID, "group_sequence": True}, "group_sequence_not_an_integer"),
    ({"group_id": ID, "group_sequence": 1, "group_last": 1}, "group_last_not_a_boolean"),
]


@pytest.mark.parametrize("keys", KEYS)
@pytest.mark.parametrize(("headers", "reason"), BAD)
def test_bad_headers_are_refused(keys: list[KeyDefinition], headers: dict[str, Any], reason: str) -> None:
    """Headers that contradict each other are an error with a reason."""
    with pytest.raises(InvalidGroup) as caught:
        stamp(Stamper(keys), headers)
    assert caught.value.reason == reason


@pytest.mark.parametrize("headers", [headers for headers, _ in BAD])
def test_headers_of_these_names_pass_where_groups_are_not_asked_for(headers: dict[str, Any]) -> None:
    """An application's own headers may have these names: without the key, nothing is checked and nothing added."""
    got = stamp(Stamper([KeyDefinition("order_id")]), headers)
    assert (got.headers, got.added) == (headers, ())


@pytest.mark.parametrize(("headers", "reason"), BAD)
def test_bad_headers_can_be_let_through_and_counted(headers: dict[str, Any], reason: str) -> None:
    """Where invalid values are skipped, the message goes out untouched and the reason is counted."""
    stamper = Stamper([GROUP_KEY], on_invalid="skip")
    for count in (1, 2):
        got = stamp(stamper, headers)
        assert (got.headers, got.added) == (headers, ())
        assert stamper.skipped == {("message_group", reason): count}


def test_a_flag_is_checked_where_the_id_comes_from_the_body() -> None:
    """A header that is lifted out of the body takes part in the check."""
    stamper = Stamper([KeyDefinition("group_id", lambda body: body.decode()), GROUP_KEY])
    got = stamper.stamp({"group_sequence": 1}, None, 0, None, ID.encode())
    assert got.added == ("group_id", "group_last")
    with pytest.raises(InvalidGroup):
        stamper.stamp({"group_sequence": 1}, None, 0, None, b"short")
