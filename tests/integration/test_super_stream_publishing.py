"""Publishing to super streams through pika and aio-pika, intercepted and not, against a real broker."""

import asyncio
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any, TypeAlias

import aio_pika
import pika
import pytest
from pika.adapters.blocking_connection import BlockingChannel, BlockingConnection
from pika.exceptions import UnroutableError

import relatum
from relatum import Broker
from relatum.errors import BrokerUnavailable, ConfigurationError, InvalidInput, PublishUnroutable, SuperStreamNotFound
from relatum.reading import StreamReader, TimeSource
from relatum.superstreams import (
    Layout,
    Target,
    add_partition,
    declare_super_stream,
    delete_super_stream,
    unbind_partition,
)
from relatum_consumer import Relations
from tests.support import broker_connection, unique_name, wait_until
from tests.support.callbacks import open_channel, running
from tests.support.place import Place
from tests.support.super_streams import bodies, tail

KEYS = [f"hello{number}" for number in range(1, 6)]
PLACES = [1, 0, 1, 2, 0]
"""Where RabbitMQ's stream clients send these keys, of three partitions."""

Placed: TypeAlias = Callable[[], list[list[bytes]]]

EXPECTED = [[b"hello2", b"hello5"], [b"hello1", b"hello3"], [b"hello4"]]
"""The same by partition."""


@pytest.fixture
def orders(layout: Layout, broker: Broker) -> relatum.SuperStream:
    return relatum.SuperStream(layout.super_stream, route_by="tail", broker=broker)


@pytest.fixture
def placed(stream_url: str, layout: Layout) -> Placed:
    return lambda: list(bodies(stream_url, layout).values())


class Elsewhere(Target):
    """A target that sends each message to the queue the caller named as the routing key."""

    def publish(
        self, channel: Any, body: bytes | str, properties: Any = None, *, routing_key: str = "", mandatory: bool = False
    ) -> Any:
        return channel.basic_publish("", routing_key, body, properties, mandatory)

    async def publish_async(self, channel: Any, message: Any, routing_key: str = "", **kwargs: Any) -> Any:
        return await channel.default_exchange.publish(message, routing_key, **kwargs)


@pytest.mark.parametrize("confirm", [False, True])
def test_an_intercepted_channel_publishes_to_a_super_stream(
    connection: BlockingConnection,
    orders: relatum.SuperStream,
    layout: Layout,
    stream_url: str,
    confirm: bool,
    placed: Placed,
) -> None:
    """A super stream in the exchange's place routes and stamps as pika's own call, and without stamps once released."""
    channel = relatum.intercept(connection).channel()
    if confirm:
        channel.confirm_delivery()
    properties = tail("hello1")
    assert channel.basic_publish(orders, "", b"hello1", properties) is None
    assert properties == tail("hello1")
    channel.basic_publish(orders, "", b"hello2", tail("hello2"), True)
    channel.basic_publish(exchange=orders, routing_key="", body="hello3", properties=tail("hello3"))
    channel.basic_publish(orders, "", b"hello4", properties=tail("hello4"), mandatory=True)
    relatum.release(connection)
    orders.publish(channel, b"hello5", tail("hello5", app_id="shop"))
    channel.close()
    assert placed() == EXPECTED
    with StreamReader.open(stream_url) as reader:
        stamped, released = reader.iterate(layout.partitions[0].stream)
    assert set(stamped.headers) == set(released.headers) == {"tail"}
    assert (stamped.time_source, released.properties.app_id) == (TimeSource.MESSAGE_ID, "shop")


def test_it_publishes_without_interception(
    channel: BlockingChannel, orders: relatum.SuperStream, broker: Broker, placed: Placed
) -> None:
    """A super stream publishes to any channel, by a key, a function or a header; a named number needs no question."""
    by_body = relatum.SuperStream(orders.name, route_by=lambda message: message.body, broker=broker)
    by_key = relatum.SuperStream(orders.name, partitions=3, broker="amqp://127.0.0.1:1")
    orders.publish(channel, b"hello1", tail("hello1"))
    orders.publish(channel, b"hello2", tail("hello2"), mandatory=True)
    by_body.publish(channel, b"hello3")
    by_key.publish(channel, b"hello4", routing_key="hello4")
    by_body.publish(channel, "hello5")
    assert placed() == EXPECTED


