"""Exchanges of others are tapped: their publishers, queues and bindings notice nothing, and each message is found."""

import json
from collections.abc import Iterator
from typing import Any

import pika
import pytest
import sqlalchemy as sa
from pika import BasicProperties, BlockingConnection
from pika.adapters.blocking_connection import BlockingChannel
from pika.exceptions import ChannelClosedByBroker

from relatum.errors import AccessRefused, Conflict, InvalidInput, NotAStream, NotFound, RelatumError
from relatum.local import LocalRabbitMQ
from relatum.reading import StreamReader
from relatum.recording import verify
from relatum.superstreams import StreamOptions, declare_super_stream, describe_super_stream
from relatum.tapping import defined_taps, tap, untap
from relatum_consumer import Relations, Status
from tests.support import broker_connection, recording, unique_name, wait_recorded, wait_until
from tests.support.rabbitmq_tools import run_tool
from tests.support.tapped import add_users, as_user

SMALL = StreamOptions(max_length_bytes=10_000_000)
TYPES = {"topic": (), "fanout": (), "headers": (), "direct": ("a.b",)}
"""Types of exchanges, and the keys that one needs to be tapped."""


@pytest.fixture(scope="module")
def server(own_broker: LocalRabbitMQ) -> LocalRabbitMQ:
    """A broker of this module, with users that may do little."""
    add_users(own_broker, USERS)
    return own_broker


@pytest.fixture
def url(server: LocalRabbitMQ) -> str:
    """The broker's URL, of its owner."""
    return server.broker_url


@pytest.fixture
def connection(url: str) -> Iterator[BlockingConnection]:
    """A connection of somebody who knows nothing of taps."""
    with broker_connection(url) as connection:
        yield connection


@pytest.fixture
def channel(connection: BlockingConnection) -> BlockingChannel:
    """A channel with confirms."""
    channel = connection.channel()
    channel.confirm_delivery()
    return channel


def exchange_of(channel: BlockingChannel, kind: str, **options: Any) -> str:
    """A new exchange with a queue of its own, as others have it."""
    name = unique_name(kind)
    channel.exchange_declare(name, kind, durable=True, **options)
    channel.queue_declare(name, durable=True)
    channel.queue_bind(name, name, {"topic": "#", "direct": "a.b"}.get(kind, "1"))
    return name


def publish(channel: BlockingChannel, exchange: str, body: bytes, key: str = "a.b", **headers: Any) -> None:
    """Publish as somebody does who knows nothing of taps."""
    channel.basic_publish(exchange, key, body, BasicProperties(headers=headers))


def bodies(server: LocalRabbitMQ, stream: str, count: int) -> list[bytes]:
    """What lies in a stream once so many messages do."""
    with StreamReader.open(server.stream_url) as reader:

        def all_there() -> list[bytes]:
            return [message.body for message in reader.iterate(stream)]

        wait_until(lambda: len(all_there()) >= count, what=f"{count} messages in {stream}")
        return all_there()


@pytest.mark.parametrize("has_stream", [True, False])
def test_the_name_of_a_tapped_exchange(
    server: LocalRabbitMQ, url: str, channel: BlockingChannel, database_url: str, engine: sa.Engine, has_stream: bool
) -> None:
    """A stream of the very name is what it means; else the tap's stream, which is no partition of a super stream."""
    name = unique_name("orders")
    channel.exchange_declare(name, "topic", durable=True)
    tap(url, database_url, name, options=SMALL)
    publish(channel, name, b"copy", order="7")
    if has_stream:
        channel.queue_declare(name, durable=True, arguments={"x-queue-type": "stream"})
        publish(channel, "", b"own", key=name, order="7")
    meant = name if has_stream else f"tap.{name}"
    with recording(url, engine, meant, keys=["order"]):
        wait_recorded(url, engine, meant)
    report = verify(url, engine.url, [name])
    assert [(each.stream, each.differences) for each in report.streams] == [(meant, [])]
    if has_stream:
        publish(channel, "", b"more", key=name, order="7")
        with recording(url, engine, name):
            wait_recorded(url, engine, name)
        with Relations(url, database_url) as relations:
            assert [message.body for message in relations.find("order", "7", streams=name)] == [b"own", b"more"]


def is_queue(connection: BlockingConnection, name: str) -> bool:
    """Whether there is a queue or stream of that name."""
    channel = connection.channel()
    try:
        channel.queue_declare(name, passive=True)
    except ChannelClosedByBroker:
        return False
    channel.close()
    return True


