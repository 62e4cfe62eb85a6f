"""Back-fill: recording what lies behind the tail, for streams and keys that were not recorded from the start.

The offsets that some key lacks are found from the coverage and read again. Each batch moves a range of its own by
compare-and-set, so a back-fill that is killed is resumed by running it again: what it wrote is covered, the rest is
not. Live recording goes on beside it; the two never write the same offsets for the same key.
"""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import sqlalchemy as sa

from relatum.errors import CoverageConflict, KeyNotDefined
from relatum.keys import KeyDefinition
from relatum.reading import BrokerAddress, StreamReader
from relatum.recording._batch import Batch, clipped
from relatum.recording._commit import write_rows
from relatum.recording._extract import Extractor
from relatum.recording._opening import indexes_time, is_same
from relatum.recording._ranges import Segment, unrecorded
from relatum.store import (
    TIME,
    CoverageRow,
    StreamRow,
    advance,
    as_engine,
    coverage_of,
    ensure_stream,
    key_definitions,
    last_position,
    lock_stream,
    open_range,
    tail_of,
    translated_errors,
)

CONFLICTS_MAX: Final = 20
"""How often a back-fill plans anew because somebody else moved the coverage, before it gives up."""


@dataclass(frozen=True, slots=True)
class BackfillProgress:
    """How far a back-fill has come: offsets [from_offset, to_offset) are the part that is read now."""

    stream: str
    at_offset: int
    from_offset: int
    to_offset: int
    messages: int
    rows: int


@dataclass(frozen=True, slots=True)
class BackfillReport:
    """What a back-fill did: messages read and rows written, between the first and last offset that lacked a key."""

    stream: str
    messages: int
    rows: int
    from_offset: int
    to_offset: int
    seconds: float


ProgressListener = Callable[[BackfillProgress], None]


def backfill(
    broker: str | BrokerAddress,
    database: str | sa.Engine,
    stream: str,
    *,
    keys: Sequence[str] | None = None,
    stream_url: str | None = None,
    progress: ProgressListener | None = None,
    stop: threading.Event | None = None,
) -> BackfillReport:
    """Record the retained messages of a stream that lack some key. Safe to repeat, and beside a recorder.

    Args:
        broker: The broker's URL or address.
        database: PostgreSQL's URL, or an engine.
        stream: One stream; for a super stream call it for each partition.
        keys: Names of defined keys; None: all that are in force, and the time unless it is switched off.
        stream_url: The stream protocol's URL, where it cannot be told from the broker's.
        progress: Called after each transaction.
        stop: Set it to end after the transaction under way; the report says how far it came.

    Raises:
        KeyNotDefined: a name of `keys` is not in force.
        StreamNotFound: there is no such stream.
        CoverageConflict: others keep moving the coverage.
    """
    address = broker if isinstance(broker, BrokerAddress) else BrokerAddress.parse(broker, stream_url)
    with as_engine(database) as engine, StreamReader.open(address) as reader:
        return _Backfill(engine, reader, address.vhost, stream, progress, stop or threading.Event()).run(keys)


