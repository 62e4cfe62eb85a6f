"""What the sink decides without a broker: numbers, encodings, columns."""

import struct
import uuid
from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import types as T

from pyspark_relatum import DefaultSource
from relatum.errors import InvalidInput, InvalidRelationshipKey, ProtocolError
from relatum.reading import Message
from relatum.wire import frames as wire
from relatum.wire.session import StreamSession
from relatum_spark._encode import NEW_LAYOUT_SINCE, encode_content
from relatum_spark._sequence import NAME_BYTES_MAX, TASKS_MAX, Numbering, check_names, reference_of
from tests.unit.wire_samples import sized

MOMENT = datetime(2024, 5, 6, 7, 8, 9, tzinfo=UTC)


def ids(rows: list[bytes], epoch: int = 0) -> list[int]:
    numbering = Numbering("r", epoch, "s")
    return [numbering.next((row,)) for row in rows]


@given(st.lists(st.binary(max_size=8), max_size=30), st.integers(0, 2**40))
def test_ids_grow_and_come_again(rows: list[bytes], epoch: int) -> None:
    """A run's ids grow, fit 63 bits and come again; a later epoch's are higher, or the reference is another."""
    found = ids(rows, epoch)
    assert found == sorted(set(found)) == ids(rows, epoch)
    assert all(0 < each < 2**63 for each in found)
    before, after = reference_of("p", "w", 0, epoch), reference_of("p", "w", 0, epoch + 1)
    assert before != after or max(found, default=0) < min(ids([b"a"] * 3, epoch + 1))


def test_message_ids_are_uuids_that_come_again() -> None:
    """A message without `message_id` gets a UUID that depends on stream, epoch, producer and number alone."""
    first, again, other = Numbering("r", 1, "s"), Numbering("r", 1, "s"), Numbering("r", 1, "t")
    given_id = first.next_message_id()
    assert (uuid.UUID(given_id).version, uuid.UUID(given_id).variant) == (8, uuid.RFC_4122)
    assert given_id == again.next_message_id() != other.next_message_id()
    first.next((b"",))
    assert first.next_message_id() != given_id


def test_references_are_bounded() -> None:
    """A reference fits RabbitMQ's 255 bytes, and tasks beyond what it remembers are refused."""
    check_names("n" * 100, "w" * (NAME_BYTES_MAX - 100))
    assert len(reference_of("n" * 100, "w" * (NAME_BYTES_MAX - 100), TASKS_MAX - 1, 2**62 - 1)) <= 255
    with pytest.raises(InvalidInput, match="bytes"):
        check_names("ä" * 100, "w")
    with pytest.raises(InvalidInput, match="coalesce"):
        reference_of("p", "w", TASKS_MAX, 0)


def test_frames() -> None:
    """A session gives the ids of confirms, and ids and codes of refusals; what a frame adds to its entries is known."""
    assert len(wire.publish(3, [])) == wire.PUBLISH_BYTES
    confirm = struct.pack(">HHBI2Q", 3, 1, 7, 2, 11, 2**63)
    refusal = struct.pack(">HHBIQH", 4, 1, 7, 1, 12, 18)
    session = StreamSession()
    assert session.receive(sized(confirm) + sized(refusal)) == [
        wire.Confirmed(7, (11, 2**63)),
        wire.Refused(7, ((12, 18),)),
    ]
    with pytest.raises(ProtocolError):
        wire.decode_outcome(confirm[:-1])


NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20).filter(
    lambda name: not name.startswith("x-")
)
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**63 - 1),
    st.floats(allow_nan=False),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=400),
    st.just(b"\xff\xfe" * 200),
    st.just(MOMENT),
)


PROPERTIES = {
    "content_type": "a/b", "content_encoding": "gzip", "delivery_mode": 2, "priority": 9, "correlation_id": "c",
    "reply_to": "q /ä", "expiration": "60000", "message_id": "m", "timestamp": MOMENT, "type": "t",
    "user_id": "u", "app_id": "a",
}  # fmt: skip


