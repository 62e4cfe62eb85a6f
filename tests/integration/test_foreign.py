"""Publishers that know nothing of Relatum, and what release 0.4 recorded of them; what is expected is by hand."""

import gzip
import os
import shutil
import struct
import subprocess
import zlib
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pika
import psycopg
import pytest

import relatum_migrations
from relatum.keys import KeyDefinition
from relatum.reading import StreamReader
from relatum.recording import backfill, status, verify
from relatum.store.catalog import add_keys, ensure_stream
from relatum.store.coverage import add_ranges, new_tail
from relatum.store.database import as_engine
from relatum.superstreams import StreamOptions
from relatum.tapping import tap
from relatum_consumer import Relations, Status
from tests.support import broker_connection, delete_stream, new_streams, unique_name, wait_until
from tests.support._raw_publisher import Batch, RawPublisher, uncompressed
from tests.support.amqp import listed, mapped, section, text
from tests.support.databases import make_release_0_4
from tests.support.place import Place

KEYS = ["order_id"]
NULL = b"\x40"


def headed(value: bytes, *more: bytes) -> bytes:
    """A message with the header `order_id`, and a body."""
    return section(0x74, mapped(text("order_id"), value, *more)) + section(0x75, b"\xa0\x04body")


def nested(depth: int) -> bytes:
    """A list in a list, and so on; each level is 9 bytes longer than the one within."""
    heads = [b"\xd0" + struct.pack(">II", 9 * level + 4 + 1, 1) for level in range(depth)]
    return b"".join(reversed(heads)) + NULL


def in_batch(values: list[str]) -> Batch:
    """A sub-entry batch of messages with those order ids."""
    return uncompressed([headed(text(value)) for value in values])


def zipped(batch: Batch) -> Batch:
    _, count, size, content = batch
    return 1, count, size, gzip.compress(content)


def recorded_values(place: Place) -> dict[int, str]:
    """Record the stream to its end with the key `order_id`; each offset that has a row, once, with its value."""
    place.record()
    rows = [(offset, value) for key, value, offset in place.rows() if key == "order_id"]
    assert len({offset for offset, _ in rows}) == len(rows)
    return dict(rows)


OF_AMQP_091: list[tuple[Any, str | None]] = [
    ("plain", "plain"),
    ("", ""),
    ("ünï\U0001f600", "ünï\U0001f600"),
    ("x" * 300, "x" * 300),
    ("x" * 1024, "x" * 1024),
    ("x" * 1025, None),
    ("tab\tnew\nline\\back\\N\\.", "tab\tnew\nline\\back\\N\\."),
    ("nul\0", None),
    (b"bytes", "bytes"),
    (b"\xff\xfe", None),
    (42, "42"),
    (-(2**63), str(-(2**63))),
    (True, "true"),
    (False, "false"),
    (None, None),
    (datetime(2020, 1, 1, tzinfo=UTC), None),
    ({"a": {"b": 1}}, None),
    (["a", 1], None),
]


OF_AMQP_10: list[tuple[bytes, str | None]] = [
    # A lone surrogate.
    (headed(b"\x73\0\0\xd8\0"), None),
    (headed(text("plain")), "plain"),
    (headed(b"\xa3\x03sym"), "sym"),
    (headed(b"\xa0\x03bin"), "bin"),
    (headed(b"\x73\0\0\0\x41"), "A"),
    (headed(b"\x41"), "true"),
    (headed(b"\x56\0"), "false"),
    (headed(b"\x44"), "0"),
    (headed(b"\x53\xff"), "255"),
    (headed(b"\x55\xff"), "-1"),
    (headed(b"\x80" + b"\xff" * 8), None),
    (headed(b"\x81" + b"\xff" * 8), "-1"),
    (headed(b"\x98" + bytes(range(16))), "urn:uuid:00010203-0405-0607-0809-0a0b0c0d0e0f"),
    (headed(b"\x72" + b"\0" * 4), None),
    (headed(b"\x82" + b"\0" * 8), None),
    (headed(b"\x94" + b"\0" * 16), None),
    (headed(b"\x83" + struct.pack(">q", 1_600_000_000_000)), None),
    (headed(b"\x83" + struct.pack(">q", 2**63 - 1)), None),
    (headed(listed(text("a"))), None),
    (headed(mapped(text("a"), NULL)), None),
    (headed(b"\xe0\x05\x02\xa1\x01a\x01"), None),
    (headed(nested(2000)), None),
    (headed(text("deep"), text("other"), nested(2000)), "deep"),
    (headed(b"\0\xa3\x01t" + text("described")), "described"),
    (headed(NULL), None),
    (headed(b"\xb1\0\0\0\x02\xff\xfe"), None),
    (headed(text("first"), text("order_id"), text("last")), "last"),
    (headed(text("wide"), text("huge"), text("x" * 500_000)), "wide"),
    (headed(text("many"), *[item for n in range(5000) for item in (text(f"h{n}"), NULL)]), "many"),
    (headed(text("keys"), b"\x55\x01", text("a key that is a number")), "keys"),
    (b"\0\x80" + struct.pack(">Q", 0x74) + mapped(text("order_id"), text("long descriptor")), "long descriptor"),
    (b"\0\xa3\x1famqp:application-properties:map" + mapped(text("order_id"), text("symbol")), "symbol"),
    (headed(text("value")) + b"\0\x53\x77" + text("an amqp-value body"), "value"),
    (b"\0\x53\x74\xc1\xff\xff broken", None),
    (b"\0\x53\x75\xa0\x04body", None),
    (b"not AMQP at all", None),
    (b"\0\x53\x74", None),
    (b"", None),
    (headed(text("end")), "end"),
]


