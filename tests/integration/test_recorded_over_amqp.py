"""What release 0.4 recorded over AMQP 0.9.1: it proves nothing, and is recorded anew by the stream protocol."""

import struct
import zlib
from collections.abc import Iterator

import psycopg
import pytest
import sqlalchemy as sa

import relatum_migrations
from relatum.store import make_engine
from relatum_consumer import Relations, Status
from tests.integration.test_foreign import headed, in_batch, text, zipped
from tests.support import recording, rows_of, wait_until
from tests.support._raw_publisher import RawPublisher
from tests.support.place import Place
from tests.support.relations import FACES, open_relations
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


@pytest.fixture
def recorded_url(empty_database_url: str, place: Place) -> Iterator[str]:
    """A database of 0.4, with a stream that it recorded over AMQP 0.9.1, migrated."""
    number = b"\x82" + struct.pack(">d", 42.7)
    with RawPublisher(place.stream_url, place.stream) as publisher:
        publisher.publish(headed(number), headed(text("seen")), zipped(in_batch(["b", "c"])), headed(text("last")))
    make_release_0_4(empty_database_url)
    fingerprint = zlib.crc32(b"body", zlib.crc32(b"\0"))
    with psycopg.connect(empty_database_url) as connection:
        connection.execute(TOLD.replace("NAME", place.stream).replace("FINGERPRINT", str(fingerprint)))  # type: ignore[arg-type]
    relatum_migrations.upgrade(empty_database_url)
    return empty_database_url


@pytest.fixture
def old_engine(recorded_url: str) -> Iterator[sa.Engine]:
    """The same database."""
    engine = make_engine(recorded_url)
    yield engine
    engine.dispose()


@pytest.fixture(params=FACES)
def of_old(request: pytest.FixtureRequest, amqp_url: str, recorded_url: str) -> Iterator[Relations]:
    """Look-ups in it, through each face."""
    with open_relations(request.param, amqp_url, recorded_url) as relations:
        yield relations


def test_it_is_unproven_and_later_right(place: Place, old_engine: sa.Engine, of_old: Relations) -> None:
    """Nothing wrong is found, nothing is absent, and no stream is called another; a recorder puts all right."""
    assert of_old.find("order_id", "seen").ids == ((place.stream, 1),)
    wrong = of_old.find("order_id", "42")
    assert (wrong.status, wrong.ids, wrong.unread) == (Status.NOT_RECORDED_YET, (), ((place.stream, 0),))
    assert of_old.find("order_id", "42", complete=True).status is Status.UNPROVEN
    assert of_old.find("order_id", "42", limit=1).status is Status.NOT_RECORDED_YET
    assert of_old.find("order_id", "b").status is Status.NOT_RECORDED_YET
    assert of_old.find("order_id", "b", complete=True).ids == ((place.stream, 2),)
    assert of_old.before(of_old.read(place.stream, 4), place.stream, by="order_id").status is Status.NOT_RECORDED_YET
    trace = of_old.trace(("order_id", "42"))
    assert (trace.status, trace.messages, trace.unread) == (Status.NOT_RECORDED_YET, (), ((place.stream, 0),))

    with recording(place.amqp, old_engine, place.stream):
        wait_until(lambda: not over_amqp(old_engine), what="all by the stream protocol")
    assert [row[1:] for row in rows_of(old_engine, place.stream)] == [("seen", 1), ("b", 2), ("c", 3), ("last", 4)]
    assert of_old.find("order_id", "42").status is Status.ABSENT
    assert of_old.find("order_id", "c").ids == ((place.stream, 3),)
    assert of_old.trace(("order_id", "42")).status is Status.ABSENT


def over_amqp(engine: sa.Engine) -> bool:
    """Whether a range is left that was recorded so."""
    with engine.connect() as connection:
        query = "SELECT EXISTS (SELECT FROM relatum.coverage WHERE over_amqp AND from_offset < to_offset)"
        return bool(connection.execute(sa.text(query)).scalar_one())
