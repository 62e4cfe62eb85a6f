"""Enriching a streaming query: each row of a micro-batch with its relata, through the relationship table.

No state store and no watermark: what has no relata yet waits in a directory and is looked up again with each later
batch. What a batch decided is written down before any of it is given out, so that a batch that is run again gives the
same rows, whatever the table holds by then.
"""

import math
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from typing import Final, Literal, TypeAlias, get_args

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F
from pyspark.sql.types import ArrayType, IntegerType, LongType, StringType, StructField, StructType

from relatum.errors import InvalidInput, StreamReplaced
from relatum.keys import KeyDefinition, Place
from relatum.reading import BrokerAddress
from relatum.store import as_engine, translated_errors
from relatum_spark._decisions import Decisions
from relatum_spark._definitions import definitions_of
from relatum_spark._evidence import status_of_missing
from relatum_spark._lookup import CARRIED, DECIDED, Lookup
from relatum_spark._resolve import resolve
from relatum_spark._where import Broker, database_url

How: TypeAlias = Literal["left", "inner"]
Write: TypeAlias = Callable[[DataFrame, int], None]

_ISO: Final = "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX"


@dataclass(frozen=True, slots=True)
class _Verdict:
    """What is known of the streams looked in, before a batch's look-ups."""

    missing: str
    is_trusted: bool


