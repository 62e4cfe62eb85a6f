"""What control messages and the header of placed messages say; and that what others wrote there does no harm."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relatum.contexts._entries import Adoption, Control, Fence, Marker, Placed, decode, encode, entry_of
from relatum.limits import INTEGER_MAX

number = st.integers(0, INTEGER_MAX)
name = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20)
names = st.frozensets(name, max_size=4)
control = st.one_of(
    st.builds(Fence, number, number, names),
    st.builds(Marker, number, number, names, name, number),
    st.builds(Adoption, name, number, name, number),
)
fields = st.fixed_dictionaries(
    {},
    optional=dict.fromkeys(
        ("move_id", "epoch", "contexts", "source", "fence_offset", "context", "stream", "offset"),
        st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(), st.lists, max_leaves=3),
    ),
)
kind = st.sampled_from(["fence", "marker", "adoption", "other", None, 5])


@given(control)
def test_what_is_encoded_is_decoded(entry: Control) -> None:
    """Every control message is read as it was written."""
    headers, body = encode(entry)
    assert entry_of(headers, body, "context") == entry


@given(kind, fields)
def test_what_is_decoded_can_be_stored(kind: object, facts: dict[str, Any]) -> None:
    """Whatever others write, it is either no control message, or one whose numbers and texts PostgreSQL takes."""
    entry = decode(kind, json.dumps(facts).encode())
    if entry is not None:
        headers, body = encode(entry)
        assert decode(headers["relatum_control"], body) == entry


@pytest.mark.parametrize(
    ("kind", "facts"),
    [
        ("fence", {"move_id": 1, "epoch": "2", "contexts": ["a"]}),
        ("fence", {"move_id": 1, "epoch": INTEGER_MAX + 1, "contexts": ["a"]}),
        ("fence", {"move_id": True, "epoch": 2, "contexts": ["a"]}),
        ("fence", {"move_id": 1, "epoch": 2, "contexts": [1]}),
        ("fence", {"move_id": 1, "epoch": 2, "contexts": ["\0"]}),
        ("fence", [1, 2, 3]),
        ("marker", {"move_id": 1, "epoch": 2, "contexts": ["a"], "source": 3, "fence_offset": 4}),
        ("marker", {"move_id": 1, "epoch": 2, "contexts": ["a"], "source": "\ud800", "fence_offset": 4}),
        ("adoption", {"context": "a", "epoch": 1, "stream": "s", "offset": -1}),
    ],
)
def test_what_is_not_as_we_write_it_is_an_applications_message(kind: str, facts: object) -> None:
    """A message that only looks like one of ours is delivered, and ends nobody's work."""
    assert decode(kind, json.dumps(facts).encode()) is None


def test_a_body_that_nests_too_deep_is_an_applications_message() -> None:
    """What Python cannot read is none of ours."""
    assert decode("fence", b"[" * 100_000) is None


@pytest.mark.parametrize(
    "text", ["", "1", "1-a", "1--1", "-a-1", "x-a-1", "1-a-²", "1-a-" + "9" * 5_000, 5, None, b"1-a-1"]
)
def test_a_header_that_we_did_not_write_places_nothing(text: object) -> None:
    """Such a message is delivered where it lies."""
    assert Placed.parse(text) is None


@given(number, st.text("0123456789abcdef", min_size=16, max_size=16), number)
def test_where_a_message_was_placed_is_read_as_it_was_written(epoch: int, session: str, numbered: int) -> None:
    """The header says the same on both sides."""
    placed = Placed(epoch, session, numbered)
    assert Placed.parse(str(placed)) == placed
