"""Writing to streams from Spark: `df.write.format("rabbitmq_streams")` and `df.writeStream`.

A run of a task converts all its rows to messages, which checks them; connects; queries how much an earlier run of the
task published; publishes the rest; and waits for all confirms. `_sequence` explains why nothing is published twice.
"""

import logging
import struct
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import DataType, MapType, StructType

from relatum.common.headers import RECEIPT_HEADER, TIME_HEADER
from relatum.errors import ConfigurationError, Conflict, InvalidInput
from relatum.keys import KeyDefinition, is_integer_text
from relatum.publishing import Stamper
from relatum.superstreams import partition_of
from relatum.wire import frames
from relatum_spark._columns import PROPERTIES
from relatum_spark._encode import NEW_LAYOUT_SINCE, encode_content
from relatum_spark._options import SinkOptions, parse_sink_options
from relatum_spark._publisher import PUBLISHERS_MAX, Publisher, connect
from relatum_spark._reading import StreamQueries
from relatum_spark._sequence import Numbering, reference_of
from relatum_spark._servers import definitions_of

_log: Final = logging.getLogger("relatum.spark")

_QUERY: Final = "sql.streaming.queryId"
_BATCH: Final = "streaming.sql.batchId"
"""Spark's local properties in a streaming query's tasks: the id in its checkpoint, and the micro-batch's number."""

_INTEGERS: Final = ("byte", "short", "integer", "long")
_TIMES: Final = ("timestamp", "timestamp_ntz")  # without a zone: UTC
_KEY_TYPES: Final = ("string", "binary", "boolean", *_TIMES, *_INTEGERS)
_HEADER_TYPES: Final = (*_KEY_TYPES, "float", "double")
_COLUMN_TYPES: Final = {
    "value": ("string", "binary"),
    "timestamp": _TIMES,
    "headers": ("map",),
    "properties": ("struct",),
}
"""The columns of a message, each with Spark's names of the allowed types."""

_PROPERTY_TYPES: Final = {
    each.name: next(kinds for kinds in (("string",), _INTEGERS, _TIMES) if each.dataType.typeName() in kinds)
    for each in PROPERTIES.fields
}

_SPOOL_BYTES: Final = 64 << 20
"""Maximum bytes of messages that a task holds in memory; beyond that it uses a temporary file."""

_SPOOLED: Final = struct.Struct(">HQI")
_TARGET_BYTES: Final = 2


@dataclass(frozen=True)
class Published(WriterCommitMessage):
    """The numbers of messages that a task published, and that an earlier run of it had published."""

    sent: int
    found: int


# --- on the driver ----------------------------------------------------------------------------------------


def _limits(options: SinkOptions) -> tuple[bool, int]:
    """Return whether the broker uses the new layout, and the maximum bytes of a frame; 0 means no limit."""
    with closing(connect(options)) as connection:
        return not connection.session.is_older_than(NEW_LAYOUT_SINCE), connection.session.send_bytes_max


def _keys(options: SinkOptions) -> tuple[tuple[KeyDefinition, ...], tuple[tuple[str, str], ...]]:
    """Return the keys to check, and the (column, header) of each key column."""
    defined = [] if options.database is None else definitions_of(options.database, None)
    known = {definition.name: definition for definition in defined}
    headers = []
    for name in options.key_columns:
        definition = known.setdefault(name, KeyDefinition(name))
        place = definition.components[0].lone
        if definition.is_composite or place is None or place.kind != "header":
            raise InvalidInput(
                f"option keyColumns: the key {name!r} is read from {' and '.join(definition.sources)}, not from one"
                " header: leave it out of keyColumns, and write its values into headers, properties or value"
            )
        headers.append((name, place.name))
    return tuple(known.values()), tuple(headers)


def _check_columns(schema: StructType, options: SinkOptions) -> None:
    """Raise `InvalidInput` for missing, reserved or unknown columns, or a type that a message cannot carry."""
    types = {each.name: each.dataType for each in schema.fields}
    for needed in ("value", *options.key_columns, options.routing_key):
        if needed is not None and needed not in types:
            raise InvalidInput(f"the column {needed!r} is missing; the columns are {', '.join(types)}")
    for name in {*_COLUMN_TYPES, TIME_HEADER, RECEIPT_HEADER}.intersection(options.key_columns):
        raise InvalidInput(f"option keyColumns: the name {name!r} is reserved")
    checks: list[tuple[str, DataType, tuple[str, ...]]]
    checks = [(name, types[name], kinds) for name, kinds in _COLUMN_TYPES.items() if name in types]
    checks += [(name, types[name], _KEY_TYPES) for name in options.key_columns]
    if isinstance(headers := types.get("headers"), MapType):
        checks += [("headers", headers.keyType, ("string",)), ("headers", headers.valueType, _HEADER_TYPES)]
    if isinstance(properties := types.get("properties"), StructType):
        for each in properties.fields:
            if each.name not in _PROPERTY_TYPES:
                raise InvalidInput(f"unknown property {each.name!r}; the properties are {', '.join(_PROPERTY_TYPES)}")
            checks.append((f"properties.{each.name}", each.dataType, _PROPERTY_TYPES[each.name]))
    if options.routing_key is not None:
        checks.append((options.routing_key, types[options.routing_key], ("string", "binary", *_INTEGERS)))
    for name, kind, kinds in checks:
        if kind.typeName() not in kinds:
            raise InvalidInput(f"the column {name!r} is {kind.simpleString()}; it must be one of {', '.join(kinds)}")
    if unknown := types.keys() - {*_COLUMN_TYPES, *options.key_columns, options.routing_key}:
        raise InvalidInput(
            f"the columns {', '.join(sorted(unknown))} do not fit a message: a row has value, headers, properties"
            " and timestamp. Drop them, or name those that are relationship keys in the option keyColumns"
        )


