"""Which values a key has, and how many messages have one by spans of time: by the index, so many rows and no more."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any, Final

import sqlalchemy as sa

from relatum.keys import moment
from relatum.limits import INTEGER_MAX, INTEGER_MIN, TIME_US_MAX
from relatum.store import compiled, may_hold_values, relationships, streams
from relatum_consumer.lookups._catalog import Catalog, Wanted
from relatum_consumer.lookups._limits import TIMES_ROWS_MAX, VALUES_STEPS
from relatum_consumer.lookups._lookup_statements import Order, big, meant_streams, named
from relatum_consumer.lookups._probe_statement import kept_least, kept_rows, lying_in
from relatum_consumer.lookups._requests import Select, Steps

_LAST: Final = "\U0010ffff"
"""Sorts behind all that a value may go on with, and is no character itself."""

_NO_STREAM: Final[Any] = sa.literal_column("-1")
_ALL_STREAMS: Final[Any] = sa.literal_column("2147483647")


@lru_cache
def values_of_key() -> str:
    """Values of `key_id` in present streams of `vhost` from `low` to `high`, in order: `most` of them.

    A step takes the next pair of value and stream, one probe of each part's index. Where the stream is meant, the next
    step passes over all other streams of the value; else it looks at the next of them. It ends after `steps`.
    """
    rows, key_id = relationships.c, sa.bindparam("key_id", type_=sa.SmallInteger)
    high = sa.bindparam("high", type_=sa.Text)
    # Before the first: no row has it.
    start = sa.select(
        sa.cast(sa.bindparam("low"), sa.Text).collate("C").label("value"),
        _NO_STREAM.label("stream_id"),
        sa.false().label("is_meant"),
        sa.literal_column("0").label("step"),
    )
    walk = start.cte("walk", recursive=True)
    behind = sa.case((walk.c.is_meant, _ALL_STREAMS), else_=walk.c.stream_id)
    following = (
        sa.select(rows.value, rows.stream_id)
        .where(
            rows.key_id == key_id,
            sa.tuple_(rows.value, rows.stream_id) > sa.tuple_(walk.c.value, behind),
            rows.value <= high,
            may_hold_values(key_id, walk.c.value, high),
        )
        .order_by(rows.value, rows.stream_id)
        .limit(sa.literal_column("1"))
        .lateral("following")
    )
    is_meant = sa.exists().where(streams.c.stream_id == following.c.stream_id, *meant_streams(None))
    columns = following.c.value, following.c.stream_id, is_meant.correlate(following)
    step = sa.select(*columns, walk.c.step + sa.literal_column("1"))
    walk = walk.union_all(step.select_from(walk.join(following, sa.true())).where(walk.c.step < big("steps")))
    return compiled(sa.select(walk.c.value).where(walk.c.is_meant).limit(big("most")))


def values_parameters(vhost: str, key_id: int, prefix: str, most: int) -> dict[str, Any]:
    """Its parameters, for values that begin with a prefix. Values are compared by their bytes, as UTF-8 has them."""
    steps = most + VALUES_STEPS
    return {"vhost": vhost, "key_id": key_id, "low": prefix, "high": prefix + _LAST, "most": most, "steps": steps}


@lru_cache(maxsize=64)
def times_of_value(names: int | None, order: Order) -> str:
    """How many rows of a value there are by spans of time: how long a span is, its first moment, and the rows in it.

    The whole from the first to the last row is cut into `spans` of one length, in microseconds; those of no row are
    left out. At most `most` rows are looked at, stream by stream, in each by the order of time: no sort, and none of
    them is read twice.
    """
    key_id, value = sa.bindparam("key_id", type_=sa.SmallInteger), sa.bindparam("value", type_=sa.Text)
    lying = lying_in(key_id, value, None, kept_least).subquery("lying")
    # By the function whatever is prepared: planned for its value, a hot one would be read and sorted as a whole.
    row = kept_rows(order, (key_id, value, lying.c.stream_id), (big("since"), big("until")), None, "most")
    held = lying.join(streams, sa.and_(streams.c.stream_id == lying.c.stream_id, *meant_streams(names)))
    looked = sa.select(row.c.time_us).select_from(held.join(row, sa.true())).limit(big("most")).cte("looked")
    first, last = sa.func.min(looked.c.time_us), sa.func.max(looked.c.time_us)
    width = (last - first) // big("spans") + sa.literal_column("1")
    # Else a plan that expects few rows would find both ends anew for each of them.
    whole = sa.select(first.label("first"), width.label("width")).cte("whole").prefix_with("MATERIALIZED")
    number = ((looked.c.time_us - whole.c.first) // whole.c.width).label("number")
    counted = sa.select(whole.c.width, whole.c.first, number, sa.func.count()).select_from(
        looked.join(whole, sa.true())
    )
    return compiled(counted.group_by(whole.c.width, whole.c.first, number).order_by(number))


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
