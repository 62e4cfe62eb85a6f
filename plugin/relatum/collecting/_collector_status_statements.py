"""The SQL of `relatum status --collector`: reading only."""

from typing import Any, Final

import sqlalchemy as sa

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
        _sources.refused,
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


def finished_in(table: Any) -> "sa.Select[Any]":
    """Finished messages of a collector by state, in the table or in a sample of it."""
    return (
        sa.select(table.c.state, sa.func.count())
        .join(collector_sources, _sources.source_id == table.c.source_id)
        .where(_sources.collector_id == _of_collector, table.c.finished_at.is_not(None))
        .group_by(table.c.state)
    )
