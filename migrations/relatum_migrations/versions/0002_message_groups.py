"""Durable group consumers: their names, what they have seen, and the state of each group.

Locks: creates new tables only; no lock on anything that exists.
"""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

_CLOCK = sa.text("clock_timestamp()")


def upgrade() -> None:
    _create_consumers()
    _create_states()
    op.execute(_GRANTS)


def downgrade() -> None:
    for table in ("group_states", "group_scans", "group_consumers"):
        op.drop_table(table, schema="relatum")


def _consumer_id() -> sa.Column[int]:
    consumer = sa.ForeignKey("relatum.group_consumers.consumer_id", ondelete="CASCADE")
    return sa.Column("consumer_id", sa.Integer, consumer, nullable=False)


def _create_consumers() -> None:
    op.create_table(
        "group_consumers",
        sa.Column("consumer_id", sa.Integer, sa.Identity(always=True), primary_key=True),
        sa.Column("vhost", sa.Text, nullable=False, server_default="/"),
        sa.Column("name", sa.Text, nullable=False),
        sa.Column("streams", sa.ARRAY(sa.Text)),
        sa.Column("ordering", sa.Text, nullable=False),
        sa.Column("start_offset", sa.BigInteger),
        sa.Column("start_us", sa.BigInteger),
        sa.Column("start_stream_id", sa.Integer),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False, server_default=sa.text("now()")),
        sa.UniqueConstraint("vhost", "name", name="group_consumers_name"),
        sa.CheckConstraint("ordering IN ('logical', 'physical')", name="group_consumers_ordering"),
        schema="relatum",
    )
    op.create_table(
        "group_scans",
        sa.Column("from_offset", sa.BigInteger, nullable=False),
        sa.Column("to_offset", sa.BigInteger, nullable=False),
        _consumer_id(),
        sa.Column("stream_id", sa.Integer, nullable=False),
        sa.PrimaryKeyConstraint("consumer_id", "stream_id", "from_offset"),
        sa.CheckConstraint("from_offset <= to_offset", name="group_scans_range"),
        schema="relatum",
        postgresql_with={"fillfactor": "50"},
    )


def _create_states() -> None:
    op.create_table(
        "group_states",
        sa.Column("rank", sa.BigInteger, nullable=False),
        sa.Column("first_offset", sa.BigInteger, nullable=False),
        sa.Column("opened_at", sa.DateTime(timezone=True), nullable=False, server_default=_CLOCK),
        sa.Column("touched_at", sa.DateTime(timezone=True), nullable=False, server_default=_CLOCK),
        sa.Column("told_at", sa.DateTime(timezone=True)),
        sa.Column("lease_expires_at", sa.DateTime(timezone=True)),
        sa.Column("done_at", sa.DateTime(timezone=True)),
        _consumer_id(),
        sa.Column("stream_id", sa.Integer, nullable=False),
        sa.Column("deliveries", sa.Integer, nullable=False, server_default="0"),
        sa.Column("given", sa.Integer, nullable=False, server_default="0"),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("holder", sa.Text),
        sa.Column("group_id", sa.Text(collation="C"), nullable=False),
        sa.PrimaryKeyConstraint("consumer_id", "group_id"),
        sa.CheckConstraint("state IN ('open', 'ready', 'claimed', 'done', 'dead')", name="group_states_state"),
        schema="relatum",
    )
    op.create_index(
        "group_states_next",
        "group_states",
        ["consumer_id", "rank", "stream_id", "first_offset"],
        schema="relatum",
        postgresql_where=sa.text("state IN ('ready', 'claimed')"),
    )
    op.create_index(
        "group_states_idle",
        "group_states",
        ["consumer_id", "touched_at"],
        schema="relatum",
        postgresql_where=sa.text("state = 'open' AND told_at IS NULL"),
    )


# A consumer keeps its own books; a recorder prunes them, and takes back what a stream has lost.
_GRANTS = """
DO $$
DECLARE role_name text;
BEGIN
  FOREACH role_name IN ARRAY ARRAY['relatum_recorder', 'relatum_consumer'] LOOP
    IF EXISTS (SELECT FROM pg_roles WHERE rolname = role_name) THEN
      EXECUTE format('GRANT SELECT, INSERT, UPDATE, DELETE ON relatum.group_consumers, relatum.group_scans, '
                     'relatum.group_states TO %I', role_name);
      EXECUTE format('GRANT USAGE ON ALL SEQUENCES IN SCHEMA relatum TO %I', role_name);
    END IF;
  END LOOP;
END $$
"""
