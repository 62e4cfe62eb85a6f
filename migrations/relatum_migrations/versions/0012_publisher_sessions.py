"""Publishers are known by sessions, and a move waits for them before its fence.

Movers of an earlier release, which would not wait, cannot begin a move from then on: what they insert lacks a column.
A move that such a one began before is completed by anyone.

Locks: creates a table, and adds a column with a default and a constraint to `context_moves`: ACCESS EXCLUSIVE on that
one for as long as its rows are read once, some milliseconds for 100,000 moves. Publishers wait for it where they
ask for a move, consumers where they begin to read.
"""

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "publisher_sessions",
        sa.Column("seen", sa.BigInteger, nullable=False),
        sa.Column("beat", sa.BigInteger, nullable=False, server_default="1"),
        sa.Column("session_s", sa.Float, nullable=False),
        sa.Column("lease_expires_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column(
            "super_stream_id",
            sa.Integer,
            sa.ForeignKey("relatum.super_streams.super_stream_id", ondelete="CASCADE"),
            nullable=False,
        ),
        sa.Column("holder", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("super_stream_id", "holder", name="publisher_sessions_holder"),
        schema="relatum",
        postgresql_with={"fillfactor": "50"},
    )
    # The rows that are there get 0, which all publishers are past; those to come have to say.
    op.add_column(
        "context_moves", sa.Column("generation", sa.BigInteger, nullable=False, server_default="0"), schema="relatum"
    )
    op.alter_column("context_moves", "generation", server_default=None, schema="relatum")
    op.create_check_constraint(
        "context_moves_waited", "context_moves", "state = 'fencing' OR fence_epoch > 0", schema="relatum"
    )
    op.execute(_ROLES)


def downgrade() -> None:
    op.drop_constraint("context_moves_waited", "context_moves", schema="relatum")
    op.drop_column("context_moves", "generation", schema="relatum")
    op.drop_table("publisher_sessions", schema="relatum")


_ROLES = """
DO $$
BEGIN
  IF EXISTS (SELECT FROM pg_roles WHERE rolname = 'relatum_router') THEN
    GRANT SELECT, INSERT, UPDATE, DELETE ON relatum.publisher_sessions TO relatum_router;
  END IF;
  IF EXISTS (SELECT FROM pg_roles WHERE rolname = 'relatum_consumer') THEN
    GRANT SELECT ON relatum.publisher_sessions TO relatum_consumer;
  END IF;
  IF EXISTS (SELECT FROM pg_roles WHERE rolname = 'relatum_recorder') THEN
    GRANT SELECT ON relatum.publisher_sessions TO relatum_recorder;
  END IF;
END $$
"""
