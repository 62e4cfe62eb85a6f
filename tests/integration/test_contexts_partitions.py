"""Partitions of contexts that come and go, publishers beside moves, and servers that are away while contexts move."""

import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pika
import psycopg
import pytest

from relatum.contexts import (
    ContextRouter,
    MoveProgress,
    MoveState,
    SerialConsumer,
    SerializationContexts,
    verify,
)
from relatum.errors import (
    BrokerUnavailable,
    ConfigurationError,
    Conflict,
    DatabaseUnavailable,
    InvalidInput,
    PartitionInUse,
    StreamNotFound,
    SuperStreamConflict,
    SuperStreamNotFound,
)
from relatum.reading import StreamReader
from relatum.superstreams import declare_super_stream, delete_super_stream, describe_super_stream
from tests.support import broker_connection, delete_stream, publish_plain, stream_available, unique_name, wait_until
from tests.support.proxy import Proxy

AWAY_S = 0.5
"""For how long a server is away: longer than a step is waited for before it is tried again."""


@pytest.fixture
def super_stream(amqp_url: str) -> Iterator[str]:
    """A super stream of two partitions."""
    name = unique_name("contexts")
    declare_super_stream(amqp_url, name, 2)
    yield name
    delete_super_stream(amqp_url, name)
    for place in range(4):
        delete_stream(amqp_url, f"{name}-{place}")


@pytest.fixture
def contexts(super_stream: str, amqp_url: str, stream_url: str, database_url: str) -> Iterator[SerializationContexts]:
    """Its contexts: none yet."""
    with SerializationContexts(super_stream, database_url, broker=amqp_url, stream_url=stream_url) as contexts:
        yield contexts


def test_partitions_are_added_and_contexts_spread_over_them(
    contexts: SerializationContexts, amqp_url: str, stream_url: str
) -> None:
    """New partitions are empty until contexts are moved there; the broker has them, too."""
    contexts.assign([f"c{number}" for number in range(8)], f"{contexts.super_stream}-0")
    added = contexts.add_partitions(2)
    assert added == [f"{contexts.super_stream}-2", f"{contexts.super_stream}-3"]
    assert [row.open_sets for row in contexts.status().partitions] == [8, 0, 0, 0]
    contexts.rebalance()
    assert [row.open_sets for row in contexts.status().partitions] == [2, 2, 2, 2]
    layout = describe_super_stream(amqp_url, contexts.super_stream, stream_url=stream_url)
    assert [partition.stream for partition in layout] == [row.stream for row in contexts.status().partitions]


def test_a_partition_that_another_added_is_noticed(
    contexts: SerializationContexts, super_stream: str, amqp_url: str, stream_url: str, database_url: str
) -> None:
    """A target that is not known yet is asked for at the broker."""
    contexts.assign("c", f"{super_stream}-0")
    with broker_connection(amqp_url) as connection:
        channel = connection.channel()
        channel.queue_declare(f"{super_stream}-2", durable=True, arguments={"x-queue-type": "stream"})
        channel.queue_bind(f"{super_stream}-2", super_stream, "2", {"x-stream-partition-order": 2})
    [move] = contexts.move("c", f"{super_stream}-2")
    assert move.target == f"{super_stream}-2"


def test_an_empty_partition_is_retired(contexts: SerializationContexts, amqp_url: str, stream_url: str) -> None:
    """While contexts are there it is refused; then nothing is placed, moved or routed there any more."""
    first, second = (f"{contexts.super_stream}-{place}" for place in range(2))
    contexts.assign("c", second)
    generation = contexts.status().generation
    with pytest.raises(PartitionInUse, match="'c' is placed there") as caught:
        contexts.retire(second)
    assert (caught.value.stream, contexts.status().generation) == (second, generation)
    contexts.move("c", first)
    contexts.retire(second)
    contexts.retire(second)
    assert [str(row.state) for row in contexts.status().partitions] == ["active", "retired"]
    layout = describe_super_stream(amqp_url, contexts.super_stream, stream_url=stream_url)
    assert [partition.stream for partition in layout] == [first]
    with pytest.raises(SuperStreamConflict, match="retired"):
        contexts.move("c", second)
    with pytest.raises(Conflict, match="retired"):
        contexts.assign("d", second)
    assert contexts.plan().moves == {}
    with pytest.raises(PartitionInUse, match="last"):
        contexts.retire(first)


def test_a_partition_that_a_move_needs_is_not_retired(contexts: SerializationContexts) -> None:
    """Neither source nor target goes while contexts are on their way."""
    refused: list[str] = []
    streams = [f"{contexts.super_stream}-{place}" for place in range(2)]

    def tell(progress: MoveProgress) -> None:
        if not progress.move.state.is_ended:
            for stream in streams:
                with pytest.raises(PartitionInUse, match="has not ended") as caught:
                    contexts.retire(stream)
                refused.append(caught.value.stream)

    contexts.assign("c", streams[0])
    contexts.move("c", streams[1], progress=tell)
    assert refused == streams * 2


