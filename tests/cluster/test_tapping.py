"""What a tap's stream without a leader does to publishers of the exchange, as docs/tap.md says."""

import time

import pika
from pika.exceptions import ConnectionClosedByBroker

from relatum.superstreams import StreamOptions
from relatum.tapping import tap
from tests.support import LIMIT_S, broker_connection, unique_name, wait_until
from tests.support.cluster import Cluster, on_each_cluster
from tests.support.routing import confirming
from tests.support.threads import beside


def _publish(amqp_url: str, exchange: str, body: bytes) -> None:
    """Publish and wait for the confirm, again while the coordinator of streams has no leader: docs/tap.md."""
    end = time.monotonic() + LIMIT_S
    while True:
        try:
            with confirming(amqp_url) as channel:
                channel.basic_publish(exchange, "a", body, pika.BasicProperties(delivery_mode=2))
                return
        except ConnectionClosedByBroker:
            if time.monotonic() > end:
                raise


@on_each_cluster
def test_confirms_wait_for_the_stream_and_messages_do_not(cluster: Cluster, database_url: str) -> None:
    """Queues get the message while the copy's one node is down, its confirm comes once that is back."""
    exchange, other = unique_name("lone"), unique_name("whole")
    with broker_connection(cluster.amqp_url(1)) as connection:
        channel = connection.channel()
        for name in (exchange, other):
            channel.exchange_declare(name, "topic", durable=True)
            channel.queue_declare(name, durable=True)
            channel.queue_bind(name, name, "#")
        lone = StreamOptions(initial_cluster_size=1, leader_locator="client-local")
        tap(cluster.amqp_url(2), database_url, exchange, options=lone)
        tap(cluster.amqp_url(2), database_url, other, options=StreamOptions(leader_locator="client-local"))
        wait_until(lambda: cluster.leader_of(f"tap.{exchange}") == 2, what="the lone stream's leader")
        cluster.lead_coordinator(2)
        cluster.stop(2)
        with beside(_publish, cluster.amqp_url(1), exchange, b"one") as publishing:
            taken = wait_until(lambda: channel.basic_get(exchange, auto_ack=True)[2], what="the message in its queue")
            assert taken == b"one"
            _publish(cluster.amqp_url(1), other, b"other")
            assert not publishing.done()
            cluster.start(2)
            wait_until(publishing.done, 300.0, what="the confirm")
