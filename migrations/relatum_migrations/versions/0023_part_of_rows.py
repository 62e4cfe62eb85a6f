"""First step from release 0.4: the column `part`. It is 0 in existing rows, and in rows that release 0.4 still writes.

Locks: ACCESS EXCLUSIVE on `relationships` for a moment; no row is read or rewritten. The transaction ends here, so that
the next step can read all rows to check the constraint without blocking other sessions.
"""

from alembic import op

revision = "0023"
down_revision = "0004"


def upgrade() -> None:
    op.execute("ALTER TABLE relatum.relationships ADD COLUMN part integer NOT NULL DEFAULT 0")
    op.execute("ALTER TABLE relatum.relationships ADD CONSTRAINT relationships_part CHECK (part = 0) NOT VALID")
