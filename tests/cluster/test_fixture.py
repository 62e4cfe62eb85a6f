"""The three-node cluster itself: what its faults must do, else the tests that use them prove nothing."""

from tests.support import publish_plain, read_plain, stream_available, unique_name, wait_until
from tests.support.cluster import Cluster, on_each_cluster

pytestmark = on_each_cluster


def test_leaders_are_where_they_were_asked_for(cluster: Cluster) -> None:
    """A stream is declared on the node asked for, and moves to another with all it has."""
    stream = unique_name()
    cluster.declare(stream, leader=3)
    assert cluster.leader_of(stream) == 3
    publish_plain(cluster.amqp_url(1), stream, [b"0", b"1"])
    cluster.move_leader(stream, 1)
    assert cluster.leader_of(stream) == 1
    assert read_plain(cluster.amqp_url(1), stream, 2) == [b"0", b"1"]


def test_a_replica_is_held_back_and_follows(cluster: Cluster) -> None:
    """A node that is held back keeps what it had while the others go on, and has all once it follows."""
    stream = unique_name()
    cluster.declare(stream, leader=1)
    publish_plain(cluster.amqp_url(1), stream, [b"before"])
    assert read_plain(cluster.amqp_url(2), stream, 1) == [b"before"]
    cluster.lag(2)
    publish_plain(cluster.amqp_url(1), stream, [b"after"])
    assert read_plain(cluster.amqp_url(3), stream, 2) == [b"before", b"after"]
    assert read_plain(cluster.amqp_url(2), stream, 2, more_s=1.0) == [b"before"]
    cluster.follow()
    assert read_plain(cluster.amqp_url(2), stream, 2) == [b"before", b"after"]


def test_nodes_stop_freeze_and_come_back(cluster: Cluster) -> None:
    """Two of three nodes go on without the third; it comes back with what was published meanwhile."""
    stream = unique_name()
    cluster.declare(stream, leader=1)
    cluster.stop(3)
    publish_plain(cluster.amqp_url(2), stream, [b"0"])
    cluster.start(3)
    wait_until(lambda: stream_available(cluster.amqp_url(3), stream), what="a replica on the node")
    assert read_plain(cluster.amqp_url(3), stream, 1) == [b"0"]
    cluster.freeze(2)
    publish_plain(cluster.amqp_url(1), stream, [b"1"])
    cluster.thaw(2)
    assert read_plain(cluster.amqp_url(2), stream, 2) == [b"0", b"1"]
