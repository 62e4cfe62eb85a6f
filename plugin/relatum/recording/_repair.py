"""Making the table equal to the streams again where `verify` found a difference.

A report says where to look, never what to write. Each window in which something was found is read and compared again,
under the stream's locks. What differs then is taken out of the table, and recorded again before the next window. So two
repairs at once, a repair from an old report, and a repair beside a recorder write nothing twice.
"""

from typing import Final

import sqlalchemy as sa

from relatum.checks import checked_name, shown
from relatum.errors import ConfigurationError, Conflict, InvalidInput, StreamUnavailable
from relatum.limits import INTEGER_MAX
from relatum.reading import Broker, StreamReader, ends_of_known
from relatum.recording._compare import Difference, Stored, StreamVerified, compare_coverage, has_right_tail
from relatum.recording._fill import Filler
from relatum.recording._prune import delete_all
from relatum.recording._ranges import lock_ranges, position_before, uncover
from relatum.recording._tails import set_tail
from relatum.recording._verify import (
    STRAYS,
    VerifyReport,
    compare_window,
    is_replaced,
    of_no_stream,
    outside,
    plan_verification,
    read_window,
    verify_strays,
    windows,
    wrong_positions,
)
from relatum.store.catalog import StreamRow, current_stream, key_definitions
from relatum.store.coverage import Range, coverage_of, last_position, merged
from relatum.store.database import IDLE_S, AnyDatabase, as_engine, at_one_moment, sql
from relatum.store.translation import translated_errors

_REMEMBER: Final = sql("""
    UPDATE relatum.coverage SET last_offset = :last_offset::bigint, last_fingerprint = :last_fingerprint::bigint,
        last_chunk_ms = :last_chunk_ms::bigint
    WHERE coverage_id = :coverage_id::bigint""")


def repair(
    report: VerifyReport,
    database: AnyDatabase,
    *,
    vhost: str = "/",
    dry_run: bool = True,
    broker: str | Broker | None = None,
) -> list[str]:
    """Record again wherever a report found differences, listed or not: a window of 20,000 offsets in a transaction.

    Args:
        report: What `verify` found.
        database: PostgreSQL's URL, or a `Database`.
        vhost: The streams' virtual host.
        dry_run: Only say what would be done. The default: look first.
        broker: The broker's URL, or a `Broker`, from which is read what to write; None for the report's.

    Returns:
        What was done, or would be: a line for each difference, up to 1,000 a stream, and one that counts the others.

    Raises:
        Conflict: a stream has a new generation since, or is not known any more; verify again.
        ConfigurationError: neither the report nor the caller names a broker.
        StreamUnavailable: a window is gone, or cannot be unpacked here for want of a codec: it stays as it was.
        BrokerUnavailable, ReadTimeout: what was mended before is; safe to repeat.
    """
    if not isinstance(report, VerifyReport):
        raise InvalidInput(f"report= takes what verify gave, not {shown(report)}")
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
            raise ConfigurationError("the report does not say which broker it compared with: give `broker`")
        with StreamReader.open(source) as reader:
            for stream in different:
                if stream.stream:
                    done += _lines(_Repair(engine, reader, vhost, stream).run())
                else:
                    done += _lines(_delete_strays(engine))
    return done


def _lines(found: StreamVerified) -> list[str]:
    lines = [_describe(found.stream, difference) for difference in found.differences]
    more = found.difference_count - len(found.differences)
    return [*lines, f"{found.stream}: and {more:,} more differences of these kinds"] if more else lines


_REMEDIES: Final = {
    "unknown_stream": "delete the rows",
    "replaced": "nothing: run `relatum record`, which notices it and begins anew",
}


def _describe(stream: str, difference: Difference) -> str:
    shown = f" {difference.key}={difference.value!r}" if difference.value else ""
    if difference.detail:
        shown += f" ({difference.detail})"
    place = f"{stream}@{difference.offset}" if stream else f"{difference.table}@{difference.offset}"
    return f"{place}{shown}: {difference.kind}, {_REMEDIES.get(difference.kind, 'record it again')}"


def _check_generation(engine: sa.Engine, vhost: str, found: StreamVerified) -> None:
    if not found.stream:
        return
    with translated_errors(), engine.connect() as connection:
        stream = current_stream(connection, vhost, found.stream)
    if stream is None:
        raise Conflict(f"stream {found.stream!r} is not known any more: verify again")
    if found.stream_id not in (None, stream.stream_id):
        raise Conflict(f"stream {found.stream!r} has a new generation since it was compared: verify again")


def _delete_strays(engine: sa.Engine) -> StreamVerified:
    done = next(iter(verify_strays(engine)), StreamVerified(""))
    with translated_errors(), engine.connect() as connection:
        among = of_no_stream(connection)
    for table, _ in STRAYS:
        # Checked again for each row: a stream may have been added since.
        known = f"SELECT FROM relatum.streams WHERE stream_id = {table}.stream_id"
        delete_all(engine, table, f"({among}) AND NOT EXISTS ({known})", lambda *_: None)
    return done


