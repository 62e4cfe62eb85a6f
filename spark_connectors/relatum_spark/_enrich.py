"""Enriching a streaming query: each row of a micro-batch is joined to its related messages through the index.

An enrichment has no state store and no watermark: a row without related messages waits in a directory, and each later
batch looks it up again. A batch's decisions are written before `write` gets its rows, so a repeated batch gives the
same rows, regardless of messages recorded since.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final, Literal, TypeAlias, get_args

import pyarrow as pa
import sqlalchemy as sa
from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import DataType, StructType, TimestampNTZType, TimestampType

from relatum.common.checks import checked_choice, checked_count
from relatum.errors import InvalidInput, KeyNotDefined, StreamReplaced
from relatum.keys import InvalidValue, KeyDefinition, KeyType, checked_text, is_integer_text
from relatum.store.catalog import streams_named
from relatum.store.database import sql
from relatum.store.parts import part_may_hold_values
from relatum_consumer import Status
from relatum_spark._columns import check_added_columns, schema, struct_of
from relatum_spark._decisions import Decisions
from relatum_spark._resolve import resolve
from relatum_spark._servers import GivenBroker, broker_of, database_url, definitions_in, names_of, span_us
from relatum_spark._table import connected, status_of_missing

How: TypeAlias = Literal["left", "inner"]

PROBED_ROWS: Final = 1000
"""Rows looked up by one statement. A task holds the places of their related messages, up to `limit` for each row."""

BATCHES_RETAINED: Final = 10
"""Batches whose decisions are kept. A replay needs the last batch; the others allow rewinding a query by hand."""

_MATCH: Final = struct_of({"relatum_value": "string", "relatum_stream": "string", "relatum_offset": "long"})
"""Columns that a lookup adds to a row: the looked-up value, and the related message's stream and offset."""

_WAIT: Final = struct_of({"relatum_seen_us": "long", "relatum_attempts": "integer"})
"""Columns that a row keeps while it waits: when it was first seen, and how often it was looked up."""

_DECISION: Final = [*_WAIT, *struct_of({"relatum_waits": "boolean", "relatum_status": "string"}), *_MATCH]
"""All columns that are stored with a row; the status says why it has no related message."""


