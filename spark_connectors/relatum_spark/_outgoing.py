"""Rows made into numbered messages."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa

from relatum.errors import InvalidInput
from relatum.headers import RECEIPT_HEADER, TIME_HEADER
from relatum.keys import KeyDefinition
from relatum.publishing import Stamper
from relatum.superstreams import partition_of
from relatum_spark._encode import encode_content
from relatum_spark._sequence import Numbering
from relatum_spark._spool import Spool

Columns = Mapping[str, Sequence[Any]]
"""Values by column, equally many each: moments as microseconds, maps as pairs or dicts, structs as dicts."""

_MICROSECONDS: Final = pa.int64()


@dataclass(frozen=True, slots=True)
class Shape:
    """How rows become messages; the same in all tasks of a write. Can be pickled.

    Attributes:
        streams: The stream, or those of the super stream in their order.
        routing_key: The column that says which; None where there is one.
        keys: (column, header) of each key that is lifted from a column.
        definitions: The keys whose values are checked.
        new_layout: Whether the broker keeps messages as RabbitMQ 3.13 and later do.
        message_bytes_max: Bytes a message may have; 0 means no limit.
    """

    streams: tuple[str, ...]
    routing_key: str | None
    keys: tuple[tuple[str, str], ...]
    definitions: tuple[KeyDefinition, ...]
    new_layout: bool
    message_bytes_max: int


class Outgoing:
    """The messages of one task: checked, numbered, and spooled.

    Args:
        shape: How rows become messages.
        numberings: One for each stream, in the order of `shape.streams`.
        spool: Gets the messages.
    """

    def __init__(self, shape: Shape, numberings: Sequence[Numbering], spool: Spool) -> None:
        self._shape = shape
        self._numberings = numberings
        self._spool = spool
        self._stamper = Stamper(shape.definitions, read_property=_property_of)
        self.rows = 0

    def add(self, columns: Columns, rows: int) -> None:
        """Add rows.

        Raises:
            InvalidInput: a row cannot be a message (`InvalidRelationshipKey`: because of a key); nothing was sent.
        """
        shape, nothing = self._shape, [None] * rows
        values, routing = columns["value"], columns[shape.routing_key] if shape.routing_key is not None else nothing
        headers, properties, times = (columns.get(name) or nothing for name in ("headers", "properties", "timestamp"))
        keys = [(header, columns[column]) for column, header in shape.keys]
        for row in range(rows):
            given = _headers(headers[row])
            for header, column in keys:
                if (value := column[row]) is not None:
                    given[header] = value
            if (time_us := times[row]) is not None:
                given[TIME_HEADER] = time_us
            body = values[row]
            if body is None:
                raise InvalidInput("a row has no value (null): a message has a body, be it empty; nothing was sent")
            self._add(
                body.encode() if type(body) is str else body,
                given,
                _properties(properties[row]),
                self._target(routing[row]),
            )
        self.rows += rows

    def _target(self, routing_key: Any) -> int:
        if self._shape.routing_key is None:
            return 0
        if routing_key is None:
            raise InvalidInput(f"a row has no routing key: {self._shape.routing_key!r} is null; nothing was sent")
        if type(routing_key) is int:
            routing_key = str(routing_key)
        return partition_of(routing_key, len(self._shape.streams))

    def _add(self, body: bytes, headers: dict[str, Any], properties: dict[str, Any], target: int) -> None:
        numbering = self._numberings[target]
        message_id = properties.get("message_id") or numbering.next_message_id()
        stamp = self._stamper.stamp(headers, message_id, properties.get("timestamp"), properties, body)
        content = encode_content(body, headers, properties, new=self._shape.new_layout)
        message = content.message(message_id, {name: (stamp.headers or {})[name] for name in stamp.added})
        if len(message) > self._shape.message_bytes_max > 0:
            raise InvalidInput(
                f"a message has {len(message)} bytes; the broker takes {self._shape.message_bytes_max} by the stream"
                " protocol (stream.frame_max); nothing was sent"
            )
        self._spool.add(target, numbering.next(content.parts()), message)


def _property_of(properties: Mapping[str, Any], name: str) -> Any:
    return properties.get(name)


def _headers(given: Any) -> dict[str, Any]:
    """A row's headers, fit to be sent: as Spark reads them, Relatum's own time is a text and a receipt is another's."""
    if not given:
        return {}
    headers: dict[str, Any] = dict(given)
    headers.pop(RECEIPT_HEADER, None)
    stamped = headers.get(TIME_HEADER)
    if type(stamped) is str and stamped.removeprefix("-").isdecimal() and len(stamped) <= _DIGITS_MAX:
        headers[TIME_HEADER] = int(stamped)
    return headers


_DIGITS_MAX: Final = 19
"""Characters of a moment in microseconds, or a few more: what is longer is none, and is refused."""


def _properties(given: Any) -> dict[str, Any]:
    """A row's properties that are set."""
    if not given:
        return {}
    return {name: value for name, value in given.items() if value is not None}


# --- columns ----------------------------------------------------------------------------------------------


def columns_of(batch: pa.RecordBatch) -> dict[str, Sequence[Any]]:
    """An Arrow batch's values by column."""
    return {name: _values(column) for name, column in zip(batch.schema.names, batch.columns, strict=True)}


def _values(column: pa.Array) -> list[Any]:
    if pa.types.is_timestamp(column.type):
        column = column.cast(pa.timestamp("us", tz=column.type.tz)).cast(_MICROSECONDS)
    values: list[Any] = column.to_pylist()
    return values
