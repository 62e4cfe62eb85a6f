"""The look-ups of an enrichment, in its tasks: many values a statement, each by one probe of the index a stream."""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, NamedTuple

import pyarrow as pa
import sqlalchemy as sa
from pyspark.sql.types import BooleanType, LongType, StringType, StructField
from sqlalchemy.dialects import postgresql

from relatum.keys import InvalidValue, KeyDefinition
from relatum.store import arrays, as_engine, may_hold_values, relationships, streams, translated_errors

PROBED_ROWS: Final = 1000
"""Rows looked up by one statement: with up to the limit of relata each, what a task holds."""

CARRIED: Final = ("relatum_parts", "relatum_moment_us", "relatum_seen_us", "relatum_attempts")
"""Columns behind the user's that a row waits with: its value's parts, its time, when it was first seen, look-ups."""

DECIDED: Final = [
    StructField("relatum_waits", BooleanType()),
    StructField("relatum_status", StringType()),
    StructField("relatum_value", StringType()),
    StructField("relatum_stream", StringType()),
    StructField("relatum_offset", LongType()),
]
"""Columns that a look-up adds: whether the row is tried again, why there is none, and where the relatum lies."""


class _Hit(NamedTuple):
    stream: str
    offset: int


@dataclass(frozen=True, slots=True, repr=False)
class Lookup:
    """What a task does: rows in, each once for each of its relata out, or once without one. Can be pickled.

    Attributes:
        database: PostgreSQL's URL.
        vhost: The broker's virtual host.
        names: Streams and super streams to look in.
        definition: The key.
        within_us: Microseconds a relatum may lie before or after a row's time; None for any time.
        limit: Relata of a row at most, the oldest.
        retries: Look-ups after the first.
        seen_since_us: A row first seen before this is given up; None for none.
        missing: What to say of a row without relata: "absent" where the coverage proves it.
        is_trusted: False where a stream is not the one that was recorded: nothing is looked up then.
        own_at: The columns with a row's own stream and offset, which is no relatum of itself; None for none.
    """

    database: str
    vhost: str
    names: tuple[str, ...]
    definition: KeyDefinition
    within_us: int | None
    limit: int
    retries: int
    seen_since_us: int | None
    missing: str
    is_trusted: bool
    own_at: tuple[int, int] | None

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Look up one partition's rows, over one connection."""
        connection: sa.Connection | None = None
        with ExitStack() as stack, translated_errors():
            for batch in batches:
                for start in range(0, batch.num_rows, PROBED_ROWS):
                    if connection is None and self.is_trusted:
                        connection = stack.enter_context(stack.enter_context(as_engine(self.database)).connect())
                    yield self._decided(connection, batch.slice(start, PROBED_ROWS))

    def _decided(self, connection: sa.Connection | None, rows: pa.RecordBatch) -> pa.RecordBatch:
        parts, moments, seen, attempts = (
            rows.column(rows.num_columns - len(CARRIED) + n).to_pylist() for n in range(len(CARRIED))
        )
        values = [self._value(*each) for each in zip(parts, moments, strict=True)]
        hits = self._hits(connection, values, moments, self._own(rows))
        indices: list[int] = []
        decided: list[tuple[bool, str | None, str | None, str | None, int | None]] = []
        for row, value in enumerate(values):
            for hit in hits.get(row, ()):
                indices.append(row)
                decided.append((False, None, value, *hit))
            if row not in hits:
                indices.append(row)
                waits = value is not None and not self._is_given_up(seen[row], attempts[row])
                decided.append((waits, "absent" if value is None else self.missing, value, None, None))
        return self._batch(rows, indices, decided, [attempts[row] + 1 for row in indices])

    def _batch(
        self, rows: pa.RecordBatch, indices: list[int], decided: Sequence[tuple[Any, ...]], attempts: list[int]
    ) -> pa.RecordBatch:
        types = (pa.bool_(), pa.string(), pa.string(), pa.string(), pa.int64())
        columns = [pa.array(column, kind) for column, kind in zip(zip(*decided, strict=True), types, strict=True)]
        kept = rows.take(pa.array(indices, pa.int64()))
        fields = [pa.field(field.name, kind) for field, kind in zip(DECIDED, types, strict=True)]
        arrays = [*kept.columns[:-1], pa.array(attempts, kept.columns[-1].type), *columns]
        return pa.RecordBatch.from_arrays(arrays, schema=pa.schema([*rows.schema, *fields]))

    def _value(self, parts: Sequence[str | None] | None, moment_us: int | None) -> str | None:
        """A row's canonical value; None where it has none, or no time and one is needed: it has no relata."""
        if parts is None or (self.within_us is not None and moment_us is None):
            return None
        if len(parts) == 1 and self.definition.is_composite:
            return parts[0]
        try:
            return self.definition.canonical_of(parts)
        except InvalidValue:
            return None

    def _is_given_up(self, seen_us: int, attempts: int) -> bool:
        return attempts >= self.retries or (self.seen_since_us is not None and seen_us <= self.seen_since_us)

    def _own(self, rows: pa.RecordBatch) -> list[_Hit | None]:
        if self.own_at is None:
            return [None] * rows.num_rows
        own = (rows.column(at).to_pylist() for at in self.own_at)
        return [_Hit(*place) for place in zip(*own, strict=True)]

    def _hits(
        self,
        connection: sa.Connection | None,
        values: Sequence[str | None],
        moments: Sequence[int | None],
        own: Sequence[_Hit | None],
    ) -> dict[int, list[_Hit]]:
        asked = [row for row, value in enumerate(values) if value is not None]
        if connection is None or not asked:
            return {}
        parameters: dict[str, Any] = {
            "key_id": self.definition.key_id,
            "vhost": self.vhost,
            "limit": self.limit + 1,
            "names": list(self.names),
            "rows": asked,
            "values": [values[row] for row in asked],
        }
        if self.within_us is not None:
            times = [moments[row] or 0 for row in asked]
            parameters["lows"] = [time_us - self.within_us for time_us in times]
            parameters["highs"] = [time_us + self.within_us for time_us in times]
        hits: dict[int, list[_Hit]] = {}
        for row, *place in connection.execute(probes(self.within_us is not None), parameters):
            found = hits.setdefault(row, [])
            if _Hit(*place) != own[row] and len(found) < self.limit:
                found.append(_Hit(*place))
        return {row: found for row, found in hits.items() if found}