def test_values_of_every_type_that_both_protocols_have(place: Place) -> None:
    """Text, numbers and truth values are keys; whatever else a client writes is covered without a row."""
    place.put(*[(b"", {"order_id": value}) for value, _ in OF_AMQP_091])
    with RawPublisher(place.stream_url, place.stream) as publisher:
        for message, _ in OF_AMQP_10:
            publisher.publish(message)
    values = [value for _, value in OF_AMQP_091] + [value for _, value in OF_AMQP_10]
    assert recorded_values(place) == {offset: value for offset, value in enumerate(values) if value is not None}


def test_sub_entry_batches_and_single_messages_mixed(place: Place) -> None:
    """Each record of a batch has the offset the broker counts for it; what cannot be unpacked is covered too."""
    values = [f"v{n}" for n in range(200)]
    with RawPublisher(place.stream_url, place.stream) as publisher:
        publisher.publish(in_batch(values[:50]), headed(text(values[50])), zipped(in_batch(values[51:100])))
        publisher.publish((1, 3, 50, b"not gzip"))
        publisher.publish(*[zipped(in_batch(values[n : n + 20])) for n in range(100, 200, 20)])
    expected = dict(enumerate(values[:100])) | dict(enumerate(values[100:], start=103))
    assert recorded_values(place) == expected
    (found,) = status(place.amqp, place.database, [place.stream])
    assert (found.gaps, found.skipped[""]) == ([], {"undecodable_message": 3})


NO_RECORD: Batch = (0, 0, 0, b"")


@pytest.mark.parametrize("before", [0, 3])
def test_batches_of_no_record(place: Place, before: int) -> None:
    """The broker accepts them without an offset: readers skip them, first, last, and among others."""
    values = [f"v{n}" for n in range(before + 4)]
    with RawPublisher(place.stream_url, place.stream) as publisher, StreamReader.open(place.stream_url) as reader:
        for value in values[:before]:
            publisher.publish(headed(text(value)))
        publisher.publish(NO_RECORD)
        last = before - 1 if before else None
        assert reader.bounds(place.stream).last == last
        assert [message.offset for message in reader.iterate(place.stream)] == list(range(before))
        assert recorded_values(place) == dict(enumerate(values[:before]))
        publisher.publish(NO_RECORD, NO_RECORD, awaits=False)
        publisher.publish(in_batch(values[before : before + 2]), NO_RECORD, awaits=False)
        publisher.publish(NO_RECORD, headed(text(values[-2])), headed(text(values[-1])), awaits=False)
        publisher.publish(NO_RECORD, awaits=False)
        wait_until(lambda: reader.bounds(place.stream).last == len(values) - 1, what="all messages")
        expected = dict(enumerate(values))
        assert recorded_values(place) == expected
        assert [message.offset for message in reader.iterate(place.stream)] == list(expected)
        assert [reader.read(place.stream, offset).headers["order_id"] for offset in expected] == values
        places = [(place.stream, offset) for offset in reversed(expected)]
        assert [message.offset for message in reader.read_many(places)] == list(reversed(expected))
    assert verify(place.amqp, place.database, [place.stream]).ok
    with Relations(place.amqp, place.database) as relations:
        assert [relations.find("order_id", value).ids for value in values] == [((place.stream, n),) for n in expected]
        assert relations.find("order_id", "nobody's").status is Status.ABSENT