def test_a_stream_is_deleted_once_consumers_have_read_everything(
    contexts: SerializationContexts, amqp_url: str, database_url: str
) -> None:
    """A consumer that is behind anywhere keeps it; told so, the caller may repeat it."""
    first, second = (f"{contexts.super_stream}-{place}" for place in range(2))
    publish_plain(amqp_url, first, [b"a"] * 3)
    publish_plain(amqp_url, second, [b"b"] * 2)
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute("INSERT INTO relatum.serial_consumers (super_stream_id, name) VALUES (1, 'billing')")
        connection.execute(
            "INSERT INTO relatum.serial_positions (consumer_id, partition_id, position)"
            " SELECT 1, partition_id, 2 FROM relatum.super_stream_partitions"
        )
        with pytest.raises(PartitionInUse, match=f"'billing' has not read all of '{first}'"):
            contexts.retire(second, delete=True, timeout_s=0)
        assert stream_available(amqp_url, second)
        with ThreadPoolExecutor(1) as pool:
            retired = pool.submit(contexts.retire, second, delete=True)
            connection.execute("UPDATE relatum.serial_positions SET position = 3")
            retired.result(90)
    with StreamReader.open(amqp_url) as reader, pytest.raises(StreamNotFound):
        reader.bounds(second)


def test_the_name_of_a_retired_partition_is_not_used_again(
    contexts: SerializationContexts, super_stream: str, amqp_url: str, stream_url: str
) -> None:
    """What is added after a partition was deleted is another one, to which contexts can go."""
    contexts.assign("a", f"{super_stream}-0")
    contexts.retire(f"{super_stream}-1", delete=True)
    assert contexts.add_partitions(2) == [f"{super_stream}-2", f"{super_stream}-3"]
    assert [move.state for move in contexts.move("a", f"{super_stream}-3")] == [MoveState.SWITCHED]
    with pytest.raises(SuperStreamConflict, match="was retired"):
        contexts.add_partitions(binding_keys=["1"])
    layout = describe_super_stream(amqp_url, super_stream, stream_url=stream_url)
    assert [partition.binding_key for partition in layout] == ["0", "2", "3"]


def test_what_cannot_be_opened_is_one_clear_error(super_stream: str, amqp_url: str, database_url: str) -> None:
    """A super stream nobody knows, another header, and options that cannot be."""
    with pytest.raises(SuperStreamNotFound):
        SerializationContexts("nowhere", database_url, broker=amqp_url)
    with pytest.raises(SuperStreamNotFound):
        SerializationContexts(super_stream, database_url)
    with SerializationContexts(super_stream, database_url, broker=amqp_url) as contexts:
        assert contexts.status().header == "serialization_context"
    with pytest.raises(SuperStreamConflict, match="account"):
        SerializationContexts(super_stream, database_url, header="account")
    with pytest.raises(InvalidInput, match="moves_at_once"):
        SerializationContexts(super_stream, database_url, moves_at_once=0)
    with SerializationContexts(super_stream, database_url) as contexts, pytest.raises(ConfigurationError):
        contexts.add_partitions()


def test_nothing_is_lost_or_disordered_while_publishers_publish(
    contexts: SerializationContexts, amqp_url: str, stream_url: str, database_url: str
) -> None:
    """Contexts move at random under their publishers: each message told of as published counts once, in its order."""
    names = [f"c{number}" for number in range(8)]
    is_over = threading.Event()

    def publish(seed: int) -> int:
        chance, told = random.Random(seed), 0
        with broker_connection(amqp_url) as connection:
            channel = connection.channel()
            channel.confirm_delivery()
            while not is_over.is_set():
                headers = {"serialization_context": chance.choice(names)}
                router.publish(channel, b"%d" % told, pika.BasicProperties(headers=headers))
                told += 1
        return told

    chance = random.Random(4)
    with (
        ContextRouter(contexts.super_stream, database_url, broker=amqp_url, stream_url=stream_url) as router,
        ThreadPoolExecutor(3) as pool,
    ):
        told = [pool.submit(publish, seed) for seed in range(3)]
        try:
            wait_until(lambda: len(list(contexts.assignments())) == len(names), what="all contexts to be placed")
            for _ in range(12):
                contexts.move(chance.sample(names, 3), f"{contexts.super_stream}-{chance.randrange(2)}")
        finally:
            is_over.set()
        count = sum(each.result(90) for each in told)
    report = verify(contexts.super_stream, broker=amqp_url, stream_url=stream_url, database=database_url)
    assert report.findings == []
    assert (report.messages, report.contexts) == (count, len(names))
    assert report.moves > 0


