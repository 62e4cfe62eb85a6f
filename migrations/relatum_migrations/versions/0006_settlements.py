"""Tokens by which a commit in doubt is settled.

Locks: creates a new table only; no lock on anything that exists.
"""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "settlements",
        sa.Column("token", sa.Uuid, primary_key=True),
        sa.Column("written_at", sa.DateTime(timezone=True), nullable=False, server_default=sa.text("now()")),
        sa.Column("is_void", sa.Boolean, nullable=False, server_default=sa.text("false")),
        schema="relatum",
        postgresql_with={"autovacuum_vacuum_scale_factor": "0.0", "autovacuum_vacuum_threshold": "10000"},
    )
    op.execute(_ROLES)


def downgrade() -> None:
    op.drop_table("settlements", schema="relatum")


# Whoever writes steps that are fenced writes their tokens with them; who settles writes a row, or touches one.
_ROLES = """
DO $$
DECLARE
  role text;
BEGIN
  FOREACH role IN ARRAY ARRAY['relatum_router', 'relatum_consumer', 'relatum_recorder', 'relatum_collector'] LOOP
    IF EXISTS (SELECT FROM pg_roles WHERE rolname = role) THEN
      EXECUTE format('GRANT SELECT, INSERT, UPDATE, DELETE ON relatum.settlements TO %I', role);
    END IF;
  END LOOP;
END $$
"""
