"""What the sink decides without a broker: numbers, encodings, options, columns."""

import pickle
import struct
import uuid
from contextlib import closing
from datetime import UTC, datetime, timedelta

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    DecimalType,
    DoubleType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from relatum.errors import Conflict, HeadersRefused, InvalidInput, InvalidRelationshipKey, ProtocolError
from relatum.keys import KeyDefinition
from relatum.reading import Message
from relatum.wire import Login, StreamSession
from relatum.wire import _publishing as wire
from relatum_spark._encode import encode_content, is_new_layout
from relatum_spark._outgoing import Outgoing, Shape, columns_of
from relatum_spark._sequence import (
    NAME_BYTES_MAX,
    TASKS_MAX,
    Numbering,
    check_names,
    reference_of,
)
from relatum_spark._sink_options import check_columns, parse_sink_options
from relatum_spark._spool import Spool
from tests.unit.wire_samples import sized

BASE = {"broker": "amqp://user:hidden@host:5672/", "stream": "s"}
SHAPE = Shape(("s",), None, (), (), True, 0)
MOMENT = datetime(2024, 5, 6, 7, 8, 9, tzinfo=UTC)


def ids(rows: list[bytes], epoch: int = 0) -> list[int]:
    """The publishing ids of rows."""
    numbering = Numbering("r", epoch, "s")
    return [numbering.next((row,)) for row in rows]


# --- numbers ----------------------------------------------------------------------------------------------


@given(st.lists(st.binary(max_size=8), max_size=30), st.integers(0, 2**40))
def test_ids_grow_and_come_again(rows: list[bytes], epoch: int) -> None:
    """The ids of a run grow, fit 63 bits, and are the same in every run of the same rows."""
    found = ids(rows, epoch)
    assert found == sorted(set(found)) == ids(rows, epoch)
    assert all(0 < each < 2**63 for each in found)


@given(st.integers(0, 2**30))
def test_ids_of_a_later_epoch_are_higher(epoch: int) -> None:
    """All ids of an epoch lie above those of the one before, or the reference is another."""
    before, after = reference_of("p", "w", 0, epoch), reference_of("p", "w", 0, epoch + 1)
    assert before != after or max(ids([b"a"] * 3, epoch)) < min(ids([b"a"] * 3, epoch + 1))


def test_resuming() -> None:
    """Nothing of this epoch: from the start. A last id of it: after that. One of a later epoch: an error."""
    numbering = Numbering("r", 7, "s")
    assert numbering.resume_after(0) == 0
    assert numbering.resume_after(ids([b"a"], 6)[-1]) == 0
    last = ids([b"a", b"b"], 7)[-1]
    assert numbering.resume_after(last) == last
    with pytest.raises(Conflict, match="set back"):
        numbering.resume_after(ids([b"a"], 8)[0])


def test_another_order_has_other_ids() -> None:
    """Rows in another order give another id at the end, and from the first difference on."""
    rows = [b"%d" % number for number in range(100)]
    swapped = [*rows[:50], rows[51], rows[50], *rows[52:]]
    mine, theirs = ids(rows), ids(swapped)
    assert mine[:50] == theirs[:50]
    assert not set(mine[50:]) & set(theirs)


def test_message_ids_are_uuids_that_come_again() -> None:
    """A message without `message_id` gets a UUID that depends on stream, epoch, producer and number alone."""
    first, again, other = Numbering("r", 1, "s"), Numbering("r", 1, "s"), Numbering("r", 1, "t")
    given_id = first.next_message_id()
    assert uuid.UUID(given_id).version == 8
    assert uuid.UUID(given_id).variant == uuid.RFC_4122
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


# --- frames -----------------------------------------------------------------------------------------------


def test_confirms_and_refusals_are_events() -> None:
    """A session gives the ids of confirms, and ids and codes of refusals."""
    confirm = struct.pack(">HHBI2Q", 3, 1, 7, 2, 11, 2**63)
    refusal = struct.pack(">HHBIQH", 4, 1, 7, 1, 12, 18)
    session = StreamSession(Login("u", "p"))
    assert session.receive(sized(confirm) + sized(refusal)) == [
        wire.Confirmed(7, (11, 2**63)),
        wire.Refused(7, ((12, 18),)),
    ]
    with pytest.raises(ProtocolError):
        wire.decode_outcome(confirm[:-1])


