"""Publishing through every kind of exchange harms neither broker nor client, and reading leaves nothing behind."""

import logging
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pika
import pytest
import sqlalchemy as sa
from pika.adapters.blocking_connection import BlockingConnection

import relatum
from relatum import Broker, MessageId
from relatum.errors import NotRecordedInTime
from relatum.local import LocalRabbitMQ
from relatum.reading import StreamReader
from relatum.recording.embedded import EmbeddedRecorder
from relatum.store.catalog import streams_named
from tests.contract._clients import Queue
from tests.support import (
    broker_connection,
    declare_stream,
    publish_plain,
    recorded_to,
    recording,
    unique_name,
    wait_until,
)
from tests.support.rabbitmq_tools import evaluate
from tests.support.standstill import in_time

pytestmark = pytest.mark.differs

CRASH = re.compile(r"crash|badrecord|function_clause|badmatch|terminating|INTERNAL_ERROR", re.IGNORECASE)
"""What a broker's log has after a question that it cannot bear."""

EXCHANGES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "direct": ("direct", "key", {}),
    "topic": ("topic", "*", {}),
    "fanout": ("fanout", "", {}),
    "headers": ("headers", "", {}),
    "alternate": ("direct", "never", {"alternate-exchange": "headers"}),
    "hash": ("x-consistent-hash", "1", {}),
    "hash-header": ("x-consistent-hash", "1", {"hash-header": "order_id"}),
    "recent": ("x-recent-history", "key", {}),
    "random": ("x-random", "", {}),
}
"""Name: kind, the key a stream is bound by, arguments."""

ROUTES = [*EXCHANGES, "onwards", "amq.headers", "amq.match"]
"""Exchanges that somebody publishes to; `onwards` leads to `headers` by a binding between the two."""


@pytest.fixture(scope="module")
def server(own_broker: LocalRabbitMQ) -> LocalRabbitMQ:
    """A private broker that has exchanges of every kind, each with a stream of its name in capitals."""
    with broker_connection(own_broker.broker_url) as connection:
        channel = connection.channel()
        for name, (kind, key, arguments) in EXCHANGES.items():
            declare_stream(own_broker.broker_url, name.upper())
            channel.exchange_declare(name, kind, arguments=arguments)
            binding = {"x-match": "all", "order_id": "1"} if kind == "headers" else None
            channel.queue_bind(name.upper(), name, key, binding)
        channel.exchange_declare("onwards", "fanout")
        channel.exchange_bind("headers", "onwards")
        channel.exchange_declare("internal", "fanout", internal=True)
        declare_stream(own_broker.broker_url, "PLAIN")
    return own_broker


@pytest.fixture
def intercepted(server: LocalRabbitMQ, database_url: str) -> Iterator[Callable[..., BlockingConnection]]:
    """Opens a connection and intercepts it; it is released and closed at the end."""
    broker = Broker(server.broker_url, stream_url=server.stream_url)
    with ExitStack() as stack:

        def opened(**options: Any) -> BlockingConnection:
            connection = stack.enter_context(broker_connection(server.broker_url))
            relatum.intercept(connection, database=database_url, broker=broker, **options)
            stack.callback(relatum.release, connection)
            return connection

        yield opened


@pytest.fixture
def bystander(server: LocalRabbitMQ) -> Iterator[Callable[[], None]]:
    """A bare client by both protocols, and what asserts that it has noticed nothing."""
    with broker_connection(server.broker_url) as connection, StreamReader.open(server.stream_url) as reader:
        channel = connection.channel()
        channel.basic_consume(channel.queue_declare("", exclusive=True).method.queue, lambda *_: None, auto_ack=True)
        reader.bounds("PLAIN")
        log = Path(server.directory) / "server.log"
        begin = log.stat().st_size

        def notices_nothing() -> None:
            connection.process_data_events(0)
            assert channel.is_open
            assert reader.bounds("PLAIN")
            written = log.read_bytes()[begin:].decode(errors="replace")
            assert not [line for line in written.splitlines() if CRASH.search(line)]

        yield notices_nothing


def _error_of(connection: BlockingConnection, exchange: Any, key: Any) -> tuple[type[BaseException], str]:
    """The class and the text of the error with which a publish ends."""
    with pytest.raises(Exception) as caught:
        connection.channel().basic_publish(exchange, key, b"")
    return caught.type, str(caught.value)


