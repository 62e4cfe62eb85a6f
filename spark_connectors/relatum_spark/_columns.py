"""The columns of a stream in Spark, and Arrow batches built from its records: the hot path of every read.

Nearly all records are a few sections with maps of short text, as RabbitMQ and stream clients write them. They are
decoded in one pass, in a few microseconds each; `Message`, which decodes all others, takes thirty.
"""

import base64
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from datetime import datetime
from typing import Any, Final, TypeAlias

import pyarrow as pa
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import DataType, MapType, StringType, StructType

from relatum.common.headers import TIME_HEADER
from relatum.errors import InvalidInput, UndecodableMessage
from relatum.keys import KeyDefinition
from relatum.reading import (
    Message,
    Properties,
    RecordBatch,
    header_value,
    is_header,
    message_time,
    property_text,
    reply_to_text,
)
from relatum.reading.extractor import Extractor
from relatum.wire import amqp10
from relatum.wire.amqp10 import Opaque

EMPTY_ROW_BYTES: Final = 16
"""Bytes counted for a row besides its payload: an offset and a time."""

PLACE: Final = ("stream", "offset")
"""The columns that identify a message."""

PROPERTY_NAMES: Final = tuple(field.name for field in fields(Properties))
"""The fields of the column `properties`, in order."""


def struct_of(kinds: Mapping[str, str | DataType]) -> StructType:
    struct = StructType()
    for name, kind in kinds.items():
        struct.add(name, kind)
    return struct


_KINDS: Final = {"delivery_mode": "integer", "priority": "integer", "timestamp": "timestamp"}
PROPERTIES: Final = struct_of({name: _KINDS.get(name, "string") for name in PROPERTY_NAMES})


