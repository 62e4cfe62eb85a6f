# ruff: noqa: N802 (the names are Spark's)
"""The data source `format("rabbitmq_streams")` for Spark 4.1 to 4.3, and its readers of batches and streams.

Spark creates the source in a process on the driver and calls the reader's `partitions` there. Tasks call `read` on a
copy that Spark makes once per query, before `partitions`. So everything a task needs is set in the reader's constructor
or in the partition. Connections are opened where they are used, and never pickled.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import sqlalchemy as sa
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.types import StructType

from relatum.common.limits import INTEGER_MAX
from relatum.errors import InvalidInput, OffsetNotFound, StreamNotFound, StreamReplaced
from relatum.keys import KeyDefinition
from relatum.reading import StreamBounds, StreamReader, leaders_bounds
from relatum.recording.tails import is_same
from relatum.store.catalog import current_stream
from relatum.store.coverage import above, coverage_of, last_position, missing, proven
from relatum.store.database import as_engine, at_one_moment, sql
from relatum.store.parts import part_may_hold_offsets
from relatum_spark._columns import schema as columns
from relatum_spark._options import SourceOptions, parse_options
from relatum_spark._reading import (
    KeyFilter,
    Slice,
    StreamQueries,
    plan_end,
    read_slice,
    report_loss,
    report_lost_range,
    slices,
)
from relatum_spark._servers import definitions_of, freeze_gc

if TYPE_CHECKING:
    from pyspark.sql.streaming.datasource import ReadLimit, SupportsTriggerAvailableNow

else:
    try:
        from pyspark.sql.streaming.datasource import SupportsTriggerAvailableNow
    except ImportError:  # Spark 4.1
        SupportsTriggerAvailableNow = object

HAS_ADMISSION: Final = SupportsTriggerAvailableNow is not object

_log: Final = logging.getLogger("relatum.spark")

Offset = dict[str, int]
"""The next offset to read, by stream."""


def register(spark: SparkSession) -> None:
    """Register `format("rabbitmq_streams")` for reading, writing and streaming.

    Spark also finds the source by itself, unless another installed `pyspark_…` package is broken.

    Args:
        spark: The session; Spark Connect works too. The executors also need `relatum` with its extra `spark`.
    """
    spark.dataSource.register(RabbitMQStreams)


class RabbitMQStreams(DataSource):
    """RabbitMQ streams as a source and a sink of Spark. `relatum_spark.register` registers it."""

    @classmethod
    def name(cls) -> str:
        return "rabbitmq_streams"

    def schema(self) -> StructType:
        """Return the columns that the options select; runs in a separate worker, once for each DataFrame."""
        freeze_gc()
        return _columns(parse_options(self.options))

    def reader(self, schema: StructType) -> "BatchReader":
        options = parse_options(self.options)
        keys, key_filter = _keys(options, schema), None
        if options.key is not None:
            (definition,) = definitions_of(options.database or "", [options.key])
            key_filter = KeyFilter.of(definition, options.key_values)
        return BatchReader(options, keys, key_filter)

    def streamReader(self, schema: StructType) -> "StreamSourceReader":
        options = parse_options(self.options, streaming=True)
        return StreamSourceReader(options, _keys(options, schema))

    def writer(self, schema: StructType, overwrite: bool) -> Any:
        from relatum_spark._sink import BatchWriter

        return BatchWriter(self.options, schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> Any:
        from relatum_spark._sink import StreamWriter

        return StreamWriter(self.options, schema, overwrite)


def _columns(options: SourceOptions) -> StructType:
    return columns(value=options.include_value, headers=options.include_headers, keys=options.keys)


def _keys(options: SourceOptions, given: StructType) -> list[KeyDefinition]:
    """Check the schema, and return the definitions of the key columns."""
    expected = _columns(options)
    if given != expected:
        raise InvalidInput(
            "the options includeValue, includeHeaders and keys fix the columns of a stream: leave out the schema; they "
            f"are {expected.simpleString()}"
        )
    definitions = definitions_of(options.database or "", options.keys)
    for definition in definitions:
        if definition.is_many:
            raise InvalidInput(
                f"option keys: a message may have several values of {definition.name!r} "
                f"({' + '.join(definition.sources)}), but a column holds one: use the options key and keyValues"
            )
    return definitions


class BatchReader(DataSourceReader):
    """Reads a batch, or only its messages that pass `key_filter`. Can be pickled."""

    def __init__(
        self, options: SourceOptions, keys: Sequence[KeyDefinition] = (), key_filter: KeyFilter | None = None
    ) -> None:
        self._options = options
        self._keys = tuple(keys)
        self._key_filter = key_filter

    def partitions(self) -> list[InputPartition]:
        """Return the slices for the tasks; runs on the driver, once a query."""
        options, key_filter = self._options, self._key_filter
        # Spark does not repeat the planning of a batch, and a new leader may take some seconds.
        with closing(StreamQueries(options, retry_s=options.timeout_s)) as queries:
            streams = queries.streams()
            for place in (options.starting, options.ending):
                place.check(streams)
            whole = [_range_of(queries, stream, options) for stream in streams]
            found: list[Slice] = []
            if key_filter is not None:
                ranges, whole = whole, []
                # Rows and coverage must be of one state.
                with as_engine(options.database or "") as engine, at_one_moment(engine) as connection:
                    for each in filter(len, ranges):
                        parts, unknown = queries.run(partial(_look_up, connection, each, key_filter, options))
                        found += parts
                        whole += unknown
        found += slices(whole, min_partitions=options.min_partitions, max_records=options.max_records_per_partition)
        return [InputPartition(each) for each in found]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a slice; runs in a task."""
        return read_slice(self._options, self._keys, partition.value, self._key_filter)


