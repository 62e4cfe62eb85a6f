"""The probe of the index by key: functions of the database keep its plans, also where a session prepares nothing."""

from functools import lru_cache
from typing import Final, Literal

import sqlalchemy as sa

from relatum.limits import INTEGER_MAX, INTEGER_MIN
from relatum.store.database import sql
from relatum_consumer.lookups.catalog import streams_meant

Order = Literal["oldest", "newest", "offset"]

FEW_STREAMS: Final = 4
"""Streams up to which each is asked for a value, in each part of the table; of more, those are found that have it."""

SPAN: Final = (f"coalesce(:since::bigint, {INTEGER_MIN + 1})", f"coalesce(:until::bigint, {INTEGER_MAX})")
"""A bound that is not given is the end of the range, so that one text with an index range serves both."""


@lru_cache(maxsize=512)
def probe_statement(
    order: Order, *, keys: int, names: int | None, bounded: bool, floored: bool, many: bool = False
) -> sa.TextClause:
    """Rows of key values in streams: stream, offset, time, key id; at most `limit` for each key and stream.

    One probe of each part's index for each key and stream, which stops at the limit: a value that a million messages
    share costs no more than any other. Ordering by offset must sort what one value has in a stream.

    The text depends on how many keys and names there are: with arrays the probe takes half as long again.

    Args:
        order: In which order rows are taken up to the limit.
        keys: How many pairs of `key_id_…` and `value_…` are sought.
        names: How many streams and super streams `name_…` are meant, else (None) every recorded one.
        bounded: Only times from `since` to before `until`; either may be NULL.
        floored: Only offsets from `floors` on, one for each of `floor_names`.
        many: Find first which streams have the value. It answers the same.
    """
    key_id, value, wanted = ":key_id_0::smallint", ":value_0::text", ""
    if keys > 1:
        pairs = ", ".join(f"(:key_id_{n}::smallint, :value_{n}::text)" for n in range(keys))
        key_id, value, wanted = "wanted.key_id", "wanted.value", f"(VALUES {pairs}) AS wanted (key_id, value)"
    floors = "LEFT JOIN unnest(:floor_names::text[], :floors::bigint[]) AS floors (name, floor) USING (name)"
    found = rows_of(
        order,
        (key_id, value, "meant.stream_id"),
        span=SPAN if bounded else ("NULL", "NULL"),
        floor="coalesce(floors.floor, 0)" if floored else "0",
    )
    is_lying = f"({key_id}, {value}, meant.stream_id) IN (SELECT * FROM lying WHERE stream_id IS NOT NULL)"
    return sql(
        f"""
        WITH RECURSIVE meant AS (
          SELECT s.stream_id, s.name
          FROM relatum.streams s
          WHERE {streams_meant(names)}
        ){f", {lying_in(key_id, value, wanted)}" if many else ""}
        SELECT meant.name, found.stream_offset, found.time_us, {key_id} AS key_id
        FROM meant
        {f"CROSS JOIN {wanted}" if wanted else ""}
        {floors if floored else ""}
        CROSS JOIN LATERAL {found} AS found /* of relatum.relationships */
        {f"WHERE {is_lying}" if many else ""}
        """
    )


def rows_of(
    order: Order, place: tuple[str, str, str], *, span: tuple[str, str], floor: str = "0", limit: str = ":limit::bigint"
) -> str:
    """SQL: rows of a key's value in a stream, from an offset on, and in a span of time if it is not NULL."""
    return f"relatum.rows_of({', '.join((*place, floor, *span, limit))}, '{order}')"


def lying_in(key_id: str, value: str, wanted: str) -> str:
    """SQL: the table `lying` of the streams that have rows of values, in order, then NULL; two probes a part for each.

    `wanted`: The table that key id and value are columns of; empty where they are parameters.
    """
    return f"""lying (key_id, value, stream_id) AS (
          SELECT {key_id}, {value}, relatum.stream_of({key_id}, {value}, 0)
          {f"FROM {wanted}" if wanted else ""}
          UNION ALL
          SELECT key_id, value, relatum.stream_of(key_id, value, stream_id)
          FROM lying
          WHERE stream_id IS NOT NULL
        )"""
