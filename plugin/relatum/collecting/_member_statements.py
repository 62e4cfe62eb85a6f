"""The SQL of collectors, their members and the streams they follow: each statement once, its parameters bound."""

from typing import Final

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert

from relatum.store import collected_messages, collector_members, collector_sources, collectors, holds, lapsed, leased

_messages: Final = collected_messages.c
_sources: Final = collector_sources.c
_members: Final = collector_members.c


_is_alive: Final = holds(_members.lease_expires_at)
_of_collector: Final = sa.bindparam("in_collector", type_=sa.Integer)

# Collectors and members

find_collector: Final = sa.select(collectors.c.collector_id, collectors.c.keep_s).where(
    collectors.c.vhost == sa.bindparam("of_vhost"), collectors.c.name == sa.bindparam("named")
)

add_collector: Final = (
    insert(collectors)
    .values(vhost=sa.bindparam("of_vhost"), name=sa.bindparam("named"), keep_s=sa.bindparam("kept_s", type_=sa.Integer))
    .on_conflict_do_nothing()
)

set_keep: Final = (
    sa.update(collectors)
    .where(collectors.c.collector_id == _of_collector)
    .values(keep_s=sa.bindparam("kept_s", type_=sa.Integer))
)

add_member: Final = (
    sa.insert(collector_members)
    .values(
        collector_id=_of_collector,
        types=sa.bindparam("has_types", type_=sa.ARRAY(sa.Text)),
        lease_s=sa.bindparam("holds_s", type_=sa.Float),
        **leased(sa.bindparam("holds_s", type_=sa.Float), sa.bindparam("held_by")),
    )
    .returning(_members.member_id)
)

renew: Final = (
    sa.update(collector_members).where(_members.member_id == sa.bindparam("id")).values(**leased(_members.lease_s))
)

leave: Final = (
    sa.update(collector_members)
    .where(_members.member_id == sa.bindparam("id"))
    .values(**leased(sa.literal_column("0")))
)

hold_member: Final = (
    sa.select(sa.func.now())
    .select_from(collector_members)
    .where(_members.member_id == sa.bindparam("of_member"))
    # Nobody may find this member dead, with nothing left to take over, while it adds rows.
    .with_for_update(key_share=True, read=True)
)

lock_lapsed: Final = (
    sa.select(_members.member_id)
    .where(
        _members.collector_id == _of_collector,
        lapsed(_members.lease_expires_at),
        _members.member_id != sa.bindparam("of_member"),
    )
    .order_by(_members.member_id)
    .with_for_update(skip_locked=True)
)

_lapsed: Final = sa.any_(sa.bindparam("lapsed", type_=sa.ARRAY(sa.BigInteger)))

remove_members: Final = sa.delete(collector_members).where(
    _members.member_id == _lapsed,
    ~sa.exists().where(_messages.member_id == _members.member_id, _messages.finished_at.is_(None)),
)

# Streams

find_sources: Final = sa.select(_sources.stream, _sources.source_id).where(
    _sources.collector_id == _of_collector,
    _sources.stream == sa.any_(sa.bindparam("streams", type_=sa.ARRAY(sa.Text))),
    _sources.replaced_at.is_(None),
)

add_source: Final = (
    insert(collector_sources)
    .values(collector_id=_of_collector, stream=sa.bindparam("of_stream"))
    .on_conflict_do_nothing(index_elements=["collector_id", "stream"], index_where=_sources.replaced_at.is_(None))
)

_this_source: Final = (
    _sources.collector_id == _of_collector,
    _sources.stream == sa.bindparam("of_stream"),
    _sources.replaced_at.is_(None),
)

lock_source: Final = (
    sa.select(
        _sources.source_id,
        _sources.position,
        _sources.member_id,
        _sources.last_offset,
        _sources.last_fingerprint,
        _sources.last_chunk_ms,
    )
    .where(*_this_source)
    .with_for_update()
)

is_alive: Final = sa.select(_members.member_id).where(_members.member_id == sa.bindparam("of_member"), _is_alive)

_others: Final = collector_members.alias("others")
_another: Final = (
    _others.c.collector_id == _of_collector,
    _others.c.member_id != sa.bindparam("of_member", type_=sa.BigInteger),
    holds(_others.c.lease_expires_at),
)

