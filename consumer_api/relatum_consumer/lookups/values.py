"""A key's values, and the number of messages with a value by time spans: from the index, within fixed row limits."""

from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any, Final

import sqlalchemy as sa

from relatum.checks import checked_count
from relatum.errors import InvalidInput
from relatum.keys import moment
from relatum.limits import INTEGER_MAX, INTEGER_MIN, KEY_VALUE_BYTES_MAX, TIME_US_MAX
from relatum.store.database import sql
from relatum.store.parts import part_may_hold_values
from relatum_consumer.lookups.arguments import Names, Order, check_limit, names_of, span_of
from relatum_consumer.lookups.by_key import rows_of, streams_with
from relatum_consumer.lookups.catalog import Catalog, named, streams_meant

VALUES_MAX: Final = 1_000
"""The most values of a key in one list."""

VALUES_STEPS: Final = 200
"""Extra steps through the index, for values of other virtual hosts or replaced streams."""

TIMES_ROWS_MAX: Final = 50_000
"""The most rows of a value that are counted by time: less than a tenth of a second, as a web page waits for it."""

TIMES_SPANS_MAX: Final = 1_000
"""The most time spans to count by."""

_LAST: Final = "\U0010ffff"
"""Sorts after every continuation of a value; it is a noncharacter."""

# The walk starts before the first pair: no row has it.
VALUES_OF_KEY: Final = sql(
    f"""
    WITH RECURSIVE walk (value, stream_id, is_meant, step) AS (
      SELECT :low::text COLLATE "C", -1, false, 0
      UNION ALL
      SELECT following.value, following.stream_id,
        EXISTS (SELECT * FROM relatum.streams s WHERE s.stream_id = following.stream_id AND {streams_meant(None)}),
        walk.step + 1
      FROM walk
      CROSS JOIN LATERAL (
        SELECT r.value, r.stream_id
        FROM relatum.relationships r
        WHERE r.key_id = :key_id::smallint
          AND (r.value, r.stream_id) > (walk.value, CASE WHEN walk.is_meant THEN {2**31 - 1} ELSE walk.stream_id END)
          AND r.value <= :high::text
          AND {part_may_hold_values("r", ":key_id::smallint", "walk.value", ":high::text")}
        ORDER BY r.value, r.stream_id
        LIMIT 1
      ) AS following
      WHERE walk.step < :steps::bigint
    )
    SELECT value FROM walk WHERE is_meant LIMIT :most::bigint
    """
)
"""Selects the first `most` values of `key_id` in present streams of `vhost` from `low` to `high`, in order.

A step takes the next pair of value and stream by one probe of each part's index. If the stream is searched, the next
step skips the value's other streams; otherwise it takes the next of them. The walk ends after `steps`.
"""


def values_parameters(vhost: str, key_id: int, prefix: str, most: int) -> dict[str, Any]:
    """Return the parameters for values with a prefix. Values are compared by their UTF-8 bytes."""
    steps = most + VALUES_STEPS
    return {"vhost": vhost, "key_id": key_id, "low": prefix, "high": prefix + _LAST, "most": most, "steps": steps}


def values(catalog: Catalog, key: str, prefix: str, limit: int) -> tuple[str, ...]:
    """Return the values of a key that begin with a prefix."""
    checked_count("limit", limit, most=VALUES_MAX)
    if not isinstance(prefix, str) or not _is_beginning(prefix):
        most = f"{KEY_VALUE_BYTES_MAX:,}"
        raise InvalidInput(f"prefix= takes the beginning of a value: text of {most} bytes at most, without NUL")
    definition = catalog.definition(key)
    if definition.is_composite:
        raise InvalidInput(f"the values of the key {key!r} have several parts: only single values are listed")
    parameters = values_parameters(catalog.vhost, definition.key_id, prefix, limit)
    return tuple(value for (value,) in catalog.servers.rows(VALUES_OF_KEY, parameters))


def _is_beginning(prefix: str) -> bool:
    try:
        return len(prefix.encode()) <= KEY_VALUE_BYTES_MAX and "\0" not in prefix
    except UnicodeEncodeError:
        return False


@lru_cache(maxsize=64)
def times_of_value(names: int | None, order: Order) -> sa.TextClause:
    """Count the rows of a value by time spans: the length of a span, its start, and its rows.

    The time from the first to the last row is cut into `spans` of equal length, in microseconds; empty spans are left
    out. At most `most` rows are read, stream by stream, each in the order of time, without a sort and only once.
    """
    key_id, value = ":key_id::smallint", ":value::text"
    span = (":since::bigint", ":until::bigint")
    rows = rows_of(order, (key_id, value, "held.stream_id"), span=span, limit=":most::bigint")
    # Without MATERIALIZED, a plan that expects few rows would compute both ends again for each row.
    return sql(
        f"""
        WITH RECURSIVE {streams_with(key_id, value, "")},
        looked AS (
          SELECT row.time_us
          FROM (SELECT stream_id FROM with_value WHERE stream_id IS NOT NULL) AS held
          JOIN relatum.streams s ON s.stream_id = held.stream_id AND {streams_meant(names)}
          CROSS JOIN LATERAL {rows} AS row
          LIMIT :most::bigint
        ),
        whole AS MATERIALIZED (
          SELECT min(time_us) AS first, (max(time_us) - min(time_us)) / :spans::bigint + 1 AS width
          FROM looked
        )
        SELECT whole.width, whole.first, (looked.time_us - whole.first) / whole.width AS number, count(*)
        FROM looked
        CROSS JOIN whole
        GROUP BY 1, 2, 3
        ORDER BY number
        """
    )


@dataclass(frozen=True, slots=True)
class TimeSpan:
    """The number of messages from a moment to before another. `number` is the span's index, from 0."""

    number: int
    since: datetime
    until: datetime
    count: int


@dataclass(frozen=True, slots=True)
class Times:
    """When messages with a value were: spans of equal length, in order, without the empty ones.

    Attributes:
        spans: The spans that have messages.
        count: The number of messages in all of them.
        is_whole: Whether all messages were counted; if False, each count is a lower bound.
    """

    spans: tuple[TimeSpan, ...]
    count: int
    is_whole: bool


def times(
    catalog: Catalog,
    key: str,
    value: Any,
    streams: Names,
    since: datetime | None,
    until: datetime | None,
    spans: int,
    order: Order,
) -> Times:
    """Count the recorded messages with a value by time."""
    names = names_of("streams", streams)
    checked_count("spans", spans, most=TIMES_SPANS_MAX)
    check_limit(None, order)
    low, high = span_of(since, until)
    wanted = catalog.value_sought(key, value)
    catalog.check_names(names)
    parameters = {
        "vhost": catalog.vhost,
        "key_id": wanted.key_id,
        "value": wanted.value,
        "since": INTEGER_MIN + 1 if low is None else low,
        "until": INTEGER_MAX if high is None else high,
        "spans": spans,
        "most": TIMES_ROWS_MAX,
    }
    statement = times_of_value(None if names is None else len(names), order)
    rows = catalog.servers.rows(statement, parameters | named(names))
    found = tuple(
        TimeSpan(number, _moment(first + number * width), _moment(first + (number + 1) * width), count)
        for width, first, number, count in rows
    )
    count = sum(span.count for span in found)
    return Times(found, count, count < TIMES_ROWS_MAX)


def _moment(time_us: int) -> datetime:
    """Return a moment, capped at the calendar's last."""
    return moment(min(time_us, TIME_US_MAX))
