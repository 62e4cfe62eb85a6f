"""Making the table equal to the streams again where `verify` found a difference.

A report says where to look, never what to write. Each window in which something was found is read and compared again,
in one transaction that holds the stream's locks, and what differs then is written anew. So two repairs at once, a
repair from an old report, and a repair beside a recorder write nothing twice.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from datetime import UTC, datetime

import sqlalchemy as sa

from relatum.checks import checked_name, shown
from relatum.errors import ConfigurationError, Conflict, InvalidInput
from relatum.membership import GROUP_KEY
from relatum.reading import BrokerAddress, Message, StreamBounds, StreamReader, position_of
from relatum.recording._compare import (
    Block,
    Difference,
    Expected,
    Stored,
    StreamVerified,
    known_key_ids,
    stored_of,
    walk,
)
from relatum.recording._compare_coverage import Verdict, known_by, last_position_in, mended, painted, verdict_of
from relatum.recording._ranges import unrecorded
from relatum.recording._strays import delete_behind, delete_strays, find_strays, rows_behind
from relatum.recording._time_blocks import TimeBlock
from relatum.recording._time_blocks import time_blocks as blocks_of
from relatum.recording._verify import (
    VerifyReport,
    WindowMessages,
    compare_window,
    plan_verification,
    read_window,
    windows,
)
from relatum.store.catalog import StreamRow, current_stream
from relatum.store.coverage import TIME, CoverageRow, Range, coverage_of, merged
from relatum.store.database import AnyDatabase, as_engine, sql
from relatum.store.parts import copy_rows
from relatum.store.rows import copy_lines, copy_text
from relatum.store.tables import coverage, group_scans, relationships, streams, time_blocks
from relatum.store.translation import translated_errors


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
            found = list(compare_window(*read, stored, window, self._first_retained))
            if found:
                self._write(connection, window, read, stored, found)
        return found

    def _write(
        self,
        connection: sa.Connection,
        window: Range,
        read: WindowMessages,
        stored: Stored,
        found: Sequence[Difference],
    ) -> None:
        again = _uncovered(stored, window, found)
        covering = stored.covering
        for part in again:
            covering = painted(covering, self._recorded(part, read[0], stored))
        expected = Expected(stored.definitions, covering, window)
        self._write_rows(connection, read[0], stored, expected, _offsets(read[0], found, again))
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
        read: WindowMessages,
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
    connection.execute(sql("LOCK TABLE relatum.group_scans IN SHARE ROW EXCLUSIVE MODE"))
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
    read: WindowMessages,
    window: Range,
    kept: Sequence[Block],
    wrong: set[Block],
    expected: Expected,
) -> list[list[Message]]:
    """Messages whose times are recorded and that no kept block holds, in runs without others between them."""
    runs: list[list[Message]] = [[]]
    lost = walk([*read[0], *read[1]], sorted(wrong))
    held = walk([*read[0], *read[1]], kept)
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


def repair(
    report: VerifyReport,
    database: AnyDatabase,
    *,
    vhost: str = "/",
    dry_run: bool = True,
    broker: str | BrokerAddress | None = None,
) -> list[str]:
    """Write what is missing and delete what is wrong, wherever a report found differences, listed or not.

    Args:
        report: What `verify` found.
        database: PostgreSQL's URL, or a `Database`.
        vhost: The streams' virtual host.
        dry_run: Only say what would be done. The default: look first.
        broker: The broker's URL or address, from which is read what to write; None for the report's.

    Returns:
        What was done, or would be: a line for each difference, up to 1,000 a stream, and one that counts the others.

    Raises:
        Conflict: a stream has a new generation since, or is not known any more; verify again.
        ConfigurationError: neither the report nor the caller names a broker.
        BrokerUnavailable, ReadTimeout: what was mended before is; safe to repeat.
    """
    if not isinstance(report, VerifyReport):
        raise InvalidInput(f"report= takes what verify gave, not {shown(report)}")
    checked_name("vhost", vhost)
    different = [stream for stream in report.streams if stream.difference_count]
    done: list[str] = []
    with as_engine(database) as engine:
        for stream in different:
            _check_generation(engine, vhost, stream)
        if dry_run or not different:
            return [line for stream in different for line in _lines(stream)]
        address = report.broker if broker is None else BrokerAddress.of(broker)
        if address is None:
            raise ConfigurationError("the report does not say which broker it compared with: give `broker`")
        with StreamReader.open(address) as reader:
            for stream in different:
                done += _lines(_Repair(engine, reader, vhost, stream).run() if stream.stream else _strays(engine))
    return done


def _lines(found: StreamVerified) -> list[str]:
    lines = [_describe(found.stream, difference) for difference in found.differences]
    more = found.difference_count - len(found.differences)
    return [*lines, f"{found.stream}: and {more:,} more differences of these kinds"] if more else lines


_REMEDIES = {
    "missing": "insert the row",
    "unsound": "delete the row",
    "duplicate": "delete all but one of the rows",
    "unknown_key": "delete what names the key",
    "unknown_stream": "delete the rows",
    "uncovered": "record these offsets again",
    "time_missing": "insert into the time index",
    "time_wrong": "index these messages' times again",
    "time_duplicate": "delete all but one of the blocks",
    "coverage_overlap": "keep one of the ranges",
    "coverage_past_end": "end the range where the stream ends",
    "coverage_hole": "take the range for not recorded",
    "coverage_tail": "go on recording behind the last range",
    "coverage_position": "remember what lies there now",
    "replaced": "nothing: run `relatum record`, which notices it and begins anew",
}


def _describe(stream: str, difference: Difference) -> str:
    shown = f" {difference.key}={difference.value!r}" if difference.value else ""
    if difference.detail:
        shown += f" ({difference.detail})"
    place = f"{stream}@{difference.offset}" if stream else f"{difference.table}@{difference.offset}"
    return f"{place}{shown}: {_REMEDIES[difference.kind]}"


def _check_generation(engine: sa.Engine, vhost: str, found: StreamVerified) -> None:
    if not found.stream:
        return
    with translated_errors(), engine.connect() as connection:
        stream = current_stream(connection, vhost, found.stream)
    if stream is None:
        raise Conflict(f"stream {found.stream!r} is not known any more: verify again")
    if found.stream_id not in (None, stream.stream_id):
        raise Conflict(f"stream {found.stream!r} has a new generation since it was compared: verify again")


def _strays(engine: sa.Engine) -> StreamVerified:
    done = StreamVerified("")
    for difference in find_strays(engine):
        done.add(difference)
    delete_strays(engine)
    return done


class _Repair:
    """The repair of one stream; what it mends is written down in `done` as `verify` writes it down."""

    def __init__(self, engine: sa.Engine, reader: StreamReader, vhost: str, found: StreamVerified) -> None:
        self._engine = engine
        self._reader = reader
        self._vhost = vhost
        self._found = found
        self._done = StreamVerified(found.stream)

    def run(self) -> StreamVerified:
        """Mend the stream's coverage, then each window, then what lies behind them."""
        found = self._found
        done, row = plan_verification(self._engine, self._reader, self._vhost, found.stream, found.super_stream)
        self._done = done
        if row is None:
            return done
        if done.difference_count:
            self._mend_whole()
        self._mend_windows(row, done.from_offset)
        self._mend_rest(row, done.to_offset)
        # Windows that were recorded again have cut ranges: what lies last in them is looked up now.
        self._mend_whole()
        return done

    def _mend_whole(self) -> None:
        """Make the stream's coverage what it can be."""
        name = self._found.stream
        with translated_errors(), self._engine.begin() as connection:
            stream = current_stream(connection, self._vhost, name)
            if stream is None:
                raise Conflict(f"stream {name!r} is not known any more: verify again")
            rows = lock_coverage(connection, stream.stream_id)
            # Behind the locks: a recorder may have moved the coverage just before.
            bounds = self._reader.bounds(name)
            last = bounds.last if bounds.is_proven else None
            new = mended(rows, known_key_ids(connection), bounds.first, last)
            new = [self._remembering(row, bounds) for row in new]
            rewrite_coverage(connection, rows, new)

    def _remembering(self, row: CoverageRow, bounds: StreamBounds) -> CoverageRow:
        name = self._found.stream
        if verdict_of(self._reader, name, row) in (Verdict.RIGHT, Verdict.UNKNOWN):
            return row
        return known_by(row, last_position_in(self._reader, name, row, bounds.first))

    def _mend_windows(self, stream: StreamRow, first_retained: int) -> None:
        """Mend each window in which something was found, and those that a wrong block reached into."""
        start, end = self._done.from_offset, self._done.to_offset
        # What the report saw behind the present end, or before what is retained, is gone.
        ranges = [(max(start, low), min(end, high)) for low, high in self._found.damaged]
        ranges += [(max(start, low), min(end, high)) for low, high in _claimed(self._done)]
        left = [window for low, high in merged(ranges) for window in windows(low, high)]
        while left:
            window = left.pop(0)
            one = WindowRepair(self._engine, self._reader, stream, first_retained)
            self._done.add_window(window, one.mend(window))
            again = [(max(start, low), min(end, high)) for low, high in one.unmasked]
            left = [each for low, high in merged([*left, *again]) for each in windows(low, high)]

    def _mend_rest(self, stream: StreamRow, end: int) -> None:
        """Delete rows of messages that are not there."""
        for difference in rows_behind(self._engine, stream.stream_id, end):
            self._done.add(difference)
        with translated_errors(), self._engine.begin() as connection:
            rows = lock_coverage(connection, stream.stream_id)
            delete_behind(connection, stream.stream_id, max([row.to_offset for row in rows], default=0))


def _claimed(found: StreamVerified) -> Iterator[tuple[int, int]]:
    """Offsets that the coverage claimed wrongly; what is there is compared again."""
    for difference in found.differences:
        if difference.kind in ("coverage_overlap", "coverage_hole") and difference.to_offset is not None:
            yield difference.offset, difference.to_offset