def test_publish_frame() -> None:
    """A Publish frame holds publisher, count, and each message with its id and length."""
    frame = wire.publish(3, [wire.entry(5, b"ab"), wire.entry(6, b"")])
    assert frame == struct.pack(">IHHBIQI2sQI", len(frame) - 4, 2, 1, 3, 2, 5, 2, b"ab", 6, 0)
    assert len(wire.publish(3, [])) == wire.PUBLISH_BYTES


# --- encodings --------------------------------------------------------------------------------------------

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


@given(st.binary(max_size=400), st.dictionaries(NAMES, VALUES, max_size=5), st.booleans())
def test_what_is_encoded_is_what_is_read(body: bytes, headers: dict[str, object], new: bool) -> None:
    """In both layouts a message reads as it was given."""
    raw = encode_content(body, headers, {}, new=new).message("id", {"relatum_time": 5})
    message = Message.from_record("s", 0, raw)
    assert message.is_amqp
    assert message.body == body
    assert message.headers == headers | {"relatum_time": 5}
    assert message.properties.message_id == "id"
    assert message.time_us == 5


@pytest.mark.parametrize("new", [False, True])
def test_properties_are_read_back(new: bool) -> None:
    """In both layouts every property reads as it was given."""
    properties = {
        "content_type": "a/b", "content_encoding": "gzip", "delivery_mode": 2, "priority": 9, "correlation_id": "c",
        "reply_to": "q /ä", "expiration": "60000", "message_id": "m", "timestamp": MOMENT, "type": "t",
        "user_id": "u", "app_id": "a",
    }  # fmt: skip
    raw = encode_content(b"", {"x-own": "y"}, properties, new=new).message("m", {})
    message = Message.from_record("s", 0, raw)
    assert {name: getattr(message.properties, name) for name in properties} == properties
    assert message.headers == {"x-own": "y"}


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
    assert is_new_layout(version) is new


# --- rows -------------------------------------------------------------------------------------------------


def messages_of(batch: dict[str, list[object]], shape: Shape = SHAPE) -> list[Message]:
    """The messages the sink makes of rows."""
    with closing(Spool()) as spool:
        outgoing = Outgoing(shape, [Numbering("r", 0, stream) for stream in shape.streams], spool)
        outgoing.add(batch, len(batch["value"]))
        head = wire.ENTRY_BYTES
        return [
            Message.from_record(shape.streams[target], number, entry[head:])
            for number, (target, _, entry) in enumerate(spool.entries())
        ]


def test_keys_keep_their_types() -> None:
    """A key's column becomes a header of its type: numbers stay numbers, moments are microseconds, null is none."""
    shape = Shape(("s",), None, (("id", "id"), ("n", "number"), ("at", "at")), (KeyDefinition("id"),), True, 0)
    arrow = pa.record_batch(
        {"value": [b"a", b"b"], "id": ["x", None], "n": [1, 2], "at": pa.array([MOMENT] * 2, pa.timestamp("us", "UTC"))}
    )
    first, second = messages_of(dict(columns_of(arrow)), shape)
    at = int(MOMENT.timestamp()) * 1_000_000
    assert {name: first.headers[name] for name in ("id", "number", "at")} == {"id": "x", "number": 1, "at": at}
    assert "id" not in second.headers


def test_time_is_the_columns_else_the_headers_else_now() -> None:
    """A message's time is the column `timestamp`, else what the headers say, as text too, else the time of writing."""
    times = [7, None, None]
    headers = [{"relatum_time": "5"}, {"relatum_time": "-6"}, {"relatum_receipt": "r"}]
    first, second, third = messages_of({"value": [b""] * 3, "timestamp": times, "headers": headers})
    assert (first.time_us, second.time_us) == (7, -6)
    assert third.time is not None
    assert abs(third.time - datetime.now(UTC)) < timedelta(minutes=5)
    assert "relatum_receipt" not in third.headers


def test_a_bad_key_is_an_error() -> None:
    """A key whose value cannot be recorded is named, with the reason."""
    shape = Shape(("s",), None, (("id", "id"),), (KeyDefinition("id"),), True, 0)
    with pytest.raises(InvalidRelationshipKey, match="nothing was sent") as caught:
        messages_of({"value": [b"a", b"b"], "id": ["ok", "bad\0"]}, shape)
    assert (caught.value.key, caught.value.reason) == ("id", "nul_character")


@pytest.mark.parametrize("row", [{"value": [None]}, {"value": [b"x" * 200]}])
def test_rows_that_are_no_messages(row: dict[str, list[object]]) -> None:
    """A row without a body, and one over what the broker takes, are errors."""
    with pytest.raises(InvalidInput, match="nothing was sent"):
        messages_of(row, Shape(("s",), None, (), (), True, 150))


