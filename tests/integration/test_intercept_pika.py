"""Intercepted pika connections against a real broker."""

import copy
import logging
import time
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
from relatum.errors import (
    ConfigurationError,
    HeadersRefused,
    InvalidRelationshipKey,
    PublishNacked,
    PublishOutcomeUnknown,
    PublishRejected,
    PublishUnroutable,
)
from relatum.uuid7 import time_us_of, uuid7
from tests.support import broker_connection, unique_name, wait_until
from tests.support.callbacks import open_channel, running
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


def test_the_connection_stays_what_it_is(connection: BlockingConnection, queue: str) -> None:
    """The same object comes back, of the same class, and its channels are pika's own."""
    assert relatum.intercept(connection) is connection
    channel = connection.channel()
    assert type(connection) is BlockingConnection
    assert type(channel) is BlockingChannel


def test_messages_get_what_they_lack(connection: BlockingConnection, queue: str) -> None:
    """A message published bare arrives with an id and a time, body and other properties as they were."""
    channel = relatum.intercept(connection, keys=["order_id"]).channel()
    channel.basic_publish("", queue, b"body", pika.BasicProperties(headers={"order_id": "1"}, app_id="shop"))
    properties, body = get(connection, queue)
    assert body == b"body"
    assert properties.app_id == "shop"
    assert abs(time_us_of(properties.message_id) - time.time() * 1e6) < 60e6
    assert properties.headers == {"order_id": "1"}


def test_a_message_without_headers_gets_none(connection: BlockingConnection, queue: str) -> None:
    """Beside the id it arrives as if nobody had intercepted the connection, over each way to have no headers."""
    channel = relatum.intercept(connection, keys=["order_id"]).channel()
    for given in (None, pika.BasicProperties(), pika.BasicProperties(headers={}), pika.BasicProperties(type="t")):
        channel.basic_publish("", queue, b"", given)
        got, _ = get(connection, queue)
        assert time_us_of(got.message_id)
        got.message_id = None
        assert got == (given or pika.BasicProperties())


def test_a_message_of_an_id_of_the_callers_gets_a_time(connection: BlockingConnection, queue: str) -> None:
    """Be it one that another message was given: its time is the other's."""
    channel = relatum.intercept(connection).channel()
    for message_id in ("mine", uuid7(1)):
        channel.basic_publish("", queue, b"", pika.BasicProperties(message_id=message_id))
        got, _ = get(connection, queue)
        assert got.message_id == message_id
        assert abs(got.headers["relatum_time"] - time.time() * 1e6) < 60e6


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


def test_the_callers_properties_are_not_changed(connection: BlockingConnection, queue: str) -> None:
    """One object may serve for many messages: it stays as it is, and each message gets an id of its own."""
    channel = relatum.intercept(connection).channel()
    properties = pika.BasicProperties(headers={"a": {"b": [1]}}, delivery_mode=2)
    before = copy.deepcopy(properties)
    channel.basic_publish("", queue, b"1", properties)
    channel.basic_publish("", queue, b"2", properties)
    assert properties == before
    assert get(connection, queue)[0].message_id != get(connection, queue)[0].message_id


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


def test_a_bad_key_is_refused_before_anything_is_sent(connection: BlockingConnection, queue: str) -> None:
    """Neither a bad key nor bombs of headers reach the broker; the channel stays usable."""
    channel = relatum.intercept(connection, keys=["order_id"]).channel()
    deep: dict[str, Any] = {}
    for _ in range(2000):
        deep = {"in": deep}
    frames = connection._impl.frames_sent
    with pytest.raises(InvalidRelationshipKey):
        channel.basic_publish("", queue, b"", pika.BasicProperties(headers={"order_id": [1]}))
    for headers in (deep, {"a": "x" * 200_000}, {str(n): n for n in range(5000)}):
        with pytest.raises(HeadersRefused):
            channel.basic_publish("", queue, b"", pika.BasicProperties(headers=headers))
    assert connection._impl.frames_sent == frames
    channel.basic_publish("", queue, b"")


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


def test_an_unroutable_message_comes_back_with_its_id(connection: BlockingConnection) -> None:
    """The error is pika's and ours; the message it returns has the id it was sent with."""
    channel = relatum.intercept(connection).channel()
    channel.confirm_delivery()
    for given in (None, pika.BasicProperties(headers={"a": 1}), pika.BasicProperties(message_id="mine")):
        with pytest.raises(pika.exceptions.UnroutableError) as caught:
            channel.basic_publish("", unique_name(), b"body", given, mandatory=True)
        assert isinstance(caught.value, PublishUnroutable)
        assert caught.value.in_stream is False
        assert type(caught.value.__cause__) is pika.exceptions.UnroutableError
        returned = caught.value.messages[0].properties
        if given is not None and given.message_id:
            assert returned.message_id == "mine"
        else:
            assert time_us_of(returned.message_id) is not None


