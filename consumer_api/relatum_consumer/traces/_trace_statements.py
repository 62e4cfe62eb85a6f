"""The statements of a trace: all rows of many values at once, in all streams together, so many of each and no more."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

import sqlalchemy as sa

from relatum.limits import INTEGER_MAX, INTEGER_MIN
from relatum.store import (
    array_text,
    arrays,
    compiled,
    in_parts,
    may_hold_values,
    parts_of_value,
    relationships,
    streams,
)
from relatum_consumer.lookups import meant_streams, named

_ROWS: Final = relationships.c
_ONE: Final[Any] = sa.literal_column("1")


def _big(name: str) -> sa.BindParameter[int]:
    return sa.bindparam(name, type_=sa.BigInteger)


_MOST: Final = _big("most")
_SINCE: Final = _big("since")
_UNTIL: Final = _big("until")


@lru_cache(maxsize=64)
def rows_of_values(names: int | None) -> str:
    """Rows of values, `most` of each: the value's number, stream, offset, time.

    One probe of each part's index a value. Rows of other virtual hosts and of replaced streams count, with a stream
    of NULL: where a value has `most` rows and some are such, `rows_by_stream` knows. So do those of other streams where
    so many `names` are meant.
    """
    wanted = _wanted()
    value = wanted.c.value.collate("C")
    parts = parts_of_value(wanted.c.key_id, value)
    row = sa.select(_ROWS.stream_id, _ROWS.stream_offset, _ROWS.time_us).correlate(wanted, parts)
    row = row.where(_ROWS.key_id == wanted.c.key_id, _ROWS.value == value, in_parts(parts))
    # A limit inside keeps PostgreSQL from joining it in another way than value by value, by the index.
    found = row.limit(_MOST).lateral("found")
    each = wanted.join(parts, sa.true()).join(found, sa.true())
    held = each.outerjoin(streams, sa.and_(streams.c.stream_id == found.c.stream_id, *meant_streams(names)))
    columns = wanted.c.number, streams.c.name, found.c.stream_offset, found.c.time_us
    return compiled(sa.select(*columns).select_from(held))


@lru_cache(maxsize=64)
def rows_by_stream(names: int | None, *, bounded: bool) -> str:
    """The same, of the streams meant alone: those that have a value are found first, two probes a part for each.

    `bounded`: only times from `since` to before `until`.
    """
    within = (_ROWS.time_us >= _SINCE, _ROWS.time_us < _UNTIL) if bounded else ()
    wanted = _wanted()

    def least(*behind: sa.ColumnElement[bool]) -> Any:
        row = sa.select(_ROWS.stream_id).where(*_of(wanted), *behind).correlate_except(relationships)
        return row.order_by(_ROWS.stream_id).limit(_ONE).scalar_subquery()

    lying = sa.select(least().label("stream_id")).cte("lying", recursive=True, nesting=True)
    behind = sa.select(least(_ROWS.stream_id > lying.c.stream_id)).where(lying.c.stream_id.is_not(None))
    lying = lying.union_all(behind)
    row = (
        sa.select(_ROWS.stream_offset, _ROWS.time_us)
        .where(*_of(wanted), _ROWS.stream_id == streams.c.stream_id, *within)
        .correlate(wanted, streams)
        .limit(_MOST)
        .lateral("row")
    )
    held = lying.join(streams, sa.and_(streams.c.stream_id == lying.c.stream_id, *meant_streams(names))).join(
        row, sa.true()
    )
    found = sa.select(streams.c.name, *row.c).select_from(held).correlate(wanted).limit(_MOST).lateral("found")
    return compiled(sa.select(wanted.c.number, *found.c).select_from(wanted.join(found, sa.true())))


def _wanted() -> Any:
    return arrays("wanted", number=sa.Integer, key_id=sa.SmallInteger, value=sa.Text)


def _of(wanted: Any) -> list[sa.ColumnElement[bool]]:
    value = wanted.c.value.collate("C")
    held = may_hold_values(wanted.c.key_id, value, value)
    return [_ROWS.key_id == wanted.c.key_id, _ROWS.value == value, held]


def parameters_of(
    vhost: str,
    names: Sequence[str] | None,
    values: Mapping[int, tuple[int, str]],
    most: int,
    since: int | None,
    until: int | None,
) -> dict[str, Any]:
    """The parameters of any of these, for values (key id, value) by their numbers.

    A bound of None is the end of the range.
    """
    return named(names) | {
        "vhost": vhost,
        "most": most,
        "since": INTEGER_MIN + 1 if since is None else since,
        "until": INTEGER_MAX if until is None else until,
        "numbers": array_text(map(str, values)),
        "key_ids": array_text(str(key_id) for key_id, _ in values.values()),
        "values": array_text(value for _, value in values.values()),
    }
