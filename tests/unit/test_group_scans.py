"""Which parts of a stream a consumer has still to look at."""

from datetime import UTC, datetime

from hypothesis import given
from hypothesis import strategies as st

from relatum.store.coverage import CoverageRow
from relatum_consumer.groups._scanning import unscanned_ranges

KEY = 7

ranges = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)).map(lambda ends: tuple(sorted(ends))), max_size=6)


def row(number: int, start: int, stop: int, keys: tuple[int, ...] = (KEY,), kind: str = "recorded") -> CoverageRow:
    return CoverageRow(number, 1, start, stop, keys, True, kind, False, None, None, None, datetime.now(UTC))


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)).map(sorted), max_size=6), ranges, st.integers(0, 60))
def test_what_is_recorded_and_not_scanned_is_still_to_do(
    recorded: list[list[int]], scanned: list[tuple[int, int]], low: int
) -> None:
    """Each offset that is recorded, not scanned and not before the start is in a stretch, and no other."""
    rows = [row(number, *ends) for number, ends in enumerate(recorded)]
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


def test_what_holds_no_groups_is_left_out() -> None:
    """Holes, and parts recorded for other keys, hold no rows of groups: a back-fill may still bring them."""
    rows = [row(1, 0, 10, keys=(3,)), row(2, 10, 20), row(3, 20, 30, kind="hole")]
    assert [(each.start, each.stop) for each in unscanned_ranges(rows, [], KEY)] == [(10, 20)]


def test_a_stretch_grows_the_range_before_it() -> None:
    """Ranges do not multiply while a stream grows."""
    (found,) = unscanned_ranges([row(1, 0, 50)], [(0, 20)], KEY)
    assert (found.grows, found.start, found.stop) == (0, 20, 50)
