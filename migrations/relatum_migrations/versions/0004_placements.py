"""Placements of sets of messages in super streams, moves of contexts, and serial consumers.

Locks: creates new tables only; no lock on anything that exists.
"""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

_TIME = sa.DateTime(timezone=True)
_NOW = sa.text("now()")
_TABLES = (
    "serial_holds",
    "serial_positions",
    "serial_members",
    "serial_consumers",
    "moved_contexts",
    "context_moves",
    "placements",
    "super_stream_partitions",
    "super_streams",
)


def upgrade() -> None:
    # What is kept back for a session would be lower than what others take meanwhile: CACHE 1, which is the default.
    op.execute("CREATE SEQUENCE relatum.placement_epochs AS bigint")
    _create_super_streams()
    _create_placements()
    _create_moves()
    _create_consumers()
    _create_positions()
    op.execute(_ROLES)


def downgrade() -> None:
    for table in _TABLES:
        op.drop_table(table, schema="relatum")
    op.execute("DROP SEQUENCE relatum.placement_epochs")
    op.execute(_DROP_ROLES)


def _reference(column: str, table: str) -> sa.Column[int]:
    key = sa.ForeignKey(f"relatum.{table}.{column}", ondelete="CASCADE")
    return sa.Column(column, sa.Integer, key, nullable=False)


def _create_super_streams() -> None:
    op.create_table(
        "super_streams",
        sa.Column("super_stream_id", sa.Integer, sa.Identity(always=True), primary_key=True),
        sa.Column("vhost", sa.Text, nullable=False, server_default="/"),
        sa.Column("name", sa.Text(collation="C"), nullable=False),
        sa.Column("header", sa.Text, nullable=False),
        sa.Column("generation", sa.BigInteger, nullable=False, server_default="1"),
        sa.Column("floor", sa.BigInteger, nullable=False, server_default="0"),
        sa.Column("created_at", _TIME, nullable=False, server_default=_NOW),
        sa.UniqueConstraint("vhost", "name", name="super_streams_name"),
        schema="relatum",
        postgresql_with={"fillfactor": "50"},
    )
    op.create_table(
        "super_stream_partitions",
        sa.Column("partition_id", sa.Integer, sa.Identity(always=True), primary_key=True),
        _reference("super_stream_id", "super_streams"),
        sa.Column("stream", sa.Text(collation="C"), nullable=False),
        sa.Column("binding_key", sa.Text, nullable=False),
        sa.Column("place", sa.Integer, nullable=False),
        sa.Column("state", sa.Text, nullable=False, server_default="active"),
        sa.Column("weight", sa.Float, nullable=False, server_default="1"),
        sa.Column("open_sets", sa.BigInteger, nullable=False, server_default="0"),
        sa.UniqueConstraint("super_stream_id", "stream", name="super_stream_partitions_stream"),
        sa.CheckConstraint("state IN ('active', 'retired')", name="super_stream_partitions_state"),
        sa.CheckConstraint("weight >= 0", name="super_stream_partitions_weight"),
        schema="relatum",
        postgresql_with={"fillfactor": "50"},
    )


def _create_placements() -> None:
    op.create_table(
        "placements",
        sa.Column("placement_id", sa.BigInteger, sa.Identity(always=True), primary_key=True),
        sa.Column("epoch", sa.BigInteger, nullable=False),
        sa.Column("first_epoch", sa.BigInteger, nullable=False),
        sa.Column("generation", sa.BigInteger, nullable=False, server_default="0"),
        sa.Column("move_id", sa.BigInteger),
        sa.Column("opened_at", _TIME, nullable=False, server_default=_NOW),
        sa.Column("used_at", _TIME, nullable=False, server_default=_NOW),
        sa.Column("released_at", _TIME),
        sa.Column("super_stream_id", sa.Integer, nullable=False),
        sa.Column("partition_id", sa.Integer, nullable=False),
        sa.Column("name", sa.Text(collation="C"), nullable=False),
        sa.Column("state", sa.Text, nullable=False, server_default="open"),
        sa.UniqueConstraint("super_stream_id", "name", name="placements_name"),
        sa.CheckConstraint("state IN ('open', 'moving', 'released')", name="placements_state"),
        sa.CheckConstraint("(state = 'moving') = (move_id IS NOT NULL)", name="placements_move"),
        sa.CheckConstraint("(state = 'released') = (released_at IS NOT NULL)", name="placements_released"),
        schema="relatum",
        postgresql_with={"fillfactor": "80", "autovacuum_vacuum_scale_factor": "0.05"},
    )
    op.create_index("placements_changes", "placements", ["super_stream_id", "generation"], schema="relatum")
    for name, columns, where in (
        ("placements_partition", ["partition_id"], "state <> 'released'"),
        ("placements_idle", ["super_stream_id", "used_at"], "state = 'open'"),
        ("placements_over", ["super_stream_id", "released_at"], "state = 'released'"),
    ):
        op.create_index(name, "placements", columns, schema="relatum", postgresql_where=sa.text(where))


