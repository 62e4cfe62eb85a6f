"""Compares the table with the streams, in both directions, and repairs it.

The table is complete if every value of a retained message has a row, and its time is in a block of the time index. The
table is sound if every row's message has that value, every block's ends are those of its messages, and the coverage
equals the recorded offsets. A comparison decodes messages as a consumer does, to detect faults of the extractor.

A repair uses a report only to select windows. For each window with a difference, one transaction removes the window
from the table and records it again. So parallel repairs, repairs from old reports, and repairs during recording write
nothing twice.

Recording may continue during a comparison, which reads the table before the stream's ends, and a window's rows in one
snapshot with the coverage. Offsets recorded later are not compared.
"""

import random
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import sqlalchemy as sa

from relatum.common.checks import checked_count, checked_name, checked_names, shown
from relatum.common.limits import INTEGER_MAX, INTEGER_MIN, TIME_BLOCK_MESSAGES_MAX
from relatum.errors import (
    AnotherBroker,
    ConfigurationError,
    Conflict,
    DatabaseUnavailable,
    InvalidInput,
    NothingRecorded,
    RelatumError,
    StreamUnavailable,
)
from relatum.reading import (
    Agreement,
    Broker,
    BrokerAddress,
    Message,
    StreamReader,
    agreement,
    bounds_of_known,
    concerns_broker,
)
from relatum.recording.comparing import (
    Difference,
    Stored,
    StreamVerified,
    VerifyReport,
    compare_coverage,
    compare_window,
    end_of,
    has_valid_tail,
)
from relatum.recording.filler import Filler, check_same
from relatum.recording.own_broker import check_broker
from relatum.recording.ranges import WINDOW_OFFSETS, lock_ranges, uncover
from relatum.recording.tails import set_tail
from relatum.store.catalog import StreamRow, current_stream, key_definitions, streams_named
from relatum.store.coverage import Range, coverage_of, last_position, merged
from relatum.store.database import IDLE_S, AnyDatabase, as_engine, at_one_moment, sql, transaction
from relatum.store.parts import part_may_hold_offsets


def verify(
    broker: str | Broker,
    database: AnyDatabase,
    streams: Sequence[str] | None = None,
    *,
    sample: float | None = None,
    seed: int | None = None,
    progress: Callable[[StreamVerified], None] | None = None,
) -> VerifyReport:
    """Compare streams with the table, up to where they are recorded, and return the differences. Writes nothing.

    Args:
        broker: The broker's URL, or a `Broker`.
        database: PostgreSQL's URL, or a `Database`.
        streams: Streams and super streams (their partitions). None (default): all recorded streams.
        sample: The share of windows of 20,000 offsets to compare, from 0 to 1, at least one of each stream; None
            (default) compares all. Differences in a share d of all windows are missed with a probability of
            (1 - d) ** (number of windows compared).
        seed: The `seed` of an earlier report, to choose the same sample. None (default): a new seed.
        progress: Called after each window with the stream's comparison so far.

    Raises:
        InvalidInput: `sample` is not a number from 0 to 1.
        NothingRecorded: `streams` is None, and no stream of the virtual host is recorded.
        StreamNotFound, NotAStream, AccessRefused, AnotherBroker: no stream can be compared. If only some cannot,
            they are in the report's `failed`.
        BrokerUnavailable, DatabaseUnavailable, ReadTimeout: there is no result; safe to repeat.
    """
    if streams is not None:
        streams = checked_names("streams", streams)
    seed = _checked_seed(sample, seed)
    address = BrokerAddress.of(broker)
    choose_windows = partial(_chosen_windows, sample=sample, seed=seed)
    with as_engine(database) as engine, StreamReader.open(address) as reader:
        found: list[StreamVerified] = []
        failed: dict[str, RelatumError] = {}
        resolved = meant_streams(engine, reader, address.vhost, streams)
        if streams is None and not resolved:
            message = f"no stream of the virtual host {address.vhost!r} is recorded, so there is nothing to compare"
            raise NothingRecorded(message, vhost=address.vhost)
        for name, super_stream in resolved:
            try:
                found.append(_compare(engine, reader, address.vhost, name, super_stream, choose_windows, progress))
            except RelatumError as error:
                concerns_all = concerns_broker(error) or isinstance(error, DatabaseUnavailable | ConfigurationError)
                if concerns_all and not isinstance(error, AnotherBroker):
                    raise
                failed[name] = error
        if failed and not found:
            raise next(iter(failed.values()))
        return VerifyReport(found, sample is None, seed, broker, failed)


