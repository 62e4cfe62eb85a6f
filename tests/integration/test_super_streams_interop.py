"""Super streams of RabbitMQ's own tools and of the Java client's rule, beside ours, on a broker of this module."""

import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pyspark
import pytest
from py4j.java_gateway import GatewayParameters, JavaGateway, launch_gateway

import relatum
from relatum.local import LocalRabbitMQ
from relatum.reading import StreamReader
from relatum.superstreams import (
    Layout,
    add_partition,
    declare_super_stream,
    delete_super_stream,
    describe_super_stream,
)
from tests.support import QUICK_START, broker_connection, server_version, unique_name
from tests.support._raw_publisher import RawPublisher
from tests.support.rabbitmq_tools import run_tool
from tests.support.super_streams import bodies, in_order

SEED = 104_729
"""Of HashUtils in the RabbitMQ stream Java client."""

Tool = Callable[..., str]


@pytest.fixture(scope="module")
def server(own_broker: LocalRabbitMQ) -> LocalRabbitMQ:
    """A RabbitMQ whose tools this machine has: they must be of the broker's own version, on its own host."""
    return own_broker


@pytest.fixture(scope="module")
def tool(server: LocalRabbitMQ) -> Tool:
    """Runs `rabbitmq-streams` on that broker; gives what it printed."""
    return partial(run_tool, server, "rabbitmq-streams")


@pytest.fixture(scope="module")
def java() -> Iterator[Any]:
    """A Java virtual machine with Guava, whose murmur3 is as little ours as the Java client's."""
    jars = Path(pyspark.__file__).with_name("jars")
    port = launch_gateway(
        jarpath=str(next(jars.glob("py4j-*.jar"))),
        classpath=os.pathsep.join(map(str, [*jars.glob("guava-*.jar"), *jars.glob("failureaccess-*.jar")])),
        javaopts=QUICK_START.split(),
        die_on_exit=True,
    )
    gateway = JavaGateway(gateway_parameters=GatewayParameters(port=port))
    yield gateway.jvm
    gateway.shutdown()


def partition_by_java(java: Any, key: str, partitions: int) -> int:
    """The place of a key by the Java client's rule: `Integer.remainderUnsigned(murmur3(UTF-8 bytes), partitions)`."""
    function = java.com.google.common.hash.Hashing.murmur3_32_fixed(SEED)
    value = function.hashBytes(bytearray(key.encode())).asInt()
    place: int = java.java.lang.Integer.remainderUnsigned(value, partitions)
    return place


def data(body: bytes) -> bytes:
    """A message of the stream protocol with this body: one data section of AMQP 1.0."""
    return b"\x00\x53\x75\xa0" + bytes([len(body)]) + body


def test_what_the_tool_made_is_understood(server: LocalRabbitMQ, tool: Tool) -> None:
    """It is described, declared again without a trace, published to, enlarged and deleted, whatever its options are."""
    url, name = server.broker_url, unique_name("relatum-super")
    tool("add_super_stream", name, "--partitions", "12", "--max-age", "PT1H")
    layout = Layout.numbered(name, 12)
    assert describe_super_stream(url, name) == layout
    assert declare_super_stream(url, name, 12) == layout
    # Bound anew by the very arguments of the tool: a binding with others would have each stream named twice.
    with broker_connection(url) as connection:
        for partition in layout:
            connection.channel().queue_bind(partition.stream, name, partition.binding_key, in_order(partition.place))
    assert describe_super_stream(url, name) == layout
    assert add_partition(url, name).place == 12
    with StreamReader.open(server.stream_url) as reader:
        assert reader.partitions(name) == [f"{name}-{place}" for place in range(13)]
    delete_super_stream(url, name)
    with StreamReader.open(server.stream_url) as reader:
        assert reader.partitions(name) == []


def test_what_the_tool_made_with_keys_is_understood(server: LocalRabbitMQ, tool: Tool) -> None:
    """Partitions stand in the order of the keys as they were given to the tool."""
    name = unique_name("relatum-super")
    option = "--routing-keys" if server_version(server.broker_url) < (3, 11) else "--binding-keys"
    tool("add_super_stream", name, option, "emea,apac,amer")
    assert describe_super_stream(server.broker_url, name) == Layout.keyed(name, ["emea", "apac", "amer"])
    assert delete_super_stream(server.broker_url, name) == Layout.keyed(name, ["emea", "apac", "amer"])


def test_the_tool_understands_what_is_made_here(server: LocalRabbitMQ, tool: Tool) -> None:
    """It finds the partitions and deletes them all, and the exchange."""
    name = unique_name("relatum-super")
    layout = declare_super_stream(server.broker_url, name, 2)
    tool("delete_super_stream", name)
    with broker_connection(server.broker_url) as connection:
        # Each could be declared with other arguments now.
        channel = connection.channel()
        channel.exchange_declare(name, "fanout")
        channel.exchange_delete(name)
        for partition in layout:
            channel.queue_declare(partition.stream, exclusive=True)


@pytest.mark.parametrize("partitions", [1, 2, 3, 7, 12, 1000])
def test_keys_are_routed_as_by_java(java: Any, partitions: int) -> None:
    """Short and long keys, in every script, go to the partition that the Java client's rule gives."""
    layout = Layout.numbered("orders", partitions)
    keys = ["", "a", "hello1", "N14228", "ключ", "鍵🔑", "x" * 300, *(f"order-{number}" for number in range(60))]
    assert [layout.route(key).place for key in keys] == [partition_by_java(java, key, partitions) for key in keys]


def test_vectors_of_the_java_rule(java: Any) -> None:
    """The rule these tests compare with gives the vectors of other clients."""
    assert [partition_by_java(java, f"hello{number}", 3) for number in range(1, 6)] == [1, 0, 1, 2, 0]


def test_a_java_routed_key_and_ours_land_together(server: LocalRabbitMQ, java: Any) -> None:
    """What a stream client sends by the Java rule lies in the same stream as what is published here with that key."""
    name = unique_name("relatum-super")
    layout = declare_super_stream(server.broker_url, name, 3)
    orders = relatum.SuperStream(name)
    keys = [f"N{number}" for number in range(30)]
    with StreamReader.open(server.stream_url) as reader:
        # The order in which a stream client sees the partitions is what the broker answers.
        streams = reader.partitions(name)
    with ExitStack() as stack:
        publishers = [stack.enter_context(RawPublisher(server.stream_url, stream)) for stream in streams]
        channel = stack.enter_context(broker_connection(server.broker_url)).channel()
        channel.confirm_delivery()
        for key in keys:
            publishers[partition_by_java(java, key, len(streams))].publish(data(key.encode()))
            orders.publish(channel, key.encode(), routing_key=key)
    found = bodies(server.stream_url, layout)
    assert sorted(key for partition in found.values() for key in partition) == sorted(
        2 * [key.encode() for key in keys]
    )
    for partition in found.values():
        assert partition
        assert partition[::2] == partition[1::2]
    delete_super_stream(server.broker_url, name)
