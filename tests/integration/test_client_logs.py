"""What pika and aiormq log: nothing of Relatum's own connections, all of an application's."""

import asyncio
import logging
from collections.abc import Callable

import aiormq
import pika
import pytest

from relatum import Broker
from relatum.errors import BrokerUnavailable, PublishUnroutable, StreamNotFound
from relatum.own_messages import DirectPublisher
from relatum.reading import AsyncStreamReader, BrokerAddress, StreamReader
from relatum.superstreams import describe_super_stream
from tests.support.place import Place
from tests.support.proxy import Proxy

AWAY = "amqp://guest:guest@127.0.0.1:129"
CLIENTS = ("pika", "aiormq", "aio_pika")


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """Takes what the clients have logged until now, from warnings on."""
    for name in CLIENTS:
        caplog.set_level(logging.WARNING, name)

    def take() -> list[str]:
        lines = [each.getMessage() for each in caplog.records if each.name.partition(".")[0] in CLIENTS]
        caplog.clear()
        return lines

    return take


async def test_nothing_is_logged_of_own_connections(said: Callable[[], list[str]], place: Place) -> None:
    """A broker that is away, a stream that is not there, and a lost connection are reported only by errors."""
    for ask in (lambda: StreamReader.open(AWAY), lambda: describe_super_stream(AWAY, "orders")):
        with pytest.raises(BrokerUnavailable):
            ask()
    with pytest.raises(BrokerUnavailable):
        await AsyncStreamReader.open(AWAY)
    with Proxy.to(place.amqp) as proxy:
        address = Broker(proxy.url(place.amqp), stream_url=place.stream_url)
        async with await AsyncStreamReader.open(address) as reader:
            with pytest.raises(StreamNotFound):
                await reader.bounds("relatum-test-nowhere")
        with DirectPublisher(BrokerAddress.parse(proxy.url(place.amqp)), "a test") as publisher:
            with pytest.raises(PublishUnroutable):
                publisher.publish("relatum-test-nowhere", b"", pika.BasicProperties())
            proxy.reset()
            publisher.publish(place.stream, b"", pika.BasicProperties())
    assert said() == []


async def test_all_is_logged_of_an_applications_connections(said: Callable[[], list[str]]) -> None:
    """Also beside connections of Relatum's own, in the same thread and the same loop."""
    with pytest.raises(BrokerUnavailable):
        StreamReader.open(AWAY)
    with pytest.raises(pika.exceptions.AMQPConnectionError):
        pika.BlockingConnection(pika.URLParameters(AWAY + "?connection_attempts=1"))
    assert any("Connection refused" in line for line in said())
    own = asyncio.create_task(AsyncStreamReader.open(AWAY))
    theirs = asyncio.create_task(aiormq.connect(AWAY))
    found = await asyncio.gather(own, theirs, return_exceptions=True)
    assert all(isinstance(each, Exception) for each in found)
    assert len(said()) == 1


def test_who_debugs_a_client_is_shown_what_is_left_out(caplog: pytest.LogCaptureFixture) -> None:
    """A listener to a client's logger at level DEBUG sees the lines of Relatum's connections, at that level."""
    caplog.set_level(logging.DEBUG, "pika")
    with pytest.raises(BrokerUnavailable):
        StreamReader.open(AWAY)
    refused = [each for each in caplog.records if "Connection refused" in each.getMessage()]
    assert {each.levelno for each in refused} == {logging.DEBUG}
