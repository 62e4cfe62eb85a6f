"""Repairing one window of a stream: compared again under the stream's locks, and what differs is written anew."""

from collections.abc import Iterable, Sequence
from dataclasses import fields
from datetime import UTC, datetime

import sqlalchemy as sa

from relatum.membership import GROUP_KEY
from relatum.reading import Message, StreamReader, position_of
from relatum.recording._compare import Block, Difference, Expected
from relatum.recording._compare_blocks import walk
from relatum.recording._compare_coverage import known_by, painted
from relatum.recording._ranges import unrecorded
from relatum.recording._stored import Stored, stored_of
from relatum.recording._time_blocks import TimeBlock
from relatum.recording._time_blocks import time_blocks as blocks_of
from relatum.recording._verify import WindowRead, compare_window, read_window
from relatum.store import (
    TIME,
    CoverageRow,
    Range,
    StreamRow,
    copy_lines,
    copy_rows,
    copy_text,
    coverage,
    coverage_of,
    group_scans,
    merged,
    relationships,
    streams,
    time_blocks,
    translated_errors,
)


def lock_coverage(connection: sa.Connection, stream_id: int) -> list[CoverageRow]:
    """Let nobody else move a stream's coverage until the transaction ends; gives its ranges.

    The stream's row first, as whoever back-fills or cuts it takes it. Not against those that only refer to it: a
    recorder that opens a range holds another already, which would be waited for in turn.
    """
    this = sa.select(streams.c.stream_id).where(streams.c.stream_id == stream_id)
    connection.execute(this.with_for_update(key_share=True))
    ranges = sa.select(coverage.c.coverage_id).where(coverage.c.stream_id == stream_id).order_by(coverage.c.coverage_id)
    connection.execute(ranges.with_for_update())
    return coverage_of(connection, [stream_id])


def rewrite_coverage(connection: sa.Connection, rows: Sequence[CoverageRow], new: Sequence[CoverageRow]) -> None:
    """Put ranges in place of others; those that did not change stay as they are.

    A recorder whose range is gone meets a conflict, and looks again.
    """
    kept = {row.coverage_id for row in new}
    gone = [row.coverage_id for row in rows if row.coverage_id not in kept]
    if gone:
        ids = sa.literal(gone, sa.ARRAY(sa.BigInteger))
        connection.execute(sa.delete(coverage).where(coverage.c.coverage_id == sa.any_(ids)))
    names = [each.name for each in fields(CoverageRow) if each.name != "coverage_id"]
    added = [{name: getattr(row, name) for name in names} for row in new if not row.coverage_id]
    for values in added:
        connection.execute(sa.insert(coverage).values({**values, "key_ids": list(values["key_ids"])}))


class WindowRepair:
    """The repair of windows of one stream."""

    def __init__(self, engine: sa.Engine, reader: StreamReader, stream: StreamRow, first_retained: int) -> None:
        self._engine = engine
        self._reader = reader
        self._stream = stream
        self._first_retained = first_retained
        self.unmasked: list[Range] = []
        """Offsets outside the window that a deleted block claimed: what they lack could not be seen before."""

    def mend(self, window: Range) -> list[Difference]:
        """Mend a window in one transaction; gives what differed."""
        read = read_window(self._reader, self._stream.name, window)
        with translated_errors(), self._engine.begin() as connection:
            lock_coverage(connection, self._stream.stream_id)
            stored = stored_of(connection, self._stream.stream_id, window)
            found = list(compare_window(read, stored, window, self._first_retained))
            if found:
                self._write(connection, window, read, stored, found)
        return found

    def _write(
        self, connection: sa.Connection, window: Range, read: WindowRead, stored: Stored, found: Sequence[Difference]
    ) -> None:
        again = _uncovered(stored, window, found)
        covering = stored.covering
        for part in again:
            covering = painted(covering, self._recorded(part, read.messages, stored))
        expected = Expected(stored.definitions, covering, window)
        self._write_rows(connection, read.messages, stored, expected, _offsets(read.messages, found, again))
        self._write_blocks(connection, window, read, stored, expected, found)
        rewrite_coverage(connection, stored.covering, covering)
        if again or any(difference.key == GROUP_KEY.name for difference in found):
            _scan_again(connection, self._stream.stream_id, window)

    def _recorded(self, part: Range, messages: Sequence[Message], stored: Stored) -> CoverageRow:
        """What the coverage says of offsets that are recorded again: all keys, and their times."""
        row = CoverageRow(
            coverage_id=0,
            stream_id=self._stream.stream_id,
            from_offset=part[0],
            to_offset=part[1],
            key_ids=tuple(sorted(definition.key_id for definition in stored.definitions)),
            with_time=self._stream.record_time,
            kind="recorded",
            is_tail=False,
            last_offset=None,
            last_fingerprint=None,
            last_chunk_ms=None,
            recorded_at=datetime.now(UTC),
        )
        lying = [message for message in messages if part[0] <= message.offset < part[1]]
        return known_by(row, position_of(lying[-1])) if lying else row

    def _write_rows(
        self,
        connection: sa.Connection,
        messages: Sequence[Message],
        stored: Stored,
        expected: Expected,
        offsets: set[int],
    ) -> None:
        """Write the rows of some offsets anew. Those of removed keys are left to the next prune."""
        if not offsets:
            return
        kept = sorted(stored.known_key_ids - expected.definitions.keys())
        rows = relationships.c
        place = sa.any_(sa.literal(sorted(offsets), sa.ARRAY(sa.BigInteger)))
        gone = [
            rows.stream_id == self._stream.stream_id,
            # The index by blocks takes a range, not a list.
            rows.stream_offset.between(min(offsets), max(offsets)),
            rows.stream_offset == place,
        ]
        if kept:
            gone.append(rows.key_id.not_in(kept))
        connection.execute(sa.delete(relationships).where(*gone))
        lines = []
        for message in messages:
            if message.offset in offsets:
                for offset, key_id, value, time_us in expected.rows(message):
                    shown = "\\N" if time_us is None else time_us
                    lines.append(f"{key_id}\t{copy_text(value)}\t{self._stream.stream_id}\t{shown}\t{offset}\n")
        copy_rows(connection, lines)

    def _write_blocks(
        self,
        connection: sa.Connection,
        window: Range,
        read: WindowRead,
        stored: Stored,
        expected: Expected,
        found: Sequence[Difference],
    ) -> None:
        """Delete blocks that differ, and index the messages that no block holds then."""
        places = {
            (each.offset, each.to_offset, each.time_us)
            for each in found
            if each.table == "time_blocks" and each.to_offset is not None
        }
        wrong = {block for block in stored.blocks if _place(block) in places}
        for block in wrong:
            self._delete_block(connection, block)
            self.unmasked += [(block.first_offset, window[0]), (window[1], block.last_offset + 1)]
        self.unmasked = [(low, high) for low, high in self.unmasked if low < high]
        kept = sorted(set(stored.blocks) - wrong)
        lines = []
        for run in _unheld(read, window, kept, wrong, expected):
            lines += [
                f"{block.min_us}\t{block.max_us}\t{block.first_offset}\t{block.last_offset}"
                f"\t{self._stream.stream_id}\t{block.width_class}\n"
                for block in _indexed(run)
            ]
        copy_lines(connection, "time_blocks", lines)

    def _delete_block(self, connection: sa.Connection, block: Block) -> None:
        same = [time_blocks.c[name] == value for name, value in block._asdict().items()]
        connection.execute(sa.delete(time_blocks).where(time_blocks.c.stream_id == self._stream.stream_id, *same))


