"""What is uncovered and still in the stream is always somebody's work."""

import sys
from typing import Any

import cramjam
import pytest
import sqlalchemy as sa

from relatum.reading import StreamReader
from relatum.recording import backfill, plan_backfill, status
from relatum.wire._unpacking import _cramjam
from tests.integration.test_foreign import headed, in_batch, text
from tests.support import (
    declare_stream,
    delete_stream,
    publish_plain,
    record,
    recording,
    rows_of,
    wait_recorded,
    wait_until,
)
from tests.support._raw_publisher import RawPublisher


def orders(count: int, start: int = 0) -> list[tuple[bytes, dict[str, Any]]]:
    """Numbered orders."""
    return [(b"%d" % n, {"order_id": f"o{n}"}) for n in range(start, start + count)]


def test_a_gap_that_an_interrupted_back_fill_left_is_shown_and_closed(
    amqp_url: str, engine: sa.Engine, stream_name: str
) -> None:
    """Killed after it moved the tail to the stream's end: lag and status say so, and the next recorder closes it."""
    publish_plain(amqp_url, stream_name, orders(60))
    record(amqp_url, engine, stream_name, keys=["order_id"])
    publish_plain(amqp_url, stream_name, orders(100, start=60))
    with StreamReader.open(amqp_url) as reader:
        plan_backfill(engine, reader, "/", stream_name, None)
    (seen,) = status(amqp_url, engine.url, [stream_name])
    assert (seen.gaps, seen.lag_offsets) == ([(60, 160)], 100)
    assert seen.lag_s is not None
    assert seen.lag_s > 0
    with recording(amqp_url, engine, stream_name):
        publish_plain(amqp_url, stream_name, orders(5, start=160))
        wait_until(lambda: not status(amqp_url, engine.url, [stream_name])[0].lag_offsets, what="no gap")
    assert [value for _, value, _ in rows_of(engine, stream_name)] == [f"o{n}" for n in range(165)]


def test_a_batch_that_cannot_be_unpacked_is_not_covered_until_it_can(
    amqp_url: str, stream_url: str, engine: sa.Engine, stream_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without its codec a batch stops nobody and proves nothing absent; with it, the recorder closes the gap."""
    _, count, size, content = in_batch(["b", "c"])
    batch = (4, count, size, bytes(cramjam.zstd.compress(content)))
    with RawPublisher(stream_url, stream_name) as publisher:
        publisher.publish(headed(text("a")), batch, headed(text("d")))
    monkeypatch.setitem(sys.modules, "cramjam", None)
    _cramjam.cache_clear()
    try:
        with recording(amqp_url, engine, stream_name, keys=["order_id"]):
            wait_recorded(amqp_url, engine, stream_name)
            assert [value for _, value, _ in rows_of(engine, stream_name)] == ["a", "d"]
            (seen,) = status(amqp_url, engine.url, [stream_name])
            assert (seen.gaps, seen.covered["order_id"], seen.lag_offsets) == ([(1, 3)], [(0, 1), (3, 4)], 2)
            (event,) = seen.events
            assert (event.kind, event.from_offset, event.to_offset) == ("unreadable", 1, 3)
            assert "zstd" in event.detail
            backfill(amqp_url, engine.url, stream_name)
            assert status(amqp_url, engine.url, [stream_name])[0].gaps == [(1, 3)]
            monkeypatch.undo()
            _cramjam.cache_clear()
            wait_until(lambda: not status(amqp_url, engine.url, [stream_name])[0].gaps, what="the gap closed")
    finally:
        monkeypatch.undo()
        _cramjam.cache_clear()
    assert [value for _, value, _ in rows_of(engine, stream_name)] == ["a", "b", "c", "d"]


def test_a_broken_batch_stops_nobody(amqp_url: str, stream_url: str, engine: sa.Engine, stream_name: str) -> None:
    """What nobody can ever unpack is counted as skipped, and what comes behind it is recorded."""
    with RawPublisher(stream_url, stream_name) as publisher:
        publisher.publish(headed(text("a")), (1, 2, 10, b"no gzip"), headed(text("d")))
    record(amqp_url, engine, stream_name, keys=["order_id"])
    assert [value for _, value, _ in rows_of(engine, stream_name)] == ["a", "d"]
    (seen,) = status(amqp_url, engine.url, [stream_name])
    assert (seen.gaps, seen.skipped) == ([], {"": {"undecodable_message": 2}})


def test_a_gap_that_cannot_be_closed_keeps_nobody_from_another_streams(
    amqp_url: str, engine: sa.Engine, stream_name: str
) -> None:
    """PostgreSQL refuses what was left of the first stream, again and again; the second one's gap is closed."""
    second = f"{stream_name}-second"
    declare_stream(amqp_url, second)
    names = [stream_name, second]
    for name in names:
        publish_plain(amqp_url, name, orders(5))
    record(amqp_url, engine, *names, keys=["order_id"])
    for name in names:
        publish_plain(amqp_url, name, orders(5, start=5))
    with StreamReader.open(amqp_url) as reader:
        for name in names:
            plan_backfill(engine, reader, "/", name, None)
    with engine.begin() as connection:
        find = sa.text("SELECT stream_id FROM relatum.streams WHERE name = :name")
        stream_id = connection.execute(find, {"name": stream_name}).scalar_one()
        refused = sa.text(f"ALTER TABLE relatum.coverage ADD CHECK (stream_id <> {stream_id} OR is_tail) NOT VALID")
        connection.execute(refused)
    with recording(amqp_url, engine, *names):
        wait_until(lambda: not status(amqp_url, engine.url, [second])[0].lag_offsets, what="no gap")
    assert status(amqp_url, engine.url, [stream_name])[0].gaps == [(5, 10)]
    delete_stream(amqp_url, second)
