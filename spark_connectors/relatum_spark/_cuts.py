"""Cutting the relationship table into shares of equally many rows, by sampling its pages.

Neither ids nor offsets show how rows are distributed: streams differ in size, offsets have gaps, retention and prune
leave empty pages. An even sample of the pages shows it, and takes a few milliseconds.

Rows are cut by their physical place (ctid), so that only one task reads a page. If they were cut by stream and offset,
each task would read all pages with a row of its streams: the whole table if streams were recorded side by side. They
are cut so only while PostgreSQL may move rows to another part, since streams and offsets do not change then.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Final

import sqlalchemy as sa

from relatum.store.parts import table_parts_of

PAGES_A_PART: Final = 32
"""Pages sampled for each task: their mean is accurate to a few percent. Also the minimum pages of a task, since reading
that many takes less time than starting a task."""

PAGES_MAX: Final = 2_048
"""Maximum number of sampled pages: 16 MiB, a third of a second."""

_PAGE: Final = sa.text(
    # The maximum rows of a page: 24 bytes of header, and at least 28 bytes a row.
    "SELECT current_setting('block_size')::int, (current_setting('block_size')::int - 24) / 28"
)

_ON_PAGES: Final = """
FROM relatum.relationships
WHERE part = :part AND ctid = ANY (ARRAY(SELECT ('(' || page || ',' || line || ')')::tid
                                         FROM unnest(CAST(:pages AS bigint[])) page, generate_series(1, :lines) line))
  AND stream_id = ANY (CAST(:stream_ids AS int[])) AND key_id = ANY (CAST(:key_ids AS smallint[]))
GROUP BY 1, 2
"""
_BY_PAGE: Final = sa.text(f"SELECT part, (ctid::text::point)[0]::bigint, count(*) {_ON_PAGES}")
_BY_OFFSET: Final = sa.text(f"SELECT stream_id, stream_offset, count(*) {_ON_PAGES}")

Place = tuple[int, int]
"""A part of the table and a page in it, or a stream's id and an offset."""


def predicates_of(
    connection: sa.Connection, stream_ids: Sequence[int], key_ids: Sequence[int], tasks: int, *, is_steady: bool
) -> list[str]:
    """Return at most `tasks` conditions; each row of these streams and keys meets exactly one of them.

    With `is_steady` all tasks see one snapshot, in which no row moves.
    """
    parts = [part for part in table_parts_of(connection) if part.is_opened]
    page_bytes, lines = connection.execute(_PAGE).one()
    extents = [(part.part, part.size // page_bytes) for part in parts if part.size]
    by_page = is_steady or not any(part.is_leaving for part in parts)
    seen: dict[Place, int] = {}
    for part, pages in _sample(extents, tasks):
        if by_page:
            seen |= dict.fromkeys(((part, page) for page in pages), 0)
        asked = {"part": part, "pages": pages, "lines": lines, "stream_ids": stream_ids, "key_ids": key_ids}
        rows = connection.execute(_BY_PAGE if by_page else _BY_OFFSET, asked)
        seen |= {(first, second): count for first, second, count in rows}
    if not any(seen.values()):
        # The sample found no rows, so share the pages evenly.
        seen = dict.fromkeys(seen, 1)
    if by_page:
        tasks = min(tasks, sum(pages for _, pages in extents) // PAGES_A_PART)
    cuts = cuts_of(sorted(seen.items()), tasks)
    if by_page:
        return ranges([part for part, _ in extents], cuts, "part", "place", "'({},0)'::tid")
    return ranges(sorted(stream_ids), cuts, "stream_id", "stream_offset", "{}")


def _sample(extents: Sequence[Place], tasks: int) -> Iterator[tuple[int, list[int]]]:
    """Yield each part with an even sample of its pages; `extents` has the parts in order and their page counts."""
    total = sum(pages for _, pages in extents)
    count = min(total, PAGES_A_PART * tasks, max(PAGES_MAX, tasks))
    numbers = [(2 * at + 1) * total // (2 * count) for at in range(count)]
    start = 0
    for part, pages in extents:
        if chosen := [number - start for number in numbers if start <= number < start + pages]:
            yield part, chosen
        start += pages


def cuts_of(seen: Sequence[tuple[Place, int]], tasks: int) -> list[Place]:
    """Return the places where the second and later tasks begin, so that all have about the same number of rows.

    `seen` has the places in order, with the number of rows at each.
    """
    before = [0, *accumulate(rows for _, rows in seen)]
    at = (bisect_left(before, before[-1] * task / tasks) for task in range(1, tasks))
    places = dict.fromkeys(seen[index][0] for index in at if index < len(seen))
    return [place for place in places if place > seen[0][0]]


def ranges(groups: Sequence[int], cuts: Sequence[Place], group: str, at: str, value: str) -> list[str]:
    """Return conditions that cut rows in the order of two columns; the first and last ranges are unbounded outwards.

    `groups` are all values of the first column, in order; `value` is the SQL format of the second column's values. A
    range within one group is a plain AND, for which PostgreSQL reads only the pages between two places.
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
