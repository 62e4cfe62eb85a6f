"""A key's values, from the index, within fixed row limits."""

from typing import Any, Final

from relatum.checks import checked_count, checked_text
from relatum.errors import InvalidInput
from relatum.limits import KEY_VALUE_BYTES_MAX
from relatum.store.database import sql
from relatum.store.parts import part_may_hold_values
from relatum_consumer.lookups.catalog import Catalog, streams_meant

VALUES_MAX: Final = 1_000
"""The most values of a key in one list."""

VALUES_STEPS: Final = 200
"""Extra steps through the index, for values of other virtual hosts or replaced streams."""

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
    if len(checked_text("prefix", prefix, what="the beginning of a value").encode()) > KEY_VALUE_BYTES_MAX:
        raise InvalidInput(f"prefix= takes the beginning of a value: text of {KEY_VALUE_BYTES_MAX:,} bytes at most")
    definition = catalog.definition(key)
    if definition.is_composite:
        raise InvalidInput(f"the values of the key {key!r} have several parts: only single values are listed")
    parameters = values_parameters(catalog.vhost, definition.key_id, prefix, limit)
    return tuple(value for (value,) in catalog.servers.rows(VALUES_OF_KEY, parameters))