def _scan_again(connection: sa.Connection, stream_id: int, offsets: Range) -> None:
    """Let consumers of groups scan offsets again whose rows were mended. The caller holds the stream's locks."""
    start, end = offsets
    connection.execute(sa.text("LOCK TABLE relatum.group_scans IN SHARE ROW EXCLUSIVE MODE"))
    scanned = group_scans.c
    over = (scanned.stream_id == stream_id) & (scanned.from_offset < end) & (scanned.to_offset > start)
    parts: list[dict[str, int]] = []
    for scan in connection.execute(sa.delete(group_scans).where(over).returning(*scanned)).all():
        mine = {"consumer_id": scan.consumer_id, "stream_id": stream_id}
        around = [(scan.from_offset, start), (end, scan.to_offset)]
        parts += [{**mine, "from_offset": low, "to_offset": high} for low, high in around if low < high]
    if parts:
        connection.execute(sa.insert(group_scans), parts)


def _place(block: Block) -> tuple[int, int, int]:
    return block.first_offset, block.last_offset + 1, block.min_us


def _uncovered(stored: Stored, window: Range, found: Iterable[Difference]) -> list[Range]:
    """The unrecorded parts of a window of which the table holds what the stream does: they were recorded once."""
    strays = [each for each in found if each.kind == "uncovered"]
    if not strays:
        return []
    names = {definition.name: definition.key_id for definition in stored.definitions} | {"time": TIME}
    parts: list[Range] = []
    for segment in unrecorded(stored.covering, window, [*names.values()]):
        for each in strays:
            lacks = {names.get(key) for key in each.key.split(", ")} & segment.key_ids
            end = window[1] if each.to_offset is None else each.to_offset
            if lacks and segment.from_offset < end and each.offset < segment.to_offset:
                parts.append((segment.from_offset, segment.to_offset))
    return merged(parts)


def _offsets(messages: Sequence[Message], found: Iterable[Difference], again: Sequence[Range]) -> set[int]:
    """The offsets whose rows are written anew."""
    offsets = {each.offset for each in found if each.table == "relationships" and each.kind != "uncovered"}
    lying = {message.offset for message in messages}
    for start, end in again:
        offsets |= {offset for offset in lying if start <= offset < end}
    return offsets


def _unheld(
    read: WindowRead, window: Range, kept: Sequence[Block], wrong: set[Block], expected: Expected
) -> list[list[Message]]:
    """Messages whose times are recorded and that no kept block holds, in runs without others between them."""
    runs: list[list[Message]] = [[]]
    lost = walk([*read.messages, *read.behind], sorted(wrong))
    held = walk([*read.messages, *read.behind], kept)
    for (message, claimants), (_, holders) in zip(lost, held, strict=True):
        time_us = message.time_us
        is_inside = message.offset < window[1]
        wanted = expected.covers(message.offset, TIME) if is_inside else _is_in(time_us, claimants)
        if wanted and time_us is not None and not _is_in(time_us, holders):
            runs[-1].append(message)
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]


def _is_in(time_us: int | None, blocks: Sequence[Block]) -> bool:
    return time_us is not None and any(block.min_us <= time_us <= block.max_us for block in blocks)


def _indexed(run: Sequence[Message]) -> Sequence[TimeBlock]:
    times = [message.time_us for message in run if message.time_us is not None]
    return blocks_of([message.offset for message in run], times, None)[0]
