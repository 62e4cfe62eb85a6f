"""The sparse index of times: blocks of messages in the database, by the times that they span.

A block of class c spans at most 4**c microseconds, so one that holds the moment t begins after t - 4**c: each class is
one short range of the index `time_blocks_lookup`.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Final

import sqlalchemy as sa

from relatum.store.database import sql
from relatum_consumer.lookups._catalog import PresentStream
from relatum_consumer.lookups._servers import Servers
from relatum_consumer.lookups._time_search import Block, Direction, Place

WIDTH_CLASSES: Final = tuple(range(31))
"""All width classes of time blocks: 4**30 microseconds span more than the years 1 to 9999."""

WIDTHS_US: Final = tuple(4**width_class for width_class in WIDTH_CLASSES)
"""The widest block of each class, in microseconds."""

BLOCK_PAGE: Final = 16
"""Blocks asked for at once beyond those that hold the moment itself; one is nearly always enough."""

_BLOCK: Final = "b.min_us, b.max_us, b.first_offset, b.last_offset"
_CLASSES: Final = "unnest(:classes::smallint[], :widths::bigint[]) AS classes (width_class, width)"


def _in_class(classes: str, stream_id: str = ":stream_id::int") -> str:
    return f"b.stream_id = {stream_id} AND b.width_class = {classes}.width_class AND b.last_offset >= :floor::bigint"


# --- blocks that reach into a span of time ----------------------------------------------------------------


def _reaching(low: str, high: str, stream_id: str = ":stream_id::int") -> str:
    # Offset 0 keeps PostgreSQL from joining it in another way than class by class.
    return f"""
        {_CLASSES}
        CROSS JOIN LATERAL (
          SELECT {_BLOCK}
          FROM relatum.time_blocks b
          WHERE {_in_class("classes", stream_id)}
            AND b.min_us >= {low} - classes.width AND b.min_us <= {high} AND b.max_us >= {low}
          OFFSET 0
        ) AS reaching
    """


BLOCKS_BETWEEN: Final = sql(
    f"""
    SELECT given.stream_id, reaching.*
    FROM unnest(:stream_ids::int[]) AS given (stream_id)
    CROSS JOIN {_reaching(":low::bigint", ":high::bigint", "given.stream_id")}
    ORDER BY stream_id, first_offset, last_offset
    """
)


def blocks_between(
    servers: Servers, streams: Sequence[PresentStream], low: int, high: int
) -> Mapping[int, list[Block]]:
    """Blocks of streams that have times between two moments, both included, by offsets: by the stream's number."""
    parameters = _CLASS_VALUES | {"stream_ids": [stream.stream_id for stream in streams], "floor": 0}
    rows = servers.rows(BLOCKS_BETWEEN, parameters | {"low": low, "high": high})
    found: dict[int, list[Block]] = defaultdict(list)
    for stream_id, *block in rows:
        found[stream_id].append(Block._make(block))
    return found


BLOCKS_PAGE: Final = sql(
    f"""
    SELECT reaching.*
    FROM {_reaching(":low::bigint", ":high::bigint")}
    ORDER BY first_offset, last_offset
    LIMIT :blocks_max::bigint
    """
)


def blocks_page(servers: Servers, stream: PresentStream, floor: int, low: int, high: int, most: int) -> list[Block]:
    """The first blocks of a stream that have times between two moments, both included, by offsets."""
    parameters = _blocks_of(stream, floor) | {"low": low, "high": high, "blocks_max": most}
    return [Block._make(row) for row in servers.rows(BLOCKS_PAGE, parameters)]


_CLASS_VALUES: Final[dict[str, Any]] = {"classes": list(WIDTH_CLASSES), "widths": list(WIDTHS_US)}


def _blocks_of(stream: PresentStream, floor: int) -> dict[str, Any]:
    return _CLASS_VALUES | {"stream_id": stream.stream_id, "floor": floor}


# --- blocks beside a moment -------------------------------------------------------------------------------