class Enrichment:
    """Joins each micro-batch of a streaming query to the messages related to its rows.

    ```
    enrichment = Enrichment(to="payments", on="order_id", pending=f"{checkpoint}/relatum")
    query = orders.writeStream.foreachBatch(enrichment.batch(write)).option("checkpointLocation", checkpoint).start()
    ```

    `write(rows, batch_id)` gets the batch's columns, `related_stream`, `related_offset`, `related_timestamp`,
    `related_value`, `related_headers`, `related_properties`, and:

    - `status`: `found`; `absent`: there is none, the coverage proves it; `not_recorded_yet`: none was found, but a part
      of the streams is not recorded; `unproven`: none was found, and nobody can prove from here that there is none;
      `expired`: there was one, and retention has dropped it; `replaced`: the stream was
      deleted and declared again; `no_stream`, `refused`, `unreadable`: as of `resolve`.
    - `attempts`: how often the row was looked up.

    A row with several relata comes once for each. One without any waits, and is looked up again in later batches; when
    that was enough it comes with `absent`, `not_recorded_yet` or `unproven`. A row without a value of the key never
    waits.

    Exactly once: a batch that is run again, after a kill or an error of `write`, gives the same rows, so a `write` that
    can be repeated by `batch_id` makes no duplicate. Waiting rows move on with batches only: Spark makes none while
    nothing is published.

    Args:
        to: The stream, super stream or streams to look in.
        on: The key. Its value is in the column of that name, else in the headers and properties its definition names.
        pending: A directory's URI for the batches' decisions and waiting rows, on a file system that all executors
            share; beside the checkpoint is a good place. Each query has a directory of its own in there.
        how: "left" (default) also gives rows that stay without relata; "inner" only found ones.
        retries: Later batches in which a row is looked up again, from 0 on. Default 10.
        wait: After how long a row is given up, even if retries are left; None (default) for no limit.
        within: Only relata so far from the row's own time at most, either way; None (default) for any time.
        limit: Relata of a row at most, the oldest. Default 100.
        value_column: Where the key's value is, if not there; several columns for a key of several components.
        time_column: The row's own time, for `within`. Default `timestamp`.
        value: With the body of the relata.
        headers: With their headers and properties.
        prefix: Put before the names of their columns. Default `related_`.
        broker: Which RabbitMQ; None for RELATUM_BROKER_URL.
        stream_url: Where the stream protocol is, if that cannot be told from the broker's URL.
        database: PostgreSQL's URL; None for RELATUM_DATABASE_URL.

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
        wait: timedelta | None = None,
        within: timedelta | None = None,
        limit: int = 100,
        value_column: str | Sequence[str] | None = None,
        time_column: str = "timestamp",
        value: bool = True,
        headers: bool = True,
        prefix: str = "related_",
        broker: str | BrokerAddress | Broker | None = None,
        stream_url: str | None = None,
        database: str | None = None,
    ) -> None:
        self._names = (to,) if isinstance(to, str) else tuple(to)
        if not self._names or not all(isinstance(name, str) and name for name in self._names):
            raise InvalidInput("to= takes a stream's name or several")
        if how not in get_args(How):
            raise InvalidInput(f"how= takes one of {', '.join(get_args(How))}")
        self._on, self._how, self._pending = on, how, pending
        self._retries = _number("retries", retries, 0)
        self._limit = _number("limit", limit, 1)
        self._wait_us = _microseconds("wait", wait)
        self._within_us = _microseconds("within", within)
        self._value_columns = (value_column,) if isinstance(value_column, str) else tuple(value_column or ())
        self._time_column = time_column
        self._value, self._headers, self._prefix = value, headers, prefix
        self._broker = Broker.of(broker, stream_url)
        self._database = database_url(database)

    def __repr__(self) -> str:
        return f"<Enrichment of {self._on} from {', '.join(self._names)}>"

    def batch(self, write: Write) -> Callable[[DataFrame, int], None]:
        """The function for `foreachBatch`.

        Args:
            write: Gets the enriched rows and the batch's number. It may be called again with the same rows and number.
                Each action on the rows reads the payloads; cache them for several.

        The function raises, besides what `write` raises:

        - `KeyNotDefined`: the key is not in force. `StreamNotFound`: a stream of `to` does not exist.
        - `InvalidInput`: a column is missing, or would be there twice.
        - `DatabaseUnavailable`, `BrokerUnavailable`: nothing was decided; the batch can be run again.
        """

        def run(df: DataFrame, batch_id: int) -> None:
            decisions = Decisions(df.sparkSession, self._pending)
            definition = definitions_of(self._database, [self._on])[0]
            carried = self._carried(df, definition)
            columns = StructType([*_nullable(carried.schema), *DECIDED])
            if not decisions.is_decided(batch_id):
                decisions.write(batch_id, self._decided(decisions, batch_id, carried, definition, columns))
            write(self._given_out(decisions.read(batch_id, columns), df.columns), batch_id)
            decisions.forget(batch_id)

        return run

    # --- deciding -----------------------------------------------------------------------------------------

    def _carried(self, df: DataFrame, definition: KeyDefinition) -> DataFrame:
        """The batch with the columns a row waits with: the parts of its value, its time, now, no look-ups."""
        self._check_columns(df)
        parts = F.array(*(part.cast("string") for part in self._parts(df, definition)))
        moment = F.lit(None).cast("long")
        if self._within_us is not None:
            moment = F.unix_micros(_column(self._time_column))
        carried = [parts, moment, F.lit(_now_us()), F.lit(0)]
        return df.select("*", *(each.alias(name) for each, name in zip(carried, CARRIED, strict=True)))

    def _check_columns(self, df: DataFrame) -> None:
        needed = [*self._value_columns, *([self._time_column] if self._within_us is not None else [])]
        for name in needed:
            if name not in df.columns:
                raise InvalidInput(f"there is no column {name!r}; there are {', '.join(df.columns)}")
        taken = {name.lower() for name in df.columns}
        added = {"status", "attempts", *CARRIED, *(field.name for field in DECIDED)}
        added |= {
            f"{self._prefix}{name}" for name in ("stream", "offset", "timestamp", "value", "headers", "properties")
        }
        clashing = sorted(name for name in added if name.lower() in taken)
        if clashing:
            raise InvalidInput(f"the columns {', '.join(clashing)} are there already: rename them, or give a prefix=")

    def _parts(self, df: DataFrame, definition: KeyDefinition) -> list[Column]:
        names = self._value_columns or ((self._on,) if self._on in df.columns else ())
        if names:
            # One column of a key of several components holds the whole value, as the relationship table has it.
            if len(names) not in (1, len(definition.components)):
                raise InvalidInput(f"the key {self._on!r} has {len(definition.components)} components")
            return [_column(name) for name in names]
        parts = [each.lone for each in definition.components]
        if None in parts:
            raise InvalidInput(
                f"the key {self._on!r} is taken from {' + '.join(definition.sources)}, which no column of a stream "
                "holds: give the column of its values by value_column="
            )
        needed = {"headers" if each and each.kind == "header" else "properties" for each in parts}
        if not needed.issubset(df.columns):
            raise InvalidInput(f"the key's value is in no column: name one by value_column=, or keep {sorted(needed)}")
        return [_part(each) for each in parts if each is not None]

    def _decided(
        self, decisions: Decisions, batch_id: int, carried: DataFrame, definition: KeyDefinition, columns: StructType
    ) -> DataFrame:
        """The batch's rows and those that wait, each with what was found for it."""
        rows = carried
        before = decisions.last_before(batch_id)
        if before is not None:
            waiting = decisions.read(before, columns).where("relatum_waits")
            rows = rows.unionByName(waiting.select(*map(_column, carried.columns)))
        verdict = self._verdict(definition)
        names = carried.columns
        lookup = Lookup(
            database=self._database,
            vhost=self._broker.address.vhost,
            names=self._names,
            definition=definition,
            within_us=self._within_us,
            limit=self._limit,
            retries=self._retries,
            seen_since_us=None if self._wait_us is None else _now_us() - self._wait_us,
            missing=verdict.missing,
            is_trusted=verdict.is_trusted,
            own_at=(names.index("stream"), names.index("offset")) if {"stream", "offset"} <= set(names) else None,
        )
        # By numbers: Spark finds no column with a dot in its name here.
        return rows.toDF(*(f"_{n}" for n in range(len(names)))).mapInArrow(lookup, columns)

    def _verdict(self, definition: KeyDefinition) -> _Verdict:
        """Whether all that the streams hold now is recorded. Asked before the look-ups, which makes it a proof."""
        with_time, vhost = self._within_us is not None, self._broker.address.vhost
        with ExitStack() as stack:
            reader = stack.enter_context(self._broker.open())
            engine = stack.enter_context(as_engine(self._database))
            stack.enter_context(translated_errors())
            connection = stack.enter_context(engine.connect())
            try:
                missing = status_of_missing(
                    reader, connection, vhost, self._names, [definition.name], with_time=with_time
                )
            except StreamReplaced:
                # The rows of the table are another stream's, until the recorder puts that right.
                return _Verdict("not_recorded_yet", is_trusted=False)
        return _Verdict(str(missing), is_trusted=True)

    # --- giving out ---------------------------------------------------------------------------------------

    def _given_out(self, decided: DataFrame, names: Sequence[str]) -> DataFrame:
        """The rows that wait no longer, with the payloads of their relata."""
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
            # Where the table knows a message and nothing lies, the stream lost its tail.
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


def _nullable(columns: StructType) -> list[StructField]:
    """The columns as files give them back."""
    kinds = {
        "relatum_parts": ArrayType(StringType()),
        "relatum_moment_us": LongType(),
        "relatum_seen_us": LongType(),
        "relatum_attempts": IntegerType(),
    }
    return [StructField(field.name, kinds.get(field.name, field.dataType)) for field in columns.fields]


def _column(name: str) -> Column:
    """A column by its name, whatever is in the name."""
    return F.col(f"`{name.replace('`', '``')}`")


def _now_us() -> int:
    return time.time_ns() // 1000


def _number(argument: str, number: int, least: int) -> int:
    if type(number) is not int or number < least:
        raise InvalidInput(f"{argument}= takes a number from {least} on")
    return number


def _microseconds(argument: str, span: timedelta | None) -> int | None:
    if span is None:
        return None
    if not isinstance(span, timedelta) or not 0 <= span.total_seconds() < math.inf:
        raise InvalidInput(f"{argument}= takes a timedelta, 0 or more, or None")
    return span // timedelta(microseconds=1)
