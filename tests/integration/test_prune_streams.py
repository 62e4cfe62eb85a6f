"""Pruning several streams: one that cannot be read stops no other, and unknown names are said to be so."""

from typing import Any

import pytest
import sqlalchemy as sa

from relatum.errors import DataError, StreamNotFound
from relatum.local import LocalRabbitMQ
from relatum.reading import StreamReader
from relatum.recording import backfill, prune, set_record_time
from relatum.store import Database, add_keys
from tests.support import (
    declare_stream,
    publish_plain,
    wait_until,
)
from tests.support.parts import Parts
from tests.support.place import Place

STREAMS = ("a-broken", "b-sound")


def break_first_chunk(server: LocalRabbitMQ, stream: str) -> None:
    """Change a byte of a stream's first chunk on disk, so that its checksum is wrong."""
    (segment,) = server.data.rglob(f"*{stream}*/*.segment")
    stored = bytearray(segment.read_bytes())
    at = stored.index(b"the body of the first")
    stored[at] ^= 0xFF
    segment.write_bytes(stored)


def test_a_stream_that_cannot_be_read_stops_no_other(own_broker: LocalRabbitMQ, engine: sa.Engine) -> None:
    """What retention dropped of the streams behind it is deleted, and the report says which one failed, and why."""
    url = own_broker.broker_url
    add_keys(engine, ["order_id"])
    for stream in STREAMS:
        declare_stream(url, stream)
        publish_plain(url, stream, [(b"the body of the first", {"order_id": 1})])
        backfill(url, engine.url, stream)
    with engine.begin() as connection:
        # As if retention had dropped them: the streams begin at 0.
        connection.execute(sa.text("UPDATE relatum.relationships SET stream_offset = -1"))
    break_first_chunk(own_broker, STREAMS[0])
    report = prune(url, engine.url, STREAMS)
    assert report.rows == {STREAMS[1]: 1}
    assert list(report.failed) == [STREAMS[0]]
    assert isinstance(report.failed[STREAMS[0]], DataError)


@pytest.mark.differs
def test_a_name_that_is_not_recorded_is_refused_before_anything_is_deleted(place: Place) -> None:
    """A name that is spelled wrong beside right ones deletes nothing."""
    add_keys(place.engine, ["order_id"])
    place.put((b"", {"order_id": 1}))
    place.backfill()
    place.sql("UPDATE relatum.relationships SET stream_offset = -1")
    with pytest.raises(StreamNotFound, match="nope"):
        prune(place.amqp, place.database, [place.stream, "nope"])
    assert place.sql("SELECT count(*) FROM relatum.relationships") == [(1,)]


@pytest.fixture
def dropped_front(fleeting: Place) -> Place:
    """A stream that is known, of which nothing is recorded and whose first messages retention has dropped."""
    add_keys(fleeting.engine, ["order_id"])
    fleeting.put(*[(b"x" * 10_000, {"order_id": 1})] * 60)
    with StreamReader.open(fleeting.amqp) as reader:
        wait_until(lambda: (reader.bounds(fleeting.stream).first or 0) > 3, what="retention")
    set_record_time(fleeting.amqp, fleeting.database, fleeting.stream, on=True)
    return fleeting


"""What is published once the stream was declared anew."""


def declare_anew(place: Place) -> None:
    """The stream deleted, declared again, and recorded: three messages."""
    place.declare_again()
    place.put(*[(b"", {"order_id": number}) for number in range(3)])
    place.record()


@pytest.mark.differs
def test_a_stream_that_is_declared_anew_in_its_midst_keeps_its_rows(dropped_front: Place) -> None:
    """What a recorder took up after the broker was asked is not deleted by what another stream retained."""
    done: list[str] = []

    def declare(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        if statement.startswith("DELETE FROM relatum.relationships") and not done:
            done.append(statement)
            declare_anew(dropped_front)

    pruning = Database(dropped_front.database)
    sa.event.listen(pruning.engine, "before_cursor_execute", declare)
    try:
        prune(dropped_front.amqp, pruning)
    finally:
        pruning.close()
    assert done
    assert [offset for _, _, offset in dropped_front.rows()] == [0, 1, 2]


@pytest.mark.differs
def test_a_part_of_a_stream_that_was_declared_anew_is_not_dropped(dropped_front: Place) -> None:
    """What one stream retained says nothing of the next one of its name, of whose rows a part is full."""
    prune(dropped_front.amqp, dropped_front.database)
    parts = Parts(dropped_front.engine)
    parts.turn()
    declare_anew(dropped_front)
    parts.turn()
    parts.close()
    prune(dropped_front.amqp, dropped_front.database)
    assert [offset for _, _, offset in dropped_front.rows()] == [0, 1, 2]
