"""Which ranges of the coverage were recorded over AMQP 0.9.1, which does not show all that a stream holds.

Locks: adds a column with a constant default, which rewrites nothing: ACCESS EXCLUSIVE on `coverage` for a moment. The
ranges known to be AMQP's are marked by an update; recorders that commit at that moment wait for it.
"""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column(
        "coverage",
        sa.Column("over_amqp", sa.Boolean, nullable=False, server_default=sa.text("false")),
        schema="relatum",
    )
    # AMQP 0.9.1 alone leaves the time of a chunk out of what a range is known by.
    op.execute(
        "UPDATE relatum.coverage SET over_amqp = true WHERE last_fingerprint IS NOT NULL AND last_chunk_ms IS NULL"
    )


def downgrade() -> None:
    op.drop_column("coverage", "over_amqp", schema="relatum")
