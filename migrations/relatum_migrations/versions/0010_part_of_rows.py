"""Which part of the table a row is in: of all rows that are there, and of those that the release before writes, 0.

Locks: adds a column with a constant default, and a constraint that is not looked at yet; neither reads nor rewrites a
row: ACCESS EXCLUSIVE on `relationships` for a moment.
"""

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    part = sa.Column("part", sa.Integer, nullable=False, server_default=sa.text("0"))
    op.add_column("relationships", part, schema="relatum")
    # In a transaction of its own: the revision after this one reads all rows to see that it holds, and stops nobody.
    op.execute("ALTER TABLE relatum.relationships ADD CONSTRAINT relationships_part CHECK (part = 0) NOT VALID")


def downgrade() -> None:
    op.drop_constraint("relationships_part", "relationships", schema="relatum")
    op.drop_column("relationships", "part", schema="relatum")
