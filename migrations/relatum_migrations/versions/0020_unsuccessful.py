"""An index of the collected messages that failed or are dead: among many that succeeded they are found at once.

By the reason, which those have and no other finished one: an index that spoke of the state would be written anew as a
message goes from collected to forwarded.

Additive: the release before goes on without it.

Locks: reads `collected_messages` once, a second for each few million rows: SHARE on it meanwhile, so collectors wait.
"""

import sqlalchemy as sa
from alembic import op

revision = "0020"
down_revision = "0019"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_index(
        "collected_messages_unsuccessful",
        "collected_messages",
        ["source_id", "finished_at", "stream_offset"],
        schema="relatum",
        postgresql_where=sa.text("finished_at IS NOT NULL AND reason IS NOT NULL"),
    )


def downgrade() -> None:
    op.drop_index("collected_messages_unsuccessful", "collected_messages", schema="relatum")
