"""Cutting the relationship table into parts of as many rows each, by looking at a few of its pages.

Neither ids nor offsets tell how rows are spread: streams differ in size, offsets have gaps, retention and prune leave
empty pages. What is on pages taken evenly from the table does, at the price of some milliseconds.

Rows are cut by their place (ctid), so that each page is read by one task. By stream and offset, each task would read
all pages that hold a row of its streams: where streams were recorded side by side, the whole table. Only rows that
PostgreSQL may move to another part of the table while tasks run are cut by stream and offset, which they keep.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any, Final

import sqlalchemy as sa

from relatum.store.parts import table_parts_of

PAGES_A_PART: Final = 32
"""Pages looked at for each part: means of so many differ by a few percent. A part has as many pages at least: to read
them takes less time than a task."""

PAGES_MAX: Final = 2_048
"""Pages looked at, at most: 16 MiB, a third of a second."""

_PAGE: Final = sa.text(
    # A page's line pointers: 24 bytes of header, and 28 for the smallest row.
    "SELECT current_setting('block_size')::int, (current_setting('block_size')::int - 24) / 28"
)

_ON_PAGES: Final = """
FROM relatum.relationships
WHERE part = :part AND ctid = ANY (ARRAY(SELECT ('(' || page || ',' || line || ')')::tid
                                         FROM unnest(CAST(:pages AS bigint[])) page, generate_series(1, :lines) line))
  AND stream_id = ANY (CAST(:stream_ids AS int[])) AND key_id = ANY (CAST(:key_ids AS smallint[]))
"""
_ROWS_A_PAGE: Final = sa.text(f"SELECT (ctid::text::point)[0]::bigint, count(*) {_ON_PAGES} GROUP BY 1")
_OFFSETS: Final = sa.text(f"SELECT stream_id, stream_offset {_ON_PAGES}")

Place = tuple[int, int]
"""A part of the table and a page in it; or a stream's id and an offset."""


def predicates_of(
    connection: sa.Connection, stream_ids: Sequence[int], key_ids: Sequence[int], tasks: int, *, is_steady: bool
) -> list[str]:
    """Return at most so many conditions, of which each row of these streams and keys meets exactly one.

    With `is_steady` all tasks see one snapshot, in which no row moves. Else rows of a part that is leaving may be found
    there, in the part that is open now, or in a later one.
    """
    found = [part for part in table_parts_of(connection) if part.is_opened]
    page_bytes, lines = connection.execute(_PAGE).one()
    asked = {"stream_ids": stream_ids, "key_ids": key_ids, "lines": lines}
    extents = [(part.part, part.size // page_bytes) for part in found if part.size]
    if is_steady or not any(part.is_leaving for part in found):
        return _by_place(connection, asked, extents, tasks)
    if tasks == 1:
        return ["true"]
    last = found[-1].part
    moving = {part.part for part in found if part.is_leaving or part.part == last}
    still = [extent for extent in extents if extent[0] not in moving]
    share = sum(pages for part, pages in extents if part in moving) / max(1, sum(pages for _, pages in extents))
    by_offset = min(tasks - 1, max(1, round(tasks * share)))
    among = f"(part IN ({', '.join(map(str, sorted(moving)))}) OR part > {last})"
    conditions = [f"({each}) AND NOT {among}" for each in _by_place(connection, asked, still, tasks - by_offset)]
    return conditions + [f"({each}) AND {among}" for each in _by_offset(connection, asked, extents, by_offset)]


def _by_place(connection: sa.Connection, asked: dict[str, Any], extents: Sequence[Place], tasks: int) -> list[str]:
    seen: dict[Place, int] = {}
    for part, pages in _sample(extents, tasks):
        rows = connection.execute(_ROWS_A_PAGE, asked | {"part": part, "pages": pages})
        seen |= dict.fromkeys(((part, page) for page in pages), 0) | {(part, page): count for page, count in rows}
    if not any(seen.values()):
        # Rows may be anywhere: the work of looking through the pages is shared evenly.
        seen = dict.fromkeys(seen, 1)
    tasks = min(tasks, sum(pages for _, pages in extents) // PAGES_A_PART)
    cuts = cuts_of(sorted(seen.items()), tasks)
    return ranges([part for part, _ in extents], cuts, "part", "place", "'({},0)'::tid")


def _by_offset(connection: sa.Connection, asked: dict[str, Any], extents: Sequence[Place], tasks: int) -> list[str]:
    seen: list[Place] = []
    for part, pages in _sample(extents, tasks):
        seen += map(tuple, connection.execute(_OFFSETS, asked | {"part": part, "pages": pages}))
    cuts = cuts_of([(place, 1) for place in sorted(seen)], tasks)
    return ranges(sorted(asked["stream_ids"]), cuts, "stream_id", "stream_offset", "{}")


def _sample(extents: Sequence[Place], tasks: int) -> Iterator[tuple[int, list[int]]]:
    """Yield parts with pages to look at, evenly taken; `extents` are parts in order, and how many pages each has."""
    total = sum(pages for _, pages in extents)
    count = min(total, PAGES_A_PART * tasks, max(PAGES_MAX, tasks))
    numbers = [(2 * at + 1) * total // (2 * count) for at in range(count)]
    start = 0
    for part, pages in extents:
        if chosen := [number - start for number in numbers if start <= number < start + pages]:
            yield part, chosen
        start += pages


def cuts_of(seen: Sequence[tuple[Place, int]], tasks: int) -> list[Place]:
    """Return the places where at most so many tasks begin, without the first, so that each has as many rows.

    `seen` has places in order, and the rows at each.
    """
    before = [0, *accumulate(rows for _, rows in seen)]
    at = (bisect_left(before, before[-1] * task / tasks) for task in range(1, tasks))
    places = dict.fromkeys(seen[index][0] for index in at if index < len(seen))
    return [place for place in places if place > seen[0][0]]


def ranges(groups: Sequence[int], cuts: Sequence[Place], group: str, at: str, value: str) -> list[str]:
    """Return conditions that cut rows in the order of two columns; the first and the last are open to their side.

    `groups` are all values of the first column, in order; `value` is how SQL writes one of the second. A range of one
    group is a plain AND: PostgreSQL then reads the pages between two places and no others.
    """
    if not cuts:
        return ["true"]
    conditions = []
    for (first, low), (last, high) in pairwise([(groups[0], None), *cuts, (groups[-1], None)]):
        alternatives = []
        for each in groups[bisect_left(groups, first) : bisect_right(groups, last)]:
            bounds = [f"{group} = {each}"]
            if each == first and low is not None:
                bounds.append(f"{at} >= {value.format(low)}")
            if each == last and high is not None:
                bounds.append(f"{at} < {value.format(high)}")
            alternatives.append(" AND ".join(bounds))
        conditions.append(" OR ".join(alternatives))
    return conditions
