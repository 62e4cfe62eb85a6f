"""Arrow columns out of a stream's records: the hot path of every read in Spark.

Most records have one of few forms, which RabbitMQ or a stream client writes; those are read straight into columns.
Whatever has another form goes through `Message`, so that both always say the same.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

import pyarrow as pa

from relatum.keys import InvalidValue, KeyDefinition
from relatum.reading import Message, RecordBatch
from relatum_spark._header_text import header_text
from relatum_spark._schema import PROPERTY_NAMES


class ColumnBuilder:
    """Gathers messages and makes them one Arrow record batch.

    Args:
        schema: What to build, as `arrow_schema` gives it: `value`, and `headers` with `properties`, may be missing.
        keys: The definitions of the key columns, in their order.
    """

    def __init__(self, schema: pa.Schema, *, keys: Sequence[KeyDefinition] = ()) -> None:
        self._schema = schema
        self._keys = [replace(key, key_id=number) for number, key in enumerate(keys)]
        self._with_value = "value" in schema.names
        self._with_headers = "headers" in schema.names
        self._clear()

    def _clear(self) -> None:
        self._messages: list[Message] = []
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._messages)

    def add_batch(self, batch: RecordBatch) -> None:
        """Add all records of a batch."""
        for message in batch.each_message():
            self.add_message(message)

    def add_message(self, message: Message) -> None:
        """Add one message."""
        self._messages.append(message)
        self.bytes += len(message.body)

    def take(self) -> pa.RecordBatch:
        """Everything added, as a record batch; the builder is empty then."""
        rows = [self._row(message) for message in self._messages]
        self._clear()
        return pa.RecordBatch.from_pylist(rows, schema=self._schema)

    def _row(self, message: Message) -> dict[str, Any]:
        row: dict[str, Any] = {"stream": message.stream, "offset": message.offset, "timestamp": message.time_us}
        if self._with_value:
            row["value"] = message.body
        if self._with_headers:
            row["headers"] = [(name, header_text(value)) for name, value in message.headers.items()]
            row["properties"] = {name: getattr(message.properties, name) for name in PROPERTY_NAMES}
        for key in self._keys:
            row[key.name] = _value_of(key, message)
        return row


def _value_of(key: KeyDefinition, message: Message) -> str | None:
    try:
        return key.value_of(message.headers, partial(getattr, message.properties))
    except InvalidValue:
        return None


ROWS_MAX: Final = 10_000
"""Rows of an Arrow record batch: as Spark's own; more make it no faster."""

BYTES_MAX: Final = 4 << 20
"""Bytes of records in an Arrow record batch. Spark holds several; one column ends at 2 GiB."""
