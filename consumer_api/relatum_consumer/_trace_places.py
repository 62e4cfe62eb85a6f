"""Where messages of many values lie, by the index: all values in one statement, so many rows of each and no more."""

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, TypeAlias

import sqlalchemy as sa

from relatum.ids import MessageId
from relatum.limits import INTEGER_MAX, INTEGER_MIN
from relatum.store.database import sql
from relatum.store.parts import part_is_between, part_may_hold_values
from relatum.store.rows import array_text
from relatum_consumer._trace_links import Value
from relatum_consumer.lookups.catalog import Catalog, named, streams_meant

Places: TypeAlias = dict[MessageId, int | None]
"""Where messages lie, with their times as far as they are known."""

_VALUE: Final = 'wanted.value COLLATE "C"'
_WANTED: Final = "unnest(:numbers::int[], :key_ids::smallint[], :values::text[]) AS wanted (number, key_id, value)"


@lru_cache(maxsize=64)
def rows_of_values(names: int | None) -> sa.TextClause:
    """Rows of values, `most` of each: the value's number, stream, offset, time.

    One probe of each part's index a value. Rows of other virtual hosts and of replaced streams count, with a stream
    of NULL: where a value has `most` rows and some are such, `rows_by_stream` knows. So do those of other streams where
    so many `names` are meant.
    """
    # The limit inside keeps PostgreSQL from joining it in another way than value by value, by the index.
    return sql(
        f"""
        SELECT wanted.number, s.name, found.stream_offset, found.time_us
        FROM {_WANTED}
        CROSS JOIN LATERAL (
          SELECT min(held.part) AS first, max(held.part) AS last
          FROM relatum.part_keys held
          WHERE held.key_id = wanted.key_id AND held.low <= {_VALUE} AND held.high >= {_VALUE}
        ) AS parts
        CROSS JOIN LATERAL (
          SELECT r.stream_id, r.stream_offset, r.time_us
          FROM relatum.relationships r
          WHERE r.key_id = wanted.key_id AND r.value = {_VALUE} AND {part_is_between("r", "parts.first", "parts.last")}
          LIMIT :most::bigint
        ) AS found
        LEFT JOIN relatum.streams s ON s.stream_id = found.stream_id AND {streams_meant(names)}
        """
    )


@lru_cache(maxsize=64)
def rows_by_stream(names: int | None, *, bounded: bool) -> sa.TextClause:
    """The same, of the streams meant alone: those that have a value are found first, two probes a part for each.

    `bounded`: only times from `since` to before `until`.
    """
    has_value = f"""r.key_id = wanted.key_id AND r.value = {_VALUE}
            AND {part_may_hold_values("r", "wanted.key_id", _VALUE, _VALUE)}"""
    within = "AND r.time_us >= :since::bigint AND r.time_us < :until::bigint" if bounded else ""
    return sql(
        f"""
        SELECT wanted.number, found.name, found.stream_offset, found.time_us
        FROM {_WANTED}
        CROSS JOIN LATERAL (
          WITH RECURSIVE lying (stream_id) AS (
            SELECT (
              SELECT r.stream_id FROM relatum.relationships r
              WHERE {has_value}
              ORDER BY r.stream_id LIMIT 1
            )
            UNION ALL
            SELECT (
              SELECT r.stream_id FROM relatum.relationships r
              WHERE {has_value} AND r.stream_id > lying.stream_id
              ORDER BY r.stream_id LIMIT 1
            )
            FROM lying
            WHERE lying.stream_id IS NOT NULL
          )
          SELECT s.name, placed.stream_offset, placed.time_us
          FROM lying
          JOIN relatum.streams s ON s.stream_id = lying.stream_id AND {streams_meant(names)}
          CROSS JOIN LATERAL (
            SELECT r.stream_offset, r.time_us
            FROM relatum.relationships r
            WHERE {has_value} AND r.stream_id = s.stream_id {within}
            LIMIT :most::bigint
          ) AS placed
          LIMIT :most::bigint
        ) AS found
        """
    )


def parameters_of(
    vhost: str,
    names: Sequence[str] | None,
    values: Mapping[int, Value],
    most: int,
    since: int | None,
    until: int | None,
) -> dict[str, Any]:
    """The parameters of either, for values by their numbers. A bound of None is the end of the range."""
    return named(names) | {
        "vhost": vhost,
        "most": most,
        "since": INTEGER_MIN + 1 if since is None else since,
        "until": INTEGER_MAX if until is None else until,
        "numbers": array_text(map(str, values)),
        "key_ids": array_text(str(key_id) for key_id, _ in values.values()),
        "values": array_text(value for _, value in values.values()),
    }


class PlacesOfValues:
    """Asks the index for values, each by a number.

    Args:
        catalog: Keys and streams.
        names: The streams and super streams meant; None for all.
        most: Rows of each value, at most.
        since: The first time that is in the span; None for no bound.
        until: The first time that is not.
    """

    def __init__(
        self, catalog: Catalog, names: Sequence[str] | None, most: int, since: int | None, until: int | None
    ) -> None:
        self._catalog = catalog
        self._names = names
        self._count = None if names is None else len(names)
        self._most = most
        self._span = since, until

    def places(self, numbered: Mapping[int, Value]) -> dict[int, Places]:
        """Where messages of each value lie, of any time."""
        found, unsure = self._select(rows_of_values(self._count), numbered)
        if unsure:
            again = {number: numbered[number] for number in unsure}
            meant, _ = self._select(rows_by_stream(self._count, bounded=False), again)
            found |= {number: meant.get(number, {}) for number in again}
        return found

    def places_in_time(self, numbered: Mapping[int, Value]) -> dict[int, Places]:
        """Where messages of each value lie, of times in the span."""
        return self._select(rows_by_stream(self._count, bounded=True), numbered)[0]

    def _select(self, statement: sa.TextClause, numbered: Mapping[int, Value]) -> tuple[dict[int, Places], list[int]]:
        """Rows by the values' numbers; and the numbers of those that have too many, some of streams not meant."""
        parameters = parameters_of(self._catalog.vhost, self._names, numbered, self._most, *self._span)
        rows: list[Any] = self._catalog.servers.rows(statement, parameters)
        found: dict[int, Places] = {}
        others: Counter[int] = Counter()
        for number, stream, offset, time_us in rows:
            if stream is None:
                others[number] += 1
            elif (places := found.get(number)) is None:
                found[number] = {MessageId(stream, offset): time_us}
            else:
                places[MessageId(stream, offset)] = time_us
        return found, [n for n, count in others.items() if count + len(found.get(n, ())) >= self._most]
