"""Of which spans of time all is known that came into streams: what proves that a message did not come.

Coverage is in offsets, and what is due is in time. The bridge between the two: a message is not written before its
time, as far as clocks agree; who asks allows for what they differ by. So what lies before an offset is of an earlier
time than what lies there, and what lies behind an offset came later than the chunk there was written. So of a recorded
range all is known that came from the time of its first message to the moment its last was written.
"""

import time
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

from relatum.errors import TimeNotRecorded
from relatum.keys import KeyDefinition, timestamp_us
from relatum.limits import INTEGER_MIN
from relatum.reading import StreamBounds
from relatum.store.coverage import TIME, CoverageRow, Range, merged, missing, proven
from relatum.store.database import sql
from relatum_consumer.lookups.catalog import Catalog, PresentStream
from relatum_consumer.lookups.proof import evidence
from relatum_consumer.lookups.servers import Servers
from relatum_consumer.lookups.stream_states import attended, replaced

ALWAYS: Final = INTEGER_MIN
"""A moment before all others."""


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of streams, by what was asked at a moment.

    Attributes:
        name: The stream or super stream.
        asked_us: The moment, before their ends were taken.
        spans: Spans of time, in order, both ends excluded, of which every message of all the streams is known.
        recorded: Those that are recorded.
        firsts: The first offsets that they retain, by name.
        ends: The offsets up to which they are known, by name; what lies behind is not recorded yet.
        behind: The streams of which something at the end is not recorded.
        unrecorded: Those of them of which something there is recorded for no key, or not for the time.
        not_looked_at: The streams of which recorded offsets were not looked at for the key: it was defined later.
    """

    name: str
    asked_us: int
    spans: tuple[Range, ...]
    recorded: tuple[PresentStream, ...]
    firsts: dict[str, int]
    ends: dict[str, int]
    behind: tuple[str, ...]
    unrecorded: tuple[str, ...] = ()
    not_looked_at: tuple[str, ...] = ()

    @property
    def until(self) -> int:
        """The moment up to which something is known; `ALWAYS` where nothing is."""
        return self.spans[-1][1] if self.spans else ALWAYS

    def holds(self, low: int, high: int) -> bool:
        """Whether all is known that came from one moment to another, both included."""
        at = bisect_left(self.spans, (low, ALWAYS)) - 1
        return at >= 0 and self.spans[at][0] < low and high < self.spans[at][1]

    def unrecorded_streams(self, catalog: Catalog) -> tuple[str, ...]:
        """Those of the streams that are behind that nobody records now."""
        recorded = attended(catalog, self.unrecorded)
        return tuple(stream for stream in self.unrecorded if stream not in recorded)


def known(catalog: Catalog, name: str, key_ids: Sequence[int]) -> Known:
    """What is known of a stream or super stream for each of the keys.

    Raises:
        StreamNotFound, NotAStream, AccessRefused: it is unknown to the database and the broker, was deleted, or this
            user may not read it.
        TimeNotRecorded: the times of a stream are not recorded.
        StreamReplaced: what lies at the last recorded offset is not what was recorded there.
    """
    asked_us = time.time_ns() // 1_000
    streams = evidence(catalog, [name], (), needs_firsts=True)
    recorded = streams.recorded
    for stream in recorded:
        if not stream.record_time:
            raise TimeNotRecorded(f"times are not recorded for the stream {stream.name!r}", stream=stream.name)
    numbers = {stream.name: stream.stream_id for stream in recorded}
    courses = [
        _Course(each, numbers.get(each), ends, streams.held[each], tuple(key_ids))
        for each, ends in streams.ends.items()
    ]
    spans = _spans(catalog.servers, courses, asked_us)
    return Known(
        name,
        asked_us,
        tuple(spans),
        tuple(recorded),
        {course.name: course.bounds.first or 0 for course in courses},
        {course.name: course.ranges[-1][1] if course.ranges else 0 for course in courses},
        tuple(course.name for course in courses if course.is_behind),
        tuple(course.name for course in courses if course.is_unrecorded),
        tuple(course.name for course in courses if course.is_not_looked_at),
    )


def still(catalog: Catalog, before: Known, by: KeyDefinition) -> Known:
    """What is known still of a key, where retention may have taken messages since, and pruning their rows."""
    catalog.forget()
    definition = catalog.definition(by.name)
    if definition.key_id != by.key_id:
        # It was removed, and defined anew: the rows may be gone.
        return replace(before, spans=())
    for stream, first in before.firsts.items():
        bounds: StreamBounds = catalog.servers.bounds(stream)
        if (bounds.first or 0) != first:
            now = known(catalog, before.name, (by.key_id, TIME))
            return replace(before, spans=tuple(_both(before.spans, now.spans)), firsts=now.firsts)
    return before


class _Course:
    """What is recorded of one stream, of what it retains."""

    def __init__(
        self, name: str, stream_id: int | None, bounds: StreamBounds, rows: Sequence[CoverageRow], keys: Sequence[int]
    ) -> None:
        self.name = name
        self.stream_id = stream_id
        self.bounds = bounds
        self._rows = rows
        # An empty stream has an end, and what came up to there is known: nothing.
        self.end = bounds.end
        retained = (bounds.first or 0, self.end)
        gaps = merged(gap for key in keys for gap in missing(retained, proven(rows, key)))
        self.ranges = [each for each in missing(retained, gaps) if each[0] < each[1]]
        if bounds.last is None and stream_id is not None:
            self.ranges = [(0, 0)]
        at = self.ranges[-1][1] if self.ranges else retained[0]
        self.is_behind = not self.ranges or at < self.end
        at_all = merged((row.from_offset, row.to_offset) for row in rows if row.kind == "recorded")
        times = missing(retained, proven(rows, TIME))
        self.is_unrecorded = self.is_behind and bool(missing((at, self.end), at_all) or (times and times[-1][1] > at))
        self.is_not_looked_at = any(
            missing(gap, at_all) != [gap] for key in keys if key != TIME for gap in missing(retained, proven(rows, key))
        )

    def high(self, of: Range, asked_us: int) -> int:
        """The moment up to which all that came is in the range, or before it."""
        if of[1] == self.end and self.bounds.is_proven:
            return asked_us
        chunks = [row.last_chunk_ms for row in self._rows if of[0] < row.to_offset <= of[1]]
        return max((ms * 1_000 for ms in chunks if ms is not None), default=ALWAYS)


LIVES: Final = sql(
    """
    SELECT stream_id, generation, created_at
    FROM relatum.streams
    WHERE stream_id = ANY (:stream_ids::int[]) AND replaced_at IS NULL
    """
)
"""Of streams that are in force: id, which generation it is, and when that was first seen."""

TIMES_AT: Final = sql(
    """
    SELECT given.number,
      CASE WHEN around.last_offset >= given.at_offset THEN around.max_us ELSE beyond.max_us END AS time_us
    FROM unnest(:numbers::int[], :stream_ids::int[], :offsets::bigint[]) AS given (number, stream_id, at_offset)
    LEFT JOIN LATERAL (
      SELECT b.max_us, b.last_offset
      FROM relatum.time_blocks b
      WHERE b.stream_id = given.stream_id AND b.first_offset <= given.at_offset
      ORDER BY b.first_offset DESC
      LIMIT 1
    ) AS around ON true
    LEFT JOIN LATERAL (
      SELECT b.max_us, b.last_offset
      FROM relatum.time_blocks b
      WHERE b.stream_id = given.stream_id AND b.first_offset > given.at_offset
      ORDER BY b.first_offset
      LIMIT 1
    ) AS beyond ON true
    WHERE CASE WHEN around.last_offset >= given.at_offset THEN around.max_us ELSE beyond.max_us END IS NOT NULL
    """
)
"""Of given offsets of streams: number, and the latest time in the block that holds the first message from there on.

