"""The columns of a stream say what a reader of its messages sees, whatever the bytes are."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from itertools import product
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pyspark.sql.pandas.types import to_arrow_schema

from pyspark_relatum import DefaultSource
from relatum.common.uuid7 import uuid7
from relatum.errors import InvalidInput
from relatum.keys import InvalidValue, KeyDefinition, KeyType, canonical
from relatum.reading import Message, RecordBatch
from relatum.wire.amqp10 import Opaque
from relatum_spark._columns import ColumnBuilder, batch_of, header_text
from tests.unit.test_extract import damaged, messages

KEYS = [
    KeyDefinition("order_id"),
    KeyDefinition("count", type="integer"),
    KeyDefinition("pair", source=["order_id", "property:message_id"]),
]

# What RabbitMQ 3.10 and 4.3 store of messages published by pika, and what a stream client writes.
OLD = (
    b"\0Sr\xc1\x35\6\xa3\rx-routing-key\xa1\1s\xa3\nx-exchange\xa1\0\xa3\x10x-basic-priorityP\3"
    b"\0Ss\xc0\x19\r\xa1\2m1@@@@@@@@\x83\0\0\1\x8b\xcf\xe5h\0@@@\0St\xc1H\10\xa1\x0cx-basic-type\xa1\1t\xa1\x0e"
    b'x-basic-app-id\xa1\1a\xa1\x0crelatum_time\x81\0\6\n$\x18 "@\xa1\5x-foo\xa1\3bar\0Su\xa0\1y'
)
NEW = (
    b"\0Sp\xc0\7\5BP\3@AC\0Sr\xc1\x3e\10\xa3\rx-routing-key\xa1\1s\xa3\nx-exchange\xa1\0\xa3\x0cx-basic-type\xa1\1t"
    b"\xa3\5x-foo\xa1\3bar\0Ss\xc0\x16\x0b@@@@@@@@@\x83\0\0\1\x8b\xcf\xe5h\0\xa1\1a\0St\xc1\x18\2\xa1\x0crelatum_time"
    b'\x81\0\6\n$\x18 "@\0Su\xa0\1y'
)
ID = uuid7(1_600_000_000_123_456_789)
STAMPED = b"\0Ss\xc0\x33\r\xa1\x24" + ID.encode() + b"@" * 12 + b"\0Su\xa0\1y"


def headers(*pairs: bytes) -> bytes:
    content = b"".join(pairs)
    return b"\0St\xc1" + bytes([len(content) + 1, len(pairs)]) + content


ORDER, COUNT = b"\xa1\x08order_id", b"\xa1\5count"
ODD = [b"@", b"C", b"D", b"T\xff", b"P\2", b"E", b"\x98" + bytes(16), b"s\0\0\0A", b"\x74" + bytes(4)]
ODD += [b"\x80" + b"\xff" * 8, b"\0\xa3\1d\xa1\1v", b"\x83" + b"\xff" * 8, b"\xa1\1\0", b"\xa0\1\xff", b"\xa1\1\xff"]
"""Values that RabbitMQ's own clients do not send, or that no key can have."""

SAMPLES = [
    *(OLD, NEW, STAMPED, b"\0Su\xa0\0", b"\0SwA", b"\0Sw\xa1\2ab", b"\0Su\xa0\1a\0Su\xa0\1b", b"", b"plain"),
    *(headers(name, value) for name in (ORDER, COUNT) for value in ODD),
    *(headers(value, b"A") for value in ODD),
    headers(ORDER, b"\xa1\2o1", ORDER, b"\xa1\2o2"),
    b"\0Ss\xc0\x16\x16@@@@@@@@@\x83\0\0\x01\x8b\xcf\xe5h\0\xa1\1a\0Su\xa0\1y",  # a higher count than there are elements
    b"\0Sp\xc0\5\3BB\xa1\3\0Su\xa0\1y",  # a text that would extend into the next section
]


def expected(message: Message) -> dict[str, Any]:
    properties = asdict(message.properties)
    if not -(2**31) <= (properties["priority"] or 0) < 2**31:
        properties["priority"] = None
    row = {
        "stream": message.stream,
        "offset": message.offset,
        "timestamp": message.time_us,
        "value": message.body,
        "headers": {name: header_text(value) for name, value in message.headers.items()},
        "properties": properties,
    }
    for key in KEYS:
        row[key.name] = next(iter(key.values_of(message)), None)
    return row


def rows_of(batch: pa.RecordBatch) -> list[dict[str, Any]]:
    times = batch.column("timestamp").cast(pa.int64()).to_pylist()
    columns = {name: batch.column(name).to_pylist() for name in batch.schema.names if name != "timestamp"}
    rows = []
    for number, time_us in enumerate(times):
        row = {name: values[number] for name, values in columns.items()} | {"timestamp": time_us}
        if "headers" in row:
            assert len(row["headers"]) == len(dict(row["headers"])), "Spark's maps hold each key once"
            row["headers"] = dict(row["headers"])
        rows.append(row)
    return rows


