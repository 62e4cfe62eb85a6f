"""What the user of a connection may do to Relatum's tables."""

from typing import Final

import sqlalchemy as sa

_WRITABLE: Final = sa.text(
    "SELECT c.relname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace "
    "WHERE n.nspname = 'relatum' AND c.relkind IN ('r', 'p') AND NOT c.relispartition "
    "AND (has_table_privilege(c.oid, 'INSERT, UPDATE, DELETE, TRUNCATE') "
    "OR has_any_column_privilege(c.oid, 'INSERT, UPDATE')) ORDER BY 1"
)


def writable_tables(connection: sa.Connection) -> list[str]:
    """The tables of the schema that the user may write, whatever the session is set to."""
    return list(connection.execute(_WRITABLE).scalars())