No row where no message lies behind.
"""


def _spans(servers: Servers, courses: Sequence[_Course], asked_us: int) -> list[Range]:
    """The spans of time of which all is known in every one of the streams."""
    rows = servers.rows(LIVES, {"stream_ids": [course.stream_id for course in courses if course.stream_id is not None]})
    lives = {stream_id: (generation, timestamp_us(created_at)) for stream_id, generation, created_at in rows}
    for course in courses:
        if course.stream_id is not None and course.stream_id not in lives:
            raise replaced(course.name, course.end)
    begins = [(course, each) for course in courses for each in course.ranges if course.stream_id is not None]
    rows = servers.rows(
        TIMES_AT,
        {
            "numbers": list(range(len(begins))),
            "stream_ids": [course.stream_id for course, _ in begins],
            "offsets": [each[0] for _, each in begins],
        },
    )
    times: dict[int, int] = dict(rows)
    result: list[Range] | None = None
    for course in courses:
        own: list[Range] = []
        for number, (other, each) in enumerate(begins):
            if other is course:
                low = _low(each, *lives[other.stream_id or 0], times.get(number))
                own.append((low, course.high(each, asked_us)))
        own = _apart(own)
        result = own if result is None else _both(result, own)
    return result or []


def _low(of: Range, generation: int, seen_us: int, first_us: int | None) -> int:
    """The moment from which on all that came is in the range, or behind it."""
    if of[0] == 0:
        # All that the stream ever held; but messages of one that was declared again are not those of the one before.
        return ALWAYS if generation == 1 else min(seen_us, first_us or seen_us)
    return -ALWAYS if first_us is None else first_us


def _apart(spans: Iterable[Range]) -> list[Range]:
    """Spans in order, none of them empty, and none beyond the beginning of the next: clocks may say so."""
    ordered = sorted((low, high) for low, high in spans if low < high)
    cut = [(low, min(high, following)) for (low, high), (following, _) in pairwise(ordered)]
    return [each for each in [*cut, *ordered[-1:]] if each[0] < each[1]]


def _both(one: Sequence[Range], other: Sequence[Range]) -> list[Range]:
    """What lies in a span of either."""
    found = ((max(a, c), min(b, d)) for a, b in one for c, d in other)
    return sorted((low, high) for low, high in found if low < high)
