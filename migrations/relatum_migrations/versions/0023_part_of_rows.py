"""See sql/0023.sql."""

from alembic import op

from relatum_migrations import run

revision = "0023"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    run(op.get_bind(), "0023.sql")
