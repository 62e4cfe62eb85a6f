"""What the table holds of a window of a stream, as `verify` compares it and `repair` locks it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import sqlalchemy as sa

from relatum.keys import KeyDefinition
from relatum.limits import INTEGER_MAX
from relatum.recording._compare import Block, Row
from relatum.store import (
    CoverageRow,
    Range,
    coverage_of,
    key_definitions,
    keys,
    may_hold_offsets,
    relationships,
    time_blocks,
)

_ROW: Final = [relationships.c[name] for name in ("stream_offset", "key_id", "value", "time_us")]
_BLOCK: Final = [time_blocks.c[name] for name in ("first_offset", "last_offset", "min_us", "max_us", "width_class")]


@dataclass(frozen=True, slots=True)
class Stored:
    """The table's rows of a window, of one moment. Rows come with how often they are there."""

    rows: list[tuple[Row, int]]
    blocks: list[Block]
    covering: list[CoverageRow]
    definitions: list[KeyDefinition]
    known_key_ids: frozenset[int]


def stored_of(connection: sa.Connection, stream_id: int, window: Range) -> Stored:
    """Read a window. The caller's transaction is one snapshot, or holds the stream's locks.

    Rows that are there more than once are counted by PostgreSQL: however often, they take the memory of one.
    """
    start, end = window
    offset = relationships.c.stream_offset
    of_window = (relationships.c.stream_id == stream_id) & (offset >= start) & (offset < end)
    held = may_hold_offsets(stream_id, start, end)
    rows = connection.execute(sa.select(*_ROW, sa.func.count()).where(of_window, held).group_by(*_ROW)).all()
    blocks = connection.execute(
        sa.select(*_BLOCK).where(
            time_blocks.c.stream_id == stream_id, time_blocks.c.first_offset < end, time_blocks.c.last_offset >= start
        )
    ).all()
    return Stored(
        [(Row(*row[:4]), row[4]) for row in rows],
        [Block(*block) for block in blocks],
        coverage_of(connection, [stream_id]),
        key_definitions(connection),
        known_key_ids(connection),
    )


def known_key_ids(connection: sa.Connection) -> frozenset[int]:
    """The ids of all keys, those that were removed too."""
    return frozenset(connection.execute(sa.select(keys.c.key_id)).scalars())


def last_stored(connection: sa.Connection, stream_id: int, offset: int) -> int | None:
    """The greatest offset from one on of which the table holds a row or a block; None where there is none."""
    row = sa.select(sa.func.max(relationships.c.stream_offset)).where(
        relationships.c.stream_id == stream_id,
        relationships.c.stream_offset >= offset,
        may_hold_offsets(stream_id, offset, INTEGER_MAX),
    )
    block = sa.select(sa.func.max(time_blocks.c.last_offset)).where(
        time_blocks.c.stream_id == stream_id, time_blocks.c.first_offset >= offset
    )
    found: Sequence[int | None] = [connection.execute(query).scalar_one() for query in (row, block)]
    return max((each for each in found if each is not None), default=None)
