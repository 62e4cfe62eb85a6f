"""Ranges of offsets: which are covered, missing, or still to be scanned for groups."""

from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from relatum.recording.ranges import unrecorded
from relatum.store.coverage import TIME, CoverageRow, covered, merged, missing
from relatum_consumer.groups._finding import unscanned_ranges

ranges = st.lists(
    st.tuples(st.integers(0, 60), st.integers(0, 60)).map(lambda pair: (min(pair), max(pair))), max_size=8
)


def points(spans: list[tuple[int, int]]) -> set[int]:
    return {offset for start, end in spans for offset in range(start, end)}


def row(start: int, end: int, keys: Any, *, number: int = 1, time: bool = True, kind: str = "recorded") -> CoverageRow:
    return CoverageRow(1, start, end, keys, time, kind, coverage_id=number, recorded_at=datetime.now(UTC))


@given(ranges, st.integers(0, 60), st.integers(0, 60))
def test_merged_and_missing_ranges_make_the_whole(spans: list[tuple[int, int]], a: int, b: int) -> None:
    """Merged ranges are apart and cover the same offsets; the missing ones are their complement within a range."""
    result = merged(spans)
    assert points(result) == points(spans)
    assert all(a[1] < b[0] for a, b in pairwise(result))
    within = (min(a, b), max(a, b))
    assert points(missing(within, result)) == points([within]) - points(spans)


@given(st.lists(st.tuples(ranges, st.sets(st.integers(0, 3))), max_size=4))
def test_segments_name_the_keys_each_offset_lacks(parts: list[tuple[list[tuple[int, int]], set[int]]]) -> None:
    """Each offset's segment names exactly the keys for which no range covers it."""
    rows = [row(start, end, tuple(ids - {TIME}), time=TIME in ids) for spans, ids in parts for start, end in spans]
    segments = unrecorded(rows, (0, 60), range(4))
    for offset in range(60):
        lacking = {key for key in range(4) if not any(a <= offset < b for a, b in covered(rows, key))}
        found = [set(segment.key_ids) for segment in segments if segment.from_offset <= offset < segment.to_offset]
        assert found == ([lacking] if lacking else [])


def test_a_hole_covers_nothing() -> None:
    """Offsets in a hole are not recorded."""
    rows = [row(0, 10, (1,)), row(10, 20, (1,), kind="hole")]
    assert covered(rows, 1) == [(0, 10)]


KEY = 7


@given(ranges, ranges, st.integers(0, 60))
def test_what_is_not_scanned_is_due(recorded: list[tuple[int, int]], scanned: list[tuple[int, int]], low: int) -> None:
    """A stretch holds each offset that is recorded, not scanned and not before the start, and no other."""
    rows = [row(*ends, (KEY,), number=number) for number, ends in enumerate(recorded)]
    found = unscanned_ranges(rows, scanned, KEY, low)
    inside = {offset for each in found for offset in range(each.start, each.stop)}
    wanted = {offset for start, stop in recorded for offset in range(start, stop)}
    assert inside == {
        offset for offset in wanted if offset >= low and not any(start <= offset < stop for start, stop in scanned)
    }
    for each in found:
        of_range = rows[each.coverage_id]
        assert of_range.from_offset <= each.start < each.stop <= of_range.to_offset
        assert each.grows == each.start or (each.grows, each.start) in scanned


def test_ranges_without_groups_are_left_out_and_scanned_ones_grow() -> None:
    """Holes and ranges without the group key are not scanned; a stretch extends the scanned range before it."""
    rows = [row(0, 10, (3,)), row(10, 20, (KEY,), number=2), row(20, 30, (KEY,), number=3, kind="hole")]
    assert [(each.start, each.stop) for each in unscanned_ranges(rows, [], KEY)] == [(10, 20)]
    (found,) = unscanned_ranges([row(0, 50, (KEY,))], [(0, 20)], KEY)
    assert (found.grows, found.start, found.stop) == (0, 20, 50)