def _create_moves() -> None:
    op.create_table(
        "context_moves",
        sa.Column("move_id", sa.BigInteger, sa.Identity(always=True), primary_key=True),
        _reference("super_stream_id", "super_streams"),
        sa.Column("source_id", sa.Integer, nullable=False),
        sa.Column("target_id", sa.Integer, nullable=False),
        sa.Column("state", sa.Text, nullable=False, server_default="fencing"),
        sa.Column("aborting", sa.Boolean, nullable=False, server_default=sa.text("false")),
        sa.Column("attempt", sa.Integer, nullable=False, server_default="1"),
        sa.Column("contexts", sa.Integer, nullable=False),
        sa.Column("fence_epoch", sa.BigInteger, nullable=False),
        sa.Column("epoch", sa.BigInteger, nullable=False),
        sa.Column("scan_from", sa.BigInteger, nullable=False),
        sa.Column("target_scan_from", sa.BigInteger, nullable=False),
        sa.Column("fence_offset", sa.BigInteger),
        sa.Column("marker_offset", sa.BigInteger),
        sa.Column("holder", sa.Text),
        sa.Column("lease_expires_at", _TIME),
        sa.Column("started_at", _TIME, nullable=False, server_default=_NOW),
        sa.Column("fenced_at", _TIME),
        sa.Column("ended_at", _TIME),
        sa.Column("reason", sa.Text),
        sa.CheckConstraint("state IN ('fencing', 'fenced', 'switched', 'aborted')", name="context_moves_state"),
        sa.CheckConstraint(
            "(ended_at IS NOT NULL) = (state IN ('switched', 'aborted'))", name="context_moves_ended_at"
        ),
        sa.CheckConstraint("state = 'fencing' OR fence_offset IS NOT NULL", name="context_moves_fence"),
        sa.CheckConstraint("ended_at IS NULL OR marker_offset IS NOT NULL", name="context_moves_marker"),
        schema="relatum",
    )
    for name, columns, where in (
        ("context_moves_super_stream", ["super_stream_id", "move_id"], None),
        ("context_moves_open", ["super_stream_id"], sa.text("ended_at IS NULL")),
        ("context_moves_source", ["source_id", "fence_offset"], None),
        ("context_moves_target", ["target_id", "marker_offset"], None),
    ):
        op.create_index(name, "context_moves", columns, schema="relatum", postgresql_where=where)
    move = sa.ForeignKey("relatum.context_moves.move_id", ondelete="CASCADE")
    op.create_table(
        "moved_contexts",
        sa.Column("move_id", sa.BigInteger, move, nullable=False),
        sa.Column("from_epoch", sa.BigInteger, nullable=False),
        sa.Column("name", sa.Text(collation="C"), nullable=False),
        sa.PrimaryKeyConstraint("move_id", "name", name="moved_contexts_place"),
        schema="relatum",
    )
    op.create_index("moved_contexts_name", "moved_contexts", ["name", "move_id"], schema="relatum")


