# ruff: noqa: N802 (the names are Spark's)
"""`format("rabbitmq_streams")`, on Spark 4.1 to 4.3: what Spark makes of it, and the reader of a batch.

Spark makes the source in a process on the driver, asks the reader for its partitions there, and calls `read` in the
tasks, in a copy made before `partitions`, once a query: so all that a task needs is in the reader from its beginning,
or in the partition. Connections are opened where they are used and never travel.
"""

import logging
from collections.abc import Iterator, Sequence
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
from relatum_spark._options import SourceOptions, parse_options
from relatum_spark._planning import Slice, Tails, check_named, expired, no_super_stream, slices
from relatum_spark._reading import KeyFilter, Part, read_part
from relatum_spark._schema import schema as columns
from relatum_spark._streaming import StreamSourceReader
from relatum_spark._where import definitions_of, spare_collections

_log: Final = logging.getLogger("relatum.spark")


def register(spark: SparkSession) -> None:
    """Make `format("rabbitmq_streams")` known, for reading, writing and streaming.

    Spark finds the source by itself too, but not where any other `pyspark_…` package of the installation is broken.

    Args:
        spark: The session, which may be one of Spark Connect. The tasks need `relatum` with its extra `spark` too.
    """
    spark.dataSource.register(RabbitMQStreams)


