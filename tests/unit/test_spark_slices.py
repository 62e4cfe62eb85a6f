"""How work is cut for Spark's tasks and micro-batches: ranges of offsets, back-fills, and pages of the table."""

import pickle
import re
from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from relatum import Broker
from relatum.keys import KeyDefinition
from relatum.recording.backfilling import Plan
from relatum.recording.ranges import Segment
from relatum.store.catalog import StreamRow

pytest.importorskip("pyspark")

from relatum_spark._backfill import Filling, cut
from relatum_spark._reading import Slice, plan_end, slices
from relatum_spark._table import cuts_of, ranges

RANGES = st.dictionaries(
    st.sampled_from("abc"), st.tuples(st.integers(0, 1000), st.integers(0, 1000)).map(lambda pair: tuple(sorted(pair)))
)
LAST = 2**63 - 1


@given(RANGES, st.none() | st.integers(1, 20), st.none() | st.integers(1, 300))
@example({"a": (LAST - 2, LAST), "b": (5, 4)}, None, 1)
def test_slices_cover_each_offset_once(ranges: dict[str, tuple[int, int]], least: int | None, most: int | None) -> None:
    """Every offset is in one slice, in order; none is empty or too long; a stream's are even, and there are enough."""
    whole = [Slice(stream, *bounds) for stream, bounds in ranges.items()]
    found = slices(whole, min_partitions=least, max_records=most)
    wanted = [(stream, offset) for stream, bounds in ranges.items() for offset in range(*bounds)]
    assert [(each.stream, offset) for each in found for offset in range(each.start, each.stop)] == wanted
    assert all(len(each) >= 1 and (most is None or len(each) <= most) for each in found)
    assert len(found) >= min(least or 0, len(wanted)) or len(found) == len(wanted)
    for stream in ranges:
        lengths = {len(each) for each in found if each.stream == stream}
        assert not lengths or max(lengths) - min(lengths) <= 1


OFFSETS = st.integers(0, LAST)
LAGS = st.one_of(st.integers(0, 5), st.integers(0, 2**40))
STREAMS = st.dictionaries(st.text("abcdef", min_size=1, max_size=3), st.tuples(OFFSETS, LAGS), max_size=12)
LIMITS = st.one_of(st.integers(1, 20), st.integers(1, 2**42))


def of(streams: dict[str, tuple[int, int]]) -> tuple[dict[str, int], dict[str, int]]:
    start = {stream: offset for stream, (offset, _) in streams.items()}
    return start, {stream: offset + lag for stream, (offset, lag) in streams.items()}


@given(STREAMS, LIMITS)
def test_a_batch_takes_what_is_there_up_to_the_limit(streams: dict[str, tuple[int, int]], limit: int) -> None:
    """A batch ends between its start and the streams' ends, and its size is the smaller of limit and lag."""
    start, ends = of(streams)
    end = plan_end(start, ends, limit)
    assert end.keys() == start.keys()
    assert all(start[stream] <= end[stream] <= ends[stream] for stream in start)
    assert sum(end[stream] - start[stream] for stream in start) == min(limit, sum(lag for _, lag in streams.values()))
    assert plan_end(start, ends, None) == ends


@given(st.dictionaries(st.text("abcdef", min_size=1, max_size=3), st.integers(0, 10**9), max_size=12), LIMITS)
def test_a_stream_gets_its_part_in_proportion_to_its_lag(lags: dict[str, int], limit: int) -> None:
    """Beside the one offset each stream gets first, no stream gets an offset more or less than its proportion."""
    lagging = {stream: lag for stream, lag in lags.items() if lag}
    if len(lagging) > limit or sum(lagging.values()) <= limit:
        return
    end = plan_end(dict.fromkeys(lags, 0), lags, limit)
    rest, lag_rest = limit - len(lagging), sum(lagging.values()) - len(lagging)
    for stream, lag in lagging.items():
        # Whole numbers: |end - 1 - rest * (lag - 1) / lag_rest| <= 1
        assert abs((end[stream] - 1) * lag_rest - rest * (lag - 1)) <= lag_rest


@given(st.integers(1, 9), st.integers(1, 9), OFFSETS)
def test_no_stream_starves_where_the_limit_is_below_the_number_of_streams(count: int, limit: int, begin: int) -> None:
    """While all streams lag far, each gets something within as many batches as there are streams."""
    start = {str(number): begin for number in range(count)}
    reached = start
    for _ in range(count):
        reached = plan_end(reached, dict.fromkeys(start, 2**64), limit)
    assert all(reached[stream] > start[stream] for stream in start)


def test_a_stream_that_ends_before_its_start_stays_where_it_is() -> None:
    """A replica that lags takes nothing back."""
    assert plan_end({"a": 10, "b": 5}, {"a": 7, "b": 9}, 3) == {"a": 10, "b": 8}


