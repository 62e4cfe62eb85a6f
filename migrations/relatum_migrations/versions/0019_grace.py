"""By how much clocks may differ, of an expectation.

Additive: the release before goes on without it.

Locks: adds a column with a constant default, and a constraint on it, to `expectations`, which has some dozens of rows:
ACCESS EXCLUSIVE on that one for a moment.
"""

import sqlalchemy as sa
from alembic import op

revision = "0019"
down_revision = "0018"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column(
        "expectations", sa.Column("grace_s", sa.Double, nullable=False, server_default=sa.text("'1'")), schema="relatum"
    )
    op.create_check_constraint("expectations_grace", "expectations", "grace_s >= 0", schema="relatum")


def downgrade() -> None:
    op.drop_constraint("expectations_grace", "expectations", schema="relatum")
    op.drop_column("expectations", "grace_s", schema="relatum")