def _checked_seed(sample: float | None, seed: int | None) -> int | None:
    """Check and return the seed, or a new one; None if everything is compared."""
    if seed is not None:
        checked_count("seed", seed, least=INTEGER_MIN, most=INTEGER_MAX)
    if sample is None:
        return None
    if isinstance(sample, bool) or not isinstance(sample, int | float) or not 0 <= sample <= 1:
        raise InvalidInput(f"sample= takes a share from 0 to 1, not {shown(sample)}")
    return random.randrange(1 << 32) if seed is None else seed  # noqa: S311 - a sample, nothing secret


def meant_streams(
    engine: sa.Engine, reader: StreamReader, vhost: str, names: Sequence[str] | None
) -> list[tuple[str, str | None]]:
    """Return the named streams, or all recorded ones, each with its super stream or None."""
    if names is None:
        with transaction(engine) as connection:
            return [(row.name, row.super_stream) for row in streams_named(connection, vhost, None)]
    parts = {name: reader.partitions(name) for name in names}
    return [(part, name if parts[name] else None) for name in names for part in parts[name] or [name]]


def _compare(
    engine: sa.Engine,
    reader: StreamReader,
    vhost: str,
    name: str,
    super_stream: str | None,
    choose_windows: Callable[[StreamVerified], list[Range]],
    progress: Callable[[StreamVerified], None] | None,
) -> StreamVerified:
    result, stream = plan_verification(engine, reader, vhost, name, super_stream)
    if stream is None:
        return result
    for window in choose_windows(result):
        read = read_window(reader, name, window)
        with at_one_moment(engine) as connection:
            stored = Stored(connection, stream.stream_id, window)
        found = list(compare_window(*read, stored, result.from_offset))
        if found:
            # A prune may have deleted rows of messages that retention dropped after they were read.
            first = reader.bounds(name).first or 0
            found = [each for each in found if end_of(each) > first]
        result.add_window(window, found)
        result.messages += len(read[0])
        result.rows += sum(count for _, count in stored.rows)
        if progress is not None:
            progress(result)
    with at_one_moment(engine) as connection:
        # There should be no rows or blocks after the end, which a recorder may have moved since.
        rows = coverage_of(connection, [stream.stream_id])
        end = max([result.to_offset, *(row.to_offset for row in rows)])
        for difference in compare_window([], [], Stored(connection, stream.stream_id, (end, INTEGER_MAX)), 0):
            result.add(difference)
    return result


_LAST_STORED: Final = sql(f"""
    SELECT greatest(
        (SELECT max(r.stream_offset) FROM relatum.relationships r
         WHERE r.stream_id = :stream_id::integer AND r.stream_offset >= :at::bigint
            AND {part_may_hold_offsets("r", ":stream_id::integer", ":at::bigint", str(INTEGER_MAX))}),
        (SELECT max(last_offset) FROM relatum.time_blocks
         WHERE stream_id = :stream_id::integer AND first_offset >= :at::bigint))""")
"""Selects the greatest offset from `at` on with a row or a block; NULL if there is none."""


