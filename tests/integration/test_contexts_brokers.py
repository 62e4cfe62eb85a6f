"""Contexts at brokers that allow little: few rights, several virtual hosts, and one of two protocols that answers."""

from collections.abc import Iterator
from urllib.parse import urlsplit

import aio_pika
import pika
import pytest
from pika import BasicProperties
from pika.adapters.blocking_connection import BlockingChannel

import relatum
from relatum import Broker
from relatum.contexts import SerialConsumer, SerializationContexts, verify
from relatum.errors import (
    AccessRefused,
    BrokerUnavailable,
    ConfigurationError,
    PublishOutcomeUnknown,
    SuperStreamNotFound,
)
from relatum.local import LocalRabbitMQ
from relatum.superstreams import Layout, declare_super_stream, describe_super_stream
from tests.support.place import Place
from tests.support.proxy import Proxy
from tests.support.rabbitmq_tools import add_users, as_user, evaluate
from tests.support.routing import confirming, consumed, of_context, sleeping
from tests.support.super_streams import super_stream

NAME = "accounts"
"""Of the super stream in both virtual hosts."""

USERS = {
    "publisher": ("^(moved|slept)$", "^$"),
    "publisher-that-adopts": (r"^(slept|amq\.default)$", "^slept-.*$"),
    "mover": (r"^amq\.default$", "^moved-.*$"),
    "consumer": ("^$", "^moved-.*$"),
}
"""What each user may write to and read."""

ACCOUNT = BasicProperties(headers={"serialization_context": "17"})

Urls = dict[str, str]


@pytest.fixture(scope="module")
def urls(own_broker: LocalRabbitMQ) -> Urls:
    """URLs of a broker of this module, by user; "owner" may do all."""
    owner = own_broker.broker_url
    for name in ("moved", "slept"):
        declare_super_stream(owner, name, 2)
    add_users(own_broker, {name: ("^$", *rights) for name, rights in USERS.items()})
    return {"owner": owner, **{name: as_user(owner, name) for name in USERS}}


def other_than(super_stream: str, partition: str) -> str:
    (other,) = {f"{super_stream}-0", f"{super_stream}-1"} - {partition}
    return other


def test_what_each_party_needs(urls: Urls, database_url: str) -> None:
    """A publisher needs to write to the super stream, a mover to the default exchange; movers and consumers read."""
    with confirming(urls["publisher"]) as channel, relatum.ContextRouter("moved", database_url) as router:
        router.publish(channel, b"1", ACCOUNT)
        with SerializationContexts("moved", database_url, broker=urls["consumer"]) as contexts:
            target = other_than("moved", contexts.assignment_of("17").partition)
            # Raised at once, and not retried as if the broker was down.
            with pytest.raises(AccessRefused, match=r"stopped in the state fencing.*amq\.default") as caught:
                contexts.move("17", target)
        with SerializationContexts("moved", database_url, broker=urls["mover"]) as contexts:
            contexts.resume(caught.value.move_id)
            assert contexts.assignment_of("17").partition == target
        router.publish(channel, b"2", ACCOUNT)
    assert consumed("moved", database_url, urls["consumer"], 2) == {"17": [b"1", b"2"]}
    assert verify("moved", broker=urls["consumer"], database=database_url).ok


def publish_asleep(user: str, urls: Urls, database_url: str, body: bytes) -> None:
    """Publish a message whose context moves just before it is sent."""
    with (
        confirming(urls[user]) as channel,
        relatum.ContextRouter("slept", database_url) as router,
        SerializationContexts("slept", database_url, broker=urls["owner"]) as contexts,
    ):
        router.publish(channel, b"before " + body, ACCOUNT)
        target = other_than("slept", contexts.assignment_of("17").partition)
        sleeping(channel, lambda: contexts.move("17", target))
        router.publish(channel, body, ACCOUNT)


