"""What serial consumers remember of the streams they read, to go on where both agree when a stream has lost its end.

Locks: creates a new table only; for a moment, no rows are written to the tables it refers to.
"""

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "serial_checkpoints",
        sa.Column("last_offset", sa.BigInteger, nullable=False),
        sa.Column("fingerprint", sa.BigInteger, nullable=False),
        sa.Column("chunk_ms", sa.BigInteger),
        _reference("consumer_id", "serial_consumers"),
        _reference("partition_id", "super_stream_partitions"),
        sa.PrimaryKeyConstraint("consumer_id", "partition_id", "last_offset", name="serial_checkpoints_place"),
        schema="relatum",
    )
    op.execute(_ROLES)


def downgrade() -> None:
    op.drop_table("serial_checkpoints", schema="relatum")


def _reference(column: str, table: str) -> sa.Column[int]:
    key = sa.ForeignKey(f"relatum.{table}.{column}", ondelete="CASCADE")
    return sa.Column(column, sa.Integer, key, nullable=False)


_ROLES = """
DO $$
DECLARE
  role text;
BEGIN
  FOREACH role IN ARRAY ARRAY['relatum_router', 'relatum_consumer'] LOOP
    IF EXISTS (SELECT FROM pg_roles WHERE rolname = role) THEN
      EXECUTE format('GRANT SELECT, INSERT, UPDATE, DELETE ON relatum.serial_checkpoints TO %I', role);
    END IF;
  END LOOP;
END $$
"""
