"""Ranges of offsets: cut into slices, and shared out over micro-batches."""

from hypothesis import given
from hypothesis import strategies as st

from relatum_spark._offsets import Slice, plan_end, slices

RANGES = st.dictionaries(
    st.sampled_from("abc"), st.tuples(st.integers(0, 1000), st.integers(0, 1000)).map(lambda pair: tuple(sorted(pair)))
)


def whole(ranges: dict[str, tuple[int, int]]) -> list[Slice]:
    """Slices of ranges by stream."""
    return [Slice(stream, *bounds) for stream, bounds in ranges.items()]


@given(RANGES, st.none() | st.integers(1, 20), st.none() | st.integers(1, 300))
def test_slices_cover_each_offset_once(ranges: dict[str, tuple[int, int]], least: int | None, most: int | None) -> None:
    """Every offset of the ranges is in one slice, in order; no slice is empty or too long; there are enough."""
    found = slices(whole(ranges), min_partitions=least, max_records=most)
    wanted = [(stream, offset) for stream, bounds in ranges.items() for offset in range(*bounds)]
    assert [(each.stream, offset) for each in found for offset in range(each.start, each.stop)] == wanted
    assert all(len(each) >= 1 and (most is None or len(each) <= most) for each in found)
    assert len(found) >= min(least or 0, len(wanted)) or len(found) == len(wanted)


def test_slices_are_even() -> None:
    """A range one too long for two slices becomes three of nearly the same length, not one of a single offset."""
    assert [len(each) for each in slices([Slice("a", 0, 201)], max_records=100)] == [67, 67, 67]


def test_nothing_gives_no_slices() -> None:
    """Empty ranges give none, however many partitions are wanted."""
    assert slices([Slice("a", 7, 7)], min_partitions=4, max_records=1) == []
    assert slices([Slice("a", 5, 4)]) == []


def test_offsets_at_the_limit() -> None:
    """The last offset there can be is cut like any other."""
    last = 2**63 - 1
    assert slices([Slice("a", last - 2, last)], max_records=1) == [
        Slice("a", last - 2, last - 1),
        Slice("a", last - 1, last),
    ]


# --- how one micro-batch is shared out over streams -------------------------------------------------------

OFFSETS = st.integers(0, 2**63 - 1)
LAGS = st.one_of(st.integers(0, 5), st.integers(0, 2**40))
STREAMS = st.dictionaries(st.text("abcdef", min_size=1, max_size=3), st.tuples(OFFSETS, LAGS), max_size=12)
LIMITS = st.one_of(st.integers(1, 20), st.integers(1, 2**42))


def of(streams: dict[str, tuple[int, int]]) -> tuple[dict[str, int], dict[str, int]]:
    """Starts and ends out of starts and lags."""
    start = {stream: offset for stream, (offset, _) in streams.items()}
    return start, {stream: offset + lag for stream, (offset, lag) in streams.items()}


@given(STREAMS, LIMITS)
def test_a_batch_takes_as_much_as_the_limit_allows_and_nothing_that_is_not_there(
    streams: dict[str, tuple[int, int]], limit: int
) -> None:
    """A batch ends between its start and the streams' ends, and its size is the smaller of limit and lag."""
    start, ends = of(streams)
    end = plan_end(start, ends, limit)
    assert end.keys() == start.keys()
    assert all(start[stream] <= end[stream] <= ends[stream] for stream in start)
    assert sum(end[stream] - start[stream] for stream in start) == min(limit, sum(lag for _, lag in streams.values()))


@given(STREAMS)
def test_without_a_limit_a_batch_takes_everything(streams: dict[str, tuple[int, int]]) -> None:
    """No limit ends at the ends."""
    start, ends = of(streams)
    assert plan_end(start, ends, None) == ends


@given(st.dictionaries(st.text("abc", min_size=1, max_size=2), st.tuples(OFFSETS, st.integers(0, 60)), max_size=6))
def test_batches_one_after_the_other_read_each_offset_once(streams: dict[str, tuple[int, int]]) -> None:
    """Batches lie end to end, and the last ends at the ends."""
    start, ends = of(streams)
    batches = 0
    while start != ends:
        end = plan_end(start, ends, 7)
        assert any(end[stream] > start[stream] for stream in start)
        start, batches = end, batches + 1
    assert batches == -(-sum(lag for _, lag in streams.values()) // 7)


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
    ends = dict.fromkeys(start, 2**64)
    reached = start
    for _ in range(count):
        reached = plan_end(reached, ends, limit)
    assert all(reached[stream] > start[stream] for stream in start)


def test_a_stream_that_ends_before_its_start_stays_where_it_is() -> None:
    """A replica that lags takes nothing back."""
    assert plan_end({"a": 10, "b": 5}, {"a": 7, "b": 9}, 3) == {"a": 10, "b": 8}