@pytest.mark.parametrize("kind", TYPES)
def test_a_tapped_exchange_has_its_messages_found(
    server: LocalRabbitMQ, url: str, channel: BlockingChannel, database_url: str, engine: sa.Engine, kind: str
) -> None:
    """Each type of exchange: what its publishers send is found by its headers, and their queue has it as before."""
    exchange = exchange_of(channel, kind)
    made = tap(url, database_url, exchange, binding_keys=TYPES[kind], options=SMALL)
    assert [(each.exchange, each.kind, each.stream) for each in made] == [(exchange, kind, f"tap.{exchange}")]
    assert defined_taps(database_url) == made
    publish(channel, exchange, b"one", order="7", format="pdf")
    publish(channel, exchange, b"other", order="8")
    with recording(url, engine, f"tap.{exchange}", keys=["order"]):
        wait_recorded(url, engine, f"tap.{exchange}")
        with Relations(url, database_url) as relations:
            assert [message.body for message in relations.find("order", "7")] == [b"one"]
            none = relations.find("order", "9", complete=True)
            assert none.status is Status.ABSENT
    assert channel.queue_declare(exchange, passive=True).method.message_count == 2


def test_what_is_copied_of_headers_exchanges_is_chosen_by_arguments(
    server: LocalRabbitMQ, url: str, channel: BlockingChannel, database_url: str
) -> None:
    """`x-match` of a tap is that of RabbitMQ: any, all, and those that look at `x-` headers, too."""
    exchange = exchange_of(channel, "headers")
    for number, match in enumerate(("any", "all", "any-with-x", "all-with-x")):
        arguments = {"x-match": match, "format": "pdf", "pages": 4}
        tap(url, database_url, exchange, stream=f"{exchange}-{number}", arguments=arguments, options=SMALL)
    publish(channel, exchange, b"pdf", format="pdf")
    publish(channel, exchange, b"both", format="pdf", pages=4)
    publish(channel, exchange, b"none", format="txt")
    found = [bodies(server, f"{exchange}-{number}", count) for number, count in enumerate((2, 1, 2, 1))]
    assert found == [[b"pdf", b"both"], [b"both"]] * 2
    untap(url, database_url, exchange)
    publish(channel, exchange, b"both", format="pdf", pages=4)
    assert [len(bodies(server, f"{exchange}-{number}", 1)) for number in range(4)] == [2, 1, 2, 1]


def test_taps_and_bindings_of_others_are_left_alone(
    server: LocalRabbitMQ, url: str, channel: BlockingChannel, database_url: str
) -> None:
    """Two taps of one exchange have a copy each; the same once more changes nothing; a binding of another's stays."""
    exchange = exchange_of(channel, "topic")
    stream = f"tap.{exchange}"
    tap(url, database_url, exchange, options=SMALL)
    tap(url, database_url, exchange, options=StreamOptions(max_length_bytes=20_000_000))
    tap(url, database_url, exchange, stream=f"{exchange}-b", binding_keys=["a.*", "#.b"], options=SMALL)
    channel.queue_bind(stream, exchange, "#")
    publish(channel, exchange, b"one")
    assert bodies(server, stream, 1) == bodies(server, f"{exchange}-b", 1) == [b"one"]
    assert len(defined_taps(database_url)) == 3
    assert [each.stream for each in untap(url, database_url, exchange, stream=stream)] == [stream]
    publish(channel, exchange, b"two")
    assert bodies(server, stream, 2) == bodies(server, f"{exchange}-b", 2) == [b"one", b"two"]
    untap(url, database_url, exchange, delete=True)
    publish(channel, exchange, b"three")
    assert bodies(server, stream, 3) == [b"one", b"two", b"three"]
    assert defined_taps(database_url) == []
    with pytest.raises(NotFound, match="is not tapped"):
        untap(url, database_url, exchange)