@given(st.lists(st.sampled_from(SAMPLES) | messages | damaged(), max_size=6), st.none() | st.integers(0, 2**41))
@example(SAMPLES, 5)
@example(SAMPLES, None)
def test_columns_say_what_messages_say(records: Sequence[bytes], chunk_ms: int | None) -> None:
    """Whichever columns are asked for, from records or from messages, alone or together with others."""
    batch = RecordBatch("s", 7, range(7, 7 + len(records)), records, chunk_ms)
    wanted = [expected(message) for message in batch.each_message()]
    for value, headers, keys in product((True, False), (True, False), ((), KEYS)):
        columns = ColumnBuilder(value=value, headers=headers, keys=keys)
        columns.add_batch(batch)
        for message in batch.each_message():
            columns.add_batch(batch_of(message))
        assert len(columns) == 2 * len(records)
        found = columns.take()
        found.validate(full=True)
        assert rows_of(found) == 2 * [{name: row[name] for name in found.schema.names} for row in wanted]
        assert (len(columns), columns.bytes, columns.take().num_rows) == (0, 0, 0)


def source_of(**options: Any) -> DefaultSource:
    given = {"broker": "amqp://nobody@127.0.0.1:1/", "stream": "s", "database": "postgresql://u@h/d"}
    return DefaultSource(given | options)


@pytest.mark.parametrize("names", [[], ["order_id", "with space"]])
def test_the_schema_is_the_one_spark_asks_for(names: list[str]) -> None:
    """Spark compares Arrow schemas to the letter; a key's name must differ from others' by more than case."""
    keys = [KeyDefinition(name) for name in names]
    for value, headers in product((True, False), (True, False)):
        options = {"includeValue": str(value), "includeHeaders": str(headers)}
        schema = source_of(**options, **({"keys": json.dumps(names)} if names else {})).schema()
        built = ColumnBuilder(value=value, headers=headers, keys=keys).take()
        assert built.schema.equals(to_arrow_schema(schema, timezone="UTC"))
    for clashing in ("Offset", "value", "a,A"):
        with pytest.raises(InvalidInput, match=clashing[-1]):
            source_of(includeValue="false", keys=clashing).schema()


@given(st.text(max_size=50) | st.booleans() | st.integers(-(2**63), 2**63 - 1))
def test_header_text_is_the_canonical_value_of_a_text_key(value: Any) -> None:
    """So that the column joins with the relationship table."""
    try:
        assert header_text(value) == canonical(value, KeyType.TEXT)
    except InvalidValue:
        assert header_text(value) == value, "a NUL is refused as a key's value, but is text all the same"


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, None),
        (1.5, "1.5"),
        (1e100, "1e+100"),
        (float("nan"), "NaN"),
        (datetime(2020, 1, 2, tzinfo=UTC), "2020-01-02T00:00:00+00:00"),
        (b"\xff", "/w=="),
        (Opaque("decimal", b"\x01"), "AQ=="),
        ([], "[]"),
        ([None, True, "ü", 2.0, b"\xff"], '[null,true,"ü",2.0,"/w=="]'),
        ({"a": {1: datetime(2020, 1, 2, tzinfo=UTC)}}, '{"a":{"1":"2020-01-02T00:00:00+00:00"}}'),
    ],
)
def test_header_text_of_what_no_key_holds(value: Any, shown: str | None) -> None:
    """Floats as Python writes them, moments ISO 8601, other bytes base64, the rest JSON of these."""
    assert header_text(value) == shown


@given(st.lists(st.integers(0, 50), max_size=40), st.integers(1, 7), st.integers(1, 120))
def test_record_batches_are_capped(sizes: list[int], rows_max: int, bytes_max: int) -> None:
    """By rows, and by bytes unless one record alone has more; nothing is lost, doubled or out of order."""
    records = [b"\0Su\xa0" + bytes([size]) + bytes(size) for size in sizes]
    chunks = [RecordBatch("s", at, range(at, at + 9), records[at : at + 9], 5) for at in range(0, len(records), 9)]
    chunks = [RecordBatch("s", c.first_offset, c.offsets[: len(c.records)], c.records, 5) for c in chunks]
    columns = ColumnBuilder(value=True, headers=True)
    batches = list(columns.batches(chunks, rows_max=rows_max, bytes_max=bytes_max))
    assert [offset for batch in batches for offset in batch["offset"].to_pylist()] == list(range(len(sizes)))
    for batch in batches:
        held = sum(len(value) + 5 for value in batch["value"].to_pylist())
        assert 1 <= batch.num_rows <= rows_max
        assert held <= bytes_max or batch.num_rows == 1
