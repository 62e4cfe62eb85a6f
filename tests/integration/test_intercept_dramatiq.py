"""Intercepted brokers of dramatiq against a real broker."""

import gc
import json
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from unittest.mock import Mock

import dramatiq
import pytest
from dramatiq.brokers.rabbitmq import RabbitmqBroker
from pika import BasicProperties

import relatum
from relatum.errors import ConfigurationError, InvalidRelationshipKey
from relatum.keys import KeyDefinition, preset
from relatum_consumer import Relations
from tests.contract._clients import Queue
from tests.support import broker_connection, unique_name, wait_recorded, wait_until
from tests.support.forking import in_child
from tests.support.place import Place
from tests.support.proxy import Proxy


@pytest.fixture
def queue(amqp_url: str) -> Iterator[Queue]:
    name = unique_name("dramatiq")
    with broker_connection(amqp_url) as connection:
        yield Queue(connection.channel(), name)
        for each in (name, f"{name}.DQ", f"{name}.XQ"):
            connection.channel().queue_delete(each)


@dataclass(frozen=True)
class Bed:
    """A broker of dramatiq's, not intercepted yet, its queue, and an actor of it that notes what it was given."""

    rabbitmq: RabbitmqBroker
    queue: Queue
    charge: Any
    done: list[str]

    def has_id(self) -> bool:
        return self.queue.get()[0].message_id is not None


@pytest.fixture
def bed(request: pytest.FixtureRequest, amqp_url: str, queue: Queue) -> Iterator[Bed]:
    """By a broker without confirms, which refuse copies, or by one with them."""
    rabbitmq, done = RabbitmqBroker(url=amqp_url, confirm_delivery=getattr(request, "param", False)), list[str]()

    @dramatiq.actor(broker=rabbitmq, queue_name=queue.name, max_retries=0)
    def charge(order: str) -> None:
        done.append(order)

    yield Bed(rabbitmq, queue, charge, done)
    relatum.release(rabbitmq)
    rabbitmq.close()


BOTH = pytest.mark.parametrize("bed", [False, True], indirect=True, ids=["plain", "confirms"])


@BOTH
@pytest.mark.parametrize("is_intercepted", [False, True], ids=["bare", "intercepted"])
def test_actors_work_as_ever(bed: Bed, *, is_intercepted: bool) -> None:
    """A worker handles messages, a delayed one and a pipeline, whether its broker is intercepted or not."""
    if is_intercepted:
        assert relatum.intercept(bed.rabbitmq) is bed.rabbitmq
    worker = dramatiq.Worker(bed.rabbitmq, worker_threads=2)
    worker.start()
    try:
        bed.charge.send("o1")
        bed.charge.send_with_options(args=("o2",), delay=10)
        last = bed.charge.message_with_options(args=("o4",), pipe_ignore=True)
        dramatiq.pipeline([bed.charge.message("o3"), last], broker=bed.rabbitmq).run()
        wait_until(lambda: sorted(bed.done) == ["o1", "o2", "o3", "o4"], what="all four")
    finally:
        worker.stop()


@BOTH
def test_each_thread_publishes_what_it_lacks(bed: Bed) -> None:
    """Each thread's connection, from before, later or after a loss, is intercepted until the broker is released."""
    bed.charge.send("early")
    assert not bed.has_id()
    before = set(vars(bed.rabbitmq))
    relatum.intercept(bed.rabbitmq)

    def sent() -> list[bool]:
        """Whether messages of this thread and of a new one have ids."""
        bed.charge.send("later")
        with ThreadPoolExecutor(1) as pool:
            pool.submit(bed.charge.send, "later").result()
        return [bed.has_id(), bed.has_id()]

    assert sent() == [True, True]
    assert relatum.statistics(bed.rabbitmq).published == 2
    bed.rabbitmq.connection.close()
    assert sent() == [True, True]
    relatum.release(bed.rabbitmq)
    assert set(vars(bed.rabbitmq)) == before
    assert sent() == [False, False]


class TimeIsUp(BaseException):
    """As dramatiq ends an actor that takes too long, wherever it is."""


