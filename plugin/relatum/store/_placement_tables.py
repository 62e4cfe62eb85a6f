"""The tables of placements: which partition of a super stream each named set of messages goes to, and how sets moved.

They are primary data: the streams hold fences and markers, but not who was placed where before the first of them.

- `super_streams`: one row for each super stream whose messages are placed, with the header that names them.
- `super_stream_partitions`: its partitions. One that is retired takes no new placements.
- `placements`: one row for each serialization context or affinity set.
- `context_moves`: one row for each move of contexts from one partition to another, with how far it is.
- `moved_contexts`: the contexts of each move.
- `publisher_sessions`: routers that are publishing, and the generation each has gone on to. See ADR 0025.

Whoever changes several kinds of rows takes them in this order, or two of them wait for each other for ever: placements
by name, the row of `super_streams`, partitions by their id. Placements carry no foreign keys: each would lock the row
of the super stream, which all publishers share.
"""

from typing import Final

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    DateTime,
    Float,
    ForeignKey,
    Identity,
    Index,
    Integer,
    PrimaryKeyConstraint,
    Sequence,
    Table,
    Text,
    UniqueConstraint,
    text,
)

from relatum.store._tables import SCHEMA, made_at, metadata, moment, part_of

placement_epochs: Final = Sequence("placement_epochs", schema=SCHEMA, metadata=metadata, data_type=BigInteger)
"""Where all epochs come from: what is placed later has a higher one, whatever its name was used for before.

It keeps none back for a session (CACHE 1): with values kept back, later ones could be lower.
"""

super_streams = Table(
    "super_streams",
    metadata,
    Column("super_stream_id", Integer, Identity(always=True), primary_key=True),
    Column("vhost", Text, nullable=False, server_default="/"),
    Column("name", Text(collation="C"), nullable=False),
    # The header that names the sets; all who publish to or consume from the super stream agree on it.
    Column("header", Text, nullable=False),
    # Raised by each change that makes a cached placement wrong.
    Column("generation", BigInteger, nullable=False, server_default="1"),
    # Seconds without use after which sets are closed, for all routers alike; NULL: never.
    Column("idle_s", Float),
    # From when on they are: all routers that were up before know it by then.
    moment("idle_from"),
    # Changes up to this generation are not all remembered.
    Column("floor", BigInteger, nullable=False, server_default="0"),
    made_at("created_at"),
    UniqueConstraint("vhost", "name", name="super_streams_name"),
    # Every release and move raises the generation, every publication reads it: room on its page keeps the row there.
    postgresql_with={"fillfactor": "50"},
)

super_stream_partitions = Table(
    "super_stream_partitions",
    metadata,
    Column("partition_id", Integer, Identity(always=True), primary_key=True),
    part_of("super_streams", "super_stream_id"),
    Column("stream", Text(collation="C"), nullable=False),
    Column("binding_key", Text, nullable=False),
    Column("place", Integer, nullable=False),
    Column("state", Text, nullable=False, server_default="active"),
    Column("weight", Float, nullable=False, server_default="1"),
    # Placements in this partition that are not released.
    Column("open_sets", BigInteger, nullable=False, server_default="0"),
    UniqueConstraint("super_stream_id", "stream", name="super_stream_partitions_stream"),
    CheckConstraint("state IN ('active', 'retired')", name="super_stream_partitions_state"),
    CheckConstraint("weight >= 0", name="super_stream_partitions_weight"),
    postgresql_with={"fillfactor": "50"},
)

placements = Table(
    "placements",
    metadata,
    # Widest first: the eight-byte columns need no padding so.
    Column("placement_id", BigInteger, Identity(always=True), primary_key=True),
    Column("epoch", BigInteger, nullable=False),
    # The epoch it was opened with, which moves do not change: whether a release means this opening or one before.
    Column("first_epoch", BigInteger, nullable=False),
    # The generation of the last change that made a cached copy wrong; 0 for none.
    Column("generation", BigInteger, nullable=False, server_default="0"),
    Column("move_id", BigInteger),
    made_at("opened_at"),
    made_at("used_at"),
    moment("released_at"),
    Column("super_stream_id", Integer, nullable=False),
    Column("partition_id", Integer, nullable=False),
    Column("name", Text(collation="C"), nullable=False),
    Column("state", Text, nullable=False, server_default="open"),
    UniqueConstraint("super_stream_id", "name", name="placements_name"),
    CheckConstraint("state IN ('open', 'moving', 'released')", name="placements_state"),
    CheckConstraint("(state = 'moving') = (move_id IS NOT NULL)", name="placements_move"),
    CheckConstraint("(state = 'released') = (released_at IS NOT NULL)", name="placements_released"),
    Index("placements_changes", "super_stream_id", "generation"),
    Index("placements_partition", "partition_id", postgresql_where=text("state <> 'released'")),
    Index("placements_idle", "super_stream_id", "used_at", postgresql_where=text("state = 'open'")),
    Index("placements_over", "super_stream_id", "released_at", postgresql_where=text("state = 'released'")),
    # A set of a few messages is placed, released and forgotten within the hour.
    postgresql_with={"fillfactor": "80", "autovacuum_vacuum_scale_factor": "0.05"},
)

