"""What intercepted connections of aio-pika alone promise; what all clients' do is in `contract/test_clients.py`."""

import asyncio
import pickle
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aio_pika
import pytest
from aiormq.abc import DeliveredMessage
from opentelemetry.instrumentation.aio_pika import AioPikaInstrumentor
from opentelemetry.trace import SpanKind

import relatum
from relatum import metrics
from relatum.common.uuid7 import time_us_of
from relatum.errors import PublishOutcomeUnknown
from tests.support import cancel, unique_name, wait_until
from tests.support.place import Place
from tests.support.proxy import Proxy
from tests.support.spans import Spans

CONNECT = [aio_pika.connect, aio_pika.connect_robust]


async def queue_of(channel: Any) -> Any:
    return await channel.declare_queue(unique_name(), exclusive=True)


async def get(queue: Any) -> Any:
    return await queue.get(no_ack=True, timeout=90)


async def until(condition: Callable[[], bool]) -> None:
    """Let other tasks run until the condition holds."""
    async with asyncio.timeout(240):
        while not condition():  # noqa: ASYNC110 - the clients signal nothing here
            await asyncio.sleep(0)


@dataclass(frozen=True)
class Way:
    """A line to the broker, an intercepted connection over it, and a channel of that."""

    proxy: Proxy
    connection: Any
    channel: Any

    async def publish(self, to: str, *, timeout_s: float | None = None, **fields: Any) -> Any:
        return await self.channel.default_exchange.publish(aio_pika.Message(b"", **fields), to, timeout=timeout_s)


@asynccontextmanager
async def open_way(amqp_url: str, **options: Any) -> AsyncIterator[Way]:
    """A way of these options, whose line is lost at the end."""
    with Proxy.to(amqp_url) as proxy:
        connection = await aio_pika.connect(proxy.url(amqp_url))
        yield Way(proxy, connection, await relatum.intercept(connection, **options).channel())
        proxy.reset()
        await connection.close()


@pytest.mark.parametrize("connect", CONNECT)
async def test_what_is_open_already_is_covered(amqp_url: str, connect: Any) -> None:
    """Channels, exchanges and underlying channels that were open before publish with ids too, also a narrow one."""
    async with await connect(amqp_url) as connection:
        channel = await connection.channel()
        queue = await queue_of(channel)
        exchange = await channel.declare_exchange(unique_name(), auto_delete=True)
        await queue.bind(exchange, "key")
        narrowed = await connection.channel()
        underlay = await narrowed.get_underlay_channel()

        async def narrow(body: bytes, *, routing_key: str, properties: Any = None) -> Any:
            return await type(underlay).basic_publish(underlay, body, routing_key=routing_key, properties=properties)

        underlay.basic_publish = narrow
        relatum.intercept(connection)
        await exchange.publish(aio_pika.Message(b"1"), "key")
        await channel.default_exchange.publish(aio_pika.Message(b"2"), queue.name)
        for each in (channel, narrowed):
            await (await each.get_underlay_channel()).basic_publish(b"3", routing_key=queue.name)
        for _ in range(4):
            assert time_us_of((await get(queue)).message_id)


async def test_what_comes_back_is_no_error_where_the_channel_says_so(amqp_url: str) -> None:
    """A returned message is the result, and what return callbacks get, as the caller made it."""
    async with open_way(amqp_url) as way:
        returned: list[Any] = []
        way.channel.return_callbacks.add(lambda _channel, message: returned.append(message.headers))
        result = await way.publish(unique_name(), headers={"a": 1})
        assert isinstance(result, DeliveredMessage)
        assert result.header.properties.headers == {"a": 1}
        await way.publish(unique_name(), message_id="mine")
        assert (returned[0], list(returned[1])) == ({"a": 1}, ["relatum_time"])
        seen = relatum.statistics(way.connection)
        assert (seen.published, seen.errors) == (2, {"unroutable": 2})
        assert 'relatum_publisher_errors_total{client="aio-pika",reason="unroutable"}' in metrics.exposition()


@pytest.mark.parametrize("headers", [[("a", 1)], "text", 5])
async def test_headers_that_are_no_table_are_the_clients_error(amqp_url: str, headers: Any) -> None:
    """Also where a table could be made of them."""
    async with open_way(amqp_url) as way:
        with pytest.raises(TypeError, match="dict required"):
            await way.publish(unique_name(), headers=headers)


