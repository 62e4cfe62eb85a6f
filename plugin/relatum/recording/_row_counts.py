"""How many rows of the relationship table each stream has."""

from typing import Any, Final

import sqlalchemy as sa

from relatum.store import relationships

EXACT_PAGES_MAX: Final = 50_000
"""Pages of the table up to which its rows are counted; a larger one is sampled."""


def row_counts(connection: sa.Connection) -> dict[int, int]:
    """Rows by stream: counted in small tables, sampled in large ones."""
    pages = connection.execute(sa.text("SELECT relpages FROM pg_class WHERE oid = 'relatum.relationships'::regclass"))
    share = min(100.0, 100.0 * EXACT_PAGES_MAX / max(1, pages.scalar_one()))
    table: Any = relationships if share == 100.0 else sa.tablesample(relationships, sa.func.system(share))
    counts = connection.execute(sa.select(table.c.stream_id, sa.func.count()).group_by(table.c.stream_id))
    return {stream_id: round(count * 100.0 / share) for stream_id, count in counts}