def _range_of(queries: StreamQueries, stream: str, options: SourceOptions) -> Slice:
    """Return the range that a batch reads, within the stream's present offsets; it may be empty."""
    bounds = queries.existing(stream, queries.bounds(stream))
    if not bounds.is_proven:
        # The newest messages may not have reached the node that answers.
        bounds = queries.run(lambda reader: leaders_bounds(reader, stream))
    start = queries.offset_of(stream, options.starting, bounds, is_latest_allowed=options.is_latest_allowed)
    stop = queries.offset_of(stream, options.ending, bounds, is_latest_allowed=True)
    end, first = bounds.end, bounds.first
    start, stop = end if start is None else start, end if stop is None else stop
    if first is not None and start < min(first, stop):
        lost = Slice(stream, start, min(first, stop))
        report_lost_range(options, lost, "retention has dropped them", first=first)
        start = lost.stop
    for wanted in (start, stop):
        if wanted > end:
            message = f"offset {wanted} is beyond the end of the stream {stream!r}, which is {end}"
            report_loss(options, OffsetNotFound, message, stream=stream, offset=wanted, last=bounds.last)
    return Slice(stream, min(start, end), min(stop, end))


_OFFSETS: Final = sql(f"""
    SELECT DISTINCT r.stream_offset FROM relatum.relationships r
    WHERE r.key_id = :key_id::smallint AND r.value = ANY (:values::text[]) AND r.stream_id = :stream_id::integer
        AND r.stream_offset >= :start::bigint AND r.stream_offset < :stop::bigint
        AND {part_may_hold_offsets("r", ":stream_id::integer", ":start::bigint", ":stop::bigint")}
    ORDER BY r.stream_offset""")


