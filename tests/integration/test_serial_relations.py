"""The relationship table and contexts that move: lookups by the context's header find both sides, in order."""

import time

import pika
import sqlalchemy as sa

import relatum
from relatum import Broker, ContextRouter
from relatum.contexts import SerializationContexts, verify
from relatum.contexts._partition_log import Adoption, encode
from relatum_consumer import Relations
from tests.support import publish_plain, reader_of, recording, rows_of, wait_recorded

PARTITIONS = 2
KEY = "serialization_context"
MESSAGES = 6
"""Messages before each of the two moves and behind them."""


def test_look_ups_find_a_context_on_both_sides_of_its_moves(
    amqp_url: str, broker: Broker, database_url: str, engine: sa.Engine, contexts: SerializationContexts
) -> None:
    """A lookup by the context's header gives every message once, in order over its moves, and nothing of the moves."""
    super_stream = contexts.super_stream
    streams = [f"{super_stream}-{place}" for place in range(2)]
    connection = pika.BlockingConnection(pika.URLParameters(amqp_url))
    relatum.intercept(connection, database=database_url, keys=[KEY])
    channel = connection.channel()
    channel.confirm_delivery()
    names = iter(range(10 * MESSAGES))

    def publish(router: ContextRouter, count: int) -> None:
        for number in [next(names) for _ in range(count)]:
            for context in ("plane", "other"):
                properties = pika.BasicProperties(message_id=f"{context}-{number}", headers={KEY: context})
                channel.basic_publish(router, "", b"", properties)

    with (
        recording(amqp_url, engine, *streams, keys=[KEY]),
        ContextRouter(super_stream, database_url, broker=broker) as router,
    ):
        contexts.assign("plane", streams[0])
        publish(router, MESSAGES)
        epoch = contexts.assignment_of("plane").epoch
        contexts.move("plane", streams[1])
        # A message of a router that was suspended since before the move.
        headers = {KEY: "plane", "relatum_placed": f"{epoch}-{'f' * 16}-1", "relatum_time": time.time_ns() // 1000}
        properties = pika.BasicProperties(message_id=f"plane-{next(names)}", headers=headers)
        publish_plain(amqp_url, streams[0], [(b"", properties)])
        with reader_of(amqp_url) as reader:
            stray = reader.bounds(streams[0]).last
        assert stray is not None
        adopting, body = encode(Adoption("plane", contexts.assignment_of("plane").epoch, streams[0], stray))
        publish_plain(amqp_url, streams[1], [(body, adopting)])
        publish(router, MESSAGES)
        contexts.move("plane", streams[0])
        publish(router, MESSAGES)
        for stream in streams:
            wait_recorded(amqp_url, engine, stream)
    relatum.release(connection)
    connection.close()
    assert verify(super_stream, broker=broker, database=engine.url).ok
    expected = [f"plane-{number}" for number in range(3 * MESSAGES + 1)]
    with Relations(broker=broker, database=database_url) as relations:
        found = relations.find(KEY, "plane", streams=[super_stream])
        assert [message.properties.message_id for message in found] == expected
        related = relations.related(found[0], super_stream, by=KEY)
        assert [message.properties.message_id for message in related] == expected[1:]
        first = relations.find(KEY, "plane", streams=[super_stream], order="newest", limit=1)
        assert [message.properties.message_id for message in first] == expected[-1:]
    rows = [row for stream in streams for row in rows_of(engine, stream)]
    assert {(key, value) for key, value, _ in rows} == {(KEY, "plane"), (KEY, "other")}
    assert len(rows) == len(expected) + 3 * MESSAGES, "no fence, marker or adoption has a row"
