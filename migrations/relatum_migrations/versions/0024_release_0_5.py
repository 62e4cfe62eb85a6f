"""Second step from release 0.4: see sql/0024.sql."""

from alembic import op

from relatum_migrations import run

revision = "0024"
down_revision = "0023"


def upgrade() -> None:
    run(op.get_bind(), "new_in_0_5.sql", "0024.sql")
