"""Receipts of clients that make their messages themselves: kombu's producers, and FastStream's brokers."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from aio_pika import Message
from faststream.rabbit import Channel, RabbitBroker, RabbitQueue
from kombu import Connection, Exchange, Producer
from pika import BasicProperties

import relatum
from relatum.errors import ConfigurationError, InvalidRelationshipKey, PublishUnroutable
from relatum.headers import RECEIPT_HEADER
from relatum.reading import StreamReader
from tests.support import all_plain, broker_connection, delete_stream, in_a_loop, unique_name

WAIT_S = 120


@pytest.fixture
def producer(amqp_url: str, stream_url: str, database_url: str) -> Iterator[Producer]:
    """A producer whose process records too."""
    with Connection(amqp_url, transport_options={"confirm_publish": True}) as connection:
        relatum.intercept(connection, database=database_url, keys=["order_id"], stream_url=stream_url)
        yield connection.Producer()
        relatum.release(connection)


def at(stream_url: str, place: relatum.MessageId) -> Any:
    """What lies there."""
    with StreamReader.open(stream_url) as reader:
        return reader.read(place.stream, place.offset)


@pytest.mark.parametrize("message_id", [None, "mine"])
@pytest.mark.parametrize("retry", [False, True])
def test_a_producer_of_kombu_gives_the_offset(
    producer: Producer, stream_url: str, stream_name: str, message_id: str | None, retry: bool
) -> None:
    """Two messages by its own method, under ids of their own or of ours: two places; nobody else's message is asked."""
    headers = {"order_id": "o1"}
    receipts = []
    for chairs in (4, 5):
        producer.publish({"chairs": 0}, routing_key=stream_name)
        given: dict[str, Any] = {"headers": headers, "message_id": message_id, "retry": retry}
        receipts.append(relatum.publish(producer, "", stream_name, {"chairs": chairs}, **given))
    places = [receipt.wait(WAIT_S) for receipt in receipts]
    assert places == [((stream_name, 1),), ((stream_name, 3),)]
    assert headers == {"order_id": "o1"}
    for receipt, (place,), body in zip(receipts, places, (b'{"chairs": 4}', b'{"chairs": 5}'), strict=True):
        message = at(stream_url, place)
        assert message.body == body
        assert message.properties.message_id == receipt.message_id == (message_id or receipt.message_id)
        assert message.properties.content_type == "application/json"
        assert receipt.settle(WAIT_S) == (place,)
    assert RECEIPT_HEADER not in at(stream_url, relatum.MessageId(stream_name, 0)).headers


def test_by_an_exchange_of_kombu(producer: Producer, amqp_url: str, stream_url: str, stream_name: str) -> None:
    """Its own entities, and its own default exchange and routing key, lead where they lead without a receipt."""
    exchange = Exchange(unique_name(), "topic")
    bound = producer.connection.Producer(exchange=exchange, routing_key="orders.new")
    with broker_connection(amqp_url) as connection:
        bound.maybe_declare(exchange)
        connection.channel().queue_bind(stream_name, exchange.name, "orders.#")
        assert relatum.publish(bound, "", "", b"1").wait(WAIT_S) == ((stream_name, 0),)
        assert relatum.publish(producer, exchange, "orders.old", b"2").wait(WAIT_S) == ((stream_name, 1),)
        connection.channel().exchange_delete(exchange.name)


def test_a_copy_of_kombu_is_where_its_receipt_says(amqp_url: str, stream_url: str, database_url: str) -> None:
    """A message for a queue, with a copy: the receipt tells of the copy. A mandatory one gets no copy."""
    queue, copies = unique_name(), unique_name()
    with (
        broker_connection(amqp_url) as bare,
        Connection(amqp_url, transport_options={"confirm_publish": True}) as connection,
    ):
        bare.channel().queue_declare(queue)
        relatum.intercept(connection, database=database_url, stream_url=stream_url, copy_to=copies)
        receipt = relatum.publish(connection.Producer(), "", queue, b"copied", mandatory=False)
        (place,) = receipt.wait(WAIT_S)
        assert place == (copies, 0)
        assert at(stream_url, place).body == b"copied"
        relatum.release(connection)
        bare.channel().queue_delete(queue)
        delete_stream(amqp_url, copies)