context_moves = Table(
    "context_moves",
    metadata,
    Column("move_id", BigInteger, Identity(always=True), primary_key=True),
    part_of("super_streams", "super_stream_id"),
    Column("source_id", Integer, nullable=False),
    # The source itself where the move is aborted.
    Column("target_id", Integer, nullable=False),
    Column("state", Text, nullable=False, server_default="fencing"),
    Column("aborting", Boolean, nullable=False, server_default=text("false")),
    Column("attempt", Integer, nullable=False, server_default="1"),
    Column("contexts", Integer, nullable=False),
    Column("fence_epoch", BigInteger, nullable=False),
    # The contexts' epoch when it has ended: that of the fence, or a later one where it was aborted.
    Column("epoch", BigInteger, nullable=False),
    # Offsets at and below the first fence and the first marker that can be.
    Column("scan_from", BigInteger, nullable=False),
    Column("target_scan_from", BigInteger, nullable=False),
    Column("fence_offset", BigInteger),
    Column("marker_offset", BigInteger),
    # Who goes on with it; only to be shown.
    Column("holder", Text),
    moment("lease_expires_at"),
    made_at("started_at"),
    moment("fenced_at"),
    moment("ended_at"),
    Column("reason", Text),
    # What publishers are to have gone on to before its fence. No default: movers that do not wait for them are refused.
    Column("generation", BigInteger, nullable=False),
    CheckConstraint("state IN ('fencing', 'fenced', 'switched', 'aborted')", name="context_moves_state"),
    CheckConstraint("(ended_at IS NOT NULL) = (state IN ('switched', 'aborted'))", name="context_moves_ended_at"),
    CheckConstraint("state = 'fencing' OR fence_offset IS NOT NULL", name="context_moves_fence"),
    # 0 while it waits for publishers: a fence that is published then says nothing, and is not stored.
    CheckConstraint("state = 'fencing' OR fence_epoch > 0", name="context_moves_waited"),
    CheckConstraint("ended_at IS NULL OR marker_offset IS NOT NULL", name="context_moves_marker"),
    Index("context_moves_super_stream", "super_stream_id", "move_id"),
    Index("context_moves_open", "super_stream_id", postgresql_where=text("ended_at IS NULL")),
    Index("context_moves_source", "source_id", "fence_offset"),
    Index("context_moves_target", "target_id", "marker_offset"),
)

moved_contexts = Table(
    "moved_contexts",
    metadata,
    Column("move_id", BigInteger, ForeignKey("relatum.context_moves.move_id", ondelete="CASCADE"), nullable=False),
    # The epoch the context had before.
    Column("from_epoch", BigInteger, nullable=False),
    Column("name", Text(collation="C"), nullable=False),
    PrimaryKeyConstraint("move_id", "name", name="moved_contexts_place"),
    Index("moved_contexts_name", "name", "move_id"),
)

publisher_sessions = Table(
    "publisher_sessions",
    metadata,
    # The generation its publisher has gone on to: it publishes nothing under a placement that was wrong by then.
    Column("seen", BigInteger, nullable=False),
    # Raised by each renewal; by it one who waits knows that there was none.
    Column("beat", BigInteger, nullable=False, server_default="1"),
    # Seconds it holds without a renewal, by whoever's clock.
    Column("session_s", Float, nullable=False),
    # When it is forgotten, and what is shown; nothing else rests on it.
    Column("lease_expires_at", DateTime(timezone=True), nullable=False),
    part_of("super_streams", "super_stream_id"),
    Column("holder", Text, nullable=False),
    PrimaryKeyConstraint("super_stream_id", "holder", name="publisher_sessions_holder"),
    # Each is renewed every other second: room on its page keeps that update out of the index.
    postgresql_with={"fillfactor": "50"},
)
