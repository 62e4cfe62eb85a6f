"""Comparing the table with the streams, in both directions.

Complete: every retained message's values have their rows, and its time lies in a block of the time index. Sound: every
row's message has that value. Messages are read as a consumer reads them, decoded whole, not by the recorder's own
extraction: a fault of that one is found here.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Final

import sqlalchemy as sa

from relatum.keys import InvalidValue, KeyDefinition
from relatum.reading import BrokerAddress, Message, StreamReader, TimeSource
from relatum.recording._opening import is_same
from relatum.recording._ranges import unrecorded
from relatum.store import (
    TIME,
    CoverageRow,
    StreamRow,
    as_engine,
    coverage,
    coverage_of,
    current_stream,
    key_definitions,
    last_position,
    relationships,
    tail_of,
    time_blocks,
    translated_errors,
)

WINDOW_OFFSETS: Final = 20_000
"""Offsets compared at a time: bounds memory to a few MB."""

DIFFERENCES_MAX: Final = 1_000
"""Differences listed for one stream; more are counted."""

Row = tuple[int, int, str, int | None]
"""Offset, key id, canonical value, time in microseconds."""


@dataclass(frozen=True, slots=True)
class Difference:
    """One row or message on which table and stream disagree.

    `kind` is `missing` (a message's value has no row), `unsound` (a row's message has no such value, or there is no
    such message), `duplicate` (a row is there more than once), `time_missing` (no block of the time index holds the
    message) or `replaced` (the stream is not the one that was recorded).
    """

    kind: str
    offset: int
    key: str = ""
    value: str = ""
    time_us: int | None = None


@dataclass(slots=True)
class StreamVerified:
    """What was compared of one stream, and where it differs."""

    stream: str
    messages: int = 0
    rows: int = 0
    from_offset: int = 0
    to_offset: int = 0
    differences: list[Difference] = field(default_factory=list)
    difference_count: int = 0

    def add(self, difference: Difference) -> None:
        """Count a difference, and list it while there is room."""
        self.difference_count += 1
        if len(self.differences) < DIFFERENCES_MAX:
            self.differences.append(difference)


@dataclass(frozen=True, slots=True)
class VerifyReport:
    """The comparison of several streams; `exact` is False where only a sample was compared."""

    streams: list[StreamVerified]
    exact: bool

    @property
    def ok(self) -> bool:
        """Whether no difference was found."""
        return not any(stream.difference_count for stream in self.streams)


def verify(
    broker: str | BrokerAddress,
    database: str | sa.Engine,
    streams: Sequence[str],
    *,
    stream_url: str | None = None,
    sample: float | None = None,
    progress: Callable[[StreamVerified], None] | None = None,
) -> VerifyReport:
    """Compare streams with the table, up to the coverage. Nothing is written.

    Args:
        broker: The broker's URL or address.
        database: PostgreSQL's URL, or an engine.
        streams: Streams; a super stream stands for its partitions.
        stream_url: The stream protocol's URL, where it cannot be told from the broker's.
        sample: The share of windows of 20,000 offsets to compare, 0 to 1; None compares all. A difference in a share
            d of all windows goes unseen with the probability (1 - d) ** (number of windows compared).
        progress: Called after each window.

    Raises:
        StreamNotFound: there is no such stream.
    """
    address = broker if isinstance(broker, BrokerAddress) else BrokerAddress.parse(broker, stream_url)
    with as_engine(database) as engine, StreamReader.open(address) as reader:
        names = list(chain.from_iterable(reader.partitions(name) or [name] for name in streams))
        check = _Verification(engine, reader, address.vhost, sample, progress)
        return VerifyReport([check.stream(name) for name in names], exact=sample is None)


class _Verification:
    """One run over some streams."""

    def __init__(
        self,
        engine: sa.Engine,
        reader: StreamReader,
        vhost: str,
        sample: float | None,
        progress: Callable[[StreamVerified], None] | None,
    ) -> None:
        self._engine = engine
        self._reader = reader
        self._vhost = vhost
        self._sample = sample
        self._progress = progress

    def stream(self, name: str) -> StreamVerified:
        result = StreamVerified(name)
        bounds = self._reader.bounds(name)
        with translated_errors(), self._engine.connect() as connection:
            stream = current_stream(connection, self._vhost, name)
            definitions = key_definitions(connection)
            tail = tail_of(connection, stream.stream_id) if stream else None
            covering = coverage_of(connection, [stream.stream_id]) if stream else []
        if stream is None or tail is None:
            return result
        position = last_position(covering)
        if position is not None and not is_same(self._reader, name, position, bounds):
            result.add(Difference("replaced", position.offset))
            return result
        first = tail.to_offset if bounds.first is None else min(bounds.first, tail.to_offset)
        result.from_offset, result.to_offset = first, tail.to_offset
        self._compare(stream, definitions, result)
        self._beyond(stream, definitions, result)
        return result

    def _compare(
        self,
        stream: StreamRow,
        definitions: Sequence[KeyDefinition],
        result: StreamVerified,
    ) -> None:
        for start, end in self._windows(result.from_offset, result.to_offset):
            messages = list(self._reader.iterate(result.stream, start, stop=end))
            rows, blocks, covering = self._stored(stream, start, end)
            expected = _Expected(definitions, covering)
            _compare_rows(messages, rows, expected, result)
            _compare_times(messages, blocks, expected, result)
            result.messages += len(messages)
            result.rows += len(rows)
            if self._progress is not None:
                self._progress(result)
        self._forgive_expired(result)

    def _windows(self, start: int, end: int) -> Iterator[tuple[int, int]]:
        for at in range(start, end, WINDOW_OFFSETS):
            if self._sample is None or random.random() < self._sample:  # noqa: S311 - a sample, nothing secret
                yield at, min(end, at + WINDOW_OFFSETS)

    def _stored(
        self, stream: StreamRow, start: int, end: int
    ) -> tuple[list[Row], list[tuple[int, int, int, int]], list[CoverageRow]]:
        """The table's rows of a window, the blocks of the time index that reach into it, and the coverage.

        All of one moment: rows that a back-fill writes meanwhile come with the coverage that says so.
        """
        with translated_errors(), self._engine.connect() as opened:
            connection = opened.execution_options(isolation_level="REPEATABLE READ")
            covering = coverage_of(connection, [stream.stream_id])
            rows = connection.execute(
                sa.select(
                    relationships.c.stream_offset,
                    relationships.c.key_id,
                    relationships.c.value,
                    relationships.c.time_us,
                ).where(
                    relationships.c.stream_id == stream.stream_id,
                    relationships.c.stream_offset >= start,
                    relationships.c.stream_offset < end,
                )
            ).all()
            blocks = connection.execute(
                sa.select(
                    time_blocks.c.first_offset, time_blocks.c.last_offset, time_blocks.c.min_us, time_blocks.c.max_us
                ).where(
                    time_blocks.c.stream_id == stream.stream_id,
                    time_blocks.c.first_offset < end,
                    time_blocks.c.last_offset >= start,
                )
            ).all()
        return [tuple(row) for row in rows], [tuple(block) for block in blocks], covering

    def _beyond(self, stream: StreamRow, definitions: Sequence[KeyDefinition], result: StreamVerified) -> None:
        """Rows behind the coverage's end can only be wrong. A recorder may have moved it since: ask again."""
        names = {definition.key_id: definition.name for definition in definitions}
        with translated_errors(), self._engine.connect() as connection:
            end = sa.select(sa.func.max(coverage.c.to_offset)).where(coverage.c.stream_id == stream.stream_id)
            rows = connection.execute(
                sa.select(
                    relationships.c.stream_offset,
                    relationships.c.key_id,
                    relationships.c.value,
                    relationships.c.time_us,
                )
                .where(
                    relationships.c.stream_id == stream.stream_id,
                    relationships.c.stream_offset >= end.scalar_subquery(),
                )
                .limit(DIFFERENCES_MAX)
            ).all()
        for offset, key_id, value, time_us in rows:
            if key_id in names:
                result.add(Difference("unsound", offset, names[key_id], value, time_us))

    def _forgive_expired(self, result: StreamVerified) -> None:
        """What retention took while we compared is no difference."""
        if not result.difference_count:
            return
        first = self._reader.bounds(result.stream).first or 0
        kept = [difference for difference in result.differences if difference.offset >= first]
        result.difference_count -= len(result.differences) - len(kept)
        result.differences = kept


