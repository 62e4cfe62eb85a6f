"""Message collectors: their names, members and positions, and what became of each message.

Locks: creates new tables only; no lock on anything that exists.
"""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

_TIME = sa.DateTime(timezone=True)
_NOW = sa.text("now()")
_CLOCK = sa.text("clock_timestamp()")
_TABLES = ("collected_messages", "collector_sources", "collector_members", "collectors")


def upgrade() -> None:
    _create_collectors()
    _create_sources()
    _create_messages()
    op.execute(_ROLES)


def downgrade() -> None:
    for table in _TABLES:
        op.drop_table(table, schema="relatum")
    op.execute(_DROP_ROLES)


def _collector_id() -> sa.Column[int]:
    collector = sa.ForeignKey("relatum.collectors.collector_id", ondelete="CASCADE")
    return sa.Column("collector_id", sa.Integer, collector, nullable=False)


def _create_collectors() -> None:
    op.create_table(
        "collectors",
        sa.Column("collector_id", sa.Integer, sa.Identity(always=True), primary_key=True),
        sa.Column("vhost", sa.Text, nullable=False, server_default="/"),
        sa.Column("name", sa.Text(collation="C"), nullable=False),
        sa.Column("keep_s", sa.Integer),
        sa.Column("created_at", _TIME, nullable=False, server_default=_NOW),
        sa.UniqueConstraint("vhost", "name", name="collectors_name"),
        schema="relatum",
    )
    op.create_table(
        "collector_members",
        sa.Column("member_id", sa.BigInteger, sa.Identity(always=True), primary_key=True),
        sa.Column("joined_at", _TIME, nullable=False, server_default=_CLOCK),
        sa.Column("lease_expires_at", _TIME, nullable=False),
        _collector_id(),
        sa.Column("lease_s", sa.Float, nullable=False),
        sa.Column("holder", sa.Text, nullable=False),
        sa.Column("types", sa.ARRAY(sa.Text), nullable=False),
        schema="relatum",
        postgresql_with={"fillfactor": "50"},
    )
    op.create_index(
        "collector_members_collector", "collector_members", ["collector_id", "lease_expires_at"], schema="relatum"
    )


def _create_sources() -> None:
    op.create_table(
        "collector_sources",
        sa.Column("source_id", sa.Integer, sa.Identity(always=True), primary_key=True),
        _collector_id(),
        sa.Column("stream", sa.Text(collation="C"), nullable=False),
        sa.Column("position", sa.BigInteger),
        sa.Column("last_offset", sa.BigInteger),
        sa.Column("last_fingerprint", sa.BigInteger),
        sa.Column("last_chunk_ms", sa.BigInteger),
        sa.Column("passed_over", sa.BigInteger, nullable=False, server_default="0"),
        sa.Column("refused", sa.BigInteger, nullable=False, server_default="0"),
        sa.Column("member_id", sa.BigInteger),
        sa.Column("moved_at", _TIME),
        sa.Column("replaced_at", _TIME),
        schema="relatum",
        postgresql_with={"fillfactor": "50"},
    )
    op.create_index(
        "collector_sources_current",
        "collector_sources",
        ["collector_id", "stream"],
        unique=True,
        schema="relatum",
        postgresql_where=sa.text("replaced_at IS NULL"),
    )


def _create_messages() -> None:
    op.create_table(
        "collected_messages",
        sa.Column("stream_offset", sa.BigInteger, nullable=False),
        sa.Column("member_id", sa.BigInteger),
        sa.Column("bulk_id", sa.BigInteger),
        sa.Column("collected_at", _TIME, nullable=False, server_default=_NOW),
        sa.Column("forwarded_at", _TIME),
        sa.Column("finished_at", _TIME),
        sa.Column("next_attempt_at", _TIME),
        sa.Column("source_id", sa.Integer, nullable=False),
        sa.Column("size", sa.Integer, nullable=False),
        sa.Column("attempts", sa.SmallInteger, nullable=False, server_default="0"),
        sa.Column("state", sa.Text, nullable=False, server_default="collected"),
        sa.Column("message_id", sa.Text(collation="C"), nullable=False),
        sa.Column("type", sa.Text(collation="C"), nullable=False),
        sa.Column("reason", sa.Text),
        sa.PrimaryKeyConstraint("source_id", "stream_offset", name="collected_messages_place"),
        sa.CheckConstraint(
            "state IN ('collected', 'forwarded', 'succeeded', 'failed', 'dead')", name="collected_messages_state"
        ),
        sa.CheckConstraint(
            "(finished_at IS NOT NULL) = (state IN ('succeeded', 'failed', 'dead'))",
            name="collected_messages_finished_at",
        ),
        schema="relatum",
        postgresql_with={"fillfactor": "70", "autovacuum_vacuum_scale_factor": "0.05"},
    )
    op.create_index("collected_messages_id", "collected_messages", ["message_id"], schema="relatum")
    for name, columns, where in (
        ("collected_messages_unfinished", ["member_id"], "finished_at IS NULL"),
        ("collected_messages_finished", ["source_id", "finished_at"], "finished_at IS NOT NULL"),
    ):
        op.create_index(name, "collected_messages", columns, schema="relatum", postgresql_where=sa.text(where))


# A collector keeps its own books; everybody may ask what became of a message; a recorder prunes what is finished.
_ROLES = """
DO $$
BEGIN
  BEGIN
    CREATE ROLE relatum_collector NOLOGIN;
  EXCEPTION WHEN duplicate_object OR unique_violation OR insufficient_privilege THEN
    NULL;
  END;
  IF EXISTS (SELECT FROM pg_roles WHERE rolname = 'relatum_collector') THEN
    GRANT USAGE ON SCHEMA relatum TO relatum_collector;
    GRANT SELECT, INSERT, UPDATE, DELETE ON relatum.collectors, relatum.collector_members, relatum.collector_sources,
      relatum.collected_messages TO relatum_collector;
  END IF;
  IF EXISTS (SELECT FROM pg_roles WHERE rolname = 'relatum_recorder') THEN
    GRANT SELECT, DELETE ON relatum.collectors, relatum.collector_members, relatum.collector_sources,
      relatum.collected_messages TO relatum_recorder;
  END IF;
  IF EXISTS (SELECT FROM pg_roles WHERE rolname = 'relatum_consumer') THEN
    GRANT SELECT ON relatum.collectors, relatum.collector_members, relatum.collector_sources,
      relatum.collected_messages TO relatum_consumer;
  END IF;
END $$
"""

_DROP_ROLES = """
DO $$
BEGIN
  IF EXISTS (SELECT FROM pg_roles WHERE rolname = 'relatum_collector') THEN
    REVOKE ALL ON SCHEMA relatum FROM relatum_collector;
  END IF;
END $$
"""
