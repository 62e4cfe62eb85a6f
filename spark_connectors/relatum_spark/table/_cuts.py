"""Cutting the relationship table into parts of as many rows each, by looking at a few of its pages.

Neither ids nor offsets tell how rows are spread: streams differ in size, offsets have gaps, retention and prune leave
empty pages. What lies on pages taken evenly from the table does, at the price of some milliseconds.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Final

import sqlalchemy as sa

PAGES_A_PART: Final = 32
"""Pages looked at for each part: means of so many differ by a few percent. A part has as many pages at least: to read
them takes less time than a task."""

PAGES_MAX: Final = 2_048
"""Pages looked at, at most: 16 MiB, a third of a second."""

PLACES_MIN: Final = 32
"""Rows seen for each part, below which the recorded ranges of offsets tell more than those rows."""

_SIZE: Final = sa.text(
    "SELECT pg_relation_size('relatum.relationships') / current_setting('block_size')::int AS pages, "
    # A page's line pointers: 24 bytes of header, and 28 for the smallest row.
    "(current_setting('block_size')::int - 24) / 28 AS tuples"
)

_ON_PAGES: Final = """
FROM relatum.relationships
WHERE ctid = ANY (ARRAY(SELECT ('(' || page || ',' || line || ')')::tid
                        FROM unnest(CAST(:pages AS bigint[])) page, generate_series(1, :tuples) line))
  AND stream_id = ANY (CAST(:stream_ids AS int[])) AND key_id = ANY (CAST(:key_ids AS smallint[]))
"""

_ROWS_A_PAGE: Final = sa.text(f"SELECT (ctid::text::point)[0]::bigint AS page, count(*) AS rows {_ON_PAGES} GROUP BY 1")
_PLACES: Final = sa.text(f"SELECT stream_id, stream_offset {_ON_PAGES} ORDER BY 1, 2")

Place = tuple[int, int]
"""A stream's id and an offset."""

Bound = tuple[int, int, int, int]
"""A stream's id, a key's, and offsets [from, to) that are recorded."""


def block_predicates(
    connection: sa.Connection, stream_ids: Sequence[int], key_ids: Sequence[int], parts: int
) -> list[str]:
    """Conditions on `place`, a ctid: ranges of the table's pages. Each row meets exactly one."""
    pages, sample, parameters = _sample(connection, stream_ids, key_ids, parts)
    rows = connection.execute(_ROWS_A_PAGE, parameters).all() if sample else ()
    found: dict[int, int] = {row.page: row.rows for row in rows}
    # None seen: rows may lie anywhere, and the work of looking through the pages is shared evenly.
    parts = min(parts, pages // PAGES_A_PART)
    cuts = page_cuts(pages, [(page, found.get(page, 0) if found else 1) for page in sample], parts)
    return block_ranges(cuts)


def offset_predicates(
    connection: sa.Connection, stream_ids: Sequence[int], key_ids: Sequence[int], bounds: Sequence[Bound], parts: int
) -> list[str]:
    """Conditions on `stream_id` and `stream_offset`: ranges in that order. Each row meets exactly one."""
    _, sample, parameters = _sample(connection, stream_ids, key_ids, parts)
    rows = connection.execute(_PLACES, parameters) if sample else ()
    places = [(stream_id, offset) for stream_id, offset in rows]
    if len(places) < PLACES_MIN * parts:
        places = spread(bounds, PLACES_MIN * parts)
    return place_ranges(place_cuts(places, parts))


def _sample(
    connection: sa.Connection, stream_ids: Sequence[int], key_ids: Sequence[int], parts: int
) -> tuple[int, list[int], dict[str, object]]:
    """How many pages there are, those to look at, and the parameters to do so."""
    pages, tuples = connection.execute(_SIZE).one()
    count = min(pages, PAGES_A_PART * parts, max(PAGES_MAX, parts))
    sample = [(2 * at + 1) * pages // (2 * count) for at in range(count)]
    return pages, sample, {"pages": sample, "tuples": tuples, "stream_ids": stream_ids, "key_ids": key_ids}


def page_cuts(pages: int, sample: Sequence[tuple[int, int]], parts: int) -> list[int]:
    """The pages where parts begin, without the first, so that each holds about as many rows.

    Args:
        pages: How many there are.
        sample: (page, rows on it), evenly taken: each stands for the pages around it.
        parts: How many parts, at most.
    """
    sums = [0, *accumulate(rows for _, rows in sample)]
    cuts: list[int] = []
    for part in range(1, parts):
        wanted = sums[-1] * part / parts
        at = min(bisect_right(sums, wanted), len(sample)) - 1
        share = (wanted - sums[at]) / (sums[at + 1] - sums[at]) if sums[at + 1] > sums[at] else 0.0
        cuts.append(round((at + share) * pages / len(sample)))
    return [cut for cut in dict.fromkeys(cuts) if 0 < cut < pages]


def spread(bounds: Sequence[Bound], count: int) -> list[Place]:
    """About `count` places in order, taken evenly from what is recorded."""
    ordered = sorted((stream_id, start, stop) for stream_id, _, start, stop in bounds)
    step = max(1, sum(stop - start for _, start, stop in ordered) // count)
    return sorted((stream_id, offset) for stream_id, start, stop in ordered for offset in range(start, stop, step))


def place_cuts(places: Sequence[Place], parts: int) -> list[Place]:
    """The places where parts begin, without the first, so that each holds about as many of the ordered `places`."""
    cuts = [places[len(places) * part // parts] for part in range(1, parts)] if places else []
    return [cut for cut in dict.fromkeys(cuts) if cut > places[0]]


def block_ranges(cuts: Sequence[int]) -> list[str]:
    """Conditions that cut the pages at the cuts; the first and the last are open to their side."""
    ends: list[int | None] = [None, *cuts, None]
    parts = (
        _joined(
            f"place >= '({start},0)'::tid" if start is not None else None,
            f"place < '({stop},0)'::tid" if stop is not None else None,
        )
        for start, stop in pairwise(ends)
    )
    return [conditions or "true" for conditions in parts]


def _joined(*conditions: str | None) -> str:
    return " AND ".join(condition for condition in conditions if condition)


def place_ranges(cuts: Sequence[Place]) -> list[str]:
    """Conditions that cut (stream_id, stream_offset) at the cuts, written so that the index of block ranges serves."""
    ends: list[Place | None] = [None, *cuts, None]
    return [" OR ".join(_alternatives(start, stop)) or "true" for start, stop in pairwise(ends)]


def _alternatives(start: Place | None, stop: Place | None) -> Iterable[str]:
    if start and stop and start[0] == stop[0]:
        yield f"(stream_id = {start[0]} AND stream_offset >= {start[1]} AND stream_offset < {stop[1]})"
        return
    if start:
        yield f"(stream_id = {start[0]} AND stream_offset >= {start[1]})"
    if start or stop:
        between = _joined(f"stream_id > {start[0]}" if start else None, f"stream_id < {stop[0]}" if stop else None)
        yield f"({between})"
    if stop:
        yield f"(stream_id = {stop[0]} AND stream_offset < {stop[1]})"