def plan_verification(
    engine: sa.Engine, reader: StreamReader, vhost: str, name: str, super_stream: str | None = None
) -> tuple[StreamVerified, StreamRow | None]:
    """Compare a stream's coverage; return the result with the range of offsets still to compare, and the stream's row.

    The row is None if there is nothing more to compare: the stream was never recorded, or the result has a difference
    of kind `replaced`.
    """
    result = StreamVerified(name, super_stream=super_stream)
    with at_one_moment(engine) as connection:
        stream = current_stream(connection, vhost, name)
        rows = coverage_of(connection, [stream.stream_id]) if stream else []
        recorded_to = max((row.to_offset for row in rows), default=0)
        parameters = {"stream_id": stream.stream_id, "at": recorded_to} if stream else None
        last_stored = connection.execute(_LAST_STORED, parameters).scalar_one() if parameters else None
    # Query the bounds after reading the table: by then, all covered offsets were in the stream.
    bounds = reader.bounds(name)
    if stream is None or not (rows or last_stored is not None):
        return result, None
    check_broker(engine, reader, stream)
    result.is_recorded, result.stream_id = True, stream.stream_id
    if not bounds.is_proven:
        result.unproven.append("the leader did not confirm the stream's end: coverage after it was not compared")
    if any(row.over_amqp and row.from_offset < row.to_offset for row in rows):
        result.unproven.append(
            "release 0.4 recorded a part of the stream over AMQP 0.9.1 and may have missed messages: in that part, "
            "missing rows were not searched for"
        )
    known = last_position(rows)
    agreed = None if known is None else agreement(reader, name, known)
    if known is not None and agreed is Agreement.OTHER:
        result.add(Difference("replaced", known.offset, table="streams"))
        return result, None
    for difference in compare_coverage(rows, bounds.first, bounds.last if bounds.is_proven else None):
        result.add(difference)
    result.to_offset = recorded_to
    if bounds.last is not None:
        # Include rows after the coverage, up to the stream's end.
        result.to_offset = min(bounds.last + 1, max(recorded_to, -1 if last_stored is None else last_stored + 1))
    result.from_offset = result.to_offset if bounds.first is None else min(bounds.first, result.to_offset)
    result.windows_total = -(-(result.to_offset - result.from_offset) // WINDOW_OFFSETS)
    return result, stream


def _chosen_windows(result: StreamVerified, sample: float | None, seed: int | None) -> list[Range]:
    """Choose the windows to compare, in order: all, or a share that the seed determines, at least one."""
    start, end = result.from_offset, result.to_offset
    every = [(at, min(end, at + WINDOW_OFFSETS)) for at in range(start, end, WINDOW_OFFSETS)]
    if sample is None or not every:
        return every
    count = min(len(every), max(1, round(sample * len(every))))
    return sorted(random.Random(f"{seed} {result.stream}").sample(every, count))  # noqa: S311 - nothing secret


WindowMessages = tuple[list[Message], list[Message]]
"""A window's messages, and later messages that may belong to a block which begins in the window."""


def read_window(reader: StreamReader, stream: str, window: Range) -> WindowMessages:
    """Read a window's messages, and as many later messages as a block of the time index can include."""
    start, end = window
    messages: list[Message] = []
    later: list[Message] = []
    for message in reader.iterate(stream, start):
        if message.offset < end:
            messages.append(message)
            continue
        later.append(message)
        if len(later) >= TIME_BLOCK_MESSAGES_MAX:
            break
    return messages, later


# --- repairing --------------------------------------------------------------------------------------------------------


def repair(report: VerifyReport, database: AnyDatabase, *, vhost: str = "/", dry_run: bool = True) -> list[str]:
    """Record again every window with differences, also those that the report does not list.

    One transaction per window of 20,000 offsets. Replaced streams are left out: `relatum record` starts them anew.
    Windows that were repaired after the report are recorded again, without effect.

    Args:
        report: The result of `verify`. Streams are read from its broker.
        database: PostgreSQL's URL, or a `Database`.
        vhost: The streams' virtual host. Default: "/".
        dry_run: Only return the lines, and change nothing. Default: True.

    Returns:
        A line for each difference, with what was or would be done; up to 1,000 per stream, and one to count the rest.

    Raises:
        Conflict: a stream has a new generation, or is not recorded any more; verify again.
        StreamUnavailable: no codec is installed to unpack a window, or the leader is unreachable; the window's rows are
            unchanged.
        AnotherBroker: a stream was recorded from another broker.
        BrokerUnavailable, DatabaseUnavailable, ReadTimeout: windows repaired before stay repaired; safe to repeat.
    """
    if not isinstance(report, VerifyReport):
        raise InvalidInput(f"report= takes the result of verify, not {shown(report)}")
    checked_name("vhost", vhost)
    different = [stream for stream in report.streams if stream.difference_count]
    with as_engine(database, idle_s=IDLE_S) as engine:
        rows = [_same_generation(engine, vhost, found) for found in different]
        if different and not dry_run:
            with StreamReader.open(report.broker) as reader:
                for found, stream in zip(different, rows, strict=True):
                    if not any(each.kind == "replaced" for each in found.differences):
                        _record_again(engine, reader, stream, found)
    return [line for found in different for line in _lines(found)]


def _lines(found: StreamVerified) -> list[str]:
    lines = [_describe(found.stream, difference) for difference in found.differences]
    more = found.difference_count - len(found.differences)
    return [*lines, f"{found.stream}: and {more:,} more differences of these kinds"] if more else lines


_REPLACED: Final = "not repaired: run `relatum record`, which detects this and starts over"


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
        raise Conflict(f"stream {found.stream!r} is not recorded any more, and nothing was repaired: verify again")
    if found.stream_id not in (None, stream.stream_id):
        raise Conflict(
            f"stream {found.stream!r} was declared again or forgotten since it was compared; nothing was repaired: "
            "verify again"
        )
    return stream


def _record_again(engine: sa.Engine, reader: StreamReader, stream: StreamRow, found: StreamVerified) -> None:
    """Repair the coverage as a whole, then each damaged window."""
    check_broker(engine, reader, stream)
    with transaction(engine) as connection:
        definitions = key_definitions(connection)
    filler = Filler(engine, reader, stream, definitions)
    recorded_to, end = _repair_coverage(engine, reader, stream, found)
    first = reader.bounds(stream.name).first or 0
    filler.fill((max(recorded_to, first), end))
    ranges = [*found.damaged, *((each.offset, each.to_offset or each.offset) for each in found.differences)]
    # Differences after the present end, or before the first retained offset, are gone.
    for low, high in merged((max(first, low), min(end, high)) for low, high in ranges):
        if not filler.record_again((low, high)):
            raise StreamUnavailable(
                f"some of the offsets {low} to {high - 1} of the stream {stream.name!r} cannot be unpacked here: their "
                "windows are unchanged; install the codec, and repair again",
                stream=stream.name,
            )


def _repair_coverage(engine: sa.Engine, reader: StreamReader, stream: StreamRow, found: StreamVerified) -> Range:
    """Remove rows and coverage after the stream's end, and set the tail to where recording continues.

    Returns the end of the coverage, and the offset at which recording continues: after all rows that were outside the
    coverage.
    """
    with transaction(engine) as connection:
        rows = lock_ranges(connection, stream.stream_id, (0, INTEGER_MAX))
        # Query the ends under the locks: a recorder may have extended the coverage just before.
        bounds = bounds_of_known(reader, stream.name)
        end = resume_at = max((row.to_offset for row in rows), default=0)
        if bounds.last is not None:
            end = min(end, bounds.last + 1) if bounds.is_proven else end
            resume_at = max(end, min(found.to_offset, bounds.last + 1))
        remove_from = max(end, bounds.first or 0)
        # Blocks that cross the end are cut there; their first halves are recorded again with the rest.
        uncover(connection, reader, stream, (remove_from, INTEGER_MAX), remove_from)
        rows_left = coverage_of(connection, [stream.stream_id])
        tail = next((row for row in rows_left if row.is_tail), None)
        if tail is None or not has_valid_tail(rows_left) or tail.to_offset != resume_at:
            known = last_position(rows_left)
            set_tail(connection, stream, tail, resume_at, known if known and known.offset < resume_at else None)
        check_same(reader, stream.name, rows)
    return end, resume_at