@pytest.mark.parametrize("recorder", ["embedded", "external"])
def test_every_kind_of_exchange_is_published_to_without_harm(
    server: LocalRabbitMQ,
    bystander: Callable[[], None],
    intercepted: Callable[..., BlockingConnection],
    engine: sa.Engine,
    recorder: Any,
) -> None:
    """Publishing to exchanges of every kind harms no other client, and receipts say where each message was recorded."""
    with recording(server.broker_url, engine, "PLAIN", "TOPIC"):
        connection = intercepted(keys=["order_id"], recorder=recorder)
        channel, properties = connection.channel(), pika.BasicProperties(headers={"order_id": "1"})
        found = {name: relatum.publish(channel, name, "key", b"", properties, mandatory=False) for name in ROUTES}
        for name in ("PLAIN", "nobody"):
            found[name] = relatum.publish(channel, "", name, b"", properties, mandatory=name == "PLAIN")
        for name in ("missing", "internal"):
            with pytest.raises(pika.exceptions.ChannelClosedByBroker):
                relatum.publish(connection.channel(), name, "key", b"")
        places = {name: found[name].wait(90) for name in ("PLAIN", "nobody", "topic")}
        streams = {name: [each.stream for each in where] for name, where in places.items()}
        assert streams == {"PLAIN": ["PLAIN"], "nobody": [], "topic": ["TOPIC"]}
        assert (found["PLAIN"].streams, found["topic"].streams) == ({"PLAIN"}, None)
        if recorder == "embedded":
            for name in ("headers", "fanout", "hash-header", "recent", "random"):
                assert [each.stream for each in found[name].wait(90)] == [name.upper()]
        with pytest.raises(NotRecordedInTime):
            found["amq.headers"].wait(1)
        bystander()
        relatum.release(connection)
    bystander()


def test_a_server_that_answers_over_direct_reply_to_harms_no_client(
    server: LocalRabbitMQ, bystander: Callable[[], None], intercepted: Callable[..., BlockingConnection]
) -> None:
    """A client that waits on direct reply-to gets the answers and nothing else."""
    answers: list[tuple[bytes, Any]] = []
    with broker_connection(server.broker_url) as client_connection:
        client, queue = client_connection.channel(), unique_name("rpc")
        client.queue_declare(queue, auto_delete=True)
        client.basic_consume(
            "amq.rabbitmq.reply-to", lambda _c, _m, properties, body: answers.append((body, properties)), auto_ack=True
        )
        client.basic_publish("", queue, b"ask", pika.BasicProperties(reply_to="amq.rabbitmq.reply-to"))
        channel = intercepted().channel()
        asked, _ = Queue(channel, queue).get()
        channel.basic_publish("", asked.reply_to, b"answer", pika.BasicProperties(correlation_id="1"))
        receipt = relatum.publish(channel, "", asked.reply_to, b"answer again", mandatory=False)
        assert receipt.wait(90) == ()
        relatum.publish(channel, "", "PLAIN", b"").wait(90)

        def has_both() -> bool:
            client_connection.process_data_events(0)
            return len(answers) >= 2

        wait_until(has_both, what="both answers")
        bystander()
        assert [body for body, _ in answers] == [b"answer", b"answer again"]
        assert answers[0][1].correlation_id == "1"
        assert client.is_open


def test_streams_that_cannot_be_found_out_can_be_told(
    intercepted: Callable[..., BlockingConnection], engine: sa.Engine, caplog: pytest.LogCaptureFixture
) -> None:
    """Streams behind chained exchanges are recorded if `streams` names them, and are else reported once."""
    caplog.set_level(logging.INFO, "relatum.recorder")
    properties = pika.BasicProperties(headers={"order_id": "1"})
    channel = intercepted().channel()
    channel.exchange_declare("shop.pidbox", "fanout")
    channel.basic_publish("shop.pidbox", "", b"ping")
    for _ in range(3):
        receipt = relatum.publish(channel, "onwards", "", b"unknown", properties)
    with pytest.raises(NotRecordedInTime) as caught:
        receipt.wait(0.5)
    assert (caught.value.in_stream, receipt.streams) == (None, None)
    wait_until(lambda: "'onwards' routes to are unknown" in caplog.text, what="it is said")
    said = [each for each in caplog.records if "onwards" in each.getMessage()]
    assert len(said) <= 2, "once by the recorder, once by receipts"
    assert "pidbox" not in caplog.text
    relatum.release(channel.connection)
    receipt = relatum.publish(intercepted(streams=["HEADERS"]).channel(), "onwards", "", b"told", properties)
    assert [each.stream for each in receipt.wait(90)] == ["HEADERS"]
    assert receipt.settle() == receipt.wait(90)
    assert recorded_to(engine, "HEADERS") > 0


