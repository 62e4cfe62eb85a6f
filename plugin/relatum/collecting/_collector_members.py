"""The members of a collector and the streams they follow, in PostgreSQL: one transaction per call."""

import logging
from collections.abc import Collection
from typing import Any, Final

import sqlalchemy as sa

from relatum.collecting._collector_core import Followed
from relatum.collecting._handlers import logger
from relatum.common.processes import new_holder
from relatum.common.waiting import Deadline
from relatum.errors import Conflict
from relatum.reading import Position
from relatum.store.database import AnyDatabase, Database, sql
from relatum.store.members import LEASE_S
from relatum.store.rows import known_by
from relatum.store.settling import forget_settlements

# --- collectors and members

FIND_COLLECTOR: Final = sql("""
    SELECT collector_id FROM relatum.collectors
    WHERE vhost = :of_vhost::text AND name = :named::text""")

# The last member to join decides how long finished messages are kept.
ADD_COLLECTOR: Final = sql("""
    INSERT INTO relatum.collectors AS collector (vhost, name, keep_s)
    VALUES (:of_vhost::text, :named::text, :kept_s::integer)
    ON CONFLICT (vhost, name) DO UPDATE SET keep_s = excluded.keep_s
        WHERE collector.keep_s IS DISTINCT FROM excluded.keep_s""")

ADD_MEMBER: Final = sql("""
    INSERT INTO relatum.collector_members (collector_id, types, holder, lease_s, lease_expires_at)
    VALUES (:in_collector::integer, :has_types::text[], :held_by::text, :holds_s::float,
        clock_timestamp() + make_interval(secs => :holds_s::float))
    RETURNING member_id""")

RENEW: Final = sql("""
    UPDATE relatum.collector_members SET lease_expires_at = clock_timestamp() + make_interval(secs => lease_s)
    WHERE member_id = :id::bigint RETURNING member_id""")

LEAVE: Final = sql("""
    UPDATE relatum.collector_members SET lease_expires_at = clock_timestamp() WHERE member_id = :id::bigint""")

# Keeps the member's row from being removed before the transaction ends.
HOLD_MEMBER: Final = sql("""
    SELECT FROM relatum.collector_members WHERE member_id = :of_member::bigint FOR KEY SHARE""")

# A repeated take-over waits here for the unanswered one before it; otherwise it would skip the rows locked there.
LOCK_MEMBER: Final = sql("""
    SELECT FROM relatum.collector_members WHERE member_id = :of_member::bigint FOR NO KEY UPDATE""")

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

_THIS: Final = """collector_id = :in_collector::integer AND stream = :of_stream::text
        AND replaced_at IS NULL"""
"""The current generation of a stream."""

PRESENT: Final = f"(SELECT source_id FROM relatum.collector_sources WHERE {_THIS})"

# Consumes no id of the sequence if the stream has a row.
ADD_SOURCE: Final = sql(f"""
    INSERT INTO relatum.collector_sources (collector_id, stream)
    SELECT :in_collector::integer, :of_stream::text
    WHERE NOT EXISTS (SELECT FROM relatum.collector_sources WHERE {_THIS})
    ON CONFLICT (collector_id, stream) WHERE replaced_at IS NULL DO NOTHING""")

_OTHERS: Final = """relatum.collector_members AS other
        WHERE other.collector_id = :in_collector::integer AND other.member_id <> :of_member::bigint
            AND other.lease_expires_at >= clock_timestamp()"""
"""Other members with a valid lease."""

# A member must not follow streams if others have executors for types that it lacks: it would pass over their messages.
_LACKS_TYPES: Final = f"""EXISTS (SELECT FROM {_OTHERS} AND NOT other.types <@ (
        SELECT types FROM relatum.collector_members WHERE member_id = :of_member::bigint))"""

LOCK_SOURCE: Final = sql(f"""
    SELECT source_id, position, member_id FROM relatum.collector_sources WHERE {_THIS} FOR UPDATE""")

ALIVE: Final = sql("""
    SELECT member_id, types FROM relatum.collector_members
    WHERE collector_id = :in_collector::integer
        AND (lease_expires_at >= clock_timestamp() OR member_id = :of_member::bigint)""")

HELD: Final = sql(f"""
    SELECT stream FROM relatum.collector_sources AS source
    WHERE collector_id = :in_collector::integer AND replaced_at IS NULL
        AND (EXISTS (SELECT FROM {_OTHERS} AND other.member_id = source.member_id) OR {_LACKS_TYPES})""")

# The position and the message before it: by that message, a stream that was declared again is recognised.
_PLACE: Final = """position = :to::bigint, last_offset = :last_offset::bigint,
        last_fingerprint = :last_fingerprint::bigint, last_chunk_ms = :last_chunk_ms::bigint"""

BEGIN: Final = sql(f"UPDATE relatum.collector_sources SET {_PLACE} WHERE source_id = :id::integer AND position IS NULL")

FOLLOW: Final = sql("""
    UPDATE relatum.collector_sources SET member_id = :of_member::bigint
    WHERE source_id = :id::integer RETURNING position, last_offset, last_fingerprint, last_chunk_ms""")

