"""Who looks at an intercepted object sees what he would see of a bare one; a tool that wraps its methods does, too."""

import inspect
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import aio_pika
import pika
import pytest
from celery import Celery
from dramatiq.brokers.rabbitmq import RabbitmqBroker
from faststream.rabbit import RabbitBroker

import relatum

Opened = Callable[[str], AbstractAsyncContextManager[list[Any]]]


@asynccontextmanager
async def of_pika(amqp_url: str) -> AsyncIterator[list[Any]]:
    """A blocking connection, and its channel; what is intercepted is first."""
    with pika.BlockingConnection(pika.URLParameters(amqp_url)) as connection:
        yield [connection, connection.channel()]


@asynccontextmanager
async def of_aio_pika(amqp_url: str) -> AsyncIterator[list[Any]]:
    """A connection and its channel."""
    async with await aio_pika.connect(amqp_url) as connection:
        yield [connection, await connection.channel()]


@asynccontextmanager
async def of_aio_pika_robust(amqp_url: str) -> AsyncIterator[list[Any]]:
    """A connection that connects anew, and its channel."""
    async with await aio_pika.connect_robust(amqp_url) as connection:
        yield [connection, await connection.channel()]


@asynccontextmanager
async def of_celery(amqp_url: str) -> AsyncIterator[list[Any]]:
    """An app."""
    with Celery("tests", broker=amqp_url, set_as_current=False) as app:
        yield [app]


@asynccontextmanager
async def of_dramatiq(amqp_url: str) -> AsyncIterator[list[Any]]:
    """A broker, and its thread's connection and channel."""
    broker = RabbitmqBroker(url=amqp_url)
    yield [broker, broker.connection, broker.channel]
    broker.close()


@asynccontextmanager
async def of_faststream(amqp_url: str) -> AsyncIterator[list[Any]]:
    """A broker that was started, and its connection."""
    async with RabbitBroker(amqp_url, logger=None) as broker:
        await broker.start()
        yield [broker, broker._connection]


CLIENTS = (of_pika, of_aio_pika, of_aio_pika_robust, of_celery, of_dramatiq, of_faststream)


def looks(owner: Any) -> dict[str, tuple[Any, ...]]:
    """Of each method of an object: names, description, signature, whose it is, and what kind of callable.

    `inspect` goes by the kind, and so does `unittest.mock`, which checks calls of methods by their signature.
    """
    found = {}
    for name in dir(type(owner)):
        if inspect.isfunction(inspect.getattr_static(type(owner), name)):
            method = getattr(owner, name)
            whose = getattr(method, "__self__", None) is owner
            written = (method.__name__, method.__qualname__, method.__module__, method.__doc__)
            kinds = [kind(method) for kind in (inspect.ismethod, inspect.isroutine, inspect.iscoroutinefunction)]
            found[name] = (*written, str(inspect.signature(method)), whose, *kinds)
    return found


@pytest.mark.parametrize("opened", CLIENTS)
async def test_methods_look_as_they_did(opened: Opened, amqp_url: str) -> None:
    """Names, signature, object and whether to await: by these do decorators choose. Released, nothing is left."""
    async with opened(amqp_url) as owners:
        before = [(looks(owner), dict(vars(owner))) for owner in owners]
        relatum.intercept(owners[0], keys=["order"])
        for owner, (looked, _) in zip(owners, before, strict=True):
            assert looks(owner) == looked
        assert any(vars(owner) != had for owner, (_, had) in zip(owners, before, strict=True))
        relatum.release(owners[0])
        assert [dict(vars(owner)) for owner in owners] == [had for _, had in before]