def test_a_stray_needs_the_permissions_to_read_and_to_adopt(urls: Urls, database_url: str) -> None:
    """A publisher that may not read and adopt fails if its message arrived behind its context's fence."""
    publish_asleep("publisher-that-adopts", urls, database_url, b"adopted")
    with pytest.raises(AccessRefused, match="does not let this user") as caught:
        publish_asleep("publisher", urls, database_url, b"not adopted")
    # Closing the router retried once more; before that, the publisher got an unknown outcome.
    assert isinstance(caught.value.__context__, PublishOutcomeUnknown)
    report = verify("slept", broker=urls["owner"], database=database_url)
    assert report.ok
    assert (report.strays, report.adopted) == (2, 1)
    assert consumed("slept", database_url, urls["owner"], 3) == {
        "17": [b"before adopted", b"adopted", b"before not adopted"]
    }


@pytest.fixture(scope="module")
def vhosts(own_broker: LocalRabbitMQ) -> tuple[str, str]:
    """URLs of two virtual hosts of a broker of this module, one with a name that URLs have to quote."""
    here = own_broker.broker_url
    of_user = f'<<"{urlsplit(here).username}">>, <<"north/east">>, <<".*">>, <<".*">>, <<".*">>, <<"x">>'
    evaluate(own_broker, 'ok = rabbit_vhost:add(<<"north/east">>, <<"x">>)')
    evaluate(own_broker, f"ok = rabbit_auth_backend_internal:set_permissions({of_user})")
    other = urlsplit(here)._replace(path="/north%2Feast").geturl()
    declare_super_stream(here, NAME, 2)
    declare_super_stream(other, NAME, binding_keys=["1", "0", "x"])
    return here, other


@pytest.fixture
def channels(vhosts: tuple[str, str]) -> Iterator[list[BlockingChannel]]:
    with confirming(vhosts[0]) as ours, confirming(vhosts[1]) as theirs:
        yield [ours, theirs]


def test_contexts_of_two_virtual_hosts_do_not_mix(
    vhosts: tuple[str, str], channels: list[BlockingChannel], database_url: str
) -> None:
    """Each virtual host has placements, moves, strays and consumers of its own under the same names."""
    plain = relatum.SuperStream(NAME)
    for url, channel in zip(vhosts, channels, strict=True):
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
    for url, partitions in zip(vhosts, (2, 3), strict=True):
        assert len(describe_super_stream(url, NAME)) == len(plain.layout(url)) == partitions
        with SerializationContexts(NAME, database_url, broker=url) as contexts:
            assert len(contexts.status().partitions) == partitions
            assert sum(each.open_sets for each in contexts.status().partitions) == 1
        report = verify(NAME, broker=url, database=database_url)
        assert (report.ok, report.messages, report.contexts, report.adopted) == (True, 4, 1, 1), report.findings
        assert consumed(NAME, database_url, url, 4) == {"": [url.encode()], "c": [url.encode()] * 3}


async def test_a_router_is_of_one_virtual_host(
    vhosts: tuple[str, str], channels: list[BlockingChannel], database_url: str
) -> None:
    """A router, in asyncio too, refuses a channel of another virtual host than its first channel's or its `broker=`."""
    ours, others = channels
    context, plain = of_context("d"), BasicProperties()
    for first, second in ((context, context), (plain, plain), (plain, context)):
        with relatum.ContextRouter(NAME, database_url) as router:
            router.publish(ours, b"ours", first)
            with pytest.raises(ConfigurationError, match="north/east"):
                router.publish(others, b"theirs", second)
    for properties in (context, plain):
        router = relatum.ContextRouter(NAME, database_url, broker=vhosts[0])
        with router, pytest.raises(ConfigurationError, match="north/east"):
            router.publish(others, b"theirs", properties)
    us, them = [await aio_pika.connect(url) for url in vhosts]
    message = aio_pika.Message(b"1", headers={"serialization_context": "e"})
    async with us, them, relatum.AsyncContextRouter(NAME, database_url) as asynchronous:
        await asynchronous.publish(await us.channel(), message)
        channel = await them.channel()
        for each in (message, aio_pika.Message(b"1")):
            with pytest.raises(ConfigurationError, match="north/east"):
                await asynchronous.publish(channel, each)