# A member follows only where it has executors of all types that others have: it would pass theirs over.
_own_types: Final = (
    sa.select(_members.types)
    .where(_members.member_id == sa.bindparam("of_member", type_=sa.BigInteger))
    .scalar_subquery()
)
_lacks_types: Final = sa.exists().where(*_another, ~_others.c.types.op("<@", is_comparison=True)(_own_types))

types_alive: Final = sa.select(_members.member_id, _members.types).where(
    _members.collector_id == _of_collector, _is_alive
)

held: Final = sa.select(_sources.stream).where(
    _sources.collector_id == _of_collector,
    _sources.replaced_at.is_(None),
    sa.or_(sa.exists().where(*_another, _others.c.member_id == _sources.member_id), _lacks_types),
)

_KNOWN_BY: Final = {
    "last_offset": sa.bindparam("known_offset", type_=sa.BigInteger),
    "last_fingerprint": sa.bindparam("known_fingerprint", type_=sa.BigInteger),
    "last_chunk_ms": sa.bindparam("known_chunk_ms", type_=sa.BigInteger),
}

follow: Final = (
    sa.update(collector_sources)
    .where(_sources.source_id == sa.bindparam("id"), ~_lacks_types)
    .values(
        member_id=sa.bindparam("of_member", type_=sa.BigInteger),
        position=sa.func.coalesce(_sources.position, sa.bindparam("initial", type_=sa.BigInteger)),
    )
    .returning(_sources.position)
)

unfollow: Final = (
    sa.update(collector_sources).where(_sources.member_id == sa.bindparam("by"), *_this_source).values(member_id=None)
)

unfollow_all: Final = (
    sa.update(collector_sources).where(_sources.member_id == sa.bindparam("by")).values(member_id=None)
)

replace_source: Final = (
    sa.update(collector_sources)
    .where(_sources.source_id == sa.bindparam("id"))
    .values(replaced_at=sa.func.now(), member_id=None)
)

add_replaced: Final = (
    sa.insert(collector_sources)
    .values(collector_id=_of_collector, stream=sa.bindparam("of_stream"), replaced_at=sa.func.now())
    .returning(_sources.source_id)
)
"""A generation that is over from the first: for messages whose places others have, or will have."""

move_lost: Final = (
    sa.update(collected_messages)
    .where(
        _messages.source_id == sa.bindparam("of_source"),
        _messages.stream_offset > sa.bindparam("behind", type_=sa.BigInteger),
    )
    .values(source_id=sa.bindparam("to_source", type_=sa.Integer))
)

set_back: Final = (
    sa.update(collector_sources)
    .where(_sources.source_id == sa.bindparam("id"))
    .values(
        position=sa.bindparam("to", type_=sa.BigInteger),
        last_offset=None,
        last_fingerprint=None,
        last_chunk_ms=None,
        moved_at=sa.func.now(),
    )
)

last_collected: Final = (
    sa.select(_messages.stream_offset, _messages.message_id)
    .where(
        # Not by a join, for which PostgreSQL reads half a stream's messages.
        _messages.source_id == sa.select(_sources.source_id).where(*_this_source).scalar_subquery(),
        _messages.stream_offset <= sa.bindparam("until", type_=sa.BigInteger),
    )
    .order_by(_messages.stream_offset.desc())
    .limit(1)
)

fail_unfinished: Final = (
    sa.update(collected_messages)
    .where(_messages.source_id == sa.bindparam("of_source"), _messages.finished_at.is_(None))
    .values(
        state="failed",
        finished_at=sa.func.statement_timestamp(),
        next_attempt_at=None,
        reason=sa.bindparam("why"),
    )
)

advance: Final = (
    sa.update(collector_sources)
    .where(
        *_this_source,
        _sources.member_id == sa.bindparam("of_member", type_=sa.BigInteger),
        _sources.position == sa.bindparam("expected", type_=sa.BigInteger),
        ~sa.exists().where(
            *_another,
            _others.c.types.op("&&", is_comparison=True)(sa.bindparam("passed_over_types", type_=sa.ARRAY(sa.Text))),
        ),
    )
    .values(
        position=sa.bindparam("to", type_=sa.BigInteger),
        moved_at=sa.func.now(),
        passed_over=_sources.passed_over + sa.bindparam("more_passed_over", type_=sa.BigInteger),
        **{
            name: sa.case((sa.bindparam("is_known", type_=sa.Boolean), value), else_=_sources[name])
            for name, value in _KNOWN_BY.items()
        },
    )
    .returning(_sources.source_id)
)
