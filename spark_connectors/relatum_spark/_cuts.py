"""Cutting the relationship table into parts of as many rows each, by looking at a few of its pages.

Neither ids nor offsets tell how rows are spread: streams differ in size, offsets have gaps, retention and prune leave
empty pages. What is on pages taken evenly from the table does, at the price of some milliseconds.

By place a page is read by one task. By offset each task reads all pages that hold a row of its streams: where streams
were recorded side by side, that is the whole table for each.
"""

from bisect import bisect_right
from collections.abc import Collection, Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Final

import sqlalchemy as sa

from relatum.store.parts import table_parts_of

PAGES_A_PART: Final = 32
"""Pages looked at for each part: means of so many differ by a few percent. A part has as many pages at least: to read
them takes less time than a task."""

PAGES_MAX: Final = 2_048
"""Pages looked at, at most: 16 MiB, a third of a second."""

PLACES_MIN: Final = 32
"""Rows seen for each part, below which the recorded ranges of offsets tell more than those rows."""

_PAGE: Final = sa.text(
    # A page's line pointers: 24 bytes of header, and 28 for the smallest row.
    "SELECT current_setting('block_size')::int AS size, (current_setting('block_size')::int - 24) / 28 AS tuples"
)

_ON_PAGES: Final = """
FROM relatum.relationships
WHERE part = :part AND ctid = ANY (ARRAY(SELECT ('(' || page || ',' || line || ')')::tid
                                         FROM unnest(CAST(:pages AS bigint[])) page, generate_series(1, :tuples) line))
  AND stream_id = ANY (CAST(:stream_ids AS int[])) AND key_id = ANY (CAST(:key_ids AS smallint[]))
"""

_ROWS_A_PAGE: Final = sa.text(f"SELECT (ctid::text::point)[0]::bigint AS page, count(*) AS rows {_ON_PAGES} GROUP BY 1")
_PLACES: Final = sa.text(f"SELECT stream_id, stream_offset {_ON_PAGES}")

Place = tuple[int, int]
"""A stream's id and an offset."""

Bound = tuple[int, int, int, int]
"""A stream's id, a key's, and offsets [from, to) that are recorded."""


Extent = tuple[int, int]
"""A part of the table, and its pages. One after the other, the pages of all parts are numbered from 0 on."""


def predicates_of(
    connection: sa.Connection,
    stream_ids: Sequence[int],
    key_ids: Sequence[int],
    bounds: Sequence[Bound],
    parts: int,
    *,
    is_steady: bool,
) -> list[str]:
    """Return conditions of which each row meets exactly one: by place, and by offset where rows may change their place.

    With `is_steady` all tasks see one snapshot, in which nothing moves. Else rows of parts that are leaving may be
    found there, in the part that is open now, or in a later one.
    """
    found = [part for part in table_parts_of(connection) if part.is_opened]
    last = found[-1].part
    moving = [part for part in found if part.is_leaving or part.part == last]
    if is_steady or not any(part.is_leaving for part in found):
        return block_predicates(connection, stream_ids, key_ids, parts)
    if parts == 1:
        return ["true"]
    share = sum(part.size for part in moving) / max(1, sum(part.size for part in found))
    by_offset = min(parts - 1, max(1, round(parts * share)))
    numbers = ", ".join(str(part.part) for part in moving)
    within = f"(part IN ({numbers}) OR part > {last})"
    moved = offset_predicates(connection, stream_ids, key_ids, bounds, by_offset)
    left = f"NOT {within}"
    still = block_predicates(connection, stream_ids, key_ids, parts - by_offset, {part.part for part in moving})
    return [f"({each}) AND {left}" if each == "true" else each for each in still] + [
        f"({each}) AND {within}" for each in moved
    ]


