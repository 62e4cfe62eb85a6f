"""Super streams and contexts where one of the broker's two protocols does not answer."""

from collections.abc import Iterator

import pika
import pytest

import relatum
from relatum import Broker
from relatum.contexts import SerialConsumer, SerializationContexts, verify
from relatum.errors import BrokerUnavailable, ConfigurationError, SuperStreamNotFound
from relatum.superstreams import Layout
from tests.support import broker_connection
from tests.support.proxy import Proxy
from tests.support.routing import consumed, of_context
from tests.support.super_streams import super_stream

PARTITIONS = 2
"""Of the fixture `layout`."""


@pytest.fixture
def alone(amqp_url: str) -> Iterator[str]:
    """The broker's AMQP URL, by a port beside which no stream protocol answers."""
    with Proxy.to(amqp_url) as proxy:
        yield proxy.url(amqp_url)


@pytest.fixture
def keyed(broker: Broker) -> Iterator[Layout]:
    """A super stream of binding keys that are no numbers."""
    with super_stream(broker, binding_keys=["europe", "asia"]) as made:
        yield made


def test_publishing_needs_amqp_alone(alone: str, layout: Layout, database_url: str, stream_url: str) -> None:
    """Messages of contexts are published and placed; whoever reads is told what the broker lacks."""
    name = layout.super_stream
    with (
        broker_connection(alone) as connection,
        relatum.ContextRouter(name, database_url) as router,
        connection.channel() as channel,
    ):
        channel.confirm_delivery()
        relatum.SuperStream(name).publish(channel, b"plain", routing_key="x", mandatory=True)
        router.publish(channel, b"1", of_context("c"))
    with pytest.raises(BrokerUnavailable, match="rabbitmq_stream"):
        verify(name, broker=alone)
    assert consumed(name, database_url, stream_url, 2) == {"": [b"plain"], "c": [b"1"]}


def test_partitions_of_other_names_are_told_by_the_stream_protocol_alone(
    alone: str, keyed: Layout, database_url: str
) -> None:
    """Whoever needs them says so; nothing is sent, and nothing is written."""
    name = keyed.super_stream
    with broker_connection(alone) as connection, relatum.ContextRouter(name, database_url) as router:
        channel = connection.channel()
        channel.confirm_delivery()
        for properties in (of_context("c"), pika.BasicProperties()):
            with pytest.raises(SuperStreamNotFound, match="give its URL"):
                router.publish(channel, b"1", properties)
    with pytest.raises(SuperStreamNotFound, match="give its URL"):
        SerializationContexts(name, database_url, broker=alone)
    with pytest.raises(SuperStreamNotFound, match="give its URL"):
        SerialConsumer(name, "reader", database=database_url, broker=alone).start()
    with pytest.raises(BrokerUnavailable, match="rabbitmq_stream"):
        verify(name, broker=alone)


def test_the_stream_protocol_is_asked_where_it_is_said_to_be(
    alone: str, keyed: Layout, database_url: str, stream_url: str
) -> None:
    """Its URL is enough for partitions of any name; what the database knows of them then needs no stream protocol."""
    name, broker = keyed.super_stream, Broker(alone, stream_url=stream_url)
    with SerialConsumer(name, "reader", broker=broker, database=database_url) as consumer:
        assert consumer.next_batch(0) is None
    with (
        broker_connection(alone) as connection,
        relatum.ContextRouter(name, database_url, broker=broker) as router,
    ):
        channel = connection.channel()
        channel.confirm_delivery()
        router.publish(channel, b"1", of_context("c"))
        with SerializationContexts(name, database_url, broker=broker) as contexts:
            *_, target = (partition.stream for partition in keyed)
            contexts.move("c", target)
            assert contexts.assignment_of("c").partition == target
        router.publish(channel, b"2", of_context("c"))
    assert consumed(name, database_url, stream_url, 2) == {"c": [b"1", b"2"]}
    assert verify(name, broker=stream_url, database=database_url).ok


def test_reading_needs_the_stream_protocol_alone(
    amqp_url: str, stream_url: str, keyed: Layout, database_url: str
) -> None:
    """Consumers and checks need no AMQP URL; whoever publishes, or has to, asks for one before anything is sent."""
    name = keyed.super_stream
    with broker_connection(amqp_url) as connection, connection.channel() as channel:
        channel.confirm_delivery()
        channel.basic_publish(name, "asia", b"plain")
        assert consumed(name, database_url, stream_url, 1) == {"": [b"plain"]}
        assert verify(name, broker=stream_url).messages == 1
        with (
            relatum.ContextRouter(name, database_url, broker=stream_url) as router,
            pytest.raises(ConfigurationError, match="amqp://"),
        ):
            router.publish(channel, b"1", of_context("c"))
    with (
        SerializationContexts(name, database_url, broker=stream_url) as contexts,
        pytest.raises(ConfigurationError, match="amqp://"),
    ):
        contexts.add_partitions()
