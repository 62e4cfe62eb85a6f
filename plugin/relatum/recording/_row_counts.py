"""How many rows of the relationship table each stream has."""

from collections import Counter
from typing import Any, Final

import sqlalchemy as sa

from relatum.store import part_streams, relationships, table_parts_of

EXACT_BYTES_MAX: Final = 400 << 20
"""Bytes of rows that are not in closed parts, up to which they are counted; where there are more, they are sampled."""


def row_counts(connection: sa.Connection) -> Counter[int]:
    """Rows by stream: those of closed parts were counted then, of the others they are counted now, or estimated."""
    rest = [part for part in table_parts_of(connection) if part.is_opened and not part.is_closed]
    share = min(100.0, 100.0 * EXACT_BYTES_MAX / max(1, sum(part.size for part in rest)))
    table: Any = relationships if share == 100.0 else sa.tablesample(relationships, sa.func.system(share))
    query = sa.select(table.c.stream_id, sa.func.count()).where(table.c.part.in_([part.part for part in rest]))
    counts = Counter(
        {id_: round(count * 100.0 / share) for id_, count in connection.execute(query.group_by("stream_id"))}
    )
    closed = sa.select(part_streams.c.stream_id, sa.func.sum(part_streams.c.row_count))
    for stream_id, count in connection.execute(closed.group_by(part_streams.c.stream_id)):
        counts[stream_id] += int(count)
    return counts
