"""Super streams made, described and taken apart over AMQP, against a real broker."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial

import pika
import pytest
from pika.adapters.blocking_connection import BlockingConnection
from pika.compat import long

from relatum.errors import (
    AccessRefused,
    BrokerUnavailable,
    ConfigurationError,
    InvalidInput,
    NotFound,
    SuperStreamConflict,
    SuperStreamNotFound,
)
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
from tests.support import broker_connection, declare_stream, unique_name
from tests.support._raw_publisher import RawConnection
from tests.support.proxy import Proxy
from tests.support.super_streams import declare_by_hand, delete_by_hand, super_stream

NOWHERE, NO_STREAMS = "amqp://127.0.0.1:1/", "rabbitmq-stream://127.0.0.1:1"
"""URLs where nothing answers: port 1 is given to a service that no system runs."""

Made = Callable[..., AbstractContextManager[Layout]]


@pytest.fixture
def made(amqp_url: str, stream_url: str) -> Made:
    """Makes a super stream that is deleted when the block ends."""
    return partial(super_stream, amqp_url, stream_url)


@pytest.fixture
def connection(amqp_url: str) -> Iterator[BlockingConnection]:
    """A bare blocking connection."""
    with broker_connection(amqp_url) as connection:
        yield connection


@pytest.fixture
def alone(amqp_url: str) -> Iterator[str]:
    """The broker's AMQP URL, by a port beside which no stream protocol answers."""
    with Proxy.to(amqp_url) as proxy:
        yield proxy.url(amqp_url)


def exists(amqp_url: str, name: str, *, exchange: bool = False) -> bool:
    """Whether the broker has a queue, or an exchange, of that name."""
    with broker_connection(amqp_url) as connection:
        channel = connection.channel()
        try:
            if exchange:
                channel.exchange_declare(name, passive=True)
            else:
                channel.queue_declare(name, passive=True)
        except pika.exceptions.ChannelClosedByBroker as error:
            if error.reply_code != 404:
                raise
            return False
    return True


@pytest.mark.parametrize("keys", [[str(number) for number in range(12)], ["emea", "apac", "10"]])
def test_what_is_declared_is_described(made: Made, amqp_url: str, stream_url: str, keys: list[str]) -> None:
    """The broker tells the partitions in the order in which they were asked for, not of the alphabet."""
    with made(binding_keys=keys) as layout:
        assert [partition.binding_key for partition in layout] == keys
        assert describe_super_stream(amqp_url, layout.super_stream, stream_url=stream_url) == layout
        with StreamReader.open(stream_url) as reader:
            assert reader.partitions(layout.super_stream) == [partition.stream for partition in layout]


@pytest.mark.parametrize(("keys", "added"), [(["0", "2"], "3"), (["a", "b"], "2"), (["20260101"], "1"), (["²"], "1")])
def test_a_partition_is_added_behind_all_others(
    made: Made, amqp_url: str, stream_url: str, keys: list[str], added: str
) -> None:
    """Numbers of partitions that were taken out are not used again; keys that are no places do not count."""
    with made(binding_keys=keys) as layout:
        new = add_partition(amqp_url, layout.super_stream, stream_url=stream_url)
        assert new.binding_key == added
        assert describe_super_stream(amqp_url, layout.super_stream, stream_url=stream_url).partitions == (*layout, new)


def test_declaring_again_changes_nothing(made: Made, amqp_url: str, stream_url: str) -> None:
    """A super stream that is there as asked for is given back; with another number it is a conflict."""
    with made(2) as layout:
        name = layout.super_stream
        assert declare_super_stream(amqp_url, name, 2, stream_url=stream_url) == layout
        for wrong in ({"partitions": 3}, {"partitions": 1}, {"binding_keys": ["a", "b"]}):
            with pytest.raises(SuperStreamConflict, match=r"2 partitions \(0, 1\)") as caught:
                declare_super_stream(amqp_url, name, **wrong, stream_url=stream_url)  # type: ignore[arg-type]
            assert caught.value.super_stream == name
        assert describe_super_stream(amqp_url, name, stream_url=stream_url) == layout
        assert not exists(amqp_url, f"{name}-2")


