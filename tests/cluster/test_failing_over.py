"""A recorder that knows several nodes goes on at the next: one is down at the start, is killed, or frozen."""

import logging
import time
from collections import Counter
from contextlib import ExitStack
from typing import Any

import pika
import pytest
import sqlalchemy as sa
from celery import Celery
from kombu import Connection
from pika.exceptions import AMQPError

import relatum
from relatum.errors import BrokerUnavailable, ReadTimeout, RelatumError
from relatum.recording import VerifyReport, verify
from relatum_consumer import Relations
from tests.support import rows_of, unique_name, wait_until
from tests.support.cluster import SETTLE_S, Cluster, on_each_cluster

pytestmark = on_each_cluster

PUBLISHED_ANEW_S = 180.0
"""Seconds for which a publish is tried: until a new leader is elected, or the others take a frozen node for lost."""


@pytest.fixture
def urls(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> str:
    """All nodes' URLs, as Celery is given them; of which a new process does not know who answered."""
    monkeypatch.setattr("relatum.reading._failing_over._used", {})
    return ";".join(cluster.amqp_url(node) for node in (1, 2, 3))


class ByCelery:
    """An intercepted app with a connection of several URLs; kombu itself goes on to the next."""

    def __init__(self, urls: str, database_url: str, stream: str) -> None:
        self._connection = Connection(urls, connect_timeout=5, transport_options={"confirm_publish": True})
        self._app = relatum.intercept(Celery(set_as_current=False), database=database_url, keys=["order_id"])
        self._producer = self._connection.Producer()
        self._stream = stream

    def __call__(self, order: str) -> None:
        """Publish, with a confirm."""
        with self._app.producer_or_acquire(self._producer) as producer:
            producer.publish(
                b"",
                routing_key=self._stream,
                headers={"order_id": order},
                retry=True,
                retry_policy={"max_retries": 100, "interval_start": 0.1, "interval_max": 1},
                confirm_timeout=5,
                timeout=5,
            )

    def close(self) -> None:
        """Give all back."""
        relatum.release(self._app)
        self._connection.close()


class ByPika:
    """pika connections, one after the other, each intercepted; the recorder is told the nodes by `broker_url=`."""

    def __init__(self, urls: str, database_url: str, stream: str, *, nodes: str | None = None) -> None:
        self._urls, self._nodes, self._database_url, self._stream = urls, nodes or urls, database_url, stream
        self._connect()

    def _connect(self) -> None:
        self._connection = pika.BlockingConnection([pika.URLParameters(url) for url in self._nodes.split(";")])
        relatum.intercept(self._connection, database=self._database_url, keys=["order_id"], broker_url=self._urls)
        self._channel = self._connection.channel()
        self._channel.confirm_delivery()

    def __call__(self, order: str) -> None:
        """Publish, with a confirm."""
        properties = pika.BasicProperties(headers={"order_id": order})
        self._channel.basic_publish("", self._stream, b"", properties, mandatory=True)

    def again(self, order: str) -> None:
        """Connect anew, where the node is gone, and publish."""
        if not self._connection.is_open:
            # The recorder stays that of the first connection, which is given back after the next one has it.
            before = self._connection
            self._connect()
            relatum.release(before)
        self(order)

    def close(self) -> None:
        """Give all back."""
        relatum.release(self._connection)
        if self._connection.is_open:
            self._connection.close()


@pytest.fixture(params=["celery", "pika"])
def client(request: pytest.FixtureRequest) -> Any:
    """Makes publishers of each client."""
    return {"celery": ByCelery, "pika": ByPika}[request.param]


def confirmed(publisher: Any, orders: range) -> set[str]:
    """Publish each until it is confirmed."""
    until = time.monotonic() + PUBLISHED_ANEW_S
    for order in orders:
        publish = publisher
        while True:
            try:
                publish(str(order))
                break
            except (AMQPError, RelatumError):
                assert time.monotonic() < until, "nothing could be published for minutes"
                time.sleep(0.1)
                publish = getattr(publisher, "again", publisher)
    return {str(order) for order in orders}


def check_rows(cluster: Cluster, engine: sa.Engine, stream: str, orders: set[str], *, node: int) -> None:
    """Each confirmed message has its row and no row is too many, by a count of the stream itself."""
    url = cluster.amqp_url(node)

    def in_stream() -> Counter[str]:
        counted: Counter[str] = Counter()
        with pika.BlockingConnection(pika.URLParameters(url)) as connection:
            channel = connection.channel()
            channel.basic_qos(prefetch_count=100)
            arguments = {"x-stream-offset": "first"}
            for method, properties, _ in channel.consume(stream, arguments=arguments, inactivity_timeout=3):
                if method is None:
                    return counted
                counted[properties.headers["order_id"]] += 1
                channel.basic_ack(method.delivery_tag)
        return counted

    def in_table() -> Counter[str]:
        return Counter(value for _, value, _ in rows_of(engine, stream))

    wait_until(lambda: in_table().keys() >= orders, SETTLE_S, what="a row of each confirmed message", every_s=0.5)
    assert in_stream().keys() == orders
    wait_until(lambda: in_table() == in_stream(), SETTLE_S, what="a row of each message in the stream")


def check_verified(cluster: Cluster, engine: sa.Engine, stream: str) -> None:
    """`relatum verify` agrees, as soon as all nodes are back and say who leads the stream."""

    def report() -> VerifyReport | None:
        try:
            return verify(cluster.amqp_url(2), engine.url, [stream])
        except (BrokerUnavailable, ReadTimeout):
            return None

    found = wait_until(report, SETTLE_S, what="an answer to verify", every_s=0.5)
    assert found.ok, found
    assert [each.rows for each in found.streams] != [0]


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The lines that say which node is used."""
    return [record.message for record in caplog.records if record.name == "relatum.broker"]


def test_the_first_node_is_down_at_the_start(
    cluster: Cluster, database_url: str, engine: sa.Engine, urls: str, client: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Recording begins at the next, and look-ups with the same URLs answer."""
    stream = unique_name()
    cluster.declare(stream, leader=2)
    cluster.stop(1)
    with ExitStack() as stack:
        publisher = client(urls, database_url, stream)
        stack.callback(publisher.close)
        orders = confirmed(publisher, range(20))
        check_rows(cluster, engine, stream, orders, node=2)
        with Relations(urls, engine.url, timeout_s=60) as relations:
            assert relations.find("order_id", "7").messages
        check_verified(cluster, engine, stream)
    assert len(told(caplog)) <= 1


def test_the_node_is_killed_while_publishing(
    cluster: Cluster, database_url: str, engine: sa.Engine, urls: str, client: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """It goes on at another, says so once, and stays there once the first is back."""
    caplog.set_level(logging.INFO, "relatum")
    stream = unique_name()
    cluster.declare(stream, leader=1)
    with ExitStack() as stack:
        publisher = client(urls, database_url, stream)
        stack.callback(publisher.close)
        orders = confirmed(publisher, range(50))
        check_rows(cluster, engine, stream, orders, node=2)
        cluster.stop(1)
        orders |= confirmed(publisher, range(50, 150))
        check_rows(cluster, engine, stream, orders, node=2)
        cluster.start(1)
        orders |= confirmed(publisher, range(150, 200))
        check_rows(cluster, engine, stream, orders, node=2)
        check_verified(cluster, engine, stream)
    lines = told(caplog)
    assert len(lines) == 1, lines
    assert "is used from now on" in lines[0]


def test_the_node_is_frozen(cluster: Cluster, database_url: str, engine: sa.Engine, urls: str) -> None:
    """Others publish on, and recording goes on by the next node."""
    stream = unique_name()
    cluster.declare(stream, leader=2)
    others = ";".join(cluster.amqp_url(node) for node in (2, 3))
    publisher = ByPika(urls, database_url, stream, nodes=others)
    try:
        orders = confirmed(publisher, range(50))
        check_rows(cluster, engine, stream, orders, node=2)
        cluster.freeze(1)
        orders |= confirmed(publisher, range(50, 100))
        check_rows(cluster, engine, stream, orders, node=2)
        cluster.thaw(1)
        check_verified(cluster, engine, stream)
    finally:
        publisher.close()
