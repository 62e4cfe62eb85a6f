"""Release 0.4.0, the oldest release whose databases can be upgraded."""

revision = "0004"
down_revision = None


def upgrade() -> None:
    raise AssertionError("only release 0.4.0 creates revision 0004; a new database gets schema.sql")