def test_callbacks_see_a_returned_message_as_it_was_sent(connection: BlockingConnection) -> None:
    """Without confirms, callbacks of returns see the caller's properties, with the id and the time."""
    channel = relatum.intercept(connection).channel()
    returned: list[pika.BasicProperties] = []
    channel.add_on_return_callback(lambda _channel, _method, properties, _body: returned.append(properties))
    channel.basic_publish("", unique_name(), b"", pika.BasicProperties(headers={"a": 1}), mandatory=True)
    channel.basic_publish("", unique_name(), b"", pika.BasicProperties(message_id="mine"), mandatory=True)
    wait_until(lambda: connection.process_data_events(0) or len(returned) == 2, what="both to come back")
    assert returned[0].headers == {"a": 1}
    assert time_us_of(returned[0].message_id) is not None
    assert (returned[1].message_id, list(returned[1].headers)) == ("mine", ["relatum_time"])


def test_a_returned_receipt_is_decided(amqp_url: str, database_url: str) -> None:
    """On a callback channel, a message with a receipt that comes back has its id, and its receipt says so."""
    with running(amqp_url, database=database_url, recorder="external") as (connection, on_thread):
        channel = open_channel(connection, on_thread)
        returned: list[pika.BasicProperties] = []
        on_thread(channel.add_on_return_callback, lambda _c, _m, properties, _b: returned.append(properties))
        receipt = on_thread(relatum.publish, channel, "", unique_name(), b"", pika.BasicProperties(headers={"a": 1}))
        with pytest.raises(PublishUnroutable):
            receipt.wait(timeout_s=90)
        assert [properties.message_id for properties in returned] == [receipt.message_id]


@pytest.mark.parametrize(
    "given",
    [pika.BasicProperties(expiration="soon"), pika.BasicProperties(user_id="somebody else")],
    ids=["expiration", "user"],
)
def test_what_the_broker_refuses_of_a_message_is_a_rejection(
    connection: BlockingConnection, given: pika.BasicProperties
) -> None:
    """A definite 406 is `PublishRejected` and pika's own error: the message is in no stream, and nothing to settle."""
    channel = relatum.intercept(connection).channel()
    channel.confirm_delivery()
    with pytest.raises(pika.exceptions.ChannelClosedByBroker) as caught:
        channel.basic_publish("", unique_name(), b"", given)
    assert isinstance(caught.value, PublishRejected)
    assert caught.value.in_stream is False


def test_a_406_that_is_about_no_message_leaves_the_outcome_unknown(connection: BlockingConnection) -> None:
    """An acknowledgement that the broker refuses says nothing of the message that was published behind it."""
    channel = relatum.intercept(connection).channel()
    channel.confirm_delivery()
    channel.basic_ack(77)
    with pytest.raises(PublishOutcomeUnknown):
        channel.basic_publish("", unique_name(), b"")


def test_a_nacked_message_is_both_errors(connection: BlockingConnection, amqp_url: str) -> None:
    """A queue that is full and rejects: pika's NackError and our PublishNacked, not in a stream."""
    name = unique_name()
    channel = relatum.intercept(connection).channel()
    channel.queue_declare(name, arguments={"x-max-length": 1, "x-overflow": "reject-publish"})
    channel.confirm_delivery()

    def overfill() -> None:
        for _ in range(10):
            channel.basic_publish("", name, b"")

    with pytest.raises(pika.exceptions.NackError) as caught:
        overfill()
    assert isinstance(caught.value, PublishNacked)
    assert caught.value.in_stream is False
    channel.queue_delete(name)


def test_a_missing_exchange_is_a_rejection(connection: BlockingConnection) -> None:
    """The broker closes the channel: pika's error, which also says that the message is nowhere."""
    channel = relatum.intercept(connection).channel()
    channel.confirm_delivery()
    with pytest.raises(pika.exceptions.ChannelClosedByBroker) as caught:
        channel.basic_publish(unique_name(), "", b"")
    assert caught.value.reply_code == 404
    assert isinstance(caught.value, PublishRejected)
    with pytest.raises(pika.exceptions.ChannelWrongStateError) as closed:
        channel.basic_publish("", "", b"")
    assert type(closed.value) is pika.exceptions.ChannelWrongStateError


def test_a_lost_connection_leaves_the_outcome_unknown(amqp_url: str, stream_url: str, stream_name: str) -> None:
    """The link goes half-open: the message arrives, its confirm does not. The error settles it from the stream."""
    with Proxy.to(amqp_url) as proxy:
        parameters = pika.URLParameters(proxy.url(amqp_url))
        parameters.heartbeat = 1
        connection = BlockingConnection(parameters)
        channel = relatum.intercept(connection, broker_url=amqp_url, stream_url=stream_url).channel()
        channel.confirm_delivery()
        channel.basic_publish("", stream_name, b"first")
        proxy.mode = "blackhole_replies"
        with pytest.raises(pika.exceptions.AMQPConnectionError) as caught:
            channel.basic_publish("", stream_name, b"second")
    error = caught.value
    assert isinstance(error, PublishOutcomeUnknown)
    assert error.in_stream is None
    assert [place.stream for place in error.settle()] == [stream_name]
    assert error.settle()[0].offset >= 1


