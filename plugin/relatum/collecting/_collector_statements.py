"""The SQL of collected messages: each statement once, built with SQLAlchemy, its parameters bound.

Rows that a call names are an array of offsets in one source: one statement for any number of them, and no join, which
PostgreSQL could begin at the wrong end while it does not know how much is waiting.
"""

from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert

from relatum.store import (
    BigIntegers,
    arrays,
    collected_messages,
    collector_members,
    collector_sources,
    collectors,
    holds,
    interval,
)

_messages: Final = collected_messages.c
_sources: Final = collector_sources.c
_NOW: Final = sa.func.statement_timestamp()
"""The clock where a joined transaction may have begun long before; `now()` would be its beginning."""

_of_collector: Final = sa.bindparam("in_collector", type_=sa.Integer)
_of_member: Final = _messages.member_id == sa.bindparam("of_member", type_=sa.BigInteger)

_OFFSETS: Final = sa.bindparam("offsets", type_=BigIntegers())

# The member is compared in a way no index serves: by its own, all that it has not finished would be read.
_mine: Final = (
    _messages.source_id == sa.bindparam("source", type_=sa.Integer),
    _messages.stream_offset == sa.any_(_OFFSETS),
    _messages.member_id.is_not_distinct_from(sa.bindparam("of_member", type_=sa.BigInteger)),
)


def _found(offset: Any, at: Any) -> Any:
    """Offsets in one row, None for none, with their time: to give a row for each takes the client longer."""
    return sa.select(sa.func.array_agg(offset), sa.func.max(at))


def _changed(change: sa.Update, at: Any) -> Any:
    """An update that gives the offsets it has changed, and when it did."""
    done = change.returning(_messages.stream_offset, at.label("at")).cte("done")
    return _found(done.c.stream_offset, done.c.at)


def _its_own(name: str, kind: Any) -> Any:
    """The row's own item of an array that goes with the offsets: each of them is looked for among all."""
    items: Any = sa.sql.elements.Grouping(sa.bindparam(name, type_=sa.ARRAY(kind)))
    return items[sa.func.array_position(_OFFSETS, _messages.stream_offset)]


# Collecting and consuming

_NEW: Final = arrays(
    "new",
    source=sa.Integer,
    offset=sa.BigInteger,
    member=sa.BigInteger,
    size=sa.Integer,
    message_id=sa.Text,
    type=sa.Text,
)

add_missing: Final = (
    insert(collected_messages)
    .from_select(
        ["source_id", "stream_offset", "member_id", "size", "message_id", "type"],
        sa.select(*_NEW.c),
    )
    .on_conflict_do_nothing()
)

mine_to_consume: Final = sa.select(_messages.source_id, _messages.stream_offset).where(
    *_mine, _messages.state == "collected", _messages.attempts == 0
)

forward: Final = _changed(
    sa.update(collected_messages)
    .where(*_mine, _messages.state == "collected")
    .values(
        state="forwarded",
        attempts=_messages.attempts + 1,
        bulk_id=sa.bindparam("into", type_=sa.BigInteger),
        forwarded_at=_NOW,
        next_attempt_at=None,
    ),
    _messages.forwarded_at,
)

forwarded: Final = _found(_messages.stream_offset, _messages.forwarded_at).where(
    *_mine,
    _messages.state == "forwarded",
    _messages.bulk_id == sa.bindparam("into", type_=sa.BigInteger),
)

texts: Final = sa.select(sa.bindparam("texts", type_=sa.ARRAY(sa.Text)))
"""Texts as they are: what the database cannot hold, it refuses."""

# What this member cannot go on with, and another can, is nobody's until that one takes it over.
_others: Final = collector_members.alias("others")
give_back: Final = (
    sa.update(collected_messages)
    .where(
        *_mine,
        _messages.finished_at.is_(None),
        sa.exists().where(
            _others.c.collector_id == _of_collector,
            _others.c.member_id != sa.bindparam("of_member", type_=sa.BigInteger),
            holds(_others.c.lease_expires_at),
            _messages.type == sa.any_(_others.c.types),
        ),
    )
    .values(member_id=None, state="collected", bulk_id=None)
)

is_mine: Final = sa.select(_messages.stream_offset).where(*_mine, _messages.finished_at.is_(None)).limit(1)

_in_bulk: Final = (*_mine, _messages.bulk_id == sa.bindparam("of_bulk", type_=sa.BigInteger))
_is_forwarded: Final = (*_in_bulk, _messages.state == "forwarded")

