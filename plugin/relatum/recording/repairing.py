"""Repairing differences between the table and the streams that `verify` found.

A report says where to look, never what to write. Each window with a difference is read and compared again. If it still
differs, one transaction removes it from the table and records it again. So two repairs at once, a repair from an old
report, and a repair beside a recorder write nothing twice.
"""

from typing import Final

import sqlalchemy as sa

from relatum.checks import checked_name, shown
from relatum.errors import ConfigurationError, Conflict, InvalidInput, StreamUnavailable
from relatum.limits import INTEGER_MAX
from relatum.reading import Broker, StreamReader, ends_of_known
from relatum.recording.comparing import Difference, Stored, StreamVerified, compare_coverage, end_of, has_right_tail
from relatum.recording.filler import Filler, check_same
from relatum.recording.ranges import lock_ranges, uncover
from relatum.recording.tails import set_tail
from relatum.recording.verifying import (
    VerifyReport,
    compare_window,
    outside,
    plan_verification,
    read_window,
    windows,
)
from relatum.store.catalog import StreamRow, current_stream, key_definitions
from relatum.store.coverage import Range, coverage_of, last_position, merged
from relatum.store.database import IDLE_S, AnyDatabase, as_engine, at_one_moment, transaction


def repair(
    report: VerifyReport,
    database: AnyDatabase,
    *,
    vhost: str = "/",
    dry_run: bool = True,
    broker: str | Broker | None = None,
) -> list[str]:
    """Record again all windows with differences, listed or not: a window of 20,000 offsets in a transaction.

    Args:
        report: The result of `verify`.
        database: PostgreSQL's URL, or a `Database`.
        vhost: The streams' virtual host.
        dry_run: Return what would be done, and change nothing. Default: True.
        broker: The broker's URL, or a `Broker`, to read the streams from. None (default): the report's broker.

    Returns:
        A line for each difference that was or would be repaired, up to 1,000 per stream; one more counts the others.

    Raises:
        Conflict: a stream has a new generation, or is not recorded any more; verify again.
        ConfigurationError: neither the report nor the caller names a broker.
        StreamUnavailable: a window is gone, or no codec is installed to unpack it; its rows are unchanged.
        BrokerUnavailable, ReadTimeout: windows repaired before stay repaired; safe to repeat.
    """
    if not isinstance(report, VerifyReport):
        raise InvalidInput(f"report= takes the result of verify, not {shown(report)}")
    checked_name("vhost", vhost)
    different = [stream for stream in report.streams if stream.difference_count]
    done: list[str] = []
    with as_engine(database, idle_s=IDLE_S) as engine:
        for stream in different:
            _check_generation(engine, vhost, stream)
        if dry_run or not different:
            return [line for stream in different for line in _lines(stream)]
        source = report.broker if broker is None else broker
        if source is None:
            raise ConfigurationError("the report does not say which broker it compared with: pass `broker`")
        with StreamReader.open(source) as reader:
            for stream in different:
                done += _lines(_Repair(engine, reader, vhost, stream).run())
    return done


def _lines(found: StreamVerified) -> list[str]:
    lines = [_describe(found.stream, difference) for difference in found.differences]
    more = found.difference_count - len(found.differences)
    return [*lines, f"{found.stream}: and {more:,} more differences of these kinds"] if more else lines


_REPLACED: Final = "not repaired: run `relatum record`, which detects it and begins anew"


def _describe(stream: str, difference: Difference) -> str:
    shown = f" {difference.key}={difference.value!r}" if difference.value else ""
    if difference.detail:
        shown += f" ({difference.detail})"
    remedy = _REPLACED if difference.kind == "replaced" else "record it again"
    return f"{stream}@{difference.offset}{shown}: {difference.kind}, {remedy}"


def _check_generation(engine: sa.Engine, vhost: str, found: StreamVerified) -> None:
    with transaction(engine) as connection:
        stream = current_stream(connection, vhost, found.stream)
    if stream is None:
        raise Conflict(f"stream {found.stream!r} is not recorded any more: verify again")
    if found.stream_id not in (None, stream.stream_id):
        raise Conflict(f"stream {found.stream!r} has a new generation since it was compared: verify again")