# --- in the tasks -----------------------------------------------------------------------------------------


class _Writer:
    """The base of both writers. The driver creates it, which checks the write before any task runs. Can be pickled."""

    _is_streaming = False

    def __init__(self, options: Mapping[str, str], schema: StructType, overwrite: bool) -> None:
        if overwrite:
            raise InvalidInput('a stream can only be appended to: write with mode("append")')
        self.options = parsed = parse_sink_options(options, streaming=self._is_streaming)
        _check_columns(schema, parsed)
        self.definitions, self.keys = _keys(parsed)
        with closing(StreamQueries(parsed, retry_s=parsed.poll_timeout_s if self._is_streaming else 0)) as queries:
            self.streams = tuple(queries.streams())
            for stream in parsed.streams:
                queries.existing(stream, queries.bounds(stream))
            self.new_layout, frame_bytes = queries.run(lambda _: _limits(parsed))
        if len(self.streams) > PUBLISHERS_MAX:
            raise InvalidInput(
                f"the super stream {parsed.super_stream!r} has {len(self.streams)} partitions; a write can have"
                f" {PUBLISHERS_MAX} at most"
            )
        overhead = frames.PUBLISH_BYTES + frames.ENTRY_BYTES
        self.message_bytes_max = max(1, frame_bytes - overhead) if frame_bytes else 0

    def _write(self, batches: Iterator[pa.RecordBatch], write_id: str, epoch: int, task: int) -> Published:
        """Publish the rows of a task that an earlier run of it has not published.

        Invalid rows (`InvalidInput`) and rows that differ from those of an earlier run (`Conflict`) are found before
        anything is sent. If not everything was confirmed, a retry publishes nothing twice.
        """
        options, streams = self.options, self.streams
        reference = reference_of(options.producer_name, write_id, task, epoch)
        numberings = [Numbering(reference, epoch, stream) for stream in streams]
        with closing(Spool(self, numberings)) as spool:
            for batch in batches:
                spool.add(batch)
            with Publisher(options, reference, streams) as publisher:
                after = _resume(publisher, numberings, spool)
                sent = _publish(publisher, spool, after)
        return Published(sent, spool.rows - sent)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int | None = None) -> None:  # noqa: N803 Spark's
        """Log the numbers of messages; runs on the driver, after all tasks have succeeded."""
        done = [message for message in messages if isinstance(message, Published)]
        batch = f"batch {self.options.write_id}" if batchId is None else f"micro-batch {batchId}"
        sent, found = sum(each.sent for each in done), sum(each.found for each in done)
        _log.info("%s: %d messages published, %d already published before", batch, sent, found)


class BatchWriter(_Writer, DataSourceArrowWriter):
    def write(self, iterator: Iterator[pa.RecordBatch]) -> Published:
        """Publish a task's rows; runs in the task and in each retry. Outside Spark's tasks, it counts as task 0."""
        context = TaskContext.get()
        task = 0 if context is None else context.partitionId()
        return self._write(iterator, self.options.write_id, self.options.batch_id, task)


class StreamWriter(_Writer, DataSourceStreamArrowWriter):
    """Writes a streaming query's micro-batches. It retries for `pollTimeoutMs` while the broker is unavailable."""

    _is_streaming = True

    def write(self, iterator: Iterator[pa.RecordBatch]) -> Published:
        context: Any = TaskContext.get()
        query, batch = (context and context.getLocalProperty(name) for name in (_QUERY, _BATCH))
        if query is None or batch is None:
            raise ConfigurationError("this is not a task of a streaming query: Spark gave it no query and batch id")
        return self._write(iterator, query, int(batch), context.partitionId())


def _resume(publisher: Publisher, numberings: Sequence[Numbering], spool: "Spool") -> list[int]:
    """Return the publishing id after which to continue in each stream; raises `Conflict` if this run lacks the id."""
    after = [numbering.resume_after(last) for numbering, last in zip(numberings, publisher.last_ids(), strict=True)]
    missing = {(target, last) for target, last in enumerate(after) if last}
    if missing:
        missing.difference_update((target, publishing_id) for target, publishing_id, _ in spool.entries())
    for target, _ in missing:
        stream = numberings[target].stream
        raise Conflict(
            f"the rows of this task for the stream {stream!r}, or their order, differ from those of an earlier run, so"
            " publishing might store messages twice or not at all. This run sent nothing. Sort the rows within"
            " partitions (sortWithinPartitions) or checkpoint them before the write; give each separate write its own"
            " writeId",
            stream=stream,
        )
    return after


