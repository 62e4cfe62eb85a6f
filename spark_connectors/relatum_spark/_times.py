"""The times of a side's messages, read from the streams: what a join by time alone goes by."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from relatum.reading import StreamReader
from relatum_spark._columns import ColumnBuilder
from relatum_spark._inputs import Inputs
from relatum_spark._offsets import Slice, slices
from relatum_spark._options import POLL_TIMEOUT_MS, RECORDS_PER_PARTITION, ROWS_MAX
from relatum_spark._reading import read_slice
from relatum_spark._resolve import resolve
from relatum_spark._schema import arrow_schema, schema
from relatum_spark._sides import PLACE, Side
from relatum_spark._where import Broker

_SLICES: Final = "number long, stream string, start long, stop long"


def times_of(spark: SparkSession, inputs: Inputs, sides: Sequence[Side]) -> list[DataFrame]:
    """The places and times of all messages of each side: columns stream, offset, time_us.

    Streams given by name are read up to where they end now; messages of a frame that are gone are left out.

    Raises:
        StreamNotFound: a named stream is not there.
    """
    return [
        _of_frame(inputs, side.places) if side.places is not None else _of_streams(spark, inputs, side)
        for side in sides
    ]


def _of_frame(inputs: Inputs, places: DataFrame) -> DataFrame:
    found = resolve(places.dropna().distinct(), value=False, headers=False, broker=inputs.broker)
    return _relations(found.where(F.col("status") == "found"))


def _of_streams(spark: SparkSession, inputs: Inputs, side: Side) -> DataFrame:
    assert inputs.broker is not None, "reading streams needs a broker"
    with inputs.broker.open() as reader:
        parts = _parts(reader, side.names, inputs.partitions)
    rows = [(number, part.stream, part.start, part.stop) for number, part in enumerate(parts)]
    listed = spark.createDataFrame(rows, _SLICES)
    # By ranges, and not by hashes: each task gets its part and none gets two.
    each = listed.repartitionByRange(max(len(parts), 1), "number")
    return _relations(each.mapInArrow(TimeReader(inputs.broker), schema(value=False, headers=False)))


def _parts(reader: StreamReader, names: Sequence[str], partitions: int) -> list[Slice]:
    streams = dict.fromkeys(stream for name in names for stream in reader.partitions(name) or [name])
    bounds = {}
    for stream in streams:
        first, last = reader.bounds(stream)
        if first is not None and last is not None:
            bounds[stream] = (first, last + 1)
    return slices(bounds, max_records=max(RECORDS_PER_PARTITION, sum(b - a for a, b in bounds.values()) // partitions))


def _relations(messages: DataFrame) -> DataFrame:
    return messages.select(*PLACE, F.unix_micros("timestamp").alias("time_us"))


@dataclass(frozen=True, slots=True)
class TimeReader:
    """What a task does: slices in, places and times out. Can be pickled.

    Attributes:
        broker: Where to read; each task opens one connection.
    """

    broker: Broker

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Read one partition's slices."""
        for batch in batches:
            with self.broker.open() as reader:
                for row in batch.to_pylist():
                    yield from _read(reader, Slice(row["stream"], row["start"], row["stop"]))


def _read(reader: StreamReader, part: Slice) -> Iterator[pa.RecordBatch]:
    builder = ColumnBuilder(arrow_schema(value=False, headers=False))
    for records in read_slice(reader, part, poll_timeout_s=POLL_TIMEOUT_MS / 1000):
        builder.add_batch(records)
        if len(builder) >= ROWS_MAX:
            yield builder.take()
    if len(builder):
        yield builder.take()
