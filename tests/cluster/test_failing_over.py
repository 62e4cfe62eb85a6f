"""Nodes that fail: a recorder that knows several continues at the next, and confirms of a tapped exchange wait."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import aio_pika
import pika
import pytest
from pika.exceptions import AMQPError

import relatum
from relatum.errors import BrokerUnavailable, ReadTimeout, RelatumError
from relatum.recording import VerifyReport, verify
from relatum.store.database import make_engine
from relatum.superstreams import StreamOptions
from relatum.tapping import tap
from relatum_consumer import Relations
from tests.support import broker_connection, publish_plain, read_plain, read_stream, rows_of, unique_name, wait_until
from tests.support.cluster import NODES, SETTLE_S, Cluster
from tests.support.databases import Databases
from tests.support.threads import beside

TOGETHER = 25
"""Messages to each stream that wait for their confirms at the same time."""

PUBLISHED_ANEW_S = 180.0
"""Seconds for which a publish is tried: until a new leader is elected, or the others take a frozen node for lost."""


class Publisher:
    """A pika connection after the other, each intercepted by `broker=`, with a stream and database of its own."""

    def __init__(self, cluster: Cluster, database_url: str, leader: int) -> None:
        self._cluster, self.database_url, self._orders = cluster, database_url, set[str]()
        self._stream, self._engine = unique_name(), make_engine(database_url)
        cluster.declare(self._stream, leader=leader)

    @contextmanager
    def open(self, nodes: Sequence[int] = NODES) -> Iterator[None]:
        self._nodes = [pika.URLParameters(self._cluster.amqp_url(node)) for node in nodes]
        self._connect()
        try:
            yield
        finally:
            relatum.release(self._connection)
            if self._connection.is_open:
                self._connection.close()

    def _connect(self) -> None:
        self._connection = pika.BlockingConnection(self._nodes)
        urls = urls_of(self._cluster)
        relatum.intercept(self._connection, database=self.database_url, keys=["order_id"], broker=urls)
        self._channel = self._connection.channel()
        self._channel.confirm_delivery()

    def publish(self, orders: range) -> None:
        """Publish each until it is confirmed, connecting again where the node is gone, and check the rows."""
        until = time.monotonic() + PUBLISHED_ANEW_S
        for order in map(str, orders):
            while order not in self._orders:
                try:
                    if not self._connection.is_open:
                        # The first connection's recorder remains: it is released only after the next connection has it.
                        before = self._connection
                        self._connect()
                        relatum.release(before)
                    properties = pika.BasicProperties(headers={"order_id": order})
                    self._channel.basic_publish("", self._stream, order.encode(), properties, mandatory=True)
                    self._orders.add(order)
                except (AMQPError, RelatumError):
                    assert time.monotonic() < until, "nothing could be published for minutes"
                    time.sleep(0.1)
        wait_until(lambda: self._rows().keys() >= self._orders, SETTLE_S, what="a row of each confirmed message")
        wait_until(lambda: self._messages().keys() == self._orders, SETTLE_S, what="each message at this node")
        wait_until(lambda: self._rows() == self._messages(), SETTLE_S, what="a row of each message in the stream")

    def _messages(self) -> Counter[str]:
        found = read_plain(self._cluster.amqp_url(2), self._stream, 1_000, more_s=3.0)
        return Counter(body.decode() for body in found)

    def _rows(self) -> Counter[str]:
        return Counter(value for _, value, _ in rows_of(self._engine, self._stream))

    def verify(self) -> None:
        def report() -> VerifyReport | None:
            with suppress(BrokerUnavailable, ReadTimeout):
                return verify(self._cluster.amqp_url(2), self._engine.url, [self._stream])
            return None

        found = wait_until(report, SETTLE_S, what="an answer to verify", every_s=0.5)
        assert found.ok, found
        assert [each.rows for each in found.streams] != [0]
        self._engine.dispose()


def urls_of(cluster: Cluster) -> str:
    return ";".join(map(cluster.amqp_url, NODES))


@pytest.fixture
def publishers(cluster: Cluster, _databases: Databases) -> Iterator[list[Publisher]]:
    made = [Publisher(cluster, _databases.take(), leader) for leader in (1, 2, 2)]
    yield made
    for each in made:
        _databases.give_back(each.database_url)


@pytest.fixture
def used(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    def lines() -> list[str]:
        said = [record.getMessage() for record in caplog.records if record.name == "relatum.broker"]
        caplog.clear()
        return said

    caplog.set_level(logging.INFO, "relatum")
    return lines


@pytest.fixture
def forget(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Be a new process, which does not know which node answered."""
    return lambda: monkeypatch.setattr("relatum.reading._connecting._used", {})


def test_recorders_go_on_elsewhere(cluster: Cluster, publishers: list[Publisher], used: Any, forget: Any) -> None:
    """Whatever happens to their node, a component that continues at another logs it once, and stays there."""
    of_the_killed, late, of_the_frozen = publishers
    forget()
    with of_the_killed.open():
        of_the_killed.publish(range(20))
        cluster.stop(1)
        of_the_killed.publish(range(20, 60))
        (line,) = used()
        assert "is used from now on" in line
        forget()
        with late.open(), Relations(urls_of(cluster), late.database_url, timeout_s=60) as relations:
            late.publish(range(20))
            assert relations.find("order_id", "7").messages
        assert len(used()) <= 1
        cluster.start(1)
        of_the_killed.publish(range(60, 80))
        assert used() == []
    forget()
    with of_the_frozen.open(nodes=(2, 3)):
        of_the_frozen.publish(range(20))
        cluster.freeze(1)
        of_the_frozen.publish(range(20, 40))
        cluster.thaw(1)
    for each in publishers:
        each.verify()


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
        publish = partial(publish_plain, cluster.amqp_url(1), "a")
        with beside(partial(publish, [b"one"], exchange=exchange)) as publishing:
            taken = wait_until(lambda: channel.basic_get(exchange, auto_ack=True)[2], what="the message in its queue")
            assert taken == b"one"
            publish([b"other"], exchange=other)
            assert not publishing.done()
            cluster.start(2)
            wait_until(publishing.done, 300.0, what="the confirm")


async def test_no_confirmed_message_is_lost_when_leaders_change(cluster: Cluster) -> None:
    """If each stream has a channel of its own, which RabbitMQ before 4.0 needs: see docs/operations.md."""
    streams = [unique_name(), unique_name()]
    for stream in streams:
        cluster.declare(stream, leader=2)

    def change_leaders() -> None:
        cluster.stop(2)
        for stream in streams:
            wait_until(lambda: cluster.leader_of(stream) not in (None, 2), SETTLE_S, what="a new leader")  # noqa: B023

    async with await aio_pika.connect(cluster.amqp_url(3)) as connection:
        channels = [await connection.channel() for _ in streams]
        changing, confirmed = asyncio.create_task(asyncio.to_thread(change_leaders)), 0
        is_last = False
        while not is_last:
            is_last = changing.done()
            publishes = (
                channel.default_exchange.publish(aio_pika.Message(str(confirmed + each).encode()), stream)
                for stream, channel in zip(streams, channels, strict=True)
                for each in range(TOGETHER)
            )
            await asyncio.wait_for(asyncio.gather(*publishes), SETTLE_S)
            confirmed += TOGETHER
        await changing
    for stream in streams:
        found = await asyncio.to_thread(lambda: list(read_stream(cluster.amqp_url(3), stream)))  # noqa: B023
        assert Counter(int(each.body) for each in found) == Counter(range(confirmed))
