"""Arrow columns out of a stream's records: the hot path of every read in Spark.

Records of the usual forms go straight into columns (see `_records`), all others through `Message`; both say the same.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Final

import pyarrow as pa

from relatum.headers import TIME_HEADER
from relatum.keys import KeyDefinition
from relatum.limits import TIME_US_MAX
from relatum.reading import Message, RecordBatch, property_text
from relatum.recording.extractor import Extractor
from relatum_spark._records import (
    NO_LEAD,
    HeaderReader,
    UnusualRecord,
    body_at,
    header_text,
    may_be_stamped,
    parts_of,
    properties_at,
    set_properties,
    stamp_at,
    time_of,
)
from relatum_spark._schema import PROPERTY_NAMES, arrow_schema, schema

_TYPE, _APP_ID = "x-basic-type", "x-basic-app-id"

EMPTY_ROW_BYTES: Final = 16
"""What a row counts beside its payload: an offset and a time."""


class ColumnBuilder:
    """Gathers messages into Arrow record batches: with the body, with headers and properties, with a column a key."""

    def __init__(self, *, value: bool, headers: bool, keys: Sequence[KeyDefinition] = ()) -> None:
        self._schema = arrow_schema(schema(value=value, headers=headers, keys=[key.name for key in keys]))
        self._keys = [replace(key, key_id=number) for number, key in enumerate(keys)]
        self._extractor = Extractor(self._keys)
        self._reader = HeaderReader()
        self._with_value = value
        self._with_headers = headers
        self._clear()

    def _clear(self) -> None:
        self.bytes = 0  # about as many as are held
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
        """Yield a stream's batches as Arrow's, capped by rows, and by bytes unless one record has more."""
        for batch in batches:
            for piece, size in _pieces(batch, rows_max, bytes_max):
                if len(self) and (len(self) + len(piece) > rows_max or self.bytes + size > bytes_max):
                    yield self.take()
                self.add_batch(piece)
        if len(self):
            yield self.take()

    def add_batch(self, batch: RecordBatch) -> None:
        """Add all records of a batch."""
        stream, chunk_ms, records = batch.stream, batch.chunk_ms, batch.records
        chunk_us = _chunk_us(chunk_ms)
        # One look at all of them: mostly no record has a time in its headers.
        is_stamped = self._with_headers or may_be_stamped(records)
        for row, record in enumerate(records):
            try:
                self._add(record, chunk_us, is_stamped)
            except UnusualRecord:
                self._add_decoded(Message.from_record(stream, batch.offsets[row], record, chunk_ms))
        if self._keys:
            for record in records:
                self._add_keys(self._extractor.from_record(record, chunk_ms).values)
        self._offsets.extend(batch.offsets)
        self._note(stream, len(records))
        self.bytes += EMPTY_ROW_BYTES * len(records)
        if self._with_value or self._with_headers:
            self.bytes += sum(map(len, records))

    def add_message(self, message: Message) -> None:
        """Add one message, of a stream."""
        raw = message.raw
        assert raw is not None, "a stream's message has its bytes"
        try:
            self._add(raw, _chunk_us(message.chunk_ms), True)
        except UnusualRecord:
            self._add_decoded(message)
        if self._keys:
            self._add_keys(self._extractor.from_message(message).values)
        self._offsets.append(message.offset)
        self._note(message.stream, 1)
        self.bytes += EMPTY_ROW_BYTES + len(raw)

    def _note(self, stream: str, count: int) -> None:
        streams = self._streams
        if streams and streams[-1][0] == stream:
            count += streams.pop()[1]
        streams.append((stream, count))

    def _add(self, raw: bytes, chunk_us: int | None, is_stamped: bool) -> None:
        """Add a usual record. Everything is read before anything is added: an unusual one leaves no trace."""
        lead_end, listed, application, data, data_end = parts_of(raw)
        body = body_at(raw, data, data_end) if self._with_value else b""
        found = properties_at(raw, listed) if listed >= 0 else {}
        stamped, lead = None, NO_LEAD
        headers = lead.headers
        if self._with_headers:
            lead = self._reader.lead(raw[:lead_end])
            headers = lead.headers
            if application >= 0:
                basic: dict[str, Any] = {}
                headers = self._reader.headers(raw, application, basic)
                if basic:
                    stamped = basic.get(TIME_HEADER)
                    _take_basic(basic, found, lead.may_have_type)
                if lead.headers:
                    headers |= lead.headers
        elif is_stamped and application >= 0:
            stamped = stamp_at(raw, application)
        row = len(self._times)
        self._times.append(time_of(stamped, found, chunk_us))
        if self._with_value:
            self._values.append(body)
        if self._with_headers:
            self._header_names.extend(headers)
            self._header_texts.extend(headers.values())
            self._header_ends.append(len(self._header_names))
            self._put_properties(row, lead.properties)
            self._put_properties(row, found)

    def _put_properties(self, row: int, found: dict[str, Any]) -> None:
        """Set properties of a row; a column is only as long as the last row that set it."""
        columns = self._properties
        for name, value in found.items():
            column = columns[name]
            if (missing := row - len(column)) > 0:
                column.extend([None] * missing)
            column.append(value)

    def _add_decoded(self, message: Message) -> None:
        """Add a message's parts as `Message` has them."""
        row = len(self._times)
        self._times.append(message.time_us)
        if self._with_value:
            self._values.append(message.body)
        if not self._with_headers:
            return
        for name, value in message.headers.items():
            self._header_names.append(name)
            self._header_texts.append(header_text(value))
        self._header_ends.append(len(self._header_names))
        self._put_properties(row, set_properties(message.properties))

    def _add_keys(self, values: Sequence[tuple[int, str]]) -> None:
        found = dict(values)
        for number, column in enumerate(self._key_values):
            column.append(found.get(number))

    def take(self) -> pa.RecordBatch:
        """Return everything added as a record batch, and empty the builder."""
        columns = {
            "stream": self._stream_column(),
            "offset": pa.array(self._offsets, pa.int64()),
            "timestamp": _times(self._times, self._schema.field("timestamp").type),
        }
        if self._with_value:
            columns["value"] = pa.array(self._values, pa.binary())
        if self._with_headers:
            columns["headers"] = self._header_column()
            columns["properties"] = self._property_column()
        for key, values in zip(self._keys, self._key_values, strict=True):
            columns[key.name] = pa.array(values, pa.string())
        self._clear()
        return pa.RecordBatch.from_arrays([columns[name] for name in self._schema.names], schema=self._schema)

    def _stream_column(self) -> pa.Array:
        parts = [pa.repeat(pa.scalar(name, pa.string()), count) for name, count in self._streams]
        return pa.concat_arrays(parts) if parts else pa.array([], pa.string())

    def _header_column(self) -> pa.Array:
        return pa.MapArray.from_arrays(
            pa.array(self._header_ends, pa.int32()),
            pa.array(self._header_names, pa.string()),
            pa.array(self._header_texts, pa.string()),
        )

    def _property_column(self) -> pa.Array:
        rows = len(self)
        kind = self._schema.field("properties").type
        arrays = []
        for name, field in zip(PROPERTY_NAMES, kind, strict=True):
            column = self._properties[name]
            if not column:
                arrays.append(pa.nulls(rows, field.type))
                continue
            column.extend([None] * (rows - len(column)))
            arrays.append(_times(column, field.type) if name == "timestamp" else pa.array(column, field.type))
        return pa.StructArray.from_arrays(arrays, fields=list(kind))


