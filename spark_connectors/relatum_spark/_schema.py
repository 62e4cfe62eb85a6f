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

_INTEGERS: Final = ("delivery_mode", "priority")

PROPERTY_NAMES: Final = (
    *("content_type", "content_encoding", "delivery_mode", "priority", "correlation_id", "reply_to"),
    *("expiration", "message_id", "timestamp", "type", "user_id", "app_id"),
)
"""The fields of the column `properties`, in order: those of `relatum.reading.Properties`."""

PROPERTIES: Final = StructType(
    [
        StructField(
            name, IntegerType() if name in _INTEGERS else TimestampType() if name == "timestamp" else StringType()
        )
        for name in PROPERTY_NAMES
    ]
)

HEADERS: Final = MapType(StringType(), StringType())

_ARROW: Final[dict[DataType, pa.DataType]] = {
    StringType(): pa.string(),
    BinaryType(): pa.binary(),
    IntegerType(): pa.int32(),
    LongType(): pa.int64(),
    TimestampType(): pa.timestamp("us", tz="UTC"),
    HEADERS: pa.map_(pa.string(), pa.string()),
}


def schema(*, value: bool = True, headers: bool = True, keys: Sequence[str] = ()) -> StructType:
    """Return the columns of a read, with the body, with headers and properties, and with a column for each key.

    Raises:
        InvalidInput: a key has the name of another column; Spark does not tell upper from lower case.
    """
    return _schema(value, headers, tuple(keys))


def arrow_schema(*, value: bool = True, headers: bool = True, keys: Sequence[str] = ()) -> pa.Schema:
    """Return the same columns in Arrow, exactly as Spark asks for them. Arguments and errors as of `schema`."""
    return _arrow_schema(value, headers, tuple(keys))


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


@cache
def _arrow_schema(value: bool, headers: bool, keys: tuple[str, ...]) -> pa.Schema:
    return pa.schema([_arrow_field(field) for field in _schema(value, headers, keys).fields])


def _arrow_field(field: StructField) -> pa.Field:
    kind = field.dataType
    if isinstance(kind, StructType):
        return pa.field(field.name, pa.struct([_arrow_field(inner) for inner in kind.fields]))
    return pa.field(field.name, _ARROW[kind])