@given(st.binary(max_size=400), st.dictionaries(NAMES, VALUES, max_size=5), st.booleans(), st.booleans())
def test_what_is_encoded_is_read(body: bytes, headers: dict[str, object], new: bool, has_properties: bool) -> None:
    """In both layouts a message reads as it was given, and every property."""
    properties = PROPERTIES if has_properties else {"message_id": "id"}
    given_headers = headers | {"x-own": "y"}
    raw = encode_content(body, given_headers, properties, new=new).message(
        properties["message_id"], {"relatum_time": 5}
    )
    message = Message.from_record("s", 0, raw)
    assert (message.is_amqp, message.body, message.headers) == (True, body, given_headers | {"relatum_time": 5})
    assert {name: getattr(message.properties, name) for name in properties} == properties
    assert message.time_us == 5


@pytest.mark.parametrize(
    ("headers", "properties"),
    [
        ({"n" * 256: 1}, {}),
        ({"x-basic-type": "t"}, {}),
        ({"a": 2**63}, {}),
        ({"a": [1]}, {}),
        ({}, {"type": "t" * 256}),
        ({}, {"priority": 256}),
        ({}, {"delivery_mode": 3}),
        ({}, {"expiration": "soon"}),
        ({"a": datetime(1969, 12, 31, 23, 59, 59, tzinfo=UTC)}, {}),
        ({}, {"timestamp": datetime(1969, 12, 31, 23, 59, 59, tzinfo=UTC)}),
    ],
)
def test_what_cannot_be_sent_is_refused(headers: dict[str, object], properties: dict[str, object]) -> None:
    """What consumers of AMQP 0.9.1 could not get is one clear error."""
    with pytest.raises(InvalidInput, match="nothing was sent"):
        encode_content(b"", headers, properties, new=False)


@pytest.mark.parametrize(
    ("version", "new"), [("3.10.8", False), ("3.12.14", False), ("3.13.0", True), ("4.3.6", True), ("4.4.0-rc.1", True)]
)
def test_layout_is_that_of_the_version(version: str, new: bool) -> None:
    """RabbitMQ changed how it keeps messages in 3.13."""
    session = StreamSession()
    session.server_properties = {"version": version}
    assert session.is_older_than(NEW_LAYOUT_SINCE) is not new


OPTIONS = {"broker": "amqp://user:hidden@127.0.0.1:1/", "stream": "s"}
"""Nobody listens there; nothing that is refused gets so far."""


def table(**columns: T.DataType) -> T.StructType:
    return T.StructType([T.StructField(name, kind) for name, kind in columns.items()])


TEXT, BYTES = T.StringType(), T.BinaryType()


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        (table(headers=T.MapType(TEXT, TEXT)), "'value'"),
        (table(value=T.IntegerType()), "'value' is int"),
        (table(value=BYTES, offset=T.LongType(), stream=TEXT), "offset, stream"),
        (table(value=BYTES, headers=T.MapType(TEXT, T.ArrayType(TEXT))), "headers"),
        (table(value=BYTES, headers=T.MapType(T.LongType(), TEXT)), "headers"),
        (table(value=BYTES, headers=T.ArrayType(TEXT)), "headers"),
        (table(value=BYTES, properties=table(typ=TEXT)), "'typ'"),
        (table(value=BYTES, properties=table(type=T.IntegerType())), "properties.type"),
        (table(value=BYTES, timestamp=T.LongType()), "'timestamp'"),
        *((table(value=BYTES, k=kind), "k") for kind in (T.DoubleType(), T.DecimalType(9, 2), T.MapType(TEXT, TEXT))),
    ],
)
def test_bad_columns(schema: T.StructType, named: str) -> None:
    """Columns that cannot be written are refused by name before a job runs, and any mode but append."""
    keys = {"keyColumns": "k"} if "k" in schema.names else {}
    with pytest.raises((InvalidInput, InvalidRelationshipKey), match=named):
        DefaultSource(OPTIONS | keys).writer(schema, False)
    with pytest.raises(InvalidInput, match="append"):
        DefaultSource(OPTIONS).writer(table(value=BYTES), True)
