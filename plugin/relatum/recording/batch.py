"""A batch holds the rows of a stream's messages that are read but not committed yet, as lines for COPY. Bounded."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Final, NamedTuple

from relatum.common.limits import TIME_BLOCK_DISORDER_US_MAX, TIME_BLOCK_MESSAGES_MAX
from relatum.reading import Message, Position, RecordBatch, UnreadableRecord, position_of
from relatum.reading.extractor import Extracted, Extractor
from relatum.store.rows import copy_number, copy_text

BATCH_BYTES_MAX: Final = 4 << 20
"""Approximate maximum bytes of COPY lines in a transaction: 100,000 rows, which PostgreSQL writes in half a second."""

BATCH_MESSAGES_MAX: Final = 50_000
"""Maximum messages of a batch. Messages with few keys reach it before the maximum of bytes."""

# --- the sparse index of times ----------------------------------------------------------------------------------------
#
# A row per message would cost as much as a key's row, and slow the recorder down by a third. A row per 128 messages
# costs less than a byte per message, and reading 128 messages takes less time than one attach. These invariants keep a
# lookup by time exact, even if publishers' times are not in offset order:
#
# - every message with a time has a block whose [min_us, max_us] includes its time and whose offsets include its offset;
# - both ends of a block's range are times of messages in it;
# - a block of class c is at most 4**c microseconds wide: a block that includes a time t begins at most 4**c before t.
#
# If times are in order, 128 messages are one block of any width. If not, they are grouped by time into blocks of at
# most a second, so that a lookup never has to read blocks that span a day of disorder.


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
    """Return the blocks of consecutive messages, and the greatest time so far; `high_us` is that before them."""
    if len(times) == 1:
        # Common: most streams of a large commit have one message.
        (at,) = times
        return [TimeBlock(at, at, offsets[0], offsets[0])], at if high_us is None or at > high_us else high_us
    blocks: list[TimeBlock] = []
    for start in range(0, len(offsets), TIME_BLOCK_MESSAGES_MAX):
        part = times[start : start + TIME_BLOCK_MESSAGES_MAX]
        part_offsets = offsets[start : start + TIME_BLOCK_MESSAGES_MAX]
        ordered = sorted(part)
        low, high = ordered[0], ordered[-1]
        in_order = (high_us is None or low >= high_us) and ordered == list(part)
        if in_order or high - low <= TIME_BLOCK_DISORDER_US_MAX:
            blocks.append(TimeBlock(low, high, part_offsets[0], part_offsets[-1]))
        else:
            blocks.extend(_blocks_by_time(part_offsets, part))
        high_us = high if high_us is None else max(high_us, high)
    return blocks, high_us


def _blocks_by_time(offsets: Sequence[int], times: Sequence[int]) -> list[TimeBlock]:
    """Return blocks of messages grouped by time, none wider than the allowed disorder."""
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
        """The times of messages that have one. `time_offsets` holds their offsets, in the same order."""
        self.time_offsets: list[int] = []
        self._last: Message | None = None
        self.lines: list[str] = []
        """The rows in COPY's text format."""
        self.line_bytes = 0
        self.messages = 0
        self.receipts: list[tuple[str, int]] = []
        self.skips: dict[tuple[int, int, str], int] = {}
        """Numbers of values that were not recorded, by stream, key and reason."""
        self.links: list[object] = []
        """Links to the publishers' spans of the first messages; empty without tracing."""
        self.last_offset = -1
        self.oldest_at: float | None = None
        """When the first message was written, in seconds since 1970; None if there is none."""
        self.newest_at = 0.0
        """When the last message was written, in seconds since 1970."""

    @property
    def is_full(self) -> bool:
        """Whether the batch should be committed before messages are added."""
        return self.line_bytes >= BATCH_BYTES_MAX or self.messages >= BATCH_MESSAGES_MAX

    def add(self, batch: RecordBatch) -> None:
        """Add the rows of a batch of records. Its offsets must follow those already added."""
        assert batch.first_offset > self.last_offset, "offsets only grow"
        chunk_ms = batch.chunk_ms
        lines: list[str] = []
        # Add each result immediately: the garbage collector would traverse a list of results repeatedly.
        for offset, raw in zip(batch.offsets, batch.records, strict=True):
            self._add(lines, offset, self._extractor.from_record(raw, chunk_ms))
        # PostgreSQL waits while a commit sorts its lines, which takes less time if pieces are sorted.
        lines.sort()
        self.lines += lines
        self.line_bytes += sum(map(len, lines))
        self.messages += len(batch.offsets)
        self.last_offset = batch.offsets[-1]
        self.newest_at = time.time() if chunk_ms is None else chunk_ms / 1000
        if self.oldest_at is None:
            self.oldest_at = self.newest_at
        # Decoded only when `position` is called.
        self._last = Message.from_record(batch.stream, batch.offsets[-1], batch.records[-1], chunk_ms)

    def _add(self, lines: list[str], offset: int, extracted: Extracted) -> None:
        time_us, _, values, skips, receipt = extracted
        if time_us is not None and self._with_time:
            self.times.append(time_us)
            self.time_offsets.append(offset)
        if values:
            end = f"\t{self.stream_id}\t{copy_number(time_us)}\t{offset}\n"
            for key_id, value in values:
                lines.append(f"{key_id}\t{copy_text(value)}{end}")
        for key_id, reason in skips:
            skipped = self.stream_id, key_id, reason.value
            self.skips[skipped] = self.skips.get(skipped, 0) + 1
        if receipt is not None:
            self.receipts.append((receipt, offset))

    def position(self) -> Position:
        """Return the last message's position, by which the stream is recognised later."""
        assert self._last is not None, "a batch that is committed holds messages"
        return position_of(self._last)


def readable(batch: RecordBatch) -> Iterator[tuple[RecordBatch, str | None]]:
    """Split a batch into runs, each with None, or with the reason why its records cannot be unpacked here.

    A corrupt record is recorded as a message without keys, because no installation can unpack it.
    """
    if UnreadableRecord not in set(map(type, batch.records)):
        yield batch, None
        return
    for reason, run in groupby(zip(batch.offsets, batch.records, strict=True), key=_unreadable_reason):
        offsets, records = zip(*run, strict=True)
        yield replace(batch, first_offset=offsets[0], offsets=offsets, records=records), reason


def _unreadable_reason(record: tuple[int, bytes]) -> str | None:
    raw = record[1]
    return raw.reason if isinstance(raw, UnreadableRecord) and not raw.is_broken else None
