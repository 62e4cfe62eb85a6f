"""A collector's row, its members, and the rows of the streams they follow: where each transaction begins."""

import threading
from collections.abc import Collection, Mapping
from datetime import datetime
from typing import Any, Final

import sqlalchemy as sa

from relatum.collecting._collector_core import Advance
from relatum.errors import Conflict
from relatum.store.database import sql

# --- collectors and members

FIND_COLLECTOR: Final = sql("""
    SELECT collector_id, keep_s FROM relatum.collectors
    WHERE vhost = :of_vhost::text AND name = :named::text""")

ADD_COLLECTOR: Final = sql("""
    INSERT INTO relatum.collectors (vhost, name, keep_s)
    VALUES (:of_vhost::text, :named::text, :kept_s::integer) ON CONFLICT DO NOTHING""")

SET_KEEP: Final = sql("""
    UPDATE relatum.collectors SET keep_s = :kept_s::integer WHERE collector_id = :in_collector::integer
    """)

ADD_MEMBER: Final = sql("""
    INSERT INTO relatum.collector_members (collector_id, types, holder, lease_s, lease_expires_at)
    VALUES (:in_collector::integer, :has_types::text[], :held_by::text, :holds_s::float,
        clock_timestamp() + make_interval(secs => :holds_s::float))
    RETURNING member_id""")

RENEW: Final = sql("""
    UPDATE relatum.collector_members SET lease_expires_at = clock_timestamp() + make_interval(secs => lease_s)
    WHERE member_id = :id::bigint""")

LEAVE: Final = sql("""
    UPDATE relatum.collector_members SET lease_expires_at = clock_timestamp() WHERE member_id = :id::bigint""")

# Nobody may find this member dead, with nothing left to take over, while it adds rows.
HOLD_MEMBER: Final = sql("""
    SELECT now() FROM relatum.collector_members WHERE member_id = :of_member::bigint FOR KEY SHARE""")

LOCK_LAPSED: Final = sql("""
    SELECT member_id FROM relatum.collector_members
    WHERE collector_id = :in_collector::integer AND lease_expires_at < clock_timestamp()
        AND member_id <> :of_member::bigint
    ORDER BY member_id FOR UPDATE SKIP LOCKED""")

REMOVE_MEMBERS: Final = sql("""
    DELETE FROM relatum.collector_members AS member
    WHERE member_id = ANY (:lapsed::bigint[]) AND NOT EXISTS (
        SELECT FROM relatum.collected_messages AS message
        WHERE message.member_id = member.member_id AND message.finished_at IS NULL)""")

# --- streams

FIND_SOURCES: Final = sql("""
    SELECT stream, source_id FROM relatum.collector_sources
    WHERE collector_id = :in_collector::integer AND stream = ANY (:streams::text[])
        AND replaced_at IS NULL""")

ADD_SOURCE: Final = sql("""
    INSERT INTO relatum.collector_sources (collector_id, stream)
    VALUES (:in_collector::integer, :of_stream::text)
    ON CONFLICT (collector_id, stream) WHERE replaced_at IS NULL DO NOTHING""")

_THIS: Final = """collector_id = :in_collector::integer AND stream = :of_stream::text
        AND replaced_at IS NULL"""
"""The present generation of a stream."""

_OTHERS: Final = """relatum.collector_members AS other
        WHERE other.collector_id = :in_collector::integer AND other.member_id <> :of_member::bigint
            AND other.lease_expires_at >= clock_timestamp()"""
"""The members beside this one."""

# A member follows only where it has executors of all types that others have: it would pass theirs over.
_LACKS_TYPES: Final = f"""EXISTS (SELECT FROM {_OTHERS} AND NOT other.types <@ (
        SELECT types FROM relatum.collector_members WHERE member_id = :of_member::bigint))"""

LOCK_SOURCE: Final = sql(f"""
    SELECT source_id, position, member_id, last_offset, last_fingerprint, last_chunk_ms
    FROM relatum.collector_sources WHERE {_THIS} FOR UPDATE""")

