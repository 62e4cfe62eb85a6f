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
from functools import reduce
from itertools import pairwise
from typing import Final

from relatum.errors import TimeNotRecorded
from relatum.keys import KeyDefinition
from relatum.limits import INTEGER_MIN
from relatum.reading import StreamBounds
from relatum.store.coverage import TIME, Range, missing
from relatum.store.database import sql
from relatum_consumer.lookups.catalog import Catalog, PresentStream
from relatum_consumer.lookups.proof import Evidence, evidence, gaps

ALWAYS: Final = INTEGER_MIN
"""A moment before all others."""


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of streams, by what was asked at a moment.

    Attributes:
        name: The stream or super stream.
        asked_us: The moment, before their ends were taken.
        spans: Spans of time, in order, both ends excluded, of which every message of all the streams is known.
        evidence: What is recorded of the streams.
        behind: The streams of which something at the end is not recorded.
    """

    name: str
    asked_us: int
    spans: tuple[Range, ...]
    evidence: Evidence
    behind: tuple[str, ...] = ()

    @property
    def recorded(self) -> Sequence[PresentStream]:
        """The streams that are recorded."""
        return self.evidence.recorded

    @property
    def firsts(self) -> dict[str, int]:
        """The first offsets that the streams retain, by name."""
        return {stream: bounds.first or 0 for stream, bounds in self.evidence.ends.items()}

    @property
    def until(self) -> int:
        """The moment up to which something is known; `ALWAYS` where nothing is."""
        return self.spans[-1][1] if self.spans else ALWAYS

    def holds(self, low: int, high: int) -> bool:
        """Whether all is known that came from one moment to another, both included."""
        at = bisect_left(self.spans, (low, ALWAYS)) - 1
        return at >= 0 and self.spans[at][0] < low and high < self.spans[at][1]

    def unrecorded_streams(self, catalog: Catalog) -> set[str]:
        """Those of the streams that are behind that nobody records now."""
        return set(self.behind).intersection(self.evidence.unrecorded_streams(catalog))


def known(catalog: Catalog, name: str, key_ids: Sequence[int]) -> Known:
    """What is known of a stream or super stream for each of the keys.

    Raises:
        StreamNotFound, NotAStream, AccessRefused: it is unknown to the database and the broker, was deleted, or this
            user may not read it.
        TimeNotRecorded: the times of a stream are not recorded.
        StreamReplaced: the message at the last recorded offset is not what was recorded there.
    """
    asked_us = time.time_ns() // 1_000
    found = evidence(catalog, [name], key_ids, needs_firsts=True)
    for stream in found.recorded:
        if not stream.record_time:
            raise TimeNotRecorded(f"times are not recorded for the stream {stream.name!r}", stream=stream.name)
    ranges = {stream: _ranges(found, stream, key_ids) for stream in found.ends}
    spans = _spans(catalog, found, ranges, asked_us)
    found.check_present(catalog, [name])
    behind = [stream for stream, ends in found.ends.items() if not ranges[stream] or ranges[stream][-1][1] < ends.end]
    return Known(name, asked_us, tuple(spans), found, tuple(behind))


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
            return replace(before, spans=tuple(_both(before.spans, now.spans)), evidence=now.evidence)
    return before


def _ranges(found: Evidence, stream: str, key_ids: Sequence[int]) -> list[Range]:
    """The offsets of a stream that are retained and recorded for each of the keys."""
    bounds = found.ends[stream]
    if bounds.last is None:
        # An empty stream has an end, and what came up to there is known: nothing.
        return [(0, 0)] if any(each.name == stream for each in found.recorded) else []
    retained = (bounds.first or 0, bounds.end)
    return [each for each in missing(retained, gaps(bounds, found.held[stream], key_ids)) if each[0] < each[1]]


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

No row where no message comes after.
"""


def _spans(catalog: Catalog, found: Evidence, ranges: dict[str, list[Range]], asked_us: int) -> list[Range]:
    """The spans of time of which all is known in every one of the streams."""
    recorded = {stream.name: stream for stream in found.recorded}
    begins = [(recorded[stream], each) for stream, of in ranges.items() if stream in recorded for each in of]
    rows = catalog.servers.rows(
        TIMES_AT,
        {
            "numbers": list(range(len(begins))),
            "stream_ids": [stream.stream_id for stream, _ in begins],
            "offsets": [each[0] for _, each in begins],
        },
    )
    times: dict[int, int] = dict(rows)
    spans: dict[str, list[Range]] = {stream: [] for stream in ranges}
    for number, (stream, each) in enumerate(begins):
        low = _low(each, stream.generation, stream.created_us, times.get(number))
        spans[stream.name].append((low, _high(found, stream.name, each, asked_us)))
    return reduce(_both, map(_apart, spans.values())) if spans else []


def _low(of: Range, generation: int, seen_us: int, first_us: int | None) -> int:
    """The moment from which on all that came is in the range, or behind it."""
    if of[0] == 0:
        # All that the stream ever held; but messages of one that was declared again are not those of the one before.
        return ALWAYS if generation == 1 else min(seen_us, first_us or seen_us)
    return -ALWAYS if first_us is None else first_us


def _high(found: Evidence, stream: str, of: Range, asked_us: int) -> int:
    """The moment up to which all that came is in the range, or before it."""
    bounds = found.ends[stream]
    if of[1] == bounds.end and bounds.is_proven:
        return asked_us
    chunks = [row.last_chunk_ms for row in found.held[stream] if of[0] < row.to_offset <= of[1]]
    return max((ms * 1_000 for ms in chunks if ms is not None), default=ALWAYS)


def _apart(spans: Iterable[Range]) -> list[Range]:
    """Spans in order, none of them empty, and none beyond the beginning of the next: clocks may say so."""
    ordered = sorted((low, high) for low, high in spans if low < high)
    cut = [(low, min(high, following)) for (low, high), (following, _) in pairwise(ordered)]
    return [each for each in [*cut, *ordered[-1:]] if each[0] < each[1]]


def _both(one: Sequence[Range], other: Sequence[Range]) -> list[Range]:
    """What is in a span of both."""
    found = ((max(a, c), min(b, d)) for a, b in one for c, d in other)
    return sorted((low, high) for low, high in found if low < high)
