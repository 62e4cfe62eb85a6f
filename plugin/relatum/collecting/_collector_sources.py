"""A collector's row, its members, and the rows of the streams they follow: where each transaction begins."""

import threading
from collections.abc import Collection, Mapping
from datetime import datetime
from typing import Any, Final

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import insert

from relatum.collecting._bulk import Advance
from relatum.errors import Conflict
from relatum.store import collected_messages, collector_members, collector_sources, collectors, holds, lapsed, leased

_messages: Final = collected_messages.c
_sources: Final = collector_sources.c
_members: Final = collector_members.c


_is_alive: Final = holds(_members.lease_expires_at)
_of_collector: Final = sa.bindparam("in_collector", type_=sa.Integer)

# Collectors and members

FIND_COLLECTOR: Final = sa.select(collectors.c.collector_id, collectors.c.keep_s).where(
    collectors.c.vhost == sa.bindparam("of_vhost"), collectors.c.name == sa.bindparam("named")
)

ADD_COLLECTOR: Final = (
    insert(collectors)
    .values(vhost=sa.bindparam("of_vhost"), name=sa.bindparam("named"), keep_s=sa.bindparam("kept_s", type_=sa.Integer))
    .on_conflict_do_nothing()
)

SET_KEEP: Final = (
    sa.update(collectors)
    .where(collectors.c.collector_id == _of_collector)
    .values(keep_s=sa.bindparam("kept_s", type_=sa.Integer))
)

ADD_MEMBER: Final = (
    sa.insert(collector_members)
    .values(
        collector_id=_of_collector,
        types=sa.bindparam("has_types", type_=sa.ARRAY(sa.Text)),
        lease_s=sa.bindparam("holds_s", type_=sa.Float),
        **leased(sa.bindparam("holds_s", type_=sa.Float), sa.bindparam("held_by")),
    )
    .returning(_members.member_id)
)

RENEW: Final = (
    sa.update(collector_members).where(_members.member_id == sa.bindparam("id")).values(**leased(_members.lease_s))
)

LEAVE: Final = (
    sa.update(collector_members)
    .where(_members.member_id == sa.bindparam("id"))
    .values(**leased(sa.literal_column("0")))
)

HOLD_MEMBER: Final = (
    sa.select(sa.func.now())
    .select_from(collector_members)
    .where(_members.member_id == sa.bindparam("of_member"))
    # Nobody may find this member dead, with nothing left to take over, while it adds rows.
    .with_for_update(key_share=True, read=True)
)