def test_recording_begins_inside_a_sub_entry_batch(place: Place) -> None:
    """What comes before in the same batch is not recorded twice, nor forgotten by a back-fill."""
    values, starts = [f"v{n}" for n in range(100)], (1, 49, 50, 51, 99)
    (key,) = add_keys(place.engine, ["order_id"])
    with new_streams(place.amqp, len(starts)) as streams:
        for stream, start in zip(streams, starts, strict=True):
            with RawPublisher(place.stream_url, stream) as publisher:
                publisher.publish(in_batch(values[:50]), zipped(in_batch(values[50:])))
            with place.engine.begin() as connection:
                stream_id = ensure_stream(connection, "/", stream).stream_id
                add_ranges(connection, [new_tail(stream_id, start, [key.key_id], with_time=True)])
        rows = [("order_id", value, offset) for offset, value in enumerate(values)]
        for is_backfilled in (False, True):
            place.record(*streams)
            for stream, start in zip(streams, starts, strict=True):
                assert place.rows(stream) == rows[0 if is_backfilled else start :]
                if not is_backfilled:
                    assert backfill(place.amqp, place.database, stream).messages == start
        assert verify(place.amqp, place.database, streams).ok


def test_offsets_that_the_broker_takes_for_itself(place: Place) -> None:
    """A consumer's stored offset takes an offset of the stream; the coverage goes across, and misses stay honest."""
    with RawPublisher(place.stream_url, place.stream) as publisher, StreamReader.open(place.stream_url) as reader:
        for n in range(5):
            before = reader.bounds(place.stream).last
            publisher.store_offset("consumer", n)
            publisher.publish(headed(text(f"v{n}")))
            assert reader.bounds(place.stream).last != before
        offsets = [message.offset for message in reader.iterate(place.stream)]
    assert offsets != list(range(5)), "the test makes gaps"
    assert recorded_values(place) == dict(zip(offsets, [f"v{n}" for n in range(5)], strict=True))
    with Relations(place.amqp, place.database) as relations:
        assert relations.find("order_id", "nobody's").status is Status.ABSENT


def test_a_receipt_nobody_can_wait_for(place: Place) -> None:
    """Anybody may ask for a receipt, by any message id, which AMQP 1.0 does not bound; the recorder continues."""
    for message_id in ("nul\0", "x" * 255):
        headers = {"relatum_receipt": True, "order_id": "v"}
        place.put((b"", pika.BasicProperties(message_id=message_id, headers=headers)))
    noise = "".join(f"{n * 2654435761 % 2**32:08x}" for n in range(2500))
    message = b"\0\x53\x73" + listed(text(noise)) + headed(text("v"), text("relatum_receipt"), b"\x41")
    with RawPublisher(place.stream_url, place.stream) as publisher:
        publisher.publish(message)
    place.record(keys=[*KEYS, KeyDefinition("by_id", source="property:message_id")])
    assert place.rows() == [("order_id", "v", 0), ("by_id", "x" * 255, 1), ("order_id", "v", 1), ("order_id", "v", 2)]


def test_a_time_header_that_is_no_time(place: Place) -> None:
    """The property `timestamp` counts then, for the recorder as for readers, so the row agrees with the message."""
    stamps: list[Any] = [2**62, -(2**63), "soon", True, None]
    for stamp in stamps:
        headers = {"relatum_time": stamp, "order_id": "v"}
        place.put((b"", pika.BasicProperties(timestamp=1_600_000_000, headers=headers)))
    assert recorded_values(place) == dict.fromkeys(range(len(stamps)), "v")
    with Relations(place.amqp, place.database) as relations:
        messages = relations.find("order_id", "v")
    assert [message.time for message in messages] == [datetime.fromtimestamp(1_600_000_000, UTC)] * len(stamps)


TOLD = """
    INSERT INTO relatum.keys (name, sources, type) VALUES ('order_id', '{header:order_id}', 'text');
    INSERT INTO relatum.streams (name) VALUES ('NAME');
    INSERT INTO relatum.coverage
        (stream_id, from_offset, to_offset, key_ids, with_time, is_tail, last_offset, last_fingerprint)
        SELECT stream_id, 0, 5, ARRAY[key_id], false, true, 4, FINGERPRINT FROM relatum.streams, relatum.keys;
    INSERT INTO relatum.relationships (stream_id, stream_offset, key_id, value)
        SELECT stream_id, told.* FROM relatum.streams, relatum.keys,
        LATERAL (VALUES (0, key_id, '42'), (1, key_id, 'seen'), (4, key_id, 'last')) AS told;
"""
"""What a recorder of it wrote. RabbitMQ shows the number 42.7 as 42 over AMQP 0.9.1, and compressed batches not at all;
both as seen with 0.4 and RabbitMQ 4."""