def test_a_declaration_that_was_cut_short_is_completed(
    connection: BlockingConnection, amqp_url: str, stream_url: str
) -> None:
    """Streams are made first and bound last; where some are not bound yet, declaring again binds them."""
    layout = Layout.numbered(unique_name("relatum-super"), 3)
    streams = [partition.stream for partition in layout]
    try:
        declare_super_stream(connection, layout.super_stream, stream_url=stream_url)
        connection.channel().queue_unbind(
            streams[2], layout.super_stream, "2", {"x-stream-partition-order": pika.compat.long(2)}
        )
        assert len(describe_super_stream(amqp_url, layout.super_stream, stream_url=stream_url)) == 2
        assert declare_super_stream(connection, layout.super_stream, stream_url=stream_url) == layout
        assert describe_super_stream(amqp_url, layout.super_stream, stream_url=stream_url) == layout
    finally:
        delete_by_hand(amqp_url, layout.super_stream, *streams)


def test_streams_are_declared_with_what_was_asked_for(made: Made, amqp_url: str) -> None:
    """The options become the streams' arguments; others are a conflict that names one, none are as they come."""
    options = StreamOptions(
        max_length_bytes=1_000_000, max_age=timedelta(days=7), segment_bytes_max=100_000, leader_locator="client-local"
    )
    with made(1, options=options) as layout, broker_connection(amqp_url) as connection:
        same = {
            "x-queue-type": "stream",
            "x-max-length-bytes": 1_000_000,
            "x-max-age": "604800s",
            "x-stream-max-segment-size-bytes": 100_000,
            "x-queue-leader-locator": "client-local",
        }
        connection.channel().queue_declare(layout.partitions[0].stream, durable=True, arguments=same)
        assert declare_super_stream(connection, layout.super_stream, 1) == layout
        with pytest.raises(SuperStreamConflict, match=r"-0.*max-"):
            declare_super_stream(connection, layout.super_stream, 1, options=StreamOptions(max_length_bytes=1))
        assert connection.is_open
        with pytest.raises(ConfigurationError, match="no such option"):
            add_partition(amqp_url, layout.super_stream, options=StreamOptions(leader_locator="nobody-knows"))


def test_what_is_there_and_is_another_is_a_conflict(
    connection: BlockingConnection, amqp_url: str, stream_url: str
) -> None:
    """A queue of a partition's name, or an exchange of another kind, is left alone and named."""
    name = unique_name("relatum-super")
    try:
        connection.channel().queue_declare(f"{name}-1")
        with pytest.raises(SuperStreamConflict, match=f"{name}-1"):
            declare_super_stream(connection, name, stream_url=stream_url)
        connection.channel().queue_delete(f"{name}-1")
        connection.channel().exchange_declare(name, "fanout")
        with pytest.raises(SuperStreamConflict, match=f"Exchange '{name}'"):
            declare_super_stream(connection, name, stream_url=stream_url)
    finally:
        delete_by_hand(amqp_url, name, *(f"{name}-{place}" for place in range(3)))


