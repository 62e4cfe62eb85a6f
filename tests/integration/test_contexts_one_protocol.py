"""Super streams and contexts where one of the broker's two protocols does not answer."""

from collections.abc import Iterator

import pika
import pytest
from pika.adapters.blocking_connection import BlockingChannel

import relatum
from relatum import Broker
from relatum.contexts import SerialConsumer, SerializationContexts, verify
from relatum.errors import BrokerUnavailable, ConfigurationError, SuperStreamNotFound
from relatum.superstreams import Layout
from tests.support.place import Place
from tests.support.proxy import Proxy
from tests.support.routing import confirming, consumed, of_context
from tests.support.super_streams import super_stream

PARTITIONS = 2


@pytest.fixture
def alone(amqp_url: str) -> Iterator[str]:
    """The broker's AMQP URL, by a port beside which no stream protocol answers."""
    with Proxy.to(amqp_url) as proxy:
        yield proxy.url(amqp_url)


@pytest.fixture
def keyed(broker: Broker) -> Iterator[Layout]:
    """A super stream of binding keys that are not numbers."""
    with super_stream(broker, binding_keys=["europe", "asia"]) as made:
        yield made


def test_publishing_needs_amqp_alone(alone: str, layout: Layout, database_url: str, stream_url: str) -> None:
    """Messages of contexts are published without the stream protocol; reading names the plugin that is missing."""
    name = layout.super_stream
    with confirming(alone) as channel, relatum.ContextRouter(name, database_url) as router:
        relatum.SuperStream(name).publish(channel, b"plain", routing_key="x", mandatory=True)
        router.publish(channel, b"1", of_context("c"))
    with pytest.raises(BrokerUnavailable, match="rabbitmq_stream"):
        verify(name, broker=alone)
    assert consumed(name, database_url, stream_url, 2) == {"": [b"plain"], "c": [b"1"]}


def test_partitions_of_other_names_are_told_by_the_stream_protocol_alone(
    alone: str, keyed: Layout, database_url: str
) -> None:
    """Each component that needs partitions of other names asks for the URL of the stream protocol."""
    name = keyed.super_stream
    with confirming(alone) as channel, relatum.ContextRouter(name, database_url) as router:
        for properties in (of_context("c"), pika.BasicProperties()):
            with pytest.raises(SuperStreamNotFound, match="give its URL"):
                router.publish(channel, b"1", properties)
    with pytest.raises(SuperStreamNotFound, match="give its URL"):
        SerializationContexts(name, database_url, broker=alone)
    with pytest.raises(SuperStreamNotFound, match="give its URL"):
        SerialConsumer(name, "reader", database=database_url, broker=alone).start()
    with pytest.raises(BrokerUnavailable, match="rabbitmq_stream"):
        verify(name, broker=alone)


def test_the_stream_protocol_is_asked_where_it_is_said_to_be(alone: str, keyed: Layout, place: Place) -> None:
    """With the URL of the stream protocol, partitions of any name can be published to, moved and consumed."""
    name, broker = keyed.super_stream, Broker(alone, stream_url=place.stream_url)
    with SerialConsumer(name, "reader", broker=broker, database=place.database) as consumer:
        assert consumer.next_batch(0) is None
    with confirming(alone) as channel, relatum.ContextRouter(name, place.database, broker=broker) as router:
        router.publish(channel, b"1", of_context("c"))
        with SerializationContexts(name, place.database, broker=broker) as contexts:
            *_, target = (partition.stream for partition in keyed)
            contexts.move("c", target)
            assert contexts.assignment_of("c").partition == target
        router.publish(channel, b"2", of_context("c"))
    assert consumed(name, place.database, place.stream_url, 2) == {"c": [b"1", b"2"]}
    assert verify(name, broker=place.stream_url, database=place.database).ok


def test_reading_needs_the_stream_protocol_alone(channel: BlockingChannel, place: Place, keyed: Layout) -> None:
    """Consumers and checks need no AMQP URL; publishing and changing partitions without one is refused."""
    name = keyed.super_stream
    channel.basic_publish(name, "asia", b"plain")
    assert consumed(name, place.database, place.stream_url, 1) == {"": [b"plain"]}
    assert verify(name, broker=place.stream_url).messages == 1
    needs_amqp = pytest.raises(ConfigurationError, match="amqp://")
    with relatum.ContextRouter(name, place.database, broker=place.stream_url) as router, needs_amqp:
        router.publish(channel, b"1", of_context("c"))
    with SerializationContexts(name, place.database, broker=place.stream_url) as contexts, needs_amqp:
        contexts.add_partitions()
