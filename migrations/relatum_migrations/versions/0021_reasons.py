"""Of finished messages of collectors just those that failed or are dead have a reason: the index of 0020 rests on it.

Additive: every release writes them so.

Locks: adds a constraint on `collected_messages`, which reads it once, a second for each few million rows: ACCESS
EXCLUSIVE on it meanwhile, so collectors, and those who look at them, wait.
"""

from alembic import op

revision = "0021"
down_revision = "0020"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_check_constraint(
        "collected_messages_reason",
        "collected_messages",
        "finished_at IS NULL OR (reason IS NOT NULL) = (state <> 'succeeded')",
        schema="relatum",
    )


def downgrade() -> None:
    op.drop_constraint("collected_messages_reason", "collected_messages", schema="relatum")
