"""The firehose is carried into a stream: each copy as the message itself, for publishers to the default exchange."""

import logging
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import pytest
import sqlalchemy as sa
from celery import Celery  # type: ignore[import-untyped]
from pika import BasicProperties

from relatum.errors import AccessRefused, Conflict, NotFound
from relatum.local import LocalRabbitMQ
from relatum.reading import Message, StreamReader
from relatum.superstreams import StreamOptions
from relatum.tapping import Firehose, defined_taps, tap_firehose, untap_firehose
from relatum_consumer import Relations
from tests.support import (
    broker_connection,
    declare_stream,
    recording,
    unique_name,
    wait_recorded,
    wait_until,
)
from tests.support.rabbitmq_tools import evaluate, run_tool
from tests.support.tapped import add_users, as_user, carrying

SMALL = StreamOptions(max_length_bytes=10_000_000)

USERS = {
    "carrier": (r"^hose.*$", r"^hose.*$", r"^(hose.*|amq\.rabbitmq\.trace)$"),
    "no-trace": (r"^hose.*$", r"^hose.*$", r"^hose.*$"),
}
"""What users may configure, write and read."""


@pytest.fixture(scope="module")
def server(traced_broker: LocalRabbitMQ) -> LocalRabbitMQ:
    """A broker of this module, whose firehose is on."""
    add_users(traced_broker, USERS)
    return traced_broker


@pytest.fixture
def url(server: LocalRabbitMQ) -> str:
    """The broker's URL, of its owner."""
    return server.broker_url


@pytest.fixture
def stream(url: str, database_url: str) -> Iterator[str]:
    """A stream of the firehose."""
    name = unique_name("hose")
    tap_firehose(url, database_url, stream=name, options=SMALL)
    yield name
    if any(each.stream == name for each in defined_taps(database_url)):
        untap_firehose(url, database_url, stream=name, delete=True)


def messages(server: LocalRabbitMQ, stream: str) -> list[Message]:
    """What lies in a stream."""
    with StreamReader.open(server.stream_url) as reader:
        return list(reader.iterate(stream))


def awaited(server: LocalRabbitMQ, stream: str, queue: str, count: int) -> list[Message]:
    """What lies in a stream of a queue's messages, once so many do."""

    def there() -> list[Message]:
        return [message for message in messages(server, stream) if message.headers.get("to") == queue]

    wait_until(lambda: len(there()) >= count, what=f"{count} messages in {stream}")
    return there()


def test_a_copy_is_as_the_message_itself(server: LocalRabbitMQ, url: str, stream: str) -> None:
    """Headers, properties and body are those of the same message published to a stream, whatever their types."""
    direct = unique_name()
    declare_stream(url, direct)
    moment = datetime(2026, 11, 23, 12, 0, tzinfo=UTC)
    headers: dict[str, Any] = {
        "to": direct,
        "text": "dépôt",
        "long": "x" * 300,
        "zero": 0,
        "small": 7,
        "negative": -(2**40),
        "yes": True,
        "no": False,
        "moment": moment,
        "bytes": b"\xff\xfe",
        "nothing": None,
        "table": {"a": [1, {"b": 2}]},
        "x-mine": "kept",
        "x-table": {"a": ["b"]},
    }
    properties = BasicProperties(
        content_type="application/json",
        content_encoding="identity",
        delivery_mode=2,
        priority=3,
        correlation_id="c",
        reply_to="amq.rabbitmq.reply-to.x",
        expiration="60000",
        message_id="m",
        timestamp=1_790_000_000,
        type="t",
        app_id="a",
        headers=headers,
    )
    bodies = (b"", b"{}", bytes(300_000))
    with carrying(url, stream) as firehose, broker_connection(url) as connection:
        channel = connection.channel()
        for body in bodies:
            channel.basic_publish("", direct, body, properties)
        carried = awaited(server, stream, direct, len(bodies))
        assert firehose.counts().refused == 0
    itself = messages(server, direct)
    assert [each.body for each in carried] == [each.body for each in itself] == list(bodies)
    for copy, original in zip(carried, itself, strict=True):
        assert (copy.headers, copy.properties) == (original.headers, original.properties)
        assert (copy.time, copy.time_source) == (original.time, original.time_source)


def test_only_what_goes_to_the_default_exchange_is_carried(server: LocalRabbitMQ, url: str, stream: str) -> None:
    """Neither other exchanges' messages, nor what the carrier publishes; what reaches no queue is, too."""
    queue = unique_name("nowhere")
    with carrying(url, stream), broker_connection(url) as connection:
        channel = connection.channel()
        channel.confirm_delivery()
        headers = {"to": queue}
        channel.basic_publish("amq.topic", queue, b"other", BasicProperties(headers=headers))
        channel.basic_publish("", queue, b"this", BasicProperties(headers=headers))
        # Decimal numbers end the channel that publishes them to a stream.
        decimal = {"to": queue, "price": Decimal("1.50")}
        channel.basic_publish("", queue, b"priced", BasicProperties(headers=decimal, user_id="relatum"))
        carried = awaited(server, stream, queue, 2)
        assert [(each.body, each.headers.get("price")) for each in carried] == [(b"this", None), (b"priced", "1.5")]
    assert len(messages(server, stream)) == 2