def test_what_has_no_key_or_is_given_wrongly_is_not_sent(
    channel: BlockingChannel, orders: relatum.SuperStream, broker: Broker, placed: Placed
) -> None:
    """Without a key or a channel, an argument given twice or too many: one error each, and the channel continues."""
    relatum.intercept(channel.connection)
    publish: Any = channel.basic_publish
    for properties in (None, pika.BasicProperties(), pika.BasicProperties(headers={"tale": "hello1"})):
        with pytest.raises(InvalidInput, match="'tail'"):
            publish(orders, "", b"lost", properties)
    by_key = relatum.SuperStream(orders.name, broker=broker)
    with pytest.raises(TypeError):
        publish(orders, "")
    with pytest.raises(TypeError, match="body"):
        publish(by_key, "hello1", b"lost", body=b"lost")
    with pytest.raises(TypeError, match="arguments"):
        publish(by_key, "hello1", b"lost", None, False, "more")
    for key in (None, 5):
        with pytest.raises(InvalidInput, match="nothing was sent"):
            publish(by_key, key, b"lost")
    for target in (by_key, relatum.SuperStream(orders.name), relatum.SuperStream(orders.name, partitions=3)):
        with pytest.raises(ConfigurationError, match="NoneType"):
            target.publish(None, b"lost", routing_key="hello1")
    publish(orders, "", b"hello2", tail("hello2"))
    assert placed() == [[b"hello2"], [], []]


def test_a_super_stream_that_is_not_there(channel: BlockingChannel, stream_url: str, broker: Broker) -> None:
    """A missing super stream or broker is an error that leaves the channel open, until the stream is declared."""
    orders = relatum.SuperStream(unique_name("relatum-super"), broker=broker)
    relatum.intercept(channel.connection)
    with pytest.raises(SuperStreamNotFound):
        channel.basic_publish(orders, "hello1", b"")
    layout = declare_super_stream(channel.connection, orders.name, 1)
    try:
        channel.basic_publish(orders, "hello1", b"now")
        assert list(bodies(stream_url, layout).values()) == [[b"now"]]
    finally:
        delete_super_stream(channel.connection, orders.name)
    with pytest.raises(BrokerUnavailable):
        relatum.SuperStream("orders").layout("amqp://127.0.0.1:1/")


def test_the_broker_is_asked_once(channel: BlockingChannel, layout: Layout, amqp_url: str, broker: Broker) -> None:
    """The layout is kept until `refresh`; a message to a partition that is gone is an error if it is mandatory."""
    connection, name = channel.connection, layout.super_stream
    orders = relatum.SuperStream(name, broker=broker)
    assert orders.layout(connection) == layout
    add_partition(connection, name)
    with broker_connection(amqp_url) as another:
        assert orders.layout(another.channel()) is orders.layout(connection)
    orders.refresh()
    assert len(orders.layout(connection)) == 4
    unbind_partition(connection, name, f"{name}-3", delete=True)
    lost = next(key for key in map(str, range(50)) if Layout.numbered("orders", 4).route(key).place == 3)
    with pytest.raises(UnroutableError):
        orders.publish(channel, b"", routing_key=lost)
    orders.publish(channel, b"", routing_key=lost, mandatory=False)
    relatum.intercept(connection)
    for arguments in ((), (None, True)):
        with pytest.raises(PublishUnroutable):
            channel.basic_publish(orders, lost, b"", *arguments)
    channel.basic_publish(orders, lost, b"", None, False)


def test_a_query_of_a_silent_broker_delays_no_refresh() -> None:
    """An event loop may call `refresh` while a thread queries a broker that does not answer."""
    orders = relatum.SuperStream("orders")
    with ThreadPoolExecutor() as pool, socket.create_server(("127.0.0.1", 0)) as silent:
        asking = pool.submit(orders.layout, f"amqp://guest:guest@127.0.0.1:{silent.getsockname()[1]}")
        with silent.accept()[0]:
            refreshing = pool.submit(orders.refresh)
            wait([refreshing], 3.0)
            assert refreshing.done()
        with pytest.raises(BrokerUnavailable):
            asking.result()


def test_threads_share_one(amqp_url: str, orders: relatum.SuperStream, placed: Placed) -> None:
    """Threads that begin together, each with its connection, agree, and no message is lost."""
    barrier = threading.Barrier(4)

    def publish(number: int) -> None:
        with broker_connection(amqp_url) as connection:
            channel = relatum.intercept(connection).channel()
            channel.confirm_delivery()
            barrier.wait(90)
            for key in KEYS:
                channel.basic_publish(orders, "", key.encode(), tail(key))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(publish, range(4)))
    assert [sorted(found) for found in placed()] == [sorted(4 * found) for found in EXPECTED]


def test_callback_channels_count_each_publish_once(place: Place, layout: Layout, orders: relatum.SuperStream) -> None:
    """Receipts on a callback channel name the partitions of their own messages, whatever was published before."""
    options = {"database": place.database, "keys": ["tail"], "broker": place.broker}
    with running(place.amqp, **options) as (connection, on_thread):
        channel = open_channel(connection, on_thread)
        on_thread(channel.confirm_delivery, lambda _: None)
        for key in KEYS:
            on_thread(channel.basic_publish, orders, "", key.encode(), tail(key))
        receipts = [
            on_thread(relatum.publish, channel, orders, "", key.encode(), tail(key), mandatory=True) for key in KEYS
        ]
        places = [receipt.wait(90)[0].stream for receipt in receipts]
    assert places == [layout.partitions[place].stream for place in PLACES]


