"""Ranges of offsets, cut into slices, and offsets in JSON."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relatum.errors import InvalidInput
from relatum_spark._offsets import Slice, offsets_json, parse_moments, parse_offsets, slices

RANGES = st.dictionaries(
    st.sampled_from("abc"), st.tuples(st.integers(0, 1000), st.integers(0, 1000)).map(lambda pair: tuple(sorted(pair)))
)


@given(RANGES, st.none() | st.integers(1, 20), st.none() | st.integers(1, 300))
def test_slices_cover_each_offset_once(ranges: dict[str, tuple[int, int]], least: int | None, most: int | None) -> None:
    """Every offset of the ranges is in one slice, in order; no slice is empty or too long; there are enough."""
    found = slices(ranges, min_partitions=least, max_records=most)
    wanted = [(stream, offset) for stream, bounds in ranges.items() for offset in range(*bounds)]
    assert [(each.stream, offset) for each in found for offset in range(each.start, each.stop)] == wanted
    assert all(len(each) >= 1 and (most is None or len(each) <= most) for each in found)
    assert len(found) >= min(least or 0, len(wanted)) or len(found) == len(wanted)


def test_slices_are_even() -> None:
    """A range one too long for two slices becomes three of nearly the same length, not one of a single offset."""
    assert [len(each) for each in slices({"a": (0, 201)}, max_records=100)] == [67, 67, 67]


def test_nothing_gives_no_slices() -> None:
    """Empty ranges give none, however many partitions are wanted."""
    assert slices({"a": (7, 7)}, min_partitions=4, max_records=1) == []
    assert slices([Slice("a", 5, 4)]) == []


def test_offsets_at_the_limit() -> None:
    """The last offset there can be is cut like any other."""
    last = 2**63 - 1
    assert slices({"a": (last - 2, last)}, max_records=1) == [
        Slice("a", last - 2, last - 1),
        Slice("a", last - 1, last),
    ]


def test_offsets_come_back_from_their_json() -> None:
    """What is written can be read, with -2, -1 and 2^63-1."""
    offsets = {"b": -2, "a": 2**63 - 1, "ü": -1}
    assert parse_offsets(offsets_json(offsets), option="startingOffsets") == offsets
    assert list(json.loads(offsets_json(offsets))) == ["a", "b", "ü"]


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        "1",
        '"x"',
        '{"a": -3}',
        '{"a": 1.5}',
        '{"a": true}',
        '{"a": null}',
        '{"a": "1"}',
        '{"a": 1, "a": 2}',
        '{"a": 9223372036854775808}',
    ],
)
def test_bad_offsets_are_refused(text: str) -> None:
    """What is no JSON of whole numbers by stream is one error that names the option."""
    with pytest.raises(InvalidInput, match="startingOffsets"):
        parse_offsets(text, option="startingOffsets")


def test_moments_are_not_before_1970() -> None:
    """-1 and -2 mean nothing among moments."""
    assert parse_moments('{"a": 0}', option="startingOffsetsByTimestamp") == {"a": 0}
    with pytest.raises(InvalidInput, match="startingOffsetsByTimestamp"):
        parse_moments('{"a": -1}', option="startingOffsetsByTimestamp")
