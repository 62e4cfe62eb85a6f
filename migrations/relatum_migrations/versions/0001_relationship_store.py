"""The relationship store: streams, keys, coverage, relationships, times.

Locks: creates new tables only; no lock on anything that exists.
"""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

_NOW = sa.text("now()")
_TABLES = ("events", "skips", "receipts", "checkpoints", "time_blocks", "relationships", "coverage", "keys", "streams")


def upgrade() -> None:
    _create_catalog()
    _create_rows()
    _create_bookkeeping()
    op.execute(_RELATIONS_VIEW)
    op.execute(_ROLES)


def downgrade() -> None:
    op.execute("DROP VIEW relatum.relations")
    for table in _TABLES:
        op.drop_table(table, schema="relatum")
    op.execute(_DROP_ROLES)


def _create_catalog() -> None:
    op.create_table(
        "streams",
        sa.Column("stream_id", sa.Integer, sa.Identity(always=True), primary_key=True),
        sa.Column("vhost", sa.Text, nullable=False, server_default="/"),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("super_stream", sa.Text),
        sa.Column("generation", sa.Integer, nullable=False, server_default="1"),
        sa.Column("state", sa.Text, nullable=False, server_default="recording"),
        sa.Column("record_time", sa.Boolean, nullable=False, server_default=sa.text("true")),
        sa.Column("first_offset", sa.BigInteger),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False, server_default=_NOW),
        sa.Column("replaced_at", sa.DateTime(timezone=True)),
        sa.Column("lease_holder", sa.Text),
        sa.Column("lease_expires_at", sa.DateTime(timezone=True)),
        schema="relatum",
    )
    current = sa.text("replaced_at IS NULL")
    op.create_index(
        "streams_current", "streams", ["vhost", "name"], unique=True, schema="relatum", postgresql_where=current
    )
    op.create_index(
        "streams_super_stream", "streams", ["vhost", "super_stream"], schema="relatum", postgresql_where=current
    )
    op.create_table(
        "keys",
        sa.Column("key_id", sa.SmallInteger, sa.Identity(always=True), primary_key=True),
        sa.Column("name", sa.Text(collation="C"), nullable=False),
        sa.Column("sources", sa.ARRAY(sa.Text), nullable=False),
        sa.Column("type", sa.Text, nullable=False),
        sa.Column("since", sa.DateTime(timezone=True), nullable=False, server_default=_NOW),
        sa.Column("removed_at", sa.DateTime(timezone=True)),
        sa.CheckConstraint("type IN ('text', 'integer', 'timestamp')", name="keys_type"),
        schema="relatum",
    )
    op.create_index(
        "keys_in_force",
        "keys",
        ["name"],
        unique=True,
        schema="relatum",
        postgresql_where=sa.text("removed_at IS NULL"),
    )
    op.create_table(
        "coverage",
        sa.Column("coverage_id", sa.BigInteger, sa.Identity(always=True), primary_key=True),
        sa.Column("stream_id", sa.Integer, sa.ForeignKey("relatum.streams.stream_id"), nullable=False),
        sa.Column("from_offset", sa.BigInteger, nullable=False),
        sa.Column("to_offset", sa.BigInteger, nullable=False),
        sa.Column("key_ids", sa.ARRAY(sa.SmallInteger), nullable=False),
        sa.Column("with_time", sa.Boolean, nullable=False),
        sa.Column("kind", sa.Text, nullable=False, server_default="recorded"),
        sa.Column("is_tail", sa.Boolean, nullable=False, server_default=sa.text("false")),
        sa.Column("last_offset", sa.BigInteger),
        sa.Column("last_fingerprint", sa.BigInteger),
        sa.Column("last_chunk_ms", sa.BigInteger),
        sa.Column("recorded_at", sa.DateTime(timezone=True), nullable=False, server_default=_NOW),
        sa.CheckConstraint("from_offset <= to_offset", name="coverage_range"),
        sa.CheckConstraint("kind IN ('recorded', 'hole')", name="coverage_kind"),
        schema="relatum",
        postgresql_with={"fillfactor": "50"},
    )
    op.create_index("coverage_stream", "coverage", ["stream_id", "from_offset"], schema="relatum")
    op.create_index(
        "coverage_tail", "coverage", ["stream_id"], unique=True, schema="relatum", postgresql_where=sa.text("is_tail")
    )


def _create_rows() -> None:
    op.create_table(
        "relationships",
        sa.Column("stream_offset", sa.BigInteger, nullable=False),
        sa.Column("time_us", sa.BigInteger),
        sa.Column("stream_id", sa.Integer, nullable=False),
        sa.Column("key_id", sa.SmallInteger, nullable=False),
        sa.Column("value", sa.Text(collation="C"), nullable=False),
        schema="relatum",
    )
    op.create_index(
        "relationships_lookup",
        "relationships",
        ["key_id", "value", "stream_id", "time_us", "stream_offset"],
        schema="relatum",
    )
    op.create_index(
        "relationships_offsets",
        "relationships",
        ["stream_id", "stream_offset"],
        schema="relatum",
        postgresql_using="brin",
        postgresql_with={"pages_per_range": "32"},
    )
    op.create_table(
        "time_blocks",
        sa.Column("min_us", sa.BigInteger, nullable=False),
        sa.Column("max_us", sa.BigInteger, nullable=False),
        sa.Column("first_offset", sa.BigInteger, nullable=False),
        sa.Column("last_offset", sa.BigInteger, nullable=False),
        sa.Column("stream_id", sa.Integer, nullable=False),
        sa.Column("width_class", sa.SmallInteger, nullable=False),
        schema="relatum",
    )
    op.create_index("time_blocks_lookup", "time_blocks", ["stream_id", "width_class", "min_us"], schema="relatum")
    op.create_index("time_blocks_offsets", "time_blocks", ["stream_id", "first_offset"], schema="relatum")


