"""Repairing differences between the table and the streams that `verify` found.

A report says where to look, never what to write. One transaction removes each window with a difference from the table
and records it again. So two repairs at once, a repair from an old report, and a repair beside a recorder write nothing
twice.
"""

from typing import Final

import sqlalchemy as sa

from relatum.checks import checked_name, shown
from relatum.errors import ConfigurationError, Conflict, InvalidInput, StreamUnavailable
from relatum.limits import INTEGER_MAX
from relatum.reading import Broker, StreamReader, ends_of_known
from relatum.recording.comparing import Difference, StreamVerified, has_right_tail
from relatum.recording.filler import Filler, check_same
from relatum.recording.own_broker import check_broker
from relatum.recording.ranges import lock_ranges, uncover
from relatum.recording.tails import set_tail
from relatum.recording.verifying import VerifyReport, windows
from relatum.store.catalog import StreamRow, current_stream, key_definitions
from relatum.store.coverage import Range, coverage_of, last_position, merged
from relatum.store.database import IDLE_S, AnyDatabase, as_engine, transaction


def repair(
    report: VerifyReport,
    database: AnyDatabase,
    *,
    vhost: str = "/",
    dry_run: bool = True,
    broker: str | Broker | None = None,
) -> list[str]:
    """Record again all windows with differences, listed or not: a window of 20,000 offsets in a transaction.

    What was repaired since the report is recorded again, too, which changes nothing.

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
    with as_engine(database, idle_s=IDLE_S) as engine:
        rows = [_same_generation(engine, vhost, found) for found in different]
        if different and not dry_run:
            source = report.broker if broker is None else broker
            if source is None:
                raise ConfigurationError("the report does not say which broker it compared with: pass `broker`")
            with StreamReader.open(source) as reader:
                for found, stream in zip(different, rows, strict=True):
                    if not any(each.kind == "replaced" for each in found.differences):
                        _record_again(engine, reader, stream, found)
    return [line for found in different for line in _lines(found)]


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


def _same_generation(engine: sa.Engine, vhost: str, found: StreamVerified) -> StreamRow:
    with transaction(engine) as connection:
        stream = current_stream(connection, vhost, found.stream)
    if stream is None:
        raise Conflict(f"stream {found.stream!r} is not recorded any more: verify again")
    if found.stream_id not in (None, stream.stream_id):
        raise Conflict(f"stream {found.stream!r} has a new generation since it was compared: verify again")
    return stream


def _record_again(engine: sa.Engine, reader: StreamReader, stream: StreamRow, found: StreamVerified) -> None:
    """Repair the coverage as a whole, then each damaged window."""
    check_broker(engine, reader, stream)
    with transaction(engine) as connection:
        definitions = key_definitions(connection)
    filler = Filler(engine, reader, stream, definitions)
    recorded_to, end = _mend_whole(engine, reader, stream, found)
    first = reader.bounds(stream.name).first or 0
    filler.fill((max(recorded_to, first), end))
    ranges = [*found.damaged, *((each.offset, each.to_offset or each.offset) for each in found.differences)]
    # Differences after the present end, or before the first retained offset, are gone.
    for low, high in merged((max(first, low), min(end, high)) for low, high in ranges):
        for window in windows(low, high):
            if not filler.rewrite(window) and (reader.bounds(stream.name).first or 0) < window[1]:
                raise StreamUnavailable(
                    f"offsets {window[0]} to {window[1] - 1} of the stream {stream.name!r} cannot be unpacked here: "
                    "their rows are unchanged",
                    stream=stream.name,
                )


def _mend_whole(engine: sa.Engine, reader: StreamReader, stream: StreamRow, found: StreamVerified) -> Range:
    """Remove what is recorded after the stream's end, and set the tail to where recording continues.

    Returns the end of the coverage, and the offset at which recording continues, which is after all rows that were
    outside the coverage.
    """
    with transaction(engine) as connection:
        rows = lock_ranges(connection, stream.stream_id, (0, INTEGER_MAX))
        # Asked under the locks: a recorder may have extended the coverage just before.
        bounds = ends_of_known(reader, stream.name)
        end = goes_on_at = max((row.to_offset for row in rows), default=0)
        if bounds.last is not None:
            end = min(end, bounds.last + 1) if bounds.is_proven else end
            goes_on_at = max(end, min(found.to_offset, bounds.last + 1))
        behind = max(end, bounds.first or 0)
        # Blocks that cross the end are cut there; their first halves are recorded again with the rest.
        uncover(connection, reader, stream, (behind, INTEGER_MAX), behind)
        rows_left = coverage_of(connection, [stream.stream_id])
        tail = next((row for row in rows_left if row.is_tail), None)
        if tail is None or not has_right_tail(rows_left) or tail.to_offset != goes_on_at:
            known = last_position(rows_left)
            set_tail(connection, stream, tail, goes_on_at, known if known and known.offset < goes_on_at else None)
        check_same(reader, stream.name, rows, bounds)
    return end, goes_on_at