def _publish(publisher: Publisher, spool: "Spool", after: Sequence[int]) -> int:
    """Publish the messages after the given id in each stream, and return their number."""
    sent, last = 0, list(after)
    for target, publishing_id, entry in spool.entries():
        if publishing_id > after[target]:
            publisher.publish(target, publishing_id, entry)
            last[target] = publishing_id
            sent += 1
    publisher.finish()
    if sent and any(own and own != stored for own, stored in zip(last, publisher.last_ids(), strict=True)):
        raise Conflict(
            "a concurrent run of this task published other rows, or the same in another order: some may be stored"
            " twice or not at all. Switch speculation off (spark.speculation), or sort the rows within partitions"
        )
    return sent


class Spool:
    """The messages of a task: checked, numbered, and held until all rows are known to be valid."""

    def __init__(self, writer: _Writer, numberings: Sequence[Numbering]) -> None:
        self._writer = writer
        self._routing_key = writer.options.routing_key
        self._numberings = numberings
        self._stamper = Stamper(writer.definitions, read_property=lambda properties, name: properties.get(name))
        self._file = tempfile.SpooledTemporaryFile(_SPOOL_BYTES)  # noqa: SIM115 closed by close()
        self.rows = 0

    def add(self, batch: pa.RecordBatch) -> None:
        """Add rows; raises `InvalidInput`, before anything is sent, if a row cannot be a message."""
        columns = {name: _values(column) for name, column in zip(batch.schema.names, batch.columns, strict=True)}
        nulls = [None] * batch.num_rows
        bodies, routing = columns["value"], columns.get(self._routing_key or "", nulls)
        headers, properties, times = (columns.get(name, nulls) for name in ("headers", "properties", "timestamp"))
        keys = [(header, columns[column]) for column, header in self._writer.keys]
        for row, body in enumerate(bodies):
            if body is None:
                raise InvalidInput("a row's value is null: a message needs a body, even an empty one; nothing was sent")
            given = _headers(headers[row])
            given |= {header: column[row] for header, column in keys if column[row] is not None}
            if times[row] is not None:
                given[TIME_HEADER] = times[row]
            set_properties = {name: value for name, value in (properties[row] or {}).items() if value is not None}
            data = body.encode() if type(body) is str else body
            self._add(data, given, set_properties, self._target(routing[row]))
        self.rows += batch.num_rows

    def _target(self, routing_key: Any) -> int:
        if self._routing_key is None:
            return 0
        if routing_key is None:
            raise InvalidInput(f"a row has null in {self._routing_key!r}, the routing key; nothing was sent")
        return partition_of(str(routing_key) if type(routing_key) is int else routing_key, len(self._writer.streams))

    def _add(self, body: bytes, headers: dict[str, Any], properties: dict[str, Any], target: int) -> None:
        numbering = self._numberings[target]
        message_id = properties.get("message_id") or numbering.next_message_id()
        stamp = self._stamper.stamp(headers, message_id, properties.get("timestamp"), properties, body)
        content = encode_content(body, headers, properties, new=self._writer.new_layout)
        added = {name: value for name, value in (stamp.headers or {}).items() if headers.get(name) is not value}
        message = content.message(message_id, added)
        if len(message) > self._writer.message_bytes_max > 0:
            raise InvalidInput(
                f"a message has {len(message)} bytes; over the stream protocol the broker accepts at most"
                f" {self._writer.message_bytes_max} (stream.frame_max); nothing was sent"
            )
        self._file.write(_SPOOLED.pack(target, numbering.next(content.parts()), len(message)) + message)

    def entries(self) -> Iterator[tuple[int, int, bytes]]:
        """Yield each message in order: (target, publishing id, the message as an entry of a Publish frame)."""
        file = self._file
        file.seek(0)
        while head := file.read(_SPOOLED.size):
            target, publishing_id, size = _SPOOLED.unpack(head)
            # The bytes after the target are the entry of a frame.
            yield target, publishing_id, head[_TARGET_BYTES:] + file.read(size)

    def close(self) -> None:
        self._file.close()


def _headers(given: Any) -> dict[str, Any]:
    """Prepare headers that Spark may have read from a stream: convert the time from text, drop the receipt."""
    headers: dict[str, Any] = dict(given or {})
    headers.pop(RECEIPT_HEADER, None)
    stamped: Any = headers.get(TIME_HEADER)
    if is_integer_text(stamped):
        headers[TIME_HEADER] = int(stamped)
    return headers


def _values(column: pa.Array) -> list[Any]:
    """Return a column's values, timestamps as microseconds."""
    if pa.types.is_timestamp(column.type):
        column = column.cast(pa.timestamp("us", tz=column.type.tz)).cast(pa.int64())
    values: list[Any] = column.to_pylist()
    return values