def test_many_exchanges_go_into_one_stream(
    server: LocalRabbitMQ, url: str, connection: BlockingConnection, channel: BlockingChannel, database_url: str
) -> None:
    """One stream for several; it is deleted with the last tap, and never one that was there before."""
    first, second = exchange_of(channel, "fanout"), exchange_of(channel, "topic")
    stream = unique_name()
    tap(url, database_url, [first, second], stream=stream, options=SMALL)
    publish(channel, first, b"1")
    publish(channel, second, b"2")
    assert bodies(server, stream, 2) == [b"1", b"2"]
    with pytest.raises(Conflict, match="is tapped into it, too"):
        untap(url, database_url, first, delete=True)
    untap(url, database_url, [first, second], delete=True)
    assert not is_queue(connection, stream)
    channel.queue_declare(stream, durable=True, arguments={"x-queue-type": "stream"})
    tap(url, database_url, first, stream=stream)
    with pytest.raises(Conflict, match="was there before"):
        untap(url, database_url, first, delete=True)
    channel.exchange_delete(first)
    untap(url, database_url, first)
    assert is_queue(connection, stream)
    assert defined_taps(database_url) == []


def test_what_cannot_be_tapped_is_one_error_and_makes_nothing(
    url: str, connection: BlockingConnection, channel: BlockingChannel, database_url: str
) -> None:
    """No such exchange, one that shares messages out, a super stream's, a direct one without keys, a queue's name."""
    there, direct, headers = (exchange_of(channel, kind) for kind in ("topic", "direct", "headers"))
    hashing = exchange_of(channel, "x-consistent-hash")
    stream, partitioned = unique_name(), unique_name()
    declare_super_stream(url, partitioned, 2)
    cases: list[tuple[Any, dict[str, Any], type[RelatumError], str]] = [
        ([there, "nowhere"], {}, NotFound, "no exchange 'nowhere'"),
        ([there, hashing], {"binding_keys": ["1"]}, InvalidInput, "would take messages from the others"),
        ([there, direct], {}, InvalidInput, "no key for all messages"),
        ("", {}, InvalidInput, "exchanges="),
        ("amq.rabbitmq.trace", {}, InvalidInput, "the broker's own"),
        (there, {"arguments": {"format": "pdf"}}, InvalidInput, "no notice of arguments"),
        (there, {"arguments": {"format": 0.5}}, InvalidInput, "arguments="),
        (headers, {"arguments": {"pages": 2**63}}, InvalidInput, "64 bits"),
        (headers, {"arguments": {"x" * 300: "y"}}, InvalidInput, "255 bytes"),
        (headers, {"arguments": {"half": "\ud83d"}}, InvalidInput, "surrogate"),
        (headers, {"arguments": {"x-match": "most"}}, InvalidInput, "x-match"),
        (there, {"binding_keys": "a.b"}, InvalidInput, "list of names"),
        (partitioned, {"binding_keys": ["0"]}, InvalidInput, "a super stream's partitions"),
    ]
    for exchanges, options, error, words in cases:
        with pytest.raises(error, match=words):
            tap(url, database_url, exchanges, stream=stream, **options)
    with pytest.raises(NotAStream):
        tap(url, database_url, there, stream=there)
    long = f"{unique_name()}-{'x' * 227}"
    channel.exchange_declare(long, "topic", auto_delete=True)
    with pytest.raises(InvalidInput, match="to be given by --stream"):
        tap(url, database_url, long)
    assert not is_queue(connection, stream)
    assert defined_taps(database_url) == []
    assert len(describe_super_stream(url, partitioned)) == 2


def test_messages_without_a_routing_key_can_be_named(
    server: LocalRabbitMQ, url: str, channel: BlockingChannel, database_url: str
) -> None:
    """An empty key is one, of a direct exchange, too."""
    exchange = exchange_of(channel, "direct")
    made = tap(url, database_url, exchange, binding_keys=["", "other", ""], options=SMALL)
    assert [each.binding_key for each in made] == ["", "other"]
    publish(channel, exchange, b"none", key="")
    publish(channel, exchange, b"other", key="other")
    publish(channel, exchange, b"left out", key="more")
    assert bodies(server, f"tap.{exchange}", 2) == [b"none", b"other"]


def test_a_policy_of_the_stream_holds(
    server: LocalRabbitMQ, url: str, channel: BlockingChannel, database_url: str
) -> None:
    """A policy that an operator has made for streams is neither changed nor in the way; the smaller limit holds."""
    exchange = exchange_of(channel, "fanout")
    definition = json.dumps({"max-length-bytes": 2_000_000})
    run_tool(server, "rabbitmqctl", "set_policy", "kept-small", f"^{exchange}", definition, "--apply-to", "queues")
    tap(url, database_url, exchange, stream=f"{exchange}-s", options=StreamOptions(max_length_bytes=10_000_000))
    publish(channel, exchange, b"one")
    assert bodies(server, f"{exchange}-s", 1) == [b"one"]
    assert "kept-small" in run_tool(server, "rabbitmqctl", "list_policies")
    listed = run_tool(server, "rabbitmqctl", "list_queues", "name", "policy", "arguments")
    assert any(f"{exchange}-s" in line and "kept-small" in line for line in listed.splitlines())


