"""Payloads for places: any DataFrame with streams and offsets gets the messages that lie there.

Rows are brought together by stretches of a stream and sorted, so that a task reads neighbours in one go; what lies
between them is read across or jumped over, whichever is cheaper, and only the messages asked for are decoded.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from typing import Final

import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import ByteType, IntegerType, LongType, ShortType, StringType, StructField, StructType

from relatum.checks import checked_count, shown
from relatum.errors import AccessRefused, InvalidInput, NotFound, OffsetExpired, OffsetNotFound
from relatum.ids import MessageId
from relatum.keys import KeyDefinition
from relatum.reading import Broker, Message, StreamReader, UnreadableRecord
from relatum_spark._columns import ColumnBuilder
from relatum_spark._schema import schema
from relatum_spark._where import GivenBroker, broker_of, database_url, definitions_of, open_reader

STRETCH_BITS: Final = 14
"""Offsets that differ in their lowest 14 bits only go to one task: a jump to the next such stretch costs about as much
as reading 1,000 messages, a sixteenth of it."""

WAVES: Final = 4
"""Partitions of the rows for each core, at most: each writes a file for each partition of the shuffle. 200 times 200
took 20 s for 50,000 rows."""

WINDOW_MESSAGES: Final = 16_384
"""Rows planned together at most; Arrow batches have 10,000 rows unless the session says otherwise."""

FEW_BYTES: Final = 64 << 20
"""Bytes of rows, as Spark estimates them, up to which they are shared out to as many tasks as run at once."""

BATCH_ROWS: Final = 10_000
"""Rows of a batch handed back to Spark at most: Spark's own default."""

BATCH_BYTES: Final = 4 << 20
"""Bytes of payload after which a batch is handed back to Spark."""

