"""Intercepted brokers of dramatiq against a real broker."""

import gc
import json
import signal
import threading
from collections.abc import Iterator
from typing import Any

import dramatiq
import pytest
import sqlalchemy as sa
from dramatiq.brokers.rabbitmq import RabbitmqBroker
from pika import BasicProperties

import relatum
from relatum.errors import ConfigurationError, InvalidRelationshipKey
from relatum.keys import KeyDefinition, preset
from relatum.reading import StreamReader
from relatum_consumer import Relations
from tests.contract._clients import Queue
from tests.support import broker_connection, delete_stream, unique_name, wait_recorded, wait_until
from tests.support.forking import in_child
from tests.support.proxy import Proxy


@pytest.fixture
def queue(amqp_url: str) -> Iterator[Queue]:
    """A queue of dramatiq's, which declares it."""
    name = unique_name("dramatiq")
    with broker_connection(amqp_url) as connection:
        yield Queue(connection.channel(), name)
        for each in (name, f"{name}.DQ", f"{name}.XQ"):
            connection.channel().queue_delete(each)


@pytest.fixture
def copies(amqp_url: str) -> Iterator[str]:
    """The name of a stream of copies, which is declared by whoever makes some."""
    name = unique_name("copies")
    yield name
    delete_stream(amqp_url, name)


@pytest.fixture(params=[False, True], ids=["plain", "confirms"])
def rabbitmq(request: pytest.FixtureRequest, amqp_url: str) -> Iterator[RabbitmqBroker]:
    """A rabbitmq, not intercepted yet."""
    rabbitmq = RabbitmqBroker(url=amqp_url, confirm_delivery=request.param)
    yield rabbitmq
    relatum.release(rabbitmq)
    rabbitmq.close()


def actor(rabbitmq: RabbitmqBroker, queue: Queue, done: list[Any] | None = None) -> Any:
    """An actor that notes what it was given."""

    @dramatiq.actor(broker=rabbitmq, queue_name=queue.name, max_retries=0)
    def charge(order: str) -> None:
        if done is not None:
            done.append(order)

    return charge


@pytest.mark.parametrize("is_intercepted", [False, True], ids=["bare", "intercepted"])
def test_actors_work_as_ever(rabbitmq: RabbitmqBroker, queue: Queue, *, is_intercepted: bool) -> None:
    """Messages, a delayed one and a pipeline are worked on, bare or intercepted, by a worker's own threads."""
    done: list[Any] = []
    if is_intercepted:
        assert relatum.intercept(rabbitmq) is rabbitmq
    charge = actor(rabbitmq, queue, done)
    worker = dramatiq.Worker(rabbitmq, worker_threads=2)
    worker.start()
    try:
        charge.send("o1")
        charge.send_with_options(args=("o2",), delay=10)
        last = charge.message_with_options(args=("o4",), pipe_ignore=True)
        dramatiq.pipeline([charge.message("o3"), last], broker=rabbitmq).run()
        wait_until(lambda: sorted(done) == ["o1", "o2", "o3", "o4"], what="all four")
    finally:
        worker.stop()


def test_each_thread_publishes_what_it_lacks(rabbitmq: RabbitmqBroker, queue: Queue) -> None:
    """Threads have connections of their own, from before and from later; released, they are bare again."""
    charge = actor(rabbitmq, queue)
    charge.send("early")
    assert queue.get()[0].message_id is None
    before = set(vars(rabbitmq))
    relatum.intercept(rabbitmq)

    def send() -> None:
        charge.send("later")

    def sent() -> list[bool]:
        """Whether messages of this thread and of a new one have ids."""
        send()
        thread = threading.Thread(target=send)
        thread.start()
        thread.join()
        return [queue.get()[0].message_id is not None for _ in range(2)]

    assert sent() == [True, True]
    assert relatum.statistics(rabbitmq).published == 2
    relatum.release(rabbitmq)
    assert set(vars(rabbitmq)) == before
    assert sent() == [False, False]


def test_a_connection_that_was_lost_is_replaced_by_an_intercepted_one(rabbitmq: RabbitmqBroker, queue: Queue) -> None:
    """Dramatiq connects anew and sends again."""
    relatum.intercept(rabbitmq)
    charge = actor(rabbitmq, queue)
    charge.send("o1")
    assert queue.get()[0].message_id is not None
    rabbitmq.connection.close()
    charge.send("o2")
    assert queue.get()[0].message_id is not None


class TimeIsUp(BaseException):
    """As dramatiq ends an actor that takes too long, wherever it is."""


# pika leaves open what it was connecting then.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_what_ends_the_first_message_leaves_no_bare_connection(amqp_url: str, queue: Queue, copies: str) -> None:
    """The connection that was being intercepted is not used by the next message."""

    def end(*_: object) -> None:
        raise TimeIsUp

    rabbitmq = RabbitmqBroker(url=amqp_url)
    charge = actor(rabbitmq, queue)
    before = signal.signal(signal.SIGALRM, end)
    with Proxy.to(amqp_url) as proxy:
        proxy.mode = "blackhole"
        relatum.intercept(rabbitmq, broker_url=proxy.url(amqp_url), copy_to=copies)
        main = threading.main_thread().ident
        assert main is not None

        def interrupt() -> None:
            wait_until(lambda: proxy.opened, what="a look at the stream of copies")
            signal.pthread_kill(main, signal.SIGALRM)

        thread = threading.Thread(target=interrupt)
        thread.start()
        with pytest.raises(TimeIsUp):
            charge.send("o1")
        thread.join()
        signal.signal(signal.SIGALRM, before)
        proxy.mode = "pass"
        charge.send("o2")
        assert queue.get()[0].message_id is not None
        relatum.release(rabbitmq)
    rabbitmq.close()
    # What is left open is found now, and not in the midst of another test.
    gc.collect()


