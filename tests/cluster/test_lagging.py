"""Collectors, recorders and consumers wait for what a lagging node lacks: nothing is lost or comes twice."""

from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from typing import Any

import pika
import pytest
import sqlalchemy as sa

from relatum import Broker
from relatum.collecting import Bulk, ExecutorOptions, OutcomeStatus
from relatum.common.headers import CONTEXT_HEADER
from relatum.common.ids import fingerprint
from relatum.contexts import SerialConsumer
from relatum.contexts._control_streams import ControlStreams
from relatum.contexts._partition_log import Fence, Placed
from relatum.contexts._placement_cache import Sent
from relatum.errors import StreamUnavailable
from relatum.reading import Agreement, BrokerAddress, Position, StreamReader, agreement, claimed_identity
from relatum.recording import StreamStatus, status
from relatum.superstreams import Layout
from tests.support import publish_plain, recording, rows_of, unique_name, wait_until
from tests.support.cluster import Cluster
from tests.support.collectors import COLLECTOR_FACES, collectors_of, is_attached
from tests.support.following import Owner
from tests.support.routing import confirming
from tests.support.serial_consuming import SESSION, SerialBed, consume

MESSAGES = 100


@pytest.fixture(params=COLLECTOR_FACES)
def face(request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    with collectors_of(request.param) as make:
        yield make


@pytest.mark.parametrize("joins", [False, True])
def test_a_replica_that_lags_is_no_other_stream(
    cluster: Cluster, engine: sa.Engine, face: Any, joins: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A member that starts beside a lagging replica continues at the collector's position: each message counts once."""
    stream = unique_name()
    cluster.declare(stream, leader=1)
    cluster.lag(2)
    consumed: Counter[bytes] = Counter()

    def execute(bulk: Bulk) -> None:
        consumed.update(each.message.body for each in bulk.messages)

    def collector(node: int) -> Any:
        made = face(name="billing", database=engine.url, broker=cluster.amqp_url(node), streams=[stream])
        made.register_executor("order", execute, ExecutorOptions(max_age_s=0.05, joins_transaction=joins))
        return made

    def publish(first: int, stop: int) -> None:
        properties = [pika.BasicProperties(type="order", message_id=str(n)) for n in range(first, stop)]
        bodies = [str(n).encode() for n in range(first, stop)]
        publish_plain(cluster.amqp_url(1), stream, list(zip(bodies, properties, strict=True)))

    publish(0, MESSAGES)
    with collector(1):
        wait_until(lambda: len(consumed) == MESSAGES, what="all consumed")
    publish(MESSAGES, 2 * MESSAGES)
    with ExitStack() as stack:
        lagging = stack.enter_context(collector(2))
        # Whether it waits for its node or reads at the leader, it must not take the stream for another one.
        wait_until(
            lambda: is_attached(lagging, stream) or generations(engine) or "is unknown" in caplog.text,
            what="followed, or waited with",
        )
        cluster.follow()
        wait_until(lambda: len(consumed) == 2 * MESSAGES, what="the others consumed")
        wait_until(
            lambda: lagging.outcome(str(2 * MESSAGES - 1)).status is OutcomeStatus.SUCCEEDED, what="the last one stored"
        )
    assert set(consumed.values()) == {1}
    assert generations(engine) == 0


def generations(engine: sa.Engine) -> int:
    """How often a stream was taken for another one."""
    with engine.connect() as connection:
        counted = "SELECT count(*) FROM relatum.collector_sources WHERE replaced_at IS NOT NULL"
        return int(connection.execute(sa.text(counted)).scalar_one())


def orders(count: int, start: int = 0) -> list[tuple[bytes, dict[str, Any]]]:
    return [(b"%d" % n, {"order_id": f"o{n}"}) for n in range(start, start + count)]


def broker_at(cluster: Cluster, node: int) -> Broker:
    return Broker(cluster.amqp_url(node), stream_url=cluster.stream_url(node))


def wait_recorded(cluster: Cluster, engine: sa.Engine, stream: str, count: int) -> None:
    """Wait until so many are recorded, of one stream and without gaps, by the leader's node."""

    def seen() -> StreamStatus | None:
        found = status(broker_at(cluster, 1), engine.url, [stream])
        is_whole = found and (found[0].recorded_to, found[0].lag_offsets) == (count, 0)
        return found[0] if is_whole else None

    found = wait_until(seen, limit_s=120, what=f"{count} recorded")
    assert found is not None
    assert (found.events, found.generation, found.gaps) == ([], 1, [])


def test_a_recorder_at_a_lagging_node_loses_and_doubles_nothing(cluster: Cluster, engine: sa.Engine) -> None:
    """It opens behind what the node has, waits for it, and notes neither a lost tail nor a new generation."""
    stream = unique_name()
    cluster.declare(stream, leader=1)
    with recording(broker_at(cluster, 1), engine, stream, keys=["order_id"]):
        publish_plain(cluster.amqp_url(1), stream, orders(50))
        wait_recorded(cluster, engine, stream, 50)
        cluster.lag(3)
        publish_plain(cluster.amqp_url(1), stream, orders(50, start=50))
        wait_recorded(cluster, engine, stream, 100)
    with recording(broker_at(cluster, 3), engine, stream, keys=["order_id"]):
        wait_until(lambda: is_held(engine, stream), what="the lease")
        publish_plain(cluster.amqp_url(1), stream, orders(50, start=100))
        cluster.follow()
        wait_recorded(cluster, engine, stream, 150)
    assert [value for _, value, _ in rows_of(engine, stream)] == [f"o{n}" for n in range(150)]


def test_a_leader_that_shows_nothing_for_long_is_no_other_stream(cluster: Cluster, engine: sa.Engine) -> None:
    """A leader shows nothing until its replicas answer, for as long as that takes; nothing is concluded from it."""
    stream = unique_name()
    cluster.declare(stream, leader=1)
    publish_plain(cluster.amqp_url(1), stream, orders(50))
    with recording(broker_at(cluster, 1), engine, stream, keys=["order_id"]):
        wait_recorded(cluster, engine, stream, 50)
    cluster.silence(stream)
    position = Position(49, fingerprint(None, b"49"), None)
    with StreamReader.open(cluster.stream_url(2)) as reader:
        assert reader.bounds(stream) == (None, None)
        assert agreement(reader, stream, position) is Agreement.UNKNOWN
    with recording(broker_at(cluster, 2), engine, stream, keys=["order_id"]) as recorder:
        wait_until(
            lambda: recorder.statistics().streams[stream].reconnects, limit_s=120, what="a try that concludes nothing"
        )
        publish_plain(cluster.amqp_url(1), stream, orders(50, start=50))
        wait_recorded(cluster, engine, stream, 100)


def is_held(engine: sa.Engine, stream: str) -> bool:
    held = sa.text(
        "SELECT FROM relatum.recorder_members member JOIN relatum.streams stream ON lease_holder = member.holder"
        " WHERE stream.name = :stream AND member.lease_expires_at > clock_timestamp()"
    )
    with engine.connect() as connection:
        return connection.execute(held, {"stream": stream}).one_or_none() is not None


def test_a_broker_of_three_nodes_has_one_id(cluster: Cluster) -> None:
    """Recorders that come first at different nodes at once agree, and each node says the same."""
    addresses = [broker_at(cluster, node) for node in (1, 2, 3)]

    def claimed(broker: Broker) -> Any:
        with StreamReader.open(broker) as reader:
            return claimed_identity(reader)

    with ThreadPoolExecutor(6) as threads:
        found = {each.broker_id for each in threads.map(claimed, addresses * 2)}
    assert len(found) == 1
    assert None not in found
    for address in addresses:
        with StreamReader.open(address) as reader:
            assert {reader.identity().broker_id} == found


def test_streams_that_the_own_node_lacks_are_followed_at_another(cluster: Cluster) -> None:
    """Each stream is read where it is, over one connection to each node that has some."""
    streams = [unique_name() for _ in range(6)]
    for number, stream in enumerate(streams):
        cluster.declare(stream, leader=number % 3 + 1, x_initial_cluster_size=1)
        publish_plain(cluster.amqp_url(1), stream, [b"%d" % number], confirm=True)
    with Owner(broker_at(cluster, 1)) as owner:
        owner.follow(*streams)
        for number, stream in enumerate(streams):
            owner.wait_bodies(stream, [b"%d" % number])
        assert owner.statistics().connections == 3


@pytest.fixture
def bed(cluster: Cluster, engine: sa.Engine) -> Iterator[SerialBed]:
    name = unique_name()
    cluster.declare(f"{name}-0", leader=1)
    with confirming(cluster.amqp_url(1)) as channel:
        yield SerialBed(cluster.amqp_url(1), engine, Layout.of(name, [(f"{name}-0", "0")]), channel)


def test_a_replica_that_is_behind_is_waited_for(cluster: Cluster, bed: SerialBed, database_url: str) -> None:
    """What was consumed is not delivered again by a member that reads from a node that has not got it yet."""
    bed.publish(0, "a", *(str(number) for number in range(20)))

    def member(node: int) -> SerialConsumer:
        return SerialConsumer(bed.name, "test", broker=broker_at(cluster, node), database=database_url)

    cluster.lag(2)
    bed.publish(0, "a", *(str(number) for number in range(20, 40)))
    with member(1) as first:
        assert consume(first, 40) == [str(number) for number in range(40)]
    with member(2) as second:
        # Node 2, which is held back, stores half of the stream as consumed.
        assert second.next_batch(3.0) is None
        cluster.follow()
        bed.publish(0, "a", "new")
        assert consume(second, 1) == ["new"]
        assert second.next_batch(0.5) is None


def test_a_router_finds_a_stray_that_a_replica_does_not_have_yet(cluster: Cluster, bed: SerialBed) -> None:
    """A message behind a fence is a stray by its leader's word, whatever the replica has."""
    bed.publish(0, "a", "first")
    epoch = bed._epochs["a"]
    cluster.lag(2)
    bed.control(0, Fence(1, epoch + 1, frozenset("a")))
    at = bed.stray(0, "a", "late")
    sent = Sent("a", bed.streams[0], Placed(epoch, SESSION, 2))
    nowhere = Sent("a", bed.streams[0], Placed(epoch, SESSION, 3))
    address = BrokerAddress.of(broker_at(cluster, 2))
    with closing(ControlStreams(address, CONTEXT_HEADER)) as strays:
        assert strays.search(sent, 0) == at
        assert strays.search(nowhere, 0) is None


def test_a_partition_whose_leader_shows_nothing_has_no_known_end(cluster: Cluster, bed: SerialBed) -> None:
    """Before a partition is deleted, its end is the leader's, not that of an empty stream after an election."""
    [stream] = bed.streams
    bed.publish(0, "a", "unread")
    with closing(ControlStreams(BrokerAddress.of(broker_at(cluster, 1)))) as streams:
        assert streams.proven_end_of(stream) == 1
        cluster.silence(stream)
        with pytest.raises(StreamUnavailable):
            streams.proven_end_of(stream)
