"""Routers that are closed, or lose a partition, while messages are under way."""

import asyncio
from typing import Any

import aio_pika
import pika
import pytest
from pamqp.commands import Basic

import relatum
from relatum.errors import ConfigurationError, PublishOutcomeUnknown
from relatum.superstreams import Layout
from tests.support import broker_connection

PARTITIONS = 2
"""Of the fixture `layout`."""

OF_A = pika.BasicProperties(headers={"serialization_context": "a"})


def test_a_router_that_is_closed_meanwhile_does_not_know(layout: Layout, database_url: str, amqp_url: str) -> None:
    """Where a router is closed between the confirm and the check, the caller is told that the outcome is unknown."""
    router = relatum.ContextRouter(layout.super_stream, database_url)
    with broker_connection(amqp_url) as connection:
        channel: Any = connection.channel()
        channel.confirm_delivery()
        publish = channel.basic_publish

        def publish_and_close(*args: Any, **kwargs: Any) -> None:
            publish(*args, **kwargs)
            router.close()

        channel.basic_publish = publish_and_close
        with pytest.raises(PublishOutcomeUnknown, match="the router is closed"):
            router.publish(channel, b"1", OF_A)
        with pytest.raises(ConfigurationError, match="the router is closed"):
            router.publish(channel, b"2", OF_A)


def test_partitions_are_known_until_the_broker_was_asked_again(
    layout: Layout, database_url: str, amqp_url: str
) -> None:
    """Where one thread finds a partition missing, another that is about to choose one still can."""
    with relatum.ContextRouter(layout.super_stream, database_url, broker=amqp_url) as router:
        core = router._core
        core.open(with_database=False)
        core.forget_layout()
        assert not core.has_layout
        assert core.unnamed("x").stream in {each.stream for each in layout}


async def test_a_task_that_publishes_while_its_router_is_closed_is_told(
    layout: Layout, database_url: str, amqp_url: str
) -> None:
    """Closing is no cancellation: a task that waits for a thread of the router gets an error it can catch."""
    router = relatum.AsyncContextRouter(layout.super_stream, database_url)
    async with asyncio.timeout(240), await aio_pika.connect(amqp_url) as connection:
        channel = await connection.channel()
        await router.open(connection)
        publishing = [
            asyncio.create_task(
                router.publish(channel, aio_pika.Message(b"", headers={"serialization_context": f"c{number}"}))
            )
            for number in range(200)
        ]
        await asyncio.sleep(0)
        await router.close()
        ends = await asyncio.gather(*publishing, return_exceptions=True)
    assert not [end for end in ends if isinstance(end, asyncio.CancelledError)]
    assert all(isinstance(end, ConfigurationError | PublishOutcomeUnknown | Basic.Ack) for end in ends), set(
        map(type, ends)
    )
