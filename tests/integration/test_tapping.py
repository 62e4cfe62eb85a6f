"""Exchanges of others are tapped: their publishers, queues and bindings notice nothing, and each message is found."""

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pika
import psycopg
import pytest
import sqlalchemy as sa
from pika import BasicProperties, BlockingConnection
from pika.adapters.blocking_connection import BlockingChannel
from pika.exceptions import ChannelClosedByBroker

from relatum.errors import AccessRefused, InvalidInput, NotAStream, NotFound, RelatumError
from relatum.local import LocalRabbitMQ
from relatum.reading import StreamReader
from relatum.recording import verify
from relatum.superstreams import StreamOptions, declare_super_stream, describe_super_stream
from relatum.tapping import Tap, defined_taps, tap, untap
from relatum_consumer import Relations, Status
from tests.support import record, unique_name, wait_until
from tests.support.rabbitmq_tools import add_users, as_user, run_tool
from tests.support.routing import confirming
from tests.support.standstill import somebody_waits

SMALL = StreamOptions(max_length_bytes=10_000_000)
TYPES = {"topic": (), "fanout": (), "headers": (), "direct": ("", "a.b", "")}
"""Types of exchanges, and the keys that one needs to be tapped: an empty one is that of messages without a key."""

USERS = {
    "tapper": (r"^tap\..*$", r"^tap\..*$", r"^(.*permitted.*|tap\..*)$"),
    "no-configure": (r"^$", r"^tap\..*$", r"^(.*permitted.*|tap\..*)$"),
    "no-write": (r"^tap\..*$", r"^$", r"^(.*permitted.*|tap\..*)$"),
    "no-read": (r"^tap\..*$", r"^tap\..*$", r"^tap\..*$"),
    "knower": (r"^.*permitted.*$", r"^tap\..*$", r"^.*permitted.*$"),
}
"""What users may configure, write and read: the first just what a tap needs; the others lack one of it; the last may
declare the exchange, too."""


@dataclass(frozen=True)
class Bed:
    """A broker of this module, a publisher there that knows nothing of taps, and a database."""

    server: LocalRabbitMQ
    database: str
    engine: sa.Engine
    connection: BlockingConnection
    channel: BlockingChannel

    @property
    def url(self) -> str:
        return self.server.broker_url

    def tap(self, exchanges: Any, user: str | None = None, **options: Any) -> Sequence[Tap]:
        url = as_user(self.url, user) if user else self.url
        return tap(url, self.database, exchanges, **({"options": SMALL} | options))

    def untap(self, exchanges: Any, **options: Any) -> Sequence[Tap]:
        return untap(self.url, self.database, exchanges, **options)

    def exchange(self, kind: str) -> str:
        name = unique_name(kind)
        self.channel.exchange_declare(name, kind, durable=True)
        self.channel.queue_declare(name, durable=True)
        self.channel.queue_bind(name, name, {"topic": "#", "direct": "a.b"}.get(kind, "1"))
        return name

    def publish(self, exchange: str, body: bytes, key: str = "a.b", **headers: Any) -> None:
        self.channel.basic_publish(exchange, key, body, BasicProperties(headers=headers))

    def bodies(self, stream: str, count: int) -> list[bytes]:
        """What is in a stream once it has so many messages."""
        with StreamReader.open(self.server.stream_url) as reader:
            wait_until(lambda: len(list(reader.iterate(stream))) >= count, what=f"{count} messages in {stream}")
            return [message.body for message in reader.iterate(stream)]

    def record(self, stream: str, *keys: str) -> None:
        record(self.url, self.engine, stream, keys=keys)

    def is_queue(self, name: str) -> bool:
        channel = self.connection.channel()
        try:
            channel.queue_declare(name, passive=True)
        except ChannelClosedByBroker:
            return False
        channel.close()
        return True