@pytest.mark.parametrize(
    "wrong",
    [
        {"name": ""},
        {"name": "x" * 254},
        {"partitions": 0},
        {"partitions": 1001},
        {"partitions": 2, "binding_keys": ["a"]},
        {"binding_keys": []},
        {"binding_keys": "ab"},
        {"binding_keys": ["a", "a"]},
        {"binding_keys": ["a", ""]},
        {"binding_keys": ["a\rb"]},
        {"partitions": "3"},
        {"name": None},
        {"name": 7},
        {"name": "two\nlines"},
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_sent(wrong: dict[str, object]) -> None:
    """No broker is asked: the one named here does not exist."""
    wrong = {"name": "orders", **wrong}
    with pytest.raises(InvalidInput):
        declare_super_stream(NOWHERE, stream_url=NO_STREAMS, **wrong)  # type: ignore[arg-type]


def test_deleting_leaves_nothing(made: Made, amqp_url: str, stream_url: str) -> None:
    """Exchange and streams are gone; what is not there is not found, to be described or deleted."""
    with made(binding_keys=["a", "b"]) as layout:
        name = layout.super_stream
        assert delete_super_stream(amqp_url, name, stream_url=stream_url) == layout
        assert not exists(amqp_url, name, exchange=True)
        assert not any(exists(amqp_url, partition.stream) for partition in layout)
        for function in (describe_super_stream, delete_super_stream, add_partition):
            with pytest.raises(SuperStreamNotFound, match=name) as caught:
                function(amqp_url, name, stream_url=stream_url)
            assert caught.value.super_stream == name


def test_a_partition_is_added_and_taken_out(made: Made, amqp_url: str, stream_url: str) -> None:
    """Others keep their order; a number is not used again while its stream is there; the last partition stays."""

    def keys() -> list[str]:
        return [each.binding_key for each in describe_super_stream(amqp_url, name, stream_url=stream_url)]

    with made(2) as layout:
        name = layout.super_stream
        added = add_partition(amqp_url, name, stream_url=stream_url)
        assert (added.place, added.stream, added.binding_key) == (2, f"{name}-2", "2")
        assert keys() == ["0", "1", "2"]
        assert unbind_partition(amqp_url, name, f"{name}-1", stream_url=stream_url) == layout.partitions[1]
        assert keys() == ["0", "2"]
        assert exists(amqp_url, f"{name}-1")
        assert unbind_partition(amqp_url, name, f"{name}-2", stream_url=stream_url, delete=True).place == 1
        assert not exists(amqp_url, f"{name}-2")
        # Its stream is still there, so the next one is another.
        assert add_partition(amqp_url, name, stream_url=stream_url).binding_key == "2"
        assert keys() == ["0", "2"]
        assert add_partition(amqp_url, name, binding_key="1", stream_url=stream_url).stream == f"{name}-1"
        with pytest.raises(SuperStreamConflict, match="binding key '0' already"):
            add_partition(amqp_url, name, binding_key="0", stream_url=stream_url)
        with pytest.raises(InvalidInput, match="one line"):
            add_partition(amqp_url, name, binding_key="a\nb", stream_url=stream_url)
        with pytest.raises(NotFound, match="no partition"):
            unbind_partition(amqp_url, name, f"{name}-7", stream_url=stream_url)
        for place in "12":
            unbind_partition(amqp_url, name, f"{name}-{place}", stream_url=stream_url, delete=True)
        with pytest.raises(SuperStreamConflict, match="last partition"):
            unbind_partition(amqp_url, name, f"{name}-0", stream_url=stream_url)


def test_one_made_by_hand_is_understood(
    connection: BlockingConnection, amqp_url: str, stream_url: str, broker_version: tuple[int, ...]
) -> None:
    """Streams of other names bound by their place or their name are found, and taken out by their own arguments.

    Where the broker can be asked for binding keys without harm: elsewhere, their layout has to be given.
    """
    name, other = unique_name("relatum-super"), unique_name()
    try:
        declare_by_hand(connection, name, ["0", other, "east"], [f"{other}-first", other, f"{name}-east"])
        if broker_version < (4, 3):
            with pytest.raises(SuperStreamConflict, match="give the layout yourself"):
                describe_super_stream(connection, name, stream_url=stream_url)
            return
        layout = describe_super_stream(connection, name, stream_url=stream_url)
        assert [(each.stream, each.binding_key) for each in layout] == [
            (f"{other}-first", "0"),
            (other, other),
            (f"{name}-east", "east"),
        ]
        unbind_partition(connection, name, other, stream_url=stream_url)
        assert len(describe_super_stream(connection, name, stream_url=stream_url)) == 2
    finally:
        delete_by_hand(amqp_url, name, f"{other}-first", other, f"{name}-east")


@pytest.mark.parametrize(
    ("streams", "keys"),
    [(["{}-b", "{}-a", "{}-9"], ["b", "a", "9"]), (["{}-0", "{}-1", "{}-2"], ["0", "1", "2"]), (["x-{}"], ["0"])],
)
def test_one_made_by_the_stream_protocol_is_understood(
    amqp_url: str, stream_url: str, broker_version: tuple[int, ...], streams: list[str], keys: list[str]
) -> None:
    """As one made here: it has the partitions in that order, and declaring it again changes nothing."""
    if broker_version < (4, 3):
        pytest.skip("stream clients make super streams from RabbitMQ 3.13 on; keys are asked for from 4.3 on")
    name = unique_name("relatum-super")
    wanted = Layout.of(name, zip([stream.format(name) for stream in streams], keys, strict=True))
    with RawConnection(stream_url) as connection:
        connection.create_super_stream(name, [partition.stream for partition in wanted], keys)
    try:
        assert describe_super_stream(amqp_url, name, stream_url=stream_url) == wanted
        with broker_connection(amqp_url) as bare:
            # By the very arguments of the broker: a binding with others would have each stream named twice.
            for each in wanted:
                bare.channel().queue_bind(
                    each.stream, name, each.binding_key, {"x-stream-partition-order": long(each.place)}
                )
        added = add_partition(amqp_url, name, stream_url=stream_url)
        assert describe_super_stream(amqp_url, name, stream_url=stream_url).partitions == (*wanted, added)
        unbind_partition(amqp_url, name, wanted.partitions[0].stream, stream_url=stream_url, delete=True)
        assert len(describe_super_stream(amqp_url, name, stream_url=stream_url)) == len(wanted)
    finally:
        delete_super_stream(amqp_url, name, stream_url=stream_url)


@pytest.mark.parametrize("stream", ["{}-0", "other-{}"])
def test_a_binding_key_nobody_can_tell_is_named(
    connection: BlockingConnection, amqp_url: str, stream_url: str, broker_version: tuple[int, ...], stream: str
) -> None:
    """Where nobody can say by which key a stream is bound, the error says what to do.

    A broker that cannot be asked without harm is not: a stream of a partition's usual name is taken for one.
    """
    name = unique_name("relatum-super")
    stream = stream.format(name)
    try:
        declare_by_hand(connection, name, ["secret"], [stream])
        if broker_version < (4, 3) and stream.startswith(name):
            assert describe_super_stream(connection, name, stream_url=stream_url) == Layout.numbered(name, 1)
            return
        with pytest.raises(SuperStreamConflict, match="give the layout yourself"):
            describe_super_stream(connection, name, stream_url=stream_url)
    finally:
        delete_by_hand(amqp_url, name, stream)


def test_amqp_alone_does(alone: str) -> None:
    """Where no stream protocol answers, all works with partitions that are numbers."""
    name = unique_name("relatum-super")
    wanted = Layout.numbered(name, 2)
    try:
        assert declare_super_stream(alone, name, 2) == wanted
        assert describe_super_stream(alone, name) == wanted
        assert add_partition(alone, name).stream == f"{name}-2"
        unbind_partition(alone, name, f"{name}-2", delete=True)
        with pytest.raises(SuperStreamConflict):
            declare_super_stream(alone, name, 3)
        assert delete_super_stream(alone, name) == wanted
        assert not exists(alone, name, exchange=True)
        with pytest.raises(SuperStreamNotFound):
            describe_super_stream(alone, name)
    finally:
        delete_by_hand(alone, name, *(f"{name}-{place}" for place in range(3)))


def test_amqp_is_not_asked_where_the_stream_protocol_was_named(made: Made, amqp_url: str, stream_url: str) -> None:
    """It may tell other partitions: while the port that was named does not answer, nobody goes by those."""
    with made(2) as layout:
        for function in (describe_super_stream, add_partition, delete_super_stream):
            with pytest.raises(BrokerUnavailable):
                function(amqp_url, layout.super_stream, stream_url=NO_STREAMS)
        assert describe_super_stream(amqp_url, layout.super_stream, stream_url=stream_url) == layout


def test_a_stream_alone_is_no_super_stream(amqp_url: str, stream_url: str) -> None:
    """A stream of that name, and an exchange that leads to no stream, are none; asking costs no channel."""
    name = unique_name()
    try:
        declare_stream(amqp_url, name)
        with broker_connection(amqp_url) as connection:
            with pytest.raises(SuperStreamNotFound):
                describe_super_stream(connection, name, stream_url=stream_url)
            channel = connection.channel()
            channel.exchange_declare(name, "direct", durable=True)
            with pytest.raises(SuperStreamNotFound):
                describe_super_stream(channel, name, stream_url=stream_url)
            assert channel.is_open
    finally:
        delete_by_hand(amqp_url, name, name)


def test_errors_say_whose_fault_it_is(amqp_url: str, stream_url: str) -> None:
    """A broker that is away, a wrong password and a wrong argument are told apart, without showing the password."""
    with pytest.raises(BrokerUnavailable):
        declare_super_stream(NOWHERE, "orders", stream_url=NO_STREAMS)
    host = amqp_url.rpartition("@")[2]
    for function in (declare_super_stream, describe_super_stream):
        with pytest.raises(AccessRefused) as caught:
            function(f"amqp://guest:wrongword@{host}", "orders")
        assert "wrongword" not in str(caught.value)
    with pytest.raises(ConfigurationError, match="not int"):
        describe_super_stream(7, "orders")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="amqp://"):
        declare_super_stream(stream_url, unique_name())
