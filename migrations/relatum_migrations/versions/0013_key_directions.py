"""A key may name another: its value is that of the message that came before.

Additive: the release before goes on, defines keys that name none, and sees those that do as it always did.

Locks: adds a column without a default and a foreign key to `keys`: ACCESS EXCLUSIVE on that one, which has some dozens
of rows, for a moment. Who looks at the definitions (every second) waits for it.
"""

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None


def upgrade() -> None:
    named = sa.ForeignKey("relatum.keys.key_id", name="keys_names_key_id_fkey")
    op.add_column("keys", sa.Column("names_key_id", sa.SmallInteger, named), schema="relatum")


def downgrade() -> None:
    op.drop_column("keys", "names_key_id", schema="relatum")
