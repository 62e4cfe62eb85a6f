"""How many rows of the relationship table there are, and what they take."""

from collections import Counter
from collections.abc import Sequence
from typing import Any, Final

import sqlalchemy as sa

from relatum.store import Part, part_streams, relationships, table_parts_of

EXACT_BYTES_MAX: Final = 400 << 20
"""Bytes of rows that are not in closed parts, up to which they are counted; where there are more, they are sampled."""


def row_counts(connection: sa.Connection) -> Counter[int]:
    """Rows by stream: those of closed parts were counted then, of the others they are counted now, or estimated."""
    rest = [part for part in table_parts_of(connection) if part.is_opened and not part.is_closed]
    counts, _ = counts_by(connection, "stream_id", rest, EXACT_BYTES_MAX)
    closed = sa.select(part_streams.c.stream_id, sa.func.sum(part_streams.c.row_count))
    for stream_id, count in connection.execute(closed.group_by(part_streams.c.stream_id)):
        counts[stream_id] += int(count)
    return counts


def counts_by(
    connection: sa.Connection, column: str, parts: Sequence[Part], bytes_max: int
) -> tuple[Counter[int], bool]:
    """Rows of some parts by the values of a column, and whether they were counted, or estimated from a sample.

    `bytes_max`: Bytes of rows up to which they are counted; where there are more, so many are looked at.
    """
    share = min(100.0, 100.0 * bytes_max / max(1, sum(part.size for part in parts)))
    table: Any = relationships if share == 100.0 else sa.tablesample(relationships, sa.func.system(share))
    query = sa.select(table.c[column], sa.func.count()).where(table.c.part.in_([part.part for part in parts]))
    rows = connection.execute(query.group_by(table.c[column]))
    return Counter({value: round(count * 100.0 / share) for value, count in rows}), share == 100.0


def bytes_of_a_row(connection: sa.Connection, rows: int) -> float:
    """What each of so many rows, all there are, takes in the table and its indexes."""
    parts = "SELECT sum(pg_total_relation_size(relid)) FROM pg_partition_tree('relatum.relationships')"
    return float(connection.execute(sa.text(parts)).scalar_one() or 0) / max(1, rows)