def _look_up(
    connection: sa.Connection, wanted: Slice, key_filter: KeyFilter, options: SourceOptions, reader: StreamReader
) -> tuple[list[Slice], list[Slice]]:
    """Return slices of the offsets in a range that the table has for a filter, and the ranges it does not cover.

    Tasks read the ranges that the table does not cover, so the result is right even if the table lags. If the stream
    was replaced since it was recorded, the table covers nothing.
    """
    row = current_stream(connection, options.broker.vhost, wanted.stream)
    ranges = [] if row is None else coverage_of(connection, [row.stream_id])
    position = last_position(ranges)
    if row is None or (position is not None and not is_same(reader, wanted.stream, position)):
        return [], [wanted]
    recorded = proven(above(ranges, row.retained_from), key_filter.definition.key_id)
    unknown = missing((wanted.start, wanted.stop), recorded)
    bind = {"key_id": key_filter.definition.key_id, "values": sorted(key_filter.values), "stream_id": row.stream_id}
    found = connection.scalars(_OFFSETS, {**bind, "start": wanted.start, "stop": wanted.stop}).all()
    # The table may have rows in ranges that are not covered, for example of a redefined key: tasks read these anyway.
    inside = tuple(offset for offset in found if not any(start <= offset < stop for start, stop in unknown))
    size = options.max_records_per_partition
    parts = [inside[at : at + size] for at in range(0, len(inside), size)]
    return (
        [Slice(wanted.stream, wanted.start, wanted.stop, part) for part in parts],
        [Slice(wanted.stream, start, stop) for start, stop in unknown],
    )


class StreamSourceReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Plans and reads the micro-batches of a streaming query. Can be pickled; a copy has no state of the planner.

    An offset is `{stream: next offset to read}`. Spark's checkpoint is the only truth: nothing is stored elsewhere, and
    state kept between two calls only saves queries. By three rules, every replay reads the same messages:

    - A new or redeclared stream enters a batch at its first offset, with nothing to read; the next batch continues from
      there. So a range never depends on anything outside the checkpoint.
    - A range that goes backwards is empty.
    - The first batch of a query reads nothing of a stream that begins at its end: the checkpoint does not hold the
      start of the first batch, and the end has moved when the batch is replayed.

    Spark calls everything but `read` in one planner process on the driver. Spark does not call `commit` for the last
    batch, and may never call `stop`; nothing depends on them.
    """

    def __init__(self, options: SourceOptions, keys: Sequence[KeyDefinition]) -> None:
        self._options = options
        self._keys = tuple(keys)
        self._queries = StreamQueries(options, retry_s=options.poll_timeout_s)
        self._initial: Offset | None = None
        self._holds: Offset = {}
        """The starts of streams that begin at their end: the first batch reads nothing of them."""
        self._position: Offset | None = None
        self._target: Offset | None = None
        self._bounds: dict[str, StreamBounds | None] = {}
        """The last known bounds of streams; None for a stream that does not exist."""
        self._emptied: set[str] = set()
        if options.max_offsets_per_trigger is not None and not HAS_ADMISSION:
            _log.warning(
                "Spark before 4.2 does not tell a source which trigger runs: with maxOffsetsPerTrigger, a run "
                "with availableNow or once ends after one batch of at most %d offsets; the next run continues",
                options.max_offsets_per_trigger,
            )

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self._options, self._keys))

    def initialOffset(self) -> Offset:
        """Return the start of a new query. Spark calls this several times, and again to replay the first batch."""
        if self._initial is None:
            bounds = self._query_bounds({})
            self._options.starting.check(bounds)
            self._initial = {stream: self._start_in(stream, found) for stream, found in bounds.items()}
        return dict(self._initial)

    def _start_in(self, stream: str, bounds: StreamBounds | None) -> int:
        """Return the start offset in a stream; if that is the stream's end, the first batch reads nothing of it."""
        found, options, queries = self._queries.existing(stream, bounds), self._options, self._queries
        begin = queries.offset_of(stream, options.starting, found, is_latest_allowed=options.is_latest_allowed)
        if begin is None:
            begin = self._holds[stream] = found.end if self._target is None else self._target.get(stream, found.end)
        elif begin > found.end:
            raise OffsetNotFound(
                f"offset {begin} is beyond the end of the stream {stream!r}, which is {found.end}: set "
                "startingOffsets to an offset up to that end, or to latest",
                stream=stream,
                offset=begin,
                last=found.last,
            )
        return begin

    def prepareForTriggerAvailableNow(self) -> None:
        """Set the streams' current ends as the end of the query. Since Spark 4.2; called before everything else."""
        self._target = {stream: found.end for stream, found in self._query_bounds({}).items() if found is not None}

    def getDefaultReadLimit(self) -> "ReadLimit":
        """Return the limit that Spark passes to `latestOffset`. Since Spark 4.2."""
        from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows

        limit = self._options.max_offsets_per_trigger
        return ReadAllAvailable() if limit is None else ReadMaxRows(limit)

    def latestOffset(self, start: Offset | None = None, limit: "ReadLimit | None" = None) -> Offset:
        """Return the end of the next batch; called at every trigger.

        Spark 4.1 passes neither start nor limit: the batch then begins where the last planned batch ended.
        """
        if start is None:
            start = self.initialOffset() if self._position is None else self._position
        self._bounds = self._query_bounds(start)
        most = getattr(limit, "max_rows", None) if HAS_ADMISSION else self._options.max_offsets_per_trigger
        self._position = self._end(start, most)
        return dict(sorted(self._position.items()))

    def _end(self, start: Offset, limit: int | None) -> Offset:
        holds, self._holds = self._holds, {}
        starts, ends = {stream: start[stream] for stream in start.keys() - self._bounds.keys()}, dict[str, int]()
        for stream, bounds in self._bounds.items():
            if stream not in start:
                if bounds is not None or self._options.fail_on_data_loss:
                    starts[stream] = self._queries.existing(stream, bounds).first or 0
            elif bounds is None:
                report_loss(self._options, StreamNotFound, f"the stream {stream!r} was deleted", stream=stream)
            elif bounds.last is None:
                starts[stream] = start[stream]
                if bounds.is_sure:  # Otherwise the leader may only wait for its replicas.
                    self._emptied.add(stream)
            elif self._is_replaced(stream, start[stream], bounds):
                message = (
                    f"the stream {stream!r} was read up to {start[stream] - 1}, but now has offsets {bounds.first} to "
                    f"{bounds.last}: it was declared again or lost its tail"
                )
                report_loss(self._options, StreamReplaced, message, stream=stream)
                starts[stream] = bounds.first or 0
            else:
                first = bounds.first or 0
                if first > start[stream]:
                    lost = Slice(stream, start[stream], first)
                    report_lost_range(self._options, lost, "retention has dropped them", first=first)
                starts[stream] = max(first, start[stream])
                ends[stream] = min(bounds.end, self._end_limit(stream, start[stream], holds))
        return plan_end(starts, starts | ends, limit)

    def _is_replaced(self, stream: str, start: int, bounds: StreamBounds) -> bool:
        """Whether the stream was replaced or lost its tail: it ends before `start`, or was empty and begins before it.

        A stream that retention emptied continues after its old offsets.
        """
        was_empty = stream in self._emptied
        self._emptied.discard(stream)
        return bounds.end < start or (was_empty and (bounds.first or 0) < start)

    def _end_limit(self, stream: str, start: int, holds: Offset) -> int:
        """Return the offset at which a batch must end in a stream, even if the stream has more messages."""
        target_end = INTEGER_MAX if self._target is None else self._target.get(stream, start)
        return min(target_end, holds[stream]) if holds.get(stream) == start else target_end

    def reportLatestOffset(self) -> Offset | None:
        """Return the end of each stream, for the query's progress. Since Spark 4.2; called after `latestOffset`."""
        ends = {stream: bounds.end for stream, bounds in self._bounds.items() if bounds is not None}
        return dict(sorted(ends.items())) or None

    def partitions(self, start: Offset, end: Offset) -> list[InputPartition]:
        """Return the slices of a batch, replayed or not. On Spark 4.1, the call also shows where a query continues."""
        self._position, options = end, self._options
        ranges = [Slice(stream, start[stream], stop) for stream, stop in sorted(end.items()) if stream in start]
        tasks = slices(ranges, min_partitions=options.min_partitions, max_records=options.max_records_per_partition)
        return [InputPartition(each) for each in tasks]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        return read_slice(self._options, self._keys, partition.value)

    def _query_bounds(self, start: Offset) -> dict[str, StreamBounds | None]:
        """Query the bounds of the named streams, including those removed from the super stream since `start`."""
        # The bounds of a stream that was empty need no confirmation.
        return {
            stream: self._queries.bounds(stream, read_to=None if stream in self._emptied else start.get(stream))
            for stream in self._queries.streams(known=start)
        }

    def stop(self) -> None:
        self._queries.close()
