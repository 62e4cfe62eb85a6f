"""Messages of a stream that are read and not committed yet, as finished lines for COPY. Bounded."""

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby, pairwise
from typing import Final, NamedTuple, TypeAlias

from relatum.common.limits import TIME_BLOCK_DISORDER_US_MAX, TIME_BLOCK_MESSAGES_MAX
from relatum.reading import Message, Position, RecordBatch, UnreadableRecord, position_of
from relatum.recording.extractor import Extracted, Extractor
from relatum.store.rows import copy_text, needs_escape

BATCH_BYTES_MAX: Final = 4 << 20
"""Maximum bytes of COPY lines in a transaction, roughly: 100,000 rows, which take PostgreSQL half a second."""

LINE_BYTES: Final = 40
"""Bytes of a COPY line without its value, roughly."""

ROWS_AT_ONCE: Final = 256
"""For this many rows of a stream or more, the lines are made at once; for fewer, at the commit, with other streams'."""

BATCH_MESSAGES_MAX: Final = 50_000
"""Maximum messages in a transaction; reached if they have few keys."""

# --- the sparse index of times ----------------------------------------------------------------------------------------
#
# A row for each message would cost as much as a key's row and slow the recorder down by a third. A row for each 128
# messages costs less than a byte a message, and reading 128 messages takes less time than one attach. Invariants that
# keep a lookup by time exact, even if publishers' times are not in offset order:
#
# - every message with a time has a block whose [min_us, max_us] includes its time and whose offsets include its offset;
# - both ends of a block's range are times of messages in it;
# - a block of class c is at most 4**c microseconds wide, so blocks that can include a time t begin at most 4**c before.
#
# If times are in order, a block is one row of any width. If not, its messages are grouped by time, and a group is at
# most a second wide, so that a lookup never has to read blocks that span a day of disorder.


class TimeBlock(NamedTuple):
    """One row of the time index. Times and offsets are inclusive at both ends."""

    min_us: int
    max_us: int
    first_offset: int
    last_offset: int


