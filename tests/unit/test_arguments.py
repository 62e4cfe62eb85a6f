"""Whatever is given for a number, a time or a name is one clear error, or can be used."""

import math
from collections.abc import Callable
from typing import Any, cast

import pytest

from relatum.checks import COUNT_MAX, SECONDS_MAX, checked_count, checked_name, checked_seconds, seconds_text
from relatum.contexts import SerialOptions
from relatum.errors import InvalidInput
from relatum.reading import Message, Properties, StreamReader
from relatum.waiting import Deadline
from relatum.wire import _frames as frames
from relatum_consumer import Relations
from relatum_consumer.groups import GroupConsumer
from relatum_consumer.groups.reading import _group_position as group_lookups
from relatum_consumer.groups.reading._group_options import GroupOptions
from relatum_consumer.lookups import InTime, Lookups

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


MESSAGE = Message("s", 1, None, None, lambda: ({"relatum_time": 5}, Properties(), b"", True))
LOOKUPS = Lookups("/")
CATALOG = LOOKUPS.catalog
ID = "0" * 48

LIMITED: dict[str, Callable[[Any], Any]] = {
    "related": lambda limit: next(LOOKUPS.related(MESSAGE, None, None, limit, "oldest", complete=False)),
    "find": lambda limit: next(LOOKUPS.find("k", 1, None, None, None, limit, "oldest", complete=False)),
    # Its first request carries the steps that check it.
    "wait_related": lambda limit: next(
        cast(InTime, next(LOOKUPS.wait_related(MESSAGE, None, None, limit, "oldest", 1.0))).steps
    ),
    "prefetch": lambda limit: GroupConsumer("c", prefetch=limit),
    "deliveries_max": lambda limit: GroupConsumer("c", deliveries_max=limit),
}
TIMED: dict[str, Callable[[Any], Any]] = {
    "wait_related": lambda seconds: next(LOOKUPS.wait_related(MESSAGE, None, None, None, "oldest", seconds)),
    "idle": lambda seconds: GroupOptions(None, idle_timeout_s=seconds),
    "incomplete_groups": lambda seconds: next(group_lookups.incomplete(CATALOG, None, seconds, complete=True)),
    "lease_s": lambda seconds: GroupConsumer("c", lease_s=seconds),
}
NAMED: dict[str, Callable[[Any], Any]] = {
    "related": lambda name: next(LOOKUPS.related(MESSAGE, name, None, None, "oldest", complete=False)),
    "find": lambda name: next(LOOKUPS.find("k", 1, name, None, None, None, "oldest", complete=False)),
    "after": lambda name: next(LOOKUPS.beside("after", MESSAGE, name, None, complete=False)),
    "window": lambda name: next(LOOKUPS.window(MESSAGE, name, 1.0, 1.0, None, complete=False)),
    "group": lambda name: next(group_lookups.group(CATALOG, ID, name, "logical", complete=True)),
    "group_position": lambda name: next(group_lookups.position(CATALOG, ID, name, complete=True)),
}


@pytest.mark.parametrize("call", LIMITED.values(), ids=LIMITED)
@pytest.mark.parametrize("value", [2**63 - 1, 2**63, 0, True, 1.0], ids=str)
def test_limits_are_checked_before_anything_is_asked(call: Callable[[Any], Any], value: Any) -> None:
    """A limit that PostgreSQL cannot count to is our error, and no statement is run."""
    with pytest.raises(InvalidInput):
        call(value)


@pytest.mark.parametrize("call", TIMED.values(), ids=TIMED)
@pytest.mark.parametrize("value", [math.nan, math.inf, 1e300, -1, True], ids=str)
def test_times_are_checked_before_anything_is_asked(call: Callable[[Any], Any], value: Any) -> None:
    """A time that no wait can take is our error."""
    with pytest.raises(InvalidInput):
        call(value)


@pytest.mark.parametrize("call", NAMED.values(), ids=NAMED)
@pytest.mark.parametrize("value", ["a\0b", "\ud800", "", b"orders", 7], ids=ascii)
def test_names_are_checked_before_anything_is_asked(call: Callable[[Any], Any], value: Any) -> None:
    """A name that no stream can have is our error."""
    with pytest.raises(InvalidInput):
        call(value)


READING: dict[str, Callable[[Any], Any]] = {
    "timeout_s": lambda value: StreamReader.open("amqp://127.0.0.1:1", timeout_s=value),
    "Relations": lambda value: Relations("amqp://127.0.0.1:1", "postgresql://127.0.0.1:1/x", timeout_s=value),
    "batch_s": lambda value: SerialOptions(batch_s=value),
    "lease_s": lambda value: SerialOptions(lease_s=value),
}


@pytest.mark.parametrize("call", READING.values(), ids=READING)
@pytest.mark.parametrize("value", [math.nan, math.inf, 1e300, -1, True, "1"], ids=str)
def test_times_are_checked_before_anything_is_connected(call: Callable[[Any], Any], value: Any) -> None:
    """A time-out that no socket and no lock can take is our error, and nothing was opened."""
    with pytest.raises(InvalidInput):
        call(value)


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
