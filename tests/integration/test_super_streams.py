"""Super streams made, described and taken apart over AMQP, against a real broker."""

from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import pika
import pytest
from pika.adapters.blocking_connection import BlockingConnection
from pika.compat import long

from relatum import Broker, errors
from relatum.local import LocalRabbitMQ
from relatum.reading import StreamReader
from relatum.superstreams import (
    Layout,
    StreamOptions,
    add_partition,
    declare_super_stream,
    delete_super_stream,
    describe_super_stream,
    unbind_partition,
)
from tests.support import broker_connection, server_version, unique_name
from tests.support._raw_publisher import RawConnection
from tests.support.place import Place
from tests.support.proxy import Proxy
from tests.support.rabbitmq_tools import run_tool
from tests.support.raising import raising
from tests.support.super_streams import declare_by_hand, delete_by_hand, super_stream

NOWHERE, NO_STREAMS = "amqp://127.0.0.1:1/", "rabbitmq-stream://127.0.0.1:1"
"""URLs where nothing answers: port 1 is given to a service that no system runs."""


@pytest.fixture
def name(amqp_url: str) -> Iterator[str]:
    name = unique_name("relatum-super")
    yield name
    delete_by_hand(amqp_url, name, *(f"{name}-{end}" for end in ("0", "1", "2", "east")), f"other-{name}")


def exists(amqp_url: str, name: str, *, exchange: bool = False) -> bool:
    with broker_connection(amqp_url) as connection:
        channel = connection.channel()
        declare: Callable[..., Any] = channel.exchange_declare if exchange else channel.queue_declare
        try:
            declare(name, passive=True)
        except pika.exceptions.ChannelClosedByBroker as error:
            if error.reply_code != 404:
                raise
            return False
    return True


@pytest.mark.parametrize(
    ("keys", "added"),
    [
        ([str(number) for number in range(12)], "12"),
        (["emea", "apac", "10"], "11"),
        (["0", "2"], "3"),
        (["a", "b"], "2"),
        (["20260101"], "1"),
        (["²"], "1"),
    ],
)
def test_what_is_declared_is_described(broker: Broker, stream_url: str, keys: list[str], added: str) -> None:
    """Partitions keep the order in which they were declared, and an added one gets the next free number as its key."""
    with super_stream(broker, binding_keys=keys) as layout:
        assert [partition.binding_key for partition in layout] == keys
        assert describe_super_stream(broker, layout.super_stream) == layout
        with StreamReader.open(stream_url) as reader:
            assert reader.partitions(layout.super_stream) == [partition.stream for partition in layout]
        new = add_partition(broker, layout.super_stream)
        assert new.binding_key == added
        assert describe_super_stream(broker, layout.super_stream).partitions == (*layout, new)


def test_declaring_again_changes_nothing_or_completes(place: Place, connection: BlockingConnection) -> None:
    """Declaring again gives what is there, binds what a cut declaration left, and refuses other partitions."""
    with super_stream(place.broker, 2) as layout:
        name = layout.super_stream
        assert declare_super_stream(place.broker, name, 2) == layout
        wrong: dict[str, Any]
        for wrong in ({"partitions": 3}, {"partitions": 1}, {"binding_keys": ["a", "b"]}):
            with raising(errors.SuperStreamConflict, match=r"2 partitions \(0, 1\)", super_stream=name):
                declare_super_stream(place.broker, name, **wrong)
        assert describe_super_stream(place.broker, name) == layout
        assert not exists(place.amqp, f"{name}-2")
        connection.channel().queue_unbind(f"{name}-1", name, "1", {"x-stream-partition-order": long(1)})
        assert len(describe_super_stream(place.broker, name)) == 1
        assert declare_super_stream(place.broker, name, 2) == layout
        assert describe_super_stream(place.broker, name) == layout


def test_streams_are_declared_with_what_was_asked_for(broker: Broker, amqp_url: str) -> None:
    """Options become the streams' arguments, others are a conflict that names one, and none accept any."""
    options = StreamOptions(
        max_length_bytes=1_000_000, max_age=timedelta(days=7), segment_bytes_max=100_000, leader_locator="client-local"
    )
    with super_stream(broker, 1, options=options) as layout, broker_connection(amqp_url) as connection:
        same = {
            "x-queue-type": "stream",
            "x-max-length-bytes": 1_000_000,
            "x-max-age": "604800s",
            "x-stream-max-segment-size-bytes": 100_000,
            "x-queue-leader-locator": "client-local",
        }
        connection.channel().queue_declare(layout.partitions[0].stream, durable=True, arguments=same)
        assert declare_super_stream(connection, layout.super_stream, 1) == layout
        with pytest.raises(errors.SuperStreamConflict, match=r"-0.*max-"):
            declare_super_stream(connection, layout.super_stream, 1, options=StreamOptions(max_length_bytes=1))
        assert connection.is_open
        with pytest.raises(errors.ConfigurationError, match="does not accept"):
            add_partition(amqp_url, layout.super_stream, options=StreamOptions(leader_locator="nobody-knows"))


