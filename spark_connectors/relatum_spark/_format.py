"""`format("rabbitmq_streams")`: what Spark calls, and on which side it runs.

Spark makes the source in a process on the driver, asks the reader for its partitions there, and calls `read` in the
tasks, in a copy made before `partitions`: so all that a task needs is in the reader from its beginning, or in the
partition. Connections are opened where they are used and never travel.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pyarrow as pa
import sqlalchemy as sa
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from relatum.errors import InvalidInput, StreamNotFound
from relatum.keys import KeyDefinition
from relatum.reading import StreamReader
from relatum.store import as_engine, translated_errors
from relatum_spark._definitions import definitions_of
from relatum_spark._keyfilter import KeyFilter, look_up
from relatum_spark._offsets import Slice, slices
from relatum_spark._options import SourceOptions, parse_options
from relatum_spark._ranges import check_named, range_of
from relatum_spark._rows import Part, read_part
from relatum_spark._schema import schema as columns
from relatum_spark._tails import Tails
from relatum_spark._workers import spare_collections


class RabbitMQStreams(DataSource):
    """RabbitMQ streams as a source and a sink of Spark. `relatum_spark.register` makes it known."""

    @classmethod
    def name(cls) -> str:
        """The name after `format`."""
        return "rabbitmq_streams"

    def schema(self) -> StructType:
        """The columns that the options ask for; asked in a worker of its own, for each data frame."""
        spare_collections()
        options = parse_options(self.options)
        return columns(value=options.include_value, headers=options.include_headers, keys=options.keys)

    def reader(self, schema: StructType) -> "BatchReader":
        """The reader of a batch."""
        options = parse_options(self.options)
        self._check_schema(schema, options)
        return BatchReader(options, _definitions(options))

    def streamReader(self, schema: StructType) -> Any:  # noqa: N802
        """The reader of a streaming query."""
        from relatum_spark._streaming import make_stream_reader

        options = parse_options(self.options, streaming=True)
        self._check_schema(schema, options)
        return make_stream_reader(options, _definitions(options)[: len(options.keys)])

    def writer(self, schema: StructType, overwrite: bool) -> Any:
        """The writer of a batch."""
        from relatum_spark._sink import make_writer

        return make_writer(self.options, schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> Any:  # noqa: N802
        """The writer of a streaming query."""
        from relatum_spark._sink import make_stream_writer

        return make_stream_writer(self.options, schema, overwrite)

    def _check_schema(self, given: StructType, options: SourceOptions) -> None:
        expected = columns(value=options.include_value, headers=options.include_headers, keys=options.keys)
        if given != expected:
            raise InvalidInput(
                "a stream has columns of its own: give no schema; the options includeValue, includeHeaders and keys "
                f"choose among {expected.simpleString()}"
            )


def _definitions(options: SourceOptions) -> tuple[KeyDefinition, ...]:
    """The definitions of the key columns, and after them that of the key to look up."""
    names = [*options.keys, *([] if options.key is None else [options.key])]
    definitions = tuple(definitions_of(options.database or "", names))
    for definition in definitions[: len(options.keys)]:
        if definition.is_many:
            raise InvalidInput(
                f"option keys: a message may have several values of {definition.name!r} "
                f"({' + '.join(definition.sources)}), and a column holds one: filter by it with key and keyValues"
            )
    return definitions


class BatchReader(DataSourceReader):
    """The reader of a batch. Can be pickled.

    Args:
        options: The options of the read.
        definitions: The definitions of the key columns, and after them that of the key to look up.
    """

    def __init__(self, options: SourceOptions, definitions: Sequence[KeyDefinition]) -> None:
        self._options = options
        self._keys = tuple(definitions[: len(options.keys)])
        looked_up = definitions[len(self._keys) :]
        self._only = KeyFilter.of(looked_up[0], options.key_values) if looked_up else None

    def partitions(self) -> list[InputPartition]:
        """What the tasks read; on the driver, once a query."""
        tails = Tails(self._options.broker, patience_s=0)
        try:
            parts = tails.ask(lambda reader: self._parts(reader, self._streams(tails)))
        finally:
            tails.close()
        return [InputPartition(part) for part in parts]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of a part; in a task. Where there are no partitions Spark calls it once, with none."""
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
        self, reader: StreamReader, wanted: Iterable[Slice], only: KeyFilter
    ) -> tuple[list[Part], list[Slice]]:
        """The parts that the table answers for, and the ranges to read through."""
        parts: list[Part] = []
        unknown: list[Slice] = []
        with as_engine(self._options.database or "") as engine, translated_errors():
            for each in wanted:
                # One state of rows and coverage: what moves meanwhile is read through.
                connection: sa.Connection
                with engine.connect().execution_options(isolation_level="REPEATABLE READ") as connection:
                    found = look_up(connection, reader, each, only, self._options.broker.address.vhost)
                unknown += found.unknown
                size = self._options.max_records_per_partition
                cuts = range(0, len(found.offsets), size)
                parts += [Part(each, found.offsets[at : at + size]) for at in cuts]
        return parts, unknown
