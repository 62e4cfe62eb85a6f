"""The time spans in which every message of a stream is known: they prove that no message arrived.

Coverage is a range of offsets, while due times are moments. A message is written after its time, as far as clocks
agree; callers allow for the difference between clocks. So the messages before a recorded range have earlier times than
the time of its first message, and the messages after it arrive after its last chunk was written. Every message between
these two moments is in the range.
"""

import time
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import pairwise
from typing import Final

from relatum.common.limits import INTEGER_MIN
from relatum.keys import KeyDefinition
from relatum.store.coverage import TIME, Range, missing
from relatum.store.database import sql
from relatum_consumer.lookups.catalog import Catalog, check_times
from relatum_consumer.lookups.proof import Evidence, evidence, gaps

ALWAYS: Final = INTEGER_MIN
"""A time before all others, in microseconds."""


@dataclass(frozen=True, slots=True)
class KnownSpans:
    """What is known of a stream or super stream."""

    name: str
    queried_us: int
    """The time just before the streams' ends were queried."""
    spans: tuple[Range, ...]
    """Time spans in order, both ends excluded, in which every message of all the streams is known."""
    evidence: Evidence
    behind: tuple[str, ...] = ()
    """The streams whose ends are not recorded."""

    @property
    def firsts(self) -> dict[str, int]:
        return {stream: bounds.first or 0 for stream, bounds in self.evidence.ends.items()}

    @property
    def until(self) -> int:
        """The end of the last known span; `ALWAYS` if there is none."""
        return self.spans[-1][1] if self.spans else ALWAYS

    def holds(self, low: int, high: int) -> bool:
        """Whether every message with a time from `low` to `high`, both included, is known."""
        index = bisect_left(self.spans, (low, ALWAYS)) - 1
        return index >= 0 and self.spans[index][0] < low and high < self.spans[index][1]

    def unrecorded_streams(self, catalog: Catalog) -> set[str]:
        """Return the streams whose ends are not recorded and that no recorder records now."""
        return set(self.behind).intersection(self.evidence.unrecorded_streams(catalog))


def known(catalog: Catalog, name: str, key_ids: Sequence[int]) -> KnownSpans:
    """Return what is known of a stream or super stream, with respect to all of the keys."""
    queried_us = time.time_ns() // 1_000
    found = evidence(catalog, [name], key_ids, needs_firsts=True)
    check_times(found.recorded)
    ranges = {stream: _ranges(found, stream, key_ids) for stream in found.ends}
    spans = _spans(catalog, found, ranges, queried_us)
    found.check_present(catalog, [name], key_ids)
    behind = [stream for stream, ends in found.ends.items() if not ranges[stream] or ranges[stream][-1][1] < ends.end]
    return KnownSpans(name, queried_us, tuple(spans), found, tuple(behind))


def still(catalog: Catalog, before: KnownSpans, by: KeyDefinition) -> KnownSpans:
    """Return what is still known for a key: retention and pruning may have removed messages and rows since `before`."""
    before.evidence.check_present(catalog, [before.name], ())
    after = known(catalog, before.name, (by.key_id, TIME))
    return replace(before, spans=tuple(_intersection(before.spans, after.spans)), evidence=after.evidence)


def _ranges(found: Evidence, stream: str, key_ids: Sequence[int]) -> list[Range]:
    """Return the retained ranges of a stream that are recorded for all of the keys."""
    bounds = found.ends[stream]
    if bounds.last is None:
        # A recorded stream that is empty is known to have had no messages before its end.
        return [(0, 0)] if any(each.name == stream for each in found.recorded) else []
    retained = (bounds.first or 0, bounds.end)
    return [each for each in missing(retained, gaps(bounds, found.held[stream], key_ids)) if each[0] < each[1]]


TIMES_AT: Final = sql("""
    SELECT given.number, holding.max_us
    FROM unnest(:numbers::int[], :stream_ids::int[], :offsets::bigint[]) AS given (number, stream_id, at_offset)
    CROSS JOIN LATERAL (
      SELECT b.max_us
      FROM relatum.time_blocks b
      WHERE b.stream_id = given.stream_id AND b.last_offset >= given.at_offset AND b.first_offset >= coalesce((
          SELECT max(before.first_offset)
          FROM relatum.time_blocks before
          WHERE before.stream_id = given.stream_id AND before.first_offset <= given.at_offset
        ), 0)
      ORDER BY b.first_offset
      LIMIT 1
    ) AS holding""")
"""Selects for each offset the latest time in the block that has the first message from that offset on, if any."""


def _spans(catalog: Catalog, found: Evidence, ranges: dict[str, list[Range]], queried_us: int) -> list[Range]:
    """Convert the recorded ranges of all the streams to the time spans in which every message is known."""
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
        spans[stream.name].append((low, _high(found, stream.name, each, queried_us)))
    return reduce(_intersection, map(_union, spans.values())) if spans else []


def _low(of: Range, generation: int, seen_us: int, first_us: int | None) -> int:
    """Return the time after which every message is in the range or behind it."""
    if of[0] == 0:
        # The range begins with the stream. If the stream was declared again, its earlier messages are unknown.
        return ALWAYS if generation == 1 else min(seen_us, first_us or seen_us)
    return -ALWAYS if first_us is None else first_us


def _high(found: Evidence, stream: str, of: Range, queried_us: int) -> int:
    """Return the time before which every message is in the range or before it."""
    bounds = found.ends[stream]
    if of[1] == bounds.end and bounds.is_proven:
        return queried_us
    chunks = [row.last_chunk_ms for row in found.held[stream] if of[0] < row.to_offset <= of[1]]
    return max((ms * 1_000 for ms in chunks if ms is not None), default=ALWAYS)


def _union(spans: Iterable[Range]) -> list[Range]:
    """Return the spans in order, without empty ones. Spans that overlap because clocks differ are cut."""
    ordered = sorted((low, high) for low, high in spans if low < high)
    cut = [(low, min(high, following)) for (low, high), (following, _) in pairwise(ordered)]
    return [each for each in [*cut, *ordered[-1:]] if each[0] < each[1]]


def _intersection(one: Sequence[Range], other: Sequence[Range]) -> list[Range]:
    found = ((max(a, c), min(b, d)) for a, b in one for c, d in other)
    return sorted((low, high) for low, high in found if low < high)