@pytest.fixture(scope="module")
def server(own_broker: LocalRabbitMQ) -> LocalRabbitMQ:
    add_users(own_broker, USERS)
    return own_broker


@pytest.fixture
def bed(server: LocalRabbitMQ, database_url: str, engine: sa.Engine) -> Iterator[Bed]:
    with confirming(server.broker_url) as channel:
        yield Bed(server, database_url, engine, channel.connection, channel)


@pytest.mark.parametrize("has_stream", [True, False])
def test_the_name_of_a_tapped_exchange(bed: Bed, has_stream: bool) -> None:
    """The name of a tapped exchange means a stream of that name, or else the tap's stream."""
    name = unique_name("orders")
    bed.channel.exchange_declare(name, "topic", durable=True)
    bed.tap(name)
    bed.publish(name, b"copy", order="7")
    if has_stream:
        bed.channel.queue_declare(name, durable=True, arguments={"x-queue-type": "stream"})
        bed.publish("", b"own", key=name, order="7")
    meant = name if has_stream else f"tap.{name}"
    bed.record(meant, "order")
    report = verify(bed.url, bed.database, [name])
    assert [(each.stream, each.differences) for each in report.streams] == [(meant, [])]
    if has_stream:
        bed.publish("", b"more", key=name, order="7")
        bed.record(name)
        with Relations(bed.url, bed.database) as relations:
            assert [message.body for message in relations.find("order", "7", streams=name)] == [b"own", b"more"]


@pytest.mark.parametrize("kind", TYPES)
def test_a_tapped_exchange_has_its_messages_found(bed: Bed, kind: str) -> None:
    """Messages of a tapped exchange of each type are found by their headers, and reach its queue as before."""
    exchange = bed.exchange(kind)
    made = bed.tap(exchange, binding_keys=TYPES[kind])
    taps = [(exchange, kind, f"tap.{exchange}")] * (2 if kind == "direct" else 1)
    assert [(each.exchange, each.kind, each.stream) for each in made] == taps
    assert defined_taps(bed.database) == made
    assert all(each.created_at for each in made)
    bed.publish(exchange, b"one", order="7", format="pdf")
    bed.publish(exchange, b"other", order="8")
    bed.record(f"tap.{exchange}", "order")
    with Relations(bed.url, bed.database) as relations:
        assert [message.body for message in relations.find("order", "7")] == [b"one"]
        assert relations.find("order", "9", complete=True).status is Status.ABSENT
    assert bed.channel.queue_declare(exchange, passive=True).method.message_count == 2
    if kind == "direct":
        assert [each.binding_key for each in made] == ["", "a.b"]
        bed.publish(exchange, b"left out", key="more")
        bed.publish(exchange, b"none", key="")
        assert bed.bodies(f"tap.{exchange}", 3) == [b"one", b"other", b"none"]


def test_taps_and_bindings_of_others_are_left_alone(bed: Bed) -> None:
    """Each tap of an exchange has its copy, a repeated tap changes nothing, and a binding of another's stays."""
    exchange = bed.exchange("topic")
    stream = f"tap.{exchange}"
    bed.tap(exchange)
    bed.tap(exchange, options=StreamOptions(max_length_bytes=20_000_000))
    bed.tap(exchange, stream=f"{exchange}-b", binding_keys=["a.*", "#.b"])
    bed.channel.queue_bind(stream, exchange, "#")
    bed.publish(exchange, b"one")
    assert bed.bodies(stream, 1) == bed.bodies(f"{exchange}-b", 1) == [b"one"]
    assert len(defined_taps(bed.database)) == 3
    assert [each.stream for each in bed.untap(exchange, stream=stream)] == [stream]
    bed.publish(exchange, b"two")
    assert bed.bodies(stream, 2) == bed.bodies(f"{exchange}-b", 2) == [b"one", b"two"]
    bed.untap(exchange)
    bed.publish(exchange, b"three")
    assert bed.bodies(stream, 3) == [b"one", b"two", b"three"]
    assert defined_taps(bed.database) == []
    with pytest.raises(NotFound, match="is not tapped"):
        bed.untap(exchange)