def _create_bookkeeping() -> None:
    op.create_table(
        "checkpoints",
        sa.Column("stream_id", sa.Integer, nullable=False),
        sa.Column("last_offset", sa.BigInteger, nullable=False),
        sa.Column("fingerprint", sa.BigInteger, nullable=False),
        sa.Column("chunk_ms", sa.BigInteger),
        schema="relatum",
    )
    op.create_index("checkpoints_lookup", "checkpoints", ["stream_id", "last_offset"], schema="relatum")
    op.create_table(
        "receipts",
        sa.Column("message_id", sa.Text(collation="C"), nullable=False),
        sa.Column("stream_id", sa.Integer, nullable=False),
        sa.Column("stream_offset", sa.BigInteger, nullable=False),
        sa.Column("recorded_at", sa.DateTime(timezone=True), nullable=False, server_default=_NOW),
        schema="relatum",
    )
    op.create_index("receipts_lookup", "receipts", ["message_id"], schema="relatum")
    op.create_index("receipts_age", "receipts", ["recorded_at"], schema="relatum")
    op.create_table(
        "skips",
        sa.Column("stream_id", sa.Integer, nullable=False),
        sa.Column("key_id", sa.SmallInteger, nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("count", sa.BigInteger, nullable=False),
        sa.UniqueConstraint("stream_id", "key_id", "reason", name="skips_counter"),
        schema="relatum",
    )
    op.create_table(
        "events",
        sa.Column("event_id", sa.BigInteger, sa.Identity(always=True), primary_key=True),
        sa.Column("stream_id", sa.Integer, nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False, server_default=_NOW),
        sa.Column("kind", sa.Text, nullable=False),
        sa.Column("from_offset", sa.BigInteger),
        sa.Column("to_offset", sa.BigInteger),
        sa.Column("detail", sa.Text, nullable=False, server_default=""),
        schema="relatum",
    )
    op.create_index("events_stream", "events", ["stream_id", "event_id"], schema="relatum")


_RELATIONS_VIEW = """
CREATE VIEW relatum.relations AS
SELECT k.name AS key, r.value, s.vhost, s.name AS stream, r.stream_offset,
       timestamptz 'epoch' + r.time_us * interval '1 microsecond' AS time
FROM relatum.relationships r
JOIN relatum.streams s ON s.stream_id = r.stream_id AND s.replaced_at IS NULL
JOIN relatum.keys k ON k.key_id = r.key_id AND k.removed_at IS NULL
"""

# Roles belong to the whole server: another database may have made them, or this user may not make any. Either way
# the grants below go to those that exist.
_ROLES = """
DO $$
DECLARE role_name text;
BEGIN
  FOREACH role_name IN ARRAY ARRAY['relatum_recorder', 'relatum_consumer'] LOOP
    BEGIN
      EXECUTE format('CREATE ROLE %I NOLOGIN', role_name);
    EXCEPTION WHEN duplicate_object OR unique_violation OR insufficient_privilege THEN
      NULL;
    END;
  END LOOP;
  IF EXISTS (SELECT FROM pg_roles WHERE rolname = 'relatum_recorder') THEN
    GRANT USAGE ON SCHEMA relatum TO relatum_recorder;
    GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA relatum TO relatum_recorder;
    GRANT USAGE ON ALL SEQUENCES IN SCHEMA relatum TO relatum_recorder;
    REVOKE INSERT, UPDATE, DELETE ON relatum.alembic_version FROM relatum_recorder;
  END IF;
  IF EXISTS (SELECT FROM pg_roles WHERE rolname = 'relatum_consumer') THEN
    GRANT USAGE ON SCHEMA relatum TO relatum_consumer;
    GRANT SELECT ON ALL TABLES IN SCHEMA relatum TO relatum_consumer;
  END IF;
END $$
"""

_DROP_ROLES = """
DO $$
DECLARE role_name text;
BEGIN
  FOREACH role_name IN ARRAY ARRAY['relatum_recorder', 'relatum_consumer'] LOOP
    IF EXISTS (SELECT FROM pg_roles WHERE rolname = role_name) THEN
      EXECUTE format('REVOKE ALL ON SCHEMA relatum FROM %I', role_name);
      EXECUTE format('REVOKE ALL ON ALL TABLES IN SCHEMA relatum FROM %I', role_name);
    END IF;
  END LOOP;
END $$
"""
