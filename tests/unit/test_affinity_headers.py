"""What headers may say of an affinity set."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relatum.contexts.affinity._affinity_headers import NO_WISH, Wish, wish_of
from relatum.errors import InvalidInput

NAMES = st.text(st.characters(blacklist_categories=["Cs"], blacklist_characters="\0"), min_size=1, max_size=200)


@pytest.mark.parametrize("headers", [None, {}, {"order_id": "o1"}, {"affinity_set": None}, {"affinity_last": False}])
def test_message_without_names_is_of_no_set(headers: dict[str, Any] | None) -> None:
    """A message that names neither a set nor a predecessor may go anywhere."""
    assert wish_of(headers, "affinity_set") == NO_WISH


@given(NAMES, st.sampled_from([True, False, None]))
def test_names_of_sets_are_taken_as_they_are(name: str, last: bool | None) -> None:
    """Any text names a set, exactly as it is written."""
    headers = {"affinity_set": name, "affinity_last": last}
    assert wish_of(headers, "affinity_set") == Wish(name, is_last=last is True)


def test_another_header_can_name_sets() -> None:
    """The header is the one the super stream is used with, and no other."""
    headers = {"invoice": "i1", "affinity_set": "s1"}
    assert wish_of(headers, "invoice").name == "i1"


def test_predecessor_can_end_its_set() -> None:
    """A message that joins by its predecessor may be the last of the set."""
    headers = {"affinity_predecessor": "m1", "affinity_last": True}
    assert wish_of(headers, "affinity_set") == Wish(None, is_last=True, predecessor="m1")


@pytest.mark.parametrize(
    "headers",
    [
        {"affinity_set": 7},
        {"affinity_set": ""},
        {"affinity_set": "a\0b"},
        {"affinity_set": "\ud800"},
        {"affinity_set": "é" * 513},
        {"affinity_set": b"s1"},
        {"affinity_predecessor": 17},
        {"affinity_predecessor": ""},
        {"affinity_set": "s1", "affinity_predecessor": "m1"},
        {"affinity_set": "s1", "affinity_last": 1},
        {"affinity_set": "s1", "affinity_last": "true"},
        {"affinity_last": True},
    ],
)
def test_headers_that_make_no_sense_are_refused(headers: dict[str, Any]) -> None:
    """What cannot be meant is one error that says nothing was sent."""
    with pytest.raises(InvalidInput, match="nothing was sent"):
        wish_of(headers, "affinity_set")


def test_longest_name_is_taken() -> None:
    """A name of exactly 1,024 bytes is one."""
    assert wish_of({"affinity_set": "é" * 512}, "affinity_set").name == "é" * 512