class _Expected:
    """What the table should hold of a message, by the definitions in force and what the coverage says of its offset."""

    def __init__(self, definitions: Sequence[KeyDefinition], covering: Sequence[CoverageRow]) -> None:
        self.definitions = {definition.key_id: definition for definition in definitions}
        everything = (0, max((row.to_offset for row in covering), default=0))
        self._gaps = unrecorded(covering, everything, [*self.definitions, TIME])
        self._over_amqp = [
            (row.from_offset, row.to_offset)
            for row in covering
            if row.last_fingerprint is not None and row.last_chunk_ms is None
        ]

    def time(self, message: Message) -> int | None:
        """The time the table should have. AMQP 0.9.1 does not show a chunk's, so what it recorded may lack it."""
        if message.time_source is TimeSource.CHUNK and any(
            start <= message.offset < end for start, end in self._over_amqp
        ):
            return None
        return message.time_us

    def covers(self, offset: int, key_id: int) -> bool:
        """Whether the offset is recorded for the key."""
        return not any(gap.from_offset <= offset < gap.to_offset and key_id in gap.key_ids for gap in self._gaps)

    def rows(self, message: Message) -> Iterator[Row]:
        """The rows the message should have."""
        if not message.is_amqp:
            return
        for key_id, definition in self.definitions.items():
            if not self.covers(message.offset, key_id):
                continue
            try:
                value = definition.value_of(message.headers, lambda name: getattr(message.properties, name))
            except InvalidValue:
                continue
            if value is not None:
                yield message.offset, key_id, value, self.time(message)


