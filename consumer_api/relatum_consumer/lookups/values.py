"""Which values a key has, and how many messages have one by spans of time: by the index, so many rows and no more."""

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
"""Values of a key that are listed at once."""

VALUES_STEPS: Final = 200
"""Places of the index that are looked at for them beyond their number: those of other virtual hosts, or replaced."""

TIMES_ROWS_MAX: Final = 50_000
"""Rows of a value that are looked at to count them by time: less than a tenth of a second, and a page waits for it."""

TIMES_SPANS_MAX: Final = 1_000
"""Spans of time they are counted by."""

_LAST: Final = "\U0010ffff"
"""Sorts behind all that a value may go on with, and is no character itself."""

# The walk begins before the first pair: no row has it.
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
"""Values of `key_id` in present streams of `vhost` from `low` to `high`, in order: `most` of them.

A step takes the next pair of value and stream, one probe of each part's index. Where the stream is meant, the next step
passes over all other streams of the value; else it looks at the next of them. It ends after `steps`.
"""


def values_parameters(vhost: str, key_id: int, prefix: str, most: int) -> dict[str, Any]:
    """Its parameters, for values that begin with a prefix. Values are compared by their bytes, as UTF-8 has them."""
    steps = most + VALUES_STEPS
    return {"vhost": vhost, "key_id": key_id, "low": prefix, "high": prefix + _LAST, "most": most, "steps": steps}


def values(catalog: Catalog, key: str, prefix: str, limit: int) -> tuple[str, ...]:
    """Values of a key that begin with a prefix."""
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
    """How many rows of a value there are by spans of time: how long a span is, its first moment, and the rows in it.

    The whole from the first to the last row is cut into `spans` of one length, in microseconds; those of no row are
    left out. At most `most` rows are looked at, stream by stream, in each by the order of time: no sort, and none of
    them is read twice.
    """
    key_id, value = ":key_id::smallint", ":value::text"
    span = (":since::bigint", ":until::bigint")
    rows = rows_of(order, (key_id, value, "held.stream_id"), span=span, limit=":most::bigint")
    # Not materialized, a plan that expects few rows would find both ends of the whole anew for each of them.
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
    key: str,
    value: Any,
    streams: Names,
    since: datetime | None,
    until: datetime | None,
    spans: int,
    order: Order,
) -> Times:
    """Count by time what is recorded of a value."""
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
    """A moment, no later than the calendar's last."""
    return moment(min(time_us, TIME_US_MAX))
