"""Recording beside nodes that lag: what is behind is waited for, never taken for lost or for another stream."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import sqlalchemy as sa

from relatum.reading import (
    Agreement,
    BrokerAddress,
    BrokerIdentity,
    Position,
    StreamReader,
    agreement,
    claimed_identity,
)
from relatum.recording import StreamStatus, status
from relatum.wire._identity import fingerprint
from tests.support import publish_plain, recording, rows_of, unique_name, wait_until
from tests.support.cluster import Cluster


def orders(count: int, start: int = 0) -> list[tuple[bytes, dict[str, Any]]]:
    """Numbered orders."""
    return [(b"%d" % n, {"order_id": f"o{n}"}) for n in range(start, start + count)]


def at(cluster: Cluster, node: int) -> Any:
    """A node's address."""
    return BrokerAddress.parse(cluster.amqp_url(node), cluster.stream_url(node))


def wait_recorded(cluster: Cluster, engine: sa.Engine, stream: str, count: int) -> None:
    """Wait until so many are recorded, of one stream and without gaps, by the leader's node."""

    def seen() -> StreamStatus | None:
        found = status(at(cluster, 1), engine.url, [stream])
        is_whole = found and (found[0].recorded_to, found[0].lag_offsets) == (count, 0)
        return found[0] if is_whole else None

    found = wait_until(seen, limit_s=120, what=f"{count} recorded")
    assert found is not None
    assert (found.events, found.generation, found.gaps) == ([], 1, [])


def test_a_recorder_at_a_lagging_node_loses_and_doubles_nothing(cluster: Cluster, engine: sa.Engine) -> None:
    """It opens behind what the node has, waits for it, and notes neither a lost tail nor a new generation."""
    stream = unique_name()
    cluster.declare(stream, leader=1)
    with recording(at(cluster, 1), engine, stream, keys=["order_id"]):
        publish_plain(cluster.amqp_url(1), stream, orders(50))
        wait_recorded(cluster, engine, stream, 50)
        cluster.lag(3)
        publish_plain(cluster.amqp_url(1), stream, orders(50, start=50))
        wait_recorded(cluster, engine, stream, 100)
    with recording(at(cluster, 3), engine, stream, keys=["order_id"]):
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
    with recording(at(cluster, 1), engine, stream, keys=["order_id"]):
        wait_recorded(cluster, engine, stream, 50)
    cluster.silence(stream)
    position = Position(49, fingerprint(None, b"49"), None)
    with StreamReader.open(cluster.stream_url(2)) as reader:
        assert reader.bounds(stream) == (None, None)
        assert agreement(reader, stream, position) is Agreement.UNKNOWN
    with recording(at(cluster, 2), engine, stream, keys=["order_id"]) as recorder:
        wait_until(
            lambda: recorder.statistics().streams[stream].reconnects, limit_s=120, what="a try that concludes nothing"
        )
        publish_plain(cluster.amqp_url(1), stream, orders(50, start=50))
        wait_recorded(cluster, engine, stream, 100)


def is_held(engine: sa.Engine, stream: str) -> bool:
    """Whether somebody records the stream now."""
    held = sa.text(
        "SELECT FROM relatum.recorder_members member JOIN relatum.streams stream ON lease_holder = member.holder"
        " WHERE stream.name = :stream AND member.lease_expires_at > clock_timestamp()"
    )
    with engine.connect() as connection:
        return connection.execute(held, {"stream": stream}).one_or_none() is not None


def test_a_broker_of_three_nodes_has_one_id(cluster: Cluster) -> None:
    """Recorders that come first at different nodes at once agree, and each node says the same."""
    addresses = [at(cluster, node) for node in (1, 2, 3)]

    def claimed(address: BrokerAddress) -> BrokerIdentity:
        with StreamReader.open(address) as reader:
            return claimed_identity(reader)

    with ThreadPoolExecutor(6) as threads:
        found = {each.broker_id for each in threads.map(claimed, addresses * 2)}
    assert len(found) == 1
    assert None not in found
    for address in addresses:
        with StreamReader.open(address) as reader:
            assert {reader.identity().broker_id} == found