def test_what_release_0_4_recorded_is_unproven_and_later_right(empty_database_url: str, place: Place) -> None:
    """What 0.4 recorded gives no wrong answer and proves no absence, until a recorder records it again."""
    stream, not_yet = place.stream, Status.NOT_RECORDED_YET
    number = b"\x82" + struct.pack(">d", 42.7)
    with RawPublisher(place.stream_url, stream) as publisher:
        publisher.publish(headed(number), headed(text("seen")), zipped(in_batch(["b", "c"])), headed(text("last")))
    make_release_0_4(empty_database_url)
    fingerprint = zlib.crc32(b"body", zlib.crc32(b"\0"))
    with psycopg.connect(empty_database_url) as connection:
        connection.execute(TOLD.replace("NAME", stream).replace("FINGERPRINT", str(fingerprint)).encode())
    relatum_migrations.upgrade(empty_database_url)
    with as_engine(empty_database_url) as engine, Relations(place.amqp, empty_database_url) as relations:
        old = replace(place, database=empty_database_url, engine=engine)
        assert relations.find("order_id", "seen").ids == ((stream, 1),)
        wrong = relations.find("order_id", "42")
        assert (wrong.status, wrong.ids, wrong.unread) == (not_yet, (), ((stream, 0),))
        assert relations.find("order_id", "42", complete=True).status is Status.UNPROVEN
        assert relations.find("order_id", "42", limit=1).status is not_yet
        assert relations.find("order_id", "b").status is not_yet
        assert relations.find("order_id", "b", complete=True).ids == ((stream, 2),)
        assert relations.before(relations.read(stream, 4), stream, by="order_id").status is not_yet
        trace = relations.trace(("order_id", "42"))
        assert (trace.status, trace.messages, trace.unread) == (not_yet, (), ((stream, 0),))

        over_amqp = "SELECT FROM relatum.coverage WHERE over_amqp AND from_offset < to_offset"
        with old.recording(keys=()):
            wait_until(lambda: not old.sql(over_amqp), what="all over the stream protocol")
        assert [row[1:] for row in old.rows()] == [("seen", 1), ("b", 2), ("c", 3), ("last", 4)]
        assert relations.find("order_id", "42").status is Status.ABSENT
        assert relations.find("order_id", "c").ids == ((stream, 3),)
        assert relations.trace(("order_id", "42")).status is Status.ABSENT


SMALL = StreamOptions(max_length_bytes=10_000_000)
PROGRAM = Path(__file__).parents[1] / "support" / "java" / "Publisher.java"
CLIENT = os.environ.get("RELATUM_AMQP_CLIENT_JAR", "/usr/share/java/amqp-client.jar")
JARS = [Path(CLIENT), Path("/usr/share/java/slf4j-api.jar")]
ORDERS = 20


@pytest.mark.rare
@pytest.mark.skipif(
    not (shutil.which("java") and shutil.which("javac") and all(jar.exists() for jar in JARS)),
    reason="there is no JDK or no RabbitMQ client for Java: tools/install java-client installs them",
)
def test_a_java_publisher_is_found_as_it_is(place: Place) -> None:
    """Its confirms come, its queue has its messages, and each is found by text, number, and what Java makes of both."""
    name = unique_name("java")
    stream = f"{name}.copied"
    keys: list[str | KeyDefinition] = ["customer", "paid"]
    keys += [KeyDefinition("order_id", type="integer"), KeyDefinition("cents", type="integer")]
    with broker_connection(place.amqp) as connection:
        channel = connection.channel()
        channel.queue_declare(name, durable=True)
        channel.exchange_declare(name, "topic", durable=True)
        channel.queue_bind(name, name, "order.#")
        tap(place.amqp, place.database, name, stream=stream, options=SMALL)
        command = ["java", "-XX:TieredStopAtLevel=1", "-cp", os.pathsep.join(map(str, JARS)), str(PROGRAM)]
        command += [place.amqp.rstrip("/") + "/%2f", name, "order.new", str(ORDERS)]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert ended.returncode == 0, ended.stderr
        assert channel.queue_delete(name).method.message_count == ORDERS
        channel.exchange_delete(name)
    place.record(stream, keys=keys)
    with Relations(place.amqp, place.database) as relations:
        (order,) = relations.find("order_id", 7)
        assert (order.body, order.properties.correlation_id) == (b"order 7", "order-7")
        assert order.headers["rate"] == 0.1
        assert relations.find("cents", 1234567890123 + 7).first == order
        assert len(list(relations.find("customer", "Müller & Söhne"))) == ORDERS
        assert len(list(relations.related(order, by="paid"))) == ORDERS // 2 - 1
        assert [message.id for message in relations.trace(order, by="order_id").messages] == [order.id]
    delete_stream(place.amqp, stream)
