"""What the recorder takes from a message equals what a reader of the message sees, whatever the bytes are."""

import json
import struct
from datetime import UTC, datetime

from hypothesis import given
from hypothesis import strategies as st

from relatum.common.uuid7 import uuid7
from relatum.keys import KeyDefinition, SkipReason, bases_of
from relatum.reading import Message, TimeSource, property_text
from relatum.reading.extractor import Extractor
from tests.support.amqp import encode, section, text

DEFINITIONS = [
    KeyDefinition("order_id", key_id=1),
    KeyDefinition("count", type="integer", key_id=2),
    KeyDefinition("when", type="timestamp", key_id=3),
    KeyDefinition("x-device", key_id=4),
    KeyDefinition("both", source=["order_id", "property:correlation_id"], key_id=5),
    *[
        KeyDefinition(name, source=f"property:{name}", key_id=10 + place)
        for place, name in enumerate(("correlation_id", "message_id", "type", "app_id", "user_id", "reply_to"))
    ],
    # Values that need a search come last, as in the extracted ones.
    KeyDefinition("inner", source="header:$.x-device[0]", key_id=30),
    KeyDefinition("either", source="header:o or property:type or body:$.a", key_id=31),
    KeyDefinition("trace", source="trace-id:o", key_id=32),
    KeyDefinition("body", source="body:$.a", key_id=33),
    KeyDefinition("each", source="body:$.b[*].c", type="integer", key_id=34),
    KeyDefinition("cloud", source="body:application/cloudevents+json:$.a", key_id=35),
    KeyDefinition("parts", source=("order_id", "body:$.a"), key_id=36),
    KeyDefinition("copies", source="header:$.CC[0]", key_id=37),
]
NAMES = ["order_id", "count", "when", "x-device", "o", *(f"x-basic-{each}" for each in ("type", "app-id"))]
NAMES += ["relatum_time", "relatum_receipt", "CC", "x-cc"]


def short_list(message_id: str, nulls: int) -> bytes:
    """Properties as RabbitMQ writes them: an id, and nothing else in more places or fewer."""
    content = text(message_id) + b"@" * nulls
    return bytes([0xC0, len(content) + 1, nulls + 1]) + content


scalars = (
    st.none()
    | st.booleans()
    | st.text(max_size=300)
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False)
    | st.datetimes(datetime(1970, 1, 2), datetime(2100, 1, 1), timezones=st.just(UTC))
    | st.binary(max_size=40)
    | st.sampled_from(["42", "", "a|b", "\0", "/queues/a%20b", uuid7(7_000_500), uuid7(9_000_500).encode()])
)
values = scalars | st.lists(scalars, max_size=3) | st.dictionaries(st.text(max_size=3), scalars, max_size=2)
ids = st.sampled_from([uuid7(7_000_500), "0192f000-0000-7000-8000-000000000000", "ü" * 18, "short"])
maps = st.dictionaries(st.sampled_from(NAMES), values, max_size=6).map(encode)
leaves = scalars | st.sampled_from([{"c": 7}, {"c": "07"}, {"c": 1.5}, {}, [], "\0", "\ud800"])
bodies = st.builds(
    lambda value, cut: json.dumps(value, default=str).encode()[: None if cut else -1],
    st.dictionaries(st.sampled_from("abc"), leaves | st.lists(leaves, max_size=70), max_size=3),
    st.booleans(),
)
types = st.sampled_from(["application/json", "application/cloudevents+json; charset=utf-8", "text/plain", None])
sections = st.tuples(
    st.none() | maps.map(lambda value: section(0x72, value)),
    st.none()
    | st.lists(values, max_size=12).map(lambda value: section(0x73, encode(value)))
    | st.tuples(ids, st.integers(0, 13)).map(lambda value: section(0x73, short_list(*value)))
    | st.tuples(ids, types, st.sampled_from([None, "utf-8", "gzip"])).map(
        lambda value: section(0x73, encode([value[0], *[None] * 5, *value[1:]]))
    ),
    st.none() | maps.map(lambda value: section(0x74, value)),
    st.none() | (st.binary(max_size=20) | bodies).map(lambda value: section(0x75, encode(value))),
)
messages = sections.map(lambda parts: b"".join(part or b"" for part in parts))


@st.composite
def damaged(draw: st.DrawFn) -> bytes:
    raw = bytearray(draw(messages))
    for _ in range(draw(st.integers(0, 4))):
        place = draw(st.integers(0, max(0, len(raw) - 1)))
        kind = draw(st.sampled_from(["change", "cut", "insert"]))
        if kind == "change" and raw:
            raw[place] = draw(st.integers(0, 255))
        elif kind == "cut":
            del raw[place : place + draw(st.integers(1, 5))]
        else:
            raw[place:place] = draw(st.binary(max_size=5))
    return bytes(raw)


