"""What intercepted connections of pika alone promise; what those of all clients do is in `contract/test_clients.py`."""

import copy
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import Mock

import pika
import pytest
from opentelemetry.instrumentation.pika import PikaInstrumentor
from pika.adapters.blocking_connection import BlockingChannel, BlockingConnection
from pika.channel import Channel

import relatum
from relatum.errors import ConfigurationError, HeadersRefused, PublishOutcomeUnknown, PublishRejected
from tests.contract._clients import Queue, new_queue
from tests.support import unique_name
from tests.support.proxy import Proxy
from tests.support.spans import Spans

FRAME_BODY_BYTES = 131_072 - 8
"""The longest body that fits into one frame: RabbitMQ's `frame_max` without a frame's header and end."""


@pytest.fixture
def queue(amqp_url: str) -> Iterator[Queue]:
    with new_queue(amqp_url) as queue:
        yield queue


@pytest.mark.parametrize("confirm", [False, True])
def test_every_way_to_call_it_works(connection: BlockingConnection, queue: Queue, confirm: bool) -> None:
    """Every call that pika takes publishes with an id and returns None."""
    channel = relatum.intercept(connection).channel()
    if confirm:
        channel.confirm_delivery()
    properties = pika.BasicProperties()
    assert channel.basic_publish("", queue.name, b"1") is None
    assert channel.basic_publish("", queue.name, "2", properties) is None
    assert channel.basic_publish("", queue.name, b"3", properties, True) is None
    assert channel.basic_publish("", queue.name, body=b"4", properties=None) is None
    assert channel.basic_publish(exchange="", routing_key=queue.name, body=b"5", mandatory=True) is None
    found = [queue.get() for _ in range(5)]
    assert [body for _, body in found] == [b"1", b"2", b"3", b"4", b"5"]
    assert all(got.message_id for got, _ in found)


@pytest.mark.parametrize(
    ("body_bytes", "frames", "writes"),
    [(0, 2, 1), (1, 3, 1), (FRAME_BODY_BYTES, 3, 1), (FRAME_BODY_BYTES + 1, 4, 4)],
)
def test_a_message_of_one_body_frame_is_written_at_once(
    connection: BlockingConnection, queue: Queue, body_bytes: int, frames: int, writes: int
) -> None:
    """Its frames go out by one write, pika counts each of them, and after a release each is a write again."""
    channel = relatum.intercept(connection).channel()
    channel.confirm_delivery()
    transport = connection._impl._transport
    write = transport.write = Mock(wraps=transport.write)
    for written in (writes, frames):
        write.reset_mock()
        sent = connection._impl.frames_sent, connection._impl.bytes_sent
        channel.basic_publish("", queue.name, b"x" * body_bytes)
        assert write.call_count == written
        assert connection._impl.frames_sent == sent[0] + frames
        assert connection._impl.bytes_sent == sent[1] + sum(len(call.args[0]) for call in write.call_args_list)
        assert queue.get()[1] == b"x" * body_bytes
        relatum.release(connection)


def test_mistakes_raise_what_pika_raises(connection: BlockingConnection, queue: Queue) -> None:
    """A call that pika does not take raises the same error with and without interception."""
    properties = ("properties", pika.BasicProperties(headers={"a": 1.5}), pika.BasicProperties(headers=[1]))
    calls: list[dict[str, Any]] = [{"body": b"", "properties": each} for each in properties]
    calls += [{}, {"body": b"", "nonsense": 1}]
    channel = connection.channel()

    def errors() -> Iterator[type[BaseException]]:
        with pytest.raises(TypeError):
            channel.basic_publish()
        for arguments in calls:
            with pytest.raises(Exception) as caught:
                channel.basic_publish("", queue.name, **arguments)
            yield caught.type

    bare = list(errors())
    relatum.intercept(connection)
    assert list(errors()) == bare


def test_what_is_derived_or_copied_goes_on(connection: BlockingConnection, queue: Queue) -> None:
    """Properties of a subclass encode in their own way, and channels and their methods can be copied."""

    class Marked(pika.BasicProperties):
        def encode(self) -> Any:
            self.type = "marked"
            return super().encode()

    given, channel = Marked(), relatum.intercept(connection).channel()
    channel.basic_publish("", queue.name, b"", given)
    assert queue.get()[0].type == "marked"
    assert given.type is None
    for method in (copy.copy(channel).basic_publish, copy.copy(channel.basic_publish)):
        assert method.__name__ == "basic_publish"


