"""Comparing the table with the streams, in both directions.

Complete: every retained message's values have their rows, and its time lies in a block of the time index. Sound: every
row's message has that value, every block's ends are those of its messages, and the coverage says neither more nor less
than what is recorded. Messages are read as a consumer reads them, decoded whole, not by the recorder's own extraction:
a fault of that one is found here.

Recording goes on meanwhile. What the table says is read first and the stream's ends after it, and a window's rows
are of one moment with the coverage that says so; what is recorded later is not judged.
"""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
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
from relatum.reading import Agreement, Broker, BrokerAddress, Message, StreamBounds, StreamReader, agreement, is_of_all
from relatum.recording._broker import check_broker
from relatum.recording._compare import (
    MARGIN_MESSAGES,
    Difference,
    Stored,
    StreamVerified,
    compare_blocks,
    compare_coverage,
    compare_rows,
    of_coverage,
    wanted_rows,
)
from relatum.recording._ranges import WINDOW_OFFSETS
from relatum.store.catalog import StreamRow, current_stream, streams_named
from relatum.store.coverage import TIME, CoverageRow, Range, coverage_of
from relatum.store.database import AnyDatabase, as_engine, at_one_moment, sql
from relatum.store.parts import part_may_hold_offsets
from relatum.store.translation import translated_errors


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """The comparison of several streams; `exact` is False where only a sample was compared, chosen by `seed`.

    The stream "" stands for rows that belong to no stream; it is there only where some were found. `failed` names the
    streams that could not be compared, and why; nothing is said of them.
    """

    streams: list[StreamVerified]
    exact: bool
    seed: int | None = None
    broker: str | Broker | None = field(default=None, repr=False, compare=False)
    failed: dict[str, RelatumError] = field(default_factory=dict, compare=False)

    @property
    def ok(self) -> bool:
        """Whether no difference was found, and all could be compared."""
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
    """Compare streams with the table, up to the coverage. Nothing is written.

    Args:
        broker: The broker's URL, or a `Broker`.
        database: PostgreSQL's URL, or a `Database`.
        streams: Streams; a super stream stands for its partitions. None: all that are recorded.
        sample: The share of windows of 20,000 offsets to compare, from 0 to 1, one of each stream at least; None
            compares all. A difference in a share d of all windows goes unseen with the probability
            (1 - d) ** (number of windows compared).
        seed: Chooses the same sample again; None for another each time, which the report names.
        progress: Called after each window.

    Raises:
        InvalidInput: `sample` is no share.
        NothingRecorded: all are meant, and none is recorded in the virtual host.
        StreamNotFound, NotAStream, AccessRefused, AnotherBroker: no stream can be compared. One that cannot stops no
            other; the report names it in `failed`.
        BrokerUnavailable, ReadTimeout: nothing can be said now; safe to repeat.
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
        found += verify_strays(engine)
        return VerifyReport(found, sample is None, seed, broker, failed)


def _checked_seed(sample: float | None, seed: int | None) -> int | None:
    """The seed of the sample; None if everything is compared."""
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
    """Streams, each with the super stream that it is a partition of: those named, or all that are recorded."""
    if names is None:
        with translated_errors(), engine.connect() as connection:
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
    """Compare one stream."""
    result, stream = plan_verification(engine, reader, vhost, name, super_stream)
    if stream is None:
        return result
    unlisted: list[tuple[int, int]] = []
    """Of each window with differences that there was no room to list: the last offset of those, and how many."""
    for window in chosen(result):
        read = read_window(reader, name, window)
        with at_one_moment(engine) as connection:
            stored = Stored(connection, stream.stream_id, window)
        found = list(compare_window(*read, stored, result.from_offset))
        listed = len(result.differences)
        result.add_window(window, found)
        if more := found[len(result.differences) - listed :]:
            unlisted.append((max(each.offset for each in more), len(more)))
        result.messages += len(read[0])
        result.rows += sum(count for _, count in stored.rows)
        if progress is not None:
            progress(result)
    if result.difference_count:
        # Messages that retention took meanwhile are no difference.
        first = reader.bounds(name).first or 0
        kept = [each for each in result.differences if each.offset >= first or each.table in ("coverage", "streams")]
        result.difference_count -= len(result.differences) - len(kept)
        result.difference_count -= sum(count for last, count in unlisted if last < first)
        result.differences = kept
    with at_one_moment(engine) as connection:
        # A recorder may have moved the coverage since.
        rows = coverage_of(connection, [stream.stream_id])
        end = max([result.to_offset, *(row.to_offset for row in rows)])
        for difference in outside(connection, stream.stream_id, end):
            result.add(difference)
    return result


_LAST_STORED: Final = sql(f"""
    SELECT greatest(
        (SELECT max(r.stream_offset) FROM relatum.relationships r
         WHERE r.stream_id = :stream_id::integer AND r.stream_offset >= :at::bigint
            AND {part_may_hold_offsets("r", ":stream_id::integer", ":at::bigint", str(INTEGER_MAX))}),
        (SELECT max(last_offset) FROM relatum.time_blocks
         WHERE stream_id = :stream_id::integer AND first_offset >= :at::bigint))""")
"""The greatest offset from one on of which the table holds a row or a block; NULL where there is none."""


def plan_verification(
    engine: sa.Engine, reader: StreamReader, vhost: str, name: str, super_stream: str | None = None
) -> tuple[StreamVerified, StreamRow | None]:
    """Decide what to compare of a stream: returns a result with the range of offsets, and the stream.

    What the tables say of the stream as a whole is compared here. Where there is nothing more to compare the stream is
    None: it was never recorded, or it was replaced, which the result says.
    """
    result = StreamVerified(name, super_stream=super_stream)
    with at_one_moment(engine) as connection:
        stream = current_stream(connection, vhost, name)
        rows = coverage_of(connection, [stream.stream_id]) if stream else []
        recorded_to = max((row.to_offset for row in rows), default=0)
        behind = {"stream_id": stream.stream_id, "at": recorded_to} if stream else None
        stray = connection.execute(_LAST_STORED, behind).scalar_one() if behind else None
    # Asked after the table: what it covers was in the stream by then.
    bounds = reader.bounds(name)
    if stream is None or not (rows or stray is not None):
        result.is_recorded = stream is not None and bool(rows)
        return result, None
    check_broker(engine, reader, stream)
    result.is_recorded, result.stream_id = True, stream.stream_id
    # What cannot be judged is no difference.
    if not bounds.is_proven:
        result.unproven.append("the stream's end is not its leader's word: coverage behind it was not judged")
    if any(row.over_amqp and row.from_offset < row.to_offset for row in rows):
        result.unproven.append(
            "recorded in part over AMQP 0.9.1, which release 0.4 did, and which proves nothing absent: rows missing "
            "there were not looked for"
        )
    wrong = wrong_positions(reader, name, rows)
    with at_one_moment(engine) as connection:
        replaced = is_replaced(connection, reader, name, rows, wrong, bounds)
    if replaced:
        result.add(Difference("replaced", max(row.to_offset for row in wrong), table="streams"))
        return result, None
    for row, detail in wrong.items():
        result.add(of_coverage(row.to_offset, row.to_offset, detail))
    for difference in compare_coverage(rows, bounds.first, bounds.last if bounds.is_proven else None):
        result.add(difference)
    result.to_offset = recorded_to
    if bounds.last is not None:
        # Also rows behind the coverage, as far as there are messages.
        result.to_offset = min(bounds.last + 1, max(recorded_to, -1 if stray is None else stray + 1))
    result.from_offset = result.to_offset if bounds.first is None else min(bounds.first, result.to_offset)
    result.windows_total = -(-(result.to_offset - result.from_offset) // WINDOW_OFFSETS)
    return result, stream


ENDS_BEFORE: Final = "the stream ends before what lay last"
OTHER: Final = "another message lies where one lay last, or none"


def wrong_positions(reader: StreamReader, stream: str, rows: Sequence[CoverageRow]) -> dict[CoverageRow, str]:
    """Ranges that remember a wrong last position, and what is wrong. Expired positions cannot be judged."""
    judged = ((row, _wrong(reader, stream, row)) for row in rows)
    return {row: wrong for row, wrong in judged if wrong is not None}


def _wrong(reader: StreamReader, stream: str, row: CoverageRow) -> str | None:
    at, holds = row.position, row.from_offset < row.to_offset
    if at is None:
        is_half = row.last_offset is not None or row.last_fingerprint is not None
        return "what lay last is not known" if is_half or (row.is_tail and holds) else None
    if at.offset >= row.to_offset or (row.with_time and holds and at.chunk_ms is None):
        return "what lay last cannot have"
    found = agreement(reader, stream, at)
    if found in (Agreement.OTHER, Agreement.ENDS_BEFORE):
        return ENDS_BEFORE if found is Agreement.ENDS_BEFORE else OTHER
    # Equal messages of one chunk look the same: the last one has none behind it.
    if found is Agreement.SAME and row.from_offset <= at.offset < row.to_offset - 1 and not row.over_amqp:
        following = reader.iterate(stream, at.offset + 1, stop=row.to_offset)
        return "what lay last is followed by a message" if next(following, None) else None
    return None


EVIDENCE_MESSAGES: Final = 16
"""Messages before a place that differs, whose rows decide whether the stream differs or the place is wrong."""


def is_replaced(
    connection: sa.Connection,
    reader: StreamReader,
    stream: str,
    rows: Sequence[CoverageRow],
    wrong: Mapping[CoverageRow, str],
    bounds: StreamBounds,
) -> bool:
    """Whether the stream itself is another one or lost its tail, rather than the remembered position being wrong.

    A log grows at its end only: where its last position agrees, all before it does. Where that does not, the rows and
    blocks of the messages before it decide: those of another stream have other values and times.
    """
    known = [row for row in rows if row.position is not None]
    row = max(known, key=lambda each: (each.to_offset, each.last_offset or 0), default=None)
    if row is None or row.last_offset is None or wrong.get(row) not in (OTHER, ENDS_BEFORE):
        return False
    if wrong[row] == ENDS_BEFORE:
        return True
    start, end = max(bounds.first or 0, row.last_offset + 1 - EVIDENCE_MESSAGES), row.last_offset + 1
    messages = list(reader.iterate(stream, start, stop=end))
    stored = Stored(connection, row.stream_id, (start, end))
    wanted, _ = wanted_rows(messages, stored)
    timed = [each for each in messages if each.time_us is not None and stored.covers(each.offset, TIME)]
    missing = len(wanted - {row for row, _ in stored.rows})
    missing += sum(each.kind == "time_missing" for each in compare_blocks(timed, stored, end))
    return 2 * missing >= len(wanted) + len(timed)


def windows(start: int, end: int) -> list[Range]:
    """The windows of a range of offsets."""
    return [(at, min(end, at + WINDOW_OFFSETS)) for at in range(start, end, WINDOW_OFFSETS)]


def _chosen_windows(result: StreamVerified, sample: float | None, seed: int | None) -> list[Range]:
    """The windows to compare, in order: all, or a share chosen by the seed, at least one."""
    every = windows(result.from_offset, result.to_offset)
    if sample is None or not every:
        return every
    count = min(len(every), max(1, round(sample * len(every))))
    return sorted(random.Random(f"{seed} {result.stream}").sample(every, count))  # noqa: S311 - nothing secret


WindowMessages = tuple[list[Message], list[Message]]
"""A window's messages, and those behind it that a block which begins in it may hold."""


