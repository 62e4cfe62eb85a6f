"""Intercepted aio-pika connections against a real broker."""

import asyncio
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import aio_pika
import pytest
import wrapt
from aio_pika.exceptions import AMQPConnectionError, DeliveryError, PublishError
from aiormq.abc import DeliveredMessage
from aiormq.exceptions import ChannelClosed
from opentelemetry.instrumentation.aio_pika import AioPikaInstrumentor
from opentelemetry.trace import SpanKind

import relatum
from relatum.errors import (
    HeadersRefused,
    InvalidRelationshipKey,
    PublishNacked,
    PublishOutcomeUnknown,
    PublishRejected,
    PublishUnroutable,
)
from relatum.uuid7 import time_us_of
from tests.support import unique_name
from tests.support.proxy import Proxy
from tests.support.spans import Spans, collected_spans

CONNECT = [aio_pika.connect, aio_pika.connect_robust]


async def queue_of(channel: Any) -> Any:
    """A new queue that goes with its connection."""
    return await channel.declare_queue(unique_name(), exclusive=True)


async def get(queue: Any) -> Any:
    """The next message of a queue."""
    return await queue.get(no_ack=True, timeout=90)


async def until(condition: Callable[[], bool]) -> None:
    """Let other tasks run until the condition holds."""
    async with asyncio.timeout(240):
        while not condition():  # noqa: ASYNC110 - the clients signal nothing here
            await asyncio.sleep(0)


@pytest.mark.parametrize("connect", CONNECT)
async def test_messages_get_what_they_lack(amqp_url: str, connect: Any) -> None:
    """The connection stays what it is; a message arrives with an id and a time; the caller's stays as it was."""
    connection = await connect(amqp_url)
    async with connection:
        kind = type(connection)
        assert relatum.intercept(connection, keys=["order_id"]) is connection
        channel = await connection.channel()
        assert type(connection) is kind
        queue = await queue_of(channel)
        message = aio_pika.Message(b"body", headers={"order_id": "1"}, type="made")
        await channel.default_exchange.publish(message, queue.name)
        assert message.message_id is None
        assert message.headers == {"order_id": "1"}
        got = await get(queue)
        assert time_us_of(got.message_id)
        assert set(got.headers) == {"order_id"}
        assert (got.body, got.type) == (b"body", "made")


@pytest.mark.parametrize("connect", CONNECT)
async def test_what_is_open_already_is_covered(amqp_url: str, connect: Any) -> None:
    """Channels and exchanges from before, and the channel underneath, publish through us too."""
    async with await connect(amqp_url) as connection:
        channel = await connection.channel()
        queue = await queue_of(channel)
        exchange = await channel.declare_exchange(unique_name(), auto_delete=True)
        await queue.bind(exchange, "key")
        relatum.intercept(connection)
        await exchange.publish(aio_pika.Message(b"1"), "key")
        await channel.default_exchange.publish(aio_pika.Message(b"2"), queue.name)
        underlay = await channel.get_underlay_channel()
        await underlay.basic_publish(b"3", routing_key=queue.name)
        for _ in range(3):
            assert time_us_of((await get(queue)).message_id)


@pytest.mark.parametrize("connect", CONNECT)
async def test_release_leaves_no_trace(amqp_url: str, connect: Any) -> None:
    """Afterwards messages go out bare, on channels from before, from meanwhile and from later."""
    async with await connect(amqp_url) as connection:
        early = await connection.channel()
        before = set(vars(connection)), set(vars(early))
        relatum.intercept(connection)
        late = await connection.channel()
        queue = await queue_of(late)
        await early.default_exchange.publish(aio_pika.Message(b""), queue.name)
        await get(queue)
        assert relatum.release(connection) is connection
        assert (set(vars(connection)), set(vars(early))) == before
        for channel in (early, late, await connection.channel()):
            await channel.default_exchange.publish(aio_pika.Message(b""), queue.name)
            assert (await get(queue)).headers == {}


