"""Comparing the table with the streams, in both directions.

Complete: every retained message's values have their rows, and its time lies in a block of the time index. Sound: every
row's message has that value. Messages are read as a consumer reads them, decoded whole, not by the recorder's own
extraction: a fault of that one is found here.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Final

import sqlalchemy as sa

from relatum.keys import KeyDefinition
from relatum.reading import BrokerAddress, StreamReader
from relatum.recording._compare import (
    DIFFERENCES_MAX,
    Difference,
    Expected,
    Row,
    StreamVerified,
    compare_rows,
    compare_times,
)
from relatum.recording._opening import is_same
from relatum.store import (
    CoverageRow,
    Range,
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
        return VerifyReport(
            [_verify_stream(engine, reader, address.vhost, name, sample, progress) for name in names],
            exact=sample is None,
        )


def _verify_stream(
    engine: sa.Engine,
    reader: StreamReader,
    vhost: str,
    name: str,
    sample: float | None,
    progress: Callable[[StreamVerified], None] | None,
) -> StreamVerified:
    result, subject = plan_verification(engine, reader, vhost, name)
    if subject is None:
        return result
    comparison = Comparison(engine, reader, subject)
    for window in windows(result.from_offset, result.to_offset, sample):
        comparison.compare(window, result)
        if progress is not None:
            progress(result)
    comparison.finish(result)
    return result


@dataclass(frozen=True, slots=True)
class Subject:
    """A stream to compare, and the keys in force."""

    stream: StreamRow
    definitions: tuple[KeyDefinition, ...]


def plan_verification(
    engine: sa.Engine, reader: StreamReader, vhost: str, name: str
) -> tuple[StreamVerified, Subject | None]:
    """What to compare of a stream: a result whose offsets say up to where, and the stream.

    Where there is nothing to compare the stream is None: it was never recorded, or it was replaced, which the result
    says.

    Raises:
        StreamNotFound: there is no such stream.
    """
    result = StreamVerified(name)
    bounds = reader.bounds(name)
    with translated_errors(), engine.connect() as connection:
        stream = current_stream(connection, vhost, name)
        definitions = key_definitions(connection)
        tail = tail_of(connection, stream.stream_id) if stream else None
        covering = coverage_of(connection, [stream.stream_id]) if stream else []
    if stream is None or tail is None:
        return result, None
    position = last_position(covering)
    if position is not None and not is_same(reader, name, position, bounds):
        result.add(Difference("replaced", position.offset))
        return result, None
    result.from_offset = tail.to_offset if bounds.first is None else min(bounds.first, tail.to_offset)
    result.to_offset = tail.to_offset
    return result, Subject(stream, tuple(definitions))


def windows(start: int, end: int, sample: float | None) -> Iterator[Range]:
    """The windows of a range of offsets, or a random share of them."""
    for at in range(start, end, WINDOW_OFFSETS):
        if sample is None or random.random() < sample:  # noqa: S311 - a sample, nothing secret
            yield at, min(end, at + WINDOW_OFFSETS)


class Comparison:
    """Compares windows of one stream with the table."""

    def __init__(self, engine: sa.Engine, reader: StreamReader, subject: Subject) -> None:
        self._engine = engine
        self._reader = reader
        self._stream = subject.stream
        self._definitions = subject.definitions

    def compare(self, window: Range, result: StreamVerified) -> None:
        """Compare one window, and add what was found to the result."""
        start, end = window
        messages = list(self._reader.iterate(self._stream.name, start, stop=end))
        rows, blocks, covering = self._stored(start, end)
        expected = Expected(self._definitions, covering)
        compare_rows(messages, rows, expected, result)
        compare_times(messages, blocks, expected, result)
        result.messages += len(messages)
        result.rows += len(rows)

    def _stored(self, start: int, end: int) -> tuple[list[Row], list[tuple[int, int, int, int]], list[CoverageRow]]:
        """The table's rows of a window, the blocks of the time index that reach into it, and the coverage.

        All of one moment: rows that a back-fill writes meanwhile come with the coverage that says so.
        """
        stream_id = self._stream.stream_id
        with translated_errors(), self._engine.connect() as opened:
            connection = opened.execution_options(isolation_level="REPEATABLE READ")
            covering = coverage_of(connection, [stream_id])
            rows = connection.execute(
                sa.select(*_ROW).where(
                    relationships.c.stream_id == stream_id,
                    relationships.c.stream_offset >= start,
                    relationships.c.stream_offset < end,
                )
            ).all()
            blocks = connection.execute(
                sa.select(
                    time_blocks.c.first_offset, time_blocks.c.last_offset, time_blocks.c.min_us, time_blocks.c.max_us
                ).where(
                    time_blocks.c.stream_id == stream_id,
                    time_blocks.c.first_offset < end,
                    time_blocks.c.last_offset >= start,
                )
            ).all()
        return [tuple(row) for row in rows], [tuple(block) for block in blocks], covering

    def finish(self, result: StreamVerified) -> None:
        """Do what takes all windows' results: look behind the coverage, and forgive what retention took meanwhile."""
        self._forgive_expired(result)
        self._beyond(result)

    def _beyond(self, result: StreamVerified) -> None:
        """Rows behind the coverage's end can only be wrong. A recorder may have moved it since: ask again."""
        names = {definition.key_id: definition.name for definition in self._definitions}
        stream_id = self._stream.stream_id
        end = sa.select(sa.func.max(coverage.c.to_offset)).where(coverage.c.stream_id == stream_id)
        behind = relationships.c.stream_offset >= end.scalar_subquery()
        query = sa.select(*_ROW).where(relationships.c.stream_id == stream_id, behind).limit(DIFFERENCES_MAX)
        with translated_errors(), self._engine.connect() as connection:
            rows = connection.execute(query).all()
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


_ROW: Final = [relationships.c[name] for name in ("stream_offset", "key_id", "value", "time_us")]