def read_window(reader: StreamReader, stream: str, window: Range) -> WindowMessages:
    """Read a window's messages, and as many behind it as a block of the time index can hold."""
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
    """Where the table differs from a window's messages."""
    yield from compare_rows(messages, stored)
    yield from compare_blocks([*messages, *behind], stored, first_retained)


# --- what can only be wrong -------------------------------------------------------------------------------------------

_STREAM_IDS: Final = sql("SELECT stream_id FROM relatum.streams ORDER BY stream_id")


def outside(connection: sa.Connection, stream_id: int, end: int) -> list[Difference]:
    """Rows and blocks before offset 0, or from `end` on, where none should be."""
    return [
        difference
        for window in ((INTEGER_MIN, 0), (end, INTEGER_MAX))
        for difference in compare_window([], [], Stored(connection, stream_id, window), 0)
    ]


STRAYS: Final = (("relationships", "stream_offset"), ("time_blocks", "first_offset"))
"""The tables that name streams without a foreign key, and their offsets."""


def of_no_stream(connection: sa.Connection) -> str:
    """SQL: whether a row's `stream_id` is no stream's.

    Ids between those that are known are ranges, so that an index by blocks finds them without reading the table.
    """
    known = list(connection.scalars(_STREAM_IDS))
    if not known:
        return "true"
    gaps = [f"stream_id > {low} AND stream_id < {high}" for low, high in pairwise(known) if high > low + 1]
    return " OR ".join([f"stream_id < {known[0]}", f"stream_id > {known[-1]}", *gaps])


def verify_strays(engine: sa.Engine) -> list[StreamVerified]:
    """Rows of no stream, as one more result if there are any."""
    result = StreamVerified("")
    # In one snapshot: a stream's row is written before its other rows.
    with at_one_moment(engine) as connection:
        among = of_no_stream(connection)
        for table, offset in STRAYS:
            found = f"SELECT stream_id, min({offset}), max({offset}), count(*) FROM relatum.{table} WHERE {among}"
            for stream_id, first, last, count in connection.execute(sql(f"{found} GROUP BY 1 ORDER BY 1")):
                detail = f"{count:,} rows of the stream id {stream_id}"
                result.add(Difference("unknown_stream", first, table=table, to_offset=last + 1, detail=detail))
    return [result] if result.difference_count else []
