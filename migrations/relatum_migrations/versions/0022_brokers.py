"""Which broker a stream is of.

Additive: the release before does not know the column, and leaves it empty for the next recorder to fill.

Locks: adds a column to `streams` that may be empty, and a foreign key of it: ACCESS EXCLUSIVE for a moment.
"""

import sqlalchemy as sa
from alembic import op

revision = "0022"
down_revision = "0021"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "brokers",
        sa.Column("broker_id", sa.Uuid, primary_key=True),
        sa.Column("cluster_name", sa.Text, nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False, server_default=sa.func.now()),
        schema="relatum",
    )
    op.add_column(
        "streams", sa.Column("broker_id", sa.Uuid, sa.ForeignKey("relatum.brokers.broker_id")), schema="relatum"
    )


def downgrade() -> None:
    op.drop_column("streams", "broker_id", schema="relatum")
    op.drop_table("brokers", schema="relatum")
