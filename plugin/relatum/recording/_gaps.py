"""Closing gaps in the background: what is retained and not recorded is always somebody's work.

An interrupted back-fill leaves a gap; so do batches that could not be unpacked when they were read. And what
release 0.4 recorded over AMQP 0.9.1 is read again by the stream protocol. One thread does it for all streams of a
process, one part after another, while live recording goes on.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Final

import sqlalchemy as sa

from relatum.errors import BrokerUnavailable, CoverageConflict, DatabaseUnavailable, StreamNotFound, StreamUnavailable
from relatum.following import Follower
from relatum.recording._fill import Filler
from relatum.recording._opening import late_holes
from relatum.recording._ranges import gaps
from relatum.recording._track import Track, Tracks, Worker
from relatum.recording._writer import Writer
from relatum.store.catalog import StreamRow, key_definitions
from relatum.store.coverage import CoverageRow, Range, coverage_of
from relatum.store.translation import translated_errors
from relatum.waiting import QUESTION_S, Outages, backoff

logger = logging.getLogger("relatum.recorder")

UNTOUCHED_S: Final = 5.0
"""Seconds that a gap must stay as it is before it is closed here: a back-fill that runs changes it all the time."""

_WHO: Final = "closing of gaps"


class GapCloser(Worker):
    """Looks for gaps in what this process records, and closes them."""

    def __init__(
        self,
        engine: sa.Engine,
        follower: Follower,
        tracks: Tracks,
        outages: Outages,
        stop: threading.Event,
    ) -> None:
        super().__init__("relatum-gaps")
        self._engine = engine
        self._follower = follower
        self._tracks = tracks
        self._outages = outages
        self._stop = stop
        self._seen: dict[tuple[int, Range], float] = {}

    def _run(self) -> None:
        pauses = backoff(QUESTION_S)
        while not self._stop.is_set():
            # Also woken by whoever finds that what was away is back: else this one would be the last to say so.
            self._outages.wait(next(pauses))
            if self._stop.is_set():
                return
            try:
                if self._look():
                    pauses = backoff(QUESTION_S)
            except Exception as error:  # noqa: BLE001 - said once, and tried again
                if self._stop.is_set():
                    return
                self._outages.failed(_WHO, error)
            else:
                self._outages.over(_WHO)

    def _look(self) -> bool:
        """Close what has been open for long enough; True where something was closed, or is to be soon."""
        recorded = self._tracks.recorded()
        if not recorded:
            return False
        ranges: dict[int, list[CoverageRow]] = {row.stream_id: [] for _, row, _ in recorded}
        with translated_errors(), self._engine.begin() as connection:
            for row in coverage_of(connection, sorted(ranges)):
                ranges[row.stream_id].append(row)
        open_now: dict[tuple[int, Range], float] = {}
        has_work = False
        failed: Exception | None = None
        for track, stream, writer in recorded:
            try:
                has_work |= self._look_at(track, stream, writer, ranges[stream.stream_id], open_now)
            except StreamUnavailable as error:
                failed = error
            except (BrokerUnavailable, DatabaseUnavailable):
                raise
            except Exception as error:  # noqa: BLE001 - what is wrong with one stream keeps nobody from the others
                failed = error
            if self._stop.is_set():
                break
        self._seen = open_now
        if failed is not None:
            raise failed
        return has_work

    def _look_at(
        self,
        track: Track,
        stream: StreamRow,
        writer: Writer,
        rows: list[CoverageRow],
        open_now: dict[tuple[int, Range], float],
    ) -> bool:
        """The same for one stream, whose gaps are noted."""
        has_work = False
        found = gaps(rows, writer.first_offset)
        for gap in found:
            open_now[stream.stream_id, gap] = self._seen.get((stream.stream_id, gap), time.monotonic())
        for gap in found:
            if time.monotonic() - open_now[stream.stream_id, gap] >= UNTOUCHED_S:
                has_work |= self._for(track, stream, partial(self._close, gap))
            else:
                has_work = True
        for range_ in again(rows, writer.first_offset):
            has_work |= self._for(track, stream, partial(self._read_again, range_))
        return has_work

    def _for(self, track: Track, stream: StreamRow, work: Callable[[Filler, StreamRow], bool]) -> bool:
        """Do something for a stream; False where it could not be done now."""
        reader = self._follower.reader()
        if self._stop.is_set():
            return False
        with translated_errors(), self._engine.begin() as connection:
            definitions = key_definitions(connection)
        filler = Filler(self._engine, reader, stream, definitions, stop=self._stop)
        with suppress(CoverageConflict, StreamNotFound):
            # Somebody else works on it, or it is another stream now, which its recorder notices.
            has_done = work(filler, stream)
            with translated_errors(), self._engine.begin() as connection:
                holes = late_holes(connection, [stream.stream_id])
            track.progress.lost(holes.get(stream.stream_id, []))
            return has_done
        return False

    def _read_again(self, range_: CoverageRow, filler: Filler, row: StreamRow) -> bool:
        extra = {"stream": row.name, "from": range_.from_offset, "to": range_.to_offset}
        text = "reading offsets %d to %d of stream %r again, which AMQP 0.9.1 recorded"
        logger.info(text, range_.from_offset, range_.to_offset - 1, row.name, extra=extra)
        return filler.record_again((range_.from_offset, range_.to_offset))

    def _close(self, gap: Range, filler: Filler, row: StreamRow) -> bool:
        extra = {"stream": row.name, "from": gap[0], "to": gap[1]}
        logger.info("closing the gap from %d to %d of stream %r", gap[0], gap[1] - 1, row.name, extra=extra)
        return filler.fill(gap)


def again(rows: Sequence[CoverageRow], first: int) -> list[CoverageRow]:
    """The ranges that AMQP 0.9.1 recorded and that are retained, in part at least, but for one that still grows."""
    return [row for row in rows if row.over_amqp and not row.is_tail and row.to_offset > max(first, row.from_offset)]