class _Repair:
    """The repair of one stream; `_done` collects what was mended, in the form of `verify`'s result."""

    def __init__(self, engine: sa.Engine, reader: StreamReader, vhost: str, found: StreamVerified) -> None:
        self._engine = engine
        self._reader = reader
        self._found = found
        self._done, self._row = plan_verification(engine, reader, vhost, found.stream, found.super_stream)

    def run(self) -> StreamVerified:
        """Mend the coverage as a whole, then each damaged window."""
        done, stream = self._done, self._row
        if stream is None:
            return done
        ranges = [*self._found.damaged, *((each.offset, each.to_offset or each.offset) for each in done.differences)]
        with translated_errors(), self._engine.begin() as connection:
            definitions = key_definitions(connection)
        filler = Filler(self._engine, self._reader, stream, definitions)
        recorded_to, end = self._mend_whole(stream)
        filler.fill((max(recorded_to, done.from_offset), end))
        # Damage behind the present end, or before what is retained, is gone.
        left = merged((max(done.from_offset, low), min(end, high)) for low, high in ranges)
        while left:
            low, high = left.pop(0)
            window = windows(low, high)[0]
            reach = self._mend(filler, stream, window)
            left = merged([*left, (window[1], max(high, min(reach, end)))])
        return done

    def _mend_whole(self, stream: StreamRow) -> Range:
        """Give the ranges the right positions, and delete what lies outside of all ranges.

        Gives the offset up to which is recorded, and the one from which recording goes on: behind rows that were
        recorded once, and that no range held.
        """
        name = stream.name
        with translated_errors(), self._engine.begin() as connection:
            rows = lock_ranges(connection, stream.stream_id, (0, INTEGER_MAX))
            # Asked under the locks: a recorder may have moved the coverage just before.
            bounds = ends_of_known(self._reader, name)
            end = max((row.to_offset for row in rows), default=0)
            if bounds.is_proven and bounds.last is not None:
                end = min(end, bounds.last + 1)
            first = end if bounds.first is None else bounds.first
            wrong = wrong_positions(self._reader, name, rows)
            for row in wrong:
                at = position_before(self._reader, name, row.to_offset, max(first, row.from_offset))
                values = {"last_offset": at and at.offset, "last_fingerprint": at and at.fingerprint}
                values |= {"last_chunk_ms": at and at.chunk_ms, "coverage_id": row.coverage_id}
                connection.execute(_REMEMBER, values)
            behind = max(end, first)
            for difference in outside(connection, stream.stream_id, behind):
                self._done.add(difference)
            # Blocks that reach over the end are cut there: what they hold before it is compared with the rest.
            uncover(connection, self._reader, stream, (behind, INTEGER_MAX), behind)
            goes_on_at = max(end, self._done.to_offset)
            self._set_tail(connection, stream, goes_on_at)
            if is_replaced(connection, self._reader, name, rows, wrong, bounds):
                raise Conflict(f"stream {name!r} was replaced meanwhile: verify again")
        for table, offset in (("relationships", "stream_offset"), ("time_blocks", "last_offset")):
            before = f"stream_id = :stream_id::integer AND {offset} < 0"
            delete_all(self._engine, table, before, lambda *_: None, stream_id=stream.stream_id)
        return end, goes_on_at

    def _set_tail(self, connection: sa.Connection, stream: StreamRow, end: int) -> None:
        """Put the tail at an offset, unless it is there."""
        rows = coverage_of(connection, [stream.stream_id])
        tail = next((row for row in rows if row.is_tail), None)
        if has_right_tail(rows) and tail is not None and tail.to_offset == end:
            return
        known = last_position(rows)
        if known is not None and known.offset >= end:
            known = None
        set_tail(connection, stream, tail, end, known)

    def _mend(self, filler: Filler, stream: StreamRow, window: Range) -> int:
        """Compare a window again, and record it again if it differs; returns how far the damage reaches."""
        name = stream.name
        read = read_window(self._reader, name, window)
        found: list[Difference] = []
        claimed: list[Difference] = []

        def is_due(connection: sa.Connection) -> bool:
            stored = Stored(connection, stream.stream_id, window)
            # Asked after reading: what retention took since is no difference, and stays as it is.
            first = self._reader.bounds(name).first or 0
            found[:] = [each for each in compare_window(*read, stored, self._done.from_offset) if _end_of(each) > first]
            claimed[:] = [
                each
                for each in compare_coverage(stored.covering, first, None)
                if each.offset < window[1] and window[0] < _end_of(each)
            ]
            return bool(found or claimed)

        with at_one_moment(self._engine) as connection:
            differs = is_due(connection)
        if differs and not filler.rewrite(window, is_due) and (found or claimed):
            raise StreamUnavailable(
                f"offsets {window[0]} to {window[1] - 1} of the stream {name!r} cannot be unpacked here, or are gone: "
                "what is recorded of them is as it was",
                stream=name,
            )
        self._done.add_window(window, found)
        return max(map(_end_of, [*found, *claimed]), default=window[1])


def _end_of(difference: Difference) -> int:
    return max(difference.offset + 1, difference.to_offset or 0)
