"""What release 0.4 recorded over AMQP 0.9.1: it proves nothing, and is recorded anew by the stream protocol."""

import struct
import zlib
from dataclasses import replace

import psycopg

import relatum_migrations
from relatum.store.database import as_engine
from relatum_consumer import Relations, Status
from tests.integration.test_foreign import headed, in_batch, text, zipped
from tests.support import wait_until
from tests.support._raw_publisher import RawPublisher
from tests.support.place import Place
from tests.support.release_0_4 import make_release_0_4

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


def test_it_is_unproven_and_later_right(empty_database_url: str, place: Place) -> None:
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
        with old.recording():
            wait_until(lambda: not old.sql(over_amqp), what="all by the stream protocol")
        assert [row[1:] for row in old.rows()] == [("seen", 1), ("b", 2), ("c", 3), ("last", 4)]
        assert relations.find("order_id", "42").status is Status.ABSENT
        assert relations.find("order_id", "c").ids == ((stream, 3),)
        assert relations.trace(("order_id", "42")).status is Status.ABSENT