def plan_of(name: str, *segments: Segment) -> Plan:
    row = StreamRow(1, "/", name, None, 1, True, 0)
    return Plan(row, (KeyDefinition("a"),), segments)


SEGMENTS = st.lists(st.tuples(st.integers(0, 1000), st.integers(1, 500), st.integers(1, 3)), max_size=5)


@given(st.lists(SEGMENTS, max_size=3), st.integers(1, 20), st.integers(1, 700))
def test_a_back_fill_is_cut_small(found: list[list[tuple[int, int, int]]], at_once: int, slice_offsets: int) -> None:
    """Every offset that lacks a key is in one part with the same keys, in order; there are parts for all slots."""
    plans = [
        plan_of(f"s{number}", *(Segment(at, at + size, frozenset([key])) for at, size, key in parts))
        for number, parts in enumerate(found)
    ]

    def each(parts: list[tuple[str, Segment]]) -> list[tuple[str, int, frozenset[int]]]:
        return [(name, at, part.key_ids) for name, part in parts for at in range(part.from_offset, part.to_offset)]

    parts = cut(plans, at_once=at_once, slice_offsets=slice_offsets)
    wanted = each([(plan.stream.name, segment) for plan in plans for segment in plan.segments])
    assert each(parts) == wanted
    assert all(segment.to_offset - segment.from_offset <= slice_offsets for _, segment in parts)
    assert len(parts) >= min(at_once, len(wanted))


def test_the_work_of_the_tasks_can_be_pickled_and_shows_no_credentials() -> None:
    """It travels to executors; nobody prints a password with it."""
    plan = plan_of("s", Segment(0, 5, frozenset([1])))
    work = Filling(Broker("amqp://me:secret@broker/"), "postgresql://me:secret@db/x", {"s": plan}, 50.0)
    assert pickle.loads(pickle.dumps(work)) == work
    assert "secret" not in repr(work)


def met(conditions: list[str], **names: int) -> int:
    plain = [re.sub(r"'\((\d+),0\)'::tid", r"\1", text).replace(" = ", " == ") for text in conditions]
    return sum(eval(text.replace("AND", "and").replace("OR", "or"), {"true": True} | names) for text in plain)


PLACES = st.tuples(st.integers(1, 4), st.integers(0, 50))


@given(rows=st.dictionaries(PLACES, st.integers(0, 200), max_size=60), parts=st.integers(1, 20))
def test_cuts_share_rows_out_evenly(rows: dict[tuple[int, int], int], parts: int) -> None:
    """Whatever was seen, even nothing: cuts are in order, and each part has its share, but for a place."""
    seen = sorted(rows.items())
    cuts = cuts_of(seen, parts)
    assert cuts == sorted(set(cuts))
    assert len(cuts) < parts
    share, largest = sum(rows.values()) / parts, max(rows.values(), default=0)
    edges = [(0, 0), *cuts, (9, 9)]
    for low, high in pairwise(edges):
        assert low == (0, 0) or low in rows
        assert sum(count for place, count in seen if low <= place < high) <= share + largest


@given(
    places=st.dictionaries(PLACES, st.integers(0, 3), max_size=60),
    looked_for=st.tuples(st.integers(1, 4), st.integers(0, 60)),
    parts=st.integers(1, 8),
)
def test_places_are_in_one_range(places: dict[tuple[int, int], int], looked_for: tuple[int, int], parts: int) -> None:
    """Also places that nobody saw when the cuts were made, such as pages behind the last one of a part."""
    cuts = cuts_of(sorted(places.items()), parts)
    for value in ("{}", "'({},0)'::tid"):
        conditions = ranges([1, 2, 3, 4], cuts, "part", "place", value)
        assert met(conditions, part=looked_for[0], place=looked_for[1]) == 1
        assert len(conditions) <= parts


@pytest.mark.parametrize(
    ("parts", "cuts", "conditions"),
    [
        ([], [], ["true"]),
        (
            [0, 1, 5],
            [(0, 2), (5, 0), (5, 2)],
            [
                "part = 0 AND place < '(2,0)'::tid",
                "part = 0 AND place >= '(2,0)'::tid OR part = 1 OR part = 5 AND place < '(0,0)'::tid",
                "part = 5 AND place >= '(0,0)'::tid AND place < '(2,0)'::tid",
                "part = 5 AND place >= '(2,0)'::tid",
            ],
        ),
    ],
)
def test_ranges_keep_to_one_part(parts: list[int], cuts: list[tuple[int, int]], conditions: list[str]) -> None:
    """PostgreSQL then reads the pages of a range and no others."""
    assert ranges(parts, cuts, "part", "place", "'({},0)'::tid") == conditions
