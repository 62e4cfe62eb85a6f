"""Intercepted pika connections against a real broker."""

import copy
from collections.abc import Iterator
from typing import Any

import pika
import pytest
from opentelemetry.instrumentation.pika import PikaInstrumentor
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from pika.adapters.blocking_connection import BlockingChannel, BlockingConnection

import relatum
from relatum.errors import HeadersRefused, PublishOutcomeUnknown, PublishRejected
from tests.support import broker_connection, unique_name, wait_until
from tests.support.proxy import Proxy


@pytest.fixture
def connection(amqp_url: str) -> Iterator[BlockingConnection]:
    """A blocking connection, not intercepted yet."""
    with broker_connection(amqp_url) as connection:
        yield connection


@pytest.fixture
def queue(amqp_url: str) -> Iterator[str]:
    """The name of a new classic queue, which gives messages back at once."""
    name = unique_name()
    with broker_connection(amqp_url) as connection:
        connection.channel().queue_declare(name)
        yield name
        connection.channel().queue_delete(name)


def get(connection: BlockingConnection, queue: str) -> tuple[pika.BasicProperties, bytes]:
    """The next message of a queue. What went out without a confirm may still be on its way."""
    with connection.channel() as channel:

        def next_one() -> tuple[Any, ...] | None:
            got = channel.basic_get(queue, auto_ack=True)
            return got if got[0] is not None else None

        _, properties, body = wait_until(next_one, what="a message")
    return properties, body


@pytest.mark.parametrize("confirm", [False, True])
def test_every_way_to_call_it_works(connection: BlockingConnection, queue: str, confirm: bool) -> None:
    """Positional, by name, mixed, without properties, with text as the body: all are pika's, and return None."""
    channel = relatum.intercept(connection).channel()
    if confirm:
        channel.confirm_delivery()
    properties = pika.BasicProperties()
    assert channel.basic_publish("", queue, b"1") is None
    assert channel.basic_publish("", queue, "2", properties) is None
    assert channel.basic_publish("", queue, b"3", properties, True) is None
    assert channel.basic_publish("", queue, body=b"4", properties=None) is None
    assert channel.basic_publish(exchange="", routing_key=queue, body=b"5", mandatory=True) is None
    bodies = []
    for _ in range(5):
        got, body = get(connection, queue)
        bodies.append(body)
        assert got.message_id
    assert bodies == [b"1", b"2", b"3", b"4", b"5"]


def test_mistakes_raise_what_pika_raises(connection: BlockingConnection, queue: str) -> None:
    """A call pika does not take fails as it does without us, before anything is sent."""
    bare = connection.channel()
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = [
        ((), {}),
        (("", queue), {}),
        (("", queue, b""), {"nonsense": 1}),
        (("", queue, b"", pika.BasicProperties(headers={"a": 1.5})), {}),
        (("", queue, b"", pika.BasicProperties(headers=[1])), {}),
        (("", queue, b"", pika.BasicProperties(reply_to="x" * 256)), {}),
        (("", queue, b"", "properties"), {}),
    ]
    expected = []
    for args, kwargs in calls:
        with pytest.raises(Exception) as caught:
            bare.basic_publish(*args, **kwargs)
        expected.append(caught.value)
    relatum.intercept(connection)
    for (args, kwargs), error in zip(calls, expected, strict=True):
        with pytest.raises(type(error)) as caught:
            bare.basic_publish(*args, **kwargs)
        assert type(caught.value) is type(error)


def test_properties_of_a_subclass_keep_their_class(connection: BlockingConnection, queue: str) -> None:
    """A subclass that encodes in its own way goes on doing so."""

    class Marked(pika.BasicProperties):
        def encode(self) -> Any:
            self.type = "marked"
            return super().encode()

    given = Marked()
    relatum.intercept(connection).channel().basic_publish("", queue, b"", given)
    assert get(connection, queue)[0].type == "marked"
    assert given.type is None


def test_a_channel_is_copied_with_what_stands_in(connection: BlockingConnection) -> None:
    """A copy of the channel, or of its method, is made as ever."""
    channel = relatum.intercept(connection).channel()
    for method in (copy.copy(channel).basic_publish, copy.copy(channel.basic_publish)):
        assert method.__name__ == "basic_publish"


def test_channels_that_are_open_already_are_covered(connection: BlockingConnection, queue: str) -> None:
    """A channel opened before, and the channel a consumer's callback is given, publish through us too."""
    early = connection.channel()
    relatum.intercept(connection)
    seen: list[Any] = []

    def on_message(channel: BlockingChannel, method: Any, properties: Any, body: bytes) -> None:
        seen.append(properties)
        if len(seen) == 1:
            channel.basic_publish("", queue, b"again")
        else:
            channel.stop_consuming()

    early.basic_publish("", queue, b"first")
    early.basic_consume(queue, on_message, auto_ack=True)
    early.start_consuming()
    assert all(properties.message_id for properties in seen)


def test_headers_beyond_a_small_frame_are_refused(amqp_url: str, queue: str) -> None:
    """Where the connection negotiated small frames, the limit is theirs, and just below it all is well.

    8,192 bytes are the least that RabbitMQ 4 takes.
    """
    parameters = pika.URLParameters(amqp_url)
    parameters.frame_max = 8192
    with BlockingConnection(parameters) as small:
        channel = relatum.intercept(small).channel()
        channel.confirm_delivery()
        channel.basic_publish("", queue, b"", pika.BasicProperties(headers={"a": "x" * 7900}))
        with pytest.raises(HeadersRefused):
            channel.basic_publish("", queue, b"", pika.BasicProperties(headers={"a": "x" * 8100}))


