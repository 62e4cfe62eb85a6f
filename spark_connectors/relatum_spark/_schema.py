"""The columns of a stream in Spark, and the same in Arrow."""

from collections.abc import Sequence
from dataclasses import fields
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
from relatum.reading import Properties

PROPERTY_NAMES: Final = tuple(field.name for field in fields(Properties))
"""The fields of the column `properties`, in order."""

_KINDS: Final = {"delivery_mode": IntegerType(), "priority": IntegerType(), "timestamp": TimestampType()}
PROPERTIES: Final = StructType([StructField(name, _KINDS.get(name, StringType())) for name in PROPERTY_NAMES])
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
    kinds: dict[str, DataType] = {"stream": StringType(), "offset": LongType(), "timestamp": TimestampType()}
    if value:
        kinds["value"] = BinaryType()
    if headers:
        kinds |= {"headers": HEADERS, "properties": PROPERTIES}
    taken = {"stream", "offset", "timestamp", "value", "headers", "properties"}
    for key in keys:
        if key.lower() in taken:
            raise InvalidInput(f"the key {key!r} cannot be a column: there is another of that name")
        taken.add(key.lower())
        kinds[key] = StringType()
    return StructType([StructField(name, kind) for name, kind in kinds.items()])


def arrow_schema(columns: StructType) -> pa.Schema:
    """Return the same columns in Arrow, exactly as Spark asks for them."""
    return pa.schema([_arrow_field(field) for field in columns.fields])


def _arrow_field(field: StructField) -> pa.Field:
    kind = field.dataType
    if isinstance(kind, StructType):
        return pa.field(field.name, pa.struct([_arrow_field(inner) for inner in kind.fields]))
    return pa.field(field.name, _ARROW[kind])