def test_many_exchanges_go_into_one_stream(bed: Bed) -> None:
    """Several exchanges share a stream, which stays when they are gone or no longer tapped."""
    first, second = bed.exchange("fanout"), bed.exchange("topic")
    stream = unique_name()
    bed.tap([first, second], stream=stream)
    bed.publish(first, b"1")
    bed.publish(second, b"2")
    assert bed.bodies(stream, 2) == [b"1", b"2"]
    bed.channel.exchange_delete(first)
    bed.untap([first, second])
    assert bed.is_queue(stream)
    assert defined_taps(bed.database) == []


def test_what_cannot_be_tapped_is_one_error_and_makes_nothing(bed: Bed) -> None:
    """An exchange that cannot be tapped, or a stream's name that is taken, is one error and makes nothing."""
    there, direct, headers = (bed.exchange(kind) for kind in ("topic", "direct", "headers"))
    hashing = bed.exchange("x-consistent-hash")
    stream, partitioned = unique_name(), unique_name()
    declare_super_stream(bed.url, partitioned, 2)
    cases: list[tuple[Any, dict[str, Any], type[RelatumError], str]] = [
        ([there, "nowhere"], {}, NotFound, "no exchange 'nowhere'"),
        ([there, hashing], {"binding_keys": ["1"]}, InvalidInput, "take messages from other queues"),
        ([there, direct], {}, InvalidInput, "no key for all messages"),
        ("", {}, InvalidInput, "exchanges="),
        ("amq.rabbitmq.trace", {}, InvalidInput, "the broker's own"),
        (headers, {"binding_keys": ["1"]}, InvalidInput, "ignores binding keys"),
        (there, {"binding_keys": "a.b"}, InvalidInput, "list of names"),
        (partitioned, {"binding_keys": ["0"]}, InvalidInput, "a partition of a super stream"),
    ]
    for exchanges, options, error, words in cases:
        with pytest.raises(error, match=words):
            bed.tap(exchanges, stream=stream, **options)
    with pytest.raises(NotAStream):
        bed.tap(there, stream=there)
    long = f"{unique_name()}-{'x' * 227}"
    bed.channel.exchange_declare(long, "topic", auto_delete=True)
    with pytest.raises(InvalidInput, match="choose one by --stream"):
        bed.tap(long)
    assert not bed.is_queue(stream)
    assert defined_taps(bed.database) == []
    assert len(describe_super_stream(bed.url, partitioned)) == 2


def test_a_policy_of_the_stream_holds(bed: Bed) -> None:
    """A tap leaves an operator's policy of its stream in force."""
    exchange = bed.exchange("fanout")
    definition = json.dumps({"max-length-bytes": 2_000_000})
    run_tool(bed.server, "rabbitmqctl", "set_policy", "kept-small", f"^{exchange}", definition, "--apply-to", "queues")
    bed.tap(exchange, stream=f"{exchange}-s", options=StreamOptions(max_length_bytes=10_000_000))
    bed.publish(exchange, b"one")
    assert bed.bodies(f"{exchange}-s", 1) == [b"one"]
    assert "kept-small" in run_tool(bed.server, "rabbitmqctl", "list_policies")
    listed = run_tool(bed.server, "rabbitmqctl", "list_queues", "name", "policy", "arguments")
    assert any(f"{exchange}-s" in line and "kept-small" in line for line in listed.splitlines())


