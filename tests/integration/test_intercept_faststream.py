"""Intercepted brokers of FastStream against a real broker."""

import asyncio
from typing import Any

import pytest
from faststream.rabbit import Channel, RabbitBroker, RabbitMessage, RabbitQueue, TestRabbitBroker

import relatum
from relatum.common.uuid7 import time_us_of
from relatum.errors import ConfigurationError, InvalidRelationshipKey, PublishUnroutable
from relatum_consumer import Relations
from tests.support import unique_name
from tests.support.place import Place


def is_stamped(message: RabbitMessage) -> bool:
    """Whether it has an id of ours: FastStream itself gives none."""
    return time_us_of(message.raw_message.message_id) is not None


def talking(broker: RabbitBroker, queue: str) -> asyncio.Queue[RabbitMessage]:
    """Have the broker answer messages to a queue, and return them."""
    came: asyncio.Queue[RabbitMessage] = asyncio.Queue()

    @broker.subscriber(RabbitQueue(queue, auto_delete=True))
    async def answer(body: Any, message: RabbitMessage) -> dict[str, Any]:
        came.put_nowait(message)
        return {"answered": body["id"]}

    return came


@pytest.mark.parametrize("when", ["bare", "before", "after"])
async def test_requests_and_replies_go_as_ever(amqp_url: str, when: str) -> None:
    """Requests and replies are the same bare or intercepted, and have ids if intercepted before or after the start."""
    broker = RabbitBroker(amqp_url, logger=None)
    queue = unique_name()
    came = talking(broker, queue)
    if when == "before":
        assert relatum.intercept(broker, keys=["order_id"]) is broker
    await broker.start()
    if when == "after":
        relatum.intercept(broker, keys=["order_id"])
    try:
        reply = await broker.request({"id": "o1"}, queue, headers={"order_id": "o1"}, timeout=120)
        request = await came.get()
        assert await reply.decode() == {"answered": "o1"}
        assert request.headers["order_id"] == "o1"
        assert reply.correlation_id == request.correlation_id
        for message in (request, reply):
            assert is_stamped(message) is (when != "bare")
        if when != "bare":
            assert relatum.statistics(broker).published == 2
    finally:
        await broker.stop()
        relatum.release(broker)


async def test_what_cannot_be_recorded_or_routed_is_told(amqp_url: str) -> None:
    """Bad values, messages that no queue gets and copies are errors; FastStream's test broker runs handlers as ever."""
    strict = RabbitBroker(amqp_url, logger=None, default_channel=Channel(on_return_raises=True))
    async with relatum.intercept(strict, keys=["order_id"]) as broker:
        await broker.start()
        with pytest.raises(InvalidRelationshipKey):
            await broker.publish("x", "nowhere", headers={"order_id": 1.5})
        with pytest.raises(PublishUnroutable):
            await broker.publish("x", unique_name("nowhere"), mandatory=True)
        relatum.release(broker)
    with pytest.raises(ConfigurationError, match="tap"):
        relatum.intercept(RabbitBroker(amqp_url), copy_to="copies")
    tested = relatum.intercept(RabbitBroker(amqp_url, logger=None))
    came = talking(tested, "orders")
    async with TestRabbitBroker(tested):
        await tested.publish({"id": 1}, "orders")
        assert not is_stamped(await came.get())
    relatum.release(tested)


async def test_started_again_it_is_still_intercepted_and_released_it_is_bare(amqp_url: str) -> None:
    """A broker stays intercepted through stop and start and is bare after its release, as others always are."""
    broker, beside = RabbitBroker(amqp_url, logger=None), RabbitBroker(amqp_url, logger=None)
    queue = unique_name()
    came = talking(broker, queue)
    before = set(vars(broker))
    relatum.intercept(broker)
    await beside.start()
    for _ in range(2):
        await broker.start()
        await broker.publish({"id": 1}, queue)
        assert is_stamped(await came.get())
        await beside.publish({"id": 2}, queue)
        assert not is_stamped(await came.get())
        await broker.stop()
    await broker.start()
    assert relatum.release(broker) is broker
    assert set(vars(broker)) == before
    relatum.release(relatum.intercept(broker))
    assert len(broker.middlewares) == 1
    await broker.publish({"id": 3}, queue)
    assert not is_stamped(await came.get())
    await broker.stop()
    await beside.stop()


async def test_what_it_publishes_is_recorded(place: Place) -> None:
    """An intercepted broker's process records what it publishes to a stream."""
    broker = relatum.intercept(RabbitBroker(place.amqp, logger=None), database=place.database, keys=["order_id"])
    async with broker:
        await broker.start()
        await broker.publish({"id": 1}, place.stream, headers={"order_id": "o1"})
        await asyncio.to_thread(place.wait_recorded)
        await asyncio.to_thread(relatum.release, broker)
    with Relations(place.amqp, place.database) as relations:
        assert relations.find("order_id", "o1").ids == ((place.stream, 0),)
