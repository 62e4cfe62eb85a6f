"""Whatever is given for a number, a time or a name is one clear error, or can be used."""

import math
from typing import Any

import pytest

from relatum.checks import COUNT_MAX, SECONDS_MAX, checked_count, checked_name, checked_seconds, seconds_text
from relatum.errors import InvalidInput
from relatum.waiting import Deadline
from relatum.wire import _frames as frames

COUNTS: list[Any] = [0, -1, True, 1.0, math.nan, math.inf, "1", None, 2**31, 2**63 - 1, 2**63, 10**5000]
SECONDS: list[Any] = [-1, -0.001, True, math.nan, math.inf, -math.inf, "1", None, 1e300, 2**63, 10**5000]
NAMES: list[Any] = ["", "a\0b", "\ud800", b"orders", 7, None, ["orders"]]


@pytest.mark.parametrize("value", COUNTS, ids=range(len(COUNTS)))
def test_what_is_no_count(value: Any) -> None:
    """It is refused by its argument's name, in a message of a line."""
    with pytest.raises(InvalidInput, match=r"^limit= takes") as caught:
        checked_count("limit", value)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("value", SECONDS, ids=range(len(SECONDS)))
def test_what_is_no_time(value: Any) -> None:
    """It is refused by its argument's name; so is a time that no wait can take."""
    with pytest.raises(InvalidInput, match=r"^timeout_s= takes seconds") as caught:
        checked_seconds("timeout_s", value)
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize("value", NAMES, ids=ascii)
def test_what_is_no_name(value: Any) -> None:
    """It is refused, and can be shown on any terminal."""
    with pytest.raises(InvalidInput, match=r"^stream= takes a name") as caught:
        checked_name("stream", value)
    str(caught.value).encode()


def test_the_ends_of_what_can_be_given() -> None:
    """The least and the most are taken."""
    assert [checked_count("limit", each) for each in (1, COUNT_MAX)] == [1, COUNT_MAX]
    assert [checked_seconds("timeout_s", each) for each in (0, 0.5, SECONDS_MAX)] == [0, 0.5, SECONDS_MAX]
    assert checked_seconds("before_s", 1e300, most=math.inf) == 1e300
    assert checked_name("stream", "bestellungen-ä\U0001f600") == "bestellungen-ä\U0001f600"


def test_a_name_of_half_a_character_is_no_name_to_the_broker() -> None:
    """It is our error, not the codec's."""
    with pytest.raises(InvalidInput, match="half a surrogate pair"):
        frames.string("orders-\ud800")


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0, "0 s"),
        (0.05, "0.05 s"),
        (0.5, "0.5 s"),
        (1, "1 s"),
        (2.3791, "2.4 s"),
        (10.0, "10 s"),
        (12.6, "13 s"),
        (86_400, "86,400 s"),
    ],
)
def test_errors_show_seconds_as_people_say_them(seconds: float, shown: str) -> None:
    """No more digits than anybody reads, and no zeros behind a point."""
    assert seconds_text(seconds) == shown


def test_a_call_whose_time_is_over_says_how_long_that_was_and_no_name_of_python() -> None:
    """Who reads it may never have seen the argument: a command, or the page, has set it."""
    assert str(Deadline(10.0)) == "10 s"
    assert str(Deadline(None, Deadline(2.3791))) == "2.4 s"
