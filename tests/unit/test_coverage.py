"""Ranges of offsets: what is covered, what is missing, for which keys."""

from datetime import UTC, datetime
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from relatum.recording.ranges import unrecorded
from relatum.store.coverage import TIME, CoverageRow, covered, merged, missing

ranges = st.lists(
    st.tuples(st.integers(0, 60), st.integers(0, 60)).map(lambda pair: (min(pair), max(pair))), max_size=8
)


def points(spans: list[tuple[int, int]]) -> set[int]:
    return {offset for start, end in spans for offset in range(start, end)}


def row(start: int, end: int, keys: tuple[int, ...], *, time: bool = True, kind: str = "recorded") -> CoverageRow:
    return CoverageRow(1, 1, start, end, keys, time, kind, False, None, None, None, datetime.now(UTC))


@given(ranges)
def test_merged_ranges_cover_the_same_offsets_and_lie_apart(spans: list[tuple[int, int]]) -> None:
    """Merging neither adds nor drops an offset, and leaves nothing to merge."""
    result = merged(spans)
    assert points(result) == points(spans)
    assert all(a[1] < b[0] for a, b in pairwise(result))


@given(ranges, st.integers(0, 60), st.integers(0, 60))
def test_missing_is_the_complement(spans: list[tuple[int, int]], a: int, b: int) -> None:
    """What is missing and what is there make the whole, without overlap."""
    within = (min(a, b), max(a, b))
    gaps = missing(within, merged(spans))
    assert points(gaps) == points([within]) - points(spans)


@given(st.lists(st.tuples(ranges, st.sets(st.integers(0, 3))), max_size=4))
def test_segments_name_the_keys_each_offset_lacks(parts: list[tuple[list[tuple[int, int]], set[int]]]) -> None:
    """For every offset, the segment that holds it names just the keys no range has there."""
    rows = [row(start, end, tuple(ids - {TIME}), time=TIME in ids) for spans, ids in parts for start, end in spans]
    segments = unrecorded(rows, (0, 60), range(4))
    for offset in range(60):
        lacking = {key for key in range(4) if not any(a <= offset < b for a, b in covered(rows, key))}
        found = [set(segment.key_ids) for segment in segments if segment.from_offset <= offset < segment.to_offset]
        assert found == ([lacking] if lacking else [])


def test_a_hole_covers_nothing() -> None:
    """Offsets that retention took are not recorded, whatever their range says."""
    rows = [row(0, 10, (1,)), row(10, 20, (1,), kind="hole")]
    assert covered(rows, 1) == [(0, 10)]
