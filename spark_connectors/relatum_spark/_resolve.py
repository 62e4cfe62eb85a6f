"""Adding payloads: the messages for any DataFrame with streams and offsets.

Rows are grouped by stretches of a stream and sorted, so that a task reads neighbours together. Messages between them
are read or skipped, whichever is cheaper; only the requested messages are decoded.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from typing import Final

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import StringType, StructField, StructType

from relatum.common.checks import checked_count, shown
from relatum.common.ids import MessageId
from relatum.errors import AccessRefused, InvalidInput, NotFound, OffsetExpired, OffsetNotFound
from relatum.keys import KeyDefinition
from relatum.reading import Broker, Message, StreamReader, UnreadableRecord
from relatum_spark._columns import PLACE, ColumnBuilder, batch_of, check_added_columns, schema
from relatum_spark._options import BYTES_MAX, ROWS_MAX
from relatum_spark._servers import GivenBroker, broker_of, database_url, definitions_of, open_reader

STRETCH_BITS: Final = 14
"""Offsets that differ only in their lowest 14 bits go to the same task. A jump to the next stretch costs about as
much as reading 1,000 messages, a sixteenth of a stretch."""

PARTITIONS_PER_CORE: Final = 4
"""Maximum partitions of the rows for each core: each partition writes a file for each partition of the shuffle. With
200 partitions before and after the shuffle, 50,000 rows took 20 s."""

WINDOW_MESSAGES: Final = 16_384
"""Maximum rows planned together; Arrow batches have 10,000 rows unless the session sets another number."""

SMALL_BYTES: Final = 64 << 20
"""Rows of at most this many estimated bytes get only as many tasks as run concurrently."""


def resolve(
    df: DataFrame,
    *,
    stream_column: str = "stream",
    offset_column: str | None = None,
    prefix: str = "",
    value: bool = True,
    headers: bool = True,
    check: Mapping[str, str] | None = None,
    keep_order: bool = False,
    partitions: int | None = None,
    broker: GivenBroker = None,
    database: str | None = None,
) -> DataFrame:
    """Return the rows of a DataFrame with the messages at their streams and offsets.

    All rows, including duplicates, keep their columns and get the columns `timestamp`, `value`, `headers`, `properties`
    and `status`:

    | status | meaning |
    | --- | --- |
    | `found` | the message is in the other columns |
    | `expired` | retention has dropped it |
    | `not_found` | there is no message: the offset is past the end, or the broker used it itself |
    | `no_stream` | the stream does not exist |
    | `unproven` | no message was found, but it may have expired, or the node that answered lags behind its leader |
    | `refused` | the broker's user may not read the stream |
    | `unreadable` | the message's batch is corrupt, or compressed with a codec that is not installed |
    | `replaced` | with `check`: the message does not have the value, since the stream was declared again |
    | null | the row's stream or offset is null |

    Args:
        df: Any DataFrame; its columns can have any type that Spark converts to Arrow.
        stream_column: The column of stream names, text.
        offset_column: The column of offsets, an integer. None uses `offset`, or `stream_offset` if there is none.
        prefix: The prefix of the added columns.
        value: Whether to add the body. Default: True.
        headers: Whether to add headers and properties; False saves decoding them. Default: True.
        check: Key names, each with the column of the canonical value that the message must have, as in the column
            `value` of the relationship table. Null values are not checked. None checks nothing. The definitions are
            read from the database.
        keep_order: Keep the rows' partitions and order, which saves a shuffle; each task then reads the messages of its
            own rows. Good for few or sorted rows.
        partitions: Number of tasks. None: as many as run concurrently if Spark estimates the rows at 64 MiB or less;
            otherwise, and over Spark Connect, Spark chooses the number by the size of the rows.
        broker: The broker. None uses RELATUM_BROKER_URL.
        database: PostgreSQL's URL, needed only for `check`. None uses RELATUM_DATABASE_URL.

    Raises:
        InvalidInput: a column is missing, has the wrong type or would be duplicated; nothing was run.
        KeyNotDefined: `check` names a key that is not in force.
        ConfigurationError: no broker is named, or `check` is given and no database is named.

    A task fails if the broker does not answer within 10 s; Spark retries it.
    """
    if not hasattr(df, "schema"):  # also true for frames of Spark Connect
        raise InvalidInput(f"df= takes a DataFrame, not {shown(df)}")
    if offset_column is None:
        offset_column = "stream_offset" if "offset" not in df.columns and "stream_offset" in df.columns else "offset"
    checks = dict(check or {})
    _check_column(df.schema, offset_column, ("byte", "short", "integer", "long"), "an integer")
    for name in (stream_column, *checks.values()):
        _check_column(df.schema, name, ("string",), "text")
    if partitions is not None:
        checked_count("partitions", partitions, otherwise=", or None")
        if keep_order:
            raise InvalidInput("keep_order=True keeps the partitions of the DataFrame: leave out partitions=")
    added = _added(df.schema, prefix, value=value, headers=headers)
    definitions = definitions_of(database_url(database), checks) if checks else []
    at = df.columns.index
    resolver = Resolver(
        broker_of(broker),
        at(stream_column),
        at(offset_column),
        tuple(field.name for field in added),
        value,
        headers,
        tuple(zip(definitions, map(at, checks.values()), strict=True)),
    )
    numbers = [f"_{number}" for number in range(len(df.columns))]
    # Numbered columns, since Spark cannot address names with a dot or a backtick, or duplicate names.
    rows = df.toDF(*numbers) if keep_order else _grouped(df, numbers, resolver, partitions)
    return rows.mapInArrow(resolver, StructType([*df.schema.fields, *added]))


def _grouped(df: DataFrame, numbers: list[str], resolver: "Resolver", partitions: int | None) -> DataFrame:
    """Group the rows by stretches of streams, sorted, in a frame with numbered columns.

    Grouping by ranges would make Spark compute `df` twice to find their bounds. Without a given number Spark coalesces
    small partitions by bytes. But a row of few bytes is much work, so few rows get as many tasks as run concurrently.
    """
    context = getattr(df.sparkSession, "sparkContext", None)  # Spark Connect does not report its slots
    if context is not None:
        slots = int(context.defaultParallelism)
        # Before the columns are renamed, since Spark drops a coalesce right before a shuffle.
        df = df.coalesce(PARTITIONS_PER_CORE * slots)
    rows = df.toDF(*numbers)
    if partitions is None and context is not None:
        estimate = rows._jdf.queryExecution().optimizedPlan().stats().sizeInBytes()
        partitions = slots if int(str(estimate)) <= SMALL_BYTES else None
    stream, offset = F.col(f"_{resolver.stream_at}"), F.col(f"_{resolver.offset_at}")
    by = [stream, F.shiftright(offset.cast("long"), STRETCH_BITS)]
    grouped = rows.repartition(*by) if partitions is None else rows.repartition(partitions, *by)
    return grouped.sortWithinPartitions(stream, offset)


def _check_column(columns: StructType, name: str, types: tuple[str, ...], what: str) -> None:
    if columns.names.count(name) != 1:
        raise InvalidInput(f"exactly one column must be named {name!r}; the columns are {', '.join(columns.names)}")
    kind = columns[name].dataType
    if kind.typeName() not in types:
        raise InvalidInput(f"the column {name!r} must be {what}, not {kind.simpleString()}")


def _added(columns: StructType, prefix: str, *, value: bool, headers: bool) -> list[StructField]:
    fields = [field for field in schema(value=value, headers=headers).fields if field.name not in PLACE]
    fields.append(StructField("status", StringType()))
    added = [StructField(prefix + field.name, field.dataType) for field in fields]
    check_added_columns([field.name for field in added], columns.names)
    return added


# --- in the tasks -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Resolver:
    """The work of a task: returns its rows with their messages. It opens one connection, at its first read."""

    broker: Broker
    stream_at: int
    offset_at: int
    """The indices of the columns."""
    added: tuple[str, ...]  # names of columns; the last is the status
    value: bool
    headers: bool
    checks: tuple[tuple[KeyDefinition, int], ...]
    """Keys, each with the index of the column of the value that the message must have."""

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        reader: StreamReader | None = None
        with ExitStack() as stack:
            for batch in batches:
                columns = (batch.column(self.stream_at).to_pylist(), batch.column(self.offset_at).to_pylist())
                places = [None if None in place else MessageId(*place) for place in zip(*columns, strict=True)]
                ids = [place for place in places if place is not None]
                if ids and reader is None:
                    reader = stack.enter_context(open_reader(self.broker))
                yield from self._resolved(reader, batch, places, ids)

    def _resolved(
        self, reader: StreamReader | None, batch: pa.RecordBatch, places: list[MessageId | None], ids: list[MessageId]
    ) -> Iterator[pa.RecordBatch]:
        window = min(len(ids), WINDOW_MESSAGES)
        results = reader.read_many(ids, window=window) if reader is not None and ids else iter(())
        wanted = [(key, batch.column(number).to_pylist()) for key, number in self.checks]
        builder, statuses, start = ColumnBuilder(value=self.value, headers=self.headers), [], 0
        for row, place in enumerate(places):
            result = None if place is None else next(results)
            status = None if result is None else _status_of(result)
            if status == "found" and isinstance(result, Message):
                if any(found[row] is not None and found[row] not in key.values_of(result) for key, found in wanted):
                    status = "replaced"
                else:
                    builder.add_batch(batch_of(result))
            statuses.append(status)
            if row + 1 == len(places) or len(statuses) >= ROWS_MAX or builder.bytes >= BYTES_MAX:
                yield self._with_messages(batch.slice(start, len(statuses)), builder.take(), statuses)
                start, statuses = row + 1, []

    def _with_messages(
        self, rows: pa.RecordBatch, messages: pa.RecordBatch, statuses: list[str | None]
    ) -> pa.RecordBatch:
        numbers = count()
        at = [next(numbers) if status == "found" else None for status in statuses]
        messages = messages.take(pa.array(at, pa.int64()))
        columns = [messages.column(name) for name in messages.schema.names if name not in PLACE]
        columns.append(pa.array(statuses, pa.string()))
        fields = [pa.field(name, column.type) for name, column in zip(self.added, columns, strict=True)]
        return pa.RecordBatch.from_arrays([*rows.columns, *columns], schema=pa.schema([*rows.schema, *fields]))


def _status_of(result: Message | NotFound | AccessRefused) -> str:
    if isinstance(result, Message):
        return "unreadable" if isinstance(result.raw, UnreadableRecord) else "found"
    if not isinstance(result, OffsetNotFound):
        return "refused" if isinstance(result, AccessRefused) else "no_stream"
    if not result.is_proven:
        return "unproven"
    return "expired" if isinstance(result, OffsetExpired) else "not_found"
