"""Where messages of many values are, by the index: all values in one statement, so many rows of each and no more."""

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, Final, TypeAlias

import sqlalchemy as sa

from relatum.ids import MessageId
from relatum.store.database import sql
from relatum.store.parts import part_is_between
from relatum.store.rows import array_text
from relatum_consumer._trace_links import Value
from relatum_consumer.lookups.by_key import SPAN, lying_in, rows_of
from relatum_consumer.lookups.catalog import Catalog, named, streams_meant

Places: TypeAlias = dict[MessageId, int | None]
"""Where messages are, with their times as far as they are known."""

_VALUE: Final = 'wanted.value COLLATE "C"'
_WANTED: Final = "unnest(:key_ids::smallint[], :values::text[]) AS wanted (key_id, value)"


@lru_cache(maxsize=64)
def rows_of_values(names: int | None) -> sa.TextClause:
    """Rows of values, `most` of each: key id, value, stream, offset, time.

    One probe of each part's index a value. Rows of other virtual hosts and of replaced streams count, with a stream
    of NULL: where a value has `most` rows and some are such, `rows_by_stream` knows. So do those of other streams where
    so many `names` are meant.
    """
    # The limit inside keeps PostgreSQL from joining it in another way than value by value, by the index.
    return sql(
        f"""
        SELECT wanted.key_id, wanted.value, s.name, found.stream_offset, found.time_us
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
    """The same of the streams meant alone, `most` in each: those that have a value are found first.

    `bounded`: only times from `since` to before `until`.
    """
    place = ("lying.key_id", "lying.value", "s.stream_id")
    rows = rows_of("oldest", place, span=SPAN if bounded else ("NULL", "NULL"), limit=":most::bigint")
    return sql(
        f"""
        WITH RECURSIVE {lying_in("wanted.key_id", "wanted.value", _WANTED)}
        SELECT lying.key_id, lying.value, s.name, found.stream_offset, found.time_us
        FROM lying
        JOIN relatum.streams s ON s.stream_id = lying.stream_id AND {streams_meant(names)}
        CROSS JOIN LATERAL {rows} AS found
        """
    )


def parameters_of(
    vhost: str, names: Sequence[str] | None, values: Iterable[Value], most: int, **span: int | None
) -> dict[str, Any]:
    """The parameters of either; `span` has `since` and `until`, with None for no bound."""
    key_ids, texts = zip(*values, strict=True)
    arrays = {"key_ids": array_text(map(str, key_ids)), "values": array_text(texts)}
    return named(names) | {"vhost": vhost, "most": most} | arrays | span


def places_of(catalog: Catalog, names: Sequence[str] | None, values: Iterable[Value], most: int) -> dict[Value, Places]:
    """Where messages of each value are, of any time, so many at most."""
    count = None if names is None else len(names)
    found, others = _select(catalog, rows_of_values(count), parameters_of(catalog.vhost, names, values, most), most)
    unsure = [value for value, more in others.items() if more + len(found.get(value, ())) >= most]
    if unsure:
        statement = rows_by_stream(count, bounded=False)
        meant, _ = _select(catalog, statement, parameters_of(catalog.vhost, names, unsure, most), most)
        found |= {value: meant.get(value, {}) for value in unsure}
    return found


def places_in_time(
    catalog: Catalog, names: Sequence[str] | None, values: Iterable[Value], most: int, **span: int | None
) -> dict[Value, Places]:
    """The same of times in a span, from `since` to before `until`; None for no bound."""
    statement = rows_by_stream(None if names is None else len(names), bounded=True)
    return _select(catalog, statement, parameters_of(catalog.vhost, names, values, most, **span), most)[0]


def _select(
    catalog: Catalog, statement: sa.TextClause, parameters: dict[str, Any], most: int
) -> tuple[dict[Value, Places], Counter[Value]]:
    """Places by value; and how many rows of each value are of streams that are not meant."""
    found: dict[Value, Places] = {}
    others: Counter[Value] = Counter()
    for key_id, value, stream, offset, time_us in catalog.servers.rows(statement, parameters):
        if stream is None:
            others[key_id, value] += 1
        elif (places := found.get((key_id, value))) is None:
            found[key_id, value] = {MessageId(stream, offset): time_us}
        elif len(places) < most:
            places[MessageId(stream, offset)] = time_us
    return found, others
