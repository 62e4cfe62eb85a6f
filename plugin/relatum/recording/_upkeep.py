"""What a recorder looks after in the background while it records: gaps, the parts of the table, what has expired.

What is retained and not recorded is always somebody's work. An interrupted back-fill leaves a gap; so do batches that
could not be unpacked when they were read. And what release 0.4 recorded over AMQP 0.9.1 is read again by the stream
protocol.
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
from relatum.recording._fill import TURN_S, Filler
from relatum.recording._prune import prune_expired, prune_receipts
from relatum.recording._ranges import gaps
from relatum.recording._stream_recording import OpenTail, StreamRecording
from relatum.recording._streams import Streams
from relatum.recording._tails import late_holes
from relatum.store.catalog import StreamRow, key_definitions
from relatum.store.coverage import CoverageRow, Range, coverage_of
from relatum.store.parts import (
    PART_BYTES,
    close_parts,
    drop_parts,
    empty_parts,
    retain_from,
    table_parts_of,
    turn_parts,
)
from relatum.store.translation import translated_errors
from relatum.waiting import QUESTION_S, Duty, backoff

logger = logging.getLogger("relatum.recorder")

UNTOUCHED_S: Final = 5.0
"""Seconds that a gap must stay as it is before it is closed here: a back-fill that runs changes it all the time."""

TEND_S: Final = 60.0
"""Seconds between two looks at closed parts. A try that gives way to a reader keeps look-ups waiting for 50 ms."""

BEGUN_S: Final = 1.0
"""Seconds between looks whether anything is recorded yet; nobody is asked for that."""

RECEIPTS_S: Final = 60.0
"""Seconds between looks for receipts that nobody waits for any more."""

PRUNE_S: Final = 0.5
"""Seconds of one round spent on deleting rows of dropped messages."""

PRUNE_EVERY_S: Final = 2.0
"""Seconds between two such rounds."""

Recorded = tuple[StreamRecording, StreamRow, OpenTail]
"""A stream that is recorded now."""


class Upkeep:
    """Three duties, each of which does one thing after the other in a thread."""

    def __init__(self, streams: Streams, engine: sa.Engine, stop: threading.Event) -> None:
        self._streams = streams
        self._loop = streams.loop
        self._engine = engine
        self._stop = stop
        self._pauses = backoff(QUESTION_S)
        self._seen: dict[tuple[int, Range], float] = {}
        self._receipts_at = self._tend_at = time.monotonic()

    def begin(self) -> list[Duty]:
        """Begin; gives what goes on until it is cancelled."""
        repeat, outages = self._loop.repeat, self._streams.outages
        return [
            repeat(self._close_gaps, "closing of gaps", outages),
            repeat(self._tend, "looking after the parts of the table", outages),
            repeat(self._prune, "deleting what has expired", outages),
        ]

    async def _close_gaps(self) -> float:
        recorded = self._streams.recorded()
        has_work = await self._loop.ask(self._look, recorded) if recorded else False
        if has_work:
            self._pauses = backoff(QUESTION_S)
        return next(self._pauses)

    async def _tend(self) -> float:
        return await self._loop.ask(self._tend_parts) if self._streams.recorded() else BEGUN_S

    async def _prune(self) -> float:
        recorded = self._streams.recorded()
        due = [(stream, row, tail.retained_from) for stream, row, tail in recorded]
        due = [(stream, row, first) for stream, row, first in due if first > stream.pruned_to]
        if due:
            await self._loop.ask(self._prune_streams, due)
        if recorded and time.monotonic() - self._receipts_at >= RECEIPTS_S:
            self._receipts_at = time.monotonic()
            await self._loop.ask(prune_receipts, self._engine)
        return PRUNE_EVERY_S

    def _tend_parts(self) -> float:
        """Make the next part ahead of time, close full ones, and drop those of which nothing is retained.

        Each recorder does; who comes second finds nothing to do. See docs/adr/0023.
        """
        found = turn_parts(self._engine, PART_BYTES)
        if time.monotonic() >= self._tend_at:
            self._tend_at = time.monotonic() + TEND_S
            close_parts(self._engine, found)
            empty_parts(self._engine)
            if dropped := drop_parts(self._engine):
                rows = sum(dropped.values())
                logger.info("dropped %d rows of messages that are not retained", rows, extra={"rows": rows})
        return TURN_S

    # --- gaps ---------------------------------------------------------------------------------------------------------

    def _look(self, recorded: list[Recorded]) -> bool:
        """Close what has been open for long enough; True where something was closed, or is to be soon."""
        ranges: dict[int, list[CoverageRow]] = {row.stream_id: [] for _, row, _ in recorded}
        with translated_errors(), self._engine.begin() as connection:
            definitions = key_definitions(connection)
            for range_ in coverage_of(connection, sorted(ranges)):
                ranges[range_.stream_id].append(range_)
        open_now: dict[tuple[int, Range], float] = {}
        has_work = False
        failed: Exception | None = None
        for stream, row, tail in recorded:
            found = gaps(ranges[row.stream_id], tail.first_offset)
            for gap in found:
                open_now[row.stream_id, gap] = self._seen.get((row.stream_id, gap), time.monotonic())
            due = [gap for gap in found if time.monotonic() - open_now[row.stream_id, gap] >= UNTOUCHED_S]
            has_work |= len(due) < len(found)
            try:
                for fill, part in (
                    *((Filler.fill, gap) for gap in due),
                    *((Filler.record_again, part) for part in again(ranges[row.stream_id], tail.first_offset)),
                ):
                    filler = Filler(self._engine, self._streams.follower.reader(), row, definitions, stop=self._stop)
                    has_work |= self._mend(stream, row, partial(fill, filler), part)
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

    def _mend(self, stream: StreamRecording, row: StreamRow, fill: Callable[[Range], bool], part: Range) -> bool:
        """Record some offsets; False where that could not be done now."""
        if self._stop.is_set():
            return False
        extra = {"stream": row.name, "from": part[0], "to": part[1]}
        logger.info("recording offsets %d to %d of stream %r, left behind", part[0], part[1] - 1, row.name, extra=extra)
        with suppress(CoverageConflict, StreamNotFound):
            # Somebody else works on it, or it is another stream now, which its recorder notices.
            has_done = fill(part)
            with translated_errors(), self._engine.begin() as connection:
                holes = late_holes(connection, [row.stream_id])
            stream.progress.lost(holes.get(row.stream_id, []))
            return has_done
        return False

    # --- what has expired ---------------------------------------------------------------------------------------------

    def _prune_streams(self, due: Sequence[tuple[StreamRecording, StreamRow, int]]) -> None:
        """Delete some rows of messages that retention has dropped: parts of which nothing is retained go as a whole."""
        until = time.monotonic() + PRUNE_S
        with translated_errors(), self._engine.begin() as connection:
            retain_from(connection, {row.stream_id: first for _, row, first in due})
            parts = [part.part for part in table_parts_of(connection) if part.is_opened and not part.is_closed]
        for stream, row, first in due:
            while prune_expired(self._engine, row, first, parts=parts):
                if time.monotonic() >= until:
                    return
            stream.pruned_to = first
            if time.monotonic() >= until:
                return


def again(rows: Sequence[CoverageRow], first: int) -> list[Range]:
    """What AMQP 0.9.1 recorded and is retained, in part at least, but for a range that still grows."""
    return [
        (row.from_offset, row.to_offset)
        for row in rows
        if row.over_amqp and not row.is_tail and row.to_offset > max(first, row.from_offset)
    ]