def test_a_message_that_never_arrived_is_settled_as_rejected(amqp_url: str, stream_url: str, stream_name: str) -> None:
    """Nothing arrives at the broker: once it must have given up the connection, the message is known to be nowhere."""
    with Proxy.to(amqp_url) as proxy:
        parameters = pika.URLParameters(proxy.url(amqp_url))
        parameters.heartbeat = 1
        connection = BlockingConnection(parameters)
        channel = relatum.intercept(connection, broker_url=amqp_url, stream_url=stream_url).channel()
        channel.confirm_delivery()
        channel.basic_publish("", stream_name, b"first")
        proxy.mode = "blackhole"
        with pytest.raises(PublishOutcomeUnknown) as caught:
            channel.basic_publish("", stream_name, b"second")
    with pytest.raises(PublishOutcomeUnknown):
        caught.value.settle(0.05)
    with pytest.raises(PublishRejected) as rejected:
        caught.value.settle()
    assert rejected.value.in_stream is False


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


def test_intercepting_twice_is_once(connection: BlockingConnection, queue: str) -> None:
    """The same options again change nothing; other options are an error."""
    relatum.intercept(connection, keys=["a"])
    channel = connection.channel()
    publisher = vars(channel)["basic_publish"]
    relatum.intercept(connection, keys=["a"])
    assert vars(channel)["basic_publish"] is publisher
    with pytest.raises(ConfigurationError, match="release"):
        relatum.intercept(connection, keys=["b"])


def test_release_leaves_no_trace(connection: BlockingConnection, queue: str) -> None:
    """Afterwards connection and channels have the attributes they had, and messages go out bare."""
    channel = connection.channel()
    before = set(vars(connection)), set(vars(channel))
    relatum.intercept(connection)
    late = connection.channel()
    assert relatum.release(connection) is connection
    assert (set(vars(connection)), set(vars(channel))) == before
    for one in (channel, late, connection.channel()):
        one.basic_publish("", queue, b"")
        assert get(connection, queue)[0].message_id is None
    relatum.release(connection)


@pytest.mark.parametrize("options", [{"recorder": "other"}, {"on_invalid": "ignore"}, {"confirm_timeout_s": 0}])
def test_wrong_options_are_named(connection: BlockingConnection, options: dict[str, Any]) -> None:
    """An option that cannot be is an error, and nothing is intercepted."""
    with pytest.raises(ConfigurationError, match=next(iter(options))):
        relatum.intercept(connection, **options)
    assert not hasattr(connection, "_relatum_interception")


def test_what_is_no_connection_is_named() -> None:
    """Anything else than a connection is an error that names its class."""
    with pytest.raises(ConfigurationError, match="dict"):
        relatum.intercept({})


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


def test_skipped_values_are_published(
    connection: BlockingConnection, queue: str, caplog: pytest.LogCaptureFixture
) -> None:
    """With on_invalid="skip" the message goes out as it is."""
    channel = relatum.intercept(connection, keys=["order_id"], on_invalid="skip").channel()
    with caplog.at_level(logging.WARNING):
        channel.basic_publish("", queue, b"", pika.BasicProperties(headers={"order_id": {"a": 1}}))
    assert get(connection, queue)[0].headers["order_id"] == {"a": 1}
    assert "order_id" in caplog.text


LONG = (
    *("content_type", "content_encoding", "correlation_id", "reply_to", "expiration", "message_id", "type"),
    *("user_id", "app_id", "cluster_id"),
)
"""The properties that are short strings."""


@pytest.mark.parametrize("confirms", [True, False])
def test_a_string_that_is_too_long_is_refused_as_by_a_bare_client(amqp_url: str, queue: str, confirms: bool) -> None:
    """Property by property, and names of headers: the same class and the same words, and nothing is sent."""
    with broker_connection(amqp_url) as bare, broker_connection(amqp_url) as ours:
        channels = [each.channel() for each in (bare, relatum.intercept(ours))]
        if confirms:
            for channel in channels:
                channel.confirm_delivery()

        def refused(channel: Any, **fields: Any) -> tuple[type[BaseException], str] | None:
            try:
                channel.basic_publish("", queue, b"too long", pika.BasicProperties(**fields))
            except Exception as error:
                return type(error), str(error)
            return None

        for text in ("x" * 256, "ü" * 128):
            for fields in [*({name: text} for name in LONG), {"headers": {text: "v"}}]:
                there, here = [refused(channel, **fields) for channel in channels]
                assert there == here is not None, fields
        channels[1].basic_publish("", queue, b"sent", pika.BasicProperties(app_id="x" * 255))
        assert get(ours, queue)[1] == b"sent"
        assert relatum.statistics(ours).errors == {}