@lru_cache
def probes(is_bounded: bool) -> sa.Select[Any]:
    """Where the relata of many rows lie: row, stream, offset; the oldest first, at most `limit` of each stream.

    One probe for each row and stream, of each part of the table that may hold the value, which stops at the limit.
    """
    wanted = _wanted(is_bounded)
    rows, key_id = relationships.c, sa.bindparam("key_id", type_=sa.SmallInteger)
    # A function's column has the database's collation; the column's own is needed to use its index.
    value = wanted.c.value.collate("C")
    inner = sa.select(rows.stream_offset, rows.time_us).where(
        rows.key_id == key_id,
        rows.value == value,
        rows.stream_id == streams.c.stream_id,
        may_hold_values(key_id, value, value),
    )
    if is_bounded:
        inner = inner.where(rows.time_us >= wanted.c.low, rows.time_us <= wanted.c.high)
    inner = inner.order_by(rows.time_us, rows.stream_offset).limit(sa.bindparam("limit", type_=sa.BigInteger))
    found = inner.lateral("found")
    named = sa.any_(sa.bindparam("names", type_=postgresql.ARRAY(sa.Text)))
    return (
        sa.select(wanted.c.row, streams.c.name, found.c.stream_offset)
        .select_from(wanted.join(streams, sa.true()).join(found, sa.true()))
        .where(
            streams.c.vhost == sa.bindparam("vhost", type_=sa.Text),
            streams.c.replaced_at.is_(None),
            (streams.c.name == named) | (streams.c.super_stream == named),
        )
        .order_by(wanted.c.row, found.c.time_us, streams.c.name, found.c.stream_offset)
    )


def _wanted(is_bounded: bool) -> Any:
    span = {"low": sa.BigInteger, "high": sa.BigInteger} if is_bounded else {}
    return arrays("wanted", row=sa.Integer, value=sa.Text, **span)