class RabbitMQStreams(DataSource):
    """RabbitMQ streams as a source and a sink of Spark. `relatum_spark.register` makes it known."""

    @classmethod
    def name(cls) -> str:
        """Return the name that goes into `format`."""
        return "rabbitmq_streams"

    def schema(self) -> StructType:
        """Return the columns that the options ask for; runs in a worker of its own, for each data frame."""
        spare_collections()
        return _columns(parse_options(self.options))

    def reader(self, schema: StructType) -> "BatchReader":
        """Return the reader of a batch."""
        options = parse_options(self.options)
        return BatchReader(options, _definitions(options, schema))

    def streamReader(self, schema: StructType) -> StreamSourceReader:
        """Return the reader of a streaming query."""
        options = parse_options(self.options, streaming=True)
        return StreamSourceReader(options, _definitions(options, schema))

    def writer(self, schema: StructType, overwrite: bool) -> Any:
        """Return the writer of a batch."""
        from relatum_spark._sink import BatchWriter

        return BatchWriter(self.options, schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> Any:
        """Return the writer of a streaming query."""
        from relatum_spark._sink import StreamWriter

        return StreamWriter(self.options, schema, overwrite)


def _columns(options: SourceOptions) -> StructType:
    return columns(value=options.include_value, headers=options.include_headers, keys=options.keys)


def _definitions(options: SourceOptions, given: StructType) -> list[KeyDefinition]:
    """Return the definitions of the key columns, and after them that of the key to look up; check the schema first."""
    expected = _columns(options)
    if given != expected:
        raise InvalidInput(
            "a stream has columns of its own: give no schema; the options includeValue, includeHeaders and keys "
            f"choose among {expected.simpleString()}"
        )
    names = [*options.keys, *([] if options.key is None else [options.key])]
    definitions = definitions_of(options.database or "", names)
    for definition in definitions[: len(options.keys)]:
        if definition.is_many:
            raise InvalidInput(
                f"option keys: a message may have several values of {definition.name!r} "
                f"({' + '.join(definition.sources)}), and a column holds one: filter by it with key and keyValues"
            )
    return definitions


class BatchReader(DataSourceReader):
    """Reads a batch. Can be pickled. `definitions` are those of the key columns, then that of the key to look up."""

    def __init__(self, options: SourceOptions, definitions: Sequence[KeyDefinition]) -> None:
        self._options = options
        self._keys = tuple(definitions[: len(options.keys)])
        looked_up = definitions[len(self._keys) :]
        self._only = KeyFilter.of(looked_up[0], options.key_values) if looked_up else None

    def partitions(self) -> list[InputPartition]:
        """Return what the tasks read; runs on the driver, once a query."""
        options = self._options
        with Tails(options) as tails:
            streams = list(options.streams)
            if options.super_stream is not None and not (streams := tails.partitions(options.super_stream)):
                raise no_super_stream(options.super_stream)
            check_named(options, streams)
            wanted = [_range_of(tails, stream, options) for stream in streams]
            parts: list[Part] = []
            if self._only is not None:
                only, found = self._only, [each for each in wanted if len(each)]
                parts, wanted = tails.ask(lambda reader: self._looked_up(reader, found, only))
        whole = slices(wanted, min_partitions=options.min_partitions, max_records=options.max_records_per_partition)
        return [InputPartition(part) for part in (*parts, *map(Part, whole))]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a part; runs in a task."""
        return read_part(self._options, self._keys, partition.value, only=self._only)

    def _looked_up(
        self, reader: StreamReader, wanted: Sequence[Slice], only: KeyFilter
    ) -> tuple[list[Part], list[Slice]]:
        """Return the parts that the table answers for, and the ranges to read through."""
        parts: list[Part] = []
        unknown: list[Slice] = []
        size, vhost = self._options.max_records_per_partition, self._options.broker.vhost
        with as_engine(self._options.database or "") as engine, translated_errors():
            for each in wanted:
                # One state of rows and coverage: what moves meanwhile is read through.
                connection: sa.Connection
                with engine.connect().execution_options(isolation_level="REPEATABLE READ") as connection:
                    offsets, unanswered = _look_up(connection, reader, each, only, vhost)
                unknown += unanswered
                parts += [Part(each, offsets[at : at + size]) for at in range(0, len(offsets), size)]
        return parts, unknown


def _range_of(tails: Tails, stream: str, options: SourceOptions) -> Slice:
    """Return the offsets a batch reads of a stream, within what the stream holds now; there may be none."""
    bounds = tails.existing(stream, tails.bounds(stream))
    remedy = "; set failOnDataLoss to false to read what there is" if options.fail_on_data_loss else ""
    start = tails.offset_of(stream, options.starting, bounds, is_latest_allowed=options.is_latest_allowed)
    stop = tails.offset_of(stream, options.ending, bounds, is_latest_allowed=True)
    end, first = bounds.end, bounds.first
    start, stop = end if start is None else start, end if stop is None else stop
    if first is not None and start < min(first, stop):
        lost = Slice(stream, start, min(first, stop))
        _lose(lost, expired(lost, first, remedy), options)
        start = lost.stop
    for wanted in (start, stop):
        if wanted > end:
            message = f"offset {wanted} lies beyond the end of the stream {stream!r}, which is {end}{remedy}"
            beyond = OffsetNotFound(message, stream=stream, offset=wanted, last=bounds.last)
            _lose(Slice(stream, end, wanted), beyond, options)
    return Slice(stream, min(start, end), min(stop, end))


def _lose(lost: Slice, error: OffsetNotFound, options: SourceOptions) -> None:
    if options.fail_on_data_loss:
        raise error
    _log.warning("offsets %d to %d of %s are not there: %s", lost.start, lost.stop - 1, lost.stream, error)


_OFFSETS: Final = sql(f"""
    SELECT DISTINCT r.stream_offset FROM relatum.relationships r
    WHERE r.key_id = :key_id::smallint AND r.value = ANY (:values::text[]) AND r.stream_id = :stream_id::integer
        AND r.stream_offset >= :start::bigint AND r.stream_offset < :stop::bigint
        AND {part_may_hold_offsets("r", ":stream_id::integer", ":start::bigint", ":stop::bigint")}
    ORDER BY r.stream_offset""")


def _look_up(
    connection: sa.Connection, reader: StreamReader, wanted: Slice, only: KeyFilter, vhost: str
) -> tuple[tuple[int, ...], list[Slice]]:
    """Return the offsets in a range that the table names for a filter, and the parts it cannot answer for.

    Offsets that are not recorded for the key are such parts, so the answer is right however far the table is behind;
    the whole range is one where the stream is not the one that was recorded. The connection must see one state of the
    database (REPEATABLE READ).
    """
    row = current_stream(connection, vhost, wanted.stream)
    ranges = [] if row is None else coverage_of(connection, [row.stream_id])
    position = last_position(ranges)
    if row is None or (
        position is not None and not is_same(reader, wanted.stream, position, reader.bounds(wanted.stream))
    ):
        return (), [wanted]
    unknown = missing((wanted.start, wanted.stop), covered(ranges, only.definition.key_id))
    sought = {"key_id": only.definition.key_id, "values": sorted(only.values), "stream_id": row.stream_id}
    offsets = connection.execute(_OFFSETS, {**sought, "start": wanted.start, "stop": wanted.stop}).scalars()
    # Rows may lie in ranges that are not recorded (yet, or of a key defined again): those ranges are read anyway.
    inside = tuple(offset for offset in offsets if not any(start <= offset < stop for start, stop in unknown))
    return inside, [Slice(wanted.stream, start, stop) for start, stop in unknown]
