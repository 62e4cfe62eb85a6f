"""`verify` and lookups of contexts that move, on real partitions and a real database."""

import json
import time
from functools import partial
from typing import Any

import pika
import psycopg
import pytest
from pika.adapters.blocking_connection import BlockingChannel

import relatum
from relatum import Broker, ContextRouter
from relatum.contexts import FindingKind, SerializationContexts, verify
from relatum.contexts._partition_log import Adoption, encode
from relatum.errors import SuperStreamNotFound
from relatum.reading import StreamReader
from relatum_consumer import Relations
from tests.support import broker_connection, declare_stream, delete_stream, publish_plain, wait_until
from tests.support._streams import Plain
from tests.support.place import Place

A = "a" * 16
PARTITIONS = 2


def partitions_of(name: str) -> list[str]:
    return [f"{name}-{place}" for place in range(2)]


def placed(context: str, epoch: int, number: int) -> Plain:
    return b"%d" % number, {"serialization_context": context, "relatum_placed": f"{epoch}-{A}-{number}"}


def control(kind: str, **facts: Any) -> Plain:
    """A fence, a marker or an adoption as the streams hold it."""
    return json.dumps(facts).encode(), {"relatum_control": kind}


def test_a_move_is_read_in_its_order(amqp_url: str, broker: Broker, super_stream: str) -> None:
    """`verify` counts a context's messages in order over its moves, and names what is wrong, and where."""
    with pytest.raises(SuperStreamNotFound, match="relatum super-stream declare no-such-super-stream") as caught:
        verify("no-such-super-stream", broker=broker)
    assert caught.value.super_stream == "no-such-super-stream"
    assert verify(super_stream, broker=broker).messages == 0
    source, target = partitions_of(super_stream)
    # The context "plane" moves from the first partition to the second; its stray is adopted.
    fence = control("fence", move_id=1, epoch=2, contexts=["plane"])
    publish_plain(amqp_url, source, [placed("plane", 1, 1), placed("other", 5, 2), fence, placed("plane", 1, 3)])
    marker = control("marker", move_id=1, epoch=2, contexts=["plane"], source=source, fence_offset=2)
    adoption = control("adoption", context="plane", epoch=2, stream=source, offset=3)
    publish_plain(amqp_url, target, [marker, adoption, placed("plane", 2, 4)])
    report = verify(super_stream, broker=broker)
    assert report.ok
    assert report.findings == []
    assert (report.messages, report.contexts, report.strays, report.adopted, report.moves) == (4, 2, 1, 1, 1)
    assert report.partitions == {source: (0, 4), target: (0, 3)}
    publish_plain(amqp_url, target, [placed("plane", 2, 4)])
    report = verify(super_stream, broker=broker)
    assert not report.ok
    assert [(each.kind, each.stream, each.offset, each.context) for each in report.findings] == [
        (FindingKind.DISORDER, target, 3, "plane")
    ]


def has_lost_some(reader: StreamReader, stream: str) -> bool:
    return bool(reader.bounds(stream).first)


INSERT = """
WITH s AS (INSERT INTO relatum.super_streams (name, header) VALUES (%(name)s, 'plane') RETURNING super_stream_id),
     p AS (INSERT INTO relatum.super_stream_partitions (super_stream_id, stream, binding_key, place, state)
           SELECT super_stream_id, stream, stream, place, state
           FROM s, (VALUES (%(source)s, 0, 'active'), (%(gone)s, 1, 'retired'), (%(target)s, 2, 'retired'))
               AS v (stream, place, state)
           RETURNING super_stream_id, partition_id, stream),
     m AS (INSERT INTO relatum.context_moves (super_stream_id, source_id, target_id, state, contexts, fence_epoch,
               epoch, scan_from, target_scan_from, fence_offset, marker_offset, ended_at, generation)
           SELECT s.super_stream_id, s.partition_id, t.partition_id, 'switched', 1, %(epoch)s, %(epoch)s,
               0, 0, 0, 0, now(), 0
           FROM p AS s, p AS t WHERE s.stream = %(source)s AND t.stream = %(target)s RETURNING move_id)
INSERT INTO relatum.moved_contexts (move_id, name, from_epoch) SELECT move_id, 'N1', 1 FROM m
"""
"""A super stream in the database whose third partition is retired, and one move at the first offset of both others."""


