"""Recorders that know several nodes: recording continues by the next one. Here the nodes are ways to one broker."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from urllib.parse import SplitResult, urlsplit

import dramatiq
import pytest
from celery import Celery
from dramatiq.brokers.rabbitmq import RabbitmqBroker

import relatum
from relatum.keys import preset
from tests.support import rows_of, unique_name
from tests.support.place import Place
from tests.support.ports import free_port
from tests.support.proxy import Proxy


@pytest.fixture
def nodes(amqp_url: str, stream_url: str) -> Iterator[list[tuple[Proxy, Proxy]]]:
    """Two ways to the broker by both protocols, whose ports are as far apart as the broker's usually are."""
    amqp, stream = urlsplit(amqp_url), urlsplit(stream_url)
    with ExitStack() as stack:

        def way(parts: SplitResult, port: int) -> Proxy:
            return stack.enter_context(Proxy(parts.hostname or "", parts.port or 0, listens_on=port))

        ports = [free_port((0, -120)) for _ in range(2)]
        yield [(way(amqp, port), way(stream, port - 120)) for port in ports]


Publish = Callable[[int], object]


@contextmanager
def by_celery(urls: str, database_url: str, stream: str) -> Iterator[Publish]:
    """An app with a list of URLs, whose tasks are copied."""
    queue, app = unique_name("celery"), Celery(broker=urls.split(";"))
    relatum.intercept(app, database=database_url, keys=preset("celery"), copy_to=stream)
    yield lambda number: app.send_task("charge", task_id=str(number), queue=queue, ignore_result=True)
    relatum.release(app)
    app.close()


@contextmanager
def by_dramatiq(urls: str, database_url: str, stream: str) -> Iterator[Publish]:
    queue, broker = unique_name("dramatiq"), RabbitmqBroker(url=urls)
    relatum.intercept(broker, database=database_url, keys=preset("dramatiq"), copy_to=stream)

    def publish(number: int) -> None:
        broker.declare_queue(queue)
        broker.enqueue(dramatiq.Message(queue, "charge", (), {}, {}, message_id=str(number)))

    yield publish
    relatum.release(broker)
    broker.close()


@pytest.mark.parametrize(("client", "is_up"), [(by_celery, False), (by_celery, True), (by_dramatiq, True)])
def test_a_recorder_in_the_process_goes_where_its_client_goes(
    place: Place, nodes: list[tuple[Proxy, Proxy]], client: Any, is_up: bool
) -> None:
    """By the client's own URLs, with no other word: its node ends while it publishes, or does not answer at first."""

    def end_first() -> None:
        for way in nodes[0]:
            way.accepts = False
            way.cut()

    if not is_up:
        end_first()
    with client(";".join(amqp.url(place.amqp) for amqp, _ in nodes), place.database, place.stream) as publish:
        for number in range(20):
            if is_up and number == 10:
                place.wait_recorded()
                end_first()
            publish(number)
        place.wait_recorded()
    key = f"{client.__name__.removeprefix('by_')}_id"
    rows = {value for name, value, _ in rows_of(place.engine, place.stream) if name == key}
    assert rows == {str(number) for number in range(20)}
