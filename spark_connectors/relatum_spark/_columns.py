"""The columns of a stream in Spark, and Arrow batches built from its records: the hot path of every read."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import DataType, MapType, StringType, StructType

from relatum.errors import InvalidInput
from relatum.keys import KeyDefinition
from relatum.reading import Message, RecordBatch
from relatum.recording.extractor import Extractor
from relatum_spark._records import PROPERTY_NAMES, read_record

EMPTY_ROW_BYTES: Final = 16
"""Bytes counted for a row besides its payload: an offset and a time."""

PLACE: Final = ("stream", "offset")
"""The columns that identify a message."""


def struct_of(kinds: Mapping[str, str | DataType]) -> StructType:
    struct = StructType()
    for name, kind in kinds.items():
        struct.add(name, kind)
    return struct


_KINDS: Final = {"delivery_mode": "integer", "priority": "integer", "timestamp": "timestamp"}
PROPERTIES: Final = struct_of({name: _KINDS.get(name, "string") for name in PROPERTY_NAMES})


def schema(*, value: bool = True, headers: bool = True, keys: Sequence[str] = ()) -> StructType:
    """Return the columns of a read: body, headers and properties if wanted, and one column for each key.

    Raises:
        InvalidInput: a key has the name of another column; Spark ignores case in column names.
    """
    kinds: dict[str, str | DataType] = {"stream": "string", "offset": "long", "timestamp": "timestamp"}
    if value:
        kinds["value"] = "binary"
    if headers:
        kinds |= {"headers": MapType(StringType(), StringType()), "properties": PROPERTIES}
    used_names = {"stream", "offset", "timestamp", "value", "headers", "properties"}
    for key in keys:
        if key.lower() in used_names:
            raise InvalidInput(f"option keys: leave out {key!r}, because another column has this name")
        used_names.add(key.lower())
        kinds[key] = "string"
    return struct_of(kinds)


def check_added_columns(added: Iterable[str], given: Iterable[str]) -> None:
    """Raise `InvalidInput` if a frame already has one of the added columns; Spark ignores case in names."""
    used_names = {name.lower() for name in given}
    if clashing := [name for name in added if name.lower() in used_names]:
        raise InvalidInput(f"the columns {', '.join(clashing)} already exist: rename them, or give a prefix=")


class ColumnBuilder:
    """Collects messages into Arrow record batches with the columns of `schema`."""

    def __init__(self, *, value: bool, headers: bool, keys: Sequence[KeyDefinition] = ()) -> None:
        self._keys = [replace(key, key_id=number) for number, key in enumerate(keys)]
        columns = schema(value=value, headers=headers, keys=[key.name for key in keys])
        self._schema = to_arrow_schema(columns, timezone="UTC")
        self._extractor = Extractor(self._keys)
        self._with_value = value
        self._with_headers = headers
        self._clear()

    def _clear(self) -> None:
        self.bytes = 0  # approximate
        self._streams: list[tuple[str, int]] = []
        self._offsets: list[int] = []
        self._times: list[int | None] = []
        self._values: list[bytes] = []
        self._header_ends: list[int] = [0]
        self._header_names: list[str] = []
        self._header_texts: list[str | None] = []
        self._properties: dict[str, list[Any]] = {name: [] for name in PROPERTY_NAMES}
        self._key_values: list[list[str | None]] = [[] for _ in self._keys]

    def __len__(self) -> int:
        return len(self._offsets)

    def batches(self, batches: Iterable[RecordBatch], *, rows_max: int, bytes_max: int) -> Iterator[pa.RecordBatch]:
        """Yield batches as Arrow batches of limited rows and bytes; a single larger record gets its own batch."""
        for batch in batches:
            for piece, size in _pieces(batch, rows_max, bytes_max):
                if len(self) and (len(self) + len(piece) > rows_max or self.bytes + size > bytes_max):
                    yield self.take()
                self.add_batch(piece)
        if len(self):
            yield self.take()

    def add_batch(self, batch: RecordBatch) -> None:
        records = batch.records
        if self._with_headers:
            for record in records:
                self._add_record(record, batch.chunk_ms)
        elif self._with_value:
            self._values.extend(Message.from_record("", 0, record).body for record in records)
        if self._keys or not self._with_headers:
            extract = self._extractor.from_record
            extracted = [extract(record, batch.chunk_ms) for record in records]
            if not self._with_headers:
                self._times.extend([each.time_us for each in extracted])
            values = [dict(each.values) for each in extracted]
            for number, column in enumerate(self._key_values):
                column.extend([each.get(number) for each in values])
        self._offsets.extend(batch.offsets)
        self.bytes += EMPTY_ROW_BYTES * len(records)
        if self._with_value or self._with_headers:
            self.bytes += sum(map(len, records))
        streams = self._streams
        count = len(records) + (streams.pop()[1] if streams and streams[-1][0] == batch.stream else 0)
        streams.append((batch.stream, count))

    def _add_record(self, raw: bytes, chunk_ms: int | None) -> None:
        time_us, body, headers, properties = read_record(raw, chunk_ms)
        row = len(self._times)
        for name, value in properties.items():
            # A property's column ends at the last row that has it.
            column = self._properties[name]
            if (missing := row - len(column)) > 0:
                column.extend([None] * missing)
            column.append(value)
        self._times.append(time_us)
        if self._with_value:
            self._values.append(body)
        self._header_names.extend(headers)
        self._header_texts.extend(headers.values())
        self._header_ends.append(len(self._header_names))

    def take(self) -> pa.RecordBatch:
        """Return everything added as a record batch, and empty the builder."""
        streams = [pa.repeat(pa.scalar(name, pa.string()), count) for name, count in self._streams]
        columns = {
            "stream": pa.concat_arrays(streams) if streams else pa.array([], pa.string()),
            "offset": pa.array(self._offsets, pa.int64()),
            # From integers: Arrow converts these faster than datetimes.
            "timestamp": pa.array(self._times, pa.int64()).view(self._schema.field("timestamp").type),
        }
        if self._with_value:
            columns["value"] = pa.array(self._values, pa.binary())
        if self._with_headers:
            columns["headers"] = pa.MapArray.from_arrays(
                pa.array(self._header_ends, pa.int32()),
                pa.array(self._header_names, pa.string()),
                pa.array(self._header_texts, pa.string()),
            )
            columns["properties"] = self._property_column()
        for key, values in zip(self._keys, self._key_values, strict=True):
            columns[key.name] = pa.array(values, pa.string())
        self._clear()
        return pa.RecordBatch.from_arrays([columns[name] for name in self._schema.names], schema=self._schema)

    def _property_column(self) -> pa.Array:
        rows = len(self)
        fields = list(self._schema.field("properties").type)
        arrays = []
        for field in fields:
            column = self._properties[field.name]
            column.extend([None] * (rows - len(column)))
            arrays.append(pa.array(column, field.type))
        return pa.StructArray.from_arrays(arrays, fields=fields)


def _pieces(batch: RecordBatch, rows_max: int, bytes_max: int) -> Iterator[tuple[RecordBatch, int]]:
    """Halve a batch until the pieces are within the limits or one record; yield each piece with its bytes."""
    size, half = sum(map(len, batch.records)), len(batch) // 2
    if half and (len(batch) > rows_max or size > bytes_max):
        yield from _pieces(rows_of(batch, range(half)), rows_max, bytes_max)
        yield from _pieces(rows_of(batch, range(half, len(batch))), rows_max, bytes_max)
    else:
        yield batch, size


def batch_of(message: Message) -> RecordBatch:
    """Return a batch of one message that was read from a stream."""
    assert message.raw is not None, "a message from a stream has its raw bytes"
    return RecordBatch(message.stream, message.offset, [message.offset], [message.raw], message.chunk_ms)


def rows_of(batch: RecordBatch, rows: Sequence[int]) -> RecordBatch:
    """Return the given rows of a batch; there must be at least one."""
    return replace(
        batch,
        first_offset=batch.offsets[rows[0]],
        offsets=[batch.offsets[row] for row in rows],
        records=[batch.records[row] for row in rows],
    )