def width_class(width_us: int) -> int:
    """Return the class of a width in microseconds: 0 for 0, else the smallest c >= 1 with width_us <= 4**c."""
    if width_us == 0:
        return 0
    return max(1, ((width_us - 1).bit_length() + 1) // 2)


def time_blocks(
    offsets: Sequence[int], times: Sequence[int], high_us: int | None
) -> tuple[list[TimeBlock], int | None]:
    """Return the blocks of consecutive messages, and the greatest time so far, including these messages."""
    if len(times) == 1:
        # Common: most streams of a large commit have one message.
        (at,) = times
        return [TimeBlock(at, at, offsets[0], offsets[0])], at if high_us is None or at > high_us else high_us
    blocks: list[TimeBlock] = []
    for start in range(0, len(offsets), TIME_BLOCK_MESSAGES_MAX):
        part = times[start : start + TIME_BLOCK_MESSAGES_MAX]
        places = offsets[start : start + TIME_BLOCK_MESSAGES_MAX]
        low, high = min(part), max(part)
        in_order = (high_us is None or low >= high_us) and all(a <= b for a, b in pairwise(part))
        if in_order or high - low <= TIME_BLOCK_DISORDER_US_MAX:
            blocks.append(TimeBlock(low, high, places[0], places[-1]))
        else:
            blocks.extend(_grouped(places, part))
        high_us = high if high_us is None else max(high_us, high)
    return blocks, high_us


def _grouped(offsets: Sequence[int], times: Sequence[int]) -> list[TimeBlock]:
    """Group messages by time; no group is wider than the allowed disorder."""
    groups: list[TimeBlock] = []
    members: list[int] = []
    first = last = 0
    for time_us, offset in sorted(zip(times, offsets, strict=True)):
        if members and time_us - first > TIME_BLOCK_DISORDER_US_MAX:
            groups.append(TimeBlock(first, last, min(members), max(members)))
            members = []
        if not members:
            first = time_us
        last = time_us
        members.append(offset)
    groups.append(TimeBlock(first, last, min(members), max(members)))
    return groups


# --- the batch --------------------------------------------------------------------------------------------------------


class Batch:
    """The rows of consecutive messages of one stream, ready to be written in one transaction."""

    def __init__(self, stream_id: int, extractor: Extractor, *, with_time: bool) -> None:
        self.stream_id = stream_id
        self._extractor = extractor
        self._with_time = with_time
        self.times: list[int] = []
        """The times of messages that have one, by `time_offsets`."""
        self.time_offsets: list[int] = []
        self._last: Message | None = None
        self._rows: list[_Row] = []
        self._lines: list[str] = []
        self.line_bytes = 0
        self.rows = 0
        self.messages = 0
        self.receipts: list[tuple[str, int]] = []
        self.skips: dict[tuple[int, int, str], int] = {}
        """How many values were not recorded, by stream, key and reason."""
        self.links: list[object] = []
        """Links to the spans that sent its first messages; empty without tracing."""
        self.last_offset = -1
        self.oldest_at: float | None = None
        """When its first message was written, in seconds since 1970."""
        self.newest_at = 0.0
        """The same for its last message."""

    @property
    def is_full(self) -> bool:
        """Whether it should be committed before more is added."""
        return self.line_bytes >= BATCH_BYTES_MAX or self.messages >= BATCH_MESSAGES_MAX

    def add(self, batch: RecordBatch) -> None:
        """Add the rows of a batch of records. Its offsets must follow those already added."""
        assert batch.first_offset > self.last_offset, "offsets only grow"
        chunk_ms = batch.chunk_ms
        # One at a time: the garbage collector would traverse a list of results again and again.
        for offset, raw in zip(batch.offsets, batch.records, strict=True):
            self._add(offset, self._extractor.from_record(raw, chunk_ms))
        if len(self._rows) >= ROWS_AT_ONCE:
            self._lines.append(_lines_of(self._rows))
            self._rows = []
        self.messages += len(batch.offsets)
        self.last_offset = batch.offsets[-1]
        self.newest_at = time.time() if chunk_ms is None else chunk_ms / 1000
        if self.oldest_at is None:
            self.oldest_at = self.newest_at
        # It is decoded only if its position is needed.
        self._last = Message.from_record(batch.stream, batch.offsets[-1], batch.records[-1], chunk_ms)

    def _add(self, offset: int, extracted: Extracted) -> None:
        time_us, _, values, skips, receipt = extracted
        if time_us is not None and self._with_time:
            self.times.append(time_us)
            self.time_offsets.append(offset)
        if values:
            shown = "\\N" if time_us is None else str(time_us)
            for key_id, value in values:
                self._rows.append((offset, shown, self.stream_id, key_id, value))
                self.line_bytes += len(value) + LINE_BYTES
            self.rows += len(values)
        for key_id, reason in skips:
            skipped = self.stream_id, key_id, reason.value
            self.skips[skipped] = self.skips.get(skipped, 0) + 1
        if receipt is not None:
            self.receipts.append((receipt, offset))

    @staticmethod
    def lines(batches: Iterable["Batch"]) -> list[str]:
        """Return the rows of batches in COPY's text format, many lines in each text."""
        texts, rows = list[str](), list[_Row]()
        for batch in batches:
            texts += batch._lines
            rows += batch._rows
        return [*texts, _lines_of(rows)]

    def position(self) -> Position:
        """Return the last message's position, which identifies the stream later."""
        assert self._last is not None, "a batch that is committed holds messages"
        return position_of(self._last)


_Row: TypeAlias = tuple[int, str, int, int, str]
"""Offset, time, stream, key and value."""


def _lines_of(rows: list[_Row]) -> str:
    if needs_escape("".join([row[4] for row in rows])):
        rows = [(*row[:4], copy_text(row[4])) for row in rows]
    return "".join([f"{key}\t{value}\t{stream}\t{time}\t{offset}\n" for offset, time, stream, key, value in rows])


def readable(batch: RecordBatch) -> Iterator[tuple[RecordBatch, str | None]]:
    """Split a batch into runs that can be recorded, and runs that this installation cannot unpack, with the reason.

    A corrupt record can be recorded, as a message without keys: no installation will ever unpack it.
    """
    if UnreadableRecord not in set(map(type, batch.records)):
        yield batch, None
        return
    for reason, run in groupby(zip(batch.offsets, batch.records, strict=True), key=_why_not):
        offsets, records = zip(*run, strict=True)
        yield replace(batch, first_offset=offsets[0], offsets=offsets, records=records), reason


def _why_not(record: tuple[int, bytes]) -> str | None:
    raw = record[1]
    return raw.reason if isinstance(raw, UnreadableRecord) and not raw.is_broken else None
