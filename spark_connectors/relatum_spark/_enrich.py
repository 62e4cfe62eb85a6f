"""Enriching a streaming query: each row of a micro-batch is joined to its relata through the relationship table.

No state store and no watermark: a row without relata waits in a directory, and each later batch looks it up again. A
batch's decisions are written before any row is passed on, so that a repeated batch gives the same rows, whatever was
recorded since.
"""

import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache
from typing import Any, Final, Literal, TypeAlias, get_args

import pyarrow as pa
import sqlalchemy as sa
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from relatum.checks import checked_choice, checked_count
from relatum.errors import ConfigurationError, InvalidInput, StreamReplaced
from relatum.keys import InvalidValue, KeyDefinition, Place
from relatum.store.database import as_engine, sql
from relatum.store.parts import part_may_hold_values
from relatum.store.translation import translated_errors
from relatum_spark._columns import schema
from relatum_spark._resolve import resolve
from relatum_spark._table import status_of_missing
from relatum_spark._where import GivenBroker, broker_of, database_url, definitions_of, names_of, open_reader, span_us

How: TypeAlias = Literal["left", "inner"]
Write: TypeAlias = Callable[[DataFrame, int], None]

PROBED_ROWS: Final = 1000
"""Rows looked up by one statement. A task holds their relata in memory, each row up to its limit."""

BATCHES_KEPT: Final = 10
"""Batches whose decisions are kept. The last one is needed; the others allow rewinding a query by hand."""

_CARRIED: Final = pa.schema(
    [
        ("relatum_parts", pa.list_(pa.string())),
        ("relatum_moment_us", pa.int64()),
        ("relatum_seen_us", pa.int64()),
        ("relatum_attempts", pa.int32()),
    ]
)
"""Columns added to a waiting row: its value's parts, its time, when it was first seen, its number of lookups."""

_DECIDED: Final = pa.schema(
    [
        ("relatum_waits", pa.bool_()),
        ("relatum_status", pa.string()),
        ("relatum_value", pa.string()),
        ("relatum_stream", pa.string()),
        ("relatum_offset", pa.int64()),
    ]
)
"""Columns that a lookup adds: whether the row waits, why it has no relatum, and the relatum's value and place."""

_ADDED: Final = from_arrow_schema(pa.schema([*_CARRIED, *_DECIDED])).fields

_ISO: Final = "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX"

_MARK: Final = "_DECIDED"
"""The file that marks a directory as complete. Spark does not read files whose name begins with an underscore."""

_QUERY_ID: Final = "sql.streaming.queryId"
"""Spark's local property with the query's id, which the checkpoint keeps across restarts."""

_BATCH_NAME: Final = re.compile(r"batch-([0-9]+)\Z", re.ASCII)