def test_dead_letters_are_found_by_where_they_died(
    server: LocalRabbitMQ, url: str, channel: BlockingChannel, database_url: str, engine: sa.Engine
) -> None:
    """A dead-letter exchange is tapped like any; the queue and the reason of the first death are keys."""
    exchange = exchange_of(channel, "fanout")
    queue = unique_name("work")
    # At least once: RabbitMQ before 3.12 gives streams no other dead letters.
    least_once = {"x-queue-type": "quorum", "x-dead-letter-strategy": "at-least-once", "x-overflow": "reject-publish"}
    channel.queue_declare(queue, durable=True, arguments={"x-dead-letter-exchange": exchange, **least_once})
    tap(url, database_url, exchange, options=SMALL)
    publish(channel, "", b"poison", key=queue, order="7")
    delivered = wait_until(lambda: channel.basic_get(queue)[0], what="the message")
    channel.basic_nack(delivered.delivery_tag, requeue=False)
    keys = ["order", "x-first-death-queue", "x-first-death-reason"]
    with recording(url, engine, f"tap.{exchange}", keys=keys):
        bodies(server, f"tap.{exchange}", 1)
        wait_recorded(url, engine, f"tap.{exchange}")
        with Relations(url, database_url) as relations:
            for key, value in zip(keys, ("7", queue, "rejected"), strict=True):
                assert [message.body for message in relations.find(key, value)] == [b"poison"]


USERS = {
    "tapper": (r"^tap\..*$", r"^tap\..*$", r"^(.*permitted.*|tap\..*)$"),
    "no-configure": (r"^$", r"^tap\..*$", r"^(.*permitted.*|tap\..*)$"),
    "no-write": (r"^tap\..*$", r"^$", r"^(.*permitted.*|tap\..*)$"),
    "no-read": (r"^tap\..*$", r"^tap\..*$", r"^tap\..*$"),
    "knower": (r"^.*permitted.*$", r"^tap\..*$", r"^.*permitted.*$"),
}
"""What users may configure, write and read: the first just what a tap needs; the others lack one of it; the last may
declare the exchange, too."""


def test_the_permissions_that_are_needed(
    server: LocalRabbitMQ, url: str, connection: BlockingConnection, channel: BlockingChannel, database_url: str
) -> None:
    """Configure and write on the stream, read on the exchange; without one of them nothing is left behind."""
    exchange = unique_name("permitted")
    stream = f"tap.{exchange}"
    channel.exchange_declare(exchange, "topic", durable=True)
    for name in ("no-configure", "no-write", "no-read"):
        with pytest.raises(AccessRefused, match="refuse"):
            tap(as_user(url, name), database_url, exchange, options=SMALL)
        assert not is_queue(connection, stream)
        assert defined_taps(database_url) == []
    (made,) = tap(as_user(url, "tapper"), database_url, exchange, options=SMALL)
    assert (made.kind, made.binding_key) == (None, "#")
    (known,) = tap(as_user(url, "knower"), database_url, exchange, stream=stream + "permitted", options=SMALL)
    assert known.kind == "topic"
    publish(channel, exchange, b"one")
    assert bodies(server, stream, 1) == [b"one"]
    untap(as_user(url, "tapper"), database_url, exchange, stream=stream, delete=True)
    assert not is_queue(connection, stream)


def test_publishers_get_their_confirms_and_returns(url: str, channel: BlockingChannel, database_url: str) -> None:
    """With a tap a message that no key of others leads anywhere is returned no more: the tap's stream has it."""
    exchange = unique_name("topic")
    channel.exchange_declare(exchange, "topic", durable=True)
    with pytest.raises(pika.exceptions.UnroutableError):
        channel.basic_publish(exchange, "a", b"", mandatory=True)
    tap(url, database_url, exchange, options=SMALL)
    channel.basic_publish(exchange, "a", b"", mandatory=True)
    untap(url, database_url, exchange)
    with pytest.raises(pika.exceptions.UnroutableError):
        channel.basic_publish(exchange, "a", b"", mandatory=True)