class Seen(list[Any]):
    """A method that takes more than pika's, and notes what is beyond pika's four first arguments."""

    def __call__(self, *args: Any, **options: Any) -> None:
        self.append((*args[4:], options))


@pytest.mark.parametrize("is_of_class", [False, True])
def test_arguments_of_a_channel_that_takes_more_are_passed_on(
    connection: BlockingConnection, queue: Queue, monkeypatch: pytest.MonkeyPatch, is_of_class: bool
) -> None:
    """A method that takes more than pika's, such as another wrapper's, gets it all; the class's may come later."""
    channel, seen = connection.channel(), Seen()
    if is_of_class:
        relatum.intercept(connection)
    monkeypatch.setattr(BlockingChannel if is_of_class else channel, "basic_publish", seen)
    relatum.intercept(connection)
    channel.basic_publish("", queue.name, b"", tenant="a")
    channel.basic_publish("", queue.name, b"", None, True, "b")
    assert seen == [(False, {"tenant": "a"}), (True, "b", {})]


@pytest.mark.parametrize("kind", [lambda mock: mock, staticmethod])
def test_a_method_that_a_test_replaces_is_called(
    connection: BlockingConnection, monkeypatch: pytest.MonkeyPatch, kind: Callable[[Mock], Any]
) -> None:
    """A mock or a static method in place of the class's method is called with the message's arguments."""
    called = Mock()
    monkeypatch.setattr(BlockingChannel, "basic_publish", kind(called))
    relatum.intercept(connection)
    connection.channel().basic_publish("", "somewhere", b"body")
    relatum.release(connection)
    assert [call.args[:3] for call in called.call_args_list] == [("", "somewhere", b"body")]