_PLACE: Final = ("stream", "offset")


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

    Each row is kept, duplicates too, with its columns unchanged, and gets `timestamp`, `value`, `headers`,
    `properties` and `status`:

    | status | meaning |
    | --- | --- |
    | `found` | the message is in the other columns |
    | `expired` | retention has dropped it |
    | `not_found` | no message lies there: past the end, or an offset the broker used itself |
    | `no_stream` | there is no stream of that name |
    | `unproven` | no message, which proves nothing: it may have expired, or this node is behind |
    | `refused` | the broker refuses this user to read the stream |
    | `unreadable` | its batch is packed by a codec that is not installed, or is broken |
    | `replaced` | with `check`: what lies there is another message, the stream was deleted and declared again |
    | null | the row's stream or offset is null: nothing was asked for |

    Args:
        df: Any DataFrame; columns of any type that Spark hands to Arrow.
        stream_column: The column of stream names, text.
        offset_column: The column of offsets, an integer; None takes `offset` or, where there is none, `stream_offset`.
        prefix: Put before the name of each added column.
        value: With the body; False saves carrying it.
        headers: With headers and properties; False saves decoding them.
        check: Key names, each with the column of the canonical value that the message must carry, as the column
            `value` of the relationship table; a null there is not checked. None checks nothing. The definitions come
            from the database.
        keep_order: Leave the rows in their partitions and in their order, which saves a shuffle; each task then reads
            what its own rows name. Good for few rows, or rows that are sorted already.
        partitions: Tasks to read with; None: as many as run at once, where Spark estimates the rows at 64 MiB or less;
            else, and over Spark Connect, as many as Spark makes of their bytes.
        broker: Which RabbitMQ; None for RELATUM_BROKER_URL.
        database: PostgreSQL's URL, for `check` only; None for RELATUM_DATABASE_URL.

    Raises:
        InvalidInput: a column is missing, of the wrong type or would be there twice; nothing was run.
        KeyNotDefined: `check` names a key that is not in force.
        ConfigurationError: no broker is named.

    A broker that does not answer within 10 s fails the task; Spark tries it again.
    """
    if not hasattr(df, "schema"):  # a frame, of Spark Connect too
        raise InvalidInput(f"df= takes a DataFrame, not {shown(df)}")
    if offset_column is None:
        offset_column = "stream_offset" if "offset" not in df.columns and "stream_offset" in df.columns else "offset"
    checks = dict(check or {})
    _check_column(df.schema, offset_column, (LongType, IntegerType, ShortType, ByteType), "an integer")
    for name in (stream_column, *checks.values()):
        _check_column(df.schema, name, (StringType,), "text")
    if partitions is not None:
        checked_count("partitions", partitions, otherwise=", or None")
        if keep_order:
            raise InvalidInput("keep_order=True leaves the rows in their partitions: leave out partitions=")
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
    # By numbers: Spark finds no column with a dot or a backtick in its name, nor one of two of the same name.
    rows = df.toDF(*numbers) if keep_order else _gathered(df, numbers, resolver, partitions)
    return rows.mapInArrow(resolver, StructType([*df.schema.fields, *added]))


def _gathered(df: DataFrame, numbers: list[str], resolver: "Resolver", partitions: int | None) -> DataFrame:
    """Bring stretches of streams together, sorted, in a frame whose columns are numbered.

    Not by ranges: to find their bounds Spark would compute `df` twice. Without a number Spark joins small partitions,
    by bytes; but a place is few bytes and much work, and few rows are shared out to as many tasks as run at once.
    """
    context = getattr(df.sparkSession, "sparkContext", None)  # Spark Connect does not tell how many run at once
    if context is not None:
        at_once = int(context.defaultParallelism)
        # Before the columns are renamed: Spark drops it where the shuffle follows at once.
        df = df.coalesce(WAVES * at_once)
    rows = df.toDF(*numbers)
    if partitions is None and context is not None:
        estimate = rows._jdf.queryExecution().optimizedPlan().stats().sizeInBytes()
        partitions = at_once if int(str(estimate)) <= FEW_BYTES else None
    stream, offset = F.col(f"_{resolver.stream_at}"), F.col(f"_{resolver.offset_at}")
    by = [stream, F.shiftright(offset.cast("long"), STRETCH_BITS)]
    gathered = rows.repartition(*by) if partitions is None else rows.repartition(partitions, *by)
    return gathered.sortWithinPartitions(stream, offset)


def _check_column(columns: StructType, name: str, types: tuple[type, ...], what: str) -> None:
    if columns.names.count(name) != 1:
        raise InvalidInput(f"one column {name!r} is needed; there are {', '.join(columns.names)}")
    kind = columns[name].dataType
    if not isinstance(kind, types):
        raise InvalidInput(f"the column {name!r} must be {what}, not {kind.simpleString()}")


def _added(columns: StructType, prefix: str, *, value: bool, headers: bool) -> list[StructField]:
    fields = [field for field in schema(value=value, headers=headers).fields if field.name not in _PLACE]
    fields.append(StructField("status", StringType()))
    added = [StructField(prefix + field.name, field.dataType) for field in fields]
    # Spark does not tell upper from lower case in names.
    taken = {name.lower() for name in columns.names}
    clashing = [field.name for field in added if field.name.lower() in taken]
    if clashing:
        raise InvalidInput(f"the columns {', '.join(clashing)} are there already: give the new ones a prefix=")
    return added


# --- in the tasks -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Resolver:
    """What a task does: its rows in, the same rows with their messages out. Can be pickled.

    A task opens one connection when it has something to read.
    """

    broker: Broker
    stream_at: int
    offset_at: int
    """Columns by their numbers."""
    added: tuple[str, ...]
    """The names of the added columns, in order; the last is the status."""
    value: bool
    headers: bool
    checks: tuple[tuple[KeyDefinition, int], ...]
    """Keys, and the numbers of the columns of the values that messages must carry."""

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Resolve one partition's batches."""
        reader: StreamReader | None = None
        with ExitStack() as stack:
            for batch in batches:
                places = self._places(batch)
                ids = [place for place in places if place is not None]
                if ids and reader is None:
                    reader = stack.enter_context(open_reader(self.broker))
                yield from self._resolved(reader, batch, places, ids)

    def _places(self, batch: pa.RecordBatch) -> list[MessageId | None]:
        streams = batch.column(self.stream_at).to_pylist()
        offsets = batch.column(self.offset_at).to_pylist()
        return [
            None if stream is None or offset is None else MessageId(stream, offset)
            for stream, offset in zip(streams, offsets, strict=True)
        ]

    def _resolved(
        self, reader: StreamReader | None, batch: pa.RecordBatch, places: list[MessageId | None], ids: list[MessageId]
    ) -> Iterator[pa.RecordBatch]:
        window = min(len(ids), WINDOW_MESSAGES)
        results = reader.read_many(ids, window=window) if reader is not None else iter(())
        wanted = [(key, batch.column(number).to_pylist()) for key, number in self.checks]
        builder, statuses, start = ColumnBuilder(value=self.value, headers=self.headers), [], 0
        for row, place in enumerate(places):
            status: str | None = None
            if place is not None:
                result = next(results)
                status = _status_of(result)
                if isinstance(result, Message):
                    if any(found[row] is not None and found[row] not in key.values_of(result) for key, found in wanted):
                        status = "replaced"
                    if status == "found":
                        builder.add_message(result)
            statuses.append(status)
            if len(statuses) >= BATCH_ROWS or builder.bytes >= BATCH_BYTES:
                yield self._with_messages(batch.slice(start, len(statuses)), builder.take(), statuses)
                start, statuses = row + 1, []
        if statuses:
            yield self._with_messages(batch.slice(start, len(statuses)), builder.take(), statuses)

    def _with_messages(
        self, rows: pa.RecordBatch, messages: pa.RecordBatch, statuses: list[str | None]
    ) -> pa.RecordBatch:
        """Put the messages that were found beside the rows they are of."""
        numbers = count()
        at = [next(numbers) if status == "found" else None for status in statuses]
        messages = messages.take(pa.array(at, pa.int64()))
        columns = [messages.column(name) for name in messages.schema.names if name not in _PLACE]
        columns.append(pa.array(statuses, pa.string()))
        fields = [pa.field(name, made.type) for name, made in zip(self.added, columns, strict=True)]
        return pa.RecordBatch.from_arrays([*rows.columns, *columns], schema=pa.schema([*rows.schema, *fields]))


def _status_of(result: Message | NotFound | AccessRefused) -> str:
    """Return the status of what one place gave."""
    if isinstance(result, Message):
        return "unreadable" if isinstance(result.raw, UnreadableRecord) else "found"
    if isinstance(result, OffsetNotFound) and not result.is_proven:
        return "unproven"
    if isinstance(result, OffsetExpired):
        return "expired"
    if isinstance(result, OffsetNotFound):
        return "not_found"
    return "refused" if isinstance(result, AccessRefused) else "no_stream"