def test_all_partitions_are_recorded(
    channel: BlockingChannel, orders: relatum.SuperStream, layout: Layout, place: Place
) -> None:
    """All partitions are recorded, a receipt names its partition, and a target of one's own gives no receipts."""
    connection = channel.connection
    relatum.intercept(connection, database=place.database, keys=["tail"], broker=place.broker)
    receipt = relatum.publish(connection.channel(), orders, "", b"", tail("hello1"))
    assert [each.stream for each in receipt.wait(90)] == [layout.partitions[1].stream]
    with broker_connection(place.amqp) as bare:
        orders.publish(bare.channel(), b"", tail("hello4"))
    wait_until(lambda: place.recorded_to(layout.partitions[2].stream) == 1, what="another partition")
    channel.basic_publish(Elsewhere(), place.stream, b"there")
    with pytest.raises(ConfigurationError, match="Elsewhere"):
        relatum.publish(channel, Elsewhere(), place.stream, b"not")
    relatum.release(connection)
    with Relations(place.broker, place.database) as relations:
        assert relations.find("tail", "hello4", streams=orders.name).ids == ((layout.partitions[2].stream, 0),)
    assert [message.body for message in place.messages()] == [b"there"]


@pytest.mark.parametrize(("connect", "intercepted"), [(aio_pika.connect, False), (aio_pika.connect_robust, True)])
async def test_aio_pika_publishes_to_a_super_stream(
    amqp_url: str, orders: relatum.SuperStream, connect: Any, intercepted: bool, placed: Placed
) -> None:
    """In an exchange's place and called itself it routes; the result is aio-pika's; messages stay as they were."""
    async with asyncio.timeout(240), await connect(amqp_url) as connection:
        if intercepted:
            relatum.intercept(connection)
        channel = await connection.channel()
        exchange = orders.exchange(channel)
        message = aio_pika.Message(b"hello1", headers={"tail": "hello1"})
        assert type(await exchange.publish(message, "")).__name__ == "Ack"
        assert (message.headers, message.message_id) == ({"tail": "hello1"}, None)
        await exchange.publish(aio_pika.Message(b"hello2", headers={"tail": "hello2"}), mandatory=False)
        await orders.publish_async(channel, aio_pika.Message(b"hello3", headers={"tail": "hello3"}))
        await orders.publish_async(
            channel.default_exchange, aio_pika.Message(b"hello4", headers={"tail": "hello4"}), timeout=90
        )
        by_body = relatum.SuperStream(orders.name, route_by=lambda made: made.body, partitions=3)
        await by_body.exchange(channel).publish(aio_pika.Message(b"hello5"))
        with pytest.raises(InvalidInput, match="'tail'"):
            await exchange.publish(aio_pika.Message(b"lost"))
    assert placed() == EXPECTED


async def test_a_set_goes_on_from_pika_to_aio_pika_by_its_token(
    amqp_url: str, orders: relatum.SuperStream, layout: Layout, stream_url: str
) -> None:
    """A handle places its set once, on a channel of either client; any process with its token publishes there, too."""
    with broker_connection(amqp_url) as connection, orders.affinity() as handle:
        handle.publish(connection.channel(), b"0")
    async with asyncio.timeout(240), await aio_pika.connect(amqp_url) as connection:
        channel = await connection.channel()
        set_ = relatum.AffinityHandle.from_token(handle.token)
        await set_.publish_async(channel, aio_pika.Message(b"1"))
        await set_.publish_async(channel.default_exchange, aio_pika.Message(b"2"))
        await set_.exchange(channel).publish(aio_pika.Message(b"3"))
        await orders.affinity("hash", name="hello1").publish_async(channel, aio_pika.Message(b"other"))
    assert handle.partition is not None
    found = bodies(stream_url, layout)
    assert [body for body in found[handle.partition.stream] if body != b"other"] == [b"0", b"1", b"2", b"3"]
    assert b"other" in found[layout.partitions[1].stream]


async def test_aio_pika_gives_receipts(
    amqp_url: str, orders: relatum.SuperStream, layout: Layout, database_url: str, broker: Broker
) -> None:
    """`relatum.publish_async` takes a super stream on a channel for an exchange."""
    async with asyncio.timeout(240), await aio_pika.connect_robust(amqp_url) as connection:
        relatum.intercept(connection, database=database_url, keys=["tail"], broker=broker)
        exchange = orders.exchange(await connection.channel())
        receipts = [
            await relatum.publish_async(exchange, aio_pika.Message(b"", headers={"tail": key}), "") for key in KEYS
        ]
        for receipt, place in zip(receipts, PLACES, strict=True):
            (found,) = await receipt.wait(90)
            assert found.stream == layout.partitions[place].stream
        relatum.release(connection)