def test_a_mock_in_place_of_a_channel_is_intercepted(
    connection: BlockingConnection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mock's class has none of a channel's methods: the mock's own are called, with an id."""
    channel, selecting = Mock(spec=Channel), connection._impl
    monkeypatch.setattr(selecting, "_channels", {})
    monkeypatch.setattr(selecting, "_create_channel", Mock(return_value=channel))
    publish = channel.basic_publish
    assert relatum.intercept(selecting).channel(on_open_callback=Mock()) is channel
    channel.basic_publish("", "somewhere", b"body")
    relatum.release(selecting)
    channel.basic_publish("", "somewhere", b"bare")
    assert [call.args[2] for call in publish.call_args_list] == [b"body", b"bare"]
    assert publish.call_args_list[0].args[3].message_id


def test_a_subclass_may_return_more_than_the_channel(amqp_url: str, queue: Queue) -> None:
    """A subclass's method `channel` may return a pair, a wrapper or a future: the new channel is intercepted."""

    class Numbered(BlockingConnection):
        def channel(self, channel_number: int | None = None) -> Any:
            channel = super().channel(channel_number)
            return channel.channel_number, channel

    with Numbered(pika.URLParameters(amqp_url)) as connection:
        number, channel = relatum.intercept(connection).channel()
        channel.basic_publish("", queue.name, b"")
        assert number == channel.channel_number
    assert queue.get()[0].message_id


def test_the_channel_that_a_consumer_is_given_is_covered(connection: BlockingConnection, queue: Queue) -> None:
    """A consumer's callback publishes with ids, even on a channel that was opened before the interception."""
    early = connection.channel()
    relatum.intercept(connection)
    seen: list[Any] = []

    def on_message(channel: BlockingChannel, method: Any, properties: Any, body: bytes) -> None:
        seen.append(properties)
        if len(seen) == 1:
            channel.basic_publish("", queue.name, b"again")
        else:
            channel.stop_consuming()

    early.basic_publish("", queue.name, b"first")
    early.basic_consume(queue.name, on_message, auto_ack=True)
    early.start_consuming()
    assert all(properties.message_id for properties in seen)


def test_headers_beyond_a_small_frame_are_refused(amqp_url: str, queue: Queue) -> None:
    """Headers just within the connection's own frame size are published, and larger ones are refused."""
    parameters = pika.URLParameters(amqp_url)
    parameters.frame_max = 8192  # the least that RabbitMQ 4 accepts
    with BlockingConnection(parameters) as small:
        channel = relatum.intercept(small).channel()
        channel.confirm_delivery()
        channel.basic_publish("", queue.name, b"", pika.BasicProperties(headers={"a": "x" * 7900}))
        with pytest.raises(HeadersRefused):
            channel.basic_publish("", queue.name, b"", pika.BasicProperties(headers={"a": "x" * 8100}))


def test_a_406_is_a_rejection_where_it_is_about_the_message(channel: BlockingChannel) -> None:
    """A 406 about a message is a rejection; one about an acknowledgement leaves the next message's outcome unknown."""
    another = relatum.intercept(channel.connection).channel()
    with pytest.raises(pika.exceptions.ChannelClosedByBroker) as caught:
        channel.basic_publish("", unique_name(), b"", pika.BasicProperties(expiration="soon"))
    assert isinstance(caught.value, PublishRejected)
    with pytest.raises(pika.exceptions.ChannelWrongStateError) as closed:
        channel.basic_publish("", "", b"")
    assert type(closed.value) is pika.exceptions.ChannelWrongStateError
    another.confirm_delivery()
    another.basic_ack(77)
    with pytest.raises(PublishOutcomeUnknown):
        another.basic_publish("", unique_name(), b"")


@pytest.mark.parametrize("are_erased", [False, True], ids=["", "credentials erased"])
def test_a_reset_connection_leaves_the_outcome_unknown(amqp_url: str, stream_name: str, are_erased: bool) -> None:
    """A reset raises pika's error of unknown outcome, later publishes pika's alone; only `settle` needs credentials."""
    with Proxy.to(amqp_url) as proxy:
        parameters = pika.URLParameters(proxy.url(amqp_url))
        user = parameters.credentials
        parameters.credentials = pika.PlainCredentials(user.username, user.password, erase_on_connect=are_erased)
        channel = relatum.intercept(BlockingConnection(parameters)).channel()
        channel.confirm_delivery()
        proxy.mode = "blackhole_replies"
        channel.connection._impl.ioloop.call_later(0.2, proxy.reset)
        with pytest.raises(pika.exceptions.StreamLostError) as caught:
            channel.basic_publish("", stream_name, b"")
        assert isinstance(caught.value, PublishOutcomeUnknown)
        with pytest.raises(pika.exceptions.AMQPError) as after:
            channel.basic_publish("", stream_name, b"")
        assert not isinstance(after.value, PublishOutcomeUnknown)
        if are_erased:
            with pytest.raises(ConfigurationError, match="erase_on_connect"):
                caught.value.settle()


@pytest.mark.parametrize("ours_first", [True, False])
def test_opentelemetry_composes_in_either_order(
    connection: BlockingConnection, queue: Queue, spans: Spans, ours_first: bool
) -> None:
    """In either order of instrumentation and interception, a message has both, and each ends without the other."""
    channel, other = connection.channel(), connection.channel()

    def publish(channel: BlockingChannel) -> tuple[bool, bool, int]:
        """Whether a message has our id, and whether the headers of a span; and how many spans it made."""
        spans.clear()
        channel.basic_publish("", queue.name, b"")
        properties, _ = queue.get()
        return bool(properties.message_id), "traceparent" in (properties.headers or {}), len(spans.all)

    if ours_first:
        relatum.intercept(connection)
    for each in (channel, other):
        PikaInstrumentor.instrument_channel(each, tracer_provider=spans.provider)
    relatum.intercept(connection)
    channel._is_instrumented_by_opentelemetry = True
    assert publish(channel) == (True, True, 1)
    PikaInstrumentor.uninstrument_channel(channel)
    assert publish(channel) == (True, False, 0)
    relatum.release(connection)
    assert publish(channel) == (False, False, 0)
    assert publish(other) == (False, True, 1)
    relatum.intercept(connection)
    PikaInstrumentor().instrument(tracer_provider=spans.provider)
    try:
        assert publish(connection.channel())[:2] == (True, True)
        assert spans.all
    finally:
        PikaInstrumentor().uninstrument()