def schema(*, value: bool = True, headers: bool = True, keys: Sequence[str] = ()) -> StructType:
    """Return the columns of a read: body, headers and properties if wanted, and one column for each key."""
    kinds: dict[str, str | DataType] = {"stream": "string", "offset": "long", "timestamp": "timestamp"}
    if value:
        kinds["value"] = "binary"
    if headers:
        kinds |= {"headers": MapType(StringType(), StringType()), "properties": PROPERTIES}
    used_names = {"stream", "offset", "timestamp", "value", "headers", "properties"}
    for key in keys:
        # Spark ignores case in names.
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
        self._streams: list[str] = []
        self._offsets: list[int] = []
        self._times: list[int | None] = []
        self._values: list[bytes] = []
        self._header_ends: list[int] = [0]
        self._header_names: list[str] = []
        self._header_texts: list[str | None] = []
        self._properties: list[dict[str, Any]] = []
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
        self._streams += [batch.stream] * len(records)

    def _add_record(self, raw: bytes, chunk_ms: int | None) -> None:
        time_us, body, headers, properties = _read_record(raw, chunk_ms)
        self._times.append(time_us)
        if self._with_value:
            self._values.append(body)
        self._properties.append(properties)
        self._header_names.extend(headers)
        self._header_texts.extend(headers.values())
        self._header_ends.append(len(self._header_names))

    def take(self) -> pa.RecordBatch:
        """Return everything added as a record batch, and empty the builder."""
        columns = {
            "stream": pa.array(self._streams, pa.string()),
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
            columns["properties"] = pa.array(self._properties, self._schema.field("properties").type)
        for key, values in zip(self._keys, self._key_values, strict=True):
            columns[key.name] = pa.array(values, pa.string())
        self._clear()
        return pa.RecordBatch.from_arrays([columns[name] for name in self._schema.names], schema=self._schema)


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


# --- records ----------------------------------------------------------------------------------------------

_NAMES: Final[dict[bytes, str]] = {}
_NAMES_MAX: Final = 4096
"""Maximum cached header names; further names are decoded more slowly."""

_LEADS: Final[dict[bytes, tuple[dict[str, str | None], dict[str, Any]]]] = {}
_LEADS_MAX: Final = 1024
_LEAD_BYTES_MAX: Final = 1024
"""Maximum cached leading sections, and maximum bytes of each; most are smaller."""

_LISTED: Final = (
    *("message_id", "user_id", "", "", "reply_to", "correlation_id"),
    *("content_type", "content_encoding", "", "timestamp", "app_id"),
)
"""The properties in the order of AMQP 1.0's list; "" for those that AMQP 0.9.1 does not have."""

_Row: TypeAlias = tuple[int | None, bytes, dict[str, str | None], dict[str, Any]]
"""A message's time in microseconds, its body, its headers as text, and its properties that are set."""


class _UnusualRecord(Exception):
    """The record has an unusual form."""


_UNUSUAL: Final = (_UnusualRecord, UndecodableMessage, UnicodeDecodeError, IndexError)


def _read_record(raw: bytes, chunk_ms: int | None) -> _Row:
    """Decode a record; `chunk_ms` is the time when the broker wrote its chunk."""
    try:
        return _read_usual(raw, chunk_ms)
    except _UNUSUAL:
        message = Message.from_record("", 0, raw, chunk_ms)
        headers, properties = _headers_and_properties(message)
        return message.time_us, message.body, headers, properties


def _read_usual(raw: bytes, chunk_ms: int | None) -> _Row:
    sections = amqp10.find_sections(raw)
    lead_end = latest = 0
    listed = application = -1
    for code, start, end in sections:
        if code <= latest:
            raise _UnusualRecord  # sections are repeated or in another order
        latest = code
        if code == amqp10.PROPERTIES:
            listed = start
        elif code == amqp10.APPLICATION_PROPERTIES:
            application = start
        elif code == amqp10.HEADER or code == amqp10.MESSAGE_ANNOTATIONS:
            lead_end = end
        elif code != amqp10.DATA:
            raise _UnusualRecord
    lead_headers, lead_properties = _lead(raw[:lead_end])
    found = lead_properties.copy()
    if listed >= 0:
        _read_properties(raw, listed, found)
    headers: dict[str, str | None] = {}
    time_header = _read_headers(raw, application, lead_end, headers, found) if application >= 0 else None
    if lead_headers:
        headers |= lead_headers
    time_us, _ = message_time(time_header, found.get("timestamp"), found.get("message_id"), chunk_ms)
    return time_us, amqp10.body_of(raw, sections), headers, found


def _read_properties(raw: bytes, position: int, found: dict[str, Any]) -> None:
    """Add the properties that are set in AMQP 1.0's list."""
    count, at, end = amqp10.entries_of(raw, position, "list")
    for name in _LISTED[:count]:
        if raw[at] == 0x40:
            at += 1
            continue
        value, at = amqp10.decode_value(raw, at)
        if name == "timestamp":
            # AMQP 0.9.1 has whole seconds only.
            value = value.replace(microsecond=0) if isinstance(value, datetime) else None
        elif name == "reply_to":
            value = reply_to_text(value)
        elif type(value) is not str:
            value = property_text(value)
        if value is not None and name:
            found[name] = value
    if at > end:
        raise _UnusualRecord


def _read_headers(
    raw: bytes, application: int, lead_end: int, headers: dict[str, str | None], properties: dict[str, Any]
) -> Any:
    """Add headers, and the two properties that RabbitMQ up to 3.12 keeps there; return the value of `relatum_time`."""
    if raw[application] == 0xC1:
        count, at, end = raw[application + 2], application + 3, application + 2 + raw[application + 1]
    else:
        count, at, end = amqp10.entries_of(raw, application, "map")
    time_header, others = None, 0
    for _ in range(count >> 1):
        if raw[at] != 0xA1:
            raise _UnusualRecord
        start = at + 2 + raw[at + 1]
        key = raw[at + 2 : start]
        name = _NAMES.get(key)
        if name is not None and raw[start] == 0xA1:
            at = start + 2 + raw[start + 1]
            headers[name] = raw[start + 2 : at].decode()
            continue
        value, at = amqp10.decode_value(raw, start)
        name = key.decode()
        if name == TIME_HEADER:
            time_header = value
        if is_header(name):
            headers[name] = header_text(header_value(value))
            if len(_NAMES) < _NAMES_MAX:
                _NAMES[key] = name
            continue
        others += 1
        if name == "x-basic-app-id":
            properties["app_id"] = property_text(value)
        elif name == "x-basic-type":
            if b"x-basic-type" in raw[:lead_end]:
                raise _UnusualRecord
            properties["type"] = property_text(value)
    if at != end or count & 1 or len(headers) + others != count >> 1:
        raise _UnusualRecord
    return time_header


def _lead(start: bytes) -> tuple[dict[str, str | None], dict[str, Any]]:
    """Decode the leading sections, with a cache: many messages of a publisher have equal leading sections."""
    found = _LEADS.get(start)
    if found is None:
        found = _headers_and_properties(Message.from_record("", 0, start))
        if len(_LEADS) < _LEADS_MAX and len(start) <= _LEAD_BYTES_MAX:
            _LEADS[start] = found
    return found


def _headers_and_properties(message: Message) -> tuple[dict[str, str | None], dict[str, Any]]:
    """Return a message's headers as text, and its set properties without a priority over 32 bits."""
    properties = message.properties
    found = {name: value for name in PROPERTY_NAMES if (value := getattr(properties, name)) is not None}
    if not -(2**31) <= found.get("priority", 0) < 2**31:
        del found["priority"]
    return {name: header_text(value) for name, value in message.headers.items()}, found


# --- headers as text --------------------------------------------------------------------------------------


def header_text(value: Any) -> str | None:
    """Convert a header's value in `Message.headers` to text.

    Text is unchanged, whole numbers are decimal, booleans `true` and `false`. These equal the canonical values of a
    text key, so the column joins with the relationship table. Datetimes are in ISO 8601, bytes other than UTF-8
    in base64, floats, lists and tables of these in JSON (`NaN`, `Infinity`). None stays None.
    """
    kind = type(value)
    if kind is str or value is None:
        return value  # type: ignore[no-any-return]
    if kind is bool:
        return "true" if value else "false"
    if kind is int:
        return str(value)
    plain = _json_value(value)
    return plain if isinstance(plain, str) else _ENCODER.encode(plain)


_ENCODER: Final = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"))


def _json_value(value: Any) -> Any:
    if isinstance(value, Opaque):
        value = value.data
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, dict):
        # AMQP 1.0 allows any value as a table's key.
        return {header_text(name) or "": _json_value(each) for name, each in value.items()}
    if isinstance(value, list):
        return [_json_value(each) for each in value]
    if value is None or isinstance(value, (str, bool, int, float)):
        return value
    return value.isoformat() if isinstance(value, datetime) else str(value)
