"""The statements of groups, built and compiled as those of the other look-ups: two ways into one index.

The key `message_group` has the values `<group id>|<sequence>|<last>`, so a group is one short range of the index
`relationships_lookup`; and rows arrive in the order of offsets, so what a part of a stream holds is found by
`relationships_offsets`.
"""

from functools import lru_cache
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.dialects import postgresql

from relatum.store import arrays, compiled, may_hold_offsets, may_hold_values, relationships

FIRST_SEQUENCE: Final = "1"

_KEY_ID: Final = sa.bindparam("key_id", type_=sa.SmallInteger)
_STREAM_ID: Final = sa.bindparam("stream_id", type_=sa.Integer)
_STREAM_IDS: Final = sa.bindparam("stream_ids", type_=postgresql.ARRAY(sa.Integer))

_BAR: Final[Any] = sa.literal_column("'|'")
_BEHIND_ID: Final[Any] = sa.literal_column("'}'")
"""The character after `|`: all values of a group lie before its id and this one."""

_BY_ITSELF: Final[Any] = sa.literal_column("0")
"""As the offset of a subquery, keeps PostgreSQL from joining it in another way than group by group."""


@lru_cache
def rows_between(*, firsts_only: bool) -> str:
    """Rows of the key `key_id` in one stream from offset `low` to before `high`: value, offset, time, by offset."""
    rows = relationships.c
    low, high = sa.bindparam("low", type_=sa.BigInteger), sa.bindparam("high", type_=sa.BigInteger)
    statement = sa.select(rows.value, rows.stream_offset, rows.time_us).where(
        rows.stream_id == _STREAM_ID,
        rows.stream_offset >= low,
        rows.stream_offset < high,
        rows.key_id == _KEY_ID,
        may_hold_offsets(_STREAM_ID, low, high),
    )
    if firsts_only:
        sequence = sa.func.split_part(rows.value, _BAR, sa.literal_column("2"))
        statement = statement.where(sequence == sa.literal_column(f"'{FIRST_SEQUENCE}'"))
    return compiled(statement.order_by(rows.stream_offset))


@lru_cache
def members() -> str:
    """Rows of the groups `group_ids` in the streams `stream_ids`: value, stream id, offset, time, in no order.

    One probe a group, for the range of values that begin with its id, of each part that may hold it: one or two, where
    ids are in the order of time.
    """
    rows = relationships.c
    wanted = arrays("wanted", group_id=sa.Text)
    low, high = (wanted.c.group_id.concat(end).collate("C") for end in (_BAR, _BEHIND_ID))
    found = (
        sa.select(rows.value, rows.stream_id, rows.stream_offset, rows.time_us)
        .where(
            rows.key_id == _KEY_ID,
            rows.value >= low,
            rows.value < high,
            may_hold_values(_KEY_ID, low, high),
            # Of a stream that was never analyzed PostgreSQL expects no row: for each group it would look through all of
            # the stream, by the index of offsets, which cannot be used for this expression.
            rows.stream_id + sa.literal_column("0") == sa.any_(_STREAM_IDS),
        )
        .offset(_BY_ITSELF)
        .lateral("found")
    )
    return compiled(sa.select(*found.c).select_from(wanted.join(found, sa.true())))


@lru_cache
def newest() -> str:
    """Ids of groups that come before `before` in the order of ids, which is that of time, the last first: `most`.

    Each takes one probe of each part's index: the greatest value before all of the group that was found last.
    """
    rows = relationships.c
    start: Any = sa.select(
        sa.cast(sa.bindparam("before"), sa.Text).collate("C").label("group_id"), sa.literal_column("0").label("step")
    )
    walk = start.cte("walk", recursive=True)
    group_id = sa.func.split_part(rows.value, _BAR, sa.literal_column("1")).collate("C").label("group_id")
    # By the id alone: what lies between it and its values is no group's.
    last = (
        sa.select(group_id)
        .where(
            rows.key_id == _KEY_ID,
            rows.value < walk.c.group_id,
            may_hold_values(_KEY_ID, sa.literal_column("''"), walk.c.group_id),
        )
        .order_by(rows.value.desc())
        .limit(sa.literal_column("1"))
        .lateral("last")
    )
    most = sa.bindparam("most", type_=sa.BigInteger)
    step = sa.select(last.c.group_id, walk.c.step + sa.literal_column("1"))
    walk = walk.union_all(step.select_from(walk.join(last, sa.true())).where(walk.c.step < most))
    found = sa.select(walk.c.group_id).where(walk.c.step > sa.literal_column("0")).order_by(walk.c.step)
    return compiled(found)


@lru_cache
def unfinished() -> str:
    """Ids of the groups in the streams `stream_ids` that are not whole, or not sound: at most `limit`, oldest first.

    Whole and sound is a group whose one last number is its highest, whose numbers are as many, and of which the streams
    have dropped no message: `floors` are their first retained offsets. What is gone altogether is left out. Only groups
    whose first message is of a time before `before`, or of none. It reads every row of the key. An id may be none:
    other publishers set the same headers.
    """
    rows = relationships.c
    group_id, sequence, last = (sa.func.split_part(rows.value, _BAR, sa.literal_column(str(n))) for n in (1, 2, 3))
    number = sa.cast(sequence, sa.BigInteger)
    first_last = sa.func.min(number).filter(last == sa.literal_column("'true'"))
    first_time = sa.func.min(rows.time_us)
    # A subscript and no join: which would tempt the planner to read the rows stream by stream, or again and again.
    floors: Any = sa.sql.elements.Grouping(sa.bindparam("floors", type_=postgresql.ARRAY(sa.BigInteger)))
    is_retained = rows.stream_offset >= floors[sa.func.array_position(_STREAM_IDS, rows.stream_id)]
    statement = (
        sa.select(group_id.label("group_id"))
        .where(
            rows.key_id == _KEY_ID,
            rows.stream_id == sa.any_(_STREAM_IDS),
            # Other publishers may set the same headers to anything; this is a tenth of what a regular expression costs.
            sa.func.length(sequence).between(sa.literal_column("1"), sa.literal_column("9")),
            sa.func.translate(sequence, sa.literal_column("'0123456789'"), sa.literal_column("''"))
            == sa.literal_column("''"),
            # What no message of a group has must not stand for a number that is missing.
            sa.func.left(sequence, sa.literal_column("1")) != sa.literal_column("'0'"),
            last.in_([sa.literal_column("'true'"), sa.literal_column("'false'")]),
        )
        .group_by(group_id)
        .having(
            sa.or_(
                first_last.is_distinct_from(sa.func.max(number)),
                sa.func.count(sa.distinct(number)) != sa.func.max(number),
                ~sa.func.bool_and(is_retained),
            ),
            sa.func.bool_or(is_retained),
            sa.func.coalesce(first_time < sa.bindparam("before", type_=sa.BigInteger), sa.true()),
        )
        .order_by(first_time.nulls_first())
        .limit(sa.bindparam("limit", type_=sa.BigInteger))
    )
    return compiled(statement)
