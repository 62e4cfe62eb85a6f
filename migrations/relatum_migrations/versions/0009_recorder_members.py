"""Who records, each with one lease: a recorder renews one row, however many streams it has.

Locks: creates a new table only.
"""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "recorder_members",
        sa.Column("lease_expires_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("holder", sa.Text, nullable=False),
        sa.Column("name", sa.Text, nullable=False),
        sa.PrimaryKeyConstraint("holder", "name", name="recorder_members_holder"),
        schema="relatum",
        postgresql_with={"fillfactor": "50"},
    )
    op.create_index("recorder_members_name", "recorder_members", ["name"], schema="relatum")
    op.execute(_ROLES)


def downgrade() -> None:
    op.drop_table("recorder_members", schema="relatum")


_ROLES = """
DO $$
BEGIN
  IF EXISTS (SELECT FROM pg_roles WHERE rolname = 'relatum_recorder') THEN
    GRANT SELECT, INSERT, UPDATE, DELETE ON relatum.recorder_members TO relatum_recorder;
  END IF;
  IF EXISTS (SELECT FROM pg_roles WHERE rolname = 'relatum_consumer') THEN
    GRANT SELECT ON relatum.recorder_members TO relatum_consumer;
  END IF;
END $$
"""