async def test_bad_keys_and_header_bombs_are_refused(amqp_url: str) -> None:
    """Nothing of them reaches the broker, and the channel stays usable."""
    async with await aio_pika.connect(amqp_url) as connection:
        channel = await relatum.intercept(connection, keys=["order_id"]).channel()
        queue = await queue_of(channel)
        deep: dict[str, Any] = {}
        for _ in range(900):
            deep = {"in": deep}
        publish = channel.default_exchange.publish
        with pytest.raises(InvalidRelationshipKey):
            await publish(aio_pika.Message(b"", headers={"order_id": 1.5}), queue.name)
        with pytest.raises(HeadersRefused):
            await publish(aio_pika.Message(b"", headers=deep), queue.name)
        await publish(aio_pika.Message(b"good"), queue.name)
        assert (await get(queue)).body == b"good"


async def test_callbacks_see_a_returned_message_as_it_was_sent(amqp_url: str) -> None:
    """Callbacks of returns see the caller's headers, and a time beside an id of the caller's."""
    async with await aio_pika.connect(amqp_url) as connection:
        relatum.intercept(connection)
        channel = await connection.channel()
        returned: list[Any] = []
        channel.return_callbacks.add(lambda _channel, message: returned.append(message.headers))
        await channel.default_exchange.publish(aio_pika.Message(b"", headers={"a": 1}), unique_name())
        await channel.default_exchange.publish(aio_pika.Message(b"", message_id="mine"), unique_name())
        assert returned[0] == {"a": 1}
        assert list(returned[1]) == ["relatum_time"]


@pytest.mark.parametrize("message", [{"user_id": "somebody else"}, {"exchange": "not there"}])
async def test_what_the_broker_refuses_of_a_message_is_a_rejection(amqp_url: str, message: dict[str, Any]) -> None:
    """A definite 406 or 404 is `PublishRejected` and aiormq's own error: in no stream, and nothing to settle."""
    async with await aio_pika.connect(amqp_url) as connection:
        relatum.intercept(connection)
        channel = await connection.channel()
        exchange = channel.default_exchange
        if name := message.get("exchange"):
            exchange = await channel.get_exchange(name, ensure=False)
        published = aio_pika.Message(b"", user_id=message.get("user_id"))
        with pytest.raises(ChannelClosed) as caught:
            await exchange.publish(published, unique_name())
        assert isinstance(caught.value, PublishRejected)
        assert caught.value.in_stream is False


async def test_unroutable_and_nacked_are_both_errors(amqp_url: str) -> None:
    """aio-pika's own results and errors, the errors ours too; what comes back is the caller's message."""
    async with await aio_pika.connect(amqp_url) as connection:
        relatum.intercept(connection)
        message = aio_pika.Message(b"", headers={"a": 1})
        quiet = await connection.channel()
        result = await quiet.default_exchange.publish(message, unique_name())
        assert isinstance(result, DeliveredMessage)
        assert result.header.properties.headers == {"a": 1}
        loud = await connection.channel(on_return_raises=True)
        with pytest.raises(PublishError) as unroutable:
            await loud.default_exchange.publish(message, unique_name())
        assert isinstance(unroutable.value, PublishUnroutable)
        assert unroutable.value.in_stream is False
        assert unroutable.value.message.header.properties.headers == {"a": 1}
        full = await loud.declare_queue(
            unique_name(), exclusive=True, arguments={"x-max-length": 1, "x-overflow": "reject-publish"}
        )

        async def overfill() -> None:
            for _ in range(10):
                await loud.default_exchange.publish(message, full.name)

        with pytest.raises(DeliveryError) as nacked:
            await overfill()
        assert isinstance(nacked.value, PublishNacked)
        # Errors go to other processes, with what they say: a worker's results hold them.
        assert isinstance(pickle.loads(pickle.dumps(nacked.value)), PublishNacked)
        arrived = pickle.loads(pickle.dumps(unroutable.value))
        assert arrived.in_stream is False
        assert arrived.message.header.properties.headers == {"a": 1}