# What nearly all messages come to; it needs no array but that of their offsets.
succeed: Final = _changed(
    sa.update(collected_messages)
    .where(*_is_forwarded)
    .values(state="succeeded", reason=None, finished_at=_NOW, next_attempt_at=None),
    _NOW,
)

succeeded: Final = _found(_messages.stream_offset, _messages.finished_at).where(
    *_in_bulk, _messages.state == "succeeded"
)

_result: Final = _its_own("states", sa.Text)
_to_retry: Final = _result == "collected"

finish: Final = _changed(
    sa.update(collected_messages)
    .where(*_is_forwarded)
    .values(
        state=_result,
        reason=_its_own("reasons", sa.Text),
        finished_at=sa.case((_to_retry, None), else_=_NOW),
        next_attempt_at=sa.case(
            (_to_retry, _NOW + interval(sa.func.coalesce(_its_own("retries_s", sa.Float), 0.0))), else_=None
        ),
    ),
    _NOW,
)

finished: Final = _found(_messages.stream_offset, _messages.finished_at).where(*_in_bulk, _messages.state == _result)

# Forgetting

kept: Final = (
    sa.select(_sources.source_id, collectors.c.keep_s)
    .join(collectors, collectors.c.collector_id == _sources.collector_id)
    .where(
        collectors.c.keep_s.is_not(None),
        sa.or_(_of_collector.is_(None), collectors.c.collector_id == _of_collector),
    )
)

_row: Final[sa.ColumnElement[Any]] = sa.literal_column("ctid")
_is_forgotten: Final = (_messages.source_id == sa.bindparam("of_source")) & (
    _messages.finished_at < sa.func.now() - interval(sa.bindparam("older_s", type_=sa.Float))
)

# Oldest first, which is the index's order: no scan, however much is finished. Named by their places on disk.
forget: Final = sa.delete(collected_messages).where(
    _row
    == sa.any_(
        sa.func.array(
            sa.select(_row)
            .select_from(collected_messages)
            .where(_is_forgotten)
            .order_by(_messages.finished_at)
            .limit(sa.bindparam("most", type_=sa.Integer))
            .scalar_subquery()
        )
    ),
    _is_forgotten,
)

# Taking over

# Those of nobody were given back by a member that does not reach the broker, or stored by release 0.4.0.
_taken = (
    sa.select(_messages.source_id, _messages.stream_offset)
    .join(collector_sources, _sources.source_id == _messages.source_id)
    .where(
        sa.or_(
            _messages.member_id == sa.any_(sa.bindparam("lapsed", type_=sa.ARRAY(sa.BigInteger))),
            _messages.member_id.is_(None),
        ),
        _messages.finished_at.is_(None),
        _messages.type == sa.any_(sa.bindparam("of_types", type_=sa.ARRAY(sa.Text))),
        _sources.collector_id == _of_collector,
        _sources.replaced_at.is_(None),
    )
    .order_by(_messages.collected_at, _messages.source_id, _messages.stream_offset)
    .limit(sa.bindparam("most", type_=sa.Integer))
    # What a result is just being stored of is nobody's to take over.
    .with_for_update(of=collected_messages, skip_locked=True)
    .cte("taken")
)

take_over: Final = (
    sa.update(collected_messages)
    .where(_messages.source_id == _taken.c.source_id, _messages.stream_offset == _taken.c.stream_offset)
    .values(
        member_id=sa.bindparam("by", type_=sa.BigInteger),
        state="collected",
        bulk_id=sa.bindparam("token", type_=sa.BigInteger),
    )
)

taken_over: Final = (
    sa.select(
        _sources.stream,
        _messages.source_id,
        _messages.stream_offset,
        _messages.message_id,
        _messages.type,
        _messages.size,
        _messages.attempts,
        sa.func.greatest(0.0, sa.extract("epoch", _messages.next_attempt_at - sa.func.clock_timestamp())).label(
            "due_in_s"
        ),
        _messages.collected_at,
    )
    .join(collector_sources, _sources.source_id == _messages.source_id)
    .where(
        _of_member,
        _messages.finished_at.is_(None),
        _messages.state == "collected",
        _messages.bulk_id == sa.bindparam("token", type_=sa.BigInteger),
    )
    .order_by(_messages.collected_at, _messages.source_id, _messages.stream_offset)
)