def _create_consumers() -> None:
    op.create_table(
        "serial_consumers",
        sa.Column("consumer_id", sa.Integer, sa.Identity(always=True), primary_key=True),
        _reference("super_stream_id", "super_streams"),
        sa.Column("name", sa.Text(collation="C"), nullable=False),
        sa.Column("created_at", _TIME, nullable=False, server_default=_NOW),
        sa.UniqueConstraint("super_stream_id", "name", name="serial_consumers_name"),
        schema="relatum",
    )
    op.create_table(
        "serial_members",
        sa.Column("lease_expires_at", _TIME, nullable=False),
        _reference("consumer_id", "serial_consumers"),
        sa.Column("holder", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("consumer_id", "holder", name="serial_members_holder"),
        schema="relatum",
        postgresql_with={"fillfactor": "50"},
    )


def _create_positions() -> None:
    op.create_table(
        "serial_positions",
        sa.Column("position", sa.BigInteger, nullable=False),
        sa.Column("version", sa.BigInteger, nullable=False, server_default="0"),
        sa.Column("last_offset", sa.BigInteger),
        sa.Column("last_fingerprint", sa.BigInteger),
        sa.Column("last_chunk_ms", sa.BigInteger),
        sa.Column("lease_expires_at", _TIME),
        _reference("consumer_id", "serial_consumers"),
        _reference("partition_id", "super_stream_partitions"),
        sa.Column("holder", sa.Text),
        sa.PrimaryKeyConstraint("consumer_id", "partition_id", name="serial_positions_place"),
        schema="relatum",
        postgresql_with={"fillfactor": "50"},
    )
    op.create_table(
        "serial_holds",
        sa.Column("move_id", sa.BigInteger, nullable=False),
        sa.Column("marker_offset", sa.BigInteger, nullable=False),
        sa.Column("cursor", sa.BigInteger, nullable=False),
        sa.Column("epoch", sa.BigInteger, nullable=False),
        sa.Column("fence_offset", sa.BigInteger, nullable=False),
        sa.Column("held", sa.BigInteger, nullable=False, server_default="0"),
        sa.Column("since", _TIME, nullable=False, server_default=_NOW),
        _reference("consumer_id", "serial_consumers"),
        sa.Column("partition_id", sa.Integer, nullable=False),
        sa.Column("source_id", sa.Integer, nullable=False),
        sa.PrimaryKeyConstraint("consumer_id", "partition_id", "move_id", name="serial_holds_place"),
        schema="relatum",
        postgresql_with={"fillfactor": "50"},
    )
    op.create_index("serial_holds_move", "serial_holds", ["move_id"], schema="relatum")


# A router (and whoever moves contexts) keeps all these books; a consumer reads them and writes its own; a recorder
# prunes what is over, and says of the rows of a super stream up to where changes are forgotten.
_ROLES = """
DO $$
BEGIN
  BEGIN
    CREATE ROLE relatum_router NOLOGIN;
  EXCEPTION WHEN duplicate_object OR unique_violation OR insufficient_privilege THEN
    NULL;
  END;
  IF EXISTS (SELECT FROM pg_roles WHERE rolname = 'relatum_router') THEN
    GRANT USAGE ON SCHEMA relatum TO relatum_router;
    GRANT USAGE ON SEQUENCE relatum.placement_epochs TO relatum_router;
    GRANT SELECT, INSERT, UPDATE, DELETE ON relatum.super_streams, relatum.super_stream_partitions,
      relatum.placements, relatum.context_moves, relatum.moved_contexts, relatum.serial_consumers,
      relatum.serial_members, relatum.serial_positions, relatum.serial_holds TO relatum_router;
  END IF;
  IF EXISTS (SELECT FROM pg_roles WHERE rolname = 'relatum_consumer') THEN
    GRANT SELECT ON relatum.super_streams, relatum.super_stream_partitions, relatum.placements,
      relatum.context_moves, relatum.moved_contexts TO relatum_consumer;
    GRANT SELECT, INSERT, UPDATE, DELETE ON relatum.serial_consumers, relatum.serial_members,
      relatum.serial_positions, relatum.serial_holds TO relatum_consumer;
  END IF;
  IF EXISTS (SELECT FROM pg_roles WHERE rolname = 'relatum_recorder') THEN
    GRANT SELECT ON relatum.super_streams, relatum.super_stream_partitions, relatum.serial_consumers,
      relatum.serial_members, relatum.serial_positions, relatum.serial_holds TO relatum_recorder;
    GRANT SELECT, DELETE ON relatum.placements, relatum.context_moves, relatum.moved_contexts TO relatum_recorder;
    GRANT UPDATE (floor) ON relatum.super_streams TO relatum_recorder;
  END IF;
END $$
"""

_DROP_ROLES = """
DO $$
BEGIN
  IF EXISTS (SELECT FROM pg_roles WHERE rolname = 'relatum_router') THEN
    REVOKE ALL ON SCHEMA relatum FROM relatum_router;
  END IF;
END $$
"""
