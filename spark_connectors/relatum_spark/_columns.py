"""The columns of a stream in Spark, and Arrow batches built from its records: the hot path of every read."""

import base64
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from datetime import datetime
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import DataType, MapType, StringType, StructType

from relatum.errors import InvalidInput
from relatum.headers import TIME_HEADER
from relatum.keys import KeyDefinition
from relatum.reading import Message, Properties, RecordBatch, message_time, values_of_record
from relatum.recording.extractor import Extracted, Extractor
from relatum.wire.scalars import Opaque

PROPERTY_NAMES: Final = tuple(field.name for field in fields(Properties))
"""The fields of the column `properties`, in order."""

_TIMESTAMP: Final = PROPERTY_NAMES.index("timestamp")
_MESSAGE_ID: Final = PROPERTY_NAMES.index("message_id")

EMPTY_ROW_BYTES: Final = 16
"""Bytes counted for a row besides its payload: an offset and a time."""


PLACE: Final = ("stream", "offset")
"""The columns of a message's place."""


def struct_of(kinds: Mapping[str, str | DataType]) -> StructType:
    struct = StructType()
    for name, kind in kinds.items():
        struct.add(name, kind)
    return struct


_KINDS: Final = {"delivery_mode": "integer", "priority": "integer", "timestamp": "timestamp"}
PROPERTIES: Final = struct_of({name: _KINDS.get(name, "string") for name in PROPERTY_NAMES})


def schema(*, value: bool = True, headers: bool = True, keys: Sequence[str] = ()) -> StructType:
    """Return the columns of a read: optionally the body, headers and properties, and one column for each key.

    Raises:
        InvalidInput: a key has the name of another column; Spark ignores case in column names.
    """
    kinds: dict[str, str | DataType] = {"stream": "string", "offset": "long", "timestamp": "timestamp"}
    if value:
        kinds["value"] = "binary"
    if headers:
        kinds |= {"headers": MapType(StringType(), StringType()), "properties": PROPERTIES}
    taken = {"stream", "offset", "timestamp", "value", "headers", "properties"}
    for key in keys:
        if key.lower() in taken:
            raise InvalidInput(f"the key {key!r} cannot be a column: another column has this name")
        taken.add(key.lower())
        kinds[key] = "string"
    return struct_of(kinds)


def check_new(added: Iterable[str], given: Iterable[str]) -> None:
    """Raise `InvalidInput` for columns to add that a frame has already; Spark ignores case in names."""
    taken = {name.lower() for name in given}
    if clashing := [name for name in added if name.lower() in taken]:
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
        self._properties: list[tuple[Any, ...]] = []
        self._key_values: list[list[str | None]] = [[] for _ in self._keys]

    def __len__(self) -> int:
        return len(self._offsets)

    def batches(self, batches: Iterable[RecordBatch], *, rows_max: int, bytes_max: int) -> Iterator[pa.RecordBatch]:
        """Yield batches as Arrow batches of limited rows and bytes; a single larger record is a batch of its own."""
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
            found = [extract(record, batch.chunk_ms) for record in records]
            if not self._with_headers:
                self._times.extend([each.time_us for each in found])
            self._add_keys(found)
        self._offsets.extend(batch.offsets)
        self.bytes += EMPTY_ROW_BYTES * len(records)
        if self._with_value or self._with_headers:
            self.bytes += sum(map(len, records))
        streams = self._streams
        count = len(records) + (streams.pop()[1] if streams and streams[-1][0] == batch.stream else 0)
        streams.append((batch.stream, count))

    def _add_record(self, raw: bytes, chunk_ms: int | None) -> None:
        headers, properties, body, _ = values_of_record(raw)
        timestamp, message_id = properties[_TIMESTAMP], properties[_MESSAGE_ID]
        self._times.append(message_time(headers.get(TIME_HEADER), timestamp, message_id, chunk_ms)[0])
        if self._with_value:
            self._values.append(body)
        self._header_names.extend(headers)
        self._header_texts.extend([header_text(value) for value in headers.values()])
        self._header_ends.append(len(self._header_names))
        self._properties.append(properties)

    def _add_keys(self, found: Sequence[Extracted]) -> None:
        values = [dict(each.values) for each in found]
        for number, column in enumerate(self._key_values):
            column.extend([each.get(number) for each in values])

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
        values = zip(*self._properties, strict=True) if self._properties else [()] * len(PROPERTY_NAMES)
        columns = dict(zip(PROPERTY_NAMES, map(list, values), strict=True))
        # A stream client may send a priority of 64 bits.
        columns["priority"] = [each if -(2**31) <= (each or 0) < 2**31 else None for each in columns["priority"]]
        kinds = list(self._schema.field("properties").type)
        return pa.StructArray.from_arrays([pa.array(columns[kind.name], kind.type) for kind in kinds], fields=kinds)


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
    assert message.raw is not None, "a stream's message has its bytes"
    return RecordBatch(message.stream, message.offset, [message.offset], [message.raw], message.chunk_ms)


def rows_of(batch: RecordBatch, rows: Sequence[int]) -> RecordBatch:
    """Return the given rows of a batch; there must be at least one."""
    return replace(
        batch,
        first_offset=batch.offsets[rows[0]],
        offsets=[batch.offsets[row] for row in rows],
        records=[batch.records[row] for row in rows],
    )


# --- headers as text --------------------------------------------------------------------------------------


def header_text(value: Any) -> str | None:
    """Convert a header's value in `Message.headers` to text.

    Text is unchanged, whole numbers are decimal, booleans `true` and `false`. These equal the canonical values of a
    text key, so the column joins with the relationship table. Floats are in Python's notation, datetimes in ISO 8601,
    bytes other than UTF-8 in base64, lists and tables in JSON of these. None stays None.
    """
    kind = type(value)
    if kind is str or value is None:
        return value  # type: ignore[no-any-return]
    if kind is bool:
        return "true" if value else "false"
    if kind is int:
        return str(value)
    plain = _plain(value)
    return plain if isinstance(plain, str) else _ENCODER.encode(plain)


_ENCODER: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


def _plain(value: Any) -> Any:
    """Convert a value to JSON's types."""
    if isinstance(value, Opaque):
        return _base64(value.data)
    if isinstance(value, dict):
        return {_name(name): _plain(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if isinstance(value, (bytes, bytearray, memoryview)):
        return _base64(bytes(value))
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    return value.isoformat() if isinstance(value, datetime) else str(value)


def _name(name: Any) -> str:
    """Convert a table's key to text: AMQP 1.0 allows any value there."""
    return header_text(name) or ""


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()
