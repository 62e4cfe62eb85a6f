"""Look-ups of messages as RabbitMQ's AMQP 1.0 client gives them: of a queue, and of a stream."""

from collections.abc import Iterator
from typing import Any

import pika
import pytest
import sqlalchemy as sa
from rabbitmq_amqp_python_client import (
    AddressHelper,
    AMQPMessagingHandler,
    Converter,
    Environment,
    Event,
    Message,
    OffsetSpecification,
    StreamConsumerOptions,
)

from relatum.keys import KeyDefinition
from relatum.reading import StreamReader
from relatum_consumer import Relations
from tests.support import broker_connection, record, unique_name, wait_until

KEYS = [
    KeyDefinition("order_id", type="integer"),
    KeyDefinition("correlation", "property:correlation_id"),
    KeyDefinition("item", "body:$.items[*]"),
    KeyDefinition("subject", "property:type"),
]


@pytest.fixture
def exchange(amqp_url: str, stream_name: str) -> Iterator[str]:
    """A fanout exchange, of which the stream gets every message, as does a queue of its name."""
    name = unique_name("amqp10")
    with broker_connection(amqp_url) as connection:
        channel = connection.channel()
        channel.exchange_declare(name, "fanout", durable=True)
        channel.queue_declare(name, durable=True, arguments={"x-queue-type": "quorum"})
        channel.queue_bind(name, name)
        channel.queue_bind(stream_name, name)
        yield name
        channel.queue_delete(name)
        channel.exchange_delete(name)


class _Stopped(Exception):
    """Consuming is over."""


class _Handler(AMQPMessagingHandler):
    """Keeps what is asked of the first message."""

    def __init__(self, ask: Any) -> None:
        super().__init__()
        self._ask = ask

    def on_amqp_message(self, event: Event) -> None:
        self._ask(event)
        self.delivery_context.accept(event)
        raise _Stopped


def consume(amqp_url: str, name: str, ask: Any, **options: Any) -> None:
    """Give the first message's event to `ask`."""
    environment = Environment(uri=amqp_url)
    connection = environment.connection()
    connection.dial()
    consumer = connection.consumer(AddressHelper.queue_address(name), message_handler=_Handler(ask), **options)
    with pytest.raises(_Stopped):
        consumer.run()
    consumer.close()
    environment.close()


def publish(amqp_url: str, exchange: str) -> None:
    """Two of AMQP 1.0, which share their order; and one of AMQP 0.9.1, with an item of the first."""
    environment = Environment(uri=amqp_url)
    connection = environment.connection()
    connection.dial()
    publisher = connection.publisher(AddressHelper.exchange_address(exchange))
    for number in range(2):
        publisher.publish(
            Message(
                body=Converter.string_to_bytes(f'{{"items": ["a{number}"]}}'),
                content_type="application/json",
                correlation_id=f"c-{number}",
                application_properties={"order_id": 7},
                annotations={"x-note": "n"},
            )
        )
    publisher.close()
    environment.close()
    with broker_connection(amqp_url) as connection_091:
        properties = pika.BasicProperties(content_type="application/json")
        connection_091.channel().basic_publish(exchange, "", b'{"items": ["a0"]}', properties)


@pytest.mark.parametrize("place", ["queue", "stream"])
@pytest.mark.parametrize("given", ["event", "message"])
def test_what_the_client_gives_is_asked_about_as_it_is(
    amqp_url: str, database_url: str, engine: sa.Engine, stream_name: str, exchange: str, place: str, given: str
) -> None:
    """Of a stream the event says where it lies; else its copy is named."""
    publish(amqp_url, exchange)
    with StreamReader.open(amqp_url) as reader:
        wait_until(lambda: reader.bounds(stream_name).last == 2, what="three messages")
    record(amqp_url, engine, stream_name, keys=KEYS)
    answers = []
    with Relations(amqp_url, database_url) as relations:

        def ask(event: Event) -> None:
            message = event if given == "event" else event.message
            answers.extend([relations.related(message), relations.trace(message)])

        if place == "queue":
            consume(amqp_url, exchange, ask)
        else:
            first = StreamConsumerOptions(offset_specification=OffsetSpecification.first)
            consume(amqp_url, stream_name, ask, consumer_options=first)
        answer, trace = answers
        read = relations.read(stream_name, 0)
        assert answer.hits == relations.related(read).hits
        assert [hit.keys for hit in answer.hits] == [("order_id",), ("item",)]
        is_known = (place, given) == ("stream", "event")
        assert answer.itself == (() if is_known else ((stream_name, 0),))
        assert trace.hops == relations.trace(read).hops