@pytest.mark.parametrize("state", [MoveState.FENCING, MoveState.FENCED])
@pytest.mark.parametrize("away", ["broker", "database"])
def test_a_server_that_is_away_for_a_moment_delays_a_move(
    away: str, state: MoveState, super_stream: str, amqp_url: str, stream_url: str, database_url: str
) -> None:
    """The step is tried again until the server answers, and the move ends as it would have."""
    with Proxy.to(amqp_url if away == "broker" else database_url) as proxy:
        broker = proxy.url(amqp_url) if away == "broker" else amqp_url
        database = proxy.url(database_url) if away == "database" else database_url

        def tell(progress: MoveProgress) -> None:
            if progress.move.state is state:
                proxy.accepts = False
                proxy.reset()
                threading.Timer(AWAY_S, setattr, (proxy, "accepts", True)).start()

        with SerializationContexts(super_stream, database, broker=broker, stream_url=stream_url) as contexts:
            contexts.assign("c", f"{super_stream}-0")
            [move] = contexts.move("c", f"{super_stream}-1", progress=tell)
            assert move.state is MoveState.SWITCHED
            assert move.pause_s is not None
            assert move.pause_s > AWAY_S


@pytest.mark.parametrize("away", ["broker", "database"])
def test_a_server_that_stays_away_leaves_the_move_to_whoever_resumes_it(
    away: str, contexts: SerializationContexts, super_stream: str, amqp_url: str, stream_url: str, database_url: str
) -> None:
    """The error says which move stands still; another goes on with it."""
    with Proxy.to(amqp_url if away == "broker" else database_url) as proxy:
        broker = proxy.url(amqp_url) if away == "broker" else amqp_url
        database = proxy.url(database_url) if away == "database" else database_url

        def tell(progress: MoveProgress) -> None:
            proxy.accepts = False
            proxy.reset()

        urls = {"broker": broker, "stream_url": stream_url}
        with SerializationContexts(super_stream, database, **urls, retry_s=0.1) as others:  # type: ignore[arg-type]
            others.assign("c", f"{super_stream}-0")
            with pytest.raises((BrokerUnavailable, DatabaseUnavailable), match="stands still, fencing") as caught:
                others.move("c", f"{super_stream}-1", progress=tell)
    [left] = contexts.moves()
    assert (caught.value.move_id, left.state, left.is_attended) == (left.move_id, MoveState.FENCING, True)
    assert contexts.resume(left.move_id).state is MoveState.SWITCHED


def test_the_role_of_routers_is_enough(
    contexts: SerializationContexts, super_stream: str, amqp_url: str, stream_url: str, database_url: str
) -> None:
    """Who may place contexts may also move them, and take partitions out of use."""
    as_router = f"{database_url}?options=-crole%3Drelatum_router"
    with SerializationContexts(super_stream, as_router, broker=amqp_url, stream_url=stream_url) as others:
        others.assign("c", f"{super_stream}-0")
        [move] = others.move("c", f"{super_stream}-1")
        assert others.resume(move.move_id).state is MoveState.SWITCHED
        others.retire(f"{super_stream}-0", delete=True)
    assert contexts.assignment_of("c").partition == f"{super_stream}-1"


def test_consumers_go_on_when_a_partition_is_gone(
    contexts: SerializationContexts, super_stream: str, amqp_url: str, stream_url: str, database_url: str
) -> None:
    """What was in a deleted partition was consumed before; consumers of old and new names go on with the rest."""
    urls = {"database": database_url, "broker": amqp_url, "stream_url": stream_url}
    with (
        ContextRouter(super_stream, database_url, broker=amqp_url, stream_url=stream_url) as router,
        broker_connection(amqp_url) as connection,
    ):
        channel = connection.channel()
        channel.confirm_delivery()

        def publish(*bodies: bytes) -> None:
            for body in bodies:
                headers = pika.BasicProperties(headers={"serialization_context": "c"})
                router.publish(channel, body, headers)

        contexts.assign("c", f"{super_stream}-0")
        publish(b"1", b"2")
        contexts.move("c", f"{super_stream}-1")
        publish(b"3")
        with SerialConsumer(super_stream, "old", **urls) as consumer:
            assert consumed(consumer, 3) == [b"1", b"2", b"3"]
        contexts.retire(f"{super_stream}-0", delete=True)
        publish(b"4")
    for name, expected in (("old", [b"4"]), ("new", [b"3", b"4"])):
        with SerialConsumer(super_stream, name, **urls) as consumer:
            assert consumed(consumer, len(expected)) == expected


def consumed(consumer: SerialConsumer, count: int) -> list[bytes]:
    """The bodies of so many messages, acknowledged."""
    bodies: list[bytes] = []
    for batch in consumer.batches(timeout_s=90):
        bodies += [message.body for message in batch.messages]
        batch.acknowledge()
        if len(bodies) >= count:
            break
    return bodies