class _Backfill:
    """One run over one stream."""

    def __init__(
        self,
        engine: sa.Engine,
        reader: StreamReader,
        vhost: str,
        stream: str,
        progress: ProgressListener | None,
        stop: threading.Event,
    ) -> None:
        self._engine = engine
        self._reader = reader
        self._vhost = vhost
        self._name = stream
        self._progress = progress
        self._stop = stop
        self._messages = 0
        self._rows = 0

    def run(self, names: Sequence[str] | None) -> BackfillReport:
        started = time.perf_counter()
        edges: list[int] = []
        conflicts = 0
        while not self._stop.is_set():
            stream, definitions, segments = self._plan(names)
            edges += [edge for segment in segments for edge in (segment.from_offset, segment.to_offset)]
            if not segments:
                break
            try:
                for segment in segments:
                    self._fill(stream, segment, definitions)
            except CoverageConflict:
                conflicts += 1
                if conflicts > CONFLICTS_MAX:
                    raise
        seconds = time.perf_counter() - started
        edges = edges or [0]
        return BackfillReport(self._name, self._messages, self._rows, min(edges), max(edges), seconds)

    def _plan(self, names: Sequence[str] | None) -> tuple[StreamRow, list[KeyDefinition], list[Segment]]:
        bounds = self._reader.bounds(self._name)
        with translated_errors(), self._engine.begin() as connection:
            stream = ensure_stream(connection, self._vhost, self._name)
            definitions = key_definitions(connection)
            tail = tail_of(connection, stream.stream_id) or _first_tail(connection, stream, definitions, bounds.last)
            rows = coverage_of(connection, [stream.stream_id])
        position = last_position(rows)
        if position is not None and not is_same(self._reader, self._name, position, bounds):
            raise CoverageConflict(
                f"stream {self._name!r} is not the one that was recorded: let `relatum record` notice it first",
                stream=self._name,
            )
        wanted = {definition.key_id for definition in _chosen(definitions, names)}
        if names is None and indexes_time(stream, self._reader):
            wanted.add(TIME)
        first = bounds.first if bounds.first is not None else tail.to_offset
        return stream, definitions, unrecorded(rows, (first, max(first, tail.to_offset)), wanted)

    def _fill(self, stream: StreamRow, segment: Segment, definitions: Sequence[KeyDefinition]) -> None:
        extractor = Extractor([key for key in definitions if key.key_id in segment.key_ids])
        with_time = TIME in segment.key_ids
        with translated_errors(), self._engine.begin() as connection:
            row = open_range(
                connection,
                stream.stream_id,
                segment.from_offset,
                segment.key_ids - {TIME},
                with_time=with_time,
                is_tail=False,
            )
        batch = Batch(stream.stream_id, extractor, with_time=with_time)
        for records in self._reader.batches(self._name, segment.from_offset, follow=False):
            if self._stop.is_set():
                break
            if records is None:
                continue
            within = clipped(records, segment.to_offset)
            if within is not None:
                batch.add(within)
            if within is None or within.last_offset < records.last_offset:
                break
            if batch.is_full:
                row = self._commit(row, batch, batch.last_offset + 1, segment)
                batch = Batch(stream.stream_id, extractor, with_time=with_time)
        end = batch.last_offset + 1 if self._stop.is_set() else segment.to_offset
        if end > row.to_offset:
            self._commit(row, batch, end, segment)

    def _commit(self, row: CoverageRow, batch: Batch, to_offset: int, segment: Segment) -> CoverageRow:
        with translated_errors(), self._engine.begin() as connection:
            # One back-fill commits at a time: only so is "nobody else covers this" still true at the commit.
            lock_stream(connection, row.stream_id)
            rows = coverage_of(connection, [row.stream_id])
            others = [other for other in rows if other.coverage_id != row.coverage_id]
            free = unrecorded(others, (row.to_offset, to_offset), segment.key_ids)
            if free != [Segment(row.to_offset, to_offset, segment.key_ids)]:
                raise CoverageConflict("another back-fill covered a part of it", stream=self._name)
            row = advance(connection, row, to_offset, batch.position() if batch.messages else None)
            batch.receipts.clear()  # Nobody waits for the receipt of a message that was recorded long ago.
            write_rows(connection, row.stream_id, batch, high_us=None)
        self._messages += batch.messages
        self._rows += batch.rows
        if self._progress is not None:
            self._progress(
                BackfillProgress(
                    self._name, to_offset, segment.from_offset, segment.to_offset, self._messages, self._rows
                )
            )
        return row


def _first_tail(
    connection: sa.Connection, stream: StreamRow, definitions: Sequence[KeyDefinition], last: int | None
) -> CoverageRow:
    """A stream that nobody recorded yet gets its tail here, so that a recorder goes on where this back-fill ends."""
    return open_range(
        connection,
        stream.stream_id,
        0 if last is None else last + 1,
        [definition.key_id for definition in definitions],
        with_time=stream.record_time,
        is_tail=True,
    )


def _chosen(definitions: Sequence[KeyDefinition], names: Sequence[str] | None) -> list[KeyDefinition]:
    if names is None:
        return list(definitions)
    by_name = {definition.name: definition for definition in definitions}
    for name in names:
        if name not in by_name:
            raise KeyNotDefined(f"no key {name!r} is defined", key=name)
    return [by_name[name] for name in names]
