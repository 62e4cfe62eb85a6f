"""A recorder's background duties: asking for ends, closing gaps, and maintaining the table.

Gaps come from interrupted back-fills, and from batches that could not be unpacked when they were read. Offsets that
release 0.4 recorded over AMQP 0.9.1 are recorded again with the stream protocol.
"""

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from relatum.errors import (
    BrokerUnavailable,
    CoverageConflict,
    DatabaseUnavailable,
    RelatumError,
    StreamNotFound,
    StreamUnavailable,
)
from relatum.reading import StreamBounds
from relatum.recording.filler import TURN_S, Filler
from relatum.recording.pruning import prune_expired, prune_receipts
from relatum.recording.ranges import gaps
from relatum.recording.stream_recording import LOOK_S, OpenTail, StreamRecording
from relatum.store.catalog import StreamRow, key_definitions
from relatum.store.coverage import CoverageRow, Range, coverage_by_stream
from relatum.store.database import transaction
from relatum.store.parts import (
    PART_BYTES,
    close_parts,
    drop_parts,
    empty_parts,
    retain_from,
    table_parts_of,
    turn_parts,
)
from relatum.waiting import QUESTION_S, backoff, ended, within

if TYPE_CHECKING:
    from relatum.recording.recorder_group import RecorderGroup

logger = logging.getLogger("relatum.recorder")

LOOK_TIME_S: Final = 2.0
"""Time limit for asking for one stream's ends, in seconds: the other streams wait for it."""

UNTOUCHED_S: Final = 5.0
"""Seconds for which a gap must be unchanged before it is closed: a running back-fill changes it all the time."""

ROUND_S: Final = 2.0
"""Seconds between two rounds of deleting rows of messages that retention dropped."""

PRUNE_S: Final = 0.5
"""Seconds that one round spends on it."""

TEND_S: Final = 60.0
"""Seconds between two checks of closed parts and old receipts. An attempt that gives way to a reader delays lookups by
50 ms."""

Recorded = tuple[StreamRecording, StreamRow, OpenTail]
"""A stream that is recorded now, with its row and tail."""