_HOLDING: Final = f"SELECT reaching.* FROM {_reaching(':t::bigint', ':t::bigint')}"

# The first blocks that begin after `t`, by (begin, first offset), beyond the place (`u`, `o`) in that order.
_FOLLOWING: Final = f"""
    SELECT page.*
    FROM (
      SELECT following.*
      FROM {_CLASSES}
      CROSS JOIN LATERAL (
        SELECT {_BLOCK}
        FROM relatum.time_blocks b
        WHERE {_in_class("classes")}
          AND b.min_us > :t::bigint AND (b.min_us, b.first_offset) > (:u::bigint, :o::bigint)
        ORDER BY b.min_us, b.first_offset
        LIMIT {BLOCK_PAGE}
      ) AS following
      ORDER BY following.min_us, following.first_offset
      LIMIT {BLOCK_PAGE}
    ) AS page
"""

# That a block begins before it ends is said so that the index, which has the beginnings, has an upper end too.
_ENDS_BEYOND: Final = """b.min_us < :t::bigint AND b.min_us <= :u::bigint AND b.max_us < :t::bigint
          AND (b.max_us, b.last_offset) < (:u::bigint, :o::bigint)"""

# The last blocks that end before `t`, by (end, last offset) downwards, beyond the place (`u`, `o`) in that order.
#
# The index has the blocks' beginnings. One that ends at or after some end began after that end minus its class's width.
# So: of each class the block that begins last; the latest of their ends; and all blocks that end no earlier, of which
# there is at least one. What is not given ends before all that is given, or is cut off by the page's size.
_BEGUN: Final = f"""
    WITH begun AS (
      SELECT classes.width_class, classes.width, latest.ends
      FROM {_CLASSES}
      CROSS JOIN LATERAL (
        SELECT b.max_us AS ends
        FROM relatum.time_blocks b
        WHERE {_in_class("classes")}
          AND {_ENDS_BEYOND}
        ORDER BY b.min_us DESC
        LIMIT 1
      ) AS latest
    )
"""
_PRECEDING: Final = f"""
    SELECT page.*
    FROM (
      SELECT preceding.*
      FROM begun
      CROSS JOIN LATERAL (
        SELECT {_BLOCK}
        FROM relatum.time_blocks b
        WHERE {_in_class("begun")}
          AND b.min_us >= (SELECT max(ends) FROM begun) - begun.width AND b.max_us >= (SELECT max(ends) FROM begun)
          AND {_ENDS_BEYOND}
        OFFSET 0
      ) AS preceding
      ORDER BY preceding.max_us DESC, preceding.last_offset DESC
      LIMIT {BLOCK_PAGE}
    ) AS page
"""

BLOCKS_BESIDE: Final[Mapping[Direction, sa.TextClause]] = {
    "after": sql(f"{_HOLDING} UNION ALL {_FOLLOWING}"),
    "before": sql(f"{_BEGUN} {_HOLDING} UNION ALL {_PRECEDING}"),
}
BLOCKS_BEYOND: Final[Mapping[Direction, sa.TextClause]] = {
    "after": sql(_FOLLOWING),
    "before": sql(f"{_BEGUN} {_PRECEDING}"),
}


def blocks_beside(
    servers: Servers,
    stream: PresentStream,
    floor: int,
    time_us: int,
    beyond: Place,
    direction: Direction,
    *,
    is_first: bool,
) -> list[Block]:
    """A page of the blocks beside a moment, from a place on in their order; in no order.

    The first page has those that hold the moment, too. A page of those beyond it is not empty while there are any, has
    no gap, and at most `BLOCK_PAGE` blocks.
    """
    statement = (BLOCKS_BESIDE if is_first else BLOCKS_BEYOND)[direction]
    parameters = _blocks_of(stream, floor) | {"t": time_us, "u": beyond[0], "o": beyond[1]}
    return [Block._make(row) for row in servers.rows(statement, parameters)]
