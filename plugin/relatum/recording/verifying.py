"""Comparing the table with the streams, in both directions.

Complete: every value of a retained message has its row, and its time is in a block of the time index. Sound: every
row's message has that value, every block's ends are those of its messages, and the coverage says exactly what is
recorded. Messages are decoded as a consumer decodes them, not by the recorder's extractor, so that its faults are
found.

Recording may continue. The table is read before the stream's ends, and a window's rows are of one snapshot with the
coverage; what is recorded later is not compared.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

import sqlalchemy as sa

from relatum.checks import checked_count, checked_names, shown
from relatum.errors import (
    AnotherBroker,
    ConfigurationError,
    DatabaseUnavailable,
    InvalidInput,
    NothingRecorded,
    RelatumError,
)
from relatum.limits import INTEGER_MAX, INTEGER_MIN
from relatum.reading import Agreement, Broker, BrokerAddress, Message, StreamReader, agreement, is_of_all
from relatum.recording.comparing import (
    MARGIN_MESSAGES,
    Difference,
    Stored,
    StreamVerified,
    compare_blocks,
    compare_coverage,
    compare_rows,
    end_of,
)
from relatum.recording.own_broker import check_broker
from relatum.recording.ranges import WINDOW_OFFSETS
from relatum.store.catalog import StreamRow, current_stream, streams_named
from relatum.store.coverage import Range, coverage_of, last_position
from relatum.store.database import AnyDatabase, as_engine, at_one_moment, sql, transaction
from relatum.store.parts import part_may_hold_offsets


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """The comparison of several streams. `exact` is False if only a sample was compared, chosen by `seed`.

    `failed` holds the streams that could not be compared, with the errors; they are not in `streams`.
    """

    streams: list[StreamVerified]
    exact: bool
    seed: int | None = None
    broker: str | Broker | None = field(default=None, repr=False, compare=False)
    failed: dict[str, RelatumError] = field(default_factory=dict, compare=False)

    @property
    def ok(self) -> bool:
        """Whether all streams were compared and no difference was found."""
        return not self.failed and not any(stream.difference_count for stream in self.streams)


def verify(
    broker: str | Broker,
    database: AnyDatabase,
    streams: Sequence[str] | None = None,
    *,
    sample: float | None = None,
    seed: int | None = None,
    progress: Callable[[StreamVerified], None] | None = None,
) -> VerifyReport:
    """Compare streams with the table, as far as they are recorded. Writes nothing.

    Args:
        broker: The broker's URL, or a `Broker`.
        database: PostgreSQL's URL, or a `Database`.
        streams: Streams and super streams, which stand for their partitions. None (default): all recorded streams.
        sample: The share of windows of 20,000 offsets to compare, from 0 to 1, at least one of each stream; None
            (default) compares all. Differences in a share d of all windows are missed with a probability of
            (1 - d) ** (number of windows compared).
        seed: Chooses the same sample again. None (default): a new seed each time, which the report holds.
        progress: Called after each window.

    Raises:
        InvalidInput: `sample` is not a number from 0 to 1.
        NothingRecorded: `streams` is None, and no stream of the virtual host is recorded.
        StreamNotFound, NotAStream, AccessRefused, AnotherBroker: no stream can be compared. If only some cannot,
            they are in the report's `failed`.
        BrokerUnavailable, ReadTimeout: there is no result; safe to repeat.
    """
    if streams is not None:
        streams = checked_names("streams", streams)
    seed = _checked_seed(sample, seed)
    address = BrokerAddress.of(broker)
    chosen = partial(_chosen_windows, sample=sample, seed=seed)
    with as_engine(database) as engine, StreamReader.open(address) as reader:
        found: list[StreamVerified] = []
        failed: dict[str, RelatumError] = {}
        meant = meant_streams(engine, reader, address.vhost, streams)
        if streams is None and not meant:
            message = f"no stream of the virtual host {address.vhost!r} is recorded: nothing to compare"
            raise NothingRecorded(message, vhost=address.vhost)
        for name, super_stream in meant:
            try:
                found.append(_compared(engine, reader, address.vhost, name, super_stream, chosen, progress))
            except AnotherBroker as error:
                failed[name] = error
            except (DatabaseUnavailable, ConfigurationError):
                raise
            except RelatumError as error:
                if is_of_all(error):
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
    """Return streams with their super streams: those named, or all recorded ones."""
    if names is None:
        with transaction(engine) as connection:
            return [(row.name, row.super_stream) for row in streams_named(connection, vhost, None)]
    parts = {name: reader.partitions(name) for name in names}
    return [(part, name if parts[name] else None) for name in names for part in parts[name] or [name]]


def _compared(
    engine: sa.Engine,
    reader: StreamReader,
    vhost: str,
    name: str,
    super_stream: str | None,
    chosen: Callable[[StreamVerified], list[Range]],
    progress: Callable[[StreamVerified], None] | None,
) -> StreamVerified:
    result, stream = plan_verification(engine, reader, vhost, name, super_stream)
    if stream is None:
        return result
    for window in chosen(result):
        read = read_window(reader, name, window)
        with at_one_moment(engine) as connection:
            stored = Stored(connection, stream.stream_id, window)
        found = list(compare_window(*read, stored, result.from_offset))
        if found:
            # Rows of messages that retention dropped since they were read may have been pruned.
            first = reader.bounds(name).first or 0
            found = [each for each in found if end_of(each) > first]
        result.add_window(window, found)
        result.messages += len(read[0])
        result.rows += sum(count for _, count in stored.rows)
        if progress is not None:
            progress(result)
    with at_one_moment(engine) as connection:
        # There should be no rows or blocks after the end. A recorder may have moved the coverage since.
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
    """Plan the comparison of a stream: return a result with the range of offsets, and the stream's row.

    The coverage is compared here. The row is None if nothing is left to compare: the stream was never recorded, or it
    was replaced, which the result says.
    """
    result = StreamVerified(name, super_stream=super_stream)
    with at_one_moment(engine) as connection:
        stream = current_stream(connection, vhost, name)
        rows = coverage_of(connection, [stream.stream_id]) if stream else []
        recorded_to = max((row.to_offset for row in rows), default=0)
        behind = {"stream_id": stream.stream_id, "at": recorded_to} if stream else None
        stray = connection.execute(_LAST_STORED, behind).scalar_one() if behind else None
    # Asked after reading the table: what it covers was in the stream by then.
    bounds = reader.bounds(name)
    if stream is None or not (rows or stray is not None):
        result.is_recorded = stream is not None and bool(rows)
        return result, None
    check_broker(engine, reader, stream)
    result.is_recorded, result.stream_id = True, stream.stream_id
    # What cannot be proven is no difference.
    if not bounds.is_proven:
        result.unproven.append("the leader did not confirm the stream's end: coverage after it was not compared")
    if any(row.over_amqp and row.from_offset < row.to_offset for row in rows):
        result.unproven.append(
            "release 0.4 recorded a part of it over AMQP 0.9.1, which may have missed messages: rows missing there "
            "were not searched for"
        )
    known = last_position(rows)
    agreed = None if known is None else agreement(reader, name, known)
    if known is not None and agreed in (Agreement.OTHER, Agreement.ENDS_BEFORE):
        result.add(Difference("replaced", known.offset, table="streams"))
        return result, None
    for difference in compare_coverage(rows, bounds.first, bounds.last if bounds.is_proven else None):
        result.add(difference)
    result.to_offset = recorded_to
    if bounds.last is not None:
        # Include rows after the coverage, as far as there are messages.
        result.to_offset = min(bounds.last + 1, max(recorded_to, -1 if stray is None else stray + 1))
    result.from_offset = result.to_offset if bounds.first is None else min(bounds.first, result.to_offset)
    result.windows_total = -(-(result.to_offset - result.from_offset) // WINDOW_OFFSETS)
    return result, stream


def windows(start: int, end: int) -> list[Range]:
    """Split a range of offsets into windows."""
    return [(at, min(end, at + WINDOW_OFFSETS)) for at in range(start, end, WINDOW_OFFSETS)]


def _chosen_windows(result: StreamVerified, sample: float | None, seed: int | None) -> list[Range]:
    """Choose the windows to compare, in order: all, or a share chosen by the seed, at least one."""
    every = windows(result.from_offset, result.to_offset)
    if sample is None or not every:
        return every
    count = min(len(every), max(1, round(sample * len(every))))
    return sorted(random.Random(f"{seed} {result.stream}").sample(every, count))  # noqa: S311 - nothing secret


WindowMessages = tuple[list[Message], list[Message]]
"""A window's messages, and those after it that a block which begins in it may include."""


def read_window(reader: StreamReader, stream: str, window: Range) -> WindowMessages:
    """Read a window's messages, and as many after it as a block of the time index can include."""
    start, end = window
    messages: list[Message] = []
    behind: list[Message] = []
    for message in reader.iterate(stream, start):
        if message.offset < end:
            messages.append(message)
            continue
        behind.append(message)
        if len(behind) >= MARGIN_MESSAGES:
            break
    return messages, behind


def compare_window(
    messages: Sequence[Message], behind: Sequence[Message], stored: Stored, first_retained: int
) -> Iterator[Difference]:
    """Yield the differences between the table and a window's messages."""
    yield from compare_rows(messages, stored)
    yield from compare_blocks([*messages, *behind], stored, first_retained)