class Upkeep:
    """Three duties; each makes one blocking call at a time, in a thread."""

    def __init__(self, group: "RecorderGroup") -> None:
        self._group = group
        self._loop = group.loop
        self._engine = group.engine
        self._stop = group.stopping
        self._pauses = backoff(QUESTION_S)
        self._seen: dict[tuple[int, Range], float] = {}
        self._turn_at = self._tend_at = 0.0

    def begin(self) -> None:
        """Start the duties."""
        self._group.repeat(self._look, "asking for the ends of streams")
        self._group.repeat(self._close_gaps, "closing of gaps")
        self._group.repeat(self._tend, "maintaining the table")

    async def _close_gaps(self) -> float:
        recorded = self._group.recorded()
        has_work = await self._loop.ask(self._close, recorded) if recorded else False
        if has_work:
            self._pauses = backoff(QUESTION_S)
        return next(self._pauses)

    # --- the table ----------------------------------------------------------------------------------------------------

    async def _tend(self) -> float:
        if recorded := self._group.recorded():
            await self._loop.ask(self._tend_table, recorded)
        return min(ROUND_S, TURN_S)

    def _tend_table(self, recorded: Sequence[Recorded]) -> None:
        """Maintain the table's parts, and delete what is too old. Every recorder does this. See docs/adr/0023."""
        now = time.monotonic()
        if now >= self._turn_at:
            # Make the next part ahead of time.
            self._turn_at = now + TURN_S
            found = turn_parts(self._engine, PART_BYTES)
            if now >= self._tend_at:
                self._tend_at = now + TEND_S
                close_parts(self._engine, found)
                empty_parts(self._engine)
                if rows := sum(drop_parts(self._engine).values()):
                    logger.info("dropped %d rows of messages that are no longer retained", rows, extra={"rows": rows})
                prune_receipts(self._engine)
        due = [(stream, row, tail.retained_from) for stream, row, tail in recorded]
        if due := [(stream, row, first) for stream, row, first in due if first > stream.pruned_to]:
            self._prune(due)

    def _prune(self, due: Sequence[tuple[StreamRecording, StreamRow, int]]) -> None:
        """Delete some rows of messages that retention dropped, in parts that are still written."""
        until = time.monotonic() + PRUNE_S
        with transaction(self._engine) as connection:
            retain_from(connection, {row.stream_id: first for _, row, first in due})
            parts = [part.part for part in table_parts_of(connection) if part.is_opened and not part.is_closed]
        for stream, row, first in due:
            while prune_expired(self._engine, row, first, parts=parts):
                if time.monotonic() >= until:
                    return
            stream.pruned_to = first

    # --- ends ---------------------------------------------------------------------------------------------------------

    async def _look(self) -> float:
        """Ask for the ends of the stream that is due next, unless another process records it."""
        looked_at = [
            each
            for each in self._group.streams()
            if not each.progress.is_standby
            and not (each.tail is not None and each.tail.is_closing)
            and not (each.row is None and each.following)
        ]
        stream = min(looked_at, key=lambda each: each.look_at, default=None)
        if stream is None or stream.look_at > time.monotonic():
            return min(LOOK_S / 2, stream.look_at - time.monotonic()) if stream is not None else LOOK_S / 2
        stream.look_soon()
        tail = stream.tail
        is_known = tail is not None and tail.is_known
        try:
            bounds = await self._loop.ask(self._bounds, stream.name)
        except StreamNotFound:
            stream.progress.show(None)
        except RelatumError as error:
            # The follower reports outages.
            logger.debug("the end of stream %r is unknown now: %s", stream.name, ended(error))
        else:
            stream.progress.show(bounds.last)
            if tail is not None and bounds.first is not None:
                tail.first_offset = bounds.first
                if is_known:
                    tail.retained_from = bounds.first
        return 0.0

    def _bounds(self, name: str) -> StreamBounds:
        with within(LOOK_TIME_S):
            return self._group.reader().bounds(name)

    # --- gaps ---------------------------------------------------------------------------------------------------------

    def _close(self, recorded: list[Recorded]) -> bool:
        """Close gaps that stayed unchanged long enough; return True if some were closed, or will be soon."""
        with transaction(self._engine) as connection:
            definitions = key_definitions(connection)
            ranges = coverage_by_stream(connection, [row.stream_id for _, row, _ in recorded])
        now, seen = time.monotonic(), self._seen
        self._seen = {}
        has_work = False
        failed: Exception | None = None
        for stream, row, tail in recorded:
            found = gaps(ranges[row.stream_id], tail.first_offset)
            self._seen |= {(row.stream_id, gap): seen.get((row.stream_id, gap), now) for gap in found}
            due = [gap for gap in found if now - self._seen[row.stream_id, gap] >= UNTOUCHED_S]
            has_work |= len(due) < len(found)
            again = recorded_over_amqp(ranges[row.stream_id], tail.first_offset)
            if self._stop.is_set() or not (due or again):
                continue
            filler = Filler(self._engine, self._group.reader(), row, definitions, stop=self._stop)
            try:
                for record, parts in ((filler.fill, due), (filler.record_again, again)):
                    for part in parts:
                        has_work |= self._mend(row, record, part)
            except StreamUnavailable as error:
                failed = error
            except (BrokerUnavailable, DatabaseUnavailable):
                raise
            except Exception as error:  # noqa: BLE001 - an error of one stream stops no other
                failed = error
            finally:
                stream.progress.lost(filler.lost_offsets)
        if failed is not None:
            raise failed
        return has_work

    def _mend(self, row: StreamRow, fill: Callable[[Range], bool], part: Range) -> bool:
        """Record some offsets; return False if that was not possible now."""
        if self._stop.is_set():
            return False
        extra = {"stream": row.name, "from": part[0], "to": part[1]}
        logger.info("recording remaining offsets %d to %d of stream %r", part[0], part[1] - 1, row.name, extra=extra)
        with suppress(CoverageConflict, StreamNotFound):
            # Another process works on it, or the stream was replaced, which its recorder notices.
            return fill(part)
        return False


def recorded_over_amqp(rows: Sequence[CoverageRow], first: int) -> list[Range]:
    """Return the ranges, except the tail, that were recorded over AMQP 0.9.1 and have retained offsets."""
    return [
        (row.from_offset, row.to_offset)
        for row in rows
        if row.over_amqp and not row.is_tail and row.to_offset > max(first, row.from_offset)
    ]
