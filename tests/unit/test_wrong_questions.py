"""Questions that cannot be answered, refused before the broker or the database is asked."""

from datetime import UTC, datetime, timedelta, timezone

import pytest

from relatum.errors import InvalidInput, InvalidKeyDefinition
from relatum.keys import KeyDefinition
from relatum_consumer.lookups import Lookups

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("since", "until", "said"),
    [
        (NOON, NOON - timedelta(microseconds=1), "since= is later than until="),
        (None, datetime.max.replace(tzinfo=timezone(-timedelta(hours=1))), "until="),
        (datetime.min.replace(tzinfo=timezone(timedelta(hours=1))), None, "since="),
    ],
)
def test_a_span_of_time_that_cannot_be_is_refused(since: datetime, until: datetime, said: str) -> None:
    """The argument is named; nothing is asked."""
    with pytest.raises(InvalidInput, match=said):
        next(Lookups("/").find("order_id", 1, None, since, until, 1, "newest", complete=False))


@pytest.mark.parametrize("names", ["s" * 256, ["orders", "s" * 1000]])
def test_a_name_no_stream_can_have_is_refused(names: str | list[str]) -> None:
    """A stream's name has 255 bytes at most; nothing is asked."""
    with pytest.raises(InvalidInput, match="255 bytes"):
        next(Lookups("/").find("order_id", 1, names, None, None, 1, "newest", complete=False))


@pytest.mark.parametrize("values", [("4711", "4712"), ["4711"], ()])
def test_a_key_of_one_part_takes_one_value(values: list[str] | tuple[str, ...]) -> None:
    """Several values are not taken for a nested one."""
    with pytest.raises(InvalidKeyDefinition, match="the key 'order_id' takes one value"):
        KeyDefinition("order_id").canonical_query(values)