def block_predicates(
    connection: sa.Connection,
    stream_ids: Sequence[int],
    key_ids: Sequence[int],
    parts: int,
    but: Collection[int] = (),
) -> list[str]:
    """Return conditions on `part` and `place`, a ctid: ranges of the pages of all parts of the table except `but`."""
    extents, tuples = _extents(connection)
    extents = [extent for extent in extents if extent[0] not in but]
    pages = sum(count for _, count in extents)
    sample = _sample(pages, parts)
    found: dict[int, int] = {}
    for start, given in _by_extent(extents, sample):
        given |= {"tuples": tuples, "stream_ids": stream_ids, "key_ids": key_ids}
        found |= {start + row.page: row.rows for row in connection.execute(_ROWS_A_PAGE, given)}
    # None seen: rows may lie anywhere, and the work of looking through the pages is shared evenly.
    parts = min(parts, pages // PAGES_A_PART)
    cuts = page_cuts(pages, [(page, found.get(page, 0) if found else 1) for page in sample], parts)
    return block_ranges(extents, cuts)


def offset_predicates(
    connection: sa.Connection, stream_ids: Sequence[int], key_ids: Sequence[int], bounds: Sequence[Bound], parts: int
) -> list[str]:
    """Return conditions on `stream_id` and `stream_offset`: ranges in that order."""
    extents, tuples = _extents(connection)
    places: list[Place] = []
    for _, given in _by_extent(extents, _sample(sum(count for _, count in extents), parts)):
        given |= {"tuples": tuples, "stream_ids": stream_ids, "key_ids": key_ids}
        places += [(stream_id, offset) for stream_id, offset in connection.execute(_PLACES, given)]
    if len(places) < PLACES_MIN * parts:
        places = spread(bounds, PLACES_MIN * parts)
    return place_ranges(place_cuts(sorted(places), parts))


def _extents(connection: sa.Connection) -> tuple[list[Extent], int]:
    """Return the parts that have rows, and the most rows a page has."""
    size, tuples = connection.execute(_PAGE).one()
    return [(part.part, part.size // size) for part in table_parts_of(connection) if part.size], tuples


def _sample(pages: int, parts: int) -> list[int]:
    """Return the pages to look at, evenly taken."""
    count = min(pages, PAGES_A_PART * parts, max(PAGES_MAX, parts))
    return [(2 * at + 1) * pages // (2 * count) for at in range(count)]


def _by_extent(extents: Sequence[Extent], sample: Sequence[int]) -> Iterable[tuple[int, dict[str, object]]]:
    """Yield for each part with pages of the sample the number of its first page, and what names the pages."""
    start = 0
    for part, count in extents:
        pages = [page - start for page in sample if start <= page < start + count]
        if pages:
            yield start, {"part": part, "pages": pages}
        start += count


def page_cuts(pages: int, sample: Sequence[tuple[int, int]], parts: int) -> list[int]:
    """Return the pages where at most so many parts begin, without the first, so that each holds as many rows.

    `sample` is (page, rows on it), evenly taken: each stands for the pages around it.
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
    """Return about `count` places in order, taken evenly from what is recorded."""
    ordered = sorted((stream_id, start, stop) for stream_id, _, start, stop in bounds)
    step = max(1, sum(stop - start for _, start, stop in ordered) // count)
    return sorted((stream_id, offset) for stream_id, start, stop in ordered for offset in range(start, stop, step))


def place_cuts(places: Sequence[Place], parts: int) -> list[Place]:
    """Return the places where parts begin, without the first, so that each holds as many of the ordered `places`."""
    cuts = [places[len(places) * part // parts] for part in range(1, parts)] if places else []
    return [cut for cut in dict.fromkeys(cuts) if cut > places[0]]


def block_ranges(extents: Sequence[Extent], cuts: Sequence[int]) -> list[str]:
    """Return conditions that cut the pages at the cuts; the first and the last are open to their side.

    A range that lies within one part names pages of that alone, which PostgreSQL then reads and no others.
    """
    if not cuts:
        return ["true"]
    last = sum(count for _, count in extents)
    return [" OR ".join(_within(extents, start, stop)) for start, stop in pairwise([0, *cuts, last])]


def _within(extents: Sequence[Extent], start: int, stop: int) -> Iterable[str]:
    first = 0
    for part, count in extents:
        low, high = max(start, first), min(stop, first + count)
        if low < high:
            # What is written behind a part's last page meanwhile is of its last range.
            yield _joined(
                f"part = {part}",
                f"place >= '({low - first},0)'::tid" if low > first else None,
                f"place < '({high - first},0)'::tid" if high < first + count else None,
            )
        first += count


def _joined(*conditions: str | None) -> str:
    return " AND ".join(condition for condition in conditions if condition)


def place_ranges(cuts: Sequence[Place]) -> list[str]:
    """Return conditions that cut (stream_id, stream_offset) at the cuts, so that the index of block ranges serves."""
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