IS_ALIVE: Final = sql("""
    SELECT member_id FROM relatum.collector_members
    WHERE member_id = :of_member::bigint AND lease_expires_at >= clock_timestamp()""")

TYPES_ALIVE: Final = sql("""
    SELECT member_id, types FROM relatum.collector_members
    WHERE collector_id = :in_collector::integer AND lease_expires_at >= clock_timestamp()""")

HELD: Final = sql(f"""
    SELECT stream FROM relatum.collector_sources AS source
    WHERE collector_id = :in_collector::integer AND replaced_at IS NULL
        AND (EXISTS (SELECT FROM {_OTHERS} AND other.member_id = source.member_id) OR {_LACKS_TYPES})""")

FOLLOW: Final = sql(f"""
    UPDATE relatum.collector_sources
    SET member_id = :of_member::bigint, position = coalesce(position, :initial::bigint)
    WHERE source_id = :id::integer AND NOT {_LACKS_TYPES}
    RETURNING position""")

UNFOLLOW: Final = sql(f"""
    UPDATE relatum.collector_sources SET member_id = NULL WHERE member_id = :by::bigint AND {_THIS}""")

UNFOLLOW_ALL: Final = sql("""
    UPDATE relatum.collector_sources SET member_id = NULL WHERE member_id = :by::bigint""")

REPLACE_SOURCE: Final = sql("""
    UPDATE relatum.collector_sources SET replaced_at = now(), member_id = NULL
    WHERE source_id = :id::integer""")

ADD_REPLACED: Final = sql("""
    INSERT INTO relatum.collector_sources (collector_id, stream, replaced_at)
    VALUES (:in_collector::integer, :of_stream::text, now()) RETURNING source_id""")
"""A generation that is over from the first: for messages whose places others have, or will have."""

MOVE_LOST: Final = sql("""
    UPDATE relatum.collected_messages SET source_id = :to_source::integer
    WHERE source_id = :of_source::integer AND stream_offset > :behind::bigint""")

SET_BACK: Final = sql("""
    UPDATE relatum.collector_sources
    SET position = :to::bigint, last_offset = NULL, last_fingerprint = NULL, last_chunk_ms = NULL,
        moved_at = now()
    WHERE source_id = :id::integer""")

# Not by a join, for which PostgreSQL reads half a stream's messages.
LAST_COLLECTED: Final = sql(f"""
    SELECT stream_offset, message_id FROM relatum.collected_messages
    WHERE source_id = (SELECT source_id FROM relatum.collector_sources WHERE {_THIS})
        AND stream_offset <= :until::bigint
    ORDER BY stream_offset DESC LIMIT 1""")

FAIL_UNFINISHED: Final = sql("""
    UPDATE relatum.collected_messages
    SET state = 'failed', finished_at = statement_timestamp(), next_attempt_at = NULL, reason = :why::text
    WHERE source_id = :of_source::integer AND finished_at IS NULL""")

ADVANCE: Final = sql(f"""
    UPDATE relatum.collector_sources
    SET position = :to::bigint, moved_at = now(),
        passed_over = passed_over + :more_passed_over::bigint,
        last_offset = CASE WHEN :is_known::boolean THEN :known_offset::bigint ELSE last_offset END,
        last_fingerprint = CASE WHEN :is_known::boolean THEN :known_fingerprint::bigint ELSE last_fingerprint END,
        last_chunk_ms = CASE WHEN :is_known::boolean THEN :known_chunk_ms::bigint ELSE last_chunk_ms END
    WHERE {_THIS} AND member_id = :of_member::bigint AND position = :expected::bigint
        AND NOT {_LACKS_TYPES}
    RETURNING source_id""")


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
            "follows the stream, or has executors of more types; nothing was written"
        )


def _source_ids(connection: sa.Connection, query: Mapping[str, Any]) -> dict[str, int]:
    return {row.stream: row.source_id for row in connection.execute(FIND_SOURCES, query)}