# pika then leaves the connection that it was opening.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_what_ends_the_first_message_leaves_no_bare_connection(amqp_url: str, copies: str, bed: Bed) -> None:
    """A connection whose interception was interrupted is not used by the next message."""
    before = signal.signal(signal.SIGALRM, Mock(side_effect=TimeIsUp))
    with Proxy.to(amqp_url) as proxy, ThreadPoolExecutor(1) as pool:
        proxy.mode = "blackhole"
        relatum.intercept(bed.rabbitmq, broker=proxy.url(amqp_url), copy_to=copies)

        def interrupt() -> None:
            wait_until(lambda: proxy.opened, what="a look at the stream of copies")
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGALRM)

        interrupting = pool.submit(interrupt)
        with pytest.raises(TimeIsUp):
            bed.charge.send("o1")
        interrupting.result()
        signal.signal(signal.SIGALRM, before)
        proxy.mode = "pass"
        bed.charge.send("o2")
        assert bed.has_id()
        relatum.release(bed.rabbitmq)
    bed.rabbitmq.close()
    # Find resources left open now, not in the middle of another test.
    gc.collect()


def test_released_while_the_first_message_waits_it_is_bare(place: Place, copies: str, bed: Bed) -> None:
    """A broker that is released while its first message waits sends it bare and starts no recorder."""

    def send() -> Any:
        bed.charge.send("o1")
        return bed.rabbitmq.connection

    before = {thread.name for thread in threading.enumerate()}
    with Proxy.to(place.amqp) as proxy, ThreadPoolExecutor(1) as pool:
        proxy.mode = "frozen"
        relatum.intercept(bed.rabbitmq, database=place.database, broker=proxy.url(place.amqp), copy_to=copies)
        sending = pool.submit(send)
        wait_until(lambda: proxy.opened, what="a look at the stream of copies")
        relatum.release(bed.rabbitmq)
        proxy.mode = "pass"
        assert "_relatum_interception" not in vars(sending.result())
        assert not bed.has_id()
        assert not {thread.name for thread in threading.enumerate() if thread.name == "relatum-recorder"} - before


@BOTH
def test_each_process_has_its_own(bed: Bed) -> None:
    """A forked process publishes through an interception of its own, and a bad value is an error in `send`."""
    order = KeyDefinition("order", lambda body: json.loads(body)["args"][0], type="integer")
    relatum.intercept(bed.rabbitmq, keys=[order])

    def publish() -> int:
        bed.charge.send(7)
        return relatum.statistics(bed.rabbitmq).published

    assert in_child(publish) == 1
    assert bed.has_id()
    assert publish() == 1
    with pytest.raises(InvalidRelationshipKey):
        bed.charge.send("no number")


def test_copies_make_messages_found(place: Place, copies: str, bed: Bed, relations: Relations) -> None:
    """A copy of each message to a queue is recorded and found, beside other `BCC` keys, and none of a copy itself."""
    keys = [*preset("dramatiq"), KeyDefinition("order", "body:$.args[0]")]
    relatum.intercept(bed.rabbitmq, database=place.database, keys=keys, copy_to=copies)
    first, second = bed.charge.send("o1"), bed.charge.send("o1")
    bed.charge.send("o2")
    wait_recorded(place.amqp, place.engine, copies)
    properties, body = bed.queue.get()
    assert "BCC" not in (properties.headers or {})
    answer = relations.related((None, properties, body), by="order")
    assert answer.self_ids == ((copies, 0),)
    assert answer.ids == ((copies, 1),)
    (own,) = relations.find("dramatiq_id", first.message_id)
    assert relations.related(own, by="order").ids == answer.ids
    assert relations.find("dramatiq_id", second.message_id).ids == answer.ids
    channel, another = bed.rabbitmq.connection.channel(), Queue(bed.queue.channel, unique_name("another"))
    channel.queue_declare(another.name)
    properties = BasicProperties(headers={"BCC": [another.name]})
    channel.basic_publish("", bed.queue.name, b"to three", properties)
    assert properties.headers == {"BCC": [another.name]}
    channel.basic_publish("", copies, b"once")
    assert another.get()[1] == b"to three"
    assert [bed.queue.get()[1] for _ in range(3)][-1] == b"to three"
    wait_until(lambda: [each.body for each in place.messages(copies)[3:]] == [b"to three", b"once"], what="both")
    channel.queue_delete(another.name)


@pytest.mark.parametrize("bed", [True], indirect=True, ids=["confirms"])
def test_copies_are_refused_where_confirms_tell_that_a_queue_is_gone(bed: Bed) -> None:
    """Copies are refused with confirms, which would then hide that a queue is gone."""
    with pytest.raises(ConfigurationError, match="confirm_delivery"):
        relatum.intercept(bed.rabbitmq, copy_to="copies")
    assert "_relatum_interception" not in vars(bed.rabbitmq)
