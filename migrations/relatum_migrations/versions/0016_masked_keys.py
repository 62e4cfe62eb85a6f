"""A key may be masked, and there is the secret that digests of masked values are made with.

Additive: the release before goes on, and defines keys that are not masked.

Locks: adds a column with a constant default to `keys`: ACCESS EXCLUSIVE on that one, which has some dozens of rows, for
a moment. Who looks at the definitions (every second) waits for it. Creates a new table.
"""

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None


def upgrade() -> None:
    masked = sa.Column("masked", sa.Boolean, nullable=False, server_default=sa.text("false"))
    op.add_column("keys", masked, schema="relatum")
    op.create_table(
        "masking",
        sa.Column("is_only", sa.Boolean, primary_key=True, server_default=sa.text("true")),
        sa.Column("secret", sa.LargeBinary, nullable=False),
        sa.CheckConstraint("is_only", name="masking_is_only"),
        schema="relatum",
    )
    # 244 bits of what PostgreSQL itself takes for random.
    op.execute(
        "INSERT INTO relatum.masking (secret) SELECT uuid_send(gen_random_uuid()) || uuid_send(gen_random_uuid())"
    )


def downgrade() -> None:
    op.drop_table("masking", schema="relatum")
    op.drop_column("keys", "masked", schema="relatum")
