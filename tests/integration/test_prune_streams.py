"""Pruning several streams: one that cannot be read stops no other, and unknown names are said to be so."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa

from relatum.errors import DataError, StreamNotFound
from relatum.local import LocalRabbitMQ
from relatum.recording import backfill, prune
from relatum.store import add_keys
from tests.support import START_S, declare_stream, publish_plain

STREAMS = ("a-broken", "b-sound")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[LocalRabbitMQ]:
    """A broker whose files the test may damage."""
    with LocalRabbitMQ(tmp_path / "rabbitmq", start_timeout_s=START_S) as server:
        yield server
    shutil.rmtree(tmp_path / "rabbitmq", ignore_errors=True)


def break_first_chunk(server: LocalRabbitMQ, stream: str) -> None:
    """Change a byte of a stream's first chunk on disk, so that its checksum is wrong."""
    (segment,) = server.data.rglob(f"*{stream}*/*.segment")
    stored = bytearray(segment.read_bytes())
    at = stored.index(b"the body of the first")
    stored[at] ^= 0xFF
    segment.write_bytes(stored)


def test_a_stream_that_cannot_be_read_stops_no_other(server: LocalRabbitMQ, engine: sa.Engine) -> None:
    """What retention dropped of the streams behind it is deleted, and the report says which one failed, and why."""
    add_keys(engine, ["order_id"])
    for stream in STREAMS:
        declare_stream(server.broker_url, stream)
        publish_plain(server.broker_url, stream, [(b"the body of the first", {"order_id": 1})])
        backfill(server.broker_url, engine, stream)
    with engine.begin() as connection:
        # As if retention had dropped them: the streams begin at 0.
        connection.execute(sa.text("UPDATE relatum.relationships SET stream_offset = -1"))
    break_first_chunk(server, STREAMS[0])
    report = prune(server.broker_url, engine, STREAMS)
    assert report.rows == {STREAMS[1]: 1}
    assert list(report.failed) == [STREAMS[0]]
    assert isinstance(report.failed[STREAMS[0]], DataError)


@pytest.mark.differs
def test_a_name_that_is_not_recorded_is_refused_before_anything_is_deleted(
    amqp_url: str, engine: sa.Engine, stream_name: str
) -> None:
    """A name that is spelled wrong beside right ones deletes nothing."""
    add_keys(engine, ["order_id"])
    publish_plain(amqp_url, stream_name, [(b"", {"order_id": 1})])
    backfill(amqp_url, engine, stream_name)
    with engine.begin() as connection:
        connection.execute(sa.text("UPDATE relatum.relationships SET stream_offset = -1"))
    with pytest.raises(StreamNotFound, match="nope"):
        prune(amqp_url, engine, [stream_name, "nope"])
    with engine.connect() as connection:
        assert connection.execute(sa.text("SELECT count(*) FROM relatum.relationships")).scalar_one() == 1
