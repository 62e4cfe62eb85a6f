"""See sql/0024.sql."""

from alembic import op

from relatum_migrations import run

revision = "0024"
down_revision = "0023"
branch_labels = None
depends_on = None


def upgrade() -> None:
    run(op.get_bind(), "0024.sql")