class _Repair:
    """The repair of one stream; `_done` collects what was repaired, in the form of `verify`'s result."""

    def __init__(self, engine: sa.Engine, reader: StreamReader, vhost: str, found: StreamVerified) -> None:
        self._engine = engine
        self._reader = reader
        self._found = found
        self._done, self._row = plan_verification(engine, reader, vhost, found.stream, found.super_stream)

    def run(self) -> StreamVerified:
        """Repair the coverage as a whole, then each damaged window."""
        done, stream = self._done, self._row
        if stream is None:
            return done
        ranges = [*self._found.damaged, *((each.offset, each.to_offset or each.offset) for each in done.differences)]
        with transaction(self._engine) as connection:
            definitions = key_definitions(connection)
        filler = Filler(self._engine, self._reader, stream, definitions)
        recorded_to, end = self._mend_whole(stream)
        filler.fill((max(recorded_to, done.from_offset), end))
        # Differences after the present end, or before the first retained offset, are gone.
        for low, high in merged((max(done.from_offset, low), min(end, high)) for low, high in ranges):
            for window in windows(low, high):
                self._mend(filler, stream, window)
        return done

    def _mend_whole(self, stream: StreamRow) -> Range:
        """Remove what is recorded after the stream's end, and set the tail to where recording continues.

        Returns the end of the coverage, and the offset at which recording continues, which is after all rows that were
        outside the coverage.
        """
        with transaction(self._engine) as connection:
            rows = lock_ranges(connection, stream.stream_id, (0, INTEGER_MAX))
            # Asked under the locks: a recorder may have extended the coverage just before.
            bounds = ends_of_known(self._reader, stream.name)
            end = max((row.to_offset for row in rows), default=0)
            if bounds.is_proven and bounds.last is not None:
                end = min(end, bounds.last + 1)
            behind = max(end, bounds.first or 0)
            for difference in outside(connection, stream.stream_id, behind):
                self._done.add(difference)
            # Blocks that cross the end are cut there; their first halves are compared with the rest.
            uncover(connection, self._reader, stream, (behind, INTEGER_MAX), behind)
            goes_on_at = max(end, self._done.to_offset)
            self._set_tail(connection, stream, goes_on_at)
            check_same(self._reader, stream.name, rows, bounds)
        return end, goes_on_at

    def _set_tail(self, connection: sa.Connection, stream: StreamRow, end: int) -> None:
        """Set the tail to an offset, unless it is there."""
        rows = coverage_of(connection, [stream.stream_id])
        tail = next((row for row in rows if row.is_tail), None)
        if has_right_tail(rows) and tail is not None and tail.to_offset == end:
            return
        known = last_position(rows)
        if known is not None and known.offset >= end:
            known = None
        set_tail(connection, stream, tail, end, known)

    def _mend(self, filler: Filler, stream: StreamRow, window: Range) -> None:
        """Compare a window again, and record it again if it differs."""
        read = read_window(self._reader, stream.name, window)
        # Asked after reading: what retention dropped since is no difference, and is not changed.
        first = self._reader.bounds(stream.name).first or 0
        with at_one_moment(self._engine) as connection:
            stored = Stored(connection, stream.stream_id, window)
            compared = compare_window(*read, stored, self._done.from_offset)
            found = [each for each in compared if end_of(each) > first]
            is_claimed = any(
                each.offset < window[1] and window[0] < end_of(each)
                for each in compare_coverage(stored.covering, first, None)
            )
        if (found or is_claimed) and not filler.rewrite(window):
            raise StreamUnavailable(
                f"offsets {window[0]} to {window[1] - 1} of the stream {stream.name!r} cannot be unpacked here, or are "
                "gone: their rows are unchanged",
                stream=stream.name,
            )
        self._done.add_window(window, found)
