# ruff: noqa: N802 (the names are Spark's)
"""`format("rabbitmq_streams")`: what Spark calls, on 4.1 to 4.3, and on which side it runs.

Spark makes the source in a process on the driver, asks the reader for its partitions there, and calls `read` in the
tasks, in a copy made before `partitions`, once a query: so all that a task needs is in the reader from its beginning,
or in the partition. Connections are opened where they are used and never travel.

Of a streaming query Spark calls everything but `read` in one planner process. `commit` does not come for the last
batch and `stop` may not come at all: nothing depends on either.
"""

import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import sqlalchemy as sa
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.types import StructType

from relatum.errors import InvalidInput, StreamNotFound
from relatum.keys import KeyDefinition
from relatum.reading import StreamReader
from relatum.store.database import as_engine
from relatum.store.translation import translated_errors
from relatum_spark._offsets import Slice, slices
from relatum_spark._options import SourceOptions, parse_options
from relatum_spark._planner import Offset, StreamPlanner, Tails, check_named, range_of
from relatum_spark._reading import KeyFilter, Part, look_up, read_part
from relatum_spark._schema import schema as columns
from relatum_spark._where import definitions_of, spare_collections

if TYPE_CHECKING:
    from pyspark.sql.streaming.datasource import ReadLimit, SupportsTriggerAvailableNow

    HAS_ADMISSION = True
else:
    try:
        from pyspark.sql.streaming.datasource import SupportsTriggerAvailableNow

        HAS_ADMISSION = True
    except ImportError:  # Spark 4.1
        SupportsTriggerAvailableNow = object
        HAS_ADMISSION = False

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
        return self._columns(parse_options(self.options))

    def reader(self, schema: StructType) -> "BatchReader":
        """Return the reader of a batch."""
        options = parse_options(self.options)
        self._check_schema(schema, options)
        return BatchReader(options, _definitions(options))

    def streamReader(self, schema: StructType) -> "StreamSourceReader":
        """Return the reader of a streaming query."""
        options = parse_options(self.options, streaming=True)
        self._check_schema(schema, options)
        if options.max_offsets_per_trigger is not None and not HAS_ADMISSION:
            _log.warning(
                "Spark before 4.2 does not tell a source which trigger a query has: with maxOffsetsPerTrigger, a run "
                "with availableNow or once ends after one batch of at most %d offsets",
                options.max_offsets_per_trigger,
            )
        return StreamSourceReader(options, _definitions(options))

    def writer(self, schema: StructType, overwrite: bool) -> Any:
        """Return the writer of a batch."""
        from relatum_spark._sink import BatchWriter, prepare

        return BatchWriter(*prepare(self.options, schema, overwrite, streaming=False))

    def streamWriter(self, schema: StructType, overwrite: bool) -> Any:
        """Return the writer of a streaming query. While the broker is away it is asked again for `pollTimeoutMs`."""
        from relatum_spark._sink import StreamWriter, prepare

        return StreamWriter(*prepare(self.options, schema, overwrite, streaming=True))

    def _columns(self, options: SourceOptions) -> StructType:
        return columns(value=options.include_value, headers=options.include_headers, keys=options.keys)

    def _check_schema(self, given: StructType, options: SourceOptions) -> None:
        expected = self._columns(options)
        if given != expected:
            raise InvalidInput(
                "a stream has columns of its own: give no schema; the options includeValue, includeHeaders and keys "
                f"choose among {expected.simpleString()}"
            )


def _definitions(options: SourceOptions) -> list[KeyDefinition]:
    """Return the definitions of the key columns, and after them that of the key to look up."""
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
        tails = Tails(self._options.broker, patience_s=0)
        try:
            parts = tails.ask(lambda reader: self._parts(reader, self._streams(tails)))
        finally:
            tails.close()
        return [InputPartition(part) for part in parts]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a part; runs in a task. Where there are no partitions Spark calls it once, with none."""
        if not isinstance(partition.value, Part):
            return iter(())
        return read_part(self._options, self._keys, partition.value, only=self._only)

    def _streams(self, tails: Tails) -> list[str]:
        super_stream = self._options.super_stream
        if super_stream is None:
            return list(self._options.streams)
        found = tails.partitions(super_stream)
        if not found:
            raise StreamNotFound(f"there is no super stream {super_stream!r}", stream=super_stream)
        return found

    def _parts(self, reader: StreamReader, streams: list[str]) -> list[Part]:
        options = self._options
        check_named(options, streams)
        wanted = [range_of(reader, stream, options) for stream in streams]
        picked: list[Part] = []
        if self._only is not None:
            picked, wanted = self._looked_up(reader, [each for each in wanted if len(each)], self._only)
        whole = slices(wanted, min_partitions=options.min_partitions, max_records=options.max_records_per_partition)
        return [*picked, *(Part(each) for each in whole)]

    def _looked_up(
        self, reader: StreamReader, wanted: Sequence[Slice], only: KeyFilter
    ) -> tuple[list[Part], list[Slice]]:
        """Return the parts that the table answers for, and the ranges to read through."""
        parts: list[Part] = []
        unknown: list[Slice] = []
        size, vhost = self._options.max_records_per_partition, self._options.broker.address.vhost
        with as_engine(self._options.database or "") as engine, translated_errors():
            for each in wanted:
                # One state of rows and coverage: what moves meanwhile is read through.
                connection: sa.Connection
                with engine.connect().execution_options(isolation_level="REPEATABLE READ") as connection:
                    offsets, unanswered = look_up(connection, reader, each, only, vhost)
                unknown += unanswered
                parts += [Part(each, offsets[at : at + size]) for at in range(0, len(offsets), size)]
        return parts, unknown


class StreamSourceReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads a streaming query. Can be pickled; a copy begins without what the planner process knows."""

    def __init__(self, options: SourceOptions, keys: Sequence[KeyDefinition]) -> None:
        self._options = options
        self._keys = tuple(keys)
        self._planner = StreamPlanner(options)

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self._options, self._keys))

    def initialOffset(self) -> Offset:
        """Return where a new query begins; asked for more than once, and again when the first batch is replayed."""
        return self._planner.initial()

    def prepareForTriggerAvailableNow(self) -> None:
        """Take what is there now as all there is. Since Spark 4.2, before everything else."""
        self._planner.freeze()

    def getDefaultReadLimit(self) -> "ReadLimit":
        """Return the limit that Spark passes to `latestOffset`. Since Spark 4.2."""
        from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows

        limit = self._options.max_offsets_per_trigger
        return ReadAllAvailable() if limit is None else ReadMaxRows(limit)

    def latestOffset(self, start: Offset | None = None, limit: "ReadLimit | None" = None) -> Offset:
        """Return where the next batch ends; asked at every trigger. Spark 4.1 gives neither start nor limit."""
        if HAS_ADMISSION:
            return self._planner.latest(start, getattr(limit, "max_rows", None))
        return self._planner.latest(start, self._options.max_offsets_per_trigger)

    def reportLatestOffset(self) -> Offset | None:
        """Return the end of each stream, for the progress of the query. Since Spark 4.2, after `latestOffset`."""
        return self._planner.reported()

    def partitions(self, start: Offset, end: Offset) -> list[InputPartition]:
        """Return the slices of a batch, replayed ones too. Spark 4.1 also tells where a query goes on by it."""
        return [InputPartition(Part(wanted)) for wanted in self._planner.slices(start, end)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of a slice; runs in a task."""
        if not isinstance(partition.value, Part):
            return iter(())
        return read_part(self._options, self._keys, partition.value)

    def stop(self) -> None:
        """Close the connection, where Spark asks for it."""
        self._planner.close()
