"""An intercepted object looks like a bare one, and clients log all of an application's connections, nothing of ours."""

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, closing
from functools import partial
from typing import Any
from weakref import WeakMethod

import aio_pika
import aiormq
import pika
import pytest
from celery import Celery
from dramatiq.brokers.rabbitmq import RabbitmqBroker
from faststream.rabbit import RabbitBroker

import relatum
from relatum import Broker
from relatum.errors import BrokerUnavailable, PublishUnroutable, StreamNotFound
from relatum.own_messages import DirectPublisher
from relatum.reading import AsyncStreamReader, BrokerAddress, StreamReader
from relatum.superstreams import describe_super_stream
from tests.support.place import Place
from tests.support.proxy import Proxy


async def of_pika(stack: AsyncExitStack, url: str) -> list[Any]:
    connection = stack.enter_context(pika.BlockingConnection(pika.URLParameters(url)))
    return [connection, connection.channel()]


async def of_aio_pika(stack: AsyncExitStack, url: str, connect: Any = aio_pika.connect) -> list[Any]:
    connection = await stack.enter_async_context(await connect(url))
    return [connection, await connection.channel()]


of_aio_pika_robust = partial(of_aio_pika, connect=aio_pika.connect_robust)


async def of_celery(stack: AsyncExitStack, url: str) -> list[Any]:
    return [stack.enter_context(Celery("tests", broker=url, set_as_current=False))]


async def of_dramatiq(stack: AsyncExitStack, url: str) -> list[Any]:
    broker = stack.enter_context(closing(RabbitmqBroker(url=url)))
    return [broker, broker.connection, broker.channel]


async def of_faststream(stack: AsyncExitStack, url: str) -> list[Any]:
    broker = await stack.enter_async_context(RabbitBroker(url, logger=None))
    await broker.start()
    return [broker, broker._connection]


CLIENTS = (of_pika, of_aio_pika, of_aio_pika_robust, of_celery, of_dramatiq, of_faststream)


def looks(owner: Any) -> dict[str, tuple[Any, ...]]:
    """What `inspect` and `unittest.mock` go by, of each method: names, docstring, signature, owner and kind."""
    found = {}
    for name in dir(type(owner)):
        if inspect.isfunction(inspect.getattr_static(type(owner), name)):
            method = getattr(owner, name)
            whose = getattr(method, "__self__", None) is owner and WeakMethod(method)() == method
            written = (method.__name__, method.__qualname__, method.__module__, method.__doc__, method.__code__)
            kinds = [kind(method) for kind in (inspect.ismethod, inspect.isroutine, inspect.iscoroutinefunction)]
            found[name] = (*written, str(inspect.signature(method)), whose, *kinds)
    return found


@pytest.mark.parametrize("opened", CLIENTS)
async def test_methods_look_as_they_did(
    opened: Callable[[AsyncExitStack, str], Awaitable[list[Any]]], amqp_url: str
) -> None:
    """Intercepted methods look as the bare ones did, and a released object has its own attributes again."""
    async with AsyncExitStack() as stack:
        owners = await opened(stack, amqp_url)
        before = [(looks(owner), dict(vars(owner))) for owner in owners]
        relatum.intercept(owners[0], keys=["order"])
        for owner, (looked, _) in zip(owners, before, strict=True):
            assert looks(owner) == looked
        assert any(vars(owner) != had for owner, (_, had) in zip(owners, before, strict=True))
        relatum.release(owners[0])
        assert [dict(vars(owner)) for owner in owners] == [had for _, had in before]


AWAY = "amqp://guest:guest@127.0.0.1:129"
LOGGERS = ("pika", "aiormq", "aio_pika")


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """Takes what the clients have logged until now, from warnings on."""
    for name in LOGGERS:
        caplog.set_level(logging.WARNING, name)

    def take() -> list[str]:
        lines = [each.getMessage() for each in caplog.records if each.name.partition(".")[0] in LOGGERS]
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
