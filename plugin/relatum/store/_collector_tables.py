"""The tables of message collectors: who collects, how far, and what became of each message.

They hold ids and states, no bodies: those lie in the streams. They are primary data: dropping them means that
collected messages are forgotten, and that what a collector follows is collected again from where it is told to begin.

- `collectors`: one row for each name, with how long finished messages are kept.
- `collector_members`: the processes of a collector, each with a lease. A member whose lease ran out is dead to the
  others, whatever it believes itself: they take its messages over, and its results count no more.
- `collector_sources`: one row for each generation of a stream a collector has taken messages from, with the position
  of the member that follows it. What lies below the position is collected, or was passed over.
- `collected_messages`: one row for each message, named by where it lies. Rows carry no foreign keys: each would cost
  more than writing the row does.
"""

from sqlalchemy import (
    ARRAY,
    BigInteger,
    CheckConstraint,
    Column,
    DateTime,
    Float,
    Identity,
    Index,
    Integer,
    PrimaryKeyConstraint,
    SmallInteger,
    Table,
    Text,
    UniqueConstraint,
    func,
    text,
)

from relatum.store._tables import made_at, metadata, moment, part_of

collectors = Table(
    "collectors",
    metadata,
    Column("collector_id", Integer, Identity(always=True), primary_key=True),
    Column("vhost", Text, nullable=False, server_default="/"),
    Column("name", Text(collation="C"), nullable=False),
    # Seconds a finished message is remembered; NULL for ever.
    Column("keep_s", Integer),
    made_at("created_at"),
    UniqueConstraint("vhost", "name", name="collectors_name"),
)

collector_members = Table(
    "collector_members",
    metadata,
    Column("member_id", BigInteger, Identity(always=True), primary_key=True),
    Column("joined_at", DateTime(timezone=True), nullable=False, server_default=func.clock_timestamp()),
    Column("lease_expires_at", DateTime(timezone=True), nullable=False),
    part_of("collectors", "collector_id"),
    Column("lease_s", Float, nullable=False),
    Column("holder", Text, nullable=False),
    Column("types", ARRAY(Text), nullable=False),
    Index("collector_members_collector", "collector_id", "lease_expires_at"),
    # Each member renews its row every few seconds: room on its page keeps that update short.
    postgresql_with={"fillfactor": "50"},
)

collector_sources = Table(
    "collector_sources",
    metadata,
    Column("source_id", Integer, Identity(always=True), primary_key=True),
    part_of("collectors", "collector_id"),
    Column("stream", Text(collation="C"), nullable=False),
    # The next offset to be read; NULL where nobody has followed the stream yet.
    Column("position", BigInteger),
    # What lay at the last offset read: how the stream is known again.
    Column("last_offset", BigInteger),
    Column("last_fingerprint", BigInteger),
    Column("last_chunk_ms", BigInteger),
    # Messages below the position that were not collected: of types without an executor, or for want of room.
    Column("passed_over", BigInteger, nullable=False, server_default="0"),
    Column("refused", BigInteger, nullable=False, server_default="0"),
    Column("member_id", BigInteger),
    moment("moved_at"),
    moment("replaced_at"),
    Index(
        "collector_sources_current", "collector_id", "stream", unique=True, postgresql_where=text("replaced_at IS NULL")
    ),
    postgresql_with={"fillfactor": "50"},
)

collected_messages = Table(
    "collected_messages",
    metadata,
    # Widest first: the eight-byte columns need no padding so.
    Column("stream_offset", BigInteger, nullable=False),
    Column("member_id", BigInteger),
    Column("bulk_id", BigInteger),
    made_at("collected_at"),
    moment("forwarded_at"),
    moment("finished_at"),
    moment("next_attempt_at"),
    Column("source_id", Integer, nullable=False),
    Column("size", Integer, nullable=False),
    Column("attempts", SmallInteger, nullable=False, server_default="0"),
    Column("state", Text, nullable=False, server_default="collected"),
    Column("message_id", Text(collation="C"), nullable=False),
    Column("type", Text(collation="C"), nullable=False),
    Column("reason", Text),
    PrimaryKeyConstraint("source_id", "stream_offset", name="collected_messages_place"),
    CheckConstraint(
        "state IN ('collected', 'forwarded', 'succeeded', 'failed', 'dead')", name="collected_messages_state"
    ),
    # Final states have a time and the others none: the indexes below may speak of the time alone.
    CheckConstraint(
        "(finished_at IS NOT NULL) = (state IN ('succeeded', 'failed', 'dead'))", name="collected_messages_finished_at"
    ),
    CheckConstraint(
        "finished_at IS NULL OR (reason IS NOT NULL) = (state <> 'succeeded')", name="collected_messages_reason"
    ),
    Index("collected_messages_id", "message_id"),
    # What a member has still to do; from collected to forwarded nothing moves in any index.
    Index("collected_messages_unfinished", "member_id", postgresql_where=text("finished_at IS NULL")),
    Index(
        "collected_messages_finished",
        "source_id",
        "finished_at",
        postgresql_where=text("finished_at IS NOT NULL"),
    ),
    # Those that failed or are dead: by `state` it would move, too.
    Index(
        "collected_messages_unsuccessful",
        "source_id",
        "finished_at",
        "stream_offset",
        postgresql_where=text("finished_at IS NOT NULL AND reason IS NOT NULL"),
    ),
    # Each row is written three times, soon after one another: room on its page keeps the second in place.
    postgresql_with={"fillfactor": "70", "autovacuum_vacuum_scale_factor": "0.05"},
)