def _compare_rows(
    messages: Sequence[Message], rows: Sequence[Row], expected: _Expected, result: StreamVerified
) -> None:
    wanted = {row for message in messages for row in expected.rows(message)}
    stored = Counter(row for row in rows if row[1] in expected.definitions)
    for row in sorted(wanted - stored.keys(), key=_order):
        result.add(_difference("missing", row, expected))
    for row, count in sorted(stored.items(), key=lambda item: _order(item[0])):
        if row not in wanted:
            result.add(_difference("unsound", row, expected))
        elif count > 1:
            result.add(_difference("duplicate", row, expected))


def _order(row: Row) -> tuple[int, int, str]:
    """Rows in the order of offsets; a time may be None, so it takes no part."""
    return row[:3]


def _difference(kind: str, row: Row, expected: _Expected) -> Difference:
    offset, key_id, value, time_us = row
    return Difference(kind, offset, expected.definitions[key_id].name, value, time_us)


def _compare_times(
    messages: Sequence[Message],
    blocks: Sequence[tuple[int, int, int, int]],
    expected: _Expected,
    result: StreamVerified,
) -> None:
    """Each message's time must lie in a block that holds its offset. Blocks and messages are both walked in order."""
    waiting = sorted(blocks, reverse=True)
    active: list[tuple[int, int, int, int]] = []
    for message in messages:
        while waiting and waiting[-1][0] <= message.offset:
            active.append(waiting.pop())
        active = [block for block in active if block[1] >= message.offset]
        time_us = expected.time(message)
        if time_us is None or not expected.covers(message.offset, TIME):
            continue
        if not any(low <= time_us <= high for _, _, low, high in active):
            result.add(Difference("time_missing", message.offset, "time", "", time_us))
