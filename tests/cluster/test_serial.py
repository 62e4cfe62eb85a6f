"""Serial consumers on three nodes, of which one is behind."""

from contextlib import closing

import sqlalchemy as sa

from relatum.contexts import SerialConsumer
from relatum.contexts.placement._controls import Strays
from relatum.contexts.placement._entries import Fence, Placed
from relatum.contexts.placement._publication_requests import Sent
from relatum.headers import CONTEXT_HEADER
from relatum.reading import BrokerAddress
from relatum.superstreams import Layout
from tests.support import broker_connection, unique_name
from tests.support.cluster import Cluster, on_each_cluster
from tests.support.serial_consuming import SESSION, SerialBed, consume

pytestmark = on_each_cluster


def test_a_replica_that_is_behind_is_waited_for(cluster: Cluster, database_url: str, engine: sa.Engine) -> None:
    """What was consumed is not delivered again by a member that reads from a node that has not got it yet."""
    name = unique_name()
    stream = f"{name}-0"
    cluster.declare(stream, leader=1)
    with broker_connection(cluster.amqp_url(1)) as connection:
        channel = connection.channel()
        channel.confirm_delivery()
        bed = SerialBed(cluster.amqp_url(1), engine, Layout.of(name, [(stream, "0")]), channel)
        bed.publish(0, "a", *(str(number) for number in range(20)))

        def member(node: int) -> SerialConsumer:
            urls = {"broker": cluster.amqp_url(node), "stream_url": cluster.stream_url(node)}
            return SerialConsumer(name, "test", database=database_url, **urls)

        cluster.lag(2)
        bed.publish(0, "a", *(str(number) for number in range(20, 40)))
        with member(1) as first:
            assert consume(first, 40) == [str(number) for number in range(40)]
        with member(2) as second:
            # Held back, node 2 has half of what is stored as consumed.
            assert second.next_batch(3.0) is None
            cluster.follow()
            bed.publish(0, "a", "new")
            assert consume(second, 1) == ["new"]
            assert second.next_batch(0.5) is None


def test_a_router_finds_a_stray_that_a_replica_does_not_have_yet(cluster: Cluster, engine: sa.Engine) -> None:
    """A message behind a fence is a stray by its leader's word, whatever the replica has."""
    name = unique_name()
    stream = f"{name}-0"
    cluster.declare(stream, leader=1)
    with broker_connection(cluster.amqp_url(1)) as connection:
        channel = connection.channel()
        channel.confirm_delivery()
        bed = SerialBed(cluster.amqp_url(1), engine, Layout.of(name, [(stream, "0")]), channel)
        bed.publish(0, "a", "first")
        epoch = bed._epochs["a"]
        cluster.lag(2)
        bed.control(0, Fence(1, epoch + 1, frozenset("a")))
        at = bed.stray(0, "a", "late")
        sent = Sent("a", stream, Placed(epoch, SESSION, 2), 0)
        nowhere = Sent("a", stream, Placed(epoch, SESSION, 3), 0)
        address = BrokerAddress.parse(cluster.amqp_url(2), cluster.stream_url(2))
        with closing(Strays(address, CONTEXT_HEADER)) as strays:
            assert strays.search(sent, 0) == at
            assert strays.search(nowhere, 0) is None
