"""Partitions of contexts that come and go, and servers that are away while contexts move."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
from pika.adapters.blocking_connection import BlockingChannel

from relatum import Broker, errors
from relatum.contexts import MoveProgress, MoveState, SerializationContexts, consumers
from relatum.reading import StreamReader
from relatum.superstreams import Layout, describe_super_stream
from tests.support import delete_stream, stream_available
from tests.support.affinity import CONTEXTS, Faces
from tests.support.place import Place
from tests.support.proxy import Proxy
from tests.support.routing import consumed

PARTITIONS = 2

AWAY_S = 0.5
"""For how long a server is away: longer than a step is waited for before it is tried again."""


def test_a_partition_that_another_added_is_noticed(contexts: SerializationContexts, channel: BlockingChannel) -> None:
    """Contexts can be moved to a partition that was added to the broker by others."""
    contexts.assign("c", f"{contexts.super_stream}-0")
    channel.queue_declare(f"{contexts.super_stream}-2", durable=True, arguments={"x-queue-type": "stream"})
    channel.queue_bind(f"{contexts.super_stream}-2", contexts.super_stream, "2", {"x-stream-partition-order": 2})
    [move] = contexts.move("c", f"{contexts.super_stream}-2")
    assert move.target == f"{contexts.super_stream}-2"


def test_an_empty_partition_is_retired(contexts: SerializationContexts, amqp_url: str, broker: Broker) -> None:
    """While contexts are there it is refused; then nothing is placed, moved or routed there any more."""
    first, second = (f"{contexts.super_stream}-{place}" for place in range(2))
    contexts.assign("c", second)
    generation = contexts.status().generation
    with pytest.raises(errors.PartitionInUse, match="it has the placement of 'c'") as caught:
        contexts.retire(second)
    assert (caught.value.stream, contexts.status().generation) == (second, generation)
    contexts.move("c", first)
    contexts.retire(second)
    contexts.retire(second)
    assert [str(row.state) for row in contexts.status().partitions] == ["active", "retired"]
    layout = describe_super_stream(broker, contexts.super_stream)
    assert [partition.stream for partition in layout] == [first]
    with pytest.raises(errors.SuperStreamConflict, match="retired"):
        contexts.move("c", second)
    with pytest.raises(errors.Conflict, match="retired"):
        contexts.assign("d", second)
    assert contexts.plan().moves == {}
    with pytest.raises(errors.PartitionInUse, match="last"):
        contexts.retire(first)
    delete_stream(amqp_url, second)


def test_a_partition_that_a_move_needs_is_not_retired(contexts: SerializationContexts) -> None:
    """Neither source nor target goes while contexts are on their way."""
    refused: list[str] = []
    streams = [f"{contexts.super_stream}-{place}" for place in range(2)]

    def tell(progress: MoveProgress) -> None:
        if not progress.move.state.is_ended:
            for stream in streams:
                with pytest.raises(errors.PartitionInUse, match="has not ended") as caught:
                    contexts.retire(stream)
                refused.append(caught.value.stream)

    contexts.assign("c", streams[0])
    contexts.move("c", streams[1], progress=tell)
    assert refused == streams * 2


def test_a_stream_is_deleted_once_consumers_have_read_everything(contexts: SerializationContexts, place: Place) -> None:
    """A partition's stream is not deleted while a consumer has not read all partitions."""
    first, second = (f"{contexts.super_stream}-{number}" for number in range(2))
    place.put(*[b"a"] * 3, to=first)
    place.put(*[b"b"] * 2, to=second)
    place.sql("INSERT INTO relatum.serial_consumers (super_stream_id, name) VALUES (1, 'billing')")
    positions = "INSERT INTO relatum.serial_positions (consumer_id, partition_id, position)"
    place.sql(f"{positions} SELECT 1, partition_id, 2 FROM relatum.super_stream_partitions")
    with pytest.raises(errors.PartitionInUse, match=f"'billing' has not consumed all of '{first}'"):
        contexts.retire(second, delete=True, timeout_s=0)
    assert stream_available(place.amqp, second)
    with ThreadPoolExecutor(1) as pool:
        retired = pool.submit(contexts.retire, second, delete=True)
        place.sql("UPDATE relatum.serial_positions SET position = 3")
        retired.result(90)
    with StreamReader.open(place.amqp) as reader, pytest.raises(errors.StreamNotFound):
        reader.bounds(second)


