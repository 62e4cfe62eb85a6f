"""When a key's value occurred: how many messages by spans of time."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

from relatum.keys import moment
from relatum.limits import INTEGER_MAX, INTEGER_MIN, TIME_US_MAX
from relatum_consumer.lookups._catalog import Catalog, Wanted
from relatum_consumer.lookups._limits import TIMES_ROWS_MAX
from relatum_consumer.lookups._lookup_statements import Order, named
from relatum_consumer.lookups._requests import Select, Steps
from relatum_consumer.lookups._value_statements import times_of_value


@dataclass(frozen=True, slots=True)
class TimeSpan:
    """How many messages there are from a moment to before another. `number` is its place among all spans, from 0."""

    number: int
    since: datetime
    until: datetime
    count: int


@dataclass(frozen=True, slots=True)
class Times:
    """When messages with a value were: spans of one length, in order, those without a message left out.

    Attributes:
        spans: Those that have messages.
        count: Messages in all of them.
        is_whole: Whether that is all; else there are more, and each count is one at least.
    """

    spans: tuple[TimeSpan, ...]
    count: int
    is_whole: bool


def times(
    catalog: Catalog,
    wanted: Wanted,
    names: Sequence[str] | None,
    low: int | None,
    high: int | None,
    order: Order,
    spans: int,
) -> Steps[Times]:
    """Count what is recorded of a value, from `low` to before `high`, in microseconds."""
    parameters = {
        "vhost": catalog.vhost,
        "key_id": wanted.key_id,
        "value": wanted.value,
        "since": INTEGER_MIN + 1 if low is None else low,
        "until": INTEGER_MAX if high is None else high,
        "spans": spans,
        "most": TIMES_ROWS_MAX,
    }
    sql = times_of_value(None if names is None else len(names), order)
    rows = yield from Select(sql, parameters | named(names))
    found = tuple(
        TimeSpan(number, _moment(first + number * width), _moment(first + (number + 1) * width), count)
        for width, first, number, count in rows
    )
    count = sum(span.count for span in found)
    return Times(found, count, count < TIMES_ROWS_MAX)


def _moment(time_us: int) -> datetime:
    """A moment, no later than the calendar's last."""
    return moment(min(time_us, TIME_US_MAX))
