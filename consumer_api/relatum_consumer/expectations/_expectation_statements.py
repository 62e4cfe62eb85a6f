"""The statements of expectations. That of what followed is the one that grows: it is asked with a batch at a time."""

from functools import lru_cache
from typing import Any, Final

import sqlalchemy as sa

from relatum.store import arrays, compiled, expectations, may_hold_values, relationships, streams, time_blocks

_ONE: Final[Any] = sa.literal_column("1")
_VHOST: Final = sa.bindparam("vhost", type_=sa.Text)
DEFINITION: Final = ("name", "of_stream", "by_key", "follows", "within_s", "grace_s")
"""The columns of an expectation, in the order of its fields."""


@lru_cache
def defined() -> str:
    """The expectations of a virtual host, in the order of their names."""
    columns = [expectations.c[name] for name in DEFINITION]
    return compiled(sa.select(*columns).where(expectations.c.vhost == _VHOST).order_by(expectations.c.name))


@lru_cache
def unfollowed() -> str:
    """Of given messages those that no row of the key's value follows in time, and where the first row behind them is.

    Number, stream id, offset and time; NULL where no row follows. One probe of the index for each message and stream
    that is followed in, in each part that may hold the value; the first row that is not earlier by more than clocks
    may differ counts. Within one stream nothing is allowed for clocks: a message would be followed by the one before
    it. That PostgreSQL joins the two in no other way is by the limit.
    """
    given = arrays(
        "given",
        number=sa.Integer,
        value=sa.Text,
        time_us=sa.BigInteger,
        due_us=sa.BigInteger,
        own_stream=sa.Integer,
        own_offset=sa.BigInteger,
    )
    followed_in = arrays("followed_in", stream_id=sa.Integer)
    key_id: Any = sa.bindparam("key_id", type_=sa.SmallInteger)
    rows, value = relationships.c, given.c.value.collate("C")
    is_own = followed_in.c.stream_id == given.c.own_stream
    grace_us = sa.case((is_own, sa.literal_column("0")), else_=sa.bindparam("grace_us", type_=sa.BigInteger))
    row = (
        sa.select(rows.stream_id, rows.stream_offset, rows.time_us)
        .where(
            rows.key_id == key_id,
            rows.value == value,
            rows.stream_id == followed_in.c.stream_id,
            rows.time_us >= given.c.time_us - grace_us,
            sa.or_(rows.stream_id != given.c.own_stream, rows.stream_offset != given.c.own_offset),
            may_hold_values(key_id, value, value),
        )
        .correlate(given, followed_in)
        .order_by(rows.time_us, rows.stream_offset)
        .limit(_ONE)
        .lateral("row")
    )
    first = (
        sa.select(row.c.stream_id, row.c.stream_offset, row.c.time_us)
        .select_from(followed_in.join(row, sa.true()))
        .correlate(given)
        .order_by(row.c.time_us, row.c.stream_id, row.c.stream_offset)
        .limit(_ONE)
        .lateral("first")
    )
    statement = sa.select(given.c.number, first.c.stream_id, first.c.stream_offset, first.c.time_us)
    statement = statement.select_from(given.outerjoin(first, sa.true()))
    return compiled(statement.where(sa.or_(first.c.time_us.is_(None), first.c.time_us > given.c.due_us)))


@lru_cache
def lives() -> str:
    """Of streams that are in force: id, which generation it is, and when that was first seen."""
    statement = sa.select(streams.c.stream_id, streams.c.generation, streams.c.created_at)
    ids = sa.bindparam("stream_ids", type_=sa.ARRAY(sa.Integer))
    return compiled(statement.where(streams.c.stream_id == sa.any_(ids), streams.c.replaced_at.is_(None)))


@lru_cache
def times_at() -> str:
    """Of given offsets of streams: number, and the latest time in the block that holds the first message from there on.

    No row where no message lies behind.
    """
    given = arrays("given", number=sa.Integer, stream_id=sa.Integer, offset=sa.BigInteger)
    blocks = time_blocks.c

    def block(*conditions: Any, order: Any) -> Any:
        found = sa.select(blocks.max_us, blocks.last_offset).where(blocks.stream_id == given.c.stream_id, *conditions)
        return found.correlate(given).order_by(order).limit(_ONE).lateral()

    around = block(blocks.first_offset <= given.c.offset, order=blocks.first_offset.desc())
    beyond = block(blocks.first_offset > given.c.offset, order=blocks.first_offset)
    holds = around.c.last_offset >= given.c.offset
    time_us = sa.case((holds, around.c.max_us), else_=beyond.c.max_us)
    joined = given.outerjoin(around, sa.true()).outerjoin(beyond, sa.true())
    return compiled(sa.select(given.c.number, time_us).select_from(joined).where(time_us.is_not(None)))