def _times(microseconds: list[int | None], kind: pa.DataType) -> pa.Array:
    """Make a column of times out of numbers, which Arrow takes in faster."""
    return pa.array(microseconds, pa.int64()).view(kind)


def _chunk_us(chunk_ms: int | None) -> int | None:
    return chunk_ms * 1000 if chunk_ms is not None and 0 <= chunk_ms * 1000 <= TIME_US_MAX else None


def _take_basic(basic: dict[str, Any], found: dict[str, Any], may_have_type: bool) -> None:
    """Move properties that RabbitMQ up to 3.12 keeps among the application properties to the others."""
    for name, field in ((_TYPE, "type"), (_APP_ID, "app_id")):
        if name in basic:
            if field == "type" and may_have_type:
                raise UnusualRecord
            found[field] = property_text(basic[name])


def _pieces(batch: RecordBatch, rows_max: int, bytes_max: int) -> Iterator[tuple[RecordBatch, int]]:
    """Halve a batch until it is within the caps, or one record; yield the pieces, each with its size."""
    size, half = sum(map(len, batch.records)), len(batch) // 2
    if half and (len(batch) > rows_max or size > bytes_max):
        yield from _pieces(rows_of(batch, range(half)), rows_max, bytes_max)
        yield from _pieces(rows_of(batch, range(half, len(batch))), rows_max, bytes_max)
    else:
        yield batch, size


def rows_of(batch: RecordBatch, rows: Sequence[int]) -> RecordBatch:
    """Return some rows of a batch, at least one."""
    return replace(
        batch,
        first_offset=batch.offsets[rows[0]],
        offsets=[batch.offsets[row] for row in rows],
        records=[batch.records[row] for row in rows],
    )
