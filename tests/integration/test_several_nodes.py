"""Recorders that know several nodes: recording goes on by the next one. Here the nodes are ways to one broker."""

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any
from urllib.parse import SplitResult, urlsplit

import dramatiq
import pytest
import sqlalchemy as sa
from celery import Celery
from dramatiq.brokers.rabbitmq import RabbitmqBroker

import relatum
from relatum.keys import preset
from relatum.reading import BrokerAddress
from relatum.recording import verify
from tests.support import publish_plain, recording, rows_of, unique_name, wait_recorded
from tests.support.ports import free_port
from tests.support.proxy import Proxy

FAULTS = ["cut", "silent"]


@pytest.fixture
def nodes(stream_url: str) -> Iterator[list[Proxy]]:
    """Two ways to the broker, as if to two nodes."""
    with ExitStack() as stack:
        yield [stack.enter_context(Proxy.to(stream_url)) for _ in range(2)]


@pytest.fixture
def whole_nodes(amqp_url: str, stream_url: str) -> Iterator[list[tuple[Proxy, Proxy]]]:
    """Two ways to the broker by both protocols, whose ports are as far apart as the broker's usually are."""
    amqp, stream = urlsplit(amqp_url), urlsplit(stream_url)
    with ExitStack() as stack:

        def way(parts: SplitResult, port: int) -> Proxy:
            return stack.enter_context(Proxy(parts.hostname or "", parts.port or 0, listens_on=port))

        ports = [free_port((0, -120)) for _ in range(2)]
        yield [(way(amqp, port), way(stream, port - 120)) for port in ports]


@pytest.fixture
def urls(amqp_url: str, stream_url: str, nodes: list[Proxy]) -> tuple[str, str]:
    """The URLs of both nodes, of AMQP 0.9.1 and of the stream protocol."""
    return ";".join([amqp_url] * 2), ";".join(node.url(stream_url) for node in nodes)


def end(node: Proxy, fault: str) -> None:
    """Have a node answer no more."""
    if fault == "silent":
        node.mode = "blackhole"
    else:
        node.accepts = False
        node.cut()


def order(number: int) -> tuple[bytes, dict[str, Any]]:
    """A message with its key."""
    return b"", {"order_id": str(number)}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_recorder_goes_on_at_the_next_node(
    amqp_url: str,
    engine: sa.Engine,
    stream_name: str,
    nodes: list[Proxy],
    urls: tuple[str, str],
    fault: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """What is published after its node has ended is recorded, and one line says so."""
    address = BrokerAddress.parse(*urls)
    publish_plain(amqp_url, stream_name, map(order, range(10)))
    with recording(address, engine, stream_name, keys=["order_id"]):  # type: ignore[arg-type]
        wait_recorded(amqp_url, engine, stream_name)
        assert nodes[0].opened
        assert not nodes[1].opened
        end(nodes[0], fault)
        publish_plain(amqp_url, stream_name, map(order, range(10, 20)))
        wait_recorded(amqp_url, engine, stream_name)
    assert rows_of(engine, stream_name) == [("order_id", str(number), number) for number in range(20)]
    assert verify(amqp_url, engine.url, [stream_name]).ok
    assert sum(record.name == "relatum.broker" for record in caplog.records) == 1


class ByCelery:
    """A Celery app with a list of URLs, whose tasks are copied."""

    key = "celery_id"

    def __init__(self, urls: str, database_url: str, stream: str) -> None:
        self._queue = unique_name("celery")
        self._app = Celery(broker=urls.split(";"))
        relatum.intercept(self._app, database=database_url, keys=preset("celery"), copy_to=stream)

    def __call__(self, number: int) -> None:
        """Publish, as often as it takes."""
        self._app.send_task("charge", task_id=str(number), queue=self._queue, ignore_result=True)

    def close(self) -> None:
        """Give all back."""
        relatum.release(self._app)
        self._app.close()


class ByDramatiq:
    """A broker of dramatiq's with several URLs."""

    key = "dramatiq_id"

    def __init__(self, urls: str, database_url: str, stream: str) -> None:
        self._broker = RabbitmqBroker(url=urls)
        self._queue = unique_name("dramatiq")
        relatum.intercept(self._broker, database=database_url, keys=preset("dramatiq"), copy_to=stream)

    def __call__(self, number: int) -> None:
        """Publish, as often as it takes."""
        message: Any = dramatiq.Message(self._queue, "charge", (), {}, {}, message_id=str(number))
        self._broker.declare_queue(self._queue)
        self._broker.enqueue(message)

    def close(self) -> None:
        """Give all back."""
        relatum.release(self._broker)
        self._broker.close()


@pytest.mark.parametrize("client", [ByCelery, ByDramatiq])
@pytest.mark.parametrize("is_up", [True, False], ids=["cut", "down"])
def test_a_recorder_in_the_process_goes_where_its_client_goes(
    amqp_url: str,
    database_url: str,
    engine: sa.Engine,
    stream_name: str,
    whole_nodes: list[tuple[Proxy, Proxy]],
    client: Any,
    is_up: bool,
) -> None:
    """By the client's own URLs, with no other word: its node ends while it publishes, or does not answer at first."""

    def end_first() -> None:
        for way in whole_nodes[0]:
            end(way, "cut")

    if not is_up:
        end_first()
    publish = client(";".join(amqp.url(amqp_url) for amqp, _ in whole_nodes), database_url, stream_name)
    try:
        for number in range(20):
            if is_up and number == 10:
                wait_recorded(amqp_url, engine, stream_name)
                end_first()
            publish(number)
        wait_recorded(amqp_url, engine, stream_name)
    finally:
        publish.close()
    rows = {value for key, value, _ in rows_of(engine, stream_name) if key == client.key}
    assert rows == {str(number) for number in range(20)}
    assert verify(amqp_url, engine.url, [stream_name]).ok