def test_a_stream_is_not_deleted_before_a_consumer_that_was_away_has_seen_it(
    contexts: SerializationContexts, place: Place
) -> None:
    """What counts as unread: a partition added while no member ran, and messages that any partition holds back."""
    first, second = (f"{contexts.super_stream}-{number}" for number in range(2))
    place.put(b"a", to=first)
    place.put(b"b", to=second)
    place.sql("INSERT INTO relatum.serial_consumers (super_stream_id, name) VALUES (1, 'billing')")
    positions = "INSERT INTO relatum.serial_positions (consumer_id, partition_id, position)"
    place.sql(f"{positions} SELECT 1, partition_id, 1 FROM relatum.super_stream_partitions WHERE stream = '{first}'")
    with pytest.raises(errors.PartitionInUse, match=f"'billing' has not consumed all of '{second}'"):
        contexts.retire(second, delete=True, timeout_s=0)
    status = consumers(contexts.super_stream, broker=place.broker, database=place.database)["billing"]
    assert [(each.stream, each.position, each.lag) for each in status.partitions] == [(first, 1, 0), (second, 0, 1)]
    place.sql(f"{positions} SELECT 1, partition_id, 1 FROM relatum.super_stream_partitions WHERE stream = '{second}'")
    holds = "INSERT INTO relatum.serial_holds (consumer_id, partition_id, source_id, move_id, marker_offset, cursor"
    place.sql(
        f"{holds}, epoch, fence_offset) SELECT 1, partition_id, partition_id, 1, 0, 1, 1, 0 "
        f"FROM relatum.super_stream_partitions WHERE stream = '{first}'"
    )
    with pytest.raises(errors.PartitionInUse, match=f"'billing' has not consumed all of '{first}'"):
        contexts.retire(second, delete=True, timeout_s=0)
    assert stream_available(place.amqp, second)


def test_the_name_of_a_retired_partition_is_not_used_again(contexts: SerializationContexts, place: Place) -> None:
    """What is added after a partition was deleted is another one, to which contexts can go."""
    contexts.assign("a", f"{contexts.super_stream}-0")
    contexts.retire(f"{contexts.super_stream}-1", delete=True)
    assert contexts.add_partitions(2) == [f"{contexts.super_stream}-2", f"{contexts.super_stream}-3"]
    assert [move.state for move in contexts.move("a", f"{contexts.super_stream}-3")] == [MoveState.SWITCHED]
    with pytest.raises(errors.SuperStreamConflict, match="was retired"):
        contexts.add_partitions(binding_keys=["1"])
    layout = describe_super_stream(place.broker, contexts.super_stream)
    assert [partition.binding_key for partition in layout] == ["0", "2", "3"]


def test_what_cannot_be_opened_is_one_clear_error(super_stream: str, amqp_url: str, database_url: str) -> None:
    """An unknown super stream, another header, or a wrong option is an error when contexts are opened."""
    with pytest.raises(errors.SuperStreamNotFound):
        SerializationContexts("nowhere", database_url, broker=amqp_url)
    with pytest.raises(errors.SuperStreamNotFound):
        SerializationContexts(super_stream, database_url)
    with SerializationContexts(super_stream, database_url, broker=amqp_url) as contexts:
        assert contexts.status().header == "serialization_context"
    with pytest.raises(errors.SuperStreamConflict, match="account"):
        SerializationContexts(super_stream, database_url, header="account")
    with pytest.raises(errors.InvalidInput, match="moves_at_once"):
        SerializationContexts(super_stream, database_url, moves_at_once=0)
    with SerializationContexts(super_stream, database_url) as contexts, pytest.raises(errors.ConfigurationError):
        contexts.add_partitions()