@pytest.mark.parametrize("hears", [False, True])
def test_a_message_of_kombu_for_nobody_is_unroutable(producer: Producer, hears: bool) -> None:
    """Whether somebody listens to returns, whom py-amqp tells instead, or not; and without mandatory it is dropped."""
    came: list[Any] = []
    if hears:
        producer.channel.events["basic_return"].add(lambda *told: came.append(told))
    with pytest.raises(PublishUnroutable) as caught:
        relatum.publish(producer, "", unique_name(), b"lost")
    assert caught.value.in_stream is False
    assert len(came) == hears
    assert relatum.publish(producer, "", unique_name(), b"dropped", mandatory=False).is_confirmed


def test_kombu_says_what_a_receipt_needs(
    producer: Producer, amqp_url: str, database_url: str, stream_name: str
) -> None:
    """Confirms, a database, an interception, the blocking function: errors that say so, and nothing is sent."""
    with Connection(amqp_url) as bare, Connection(amqp_url) as unconfirmed:
        relatum.intercept(unconfirmed, database=database_url)
        relatum.intercept(bare)
        for connection, need in ((unconfirmed, "confirm_publish"), (bare, "database")):
            with pytest.raises(ConfigurationError, match=need):
                relatum.publish(connection.Producer(), "", stream_name, b"")
            relatum.release(connection)
        with pytest.raises(ConfigurationError, match="intercept"):
            relatum.publish(bare.Producer(), "", stream_name, b"")
    with pytest.raises(ConfigurationError, match=r"takes relatum.publish\("):
        asyncio.run(relatum.publish_async(producer, b"", stream_name))
    with pytest.raises(InvalidRelationshipKey):
        relatum.publish(producer, "", stream_name, b"", headers={"order_id": 1.5})
    with pytest.raises(ConfigurationError, match="names"):
        relatum.publish(producer, "", stream_name, b"", BasicProperties())
    assert all_plain(amqp_url, stream_name) == []


def test_a_broker_of_faststream_gives_the_offset(
    amqp_url: str, stream_url: str, database_url: str, stream_name: str
) -> None:
    """What it encodes, what was made before, by a name or its own queue, many at once: each receipt its own place."""
    made = Message(b"made", headers={"order_id": "o3"}, message_id="mine")

    async def scenario() -> list[tuple[Any, Any]]:
        broker = RabbitBroker(amqp_url, logger=None)
        relatum.intercept(broker, database=database_url, keys=["order_id"], stream_url=stream_url)
        with pytest.raises(ConfigurationError, match="start"):
            await relatum.publish_async(broker, "early", stream_name)
        async with broker:
            await broker.start()
            await broker.publish("unasked", stream_name)
            receipts = await asyncio.gather(
                relatum.publish_async(broker, {"id": 1}, stream_name, headers={"order_id": "o1"}, persist=True),
                relatum.publish_async(broker, "text", RabbitQueue(stream_name, declare=False), message_id="mine"),
                relatum.publish_async(broker, made, stream_name),
            )
            places = [await receipt.wait(WAIT_S) for receipt in receipts]
            for receipt, place in zip(receipts, places, strict=True):
                assert await receipt.settle(WAIT_S) == place
            await asyncio.to_thread(relatum.release, broker)
        return list(zip(receipts, places, strict=True))

    found = in_a_loop(scenario())
    assert {place.offset for _, (place,) in found} == {1, 2, 3}
    assert [at(stream_url, place).body for _, (place,) in found] == [b'{"id":1}', b"text", b"made"]
    for receipt, (place,) in found:
        assert at(stream_url, place).properties.message_id == receipt.message_id
    assert (made.headers, made.message_id) == ({"order_id": "o3"}, "mine")


async def test_faststream_says_what_a_receipt_needs(amqp_url: str, database_url: str, stream_name: str) -> None:
    """A stream there is, confirms, an interception, the asyncio function: errors that say so."""
    async with RabbitBroker(amqp_url, logger=None) as broker:
        await broker.start()
        with pytest.raises(ConfigurationError, match="intercept"):
            await relatum.publish_async(broker, "", stream_name)
        relatum.intercept(broker, database=database_url)
        with pytest.raises(ConfigurationError, match="await relatum"):
            relatum.publish(broker, "", stream_name, "")
        with pytest.raises(PublishUnroutable):
            await relatum.publish_async(broker, "lost", unique_name())
        await asyncio.to_thread(relatum.release, broker)
    unconfirmed = RabbitBroker(amqp_url, logger=None, default_channel=Channel(publisher_confirms=False))
    relatum.intercept(unconfirmed, database=database_url)
    async with unconfirmed:
        await unconfirmed.start()
        with pytest.raises(ConfigurationError, match="publisher_confirms"):
            await relatum.publish_async(unconfirmed, "", stream_name)
        await asyncio.to_thread(relatum.release, unconfirmed)
    assert all_plain(amqp_url, stream_name) == []
