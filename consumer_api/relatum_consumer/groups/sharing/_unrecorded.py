"""Streams that hold more than is recorded while nobody records them: a consumer would wait there without a word."""

import logging
import math
import time
from typing import Final

from relatum.errors import AccessRefused, NotFound, Transient
from relatum.store.coverage import CoverageRow
from relatum_consumer.lookups import Catalog, Servers, all_names, attended, coverage_by_stream

logger = logging.getLogger("relatum.groups")

CHECKS_S: Final = 5.0
"""Seconds until the second check: longer than a recorder's lease, so one may take over from another unnoticed."""

CHECKS_S_MAX: Final = 60.0
"""Seconds between two checks at most; the time doubles, since each asks the broker for the ends of streams."""


class Unrecorded:
    """Warns of messages that nobody records, once for each stream."""

    def __init__(self, catalog: Catalog, names: tuple[str, ...] | None) -> None:
        self._catalog = catalog
        self._names = names
        self._told: set[str] = set()
        self._seen: set[str] = set()
        self._pause_s = CHECKS_S
        self._next_at = -math.inf

    def check(self, *, is_end: bool) -> None:
        """Look at the streams, where it is time to."""
        now = time.monotonic()
        if now < self._next_at and not is_end:
            return
        self._next_at, self._pause_s = now + self._pause_s, min(2 * self._pause_s, CHECKS_S_MAX)
        try:
            found = self._find()
        except Transient:
            return  # Whoever reads on meets it, and says so; a hint is no reason to end.
        for stream, count in found.items():
            if is_end or stream in self._seen:
                self._told.add(stream)
                logger.warning(
                    "%d messages of the stream %r are not recorded, and nobody records it: `relatum record %s`",
                    count,
                    stream,
                    stream,
                )
        self._seen = set(found)

    def interrupted(self) -> None:
        """Note that servers are away: the recorders' leases run out meanwhile, and say nothing until they are back."""
        self._seen = set()
        self._next_at = time.monotonic() + CHECKS_S_MAX

    def _find(self) -> dict[str, int]:
        """How many messages lie behind what is recorded of streams that nobody records, where there are any."""
        present = self._catalog.streams(self._names)
        told = self._told | attended(self._catalog, [stream.name for stream in present])
        ends: dict[str, tuple[int, int]] = {}
        for name in all_names(self._catalog.servers, present, self._names):
            if name not in told and (end := _end(self._catalog.servers, name)) is not None:
                ends[name] = end
        # The coverage comes last: what a recorder wrote meanwhile counts.
        ranges = coverage_by_stream(self._catalog.servers, [stream for stream in present if stream.name in ends])
        recorded = {stream.name: _stop(ranges.get(stream.stream_id, [])) for stream in present}
        counts = {name: min(last + 1 - recorded.get(name, 0), last + 1 - first) for name, (first, last) in ends.items()}
        return {name: count for name, count in counts.items() if count > 0}


def _end(servers: Servers, stream: str) -> tuple[int, int] | None:
    """The first and last offset of a stream; None where it has none, or does not say."""
    try:
        first, last = servers.bounds(stream)
    except (NotFound, AccessRefused):
        return None
    return None if first is None or last is None else (first, last)


def _stop(rows: list[CoverageRow]) -> int:
    return max((row.to_offset for row in rows), default=0)
