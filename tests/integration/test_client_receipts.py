"""Receipts of FastStream's brokers, which make their messages themselves."""

import asyncio
from typing import Any

import pytest
from aio_pika import Message
from faststream.rabbit import Channel, RabbitBroker, RabbitQueue

import relatum
from relatum.errors import ConfigurationError, PublishUnroutable
from relatum.reading import StreamReader
from tests.support import all_plain, in_a_loop, unique_name

WAIT_S = 120


def at(stream_url: str, place: relatum.MessageId) -> Any:
    """What lies there."""
    with StreamReader.open(stream_url) as reader:
        return reader.read(place.stream, place.offset)


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