def test_what_is_there_and_is_another_is_a_conflict(connection: BlockingConnection, name: str) -> None:
    """A queue of a partition's name, or an exchange of another kind, is left alone and named."""
    connection.channel().queue_declare(f"{name}-1")
    with pytest.raises(errors.SuperStreamConflict, match=f"{name}-1"):
        declare_super_stream(connection, name)
    connection.channel().queue_delete(f"{name}-1")
    connection.channel().exchange_declare(name, "fanout")
    with pytest.raises(errors.SuperStreamConflict, match=f"Exchange '{name}'"):
        declare_super_stream(connection, name)


def test_a_partition_is_added_and_taken_out(broker: Broker, amqp_url: str) -> None:
    """Partitions come and go in order, the last one stays, and deleting leaves neither exchange nor streams."""

    def keys() -> list[str]:
        return [each.binding_key for each in describe_super_stream(broker, layout.super_stream)]

    with super_stream(broker, 2) as layout:
        name = layout.super_stream
        added = add_partition(broker, name)
        assert (added.place, added.stream, added.binding_key) == (2, f"{name}-2", "2")
        assert keys() == ["0", "1", "2"]
        assert unbind_partition(broker, name, f"{name}-1") == layout.partitions[1]
        assert keys() == ["0", "2"]
        assert exists(amqp_url, f"{name}-1")
        assert unbind_partition(broker, name, f"{name}-2", delete=True).place == 1
        assert not exists(amqp_url, f"{name}-2")
        # Its stream still exists, so the next one gets another name.
        assert add_partition(broker, name).binding_key == "2"
        assert keys() == ["0", "2"]
        assert add_partition(broker, name, binding_key="1").stream == f"{name}-1"
        with pytest.raises(errors.SuperStreamConflict, match="already has a partition with binding key '0'"):
            add_partition(broker, name, binding_key="0")
        with pytest.raises(errors.InvalidInput, match="one line"):
            add_partition(broker, name, binding_key="a\nb")
        with pytest.raises(errors.NotFound, match="not a partition"):
            unbind_partition(broker, name, f"{name}-7")
        for place in "12":
            unbind_partition(broker, name, f"{name}-{place}", delete=True)
        with pytest.raises(errors.SuperStreamConflict, match="last partition"):
            unbind_partition(broker, name, f"{name}-0")
        assert delete_super_stream(broker, name) == Layout.numbered(name, 1)
        assert not exists(amqp_url, name, exchange=True)
        assert not exists(amqp_url, f"{name}-0")
        for function in (describe_super_stream, delete_super_stream, add_partition):
            with raising(errors.SuperStreamNotFound, match=name, super_stream=name):
                function(broker, name)


def test_one_made_by_hand_is_understood(
    broker: Broker, connection: BlockingConnection, name: str, broker_version: tuple[int, ...]
) -> None:
    """From RabbitMQ 4.3 on, streams of other names are found and taken out; before, the layout has to be given."""
    keys, streams = ["0", f"other-{name}", "east"], [f"{name}-0", f"other-{name}", f"{name}-east"]
    declare_by_hand(connection, name, keys, streams)
    if broker_version < (4, 3):
        with pytest.raises(errors.SuperStreamConflict, match="pass the layout"):
            describe_super_stream(broker, name)
        return
    assert describe_super_stream(broker, name) == Layout.of(name, zip(streams, keys, strict=True))
    unbind_partition(broker, name, f"other-{name}")
    assert len(describe_super_stream(broker, name)) == 2