def test_the_database_says_what_the_streams_do_not(place: Place, super_stream: str) -> None:
    """Another header, retired partitions, deleted ones, and fences that retention has dropped."""
    source, target = partitions_of(super_stream)
    with psycopg.connect(place.database) as connection:
        names = {"name": super_stream, "source": source, "target": target, "gone": "deleted", "epoch": 7}
        connection.execute(INSERT, names)
    for stream in (source, target):
        delete_stream(place.amqp, stream)
        declare_stream(place.amqp, stream, x_max_length_bytes=200_000, x_stream_max_segment_size_bytes=50_000)
        publish_plain(place.amqp, stream, [b"x" * 20_000] * 40)
        with StreamReader.open(place.broker) as reader:
            wait_until(partial(has_lost_some, reader, stream), what="retention")
        publish_plain(place.amqp, stream, [(b"", {"plane": "N1", "relatum_placed": f"3-{A}-1"})])
    with broker_connection(place.amqp) as connection:
        # The other one is no longer bound: it is retired.
        connection.channel().queue_bind(source, super_stream, "0", {"x-stream-partition-order": 0})
    report = verify(super_stream, broker=place.broker, database=place.database)
    assert report.header == "plane"
    assert list(report.partitions) == [source, target]
    assert report.strays == 2
    alone = verify(super_stream, broker=place.broker, header="plane")
    assert (list(alone.partitions), alone.strays) == ([source], 0)


KEY = "serialization_context"
MESSAGES = 6
"""Messages before each of the two moves and behind them."""


def test_look_ups_find_a_context_on_both_sides_of_its_moves(
    place: Place, contexts: SerializationContexts, channel: BlockingChannel
) -> None:
    """A lookup by the context's header gives every message once, in order over its moves, and nothing of the moves."""
    super_stream = contexts.super_stream
    streams = partitions_of(super_stream)
    relatum.intercept(channel.connection, database=place.database, keys=[KEY])
    names = iter(range(10 * MESSAGES))

    def publish(router: ContextRouter, count: int) -> None:
        for number in [next(names) for _ in range(count)]:
            for context in ("plane", "other"):
                properties = pika.BasicProperties(message_id=f"{context}-{number}", headers={KEY: context})
                channel.basic_publish(router, "", b"", properties)

    with (
        place.recording(*streams, keys=[KEY]),
        ContextRouter(super_stream, place.database, broker=place.broker) as router,
    ):
        contexts.assign("plane", streams[0])
        publish(router, MESSAGES)
        epoch = contexts.assignment_of("plane").epoch
        contexts.move("plane", streams[1])
        # A message of a router that was suspended since before the move.
        headers = {KEY: "plane", "relatum_placed": f"{epoch}-{'f' * 16}-1", "relatum_time": time.time_ns() // 1000}
        properties = pika.BasicProperties(message_id=f"plane-{next(names)}", headers=headers)
        place.put((b"", properties), to=streams[0])
        stray = place.messages(streams[0])[-1].offset
        adopting, body = encode(Adoption("plane", contexts.assignment_of("plane").epoch, streams[0], stray))
        place.put((body, adopting), to=streams[1])
        publish(router, MESSAGES)
        contexts.move("plane", streams[0])
        publish(router, MESSAGES)
        for stream in streams:
            place.wait_recorded(stream)
    relatum.release(channel.connection)
    assert verify(super_stream, broker=place.broker, database=place.database).ok
    expected = [f"plane-{number}" for number in range(3 * MESSAGES + 1)]
    with Relations(place.broker, place.database) as relations:
        found = relations.find(KEY, "plane", streams=[super_stream])
        assert [message.properties.message_id for message in found] == expected
        related = relations.related(found[0], super_stream, by=KEY)
        assert [message.properties.message_id for message in related] == expected[1:]
        first = relations.find(KEY, "plane", streams=[super_stream], order="newest", limit=1)
        assert [message.properties.message_id for message in first] == expected[-1:]
    rows = [row for stream in streams for row in place.rows(stream)]
    assert {(key, value) for key, value, _ in rows} == {(KEY, "plane"), (KEY, "other")}
    assert len(rows) == len(expected) + 3 * MESSAGES, "no fence, marker or adoption has a row"
