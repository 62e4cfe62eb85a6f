"""Release 0.4.0, from which databases are upgraded."""

revision = "0004"
down_revision = None
branch_labels = None
depends_on = None


def upgrade() -> None:
    raise AssertionError("a new database gets schema.sql; 0004 is made by release 0.4.0 only")
