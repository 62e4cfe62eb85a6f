"""The probe of the index by key, for sessions that prepare it and for those that do not."""

from collections.abc import Callable
from functools import lru_cache
from typing import Final, Literal

import sqlalchemy as sa

from relatum.limits import INTEGER_MAX, INTEGER_MIN
from relatum.store.database import Either, sql
from relatum.store.parts import part_may_hold_values
from relatum_consumer.lookups._catalog import streams_meant

Order = Literal["oldest", "newest", "offset"]

FEW_STREAMS: Final = 4
"""Streams up to which each is asked for a value, in each part of the table; of more, those are found that have it."""

_ORDERINGS: Final[dict[Order, str]] = {
    "oldest": "r.time_us, r.stream_offset",
    "newest": "r.time_us DESC, r.stream_offset DESC",
    "offset": "r.stream_offset",
}

_FLOORS: Final = "unnest(:floor_names::text[], :floors::bigint[]) AS floors (name, floor)"
_SPAN: Final = (f"coalesce(:since::bigint, {INTEGER_MIN + 1})", f"coalesce(:until::bigint, {INTEGER_MAX})")
"""A bound that is not given is the end of the range, so that one text with an index range serves both."""


@lru_cache(maxsize=512)
def probe_statement(
    order: Order, *, keys: int, names: int | None, bounded: bool, floored: bool, many: bool = False
) -> Either:
    """Rows of key values in streams: stream, offset, time, key id; at most `limit` for each key and stream.

    One probe of each part's index for each key and stream, which stops at the limit: a value that a million messages
    share costs no more than any other.
    Ordering by offset must sort what one value has in a stream.

    The text depends on how many keys and names there are. With arrays as parameters PostgreSQL would not know, expect
    ten of each, and plan anew each time, which takes as long as the probe. Where nothing is prepared, it would plan for
    all parts each time: functions of the database keep the plan there.

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
        # A table of values has the database's collation; the column's own is needed to use its index.
        key_id, value = "wanted.key_id", 'wanted.value COLLATE "C"'
        wanted = f"(VALUES {pairs}) AS wanted (key_id, value)"
    place = (key_id, value, "meant.stream_id")
    span = _SPAN if bounded else None
    floor = "coalesce(floors.floor, 0)" if floored else None

    def probe(found: str, least: Callable[[str, str, str | None], str]) -> sa.TextClause:
        lying, is_lying = "", ""
        if many:
            lying = f", {lying_in(key_id, value, wanted, least)}"
            is_lying = f"WHERE ({', '.join(place)}) IN (SELECT * FROM lying WHERE stream_id IS NOT NULL)"
        return sql(
            f"""
            WITH RECURSIVE meant AS (
              SELECT s.stream_id, s.name
              FROM relatum.streams s
              WHERE {streams_meant(names)}
            ){lying}
            SELECT meant.name, found.stream_offset, found.time_us, {key_id} AS key_id
            FROM meant
            {f"CROSS JOIN {wanted}" if wanted else ""}
            {f"LEFT JOIN {_FLOORS} ON meant.name = floors.name" if floored else ""}
            CROSS JOIN LATERAL {found} AS found
            {is_lying}
            """
        )

    return Either(
        probe(_planned_rows(order, place, span, floor), _planned_least),
        probe(rows_of(order, place, span, floor), stream_of),
    )


def _planned_rows(order: Order, place: tuple[str, str, str], span: tuple[str, str] | None, floor: str | None) -> str:
    """SQL: rows of a value in a stream."""
    key_id, value, stream_id = place
    within = "" if span is None else f"AND r.time_us >= {span[0]} AND r.time_us < {span[1]}"
    retained = "" if floor is None else f"AND r.stream_offset >= {floor}"
    return f"""(
              SELECT r.stream_offset, r.time_us
              FROM relatum.relationships r
              WHERE r.key_id = {key_id} AND r.value = {value} AND r.stream_id = {stream_id}
                AND {part_may_hold_values("r", key_id, value, value)} {within} {retained}
              ORDER BY {_ORDERINGS[order]}
              LIMIT :limit::bigint
            )"""


def rows_of(
    order: Order,
    place: tuple[str, str, str],
    span: tuple[str, str] | None,
    floor: str | None = None,
    limit: str = ":limit::bigint",
) -> str:
    """SQL: the same by a function of the database."""
    arguments = (*place, floor or "0", *(span or ("NULL", "NULL")), limit, f"'{order}'")
    return f"relatum.rows_of({', '.join(arguments)})"


def _planned_least(key_id: str, value: str, behind: str | None) -> str:
    """SQL: the first stream behind another one that has rows of a value, from None on the first of all."""
    return f"""(
                SELECT r.stream_id
                FROM relatum.relationships r
                WHERE r.key_id = {key_id} AND r.value = {value}
                  AND {part_may_hold_values("r", key_id, value, value)}
                  {"" if behind is None else f"AND r.stream_id > {behind}"}
                ORDER BY r.stream_id
                LIMIT 1
              )"""


def stream_of(key_id: str, value: str, behind: str | None) -> str:
    """SQL: the same by a function of the database."""
    return f"relatum.stream_of({key_id}, {value}, {behind or '0'})"


def lying_in(key_id: str, value: str, wanted: str, least: Callable[[str, str, str | None], str]) -> str:
    """SQL: the table `lying` of the streams that have rows of values, in order, then NULL; two probes a part for each.

    `wanted`: The table that key id and value are columns of; empty where they are parameters.
    """
    return f"""lying (key_id, value, stream_id) AS (
              SELECT {key_id}, {value}, {least(key_id, value, None)}
              {f"FROM {wanted}" if wanted else ""}
              UNION ALL
              SELECT lying.key_id, lying.value, {least("lying.key_id", "lying.value", "lying.stream_id")}
              FROM lying
              WHERE lying.stream_id IS NOT NULL
            )"""
