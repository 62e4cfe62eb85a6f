"""The pieces of a conversation's page by themselves: timeline, tree, spans. No input or output."""

from datetime import UTC, datetime, timedelta
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as some

from relatum_consumer.web._timeline import LANES_MAX, LINES_MAX, branches, span_text, timeline

START = datetime(2026, 11, 23, 9, 30, tzinfo=UTC)


def at(*seconds: float) -> list[datetime | None]:
    """Moments so many seconds after the start."""
    return [START + timedelta(seconds=each) for each in seconds]


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0, "0 s"), (0.000_25, "0.25 ms"), (0.35, "350 ms"), (1.25, "1.25 s"), (59.4, "59.4 s"), (60, "1 min"),
        (185, "3 min 5 s"), (10_799, "3 h"), (86_400 * 1500 + 3600, "1,500 d 1 h"), (-0.35, "−350 ms"),
    ],
)  # fmt: skip
def test_a_span_is_said_in_its_largest_units(seconds: float, words: str) -> None:
    """Two of them at most."""
    assert span_text(seconds) == words


# --- timeline ---------------------------------------------------------------------------------------------


def test_long_silences_are_folded_and_say_how_long_they_are() -> None:
    """Where some are much longer than the others; a regular pace is drawn as it is."""
    picture = timeline(["a"] * 5, at(0, 0.1, 0.2, 10_800.2, 10_800.3), [])
    assert picture is not None
    assert [fold.words for fold in picture.folds] == ["3 h"]
    assert [dot.after for dot in picture.dots] == ["+0 s", "+100 ms", "+200 ms", "+3 h", "+3 h"]
    assert [words for _, words in picture.marks] == ["+0 s", "+3 h"]
    # The break is drawn between its messages, narrower than the time that is not folded.
    (fold,) = picture.folds
    assert picture.dots[2].x < fold.x < fold.x + fold.width < picture.dots[3].x
    for seconds in ([0, 3600], [0, 1, 2, 3], [0, 3600, 3600.001, 7200, 7200.001, 10_800]):
        regular = timeline(["a"] * len(seconds), at(*seconds), [])
        assert regular is not None
        assert regular.folds == ()


@given(
    some.lists(
        some.tuples(some.integers(0, 40), some.none() | some.integers(0, 10) | some.integers(0, 1 << 45)), max_size=60
    )
)
def test_each_message_has_a_place_of_its_own_in_the_order_of_time(given_: list[tuple[int, int | None]]) -> None:
    """Within the picture, none upon another in its lane, however many streams and silences there are."""
    ordered = sorted(given_, key=lambda each: (each[1] is None, each[1] or 0, each[0]))
    streams = [f"s{stream}" for stream, _ in ordered]
    times = [None if us is None else START + timedelta(microseconds=us) for _, us in ordered]
    picture = timeline(streams, times, [])
    if picture is None:
        assert ordered == []
        return
    assert len(picture.dots) == len(ordered)
    assert len(picture.lanes) <= LANES_MAX
    assert all(0 < dot.x < 100 and 0 < dot.y < picture.height for dot in picture.dots)
    for (one, other), (before, after) in zip(pairwise(picture.dots), pairwise(times), strict=True):
        if before is not None and (after is None or before < after):
            assert one.x < other.x
    points = sorted((dot.y, dot.x) for dot in picture.dots)
    for (lane, x), (lane_after, x_after) in pairwise(points):
        assert lane != lane_after or (x_after - x) * picture.width / 100 > 12


def test_what_is_too_much_is_left_out_and_said() -> None:
    """Streams beyond the last lane share one; lines beyond the last are counted."""
    picture = timeline([f"s{n}" for n in range(50)], at(*range(50)), [(0, 1, 3)] * (LINES_MAX + 7))
    assert picture is not None
    assert [lane.others for lane in picture.lanes] == [0] * (LANES_MAX - 1) + [50 - LANES_MAX + 1]
    assert (len(picture.lines), picture.lines_left_out) == (LINES_MAX, 7)
    assert timeline([], [], []) is None


# --- what came from what ----------------------------------------------------------------------------------


@given(some.lists(some.tuples(some.integers(0, 11), some.integers(0, 11)), max_size=30))
def test_a_tree_has_each_message_once_and_each_cause(edges: list[tuple[int, int]]) -> None:
    """Also where messages came from each other, in a circle."""
    rows = branches(12, edges)
    assert sorted(row.message for row in rows) == list(range(12))
    line: list[int] = []
    for row in rows:
        assert (row.cause is None) == (row.depth == 0)
        del line[row.depth :]
        assert len(line) == row.depth
        assert row.cause is None or line[-1] == row.cause
        line.append(row.message)
        causes = {*row.others, *([] if row.cause is None else [row.cause])}
        assert causes == {cause for cause, effect in edges if effect == row.message}


def test_a_long_chain_is_no_deeper_than_python() -> None:
    """A thousand messages, each from the one before."""
    assert branches(5_000, list(pairwise(range(5_000))))[-1].depth == 4_999