async def test_two_unroutable_messages_of_one_id_are_both_reported(amqp_url: str) -> None:
    """aio-pika alone confirms one of two in flight under one id; through us each comes back as what it is."""
    async with await aio_pika.connect(amqp_url) as connection:
        channel = await relatum.intercept(connection).channel()
        for _ in range(50):
            name = unique_name()
            results = await asyncio.gather(
                *(channel.default_exchange.publish(aio_pika.Message(b"", message_id="same"), name) for _ in range(3))
            )
            assert all(isinstance(result, DeliveredMessage) for result in results)


async def test_a_publish_given_up_does_not_confuse_the_next_of_its_id(amqp_url: str) -> None:
    """The broker's late answer to a message given up is not taken for the next one of that id."""
    with Proxy.to(amqp_url) as proxy:
        async with await aio_pika.connect(proxy.url(amqp_url)) as connection:
            channel = await relatum.intercept(connection).channel()
            queue = await queue_of(channel)
            proxy.mode = "blackhole_replies"
            with pytest.raises(PublishOutcomeUnknown) as caught:
                await channel.default_exchange.publish(
                    aio_pika.Message(b"", message_id="same"), unique_name(), timeout=0.2
                )
            assert isinstance(caught.value, TimeoutError)
            second = asyncio.create_task(
                channel.default_exchange.publish(aio_pika.Message(b"", message_id="same"), queue.name, timeout=0.3)
            )
            # Nothing of the second is sent while the broker may still answer for the first.
            with pytest.raises(TimeoutError) as waited:
                await second
            assert not isinstance(waited.value, PublishOutcomeUnknown)


@pytest.mark.parametrize("connect", CONNECT)
async def test_a_half_open_link_is_an_unknown_outcome(
    amqp_url: str, stream_url: str, stream_name: str, connect: Any
) -> None:
    """No bare CancelledError reaches the caller, whose task nobody cancelled; the stream settles the outcome."""
    with Proxy.to(amqp_url) as proxy:
        connection = await connect(proxy.url(amqp_url) + "?heartbeat=1")
        relatum.intercept(connection, broker_url=amqp_url, stream_url=stream_url)
        channel = await connection.channel()
        await channel.default_exchange.publish(aio_pika.Message(b"first"), stream_name)
        proxy.mode = "blackhole_replies"
        with pytest.raises(AMQPConnectionError) as caught:
            await channel.default_exchange.publish(aio_pika.Message(b"second"), stream_name)
        error: Any = caught.value
        assert isinstance(error, PublishOutcomeUnknown)
        assert error.in_stream is None
        (place,) = await error.settle()
        assert place.stream == stream_name
        proxy.mode = "pass"
        await connection.close()


async def test_a_message_that_never_arrived_is_settled_as_rejected(
    amqp_url: str, stream_url: str, stream_name: str
) -> None:
    """Once the broker must have given up the connection, the message is known to be nowhere."""
    with Proxy.to(amqp_url) as proxy:
        connection = await aio_pika.connect(proxy.url(amqp_url) + "?heartbeat=1")
        relatum.intercept(connection, broker_url=amqp_url, stream_url=stream_url)
        channel = await connection.channel()
        proxy.mode = "blackhole"
        with pytest.raises(PublishOutcomeUnknown) as caught:
            await channel.default_exchange.publish(aio_pika.Message(b""), stream_name)
        error: Any = caught.value
        with pytest.raises(PublishRejected):
            await error.settle()
        await connection.close()


async def test_a_deadline_of_ours_ends_a_publish(amqp_url: str, stream_name: str) -> None:
    """With confirm_timeout_s, a publish without a time-out of its own ends in time, its outcome unknown."""
    with Proxy.to(amqp_url) as proxy:
        connection = await aio_pika.connect(proxy.url(amqp_url))
        channel = await relatum.intercept(connection, confirm_timeout_s=0.3).channel()
        proxy.mode = "blackhole_replies"
        with pytest.raises(PublishOutcomeUnknown) as caught:
            await channel.default_exchange.publish(aio_pika.Message(b""), stream_name)
        assert isinstance(caught.value, TimeoutError)
        proxy.reset()
        await connection.close()