class Enrichment:
    """Joins each micro-batch of a streaming query to the messages related to its rows.

    ```
    enrichment = Enrichment(to="payments", on="order_id", pending=f"{checkpoint}/relatum")
    query = orders.writeStream.foreachBatch(enrichment.batch(write)).option("checkpointLocation", checkpoint).start()
    ```

    `write(rows, batch_id)` receives the batch's columns, `related_stream`, `related_offset`, `related_timestamp`,
    `related_value`, `related_headers`, `related_properties`, and:

    - `status`: `found`; `absent`: the coverage proves that no related message exists; `not_recorded_yet`: none was
      found, but a part of the streams is not recorded; `unproven`: none was found, and absence cannot be proven now;
      `expired`: retention has dropped the related message; `replaced`: its stream was declared again or lost its tail;
      `no_stream`, `refused`, `unreadable`: as in `resolve`.
    - `attempts`: how often the row was looked up.

    A row with several related messages appears once for each. A row without related messages waits, and later batches
    look it up. After the last attempt it appears with `absent`, `not_recorded_yet` or `unproven`. A row without a value
    of the key (or, with `within`, without a time) gets `absent` and never waits.

    Exactly once: a batch that is repeated after a kill or an error in `write` gives the same rows. So a `write` that is
    idempotent by `batch_id` makes no duplicates. Waiting rows are looked up only when a batch runs, and Spark runs none
    while nothing is published.

    Args:
        to: The stream, super stream or streams to search.
        on: The key. Its value is in the column of that name, else in the headers and properties of its definition.
        pending: A directory's URI for the batches' decisions and waiting rows, on a file system that all executors
            share, for example next to the checkpoint. Each query has its own subdirectory. Two enrichments of one query
            need different directories.
        how: "left" (default) passes on all rows; "inner" passes on only rows with the status `found`.
        retries: Maximum number of later batches that look a row up again, 0 or more. Default: 10.
        wait: Maximum time that a row waits, even if retries are left: a timedelta or seconds. None (default) means no
            limit.
        within: Maximum distance of a related message's time from the row's, before or after: a timedelta or seconds,
            inclusive. None (default) means any time.
        limit: Maximum related messages of a row; the oldest are taken. Default: 100.
        value_column: The column with the key's value; for a composite key also several, one for each component. None
            (default): as described for `on`.
        time_column: The column of the row's time, for `within`. Default: `timestamp`.
        value: Whether to add the related messages' bodies. Default: True.
        headers: Whether to add the related messages' headers and properties. Default: True.
        prefix: The prefix of the related messages' columns. Default: `related_`.
        broker: The broker. None uses RELATUM_BROKER_URL.
        database: PostgreSQL's URL. None uses RELATUM_DATABASE_URL.

    Raises:
        InvalidInput: an argument is wrong.
        ConfigurationError: no broker or no database is named.
    """

    def __init__(
        self,
        to: str | Sequence[str],
        on: str,
        *,
        pending: str,
        how: How = "left",
        retries: int = 10,
        wait: timedelta | float | None = None,
        within: timedelta | float | None = None,
        limit: int = 100,
        value_column: str | Sequence[str] | None = None,
        time_column: str = "timestamp",
        value: bool = True,
        headers: bool = True,
        prefix: str = "related_",
        broker: GivenBroker = None,
        database: str | None = None,
    ) -> None:
        self._names = names_of("to", to)
        checked_choice("how", how, get_args(How))
        self._on, self._how, self._pending = on, how, pending
        self._retries, self._limit = checked_count("retries", retries, least=0), checked_count("limit", limit)
        self._wait_us = None if wait is None else span_us("wait", wait)
        self._within_us = None if within is None else span_us("within", within)
        self._value_columns = (value_column,) if isinstance(value_column, str) else tuple(value_column or ())
        self._time_column = time_column
        self._value, self._headers, self._prefix = value, headers, prefix
        self._broker = broker_of(broker)
        self._database = database_url(database)

    def batch(self, write: Callable[[DataFrame, int], None]) -> Callable[[DataFrame, int], None]:
        """Return the function for `foreachBatch`.

        Args:
            write: Called with the enriched rows and the batch's number, possibly again with the same rows and number.
                Each action on the rows reads the payloads: cache the rows if you run several.

        Besides the errors of `write`, the function raises:

        - `KeyNotDefined`: the key is not in force. `StreamNotFound`: a stream of `to` does not exist.
        - `StreamReplaced`: a stream was recorded anew or forgotten during the batch, which can be repeated.
        - `InvalidInput`: a column is missing or would be duplicated.
        - `DatabaseUnavailable`, `BrokerUnavailable`: nothing was decided; the batch can be repeated.
        """

        def run(df: DataFrame, batch_id: int) -> None:
            decisions = Decisions(df.sparkSession, self._pending)
            definition, streams = self._recorded()
            self._check_columns(df)
            columns = StructType([*df.schema, *_DECISION])
            decided = decisions.decided()
            if batch_id not in decided:
                rows = df.withColumns({"relatum_seen_us": F.lit(time.time_ns() // 1000), "relatum_attempts": F.lit(0)})
                if before := [batch for batch in decided if batch < batch_id]:
                    waiting = decisions.read(max(before), columns).where("relatum_waits")
                    rows = rows.unionByName(waiting.select(*map(_column, rows.columns)))
                decisions.write(batch_id, self._decided(rows, definition).select(*map(_column, columns.names)))
                # The rows of a removed key or a forgotten stream may have been deleted.
                now, present = self._recorded()
                if now.key_id != definition.key_id:
                    raise KeyNotDefined(f"the key {self._on!r} was defined anew: repeat the batch", key=self._on)
                for gone in streams.keys() - present:
                    text = f"the stream {streams[gone]!r} was re-recorded or forgotten: repeat the batch"
                    raise StreamReplaced(text, stream=streams[gone])
                decisions.mark(batch_id)
            write(self._with_payloads(decisions.read(batch_id, columns), df.columns), batch_id)
            for batch in decided:
                if batch <= batch_id - BATCHES_RETAINED:
                    decisions.delete(batch)

        return run

    def _recorded(self) -> tuple[KeyDefinition, dict[int, str]]:
        """Read the key's definition, and the recorded streams by id."""
        with connected(self._database) as connection:
            (definition,) = definitions_in(connection, [self._on])
            streams = streams_named(connection, self._broker.vhost, self._names)
        return definition, {row.stream_id: row.name for row in streams}

    def _check_columns(self, df: DataFrame) -> None:
        times = () if self._within_us is None else (self._time_column,)
        for name in (*self._value_columns, *times):
            if name not in df.columns:
                raise InvalidInput(f"no column is named {name!r}; the columns are {', '.join(df.columns)}")
        added = [f"{self._prefix}{name}" for name in schema().names]
        check_added_columns([*added, "status", "attempts", *(field.name for field in _DECISION)], df.columns)

    def _parts(self, df: DataFrame, definition: KeyDefinition) -> list[Column]:
        names = self._value_columns or ((self._on,) if self._on in df.columns else ())
        if names:
            # A single column holds the whole value of a composite key, as the relationship table has it.
            if len(names) not in (1, len(definition.components)):
                count = len(definition.components)
                takes = "1" if count == 1 else f"1 or {count}"
                raise InvalidInput(f"value_column= names {len(names)} columns, but the key {self._on!r} takes {takes}")
            return [_column(name) for name in names]
        places = [place for each in definition.components if (place := each.lone)]
        needed = {"headers" if place.kind == "header" else "properties" for place in places}
        if len(places) < len(definition.components) or not needed.issubset(df.columns):
            raise InvalidInput(
                f"no column has the value of the key {self._on!r} ({' + '.join(definition.sources)}): name its column "
                "in value_column=, or, if its sources are whole headers or properties, keep these columns"
            )
        return [F.col("headers" if place.kind == "header" else "properties")[place.name] for place in places]

    def _decided(self, rows: DataFrame, definition: KeyDefinition) -> DataFrame:
        """Look up rows, return each once per related message (or once without one), and decide which rows wait."""
        missing = self._status_of_missing()
        columns = self._parts(rows, definition)
        parts = F.array(*map(_text, columns, (field.dataType for field in rows.select(*columns).schema)))
        moment = stream = offset = F.lit(None)
        if self._within_us is not None:
            moment = _micros(_column(self._time_column), rows.schema[self._time_column].dataType)
            # A row without a time has no related messages.
            parts = F.when(moment.isNotNull(), parts)
        if {"stream", "offset"} <= set(rows.columns):
            stream, offset = F.col("stream"), F.col("offset")
        probes = rows.select("*", parts, moment.cast("long"), stream.cast("string"), offset.cast("long"))
        # Numbered columns, since Spark does not find names with a dot here.
        probes = probes.toDF(*(f"_{n}" for n in range(len(probes.columns))))
        found = probes.mapInArrow(_Lookup(self, definition, missing is not None), StructType([*rows.schema, *_MATCH]))
        is_last = F.col("relatum_attempts") >= self._retries
        if self._wait_us is not None:
            is_last |= F.col("relatum_seen_us") <= time.time_ns() // 1000 - self._wait_us
        is_found, has_value = F.col("relatum_stream").isNotNull(), F.col("relatum_value").isNotNull()
        status = F.when(has_value, missing or str(Status.NOT_RECORDED_YET)).otherwise(str(Status.ABSENT))
        return found.withColumns(
            {
                "relatum_waits": has_value & ~is_found & ~is_last,
                "relatum_status": F.when(~is_found, status),
                "relatum_attempts": F.col("relatum_attempts") + 1,
            }
        )

    def _status_of_missing(self) -> str | None:
        """Return the status of rows without related messages; None if the table has rows of a replaced stream."""
        with_time = self._within_us is not None
        with suppress(StreamReplaced):
            return str(status_of_missing(self._broker, self._database, self._names, [self._on], with_time=with_time))
        return None

    def _with_payloads(self, decided: DataFrame, names: Sequence[str]) -> DataFrame:
        """Return the rows that no longer wait, with the payloads of their related messages."""
        resolved = resolve(
            decided.where(~F.col("relatum_waits")),
            stream_column="relatum_stream",
            offset_column="relatum_offset",
            prefix=self._prefix,
            value=self._value,
            headers=self._headers,
            check={self._on: "relatum_value"},
            keep_order=True,
            broker=self._broker,
            database=self._database,
        )
        read = _column(f"{self._prefix}status")
        # If the table has a message that the stream does not have, the stream lost its tail.
        status = F.when(read == "not_found", "replaced").otherwise(F.coalesce(read, F.col("relatum_status")))
        related = [f"{self._prefix}{name}" for name in schema(value=self._value, headers=self._headers).names]
        given = resolved.withColumns(
            {
                related[0]: F.col("relatum_stream"),
                related[1]: F.col("relatum_offset"),
                "status": status,
                "attempts": F.col("relatum_attempts"),
            }
        )
        given = given.select(*map(_column, (*names, *related, "status", "attempts")))
        return given.where(F.col("status") == "found") if self._how == "inner" else given


def _text(part: Column, kind: DataType) -> Column:
    """Return a value as text; a timestamp in microseconds, as the sink writes it."""
    return (_micros(part, kind) if isinstance(kind, TimestampType | TimestampNTZType) else part).cast("string")


def _micros(moment: Column, kind: DataType) -> Column:
    """Return a timestamp in microseconds since 1970. Without a zone, it is UTC: Spark before 4.3 cannot convert it."""
    if isinstance(kind, TimestampNTZType):
        moment = F.concat(moment.cast("string"), F.lit("Z")).cast("timestamp_ltz")
    return F.unix_micros(moment)


def _column(name: str) -> Column:
    """Return a column by its name, which may have any characters."""
    return F.col(f"`{name.replace('`', '``')}`")


# --- in the tasks -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, repr=False)
class _Lookup:
    """The work of a task: returns each row once for each related message, or once without one. Can be pickled."""

    of: Enrichment
    definition: KeyDefinition
    is_trusted: bool
    """False if a stream was replaced since it was recorded; then no row is looked up."""

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Look up one partition's rows, over one connection."""
        connection: sa.Connection | None = None
        with ExitStack() as stack:
            for batch in batches:
                for start in range(0, batch.num_rows, PROBED_ROWS):
                    if connection is None and self.is_trusted:
                        connection = stack.enter_context(connected(self.of._database))
                    yield self._found(connection, batch.slice(start, PROBED_ROWS))

    def _found(self, connection: sa.Connection | None, rows: pa.RecordBatch) -> pa.RecordBatch:
        *row_columns, parts, moments, streams, offsets = rows.columns
        values = list(map(self._value, parts.to_pylist()))
        hits: dict[int, list[Any]] = defaultdict(list)
        if connection is not None:
            probes = {"streams": streams.to_pylist(), "offsets": offsets.to_pylist(), "moments": moments.to_pylist()}
            within = self.of._within_us
            given = {"vhost": self.of._broker.vhost, "names": list(self.of._names), "limit": self.of._limit}
            given |= {"key_id": self.definition.key_id, "values": values, "within": within}
            for number, *hit in connection.execute(_AT_ANY_TIME if within is None else _WITHIN, given | probes):
                hits[number - 1].append(hit)
        found = [(row, value, *hit) for row, value in enumerate(values) for hit in hits.get(row, [(None, None)])]
        at, *match_columns = zip(*found, strict=True)
        kinds = pa.string(), pa.string(), pa.int64()
        added = [pa.array(column, kind) for column, kind in zip(match_columns, kinds, strict=True)]
        arrays = [*(column.take(pa.array(at, pa.int64())) for column in row_columns), *added]
        return pa.RecordBatch.from_arrays(arrays, [f"_{n}" for n in range(len(arrays))])

    def _value(self, parts: Sequence[str | None] | None) -> str | None:
        if parts is None or None in parts:
            return None
        # Headers and the source's columns of keys are text: there, microseconds are digits.
        is_time = self.definition.value_type is KeyType.TIMESTAMP
        try:
            if len(parts) == 1 and self.definition.is_composite:
                return checked_text(str(parts[0]))
            return self.definition.canonical_of([int(p) if is_time and p and is_integer_text(p) else p for p in parts])
        except InvalidValue:
            return None


def _probes(within: str) -> sa.TextClause:
    """Return the statement for the related messages of many rows: row number from 1, stream, offset; oldest first.

    For each row, it makes one index probe per stream and part of the table that may hold the value.
    """
    # `unnest` has the database's collation; the index needs that of the table's column.
    value = 'wanted.value COLLATE "C"'
    return sql(f"""
        SELECT wanted.number, found.name, found.stream_offset
        FROM unnest(:values::text[], :streams::text[], :offsets::bigint[], :moments::bigint[])
          WITH ORDINALITY AS wanted (value, stream, at_offset, time_us, number)
        CROSS JOIN LATERAL (
          SELECT s.name, hit.stream_offset, hit.time_us
          FROM relatum.streams s
          CROSS JOIN LATERAL (
            SELECT r.stream_offset, r.time_us FROM relatum.relationships r
            WHERE r.key_id = :key_id::smallint AND r.value = {value} AND r.stream_id = s.stream_id
              AND {part_may_hold_values("r", ":key_id::smallint", value, value)} {within}
              AND (s.name, r.stream_offset) IS DISTINCT FROM (wanted.stream, wanted.at_offset)
            ORDER BY r.time_us, r.stream_offset
            LIMIT :limit::bigint) hit
          WHERE s.vhost = :vhost::text AND s.replaced_at IS NULL
            AND (s.name = ANY (:names::text[]) OR s.super_stream = ANY (:names::text[]))
          ORDER BY hit.time_us, s.name, hit.stream_offset
          LIMIT :limit::bigint) found
        ORDER BY wanted.number, found.time_us, found.name, found.stream_offset""")


_AT_ANY_TIME: Final = _probes("")
_WITHIN: Final = _probes("AND r.time_us BETWEEN wanted.time_us - :within::bigint AND wanted.time_us + :within::bigint")
