"""The SQL of `relatum status --collector`: reading only."""

from typing import Any, Final

import sqlalchemy as sa

from relatum.outcomes import outcome_columns
from relatum.store import collected_messages, collector_members, collector_sources, collectors, holds

_messages: Final = collected_messages.c
_sources: Final = collector_sources.c
_members: Final = collector_members.c
_is_alive: Final = holds(_members.lease_expires_at)
_of_collector: Final = sa.bindparam("in_collector", type_=sa.Integer)

all_collectors: Final = sa.select(
    collectors.c.collector_id, collectors.c.vhost, collectors.c.name, collectors.c.keep_s
).order_by(collectors.c.name, collectors.c.vhost)

members: Final = (
    sa.select(
        _members.member_id, _members.holder, _members.types, _is_alive, _members.joined_at, _members.lease_expires_at
    )
    .where(_members.collector_id == _of_collector)
    .order_by(_members.member_id)
)

sources: Final = (
    sa.select(
        _sources.stream,
        _sources.position,
        _members.holder,
        _sources.moved_at,
        _sources.passed_over,
    )
    .join_from(
        collector_sources, collector_members, (_members.member_id == _sources.member_id) & _is_alive, isouter=True
    )
    .where(_sources.collector_id == _of_collector, _sources.replaced_at.is_(None))
    .order_by(_sources.stream)
)

unfinished: Final = (
    sa.select(
        _messages.state,
        _messages.type,
        sa.func.count().label("count"),
        sa.func.min(_messages.collected_at).label("oldest"),
    )
    .join(collector_sources, _sources.source_id == _messages.source_id)
    .where(_sources.collector_id == _of_collector, _messages.finished_at.is_(None))
    .group_by(_messages.state, _messages.type)
)


_at: Final = sa.bindparam("at", type_=sa.DateTime(timezone=True))
_behind: Final = sa.tuple_(_messages.finished_at, _messages.source_id, _messages.stream_offset) < sa.tuple_(
    _at,
    sa.bindparam("at_source", type_=sa.Integer),
    sa.bindparam("at_offset", type_=sa.BigInteger),
)
_before: Final = (_messages.finished_at.is_not(None), _messages.finished_at <= _at, _behind)
_kinds: Final = sa.bindparam("states", type_=sa.ARRAY(sa.Text))
_limit: Final = sa.bindparam("limit", type_=sa.BigInteger)

# The latest of the moments up to which each stream's finished messages are looked through: so many of each, by index.
floor: Final = sa.select(
    sa.func.max(
        sa.select(_messages.finished_at)
        .where(_messages.source_id == _sources.source_id, *_before)
        .order_by(_messages.finished_at.desc())
        .offset(sa.bindparam("looked", type_=sa.BigInteger))
        .limit(1)
        .scalar_subquery()
    )
).where(_sources.collector_id == _of_collector)

_shown: Final = (*outcome_columns, _messages.source_id)
_of_one: Final = (
    sa.select(*_shown)
    .join_from(collected_messages, collector_sources, _sources.source_id == _messages.source_id)
    .join(collectors, collectors.c.collector_id == _sources.collector_id)
    .where(_sources.collector_id == _of_collector, _messages.state == sa.any_(_kinds))
)

# The columns of `Outcome`, in its order, and the source.
finished_before: Final = (
    _of_one.where(*_before, _messages.finished_at >= sa.bindparam("floor", type_=sa.DateTime(timezone=True)))
    .order_by(_messages.finished_at.desc(), _messages.source_id.desc(), _messages.stream_offset.desc())
    .limit(_limit)
)

# Stream by stream, each by the index of those that have a reason: nothing that succeeded is passed.
_last: Final = (
    sa.select(*(each for each in _shown if each.table is collected_messages))
    .where(_messages.source_id == _sources.source_id, *_before)
    .where(_messages.reason.is_not(None), _messages.state == sa.any_(_kinds))
    .order_by(_messages.finished_at.desc(), _messages.stream_offset.desc())
    .limit(_limit)
    .correlate(collector_sources)
    .lateral("last")
)
unsuccessful_before: Final = (
    sa.select(*(_last.c[each.name] if each.table is collected_messages else each for each in _shown))
    .join_from(collector_sources, collectors, collectors.c.collector_id == _sources.collector_id)
    .join(_last, sa.true())
    .where(_sources.collector_id == _of_collector)
    .order_by(_last.c.finished_at.desc(), _last.c.source_id.desc(), _last.c.stream_offset.desc())
    .limit(_limit)
)

# By itself: to walk along the index of places would pass all that is finished.
_waiting: Final = (
    _of_one.where(
        _messages.finished_at.is_(None),
        sa.tuple_(_messages.source_id, _messages.stream_offset)
        > sa.tuple_(sa.bindparam("at_source", type_=sa.Integer), sa.bindparam("at_offset", type_=sa.BigInteger)),
    )
    .offset(0)
    .subquery("waiting")
)
unfinished_after: Final = sa.select(_waiting).order_by(_waiting.c.source_id, _waiting.c.stream_offset).limit(_limit)


def finished_in(table: Any) -> "sa.Select[Any]":
    """Finished messages of a collector by state, in the table or in a sample of it."""
    return (
        sa.select(table.c.state, sa.func.count())
        .join(collector_sources, _sources.source_id == table.c.source_id)
        .where(_sources.collector_id == _of_collector, table.c.finished_at.is_not(None))
        .group_by(table.c.state)
    )
