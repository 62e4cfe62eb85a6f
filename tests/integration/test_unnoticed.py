"""An intercepted object looks like a bare one, also to a tool that wraps its methods."""

import inspect
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, closing
from functools import partial
from typing import Any
from weakref import WeakMethod

import aio_pika
import pika
import pytest
from celery import Celery
from dramatiq.brokers.rabbitmq import RabbitmqBroker
from faststream.rabbit import RabbitBroker

import relatum


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