LOCK_LAPSED: Final = (
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

REMOVE_MEMBERS: Final = sa.delete(collector_members).where(
    _members.member_id == _lapsed,
    ~sa.exists().where(_messages.member_id == _members.member_id, _messages.finished_at.is_(None)),
)

# Streams

FIND_SOURCES: Final = sa.select(_sources.stream, _sources.source_id).where(
    _sources.collector_id == _of_collector,
    _sources.stream == sa.any_(sa.bindparam("streams", type_=sa.ARRAY(sa.Text))),
    _sources.replaced_at.is_(None),
)

ADD_SOURCE: Final = (
    insert(collector_sources)
    .values(collector_id=_of_collector, stream=sa.bindparam("of_stream"))
    .on_conflict_do_nothing(index_elements=["collector_id", "stream"], index_where=_sources.replaced_at.is_(None))
)

_this_source: Final = (
    _sources.collector_id == _of_collector,
    _sources.stream == sa.bindparam("of_stream"),
    _sources.replaced_at.is_(None),
)

LOCK_SOURCE: Final = (
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

IS_ALIVE: Final = sa.select(_members.member_id).where(_members.member_id == sa.bindparam("of_member"), _is_alive)

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

TYPES_ALIVE: Final = sa.select(_members.member_id, _members.types).where(
    _members.collector_id == _of_collector, _is_alive
)

HELD: Final = sa.select(_sources.stream).where(
    _sources.collector_id == _of_collector,
    _sources.replaced_at.is_(None),
    sa.or_(sa.exists().where(*_another, _others.c.member_id == _sources.member_id), _lacks_types),
)

_KNOWN_BY: Final = {
    "last_offset": sa.bindparam("known_offset", type_=sa.BigInteger),
    "last_fingerprint": sa.bindparam("known_fingerprint", type_=sa.BigInteger),
    "last_chunk_ms": sa.bindparam("known_chunk_ms", type_=sa.BigInteger),
}

FOLLOW: Final = (
    sa.update(collector_sources)
    .where(_sources.source_id == sa.bindparam("id"), ~_lacks_types)
    .values(
        member_id=sa.bindparam("of_member", type_=sa.BigInteger),
        position=sa.func.coalesce(_sources.position, sa.bindparam("initial", type_=sa.BigInteger)),
    )
    .returning(_sources.position)
)

UNFOLLOW: Final = (
    sa.update(collector_sources).where(_sources.member_id == sa.bindparam("by"), *_this_source).values(member_id=None)
)

UNFOLLOW_ALL: Final = (
    sa.update(collector_sources).where(_sources.member_id == sa.bindparam("by")).values(member_id=None)
)

REPLACE_SOURCE: Final = (
    sa.update(collector_sources)
    .where(_sources.source_id == sa.bindparam("id"))
    .values(replaced_at=sa.func.now(), member_id=None)
)

ADD_REPLACED: Final = (
    sa.insert(collector_sources)
    .values(collector_id=_of_collector, stream=sa.bindparam("of_stream"), replaced_at=sa.func.now())
    .returning(_sources.source_id)
)
"""A generation that is over from the first: for messages whose places others have, or will have."""

MOVE_LOST: Final = (
    sa.update(collected_messages)
    .where(
        _messages.source_id == sa.bindparam("of_source"),
        _messages.stream_offset > sa.bindparam("behind", type_=sa.BigInteger),
    )
    .values(source_id=sa.bindparam("to_source", type_=sa.Integer))
)

SET_BACK: Final = (
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

LAST_COLLECTED: Final = (
    sa.select(_messages.stream_offset, _messages.message_id)
    .where(
        # Not by a join, for which PostgreSQL reads half a stream's messages.
        _messages.source_id == sa.select(_sources.source_id).where(*_this_source).scalar_subquery(),
        _messages.stream_offset <= sa.bindparam("until", type_=sa.BigInteger),
    )
    .order_by(_messages.stream_offset.desc())
    .limit(1)
)

FAIL_UNFINISHED: Final = (
    sa.update(collected_messages)
    .where(_messages.source_id == sa.bindparam("of_source"), _messages.finished_at.is_(None))
    .values(
        state="failed",
        finished_at=sa.func.statement_timestamp(),
        next_attempt_at=None,
        reason=sa.bindparam("why"),
    )
)

ADVANCE: Final = (
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


class CollectorSources:
    """Which row the collector has, and each of its streams. Thread-safe."""

    def __init__(self, name: str, vhost: str, keep_s: int | None) -> None:
        self.name = name
        self.vhost = vhost
        self._keep_s = keep_s
        self._lock = threading.Lock()
        self._collector: int | None = None
        self._ids: dict[str, int] = {}

    def collector_id(self, connection: sa.Connection) -> int:
        """The collector's row, made where it is not there."""
        if self._collector is None:
            self._collector = self.ensure(connection)
        return self._collector

    def ensure(self, connection: sa.Connection) -> int:
        """As `collector_id`; and the last member that joins decides for how long messages are remembered."""
        named = {"of_vhost": self.vhost, "named": self.name}
        row = connection.execute(FIND_COLLECTOR, named).one_or_none()
        if row is None:
            connection.execute(ADD_COLLECTOR, {**named, "kept_s": self._keep_s})
            row = connection.execute(FIND_COLLECTOR, named).one()
        if row.keep_s != self._keep_s:
            connection.execute(SET_KEEP, {"in_collector": row.collector_id, "kept_s": self._keep_s})
        return int(row.collector_id)

    def lock(self, connection: sa.Connection, stream: str) -> Any:
        """The stream's row, made where it is not there, for us alone until the transaction ends."""
        named = {"in_collector": self.collector_id(connection), "of_stream": stream}
        row = connection.execute(LOCK_SOURCE, named).one_or_none()
        if row is None:
            connection.execute(ADD_SOURCE, {"in_collector": self.collector_id(connection), "of_stream": stream})
            row = connection.execute(LOCK_SOURCE, named).one()
        return row

    def hold(self, connection: sa.Connection, member: int) -> datetime:
        """Keep the member from being removed until the transaction ends; gives the transaction's time."""
        at: datetime | None = connection.execute(HOLD_MEMBER, {"of_member": member}).scalar_one_or_none()
        if at is None:
            raise Conflict(f"member {member} of {self.name!r} is gone: others took over what it had")
        return at

    def ids(self, connection: sa.Connection, streams: Collection[str]) -> dict[str, int]:
        """The ids of the streams' present rows, made where they are not there."""
        if not streams:
            return {}
        collector = self.collector_id(connection)
        query = {"in_collector": collector, "streams": sorted(streams)}
        found = _source_ids(connection, query)
        if missing := streams - found.keys():
            for stream in sorted(missing):
                connection.execute(ADD_SOURCE, {"in_collector": collector, "of_stream": stream})
            found = _source_ids(connection, query)
        return found

    def known(self, connection: sa.Connection, streams: Collection[str]) -> dict[str, int]:
        """The ids of rows that messages of ours were added or taken over with."""
        with self._lock:
            known = {stream: self._ids[stream] for stream in streams if stream in self._ids}
        return known if len(known) == len(streams) else known | self.ids(connection, set(streams) - known.keys())

    def remember(self, sources: Mapping[str, int]) -> None:
        """Know the rows of streams from now on."""
        with self._lock:
            self._ids.update(sources)

    def advance(self, connection: sa.Connection, member: int, advance: Advance) -> tuple[bool, int]:
        """Move the position by compare-and-set; False where this very call has done so before. And the stream's row."""
        known = advance.known_by
        moved = connection.execute(
            ADVANCE,
            {
                "in_collector": self.collector_id(connection),
                "of_stream": advance.stream,
                "of_member": member,
                "passed_over_types": sorted(advance.passed_over_types),
                "expected": advance.from_offset,
                "to": advance.to_offset,
                "more_passed_over": advance.passed_over,
                "is_known": known is not None,
                "known_offset": known and known.offset,
                "known_fingerprint": known and known.fingerprint,
                "known_chunk_ms": known and known.chunk_ms,
            },
        )
        moved_id = moved.scalar_one_or_none()
        if moved_id is not None:
            return True, moved_id
        source = self.lock(connection, advance.stream)
        if (source.member_id, source.position) == (member, advance.to_offset):
            return False, source.source_id
        raise Conflict(
            f"the position of {advance.stream!r} in {self.name!r} is not {advance.from_offset}, or another member "
            "follows the stream, or has executors of what would be passed over; nothing was written"
        )


def _source_ids(connection: sa.Connection, query: Mapping[str, Any]) -> dict[str, int]:
    return {row.stream: row.source_id for row in connection.execute(FIND_SOURCES, query)}