class Enrichment:
    """Joins each micro-batch of a streaming query to the messages related to its rows.

    ```
    enrichment = Enrichment(to="payments", on="order_id", pending=f"{checkpoint}/relatum")
    query = orders.writeStream.foreachBatch(enrichment.batch(write)).option("checkpointLocation", checkpoint).start()
    ```

    `write(rows, batch_id)` receives the batch's columns, `related_stream`, `related_offset`, `related_timestamp`,
    `related_value`, `related_headers`, `related_properties`, and:

    - `status`: `found`; `absent`: the coverage proves that there is no relatum; `not_recorded_yet`: none was found, but
      a part of the streams is not recorded; `unproven`: none was found, and its absence cannot be proven from here;
      `expired`: retention has dropped the relatum; `replaced`: the stream was deleted and declared again;
      `no_stream`, `refused`, `unreadable`: as in `resolve`.
    - `attempts`: how often the row was looked up.

    A row with several relata appears once for each. A row without relata waits, and later batches look it up again.
    After the last attempt it appears with `absent`, `not_recorded_yet` or `unproven`. A row without a value of the key
    never waits.

    Exactly once: a batch that is repeated after a kill or an error in `write` gives the same rows. So a `write` that is
    idempotent by `batch_id` makes no duplicates. Waiting rows advance only with batches, and Spark makes no batch while
    nothing is published.

    Args:
        to: The stream, super stream or streams to search.
        on: The key. Its value is in the column of that name, else in the headers and properties of its definition.
        pending: A directory's URI for the batches' decisions and waiting rows, on a file system that all executors
            share, for example beside the checkpoint. Each query has its own subdirectory.
        how: "left" (default) also returns rows without relata; "inner" returns only rows with a found message.
        retries: How many later batches look a row up again, 0 or more. Default: 10.
        wait: How long a row waits at most, even if retries are left: a timedelta or seconds. None (default) means no
            limit.
        within: Maximum distance of a relatum's time from the row's, either way. None (default) means any time.
        limit: Maximum relata of a row; the oldest are taken. Default: 100.
        value_column: The column of the key's value, instead of `on`'s; several for a key of several components.
        time_column: The column of the row's time, for `within`. Default: `timestamp`.
        value: Whether to add the relata's bodies. Default: True.
        headers: Whether to add the relata's headers and properties. Default: True.
        prefix: The prefix of the relata's columns. Default: `related_`.
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
        self._wait_us, self._within_us = _span_us("wait", wait), _span_us("within", within)
        self._value_columns = (value_column,) if isinstance(value_column, str) else tuple(value_column or ())
        self._time_column = time_column
        self._value, self._headers, self._prefix = value, headers, prefix
        self._broker = broker_of(broker)
        self._database = database_url(database)

    def __repr__(self) -> str:
        return f"<Enrichment of {self._on} from {', '.join(self._names)}>"

    def batch(self, write: Write) -> Callable[[DataFrame, int], None]:
        """Return the function for `foreachBatch`.

        Args:
            write: Called with the enriched rows and the batch's number, possibly again with the same rows and number.
                Each action on the rows reads the payloads: cache the rows if you run several.

        Besides the errors of `write`, the function raises:

        - `KeyNotDefined`: the key is not in force. `StreamNotFound`: a stream of `to` does not exist.
        - `InvalidInput`: a column is missing or would be duplicated.
        - `DatabaseUnavailable`, `BrokerUnavailable`: nothing was decided; the batch can be repeated.
        """

        def run(df: DataFrame, batch_id: int) -> None:
            decisions = _Decisions(df.sparkSession, self._pending)
            definition = definitions_of(self._database, [self._on])[0]
            rows = self._carried(df, definition)
            columns = StructType([*df.schema.fields, *_ADDED])
            decided = decisions.decided()
            if batch_id not in decided:
                before = [batch for batch in decided if batch < batch_id]
                if before:
                    waiting = decisions.read(max(before), columns).where("relatum_waits")
                    rows = rows.unionByName(waiting.select(*map(_column, rows.columns)))
                lookup = self._lookup(definition, rows.columns)
                # Numbered columns, since Spark does not find names with a dot here.
                numbered = rows.toDF(*(f"_{n}" for n in range(len(rows.columns))))
                decisions.write(batch_id, numbered.mapInArrow(lookup, columns))
            write(self._with_payloads(decisions.read(batch_id, columns), df.columns), batch_id)
            for batch in decided:
                if batch <= batch_id - BATCHES_KEPT:
                    decisions.forget(batch)

        return run

    def _carried(self, df: DataFrame, definition: KeyDefinition) -> DataFrame:
        """Add the columns `_CARRIED` of a row that was not looked up yet."""
        self._check_columns(df)
        parts = F.array(*(part.cast("string") for part in self._parts(df, definition)))
        moment = F.lit(None).cast("long")
        if self._within_us is not None:
            moment = F.unix_micros(_column(self._time_column))
        carried = [parts, moment, F.lit(_now_us()), F.lit(0)]
        return df.select("*", *(each.alias(name) for each, name in zip(carried, _CARRIED.names, strict=True)))

    def _check_columns(self, df: DataFrame) -> None:
        times = () if self._within_us is None else (self._time_column,)
        for name in (*self._value_columns, *times):
            if name not in df.columns:
                raise InvalidInput(f"there is no column {name!r}; there are {', '.join(df.columns)}")
        taken = {name.lower() for name in df.columns}
        added = {f"{self._prefix}{name}" for name in schema().names}
        added |= {"status", "attempts", *(field.name for field in _ADDED)}
        clashing = sorted(name for name in added if name.lower() in taken)
        if clashing:
            raise InvalidInput(f"the columns {', '.join(clashing)} already exist: rename them, or give a prefix=")

    def _parts(self, df: DataFrame, definition: KeyDefinition) -> list[Column]:
        names = self._value_columns or ((self._on,) if self._on in df.columns else ())
        if names:
            # A single column holds the whole value of a composite key, as the relationship table has it.
            if len(names) not in (1, len(definition.components)):
                raise InvalidInput(f"the key {self._on!r} has {len(definition.components)} components")
            return [_column(name) for name in names]
        parts = [each.lone for each in definition.components]
        if None in parts:
            raise InvalidInput(
                f"the key {self._on!r} is read from {' + '.join(definition.sources)}, which is not a column of a "
                "stream: name the column of its values with value_column="
            )
        needed = {"headers" if each and each.kind == "header" else "properties" for each in parts}
        if not needed.issubset(df.columns):
            raise InvalidInput(f"no column has the key's value: name one with value_column=, or keep {sorted(needed)}")
        return [_part(each) for each in parts if each is not None]

    def _lookup(self, definition: KeyDefinition, names: list[str]) -> "_Lookup":
        """Prepare a batch's lookups; first check if all present messages are recorded, which proves absence."""
        missing, is_trusted, with_time = "not_recorded_yet", True, self._within_us is not None
        with (
            open_reader(self._broker) as reader,
            as_engine(self._database) as engine,
            translated_errors(),
            engine.connect() as connection,
        ):
            try:
                vhost, keys = self._broker.vhost, [self._on]
                missing = str(status_of_missing(reader, connection, vhost, self._names, keys, with_time=with_time))
            except StreamReplaced:
                # The table's rows belong to the replaced stream, until the recorder corrects that.
                is_trusted = False
        seen_since_us = None if self._wait_us is None else _now_us() - self._wait_us
        own_at = (names.index("stream"), names.index("offset")) if {"stream", "offset"} <= set(names) else None
        return _Lookup(self, definition, seen_since_us, missing, is_trusted, own_at)

    def _with_payloads(self, decided: DataFrame, names: Sequence[str]) -> DataFrame:
        """Return the rows that no longer wait, with the payloads of their relata."""
        rows = decided.where(~F.col("relatum_waits"))
        if self._how == "inner":
            rows = rows.where(F.col("relatum_stream").isNotNull())
        resolved = resolve(
            rows,
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
        status = (
            # If the table has a message that the stream does not have, the stream lost its tail.
            F.when(read == "not_found", "replaced").when(read.isNull(), F.col("relatum_status")).otherwise(read)
        )
        payload = [name for name in resolved.columns[len(rows.columns) :] if name != f"{self._prefix}status"]
        given = resolved.select(
            *map(_column, names),
            F.col("relatum_stream").alias(f"{self._prefix}stream"),
            F.col("relatum_offset").alias(f"{self._prefix}offset"),
            *map(_column, payload),
            status.alias("status"),
            F.col("relatum_attempts").alias("attempts"),
        )
        return given.where(F.col("status") == "found") if self._how == "inner" else given


def _part(place: Place) -> Column:
    if place.kind == "header":
        return F.col("headers")[place.name]
    part = F.col("properties")[place.name]
    return F.date_format(part, _ISO) if place.name == "timestamp" else part


def _column(name: str) -> Column:
    """Return a column by its name, which may have any characters."""
    return F.col(f"`{name.replace('`', '``')}`")


def _now_us() -> int:
    return time.time_ns() // 1000


def _span_us(argument: str, span: timedelta | float | None) -> int | None:
    return None if span is None else span_us(argument, span)


# --- what was decided -------------------------------------------------------------------------------------


class _Decisions:
    """The decisions of a query's micro-batches: a directory of Parquet files for each batch, with a mark when complete.

    Works on any file system that Spark can write to. It uses the JVM, which Spark Connect does not offer.
    """

    def __init__(self, session: SparkSession, directory: str) -> None:
        jvm: Any = getattr(session, "_jvm", None)
        if jvm is None:
            raise ConfigurationError("an enrichment stores files through the JVM, which Spark Connect does not offer")
        self._session = session
        query = session.sparkContext.getLocalProperty(_QUERY_ID) or "no-query"
        self._root = f"{directory.rstrip('/')}/{query}"
        self._path = jvm.org.apache.hadoop.fs.Path
        configuration = session._jsparkSession.sessionState().newHadoopConf()
        self._files = self._path(self._root).getFileSystem(configuration)

    def path(self, batch: int) -> str:
        return f"{self._root}/batch-{batch}"

    def decided(self) -> list[int]:
        """Return the batches whose decisions are complete."""
        root = self._path(self._root)
        if not self._files.exists(root):
            return []
        names = [str(each.getPath().getName()) for each in self._files.listStatus(root)]
        batches = [int(found[1]) for found in map(_BATCH_NAME.match, names) if found]
        return [batch for batch in batches if self._files.exists(self._path(f"{self.path(batch)}/{_MARK}"))]

    def write(self, batch: int, rows: DataFrame) -> None:
        """Write a batch's decisions, replacing the files of a killed attempt."""
        rows.write.mode("overwrite").parquet(self.path(batch))
        self._files.create(self._path(f"{self.path(batch)}/{_MARK}"), True).close()

    def read(self, batch: int, columns: StructType) -> DataFrame:
        """Read a batch's decisions. A column that was added since they were written is null."""
        return self._session.read.schema(columns).parquet(self.path(batch))

    def forget(self, batch: int) -> None:
        self._files.delete(self._path(self.path(batch)), True)


# --- in the tasks -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, repr=False)
class _Lookup:
    """The work of a task: returns each row once for each of its relata, or once without one. Can be pickled."""

    of: Enrichment
    definition: KeyDefinition
    seen_since_us: int | None
    """A row first seen at this time or before is given up. None means no limit."""
    missing: str
    """The status of a row without relata: "absent" if the coverage proves it."""
    is_trusted: bool
    """False if a stream is not the recorded one; then nothing is looked up."""
    own_at: tuple[int, int] | None
    """The columns of the row's own stream and offset, since a row is not its own relatum. None if it has none."""

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Look up one partition's rows, over one connection."""
        connection: sa.Connection | None = None
        with ExitStack() as stack, translated_errors():
            for batch in batches:
                for start in range(0, batch.num_rows, PROBED_ROWS):
                    if connection is None and self.is_trusted:
                        connection = stack.enter_context(stack.enter_context(as_engine(self.of._database)).connect())
                    yield self._decided(connection, batch.slice(start, PROBED_ROWS))

    def _decided(self, connection: sa.Connection | None, rows: pa.RecordBatch) -> pa.RecordBatch:
        parts, moments, seen, attempts = (column.to_pylist() for column in rows.columns[-len(_CARRIED) :])
        values = [self._value(*each) for each in zip(parts, moments, strict=True)]
        hits = self._hits(connection, values, moments, self._own(rows))
        since = self.seen_since_us
        indices: list[int] = []
        decided: list[tuple[Any, ...]] = []
        for row, value in enumerate(values):
            is_given_up = attempts[row] >= self.of._retries or (since is not None and seen[row] <= since)
            waits = value is not None and not is_given_up
            missing = (waits, "absent" if value is None else self.missing, value, None, None)
            found: list[tuple[Any, ...]] = [(False, None, value, *hit) for hit in hits.get(row, ())] or [missing]
            indices += [row] * len(found)
            decided += found
        columns = [
            pa.array(column, field.type) for column, field in zip(zip(*decided, strict=True), _DECIDED, strict=True)
        ]
        kept = rows.take(pa.array(indices, pa.int64()))
        counted = pa.array([attempts[row] + 1 for row in indices], kept.columns[-1].type)
        schema = pa.schema([*rows.schema, *_DECIDED])
        return pa.RecordBatch.from_arrays([*kept.columns[:-1], counted, *columns], schema=schema)

    def _value(self, parts: Sequence[str | None] | None, moment_us: int | None) -> str | None:
        """Return a row's canonical value; None if it has no valid value, or no time and `within` is set."""
        if parts is None or (self.of._within_us is not None and moment_us is None):
            return None
        if len(parts) == 1 and self.definition.is_composite:
            return parts[0]
        try:
            return self.definition.canonical_of(parts)
        except InvalidValue:
            return None

    def _own(self, rows: pa.RecordBatch) -> list[tuple[str, int] | None]:
        if self.own_at is None:
            return [None] * rows.num_rows
        own = (rows.column(at).to_pylist() for at in self.own_at)
        return list(zip(*own, strict=True))

    def _hits(
        self,
        connection: sa.Connection | None,
        values: Sequence[str | None],
        moments: Sequence[int | None],
        own: Sequence[tuple[str, int] | None],
    ) -> dict[int, list[tuple[str, int]]]:
        asked = [row for row, value in enumerate(values) if value is not None]
        if connection is None or not asked:
            return {}
        parameters: dict[str, Any] = {
            "key_id": self.definition.key_id,
            "vhost": self.of._broker.vhost,
            "limit": self.of._limit + 1,
            "names": list(self.of._names),
            "rows": asked,
            "values": [values[row] for row in asked],
        }
        if self.of._within_us is not None:
            times = [moments[row] or 0 for row in asked]
            parameters["lows"] = [time_us - self.of._within_us for time_us in times]
            parameters["highs"] = [time_us + self.of._within_us for time_us in times]
        hits: dict[int, list[tuple[str, int]]] = {}
        for row, stream, offset in connection.execute(_probes(self.of._within_us is not None), parameters):
            found = hits.setdefault(row, [])
            if (stream, offset) != own[row] and len(found) < self.of._limit:
                found.append((stream, offset))
        return hits


@lru_cache
def _probes(is_bounded: bool) -> sa.TextClause:
    """Return the statement for the relata of many rows: row, stream, offset; oldest first, `limit` of each stream.

    It makes one index probe for each row, stream and part of the table that may hold the value, up to the limit.
    """
    # `unnest` has the database's collation; the index needs that of the table's column.
    value = 'wanted.value COLLATE "C"'
    arrays, columns, within = ":rows::integer[], :values::text[]", "number, value", ""
    if is_bounded:
        arrays, columns = f"{arrays}, :lows::bigint[], :highs::bigint[]", f"{columns}, low, high"
        within = "AND r.time_us >= wanted.low AND r.time_us <= wanted.high"
    return sql(f"""
        SELECT wanted.number, s.name, found.stream_offset
        FROM unnest({arrays}) AS wanted ({columns})
        CROSS JOIN relatum.streams s
        CROSS JOIN LATERAL (
          SELECT r.stream_offset, r.time_us FROM relatum.relationships r
          WHERE r.key_id = :key_id::smallint AND r.value = {value} AND r.stream_id = s.stream_id
            AND {part_may_hold_values("r", ":key_id::smallint", value, value)} {within}
          ORDER BY r.time_us, r.stream_offset
          LIMIT :limit::bigint) found
        WHERE s.vhost = :vhost::text AND s.replaced_at IS NULL
          AND (s.name = ANY (:names::text[]) OR s.super_stream = ANY (:names::text[]))
        ORDER BY wanted.number, found.time_us, s.name, found.stream_offset""")