def test_dead_letters_are_found_by_where_they_died(bed: Bed) -> None:
    """Messages of a tapped dead-letter exchange are found by the queue and the reason of their first death."""
    exchange = bed.exchange("fanout")
    queue = unique_name("work")
    # At least once: RabbitMQ before 3.12 gives streams no other dead letters.
    least_once = {"x-queue-type": "quorum", "x-dead-letter-strategy": "at-least-once", "x-overflow": "reject-publish"}
    bed.channel.queue_declare(queue, durable=True, arguments={"x-dead-letter-exchange": exchange, **least_once})
    bed.tap(exchange)
    bed.publish("", b"poison", key=queue, order="7")
    delivered = wait_until(lambda: bed.channel.basic_get(queue)[0], what="the message")
    bed.channel.basic_nack(delivered.delivery_tag, requeue=False)
    keys = ["order", "x-first-death-queue", "x-first-death-reason"]
    bed.bodies(f"tap.{exchange}", 1)
    bed.record(f"tap.{exchange}", *keys)
    with Relations(bed.url, bed.database) as relations:
        for key, value in zip(keys, ("7", queue, "rejected"), strict=True):
            assert [message.body for message in relations.find(key, value)] == [b"poison"]


def test_the_permissions_that_are_needed(bed: Bed) -> None:
    """A tap needs to configure and write the stream and read the exchange; without one of these it leaves nothing."""
    exchange = unique_name("permitted")
    stream = f"tap.{exchange}"
    bed.channel.exchange_declare(exchange, "topic", durable=True)
    for name in ("no-configure", "no-write", "no-read"):
        with pytest.raises(AccessRefused, match="refuse"):
            bed.tap(exchange, name)
        assert not bed.is_queue(stream)
        assert defined_taps(bed.database) == []
    (made,) = bed.tap(exchange, "tapper")
    assert (made.kind, made.binding_key) == (None, "#")
    (known,) = bed.tap(exchange, "knower", stream=stream + "permitted")
    assert known.kind == "topic"
    bed.publish(exchange, b"one")
    assert bed.bodies(stream, 1) == [b"one"]
    untap(as_user(bed.url, "tapper"), bed.database, exchange, stream=stream)
    bed.publish(exchange, b"two")
    assert bed.bodies(stream, 1) == [b"one"]


def test_a_refused_tap_leaves_a_stream_that_another_call_taps_into(bed: Bed) -> None:
    """Of two concurrent calls for one stream, the refused one does not delete the copies of the other."""
    exchange, other = unique_name("permitted"), unique_name("other")
    stream = f"tap.{exchange}"
    for name in (exchange, other):
        bed.channel.exchange_declare(name, "topic", durable=True)
    with ThreadPoolExecutor(1) as threads, psycopg.connect(bed.database) as session:
        session.execute("LOCK TABLE relatum.taps IN EXCLUSIVE MODE")
        refused = threads.submit(bed.tap, exchange, "no-read", stream=stream)
        somebody_waits(bed.database)
        bed.channel.queue_declare(stream, durable=True, arguments=SMALL.arguments())
        bed.publish("", b"copy", stream)
        session.execute(
            "INSERT INTO relatum.taps (vhost, exchange, kind, stream, binding_key) VALUES ('/', %s, 'topic', %s, '#')",
            [other, stream],
        )
        session.commit()
        with pytest.raises(AccessRefused):
            refused.result(90)
    assert [each.exchange for each in defined_taps(bed.database)] == [other]
    assert bed.bodies(stream, 1) == [b"copy"]


def test_publishers_get_their_confirms_and_returns(bed: Bed) -> None:
    """A tap takes unroutable messages, which are returned to their publishers before it and after it."""
    exchange = unique_name("topic")
    bed.channel.exchange_declare(exchange, "topic", durable=True)
    with pytest.raises(pika.exceptions.UnroutableError):
        bed.channel.basic_publish(exchange, "a", b"", mandatory=True)
    bed.tap(exchange)
    bed.channel.basic_publish(exchange, "a", b"", mandatory=True)
    bed.untap(exchange)
    with pytest.raises(pika.exceptions.UnroutableError):
        bed.channel.basic_publish(exchange, "a", b"", mandatory=True)