UNFOLLOW: Final = sql(f"""
    UPDATE relatum.collector_sources SET member_id = NULL WHERE member_id = :by::bigint AND {_THIS}""")

REPLACE_SOURCE: Final = sql("""
    UPDATE relatum.collector_sources SET replaced_at = now(), member_id = NULL
    WHERE source_id = :id::integer""")

ADD_REPLACED: Final = sql("""
    INSERT INTO relatum.collector_sources (collector_id, stream, replaced_at)
    VALUES (:in_collector::integer, :of_stream::text, now()) RETURNING source_id""")
"""Adds an ended generation, for messages whose places now belong to the current one."""

MOVE_LOST: Final = sql("""
    UPDATE relatum.collected_messages SET source_id = :to_source::integer
    WHERE source_id = :of_source::integer AND stream_offset >= :to::bigint""")

REWIND: Final = sql(f"""
    UPDATE relatum.collector_sources SET {_PLACE}, moved_at = now() WHERE source_id = :id::integer""")

# Has no join: for a join, PostgreSQL would read half of the stream's messages.
LAST_COLLECTED: Final = sql(f"""
    SELECT stream_offset, message_id FROM relatum.collected_messages
    WHERE source_id = {PRESENT}
        AND stream_offset <= :until::bigint
    ORDER BY stream_offset DESC LIMIT 1""")

FAIL_UNFINISHED: Final = sql("""
    UPDATE relatum.collected_messages
    SET state = 'failed', finished_at = statement_timestamp(), next_attempt_at = NULL, reason = :why::text
    WHERE source_id = :of_source::integer AND finished_at IS NULL""")

# --- adding messages. Each array is sent as one text, so that adding rows takes no longer than COPY.


def _adding(source: str) -> sa.TextClause:
    """Make a statement that adds messages of one stream. `source` is SQL that returns the stream's row, or none.

    The statement first locks the member's row, so that no other member can remove it. The statement returns its time,
    whether `source` returned a row, and how many messages were added; or no row, if the member does not exist.
    """
    return sql(f"""
    WITH member AS (
        SELECT now() AS at FROM relatum.collector_members WHERE member_id = :of_member::bigint FOR KEY SHARE),
    source AS ({source}),
    added AS (
        INSERT INTO relatum.collected_messages (source_id, stream_offset, member_id, size, message_id, type)
        SELECT source_id, stream_offset, :of_member::bigint, size, message_id, type
        FROM source, unnest(:offsets::bigint[], :sizes::bigint[], :message_ids::text[], :types::text[])
            AS given (stream_offset, size, message_id, type)
        ON CONFLICT DO NOTHING RETURNING stream_offset)
    SELECT at, EXISTS (SELECT FROM source) AS has_source, (SELECT count(*) FROM added) AS added FROM member""")


# The lock waits for the end of a generation that is being replaced, and then finds no row.
ADD: Final = _adding(f"""
        SELECT source_id FROM relatum.collector_sources
        WHERE {_THIS} AND EXISTS (SELECT FROM member) FOR KEY SHARE""")

# Moves the stream's position by compare-and-set; changes nothing if an earlier call with the same parameters moved it.
ADVANCE: Final = _adding(f"""
        UPDATE relatum.collector_sources
        SET {_PLACE}, moved_at = now(),
            passed_over = passed_over + CASE position WHEN :to::bigint THEN 0 ELSE :more_passed_over::bigint END
        WHERE {_THIS} AND member_id = :of_member::bigint AND EXISTS (SELECT FROM member)
            AND (position = :to::bigint OR (position = :expected::bigint AND NOT {_LACKS_TYPES}))
        RETURNING source_id""")


REPLACED: Final = "the stream was deleted and declared again, or lost its end, before the message was consumed"
"""The reason stored with failed messages of a stream's old generation."""

_POOL_SIZE: Final = 10
"""Connections to PostgreSQL that stay open; more are opened as needed."""