PARTITIONS = 2


@pytest.fixture
def alone(amqp_url: str) -> Iterator[str]:
    """The broker's AMQP URL, by a port beside which no stream protocol answers."""
    with Proxy.to(amqp_url) as proxy:
        yield proxy.url(amqp_url)


@pytest.fixture
def keyed(broker: Broker) -> Iterator[Layout]:
    """A super stream of binding keys that are not numbers."""
    with super_stream(broker, binding_keys=["europe", "asia"]) as made:
        yield made


def test_publishing_needs_amqp_alone(alone: str, layout: Layout, database_url: str, stream_url: str) -> None:
    """Messages of contexts are published without the stream protocol; reading names the plugin that is missing."""
    name = layout.super_stream
    with confirming(alone) as channel, relatum.ContextRouter(name, database_url) as router:
        relatum.SuperStream(name).publish(channel, b"plain", routing_key="x", mandatory=True)
        router.publish(channel, b"1", of_context("c"))
    with pytest.raises(BrokerUnavailable, match="rabbitmq_stream"):
        verify(name, broker=alone)
    assert consumed(name, database_url, stream_url, 2) == {"": [b"plain"], "c": [b"1"]}


def test_partitions_of_other_names_are_told_by_the_stream_protocol_alone(
    alone: str, keyed: Layout, database_url: str
) -> None:
    """Each component that needs partitions of other names asks for the URL of the stream protocol."""
    name = keyed.super_stream
    with confirming(alone) as channel, relatum.ContextRouter(name, database_url) as router:
        for properties in (of_context("c"), pika.BasicProperties()):
            with pytest.raises(SuperStreamNotFound, match="give its URL"):
                router.publish(channel, b"1", properties)
    with pytest.raises(SuperStreamNotFound, match="give its URL"):
        SerializationContexts(name, database_url, broker=alone)
    with pytest.raises(SuperStreamNotFound, match="give its URL"):
        SerialConsumer(name, "reader", database=database_url, broker=alone).start()
    with pytest.raises(BrokerUnavailable, match="rabbitmq_stream"):
        verify(name, broker=alone)


def test_the_stream_protocol_is_asked_where_it_is_said_to_be(alone: str, keyed: Layout, place: Place) -> None:
    """With the URL of the stream protocol, partitions of any name can be published to, moved and consumed."""
    name, broker = keyed.super_stream, Broker(alone, stream_url=place.stream_url)
    with SerialConsumer(name, "reader", broker=broker, database=place.database) as consumer:
        assert consumer.next_batch(0) is None
    with confirming(alone) as channel, relatum.ContextRouter(name, place.database, broker=broker) as router:
        router.publish(channel, b"1", of_context("c"))
        with SerializationContexts(name, place.database, broker=broker) as contexts:
            *_, target = (partition.stream for partition in keyed)
            contexts.move("c", target)
            assert contexts.assignment_of("c").partition == target
        router.publish(channel, b"2", of_context("c"))
    assert consumed(name, place.database, place.stream_url, 2) == {"c": [b"1", b"2"]}
    assert verify(name, broker=place.stream_url, database=place.database).ok


def test_reading_needs_the_stream_protocol_alone(channel: BlockingChannel, place: Place, keyed: Layout) -> None:
    """Consumers and checks need no AMQP URL; publishing and changing partitions without one is refused."""
    name = keyed.super_stream
    channel.basic_publish(name, "asia", b"plain")
    assert consumed(name, place.database, place.stream_url, 1) == {"": [b"plain"]}
    assert verify(name, broker=place.stream_url).messages == 1
    needs_amqp = pytest.raises(ConfigurationError, match="amqp://")
    with relatum.ContextRouter(name, place.database, broker=place.stream_url) as router, needs_amqp:
        router.publish(channel, b"1", of_context("c"))
    with SerializationContexts(name, place.database, broker=place.stream_url) as contexts, needs_amqp:
        contexts.add_partitions()
