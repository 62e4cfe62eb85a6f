"""What is expected of messages: which stream's are followed by which other's, by which key, within which time.

Additive: the release before does not know the table.

Locks: creates a new table only.
"""

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "expectations",
        sa.Column("expectation_id", sa.Integer, sa.Identity(always=True), primary_key=True),
        sa.Column("vhost", sa.Text, nullable=False, server_default="/"),
        sa.Column("name", sa.Text(collation="C"), nullable=False),
        sa.Column("of_stream", sa.Text, nullable=False),
        sa.Column("by_key", sa.Text(collation="C"), nullable=False),
        sa.Column("follows", sa.Text, nullable=False),
        sa.Column("within_s", sa.Double, nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False, server_default=sa.func.now()),
        sa.UniqueConstraint("vhost", "name", name="expectations_name"),
        sa.CheckConstraint("within_s > 0", name="expectations_within"),
        schema="relatum",
    )


def downgrade() -> None:
    op.drop_table("expectations", schema="relatum")
