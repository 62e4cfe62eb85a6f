"""The arguments of joins: what is refused before anything runs."""

from datetime import timedelta
from typing import Any

import pytest

from relatum.errors import InvalidInput
from relatum.limits import TIME_US_MAX
from relatum_spark import as_of, conversations, related_pairs, unmatched
from relatum_spark._pairs import span_of
from relatum_spark._sides import keys_of, side_of, span_us


@pytest.mark.parametrize("given", ["orders", ["orders"], ("orders", "orders")])
def test_a_side_is_given_by_names(given: Any) -> None:
    """One name, or several, each counted once."""
    assert side_of("left", given).names == ("orders",)


@pytest.mark.parametrize("given", ["", [], [""], None, 7, ["orders", None], {"orders": 1}])
def test_what_is_no_side_is_refused(given: Any) -> None:
    """No name at all, an empty one, or something else; the error names the argument."""
    with pytest.raises(InvalidInput, match="right="):
        side_of("right", given)


@pytest.mark.parametrize("given", ["", [], [""], None, 7, ["a", "a"]])
def test_what_is_no_key_is_refused(given: Any) -> None:
    """No name at all, an empty one, one that is there twice, or something else."""
    with pytest.raises(InvalidInput, match="on="):
        keys_of(given)


@pytest.mark.parametrize(
    ("given", "microseconds"),
    [
        (0, 0),
        (1, 1_000_000),
        (0.000001, 1),
        (timedelta(microseconds=3), 3),
        # A float of seconds would be off by some microseconds here.
        (timedelta(days=200_000, microseconds=1), 200_000 * 86_400 * 1_000_000 + 1),
        (timedelta.max, 2 * TIME_US_MAX),
    ],
)
def test_a_span_of_time_is_exact(given: Any, microseconds: int) -> None:
    """Seconds and timedeltas, to the microsecond; no more than the calendar holds."""
    assert span_us("within", given) == microseconds


def test_seconds_past_the_calendar_mean_all_of_it() -> None:
    """As many seconds as a float holds join everything there is."""
    assert span_us("within", 1e300) >= TIME_US_MAX


@pytest.mark.parametrize("given", [-1, -1e-9, timedelta(microseconds=-1), float("nan"), float("inf"), True, "1", None])
def test_what_is_no_span_is_refused(given: Any) -> None:
    """Negative ones, endless ones, and what is no number."""
    with pytest.raises(InvalidInput, match="tolerance="):
        span_us("tolerance", given)


def test_a_span_is_given_one_way_or_the_other() -> None:
    """`within` both ways; `before` or `after` alone mean nothing the other way; both kinds at once are refused."""
    assert span_of(None, None, None) is None
    assert span_of(2, None, None) == (2_000_000, 2_000_000)
    assert span_of(None, 1, None) == (1_000_000, 0)
    assert span_of(None, None, 1) == (0, 1_000_000)
    assert span_of(None, 1, 0) == (1_000_000, 0)
    with pytest.raises(InvalidInput, match="within="):
        span_of(1, 1, None)


@pytest.mark.parametrize("function", [related_pairs, as_of, unmatched])
def test_joins_check_their_arguments_first(function: Any) -> None:
    """Without a session, a database or a broker, wrong arguments are named before those are missed."""
    for left, right, on in [("", "b", "key"), ("a", [], "key"), ("a", "b", "")]:
        with pytest.raises(InvalidInput):
            function(None, left, right, on=on)


def test_each_join_checks_its_own_arguments_first() -> None:
    """Directions, tolerances, ages and sizes that can't be."""
    with pytest.raises(InvalidInput, match="direction="):
        as_of(None, "a", "b", on="key", direction="sideways")
    with pytest.raises(InvalidInput, match="tolerance="):
        as_of(None, "a", "b", on="key", tolerance=-1)
    with pytest.raises(InvalidInput, match="within="):
        related_pairs(None, "a", "b", on="key", within=timedelta(seconds=-1))
    with pytest.raises(InvalidInput, match="older_than="):
        unmatched(None, "a", "b", on="key", older_than=-1)
    with pytest.raises(InvalidInput, match="keys="):
        conversations(None, [])
    with pytest.raises(InvalidInput, match="streams="):
        conversations(None, "key", streams=[])
    for size in (0, -1, 1.5, True):
        with pytest.raises(InvalidInput, match="max_value_size="):
            conversations(None, "key", max_value_size=size)
