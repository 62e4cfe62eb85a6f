"""The statement of look-ups by key, for sessions that prepare it and for those that do not."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql

from relatum.limits import INTEGER_MAX, INTEGER_MIN
from relatum.store import Either, arrays, compiled, may_hold_values, relationships, streams
from relatum_consumer.lookups._lookup_statements import Order, big, meant_streams


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
    return Either(*(_probe(order, keys, names, bounded, floored, many, functions) for functions in (False, True)))


def _probe(
    order: Order, keys: int, names: int | None, bounded: bool, floored: bool, many: bool, functions: bool
) -> str:
    key_id, value, wanted = _wanted(keys)
    meant = sa.select(streams.c.stream_id, streams.c.name).where(*meant_streams(names)).cte("meant")
    # A bound that is not given is the end of the range, so that one text with an index range serves both.
    span = None
    if bounded:
        since = sa.func.coalesce(big("since"), sa.literal_column(str(INTEGER_MIN + 1)))
        span = since, sa.func.coalesce(big("until"), sa.literal_column(str(INTEGER_MAX)))
    source: Any = meant
    if wanted is not None:
        source = source.join(wanted, sa.true())
    floor: Any = None
    if floored:
        floors = _floors()
        source = source.outerjoin(floors, floors.c.name == meant.c.name)
        floor = sa.func.coalesce(floors.c.floor, sa.literal_column("0"))
    rows = kept_rows if functions else _rows
    found = rows(order, (key_id, value, meant.c.stream_id), span, floor)
    statement = sa.select(meant.c.name, found.c.stream_offset, found.c.time_us, key_id)
    statement = statement.select_from(source.join(found, sa.true()))
    if many:
        lying = lying_in(key_id, value, wanted, kept_least if functions else _least)
        statement = statement.where(sa.tuple_(key_id, value, meant.c.stream_id).in_(lying))
    return compiled(statement)


def _rows(order: Order, place: tuple[Any, Any, Any], span: tuple[Any, Any] | None, floor: Any) -> Any:
    """Rows of a value in a stream."""
    rows, (key_id, value, stream_id) = relationships.c, place
    inner = sa.select(rows.stream_offset, rows.time_us).where(
        rows.key_id == key_id, rows.value == value, rows.stream_id == stream_id, may_hold_values(key_id, value, value)
    )
    if span is not None:
        inner = inner.where(rows.time_us >= span[0], rows.time_us < span[1])
    if floor is not None:
        inner = inner.where(rows.stream_offset >= floor)
    return inner.order_by(*_ordering(order)).limit(big("limit")).lateral("found")


def kept_rows(
    order: Order, place: tuple[Any, Any, Any], span: tuple[Any, Any] | None, floor: Any, limit: str = "limit"
) -> Any:
    """The same by a function."""
    given = (sa.literal_column("0") if floor is None else floor, *(span or (sa.null(), sa.null())), big(limit))
    columns = sa.column("stream_offset", sa.BigInteger), sa.column("time_us", sa.BigInteger)
    found = sa.func.relatum.rows_of(*place, *given, sa.literal_column(f"'{order}'"))
    return found.table_valued(*columns).lateral("found")


def _least(key_id: Any, value: Any, behind: Any) -> Any:
    """The first stream behind another one that has rows of a value, from NULL on the first of all."""
    rows = relationships.c
    found = sa.select(rows.stream_id).where(
        rows.key_id == key_id, rows.value == value, may_hold_values(key_id, value, value)
    )
    if behind is not None:
        found = found.where(rows.stream_id > behind)
    return found.order_by(rows.stream_id).limit(sa.literal_column("1")).scalar_subquery()


def kept_least(key_id: Any, value: Any, behind: Any) -> Any:
    """The same by a function."""
    return sa.func.relatum.stream_of(key_id, value, sa.literal_column("0") if behind is None else behind)


def lying_in(key_id: Any, value: Any, wanted: Any, least: Callable[[Any, Any, Any], Any]) -> sa.Select[Any]:
    """Which streams have rows of the values, in order, from one to the next: two probes a part for each."""
    first = sa.select(key_id.label("key_id"), value.label("value"), least(key_id, value, None).label("stream_id"))
    if wanted is not None:
        first = first.select_from(wanted)
    lying = first.cte("lying", recursive=True)
    behind = least(lying.c.key_id, lying.c.value, lying.c.stream_id)
    lying = lying.union_all(sa.select(lying.c.key_id, lying.c.value, behind).where(lying.c.stream_id.is_not(None)))
    return sa.select(lying.c.key_id, lying.c.value, lying.c.stream_id).where(lying.c.stream_id.is_not(None))


def _wanted(keys: int) -> tuple[Any, Any, Any]:
    """Key id and value sought, and the table they are columns of where there are several."""
    pairs = [
        (sa.bindparam(f"key_id_{n}", type_=sa.SmallInteger), sa.bindparam(f"value_{n}", type_=sa.Text))
        for n in range(keys)
    ]
    if keys == 1:
        return *pairs[0], None
    columns = sa.column("key_id", sa.SmallInteger), sa.column("value", sa.Text)
    # A table of values has the database's collation; the column's own is needed to use its index.
    wanted = sa.values(*columns, name="wanted").data(pairs)
    return wanted.c.key_id, wanted.c.value.collate("C"), wanted


def _floors() -> Any:
    names = sa.bindparam("floor_names", type_=postgresql.ARRAY(sa.Text))
    return arrays("floors", name=names, floor=sa.BigInteger)


def _ordering(order: Order) -> Sequence[Any]:
    rows = relationships.c
    if order == "oldest":
        return (rows.time_us, rows.stream_offset)
    if order == "newest":
        return (rows.time_us.desc(), rows.stream_offset.desc())
    return (rows.stream_offset,)