@pytest.mark.parametrize("is_ours", [True, False])
async def test_a_publish_that_runs_out_of_time(amqp_url: str, stream_name: str, *, is_ours: bool) -> None:
    """A publish ended by `confirm_timeout_s` has an unknown outcome; one ended by its caller ends as asyncio says."""
    async with open_way(amqp_url, confirm_timeout_s=0.3 if is_ours else None) as way:
        way.proxy.mode = "blackhole_replies"
        with pytest.raises(TimeoutError) as caught:
            async with asyncio.timeout(None if is_ours else 0.1):
                await way.publish(stream_name)
        assert isinstance(caught.value, PublishOutcomeUnknown) is is_ours
        task = asyncio.create_task(way.publish(stream_name))
        await asyncio.sleep(0)
        await cancel(task)


async def test_a_tag_that_another_publish_gives_back(amqp_url: str, stream_name: str) -> None:
    """A sent message is not taken for unsent if an earlier one gives its tag back, as one does that was never sent."""
    async with open_way(amqp_url) as way:
        underlay = await way.channel.get_underlay_channel()
        way.proxy.mode = "blackhole_replies"
        async with underlay.lock:
            underlay.delivery_tag += 1
            task = asyncio.create_task(way.publish(stream_name))
            for _ in range(10):
                await asyncio.sleep(0)
            underlay.delivery_tag -= 1
        await until(lambda: len(underlay.confirmations) == 1)
        way.proxy.reset()
        with pytest.raises(PublishOutcomeUnknown):
            await task


async def test_properties_that_another_wrapper_copies(amqp_url: str, stream_name: str) -> None:
    """A message that was sent with a copy of its properties is not taken for unsent."""
    async with open_way(amqp_url) as way:
        relatum.release(way.connection)
        underlay = await way.channel.get_underlay_channel()

        async def copying(*args: Any, properties: Any, **options: Any) -> Any:
            return await type(underlay).basic_publish(
                underlay, *args, properties=pickle.loads(pickle.dumps(properties)), **options
            )

        underlay.basic_publish, way.proxy.mode = copying, "blackhole_replies"
        relatum.intercept(way.connection)
        task = asyncio.create_task(way.publish(stream_name))
        await until(lambda: len(underlay.confirmations) == 1)
        way.proxy.reset()
        with pytest.raises(PublishOutcomeUnknown):
            await task


async def test_a_robust_connection_comes_back_intercepted(amqp_url: str, stream_name: str) -> None:
    """A reset leaves publishes in flight of unknown outcome, and the reconnected exchanges publish with ids."""
    with Proxy.to(amqp_url) as proxy:
        connection = await aio_pika.connect_robust(proxy.url(amqp_url), reconnect_interval=0.1)
        channel = await connection.channel()
        exchange = await channel.declare_exchange(unique_name(), auto_delete=True)
        relatum.intercept(connection)
        queue = await queue_of(channel)
        await queue.bind(exchange, "key")
        proxy.mode = "blackhole_replies"
        lost = aio_pika.Message(b"lost")
        flying = [asyncio.create_task(exchange.publish(lost, "key", timeout=90)) for _ in range(10)]
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


@pytest.fixture
def spans(spans: Spans) -> Iterator[Spans]:
    yield spans
    if AioPikaInstrumentor().is_instrumented_by_opentelemetry:
        AioPikaInstrumentor().uninstrument()


@pytest.mark.parametrize("connect", CONNECT)
@pytest.mark.parametrize("ours_first", [True, False])
async def test_opentelemetry_composes_in_either_order(
    amqp_url: str, spans: Spans, connect: Any, ours_first: bool
) -> None:
    """In either order of instrumentation and interception, a message has both, and each ends without the other."""
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


async def test_receipts_have_one_span_and_link_to_nothing_twice(place: Place, spans: Spans) -> None:
    """A message with a receipt has one span of the instrumentation, which the recorder's span links to once."""
    AioPikaInstrumentor().instrument()
    async with await aio_pika.connect(place.amqp) as connection:
        relatum.intercept(connection, database=place.database, keys=["order_id"])
        exchange = (await connection.channel()).default_exchange
        message = aio_pika.Message(b"", headers={"order_id": "1"})
        receipt = await relatum.publish_async(exchange, message, place.stream)
        await receipt.wait(90)
    (send,) = [each for each in spans.all if each.kind is SpanKind.PRODUCER]
    # The span ends after its commit, for which the receipt waited.
    (recorded,) = await asyncio.to_thread(
        wait_until, lambda: [each for each in spans.ours if each.name == f"record {place.stream}"], what="its span"
    )
    assert [each.context.span_id for each in recorded.links] == [send.context.span_id]