def test_what_a_client_refuses_does_not_end_recording(
    server: LocalRabbitMQ, intercepted: Callable[..., BlockingConnection], engine: sa.Engine
) -> None:
    """Bad calls end as with bare pika, and streams named by bytes, declared or bound later are recorded."""
    wrong = [("", 5), ("", None), ("", "\ud800"), (5, "x"), (["a"], "x"), ("", "x" * 70_000), (None, "x"), ("", {})]
    connection, exchange = intercepted(), unique_name()
    first, later, bound = [unique_name() for _ in range(3)]
    declare_stream(server.broker_url, first)
    with broker_connection(server.broker_url) as bare:
        for wrong_exchange, key in wrong:
            expected = _error_of(bare, wrong_exchange, key)
            assert _error_of(connection, wrong_exchange, key) == expected, (wrong_exchange, key)
    channel = connection.channel()
    channel.exchange_declare(exchange, "topic")
    channel.basic_publish(b"", first.encode(), b"")
    channel.basic_publish(exchange, "key", b"")
    channel.basic_publish("", later, b"")
    relatum.publish(channel, "", "PLAIN", b"").wait(90)
    for name in (later, bound):
        declare_stream(server.broker_url, name)
    channel.queue_bind(bound, exchange, "#")
    channel.basic_publish("", later, b"")
    channel.basic_publish(exchange, "key", b"")
    for name in (first, later, bound):
        wait_until(lambda name=name: recorded_to(engine, name) == 1, what=f"{name} recorded")


def test_releasing_is_quick_though_the_broker_is_frozen(
    server: LocalRabbitMQ, intercepted: Callable[..., BlockingConnection], engine: sa.Engine
) -> None:
    """Releasing a connection takes two seconds at most while the broker is frozen, and the rest closes later."""
    connection = intercepted()
    channel = connection.channel()
    relatum.publish(channel, "", "PLAIN", b"").wait(90)
    relatum.publish(channel, "fanout", "", b"").wait(90)
    recorder = EmbeddedRecorder(Broker(server.broker_url, stream_url=server.stream_url), engine.url)
    recorder.watch("", "TOPIC")
    wait_until(lambda: recorded_to(engine, "PLAIN") > 0, what="recorded")
    server.freeze()
    try:
        for end in (lambda: relatum.release(connection), recorder.close):
            with in_time(2.0):
                end()
    finally:
        server.thaw()
    left = {"relatum-release", "relatum-closing"}
    wait_until(lambda: not left & {each.name for each in threading.enumerate()}, what="the end of closing threads")
    with engine.connect() as database:
        assert streams_named(database, "/", ["PLAIN"])


def test_reading_leaves_few_counters(server: LocalRabbitMQ, is_long: bool) -> None:
    """Thousands of reads leave few counters in a broker, which keeps one for each subscription id of a connection."""

    def counters() -> int:
        return int(re.findall(r"\d+", evaluate(server, "maps:size(osiris_counters:overview())"))[0])

    stream, rounds = "read-often", 50_000 if is_long else 1_000
    declare_stream(server.broker_url, stream)
    publish_plain(server.broker_url, stream, [str(number).encode() for number in range(20)])
    before = counters()
    with StreamReader.open(server.stream_url) as reader:
        for number in range(rounds):
            assert reader.read(stream, number % 20).body == str(number % 20).encode()
            if number % 10 == 0:
                assert reader.bounds(stream) == (0, 19)
                found = reader.read_many([MessageId(stream, offset) for offset in (19, 3, 11)])
                assert [getattr(message, "offset", message) for message in found] == [19, 3, 11]
                assert len(list(reader.iterate(stream))) == 20
    # On 3.10, a connection is used for 500 attaches; each has used about ten ids at a time at most.
    assert counters() - before <= 16 * (1 + 2 * rounds // 500)