@pytest.mark.parametrize(
    ("streams", "keys"),
    [(["{}-b", "{}-a", "{}-9"], ["b", "a", "9"]), (["{}-0", "{}-1", "{}-2"], ["0", "1", "2"]), (["x-{}"], ["0"])],
)
def test_one_made_by_the_stream_protocol_is_understood(
    broker: Broker, amqp_url: str, stream_url: str, broker_version: tuple[int, ...], streams: list[str], keys: list[str]
) -> None:
    """A super stream of a stream client has its partitions in order, and partitions are added and taken out."""
    if broker_version < (4, 3):
        pytest.skip("stream clients make super streams from RabbitMQ 3.13 on; keys are asked for from 4.3 on")
    name = unique_name("relatum-super")
    wanted = Layout.of(name, zip([stream.format(name) for stream in streams], keys, strict=True))
    with RawConnection(stream_url) as connection:
        connection.create_super_stream(name, [partition.stream for partition in wanted], keys)
    try:
        assert describe_super_stream(broker, name) == wanted
        with broker_connection(amqp_url) as bare:
            # With exactly the broker's arguments: a binding with others would list each stream twice.
            for each in wanted:
                bare.channel().queue_bind(
                    each.stream, name, each.binding_key, {"x-stream-partition-order": long(each.place)}
                )
        added = add_partition(broker, name)
        assert describe_super_stream(broker, name).partitions == (*wanted, added)
        unbind_partition(broker, name, wanted.partitions[0].stream, delete=True)
        assert len(describe_super_stream(broker, name)) == len(wanted)
    finally:
        delete_super_stream(broker, name)


@pytest.mark.parametrize("stream", ["{}-0", "other-{}"])
def test_a_binding_key_nobody_can_tell_is_named(
    broker: Broker, connection: BlockingConnection, name: str, broker_version: tuple[int, ...], stream: str
) -> None:
    """An unknown binding key is an error, but for a usual name on a broker that cannot be asked without harm."""
    declare_by_hand(connection, name, ["secret"], [stream.format(name)])
    if broker_version < (4, 3) and stream.startswith("{}"):
        assert describe_super_stream(broker, name) == Layout.numbered(name, 1)
        return
    with pytest.raises(errors.SuperStreamConflict, match="pass the layout"):
        describe_super_stream(broker, name)


def test_amqp_alone_does(amqp_url: str, name: str) -> None:
    """Numbered partitions need AMQP alone, but a stream port that was named and does not answer is an error."""
    wanted = Layout.numbered(name, 2)
    with Proxy.to(amqp_url) as proxy:
        alone = proxy.url(amqp_url)
        assert declare_super_stream(alone, name, 2) == wanted
        for function in (describe_super_stream, add_partition, delete_super_stream):
            with pytest.raises(errors.BrokerUnavailable):
                function(Broker(amqp_url, stream_url=NO_STREAMS), name)
        assert describe_super_stream(alone, name) == wanted
        assert add_partition(alone, name).stream == f"{name}-2"
        unbind_partition(alone, name, f"{name}-2", delete=True)
        with pytest.raises(errors.SuperStreamConflict):
            declare_super_stream(alone, name, 3)
        assert delete_super_stream(alone, name) == wanted
        assert not exists(alone, name, exchange=True)
        with pytest.raises(errors.SuperStreamNotFound):
            describe_super_stream(alone, name)


def test_a_stream_alone_is_no_super_stream(connection: BlockingConnection, stream_name: str) -> None:
    """A stream of that name, and an exchange that leads to no stream, are none; asking costs no channel."""
    channel = connection.channel()
    for asked in (connection, channel):
        with pytest.raises(errors.SuperStreamNotFound):
            describe_super_stream(asked, stream_name)
        channel.exchange_declare(stream_name, "direct", durable=True)
    assert channel.is_open
    channel.exchange_delete(stream_name)


def test_errors_say_whose_fault_it_is(amqp_url: str, stream_url: str) -> None:
    """A broker that is away, a wrong password and a wrong argument are distinguished, without showing the password."""
    with pytest.raises(errors.BrokerUnavailable):
        declare_super_stream(Broker(NOWHERE, stream_url=NO_STREAMS), "orders")
    host = amqp_url.rpartition("@")[2]
    for function in (declare_super_stream, describe_super_stream):
        with pytest.raises(errors.AccessRefused) as caught:
            function(f"amqp://guest:wrongword@{host}", "orders")
        assert "wrongword" not in str(caught.value)
    with pytest.raises(errors.ConfigurationError, match="not int"):
        describe_super_stream(7, "orders")
    with pytest.raises(errors.ConfigurationError, match="amqp://"):
        declare_super_stream(stream_url, unique_name())


Tool = Callable[..., str]


@pytest.fixture(scope="module")
def tool(own_broker: LocalRabbitMQ) -> Tool:
    """Runs `rabbitmq-streams` on that broker; gives what it printed."""
    return partial(run_tool, own_broker, "rabbitmq-streams")


@pytest.mark.rare
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


@pytest.mark.rare
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