@pytest.mark.parametrize("rabbitmq", [False], indirect=True)
def test_released_while_the_first_message_waits_it_is_bare(
    amqp_url: str, database_url: str, copies: str, rabbitmq: RabbitmqBroker, queue: Queue
) -> None:
    """The message goes as it is; its connection is left alone, and no recorder begins."""
    charge = actor(rabbitmq, queue)
    held: list[Any] = []

    def send() -> None:
        charge.send("o1")
        held.append(rabbitmq.connection)

    before = {thread.name for thread in threading.enumerate()}
    with Proxy.to(amqp_url) as proxy:
        proxy.mode = "frozen"
        relatum.intercept(rabbitmq, database=database_url, broker_url=proxy.url(amqp_url), copy_to=copies)
        thread = threading.Thread(target=send)
        thread.start()
        wait_until(lambda: proxy.opened, what="a look at the stream of copies")
        relatum.release(rabbitmq)
        proxy.mode = "pass"
        thread.join()
        assert queue.get()[0].message_id is None
        assert "_relatum_interception" not in vars(held[0])
        assert not {thread.name for thread in threading.enumerate() if thread.name == "relatum-embedded"} - before


def test_each_process_has_its_own(rabbitmq: RabbitmqBroker, queue: Queue) -> None:
    """A process forked off before anything was sent publishes through an interception of its own."""
    relatum.intercept(rabbitmq)
    charge = actor(rabbitmq, queue)

    def publish() -> int:
        charge.send("from the child")
        return relatum.statistics(rabbitmq).published

    assert in_child(publish) == 1
    assert queue.get()[0].message_id is not None
    charge.send("from the parent")
    assert relatum.statistics(rabbitmq).published == 1


def test_a_value_that_cannot_be_recorded_is_an_error_before_sending(rabbitmq: RabbitmqBroker, queue: Queue) -> None:
    """It is raised where the message was to be sent."""
    relatum.intercept(rabbitmq, keys=[KeyDefinition("order", lambda body: json.loads(body)["args"][0], type="integer")])
    charge = actor(rabbitmq, queue)
    charge.send(7)
    with pytest.raises(InvalidRelationshipKey):
        charge.send("no number")


@pytest.mark.parametrize("rabbitmq", [False], indirect=True)
def test_copies_make_messages_found(
    amqp_url: str, database_url: str, engine: sa.Engine, copies: str, rabbitmq: RabbitmqBroker, queue: Queue
) -> None:
    """One line: each message to a queue has a copy in a stream, and what belongs to it is found."""
    keys = [*preset("dramatiq"), KeyDefinition("order", "body:$.args[0]")]
    relatum.intercept(rabbitmq, database=database_url, keys=keys, copy_to=copies)
    charge = actor(rabbitmq, queue)
    first, second = charge.send("o1"), charge.send("o1")
    charge.send("o2")
    wait_recorded(amqp_url, engine, copies)
    properties, body = queue.get()
    assert "BCC" not in (properties.headers or {})
    with Relations(amqp_url, database_url) as relations:
        answer = relations.related((None, properties, body), by="order")
        assert answer.itself == ((copies, 0),)
        assert answer.ids == ((copies, 1),)
        (own,) = relations.find("dramatiq_id", first.message_id)
        assert relations.related(own, by="order").ids == answer.ids
        assert relations.find("dramatiq_id", second.message_id).ids == answer.ids


@pytest.mark.parametrize("rabbitmq", [False], indirect=True)
def test_copies_of_the_callers_own_stay(
    amqp_url: str, database_url: str, copies: str, rabbitmq: RabbitmqBroker, queue: Queue
) -> None:
    """A list of more routing keys is kept; what goes to the stream itself lies there once."""
    another = unique_name("another")
    relatum.intercept(rabbitmq, database=database_url, copy_to=copies)
    channel = rabbitmq.connection.channel()
    channel.queue_declare(queue.name, durable=True)
    channel.queue_declare(another)
    properties = BasicProperties(headers={"BCC": [another]})
    channel.basic_publish("", queue.name, b"to three", properties)
    assert properties.headers == {"BCC": [another]}
    channel.basic_publish("", copies, b"once")
    assert [each.get()[1] for each in (queue, Queue(queue.channel, another))] == [b"to three"] * 2
    with StreamReader.open(amqp_url) as reader:
        wait_until(lambda: reader.bounds(copies).last == 1, what="both")
        assert [each.body for each in reader.iterate(copies)] == [b"to three", b"once"]
    channel.queue_delete(another)


@pytest.mark.parametrize("rabbitmq", [True], indirect=True)
def test_copies_are_refused_where_confirms_tell_that_a_queue_is_gone(rabbitmq: RabbitmqBroker) -> None:
    """The copy would be delivered, and dramatiq would think the message was."""
    with pytest.raises(ConfigurationError, match="confirm_delivery"):
        relatum.intercept(rabbitmq, copy_to="copies")
    assert "_relatum_interception" not in vars(rabbitmq)
