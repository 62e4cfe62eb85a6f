# ruff: noqa: N802 (the names are Spark's)
"""The data source `format("rabbitmq_streams")` for Spark 4.1 to 4.3, and its batch reader.

Spark creates the source in a process on the driver and calls the reader's `partitions` there. Tasks call `read` on a
copy that Spark makes once a query, before `partitions`. So everything a task needs is set in the reader's constructor
or in the partition. Connections are opened where they are used and never pickled.
"""

from collections.abc import Iterator, Sequence
from contextlib import closing
from functools import partial
from typing import Any, Final

import pyarrow as pa
import sqlalchemy as sa
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from relatum.errors import InvalidInput, OffsetNotFound
from relatum.keys import KeyDefinition
from relatum.reading import StreamReader
from relatum.recording.tails import is_same
from relatum.store.catalog import current_stream
from relatum.store.coverage import coverage_of, covered, last_position, missing
from relatum.store.database import as_engine, sql
from relatum.store.parts import part_may_hold_offsets
from relatum.store.translation import translated_errors
from relatum_spark._columns import schema as columns
from relatum_spark._options import SourceOptions, parse_options
from relatum_spark._reading import KeyFilter, Slice, Tails, check_named, lose, lose_range, read_slice, slices
from relatum_spark._streaming import StreamSourceReader
from relatum_spark._where import definitions_of, spare_collections


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
        """Return the columns by the options; runs in a worker of its own, once for each data frame."""
        spare_collections()
        return _columns(parse_options(self.options))

    def reader(self, schema: StructType) -> "BatchReader":
        options = parse_options(self.options)
        keys, only = _keys(options, schema), None
        if options.key is not None:
            (definition,) = definitions_of(options.database or "", [options.key])
            only = KeyFilter.of(definition, options.key_values)
        return BatchReader(options, keys, only)

    def streamReader(self, schema: StructType) -> StreamSourceReader:
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
            "a stream has fixed columns: give no schema; the options includeValue, includeHeaders and keys "
            f"select from {expected.simpleString()}"
        )
    definitions = definitions_of(options.database or "", options.keys)
    for definition in definitions:
        if definition.is_many:
            raise InvalidInput(
                f"option keys: a message may have several values of {definition.name!r} "
                f"({' + '.join(definition.sources)}), and a column holds one: filter by it with key and keyValues"
            )
    return definitions


class BatchReader(DataSourceReader):
    """Reads a batch; with `only`, just the messages with certain values of a key. Can be pickled."""

    def __init__(
        self, options: SourceOptions, keys: Sequence[KeyDefinition] = (), only: KeyFilter | None = None
    ) -> None:
        self._options = options
        self._keys = tuple(keys)
        self._only = only

    def partitions(self) -> list[InputPartition]:
        """Return the slices for the tasks; runs on the driver, once a query."""
        options, only = self._options, self._only
        with closing(Tails(options)) as tails:
            streams = tails.streams()
            check_named(options, streams)
            whole = [_range_of(tails, stream, options) for stream in streams]
            found: list[Slice] = []
            if only is not None:
                ranges, whole = whole, []
                with as_engine(options.database or "") as engine, translated_errors():
                    for each in filter(len, ranges):
                        parts, unknown = tails.ask(partial(_look_up, engine, each, only, options))
                        found += parts
                        whole += unknown
        found += slices(whole, min_partitions=options.min_partitions, max_records=options.max_records_per_partition)
        return [InputPartition(each) for each in found]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a slice; runs in a task."""
        return read_slice(self._options, self._keys, partition.value, self._only)


def _range_of(tails: Tails, stream: str, options: SourceOptions) -> Slice:
    """Return the range that a batch reads, within the stream's present offsets; it may be empty."""
    bounds = tails.existing(stream, tails.bounds(stream))
    start = tails.offset_of(stream, options.starting, bounds, is_latest_allowed=options.is_latest_allowed)
    stop = tails.offset_of(stream, options.ending, bounds, is_latest_allowed=True)
    end, first = bounds.end, bounds.first
    start, stop = end if start is None else start, end if stop is None else stop
    if first is not None and start < min(first, stop):
        lost = Slice(stream, start, min(first, stop))
        lose_range(options, lost, "retention has dropped them", first=first)
        start = lost.stop
    for wanted in (start, stop):
        if wanted > end:
            message = f"offset {wanted} is beyond the end of the stream {stream!r}, which is {end}"
            lose(options, OffsetNotFound, message, stream=stream, offset=wanted, last=bounds.last)
    return Slice(stream, min(start, end), min(stop, end))


_OFFSETS: Final = sql(f"""
    SELECT DISTINCT r.stream_offset FROM relatum.relationships r
    WHERE r.key_id = :key_id::smallint AND r.value = ANY (:values::text[]) AND r.stream_id = :stream_id::integer
        AND r.stream_offset >= :start::bigint AND r.stream_offset < :stop::bigint
        AND {part_may_hold_offsets("r", ":stream_id::integer", ":start::bigint", ":stop::bigint")}
    ORDER BY r.stream_offset""")


def _look_up(
    engine: sa.Engine, wanted: Slice, only: KeyFilter, options: SourceOptions, reader: StreamReader
) -> tuple[list[Slice], list[Slice]]:
    """Return slices of the offsets in a range that the table has for a filter, and the ranges it does not cover.

    Tasks read ranges that are not recorded for the key, so the result is right even if the table lags. If the stream is
    not the recorded one, that is the whole range.
    """
    connection: sa.Connection
    # One state of rows and coverage; tasks read what is recorded later.
    with engine.connect().execution_options(isolation_level="REPEATABLE READ") as connection:
        row = current_stream(connection, options.broker.vhost, wanted.stream)
        ranges = [] if row is None else coverage_of(connection, [row.stream_id])
        position = last_position(ranges)
        if row is None or (
            position is not None and not is_same(reader, wanted.stream, position, reader.bounds(wanted.stream))
        ):
            return [], [wanted]
        unknown = missing((wanted.start, wanted.stop), covered(ranges, only.definition.key_id))
        sought = {"key_id": only.definition.key_id, "values": sorted(only.values), "stream_id": row.stream_id}
        found = connection.scalars(_OFFSETS, {**sought, "start": wanted.start, "stop": wanted.stop}).all()
    # The table may have rows in ranges that are not covered, for example of a redefined key: tasks read these anyway.
    inside = tuple(offset for offset in found if not any(start <= offset < stop for start, stop in unknown))
    size = options.max_records_per_partition
    parts = [inside[at : at + size] for at in range(0, len(inside), size)]
    return (
        [Slice(wanted.stream, wanted.start, wanted.stop, part) for part in parts],
        [Slice(wanted.stream, start, stop) for start, stop in unknown],
    )
