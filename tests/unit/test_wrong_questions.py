"""Questions that cannot be answered, refused before the broker or the database is asked."""

from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import pytest

from relatum.errors import InvalidInput, InvalidKeyDefinition
from relatum.keys import KeyDefinition
from relatum_consumer import Expectation, Relations
from relatum_consumer.lookups.by_key import find
from relatum_consumer.lookups.catalog import Catalog
from relatum_consumer.lookups.servers import Servers

NOON = datetime(2026, 1, 1, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("names", "since", "until", "said"),
    [
        (None, NOON, NOON - timedelta(microseconds=1), "since="),
        (None, None, datetime.max.replace(tzinfo=timezone(-timedelta(hours=1))), "until="),
        (None, datetime.min.replace(tzinfo=timezone(timedelta(hours=1))), None, "since="),
        ("s" * 256, None, None, "255 bytes"),
        (["orders", "s" * 1000], None, None, "255 bytes"),
    ],
)
def test_what_cannot_be_asked_is_refused(names: object, since: datetime, until: datetime, said: str) -> None:
    """A span of time that cannot be, and a name that no stream can have; the argument is named."""

    def ask(*_: Any) -> Any:
        raise AssertionError("nobody is asked")

    nobody = Servers(ask, ask)
    with pytest.raises(InvalidInput, match=said):
        find(Catalog(nobody, "/"), "order_id", 1, names, since, until, 1, "newest", complete=False)


def test_what_is_missing_is_not_asked_of_no_time() -> None:
    """The argument is named here, too."""
    with Relations("amqp://127.0.0.1:1/", "postgresql://127.0.0.1:1/nobody") as relations:
        for argument in ("since", "until"):
            with pytest.raises(InvalidInput, match=f"{argument}=: a moment is a datetime, not str"):
                relations.missing(Expectation("paid", "a", "order_id", "b", 60), **{argument: "noon"})


@pytest.mark.parametrize("values", [("4711", "4712"), ["4711"], ()])
def test_a_key_of_one_part_takes_one_value(values: list[str] | tuple[str, ...]) -> None:
    """Several values are not taken for a nested one."""
    with pytest.raises(InvalidKeyDefinition):
        KeyDefinition("order_id").canonical_query(values)
