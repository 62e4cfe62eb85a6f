"""Which exchanges are tapped into which streams.

Additive: the release before does not know the table.

Locks: creates a new table only.
"""

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0016"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "taps",
        sa.Column("tap_id", sa.Integer, sa.Identity(always=True), primary_key=True),
        sa.Column("vhost", sa.Text, nullable=False, server_default="/"),
        sa.Column("exchange", sa.Text, nullable=False),
        sa.Column("kind", sa.Text),
        sa.Column("stream", sa.Text, nullable=False),
        sa.Column("binding_key", sa.Text, nullable=False),
        sa.Column("arguments", sa.Text, nullable=False, server_default=sa.text("'{}'")),
        sa.Column("made_stream", sa.Boolean, nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False, server_default=sa.func.now()),
        sa.UniqueConstraint("vhost", "exchange", "stream", "binding_key", "arguments", name="taps_binding"),
        schema="relatum",
    )


def downgrade() -> None:
    op.drop_table("taps", schema="relatum")
