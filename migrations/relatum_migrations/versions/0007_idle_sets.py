"""After how long sets are closed that nobody uses: a property of the super stream, and not of each router.

Locks: an access exclusive lock on super_streams for a moment; nothing is rewritten.
"""

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("super_streams", sa.Column("idle_s", sa.Float), schema="relatum")
    op.add_column("super_streams", sa.Column("idle_from", sa.DateTime(timezone=True)), schema="relatum")


def downgrade() -> None:
    op.drop_column("super_streams", "idle_from", schema="relatum")
    op.drop_column("super_streams", "idle_s", schema="relatum")