def test_the_role_of_routers_is_enough(contexts: SerializationContexts, broker: Broker, database_url: str) -> None:
    """The role `relatum_router` may place and move contexts, and retire partitions."""
    as_router = f"{database_url}?options=-crole%3Drelatum_router"
    with SerializationContexts(contexts.super_stream, as_router, broker=broker) as others:
        others.assign("c", f"{contexts.super_stream}-0")
        [move] = others.move("c", f"{contexts.super_stream}-1")
        assert others.resume(move.move_id).state is MoveState.SWITCHED
        others.retire(f"{contexts.super_stream}-0", delete=True)
    assert contexts.assignment_of("c").partition == f"{contexts.super_stream}-1"


def test_consumers_go_on_when_a_partition_is_gone(
    contexts: SerializationContexts, layout: Layout, amqp_url: str, database_url: str
) -> None:
    """What was in a deleted partition was consumed before; consumers of old and new names continue with the rest."""
    first, second = (each.stream for each in layout)
    got = partial(consumed, layout.super_stream, database_url, amqp_url)
    with Faces("blocking", amqp_url, layout, database_url, CONTEXTS).opened() as router:
        contexts.assign("c", first)
        router.publish(b"1", "c")
        router.publish(b"2", "c")
        contexts.move("c", second)
        router.publish(b"3", "c")
        assert got(3, name="old") == {"c": [b"1", b"2", b"3"]}
        contexts.retire(first, delete=True)
        router.publish(b"4", "c")
    assert got(1, name="old") == {"c": [b"4"]}
    assert got(2, name="new") == {"c": [b"3", b"4"]}


@pytest.fixture
def away(
    request: pytest.FixtureRequest, amqp_url: str, stream_url: str, database_url: str
) -> Iterator[tuple[Proxy, Broker, str]]:
    """A line to one of the two servers, and the addresses of both by way of it."""
    is_broker = request.param == "broker"
    with Proxy.to(amqp_url if is_broker else database_url) as proxy:
        broker = Broker(proxy.url(amqp_url) if is_broker else amqp_url, stream_url=stream_url)
        yield proxy, broker, database_url if is_broker else proxy.url(database_url)


either_away = pytest.mark.parametrize("away", ["broker", "database"], indirect=True)


@either_away
@pytest.mark.parametrize("state", [MoveState.FENCING, MoveState.FENCED])
def test_a_server_that_is_away_for_a_moment_delays_a_move(
    away: tuple[Proxy, Broker, str], state: MoveState, super_stream: str
) -> None:
    """A move repeats its step until the server answers again, and ends as usual."""
    proxy, broker, database = away

    def tell(progress: MoveProgress) -> None:
        if progress.move.state is state:
            proxy.accepts = False
            proxy.reset()
            threading.Timer(AWAY_S, setattr, (proxy, "accepts", True)).start()

    with SerializationContexts(super_stream, database, broker=broker) as contexts:
        contexts.assign("c", f"{super_stream}-0")
        [move] = contexts.move("c", f"{super_stream}-1", progress=tell)
        assert move.state is MoveState.SWITCHED
        assert move.pause_s is not None
        assert move.pause_s > AWAY_S


@either_away
def test_a_server_that_stays_away_leaves_the_move_to_whoever_resumes_it(
    away: tuple[Proxy, Broker, str], contexts: SerializationContexts, super_stream: str
) -> None:
    """The error of a move whose server stays away names the move, which can be resumed."""
    proxy, broker, database = away

    def tell(progress: MoveProgress) -> None:
        proxy.accepts = False
        proxy.reset()

    with SerializationContexts(super_stream, database, broker=broker, retry_s=0.1) as others:
        others.assign("c", f"{super_stream}-0")
        with pytest.raises((errors.BrokerUnavailable, errors.DatabaseUnavailable)) as caught:
            others.move("c", f"{super_stream}-1", progress=tell)
    [left] = contexts.moves()
    assert (caught.value.move_id, left.state, left.is_attended) == (left.move_id, MoveState.FENCING, True)
    assert contexts.resume(left.move_id).state is MoveState.SWITCHED