def test_an_expiration_that_is_none_is_a_rejection(connection: BlockingConnection) -> None:
    """A definite 406 says that the message is in no stream, and there is nothing to settle."""
    channel = relatum.intercept(connection).channel()
    channel.confirm_delivery()
    with pytest.raises(pika.exceptions.ChannelClosedByBroker) as caught:
        channel.basic_publish("", unique_name(), b"", pika.BasicProperties(expiration="soon"))
    assert isinstance(caught.value, PublishRejected)


def test_a_406_that_is_about_no_message_leaves_the_outcome_unknown(connection: BlockingConnection) -> None:
    """An acknowledgement that the broker refuses says nothing of the message that was published behind it."""
    channel = relatum.intercept(connection).channel()
    channel.confirm_delivery()
    channel.basic_ack(77)
    with pytest.raises(PublishOutcomeUnknown):
        channel.basic_publish("", unique_name(), b"")


def test_a_closed_channel_sends_nothing(connection: BlockingConnection) -> None:
    """After the broker has closed the channel, pika's own error is not one of ours."""
    channel = relatum.intercept(connection).channel()
    channel.confirm_delivery()
    with pytest.raises(PublishRejected):
        channel.basic_publish(unique_name(), "", b"")
    with pytest.raises(pika.exceptions.ChannelWrongStateError) as closed:
        channel.basic_publish("", "", b"")
    assert type(closed.value) is pika.exceptions.ChannelWrongStateError


def test_a_reset_connection_leaves_the_outcome_unknown(amqp_url: str, stream_name: str) -> None:
    """A reset while the confirm is awaited is pika's StreamLostError and an unknown outcome; before, pika's alone."""
    with Proxy.to(amqp_url) as proxy:
        connection = BlockingConnection(pika.URLParameters(proxy.url(amqp_url)))
        channel = relatum.intercept(connection).channel()
        channel.confirm_delivery()
        proxy.mode = "blackhole_replies"
        connection._impl.ioloop.call_later(0.2, proxy.reset)
        with pytest.raises(pika.exceptions.StreamLostError) as caught:
            channel.basic_publish("", stream_name, b"")
        assert isinstance(caught.value, PublishOutcomeUnknown)
        with pytest.raises(pika.exceptions.AMQPError) as after:
            channel.basic_publish("", stream_name, b"")
        assert not isinstance(after.value, PublishOutcomeUnknown)


@pytest.fixture
def spans() -> Iterator[tuple[TracerProvider, InMemorySpanExporter]]:
    """Where OpenTelemetry's spans go."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    yield provider, exporter
    provider.shutdown()


@pytest.mark.parametrize("ours_first", [True, False])
def test_opentelemetry_composes_in_either_order(
    connection: BlockingConnection, queue: str, spans: tuple[TracerProvider, InMemorySpanExporter], ours_first: bool
) -> None:
    """Instrumented before or after us, a message has a span and our id; either may go and the other stays."""
    provider, exporter = spans
    channel = connection.channel()
    if ours_first:
        relatum.intercept(connection)
        PikaInstrumentor.instrument_channel(channel, tracer_provider=provider)
    else:
        PikaInstrumentor.instrument_channel(channel, tracer_provider=provider)
        relatum.intercept(connection)
    channel._is_instrumented_by_opentelemetry = True
    channel.basic_publish("", queue, b"1")
    properties, _ = get(connection, queue)
    assert properties.message_id
    assert "traceparent" in properties.headers
    assert len(exporter.get_finished_spans()) == 1
    PikaInstrumentor.uninstrument_channel(channel)
    channel.basic_publish("", queue, b"2")
    properties, _ = get(connection, queue)
    assert properties.message_id
    assert not properties.headers


@pytest.mark.parametrize("ours_first", [True, False])
def test_opentelemetry_stays_when_we_go(
    connection: BlockingConnection, queue: str, spans: tuple[TracerProvider, InMemorySpanExporter], ours_first: bool
) -> None:
    """Released, we pass everything through, also from under an instrumentation that wrapped us."""
    provider, exporter = spans
    channel = connection.channel()
    if ours_first:
        relatum.intercept(connection)
    PikaInstrumentor.instrument_channel(channel, tracer_provider=provider)
    relatum.intercept(connection)
    relatum.release(connection)
    channel.basic_publish("", queue, b"1")
    properties, _ = get(connection, queue)
    assert properties.message_id is None
    assert "traceparent" in properties.headers
    assert len(exporter.get_finished_spans()) == 1


def test_opentelemetry_on_the_class_reaches_later_channels(
    connection: BlockingConnection, queue: str, spans: tuple[TracerProvider, InMemorySpanExporter]
) -> None:
    """Instrumentation of the whole program, switched on after us, still sees the channels opened from then on."""
    provider, exporter = spans
    relatum.intercept(connection)
    instrumentor = PikaInstrumentor()
    instrumentor.instrument(tracer_provider=provider)
    try:
        connection.channel().basic_publish("", queue, b"1")
    finally:
        instrumentor.uninstrument()
    properties, _ = get(connection, queue)
    assert properties.message_id
    assert "traceparent" in properties.headers
    assert exporter.get_finished_spans()
