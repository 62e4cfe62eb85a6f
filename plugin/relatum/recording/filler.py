"""A filler records offsets before the tail, one part of a stream at a time. Any number of processes may do so.

A filler writes rows first, without waiting for locks. Then it locks the stream briefly: if no other process has covered
the part, it commits rows and coverage together; otherwise it rolls the rows back and reads the coverage again. So
nothing is written twice, and a killed back-fill leaves no rows without coverage.
"""

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from shlex import quote
from typing import Final

import sqlalchemy as sa

from relatum.common.checks import seconds_text
from relatum.errors import CoverageConflict, ReadTimeout, StreamUnavailable
from relatum.keys import KeyDefinition
from relatum.reading import RecordBatch, StreamReader, bounds_of_known, leaders_bounds
from relatum.reading.extractor import Extractor
from relatum.recording.batch import Batch, readable
from relatum.recording.commit import recording, write_rows
from relatum.recording.ranges import WINDOW_OFFSETS, Segment, lock_ranges, uncover, unrecorded, widened
from relatum.recording.tails import add_event, is_same
from relatum.store.catalog import StreamRow, key_definitions, lock_stream
from relatum.store.coverage import (
    TIME,
    CoverageRow,
    Range,
    coverage_of,
    join_range,
    last_position,
    merged,
    missing,
)
from relatum.store.database import transaction
from relatum.store.parts import advance_parts
from relatum.store.rows import count_skips

CONFLICTS_MAX: Final = 20
"""Maximum retries of a part after other processes changed its coverage."""

SILENCE_S: Final = 30.0
"""Seconds without an expected message after which a read raises `ReadTimeout`."""

PAUSE_S_MAX: Final = 2.0
"""Maximum seconds that a throttled reader pauses a subscription; before longer pauses, it ends the subscription."""

TURN_S: Final = 5.0
"""Seconds between two checks of the open part's size; at 200,000 rows a second it grows by a million in between."""


class RateLimit:
    """Limits a reader to a number of messages per second; None for no limit."""

    def __init__(self, messages_per_s: float | None, stop: threading.Event) -> None:
        self._seconds_each = 0.0 if messages_per_s is None else 1 / messages_per_s
        self._stop = stop
        self._due_at = time.monotonic()

    def count(self, messages: int) -> float:
        """Count messages, and return the seconds to wait now."""
        self._due_at += messages * self._seconds_each
        return max(0.0, self._due_at - time.monotonic())

    def wait(self) -> None:
        """Wait until the next message is due, or until `stop` is set."""
        self._stop.wait(max(0.0, self._due_at - time.monotonic()))


def check_same(reader: StreamReader, stream: str, rows: Sequence[CoverageRow]) -> None:
    """Raise `CoverageConflict` if the coverage is that of an earlier stream of this name."""
    position = last_position(rows)
    if position is not None and not is_same(reader, stream, position):
        raise CoverageConflict(
            f"stream {stream!r} is not the one that was recorded: run `relatum record {quote(stream)}` first",
            stream=stream,
        )


