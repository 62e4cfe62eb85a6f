"""The schema `relatum`: its name, the order in which rows are locked, and the right to write.

Tables and columns are defined only in `relatum_migrations/sql/schema.sql`.

Statements that change several kinds of rows must lock them in this order, to avoid deadlocks: placements by name, the
row of `super_streams`, partitions by id.
"""

from typing import Final

import sqlalchemy as sa

from relatum.errors import AccessRefused

SCHEMA: Final = "relatum"

_MAY_RECORD: Final = sa.text("SELECT has_table_privilege('relatum.relationships', 'INSERT'), current_user")


def check_may_record(connection: sa.Connection) -> None:
    """Check that the user may write a recorder's rows.

    Raises:
        AccessRefused: the user may not.
    """
    may, user = connection.execute(_MAY_RECORD).one()
    if not may:
        raise AccessRefused(
            f"the PostgreSQL user {user!r} may not record: grant it the role (GRANT relatum_recorder TO its_name), "
            "or use the URL of another user"
        )