def test_headers_over_the_limit() -> None:
    """The limits of headers are the interceptor's."""
    with pytest.raises(HeadersRefused):
        messages_of({"value": [b""], "headers": [{"a": "x" * 200_000}]})


def test_spool_gives_back_what_it_got() -> None:
    """Messages come back in order, from memory and from the file beyond it."""
    body = b"x" * (1 << 20)
    with closing(Spool()) as spool:
        for number in range(70):
            spool.add(number % 3, number, body)
        assert list(spool.ids()) == [(number % 3, number) for number in range(70)]
        for target, number, entry in spool.entries():
            assert target == number % 3
            assert entry == wire.entry(number, body)


# --- options and columns ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"stream": ""}, "which stream"),
        ({"superStream": "x", "routingKey": "k"}, "which stream"),
        ({"routingKey": "k"}, "come together"),
        ({"batchId": "1"}, "writeId"),
        ({"writeId": "w", "batchId": "-1"}, "batchId"),
        ({"maxInFlight": "0"}, "maxInFlight"),
        ({"confirmTimeoutMs": "soon"}, "confirmTimeoutMs"),
        ({"keyColumns": "a,,b"}, "keyColumns"),
        ({"keyColumn": "a"}, "keyColumns"),
        ({"producerName": "p" * 200}, "bytes"),
    ],
)
def test_bad_options(options: dict[str, str], words: str) -> None:
    """Each bad option is one error that names it."""
    with pytest.raises(InvalidInput, match=words):
        parse_sink_options(BASE | options)


def test_options_hide_credentials_and_travel() -> None:
    """Options can be pickled; a write without `writeId` gets one of its own; `repr` shows no password."""
    options = parse_sink_options({**BASE, "DATABASE": "postgresql://u:hidden@h/d"})
    assert pickle.loads(pickle.dumps(options)) == options
    assert "hidden" not in repr(options)
    assert options.write_id != parse_sink_options(BASE).write_id
    with pytest.raises(InvalidInput, match="ids of its own"):
        parse_sink_options({**BASE, "writeId": "w"}, streaming=True)


def table(**columns: DataType) -> StructType:
    """A schema."""
    return StructType([StructField(name, kind) for name, kind in columns.items()])


TEXT, BYTES = StringType(), BinaryType()


@pytest.mark.parametrize(
    ("schema", "error"),
    [
        (table(headers=MapType(TEXT, TEXT)), "no column 'value'"),
        (table(value=IntegerType()), "'value' is int"),
        (table(value=BYTES, offset=LongType(), stream=TEXT), "offset, stream"),
        (table(value=BYTES, headers=MapType(TEXT, ArrayType(TEXT))), "headers"),
        (table(value=BYTES, headers=MapType(LongType(), TEXT)), "headers"),
        (table(value=BYTES, headers=ArrayType(TEXT)), "headers"),
        (table(value=BYTES, properties=table(typ=TEXT)), "'typ'"),
        (table(value=BYTES, properties=table(type=IntegerType())), "properties.type"),
        (table(value=BYTES, timestamp=LongType()), "'timestamp'"),
    ],
)
def test_bad_columns(schema: StructType, error: str) -> None:
    """Columns that cannot be written are refused by name."""
    with pytest.raises(InvalidInput, match=error):
        check_columns(schema, parse_sink_options(BASE))


@pytest.mark.parametrize(
    ("kind", "reason"),
    [(DoubleType(), "float"), (DecimalType(9, 2), "decimal"), (MapType(TEXT, TEXT), "nested")],
)
def test_columns_that_are_no_keys(kind: DataType, reason: str) -> None:
    """A key's column of a type that no key has is refused before a job runs."""
    options = parse_sink_options(BASE | {"keyColumns": "k"})
    with pytest.raises(InvalidRelationshipKey) as caught:
        check_columns(table(value=BYTES, k=kind), options)
    assert (caught.value.key, caught.value.reason) == ("k", reason)


def test_good_columns() -> None:
    """All columns the sink knows, in any order."""
    options = parse_sink_options(
        {"broker": BASE["broker"], "superStream": "x", "routingKey": "r", "keyColumns": '["a", "b"]'}
    )
    schema = table(
        a=IntegerType(),
        value=TEXT,
        b=TimestampType(),
        r=LongType(),
        timestamp=TimestampType(),
        headers=MapType(TEXT, IntegerType()),
        properties=table(type=TEXT, priority=IntegerType()),
    )
    check_columns(schema, options)