class Filler:
    """Records offsets of one stream that lack some key.

    `on_commit`: Called after each transaction with the messages covered, the rows written, and the offset reached.
    """

    def __init__(
        self,
        engine: sa.Engine,
        reader: StreamReader,
        stream: StreamRow,
        definitions: Sequence[KeyDefinition],
        *,
        on_commit: Callable[[int, int, int], None] | None = None,
        pace: RateLimit | None = None,
        stop: threading.Event | None = None,
    ) -> None:
        self._engine = engine
        self._reader = reader
        self._stream = stream
        self._definitions = definitions
        self._on_commit = on_commit
        self._stop = stop or threading.Event()
        self._pace = pace or RateLimit(None, self._stop)
        self._has_covered = False
        self._part_checked_at = time.monotonic()
        self.lost_offsets = 0
        """Offsets that retention dropped before they were filled."""

    def complete(self, segment: Segment) -> bool:
        """Record a segment, except for parts that other processes record; return whether this process covered any."""
        conflicts, least = 0, segment.to_offset - segment.from_offset
        self._has_covered = False
        while True:
            left = unrecorded(self._coverage(), (segment.from_offset, segment.to_offset), segment.key_ids)
            size = sum(part.to_offset - part.from_offset for part in left)
            if size < least:
                # Another process is filling it, too, so there is progress.
                conflicts, least = 0, size
            try:
                for part in left:
                    self._fill(part)
            except CoverageConflict:
                conflicts += 1
                if conflicts > CONFLICTS_MAX:
                    raise
            else:
                return self._has_covered

    def record_again(self, part: Range) -> bool:
        """Record some offsets again, window by window; return False if some cannot be unpacked, or on `stop`."""
        has_all = True
        first = bounds_of_known(self._reader, self._stream.name).first or 0
        for start in range(max(first, part[0]), part[1], WINDOW_OFFSETS):
            if self._stop.is_set():
                return False
            has_all &= self._rewrite((start, min(part[1], start + WINDOW_OFFSETS)))
        return has_all

    def _rewrite(self, part: Range) -> bool:
        """Remove some offsets from the table and record them again, in one transaction.

        A lookup reads the coverage before the index, so it never misses a row that exists before and after. Returns
        False, without a change, if a message cannot be unpacked. Offsets that retention dropped are not changed.
        """
        conflicts, wanted = 0, part
        while True:
            first = bounds_of_known(self._reader, self._stream.name).first
            if first is None or first >= wanted[1]:
                return True
            with transaction(self._engine) as connection:
                part = widened(connection, self._stream.stream_id, wanted, first)
                self._definitions = key_definitions(connection)
            work = self._read(part)
            if work is None:
                return False
            try:
                return self._replace(part, work, first)
            except CoverageConflict:
                conflicts += 1
                if conflicts > CONFLICTS_MAX:
                    raise

    def _read(self, part: Range) -> "_Work | None":
        """Read a part for all keys and the time; None if a message cannot be unpacked here."""
        segment = self._all_keys(part)
        work = _Work(self._stream.stream_id, segment, Extractor(self._definitions))
        for records in self._records(segment):
            if any(reason is not None for _, reason in readable(records)):
                return None
            work.add(records)
        work.batch.receipts.clear()
        return None if self._stop.is_set() else work

    def _replace(self, part: Range, work: "_Work", first: int) -> bool:
        stream = self._stream
        with transaction(self._engine) as connection:
            rows = lock_ranges(connection, stream.stream_id, part)
            if key_definitions(connection) != self._definitions:
                text = f"key definitions changed while stream {stream.name!r} was read; nothing was written: retry"
                raise CoverageConflict(text, stream=stream.name)
            taken = uncover(connection, self._reader, stream, part, first)
            now_first = bounds_of_known(self._reader, stream.name).first
            is_behind = any(row.is_tail and row.to_offset >= part[1] for row in rows)
            # The coverage may be that of messages which took the place of those that were read.
            is_read = not work.batch.messages or is_same(self._reader, stream.name, work.batch.position())
            if taken != part or now_first is None or now_first > part[0] or not is_behind or not is_read:
                offsets = f"offsets {part[0]} to {part[1] - 1} of stream {stream.name!r}"
                text = f"retention, a lost tail or another process changed {offsets}; nothing was written: retry"
                raise CoverageConflict(text, stream=stream.name)
            check_same(self._reader, stream.name, rows)
            write_rows(connection, [(work.batch, None)])
            join_range(connection, coverage_of(connection, [stream.stream_id]), work.covered(part[1]))
        self._open_next_part()
        return True

    def _all_keys(self, part: Range) -> Segment:
        key_ids = frozenset(key.key_id for key in self._definitions)
        return Segment(*part, key_ids | ({TIME} if self._stream.record_time else set()))

    def fill(self, part: Range) -> bool:
        """Record some offsets for all keys in force and the time; return whether this process covered anything."""
        segment = self._all_keys(part)
        return bool(segment.key_ids) and self.complete(segment)

    def _coverage(self) -> list[CoverageRow]:
        """Read the stream's coverage. Raises `CoverageConflict` unless the stream is the recorded one."""
        with transaction(self._engine) as connection:
            rows = coverage_of(connection, [self._stream.stream_id])
        check_same(self._reader, self._stream.name, rows)
        return rows

    def _fill(self, part: Segment) -> None:
        extractor = Extractor([key for key in self._definitions if key.key_id in part.key_ids])
        work = _Work(self._stream.stream_id, part, extractor)
        for records in self._records(part):
            if records.first_offset > work.read_to:
                self._skip_missing(work, records.first_offset)
            for run, reason in readable(records):
                if reason is None:
                    work.add(run)
                else:
                    # The run stays uncovered, for a process that can unpack it.
                    if work.read_to > work.covered_to:
                        self._commit(work, work.read_to)
                    work.skip_to(run.last_offset + 1)
            is_due = self._pace.count(len(records)) > PAUSE_S_MAX
            if work.batch.is_full or is_due:
                self._commit(work, work.read_to)
            if self._stop.is_set():
                break
        if not self._stop.is_set():
            if work.read_to < part.to_offset:
                self._skip_missing(work, part.to_offset)
            work.read_to = part.to_offset
        self._commit(work, work.read_to)

    def _records(self, part: Segment) -> Iterator[RecordBatch]:
        """Yield a part's records. Each scan ends where the stream ended when the scan began, so scan repeatedly."""
        read_to, is_end_checked = part.from_offset, False
        while read_to < part.to_offset:
            before = read_to
            leaders_bounds(self._reader, self._stream.name)
            for records in self._scan(read_to, part.to_offset):
                read_to = records.last_offset + 1
                yield records
                if self._pace.count(0) > PAUSE_S_MAX:
                    break
                self._pace.wait()
            self._pace.wait()
            if self._stop.is_set():
                return
            if read_to > before:
                is_end_checked = False
            elif is_end_checked:
                return
            else:
                # Scan once more: this scan may have ended early on a lagging node, before its leader was reachable.
                self._check_end(part)
                is_end_checked = True

    def _scan(self, start: int, stop: int) -> Iterator[RecordBatch]:
        silent_s = 0.0
        for records in self._reader.batches(self._stream.name, start, stop=stop, follow=False, idle_s=1.0):
            if records is not None:
                silent_s = 0.0
                yield records
                continue
            silent_s += 1.0
            if self._stop.is_set():
                return
            if silent_s >= SILENCE_S:
                silence = seconds_text(SILENCE_S)
                raise ReadTimeout(f"the stream {self._stream.name!r} delivered nothing for {silence}; retry later")

    def _check_end(self, part: Segment) -> None:
        """Raise unless the stream reaches the part's end."""
        last = leaders_bounds(self._reader, self._stream.name).last
        if last is not None and last < part.to_offset - 1:
            raise StreamUnavailable(
                f"the stream {self._stream.name!r} ends at {last}, but should reach {part.to_offset - 1}: it lost its "
                "tail; retry later",
                stream=self._stream.name,
            )

    def _skip_missing(self, work: "_Work", to_offset: int) -> None:
        """Skip offsets without messages: healthy streams have some. Offsets that retention dropped become a hole."""
        first = leaders_bounds(self._reader, self._stream.name).first
        first_kept = to_offset if first is None else min(first, to_offset)
        if first_kept <= work.read_to:
            return
        self._commit(work, work.read_to)
        with transaction(self._engine) as connection:
            lock_stream(connection, work.stream_id)
            rows = coverage_of(connection, [work.stream_id])
            known = merged((row.from_offset, row.to_offset) for row in rows)
            for start, end in missing((work.read_to, first_kept), known):
                join_range(connection, rows, CoverageRow(work.stream_id, start, end, kind="hole"))
                rows = coverage_of(connection, [work.stream_id])
                add_event(connection, work.stream_id, "hole", (start, end), "retention was faster than the back-fill")
                self.lost_offsets += end - start
        work.skip_to(first_kept)

    def _commit(self, work: "_Work", to_offset: int) -> None:
        """Write the batch, and cover the offsets before `to_offset`, in one transaction."""
        # The stream may have been declared again, or may have lost its tail, before the last scan.
        self._coverage()
        if to_offset <= work.covered_to:
            return
        batch, stream_id = work.batch, work.stream_id
        part = Segment(work.covered_to, to_offset, work.key_ids)
        batch.receipts.clear()  # These messages are too old for a publisher to wait for their receipts.
        span = recording([(self._stream.name, batch)], "backfill")
        with span, transaction(self._engine) as connection:
            write_rows(connection, [(batch, None)])
            lock_stream(connection, stream_id)
            rows = coverage_of(connection, [stream_id])
            self._check_free(rows, part)
            join_range(connection, rows, work.covered(to_offset))
            # Last, under the stream's lock: a recorder that has locked these counters never waits for this process.
            count_skips(connection, batch.skips)
        self._has_covered = True
        work.skip_to(to_offset)
        self._open_next_part()
        if self._on_commit is not None:
            self._on_commit(batch.messages, len(batch.lines), to_offset)

    def _open_next_part(self) -> None:
        """Open the table's next part when necessary: a back-fill writes fast, and possibly no recorder runs."""
        if time.monotonic() - self._part_checked_at >= TURN_S:
            self._part_checked_at = time.monotonic()
            advance_parts(self._engine)

    def _check_free(self, rows: Iterable[CoverageRow], part: Segment) -> None:
        covering = list(rows)
        if unrecorded(covering, (part.from_offset, part.to_offset), part.key_ids) != [part]:
            text = f"another process recorded some offsets of stream {self._stream.name!r} first; retry"
            raise CoverageConflict(text, stream=self._stream.name)
        tail = next((row for row in covering if row.is_tail), None)
        if tail is None or tail.to_offset < part.to_offset:
            # The stream now has other messages than those that were read.
            name = self._stream.name
            text = f"the stream {name!r} lost its tail: run `relatum record {quote(name)}` first"
            raise CoverageConflict(text, stream=name)


class _Work:
    """A part in progress: covered up to `covered_to`, read up to `read_to`; `batch` holds the rows in between."""

    def __init__(self, stream_id: int, part: Segment, extractor: Extractor) -> None:
        self.stream_id = stream_id
        self.key_ids = part.key_ids
        self._extractor = extractor
        self.covered_to = self.read_to = part.from_offset
        self.batch = self._new_batch()

    def _new_batch(self) -> Batch:
        return Batch(self.stream_id, self._extractor, with_time=TIME in self.key_ids)

    def add(self, records: RecordBatch) -> None:
        self.batch.add(records)
        self.read_to = records.last_offset + 1

    def covered(self, to_offset: int) -> CoverageRow:
        """Return the range that was read, up to an offset."""
        key_ids, with_time = tuple(sorted(self.key_ids - {TIME})), TIME in self.key_ids
        read = CoverageRow(self.stream_id, self.covered_to, to_offset, key_ids, with_time)
        return read.known_by(self.batch.position()) if self.batch.messages else read

    def skip_to(self, offset: int) -> None:
        """Continue after offsets that were committed or are gone."""
        self.covered_to, self.read_to = offset, max(offset, self.read_to)
        self.batch = self._new_batch()