class CollectorMembers:
    """The members of one collector, and its streams, in PostgreSQL. Thread-safe."""

    def __init__(self, name: str, database: AnyDatabase, vhost: str, keep_s: int | None) -> None:
        self.name = name
        self.ending = Deadline(None)
        """The deadline of calls that PostgreSQL has not answered."""
        self._vhost = vhost
        self._keep_s = keep_s
        # PostgreSQL ends the transactions of a suspended member, which would keep rows locked.
        self._database = Database(
            database, refusing=None, ending=self.ending, pool_size=_POOL_SIZE, is_bounded=False, idle_s=LEASE_S
        )
        self.server = self._database.address.name
        self._collector: int | None = None
        self._has_logged_lacking = False

    def _values(self, **named: Any) -> dict[str, Any]:
        return {"in_collector": self._collector, **named}

    def _find(self, connection: sa.Connection) -> int | None:
        """Return the id of the collector's row; None if no member has ever joined."""
        named = {"of_vhost": self._vhost, "named": self.name}
        found: int | None = connection.execute(FIND_COLLECTOR, named).scalar_one_or_none()
        return found

    def _lock(self, connection: sa.Connection, stream: str) -> Any:
        """Lock the stream's row until the transaction ends; add the row if it is missing."""
        named, source = self._values(of_stream=stream), None
        while source is None:
            # The lock may wait for the end of a generation, and then finds no row.
            connection.execute(ADD_SOURCE, named)
            source = connection.execute(LOCK_SOURCE, named).first()
        return source

    def _hold(self, connection: sa.Connection, member: int, how: sa.TextClause = HOLD_MEMBER) -> None:
        """Keep the member from being removed until the transaction ends."""
        if connection.execute(how, {"of_member": member}).first() is None:
            raise self._removed(member)

    def _removed(self, member: int) -> Conflict:
        return Conflict(f"member {member} of {self.name!r} was removed: another member took over its messages")

    # --- members ------------------------------------------------------------------------------------------------------

    def reopen(self) -> None:
        """Reopen after a start that failed."""
        self._database.reopen()

    def open(self, types: Collection[str], lease_s: float) -> int:
        """Join as a new member with executors for these types; return its id."""
        with self._database.transaction() as connection:
            connection.execute(ADD_COLLECTOR, {"of_vhost": self._vhost, "named": self.name, "kept_s": self._keep_s})
            self._collector = self._find(connection)
            member = self._values(held_by=new_holder(), has_types=sorted(types), holds_s=lease_s)
            forget_settlements(connection)
            return int(connection.execute(ADD_MEMBER, member).scalar_one())

    def close(self, member: int) -> None:
        """End the lease, so that others can take over messages and streams immediately."""
        with self._database.transaction() as connection:
            connection.execute(LEAVE, {"id": member})
            # Skips this member while the server still runs a transaction of it, whose messages are not visible yet.
            lapsed = list(connection.scalars(LOCK_LAPSED, self._values(of_member=0)))
            connection.execute(REMOVE_MEMBERS, {"lapsed": lapsed})

    # --- streams ------------------------------------------------------------------------------------------------------

    def follow(self, member: int, stream: str, initial: int, known: Position | None = None) -> Followed | None:
        """Follow a stream; return None if a live member follows it, or has executors for types that this member lacks.

        `initial`: The position to start at if this collector never followed the stream. `known`: The message before.
        """
        with self._database.transaction() as connection:
            self._hold(connection, member)
            source = self._lock(connection, stream)
            types = {row.member_id: set(row.types) for row in connection.execute(ALIVE, self._values(of_member=member))}
            if source.member_id != member and source.member_id in types:
                return None
            everything = set[str]().union(*types.values())
            lacking, had_logged = sorted(everything - types[member]), self._has_logged_lacking
            self._has_logged_lacking = bool(lacking)
            if lacking and not had_logged:
                is_followed = everything in types.values()
                text = "collector %r: other members also have executors for %s: %s its streams"
                followers = "only they follow" if is_followed else "no member follows"
                logger.log(logging.INFO if is_followed else logging.WARNING, text, self.name, lacking, followers)
            if lacking:
                return None
            if source.position is None:
                connection.execute(BEGIN, {"id": source.source_id, "to": initial, **known_by(known)})
            taken = {"id": source.source_id, "of_member": member}
            position, *last = connection.execute(FOLLOW, taken).one()
        return Followed(position, None if last[0] is None else Position(*last), is_new=source.position is None)

    def held(self, member: int) -> frozenset[str]:
        """Return the streams that this member cannot follow: others follow them, or have executors for more types."""
        return frozenset(row.stream for row in self._database.rows(HELD, self._values(of_member=member)))

    def last_collected(self, stream: str, until: int) -> tuple[int, str] | None:
        """Return offset and id of the last collected message up to an offset; None if there is none."""
        rows = self._database.rows(LAST_COLLECTED, self._values(of_stream=stream, until=until))
        return rows[0] if rows else None

    def rewind(self, member: int, stream: str, to: int, *, is_new: bool, known: Position | None = None) -> None:
        """Set the position, and the message before it.

        Unfinished messages from there on (all if the stream is new) fail and free their places.
        """
        with self._database.transaction() as connection:
            self._hold(connection, member)
            source = self._lock(connection, stream)
            if source.member_id != member:
                raise Conflict(f"another member of {self.name!r} follows {stream!r}")
            if is_new:
                connection.execute(REPLACE_SOURCE, {"id": source.source_id})
                lost, source = source.source_id, self._lock(connection, stream)
            else:
                lost = connection.execute(ADD_REPLACED, self._values(of_stream=stream)).scalar_one()
                moved = {"of_source": source.source_id, "to": to, "to_source": lost}
                connection.execute(MOVE_LOST, moved)
            connection.execute(FAIL_UNFINISHED, {"of_source": lost, "why": REPLACED})
            connection.execute(REWIND, {"id": source.source_id, "to": to, **known_by(known)})

    def unfollow(self, member: int, stream: str) -> None:
        """Release a stream, so that another member can follow it."""
        self._database.rows(UNFOLLOW, self._values(by=member, of_stream=stream))