def expected_values(message: Message) -> tuple[list[tuple[int, str]], list[tuple[int, SkipReason]]]:
    found, skipped = [], []
    for definition in DEFINITIONS if message.is_amqp else ():
        values, reasons = definition.read(bases_of(message))
        found += [(definition.key_id, value) for value in values]
        skipped += [(definition.key_id, reason) for reason in reasons]
    return found, skipped if message.is_amqp else [(0, SkipReason.UNDECODABLE)]


@given(messages | damaged() | st.binary(max_size=60), st.none() | st.integers(0, 2**41))
def test_the_recorder_sees_what_a_reader_sees(raw: bytes, chunk_ms: int | None) -> None:
    """Keys, reasons, time and its source agree, for good messages, damaged ones and random bytes."""
    message = Message.from_record("s", 7, raw, chunk_ms)
    extracted = Extractor(DEFINITIONS).from_record(raw, chunk_ms)
    assert (extracted.values, extracted.skips) == expected_values(message)
    assert (extracted.time_us, extracted.source) == (message.time_us, message.time_source)
    if extracted.receipt is not None:
        named = message.headers["relatum_receipt"]
        assert extracted.receipt == (property_text(message.properties.message_id) if named is True else named)


def test_the_header_cc_is_read_where_rabbitmq_4_keeps_it() -> None:
    """RabbitMQ 3.13 and later keep the header CC as the annotation `x-cc`: a key in it is recorded from there."""
    raw = section(0x72, encode({"x-cc": ["audit", "copies"]}))
    key = KeyDefinition("copies", source="header:$.CC[*]", key_id=1)
    assert key.values_of(Message.from_record("s", 7, raw, 5)) == ["audit", "copies"]
    assert Extractor([key]).from_record(raw, 5).values == [(1, "audit"), (1, "copies")]


def test_times_come_from_header_property_id_and_chunk() -> None:
    """In this order; an id that was not made by us says none."""
    at = datetime(2020, 1, 1, tzinfo=UTC)
    properties = section(0x73, encode([None] * 9 + [at]))
    header = section(0x74, encode({"relatum_time": 5}))
    extractor = Extractor([])
    assert extractor.from_record(properties + header, 9)[:2] == (5, TimeSource.HEADER)
    assert extractor.from_record(properties, 9)[:2] == (int(at.timestamp()) * 10**6, TimeSource.PROPERTY)
    ours = section(0x73, encode([uuid7(7_000_500), *[None] * 12]))
    assert extractor.from_record(ours, 9)[:2] == (7_000, TimeSource.MESSAGE_ID)
    assert extractor.from_record(ours + header, 9)[:2] == (5, TimeSource.HEADER)
    dated = section(0x73, encode([uuid7(7_000_500), *[None] * 8, at]))
    assert extractor.from_record(dated, 9)[:2] == (int(at.timestamp()) * 10**6, TimeSource.PROPERTY)
    strange = section(0x73, encode(["0192f000-0000-7000-8000-000000000000"]))
    assert extractor.from_record(strange, 9)[:2] == (9_000, TimeSource.CHUNK)
    assert extractor.from_record(section(0x75, encode(b"")), 9)[:2] == (9_000, TimeSource.CHUNK)
    assert extractor.from_record(b"not AMQP", None)[:2] == (None, TimeSource.UNKNOWN)


def test_a_receipt_is_taken_only_where_the_publisher_asked_for_it() -> None:
    """A message with a receipt header of true, or of up to 64 characters, has a receipt: its id, or the text."""
    identified = section(0x73, encode(["m-1"]))
    assert Extractor([]).from_record(identified, 1).receipt is None
    for asked, receipt in ((True, "m-1"), ("r-1", "r-1"), ("x" * 65, None), (1, None)):
        raw = identified + section(0x74, encode({"relatum_receipt": asked}))
        assert Extractor([]).from_record(raw, 1).receipt == receipt


def test_headers_without_number_are_counted_and_hide_nothing_else() -> None:
    """A section with more values than are decoded counts as absent, to the recorder and to readers, and is counted."""
    entries = b"\xa1\x08order_id\xa1\x01o" + b"\xa1\x01n\x40" * 100_000
    headers = b"\xd1" + struct.pack(">II", len(entries) + 4, 200_002) + entries
    properties = b"\xc0\x05\x01\xa1\x02id"
    raw = b"\x00\x53\x73" + properties + b"\x00\x53\x74" + headers + b"\x00\x53\x75\xa0\x01b"
    found = Extractor(DEFINITIONS).from_record(raw, 5)
    message = Message.from_record("s", 0, raw, 5)
    assert (found.skips, [key_id for key_id, _ in found.values]) == ([(0, SkipReason.TOO_MANY)], [11])
    assert (dict(message.headers), message.properties.message_id, message.body) == ({}, "id", b"b")