async def test_a_cancellation_of_the_callers_own_stays_one(amqp_url: str, stream_name: str) -> None:
    """Who cancels a publish, or times it out, gets what asyncio gives."""
    with Proxy.to(amqp_url) as proxy:
        connection = await aio_pika.connect(proxy.url(amqp_url))
        channel = await relatum.intercept(connection).channel()
        proxy.mode = "blackhole_replies"
        with pytest.raises(TimeoutError) as caught:
            async with asyncio.timeout(0.1):
                await channel.default_exchange.publish(aio_pika.Message(b""), stream_name)
        assert not isinstance(caught.value, PublishOutcomeUnknown)
        task = asyncio.create_task(channel.default_exchange.publish(aio_pika.Message(b""), stream_name))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        proxy.reset()
        await connection.close()


async def test_a_robust_connection_comes_back_intercepted(amqp_url: str, stream_name: str) -> None:
    """In-flight publishes end as unknown at a reset; after the reconnect, channels and exchanges go on through us."""
    with Proxy.to(amqp_url) as proxy:
        connection = await aio_pika.connect_robust(proxy.url(amqp_url), reconnect_interval=0.1)
        channel = await connection.channel()
        exchange = await channel.declare_exchange(unique_name(), auto_delete=True)
        relatum.intercept(connection)
        queue = await queue_of(channel)
        await queue.bind(exchange, "key")
        proxy.mode = "blackhole_replies"
        flying = [
            asyncio.create_task(exchange.publish(aio_pika.Message(b"lost"), "key", timeout=90)) for _ in range(10)
        ]
        underlay = await channel.get_underlay_channel()
        await until(lambda: len(underlay.confirmations) == 10)
        proxy.mode = "pass"
        proxy.reset()
        results = await asyncio.gather(*flying, return_exceptions=True)
        assert all(isinstance(result, PublishOutcomeUnknown) for result in results), results
        await connection.ready()
        await channel.ready()
        await exchange.publish(aio_pika.Message(b"after"), "key")
        got = await get(queue)
        while got.body != b"after":
            got = await get(queue)
        assert time_us_of(got.message_id)
        await connection.close()


@pytest.mark.parametrize("ours_first", [True, False])
async def test_instrumentation_of_the_class_composes(amqp_url: str, ours_first: bool) -> None:
    """OpenTelemetry patches `Exchange.publish` on the class; whoever comes first, both see each message."""
    seen: list[Any] = []

    async def traced(wrapped: Any, instance: Any, args: Any, kwargs: Any) -> Any:
        message = args[0]
        message.headers["traceparent"] = "00-1"
        seen.append(message)
        return await wrapped(*args, **kwargs)

    async with await aio_pika.connect_robust(amqp_url) as connection:
        if ours_first:
            relatum.intercept(connection)
        original = aio_pika.Exchange.publish
        wrapt.wrap_function_wrapper(aio_pika.Exchange, "publish", traced)
        try:
            relatum.intercept(connection)
            channel = await connection.channel()
            queue = await queue_of(channel)
            await channel.default_exchange.publish(aio_pika.Message(b""), queue.name)
            got = await get(queue)
            assert time_us_of(got.message_id)
            assert set(got.headers) == {"traceparent"}
            assert len(seen) == 1
        finally:
            aio_pika.Exchange.publish = original


@pytest.fixture
def spans() -> Iterator[Spans]:
    """Where OpenTelemetry's spans go."""
    with collected_spans() as spans:
        yield spans
    if AioPikaInstrumentor().is_instrumented_by_opentelemetry:
        AioPikaInstrumentor().uninstrument()


