"""Making the table equal to the streams again where `verify` found a difference.

A report says where to look, never what to write. Each window in which something was found is read and compared again,
in one transaction that holds the stream's locks, and what differs then is written anew. So two repairs at once, a
repair from an old report, and a repair beside a recorder write nothing twice.
"""

from collections.abc import Iterator

import sqlalchemy as sa

from relatum.checks import checked_name, shown
from relatum.errors import ConfigurationError, Conflict, InvalidInput
from relatum.reading import BrokerAddress, StreamBounds, StreamReader
from relatum.recording._compare import Difference, StreamVerified
from relatum.recording._compare_coverage import known_by, mended
from relatum.recording._compare_positions import Verdict, last_position_in, verdict_of
from relatum.recording._repair_window import WindowRepair, lock_coverage, rewrite_coverage
from relatum.recording._rows_behind import delete_behind, rows_behind
from relatum.recording._stored import known_key_ids
from relatum.recording._strays import delete_strays, find_strays
from relatum.recording._verify import VerifyReport, plan_verification, windows
from relatum.store import AnyDatabase, CoverageRow, StreamRow, as_engine, current_stream, merged, translated_errors


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
        done, subject = plan_verification(self._engine, self._reader, self._vhost, found.stream, found.super_stream)
        self._done = done
        if subject is None:
            return done
        if done.difference_count:
            self._mend_whole()
        self._mend_windows(subject.stream, subject.first_retained)
        self._mend_rest(subject.stream, done.to_offset)
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
