"""A super stream of one name in two virtual hosts, with one database: nothing of them may mix."""

from collections.abc import Iterator
from contextlib import ExitStack
from urllib.parse import urlsplit

import aio_pika
import pytest
from pika import BasicProperties
from pika.adapters.blocking_connection import BlockingChannel

import relatum
from relatum.contexts import SerializationContexts, verify
from relatum.errors import ConfigurationError
from relatum.local import LocalRabbitMQ
from relatum.superstreams import declare_super_stream, describe_super_stream
from tests.support import broker_connection
from tests.support.rabbitmq_tools import evaluate
from tests.support.routing import consumed, of_context, sleeping

NAME = "accounts"


@pytest.fixture(scope="module")
def urls(own_broker: LocalRabbitMQ) -> tuple[str, str]:
    """URLs of two virtual hosts of a broker of this module, one with a name that URLs have to quote."""
    here = own_broker.broker_url
    host, user = '<<"north/east">>', f'<<"{urlsplit(here).username}">>'
    evaluate(own_broker, f'ok = rabbit_vhost:add({host}, <<"x">>)')
    rights = ", ".join(['<<".*">>'] * 3)
    evaluate(own_broker, f'ok = rabbit_auth_backend_internal:set_permissions({user}, {host}, {rights}, <<"x">>)')
    other = urlsplit(here)._replace(path="/north%2Feast").geturl()
    declare_super_stream(here, NAME, 2)
    declare_super_stream(other, NAME, binding_keys=["1", "0", "x"])
    return here, other


@pytest.fixture
def channels(urls: tuple[str, str]) -> Iterator[list[BlockingChannel]]:
    """A channel in confirm mode in each."""
    with ExitStack() as stack:
        opened = [stack.enter_context(broker_connection(url)).channel() for url in urls]
        for channel in opened:
            channel.confirm_delivery()
        yield opened


def test_contexts_of_two_virtual_hosts_do_not_mix(
    urls: tuple[str, str], channels: list[BlockingChannel], database_url: str
) -> None:
    """Each has placements, moves, strays and consumers of its own, though all names are the same."""
    plain = relatum.SuperStream(NAME)
    for url, channel in zip(urls, channels, strict=True):
        with (
            relatum.ContextRouter(NAME, database_url) as router,
            SerializationContexts(NAME, database_url, broker=url) as contexts,
        ):
            plain.publish(channel, url.encode(), routing_key="k", mandatory=True)
            for _ in range(2):
                router.publish(channel, url.encode(), of_context("c"))
            there = contexts.assignment_of("c").partition
            target = next(each.stream for each in contexts.status().partitions if each.stream != there)
            sleeping(channel, lambda contexts=contexts, target=target: contexts.move("c", target))  # type: ignore[misc]
            router.publish(channel, url.encode(), of_context("c"))
    for url, partitions in zip(urls, (2, 3), strict=True):
        assert len(describe_super_stream(url, NAME)) == len(plain.layout(url)) == partitions
        with SerializationContexts(NAME, database_url, broker=url) as contexts:
            assert len(contexts.status().partitions) == partitions
            assert sum(each.open_sets for each in contexts.status().partitions) == 1
        report = verify(NAME, broker=url, database=database_url)
        assert (report.ok, report.messages, report.contexts, report.adopted) == (True, 4, 1, 1), report.findings
        assert consumed(NAME, database_url, url, 4) == {"": [url.encode()], "c": [url.encode()] * 3}


def test_a_router_is_of_one_virtual_host(
    urls: tuple[str, str], channels: list[BlockingChannel], database_url: str
) -> None:
    """A channel of another is refused before anything is sent, whoever told the router where it is."""
    ours, others = channels
    for properties in (of_context("d"), BasicProperties()):
        with relatum.ContextRouter(NAME, database_url) as router:
            router.publish(ours, b"ours", properties)
            with pytest.raises(ConfigurationError, match="north/east"):
                router.publish(others, b"theirs", properties)
        with (
            relatum.ContextRouter(NAME, database_url, broker=urls[0]) as router,
            pytest.raises(ConfigurationError, match="north/east"),
        ):
            router.publish(others, b"theirs", properties)
    with relatum.ContextRouter(NAME, database_url) as router:
        router.publish(ours, b"ours")
        with pytest.raises(ConfigurationError, match="north/east"):
            router.publish(others, b"theirs", of_context("d"))


async def test_an_asyncio_router_is_of_one_virtual_host(urls: tuple[str, str], database_url: str) -> None:
    """It refuses channels of another as its twin does."""
    ours, others = [await aio_pika.connect(url) for url in urls]
    message = aio_pika.Message(b"1", headers={"serialization_context": "e"})
    async with ours, others, relatum.AsyncContextRouter(NAME, database_url) as router:
        await router.publish(await ours.channel(), message)
        channel = await others.channel()
        for each in (message, aio_pika.Message(b"1")):
            with pytest.raises(ConfigurationError, match="north/east"):
                await router.publish(channel, each)
