"""Recording beside nodes that lag: what is behind is waited for, never taken for lost or for another stream."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import psycopg

from relatum.reading import (
    Agreement,
    BrokerAddress,
    BrokerIdentity,
    Position,
    StreamReader,
    agreement,
    claimed_identity,
)
from relatum.recording import Recorder, StreamStatus, status
from relatum.wire._identity import fingerprint
from tests.support import publish_plain, unique_name, wait_until
from tests.support.cluster import Cluster


def orders(count: int, start: int = 0) -> list[tuple[bytes, dict[str, Any]]]:
    """Numbered orders."""
    return [(b"%d" % n, {"order_id": f"o{n}"}) for n in range(start, start + count)]


@contextmanager
def recording_at(cluster: Cluster, node: int, database_url: str, stream: str) -> Iterator[Recorder]:
    """Run a recorder that is connected to one node."""
    address = BrokerAddress.parse(cluster.amqp_url(node), cluster.stream_url(node))
    recorder = Recorder(address, database_url, [stream], keys=["order_id"], lease_s=2.0)
    stop = threading.Event()
    thread = threading.Thread(target=recorder.run, args=[stop])
    thread.start()
    try:
        yield recorder
    finally:
        stop.set()
        thread.join(90)
    assert not thread.is_alive()


def wait_recorded(cluster: Cluster, database_url: str, stream: str, count: int) -> None:
    """Wait until so many are recorded, of one stream and without gaps, by the leader's node."""

    def seen() -> StreamStatus | None:
        found = status(BrokerAddress.parse(cluster.amqp_url(1), cluster.stream_url(1)), database_url, [stream])
        is_whole = found and (found[0].recorded_to, found[0].lag_offsets) == (count, 0)
        return found[0] if is_whole else None

    found = wait_until(seen, limit_s=120, what=f"{count} recorded")
    assert found is not None
    assert (found.events, found.generation, found.gaps) == ([], 1, [])


def test_a_recorder_at_a_lagging_node_loses_and_doubles_nothing(cluster: Cluster, database_url: str) -> None:
    """It opens behind what the node has, waits for it, and notes neither a lost tail nor a new generation."""
    stream = unique_name()
    cluster.declare(stream, leader=1)
    with recording_at(cluster, 1, database_url, stream):
        publish_plain(cluster.amqp_url(1), stream, orders(50))
        wait_recorded(cluster, database_url, stream, 50)
        cluster.lag(3)
        publish_plain(cluster.amqp_url(1), stream, orders(50, start=50))
        wait_recorded(cluster, database_url, stream, 100)
    with recording_at(cluster, 3, database_url, stream):
        wait_until(lambda: is_held(database_url, stream), what="the lease")
        publish_plain(cluster.amqp_url(1), stream, orders(50, start=100))
        cluster.follow()
        wait_recorded(cluster, database_url, stream, 150)
    with psycopg.connect(database_url) as connection:
        rows = connection.execute("SELECT value FROM relatum.relationships ORDER BY stream_offset").fetchall()
    assert [value for (value,) in rows] == [f"o{n}" for n in range(150)]


def test_a_leader_that_shows_nothing_for_long_is_no_other_stream(cluster: Cluster, database_url: str) -> None:
    """A leader shows nothing until its replicas answer, for as long as that takes; nothing is concluded from it."""
    stream = unique_name()
    cluster.declare(stream, leader=1)
    publish_plain(cluster.amqp_url(1), stream, orders(50))
    with recording_at(cluster, 1, database_url, stream):
        wait_recorded(cluster, database_url, stream, 50)
    cluster.silence(stream)
    position = Position(49, fingerprint(None, b"49"), None)
    with StreamReader.open(cluster.stream_url(2)) as reader:
        assert reader.bounds(stream) == (None, None)
        assert agreement(reader, stream, position) is Agreement.UNKNOWN
    with recording_at(cluster, 2, database_url, stream) as recorder:
        wait_until(
            lambda: recorder.statistics().streams[stream].reconnects, limit_s=120, what="a try that concludes nothing"
        )
        publish_plain(cluster.amqp_url(1), stream, orders(50, start=50))
        wait_recorded(cluster, database_url, stream, 100)


def is_held(database_url: str, stream: str) -> bool:
    """Whether somebody records the stream now."""
    with psycopg.connect(database_url) as connection:
        row = connection.execute(
            "SELECT FROM relatum.recorder_members member JOIN relatum.streams stream ON lease_holder = member.holder"
            " WHERE stream.name = %s AND member.lease_expires_at > clock_timestamp()",
            [stream],
        ).fetchone()
    return row is not None


def test_a_broker_of_three_nodes_has_one_id(cluster: Cluster) -> None:
    """Recorders that come first at different nodes at once agree, and each node says the same."""
    addresses = [BrokerAddress.parse(cluster.amqp_url(node), cluster.stream_url(node)) for node in (1, 2, 3)]

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