def test_a_copy_that_a_stream_refuses_stops_no_other(server: LocalRabbitMQ, url: str, stream: str) -> None:
    """The broker ends the channel for it; it is left out and counted, and all others are there in their order."""
    queue = unique_name("many")
    with broker_connection(url) as connection:
        channel = connection.channel()
        for number in range(30):
            body = bytes(200_000) if number == 17 else b"%d" % number
            channel.basic_publish("", queue, body, BasicProperties(headers={"to": queue}))
    # Where 3.10 has it, and where 4 has it.
    size = "application:set_env(rabbit, max_message_size, {0}), persistent_term:put(max_message_size, {0})"
    evaluate(server, size.format(100_000))
    try:
        with carrying(url, stream) as firehose:
            wait_until(lambda: messages(server, stream)[-1:] and messages(server, stream)[-1].body == b"29", what="all")
            assert firehose.counts().refused == 1
    finally:
        evaluate(server, size.format(134_217_728))
    # Those before the refused one may be there twice.
    first_seen = list(dict.fromkeys(each.body for each in messages(server, stream)))
    assert first_seen == [b"%d" % number for number in range(30) if number != 17]


def test_it_is_said_whether_the_firehose_is_on(
    server: LocalRabbitMQ, url: str, stream: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One warning where it is off, with what turns it on; a line once it is on; no question of it lies there."""
    monkeypatch.setattr("relatum.tapping._firehose.ASK_S", 0.2)
    monkeypatch.setattr("relatum.tapping._firehose.ANSWER_S", 2.0)
    caplog.set_level(logging.INFO, logger="relatum.firehose")

    def said(words: str) -> list[str]:
        lines = [each.getMessage() for each in caplog.records if each.name == "relatum.firehose"]
        return [line for line in lines if words in line]

    run_tool(server, "rabbitmqctl", "trace_off")
    with carrying(url, stream):
        wait_until(lambda: said("rabbitmqctl trace_on -p /"), what="the warning")
        run_tool(server, "rabbitmqctl", "trace_on")
        wait_until(lambda: said("is on"), what="the line")
        assert len(said("is off")) == 1
    assert messages(server, stream) == []


def test_what_it_makes_and_takes_away(url: str, database_url: str) -> None:
    """Making it twice changes nothing; what is another's is not taken; a carrier whose queue is deleted ends."""
    name = unique_name("hose")
    with pytest.raises(NotFound, match="relatum tap --firehose"):
        Firehose(url, name).run(threading.Event())
    with pytest.raises(NotFound, match="firehose is not tapped"):
        untap_firehose(url, database_url)
    with broker_connection(url) as connection:
        channel = connection.channel()
        channel.exchange_declare(name, "topic")
        with pytest.raises(Conflict, match="There is an exchange"):
            tap_firehose(url, database_url, stream=name)
        channel.exchange_delete(name)
        channel.queue_declare(f"{name}.firehose", durable=True)
        with pytest.raises(Conflict, match="There is a queue"):
            tap_firehose(url, database_url, stream=name)
        channel.queue_delete(f"{name}.firehose")
    assert defined_taps(database_url) == []
    made = tap_firehose(url, database_url, stream=name, options=SMALL)
    assert tap_firehose(url, database_url, stream=name) == made
    assert defined_taps(database_url) == [made]
    with carrying(url, name, NotFound):
        wait_until(lambda: _consumers(url, f"{name}.firehose"), what="the carrier")
        untap_firehose(url, database_url, delete=True)
    assert defined_taps(database_url) == []


def _consumers(url: str, queue: str) -> int:
    with broker_connection(url) as connection:
        count: int = connection.channel().queue_declare(queue, passive=True).method.consumer_count
        return count


def test_the_permissions_that_are_needed(server: LocalRabbitMQ, url: str, database_url: str) -> None:
    """All for the stream, the queue and the exchange, and to read from the firehose; to publish elsewhere is none."""
    name = unique_name("hose")
    with pytest.raises(AccessRefused, match=r"amq\.rabbitmq\.trace"):
        tap_firehose(as_user(url, "no-trace"), database_url, stream=name, options=SMALL)
    assert defined_taps(database_url) == []
    tap_firehose(as_user(url, "carrier"), database_url, stream=name, options=SMALL)
    queue = unique_name("q")
    with carrying(as_user(url, "carrier"), name), broker_connection(url) as connection:
        connection.channel().basic_publish("", queue, b"one", BasicProperties(headers={"to": queue}))
        assert [each.body for each in awaited(server, name, queue, 1)] == [b"one"]
    untap_firehose(as_user(url, "carrier"), database_url, stream=name, delete=True)


def test_a_celery_app_is_found_as_it_is(
    server: LocalRabbitMQ, url: str, stream: str, database_url: str, engine: sa.Engine
) -> None:
    """A task of an app that nobody has changed is found by its id, and its root's tasks by that one's."""
    app = Celery("shop", broker=url.replace("amqp://", "pyamqp://"))
    app.conf.update(task_default_queue=unique_name("celery"), broker_connection_retry_on_startup=False)

    @app.task(name="shop.add")  # type: ignore[untyped-decorator]
    def add(first: int, second: int) -> int:
        return first + second

    with carrying(url, stream), recording(url, engine, stream, keys=["id", "root_id", "task"]):
        one = add.apply_async((1, 2))
        other = add.apply_async((3, 4), root_id=one.id, parent_id=one.id)
        wait_until(lambda: len(messages(server, stream)) >= 2, what="the tasks")
        wait_recorded(url, engine, stream)
        with Relations(url, database_url) as relations:
            (found,) = relations.find("id", other.id)
            assert found.properties.correlation_id == other.id
            tasks = relations.related(found, by="root_id")
            assert {message.headers["id"] for message in tasks} == {one.id}
            assert len(list(relations.find("task", "shop.add"))) == 2
    app.close()