@pytest.mark.parametrize("connect", CONNECT)
@pytest.mark.parametrize("ours_first", [True, False])
async def test_opentelemetry_composes_in_either_order(
    amqp_url: str, spans: Spans, connect: Any, ours_first: bool
) -> None:
    """Instrumented before or after us, a message has a span and our id; either may go, the other stays."""
    async with await connect(amqp_url) as connection:
        if ours_first:
            relatum.intercept(connection)
        AioPikaInstrumentor().instrument()
        relatum.intercept(connection)
        channel = await connection.channel()
        exchange, queue = channel.default_exchange, await queue_of(channel)
        received: asyncio.Queue[Any] = asyncio.Queue()
        await queue.consume(received.put, no_ack=True)

        async def sent(body: bytes) -> Any:
            spans.clear()
            await exchange.publish(aio_pika.Message(body), queue.name)
            return await received.get()

        got = await sent(b"1")
        assert time_us_of(got.message_id)
        await until(lambda: len(spans.all) == 2)
        send, receive = sorted(spans.all, key=lambda each: each.kind.value)
        assert (send.kind, receive.kind) == (SpanKind.PRODUCER, SpanKind.CONSUMER)
        assert f"{send.context.span_id:016x}" in got.headers["traceparent"]
        assert receive.parent.span_id == send.context.span_id
        AioPikaInstrumentor().uninstrument()
        got = await sent(b"2")
        assert time_us_of(got.message_id)
        assert not got.headers
        assert not [each for each in spans.all if each.kind is SpanKind.PRODUCER]
        AioPikaInstrumentor().instrument()
        relatum.release(connection)
        got = await sent(b"3")
        assert not time_us_of(got.message_id)
        assert "traceparent" in got.headers


async def test_receipts_have_one_span_and_link_to_nothing_twice(
    amqp_url: str, database_url: str, stream_name: str, spans: Spans
) -> None:
    """Published with a receipt, a message has the instrumentation's span, and the recorder's links to that."""
    AioPikaInstrumentor().instrument()
    async with await aio_pika.connect(amqp_url) as connection:
        relatum.intercept(connection, database=database_url, keys=["order_id"])
        exchange = (await connection.channel()).default_exchange
        message = aio_pika.Message(b"", headers={"order_id": "1"})
        receipt = await relatum.publish_async(exchange, message, stream_name)
        await receipt.wait(90)
    sends = [each for each in spans.all if each.kind is SpanKind.PRODUCER]
    assert len(sends) == 1
    (recorded,) = [each for each in spans.ours if each.name == f"record {stream_name}"]
    assert [each.context.span_id for each in recorded.links] == [sends[0].context.span_id]


LONG = ("content_type", "content_encoding", "correlation_id", "reply_to", "message_id", "type", "user_id", "app_id")
"""The properties that are short strings, and that aio-pika takes as text."""


@pytest.mark.parametrize("confirms", [True, False])
async def test_a_string_that_is_too_long_is_refused_as_by_a_bare_client(amqp_url: str, confirms: bool) -> None:
    """Property by property, and names of headers: the same class and the same words, and nothing is sent."""
    async with await aio_pika.connect(amqp_url) as bare, await aio_pika.connect(amqp_url) as ours:
        relatum.intercept(ours)
        channels = [await each.channel(publisher_confirms=confirms) for each in (bare, ours)]
        queue = await queue_of(channels[0])

        async def refused(channel: Any, **fields: Any) -> tuple[type[BaseException], str] | None:
            try:
                await channel.default_exchange.publish(aio_pika.Message(b"too long", **fields), queue.name)
            except Exception as error:
                return type(error), str(error)
            return None

        for text in ("x" * 256, "ü" * 128):
            for name in LONG:
                there, here = [await refused(channel, **{name: text}) for channel in channels]
                assert there == here == (TypeError, "string exceeds maximum length of 255 bytes"), name
        for size in (129, 256):
            there, here = [await refused(channel, headers={"x" * size: "v"}) for channel in channels]
            assert there == here, size
            if there is None:
                for got in [await get(queue) for _ in channels]:
                    assert list(got.headers) == ["x" * 128]
        await channels[1].default_exchange.publish(aio_pika.Message(b"sent", app_id="x" * 255), queue.name)
        assert (await get(queue)).body == b"sent"
        assert relatum.statistics(ours).errors == {}
