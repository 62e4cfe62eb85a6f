# ruff: noqa: N802 (the names are Spark's)
"""`spark.readStream.format("rabbitmq_streams")`: what Spark calls, on 4.1 to 4.3.

The planner process calls everything but `read`, which runs in the tasks, in a copy made once a query: whatever changes
between batches travels in the partitions. `commit` does not come for the last batch and `stop` may not come at all:
nothing depends on either.
"""

import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamReader, InputPartition

from relatum.keys import KeyDefinition
from relatum_spark._options import SourceOptions
from relatum_spark._planner import Offset, StreamPlanner
from relatum_spark._rows import Part, read_part

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


def make_stream_reader(options: SourceOptions, keys: Sequence[KeyDefinition] = ()) -> "StreamSourceReader":
    """The reader of a streaming query.

    Args:
        options: The options of the read.
        keys: The definitions of the key columns, in the order of `options.keys`.
    """
    if options.max_offsets_per_trigger is not None and not HAS_ADMISSION:
        _log.warning(
            "Spark before 4.2 does not tell a source which trigger a query has: with maxOffsetsPerTrigger, a run with "
            "availableNow or once ends after one batch of at most %d offsets",
            options.max_offsets_per_trigger,
        )
    return StreamSourceReader(options, keys)


class StreamSourceReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """The reader of a streaming query. Can be pickled; a copy begins without what the planner process knows.

    Args:
        options: The options of the read.
        keys: The definitions of the key columns.
    """

    def __init__(self, options: SourceOptions, keys: Sequence[KeyDefinition] = ()) -> None:
        self._options = options
        self._keys = tuple(keys)
        self._planner = StreamPlanner(options)

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(self), (self._options, self._keys))

    def initialOffset(self) -> Offset:
        """Where a new query begins; asked for more than once, and again when the first batch is replayed."""
        return self._planner.initial()

    def prepareForTriggerAvailableNow(self) -> None:
        """Take what is there now as all there is. Spark 4.2 on, before everything else."""
        self._planner.freeze()

    def getDefaultReadLimit(self) -> "ReadLimit":
        """The limit Spark hands to `latestOffset`. Spark 4.2 on."""
        from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows

        limit = self._options.max_offsets_per_trigger
        return ReadAllAvailable() if limit is None else ReadMaxRows(limit)

    def latestOffset(self, start: Offset | None = None, limit: "ReadLimit | None" = None) -> Offset:
        """Where the next batch ends; asked at every trigger. Spark 4.1 gives neither start nor limit."""
        if HAS_ADMISSION:
            return self._planner.latest(start, getattr(limit, "max_rows", None))
        return self._planner.latest(start, self._options.max_offsets_per_trigger)

    def reportLatestOffset(self) -> Offset | None:
        """The end of each stream, for the progress of the query. Spark 4.2 on, after each `latestOffset`."""
        return self._planner.reported()

    def partitions(self, start: Offset, end: Offset) -> list[InputPartition]:
        """The slices of a batch, replayed ones too. Spark 4.1 also tells where a query goes on by it."""
        return [InputPartition(Part(wanted)) for wanted in self._planner.slices(start, end)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """The rows of a slice, in a task."""
        if not isinstance(partition.value, Part):
            return iter(())
        return read_part(self._options, self._keys, partition.value)

    def stop(self) -> None:
        """Close the connection, where Spark asks for it."""
        self._planner.close()
