"""The columns of a stream in Spark, and the same in Arrow."""

from collections.abc import Sequence
from functools import cache
from typing import Final

import pyarrow as pa
from pyspark.sql.types import (
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from relatum.errors import InvalidInput

_PROPERTY_TYPES: Final[dict[str, DataType]] = {
    "content_type": StringType(),
    "content_encoding": StringType(),
    "delivery_mode": IntegerType(),
    "priority": IntegerType(),
    "correlation_id": StringType(),
    "reply_to": StringType(),
    "expiration": StringType(),
    "message_id": StringType(),
    "timestamp": TimestampType(),
    "type": StringType(),
    "user_id": StringType(),
    "app_id": StringType(),
}

PROPERTY_NAMES: Final = tuple(_PROPERTY_TYPES)
"""The fields of the column `properties`, in order: those of `relatum.reading.Properties`."""

PROPERTIES: Final = StructType([StructField(name, kind) for name, kind in _PROPERTY_TYPES.items()])
"""The type of the column `properties`."""

HEADERS: Final = MapType(StringType(), StringType())
"""The type of the column `headers`."""

_ARROW: Final[dict[DataType, pa.DataType]] = {
    StringType(): pa.string(),
    BinaryType(): pa.binary(),
    IntegerType(): pa.int32(),
    LongType(): pa.int64(),
    TimestampType(): pa.timestamp("us", tz="UTC"),
}


def schema(*, value: bool = True, headers: bool = True, keys: Sequence[str] = ()) -> StructType:
    """The columns of a read.

    Args:
        value: With the body (column `value`).
        headers: With headers and properties (columns `headers` and `properties`).
        keys: Names of keys; each becomes a column of its canonical value, after the others.

    Raises:
        InvalidInput: a key has the name of another column; Spark does not tell upper from lower case.
    """
    return _schema(value, headers, tuple(keys))


@cache
def _schema(value: bool, headers: bool, keys: tuple[str, ...]) -> StructType:
    fields = [
        StructField("stream", StringType()),
        StructField("offset", LongType()),
        StructField("timestamp", TimestampType()),
    ]
    if value:
        fields.append(StructField("value", BinaryType()))
    if headers:
        fields += [StructField("headers", HEADERS), StructField("properties", PROPERTIES)]
    taken = {"stream", "offset", "timestamp", "value", "headers", "properties"}
    for key in keys:
        if key.lower() in taken:
            raise InvalidInput(f"the key {key!r} cannot be a column: there is another of that name")
        taken.add(key.lower())
        fields.append(StructField(key, StringType()))
    return StructType(fields)


def arrow_schema(*, value: bool = True, headers: bool = True, keys: Sequence[str] = ()) -> pa.Schema:
    """The same columns in Arrow, exactly as Spark asks for them. Arguments and errors as of `schema`."""
    return _arrow_schema(value, headers, tuple(keys))


@cache
def _arrow_schema(value: bool, headers: bool, keys: tuple[str, ...]) -> pa.Schema:
    return pa.schema([_arrow_field(field) for field in _schema(value, headers, keys).fields])


def _arrow_field(field: StructField) -> pa.Field:
    kind = field.dataType
    if isinstance(kind, StructType):
        return pa.field(field.name, pa.struct([_arrow_field(inner) for inner in kind.fields]))
    if isinstance(kind, MapType):
        return pa.field(field.name, pa.map_(_ARROW[kind.keyType], _ARROW[kind.valueType]))
    return pa.field(field.name, _ARROW[kind])


SCHEMA: Final = schema()
"""All columns: stream, offset, timestamp, value, headers, properties."""
