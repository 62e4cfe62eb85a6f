"""Super streams of RabbitMQ's own tool, which must be on the broker's own host, beside ours."""

from collections.abc import Callable
from functools import partial

import pytest
from pika.compat import long

from relatum.local import LocalRabbitMQ
from relatum.reading import StreamReader
from relatum.superstreams import Layout, add_partition, declare_super_stream, delete_super_stream, describe_super_stream
from tests.support import broker_connection, server_version, unique_name
from tests.support.rabbitmq_tools import run_tool

Tool = Callable[..., str]

pytestmark = pytest.mark.rare


@pytest.fixture(scope="module")
def tool(own_broker: LocalRabbitMQ) -> Tool:
    """Runs `rabbitmq-streams` on that broker; gives what it printed."""
    return partial(run_tool, own_broker, "rabbitmq-streams")


def test_what_the_tool_made_is_understood(own_broker: LocalRabbitMQ, tool: Tool) -> None:
    """A super stream of the tool is described in the order of its keys, declared again, enlarged and deleted."""
    url, name = own_broker.broker_url, unique_name("relatum-super")
    tool("add_super_stream", name, "--partitions", "12", "--max-age", "PT1H")
    layout = Layout.numbered(name, 12)
    assert describe_super_stream(url, name) == layout
    assert declare_super_stream(url, name, 12) == layout
    # Rebound with exactly the tool's arguments: a binding with others would list each stream twice.
    with broker_connection(url) as connection:
        for partition in layout:
            connection.channel().queue_bind(
                partition.stream, name, partition.binding_key, {"x-stream-partition-order": long(partition.place)}
            )
    assert describe_super_stream(url, name) == layout
    assert add_partition(url, name).place == 12
    with StreamReader.open(own_broker.stream_url) as reader:
        assert reader.partitions(name) == [f"{name}-{place}" for place in range(13)]
    delete_super_stream(url, name)
    with StreamReader.open(own_broker.stream_url) as reader:
        assert reader.partitions(name) == []
    option = "--routing-keys" if server_version(url) < (3, 11) else "--binding-keys"
    tool("add_super_stream", name, option, "emea,apac,amer")
    assert describe_super_stream(url, name) == Layout.keyed(name, ["emea", "apac", "amer"])
    assert delete_super_stream(url, name) == Layout.keyed(name, ["emea", "apac", "amer"])


def test_the_tool_understands_what_is_made_here(own_broker: LocalRabbitMQ, tool: Tool) -> None:
    """The tool deletes all partitions of a super stream that was declared here, and its exchange."""
    name = unique_name("relatum-super")
    layout = declare_super_stream(own_broker.broker_url, name, 2)
    tool("delete_super_stream", name)
    with broker_connection(own_broker.broker_url) as connection:
        # Each could be declared with other arguments at this point.
        channel = connection.channel()
        channel.exchange_declare(name, "fanout")
        channel.exchange_delete(name)
        for partition in layout:
            channel.queue_declare(partition.stream, exclusive=True)
