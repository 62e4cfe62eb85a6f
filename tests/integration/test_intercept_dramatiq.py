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
from tests.support import broker_connection, delete_stream, unique_name, wait_recorded, wait_until
from tests.support.forking import in_child
from tests.support.proxy import Proxy

LIMIT_MS = 240_000


@pytest.fixture
def queue(amqp_url: str) -> Iterator[str]:
    """The name of a queue of dramatiq's."""
    name = unique_name("dramatiq")
    yield name
    with broker_connection(amqp_url) as connection:
        for each in (name, f"{name}.DQ", f"{name}.XQ"):
            connection.channel().queue_delete(each)


@pytest.fixture(params=[False, True], ids=["plain", "confirms"])
def rabbitmq(request: pytest.FixtureRequest, amqp_url: str) -> Iterator[RabbitmqBroker]:
    """A rabbitmq, not intercepted yet."""
    rabbitmq = RabbitmqBroker(url=amqp_url, confirm_delivery=request.param)
    yield rabbitmq
    relatum.release(rabbitmq)
    rabbitmq.close()


def got(amqp_url: str, queue: str) -> Any:
    """Properties and body of the next message in a queue."""
    with broker_connection(amqp_url) as connection:
        channel = connection.channel()
        _, properties, body = wait_until(
            lambda: (found := channel.basic_get(queue, auto_ack=True))[0] and found, what="a message"
        )
        return properties, body


def actor(rabbitmq: RabbitmqBroker, queue: str, done: list[Any] | None = None) -> Any:
    """An actor that notes what it was given."""

    @dramatiq.actor(broker=rabbitmq, queue_name=queue, max_retries=0)
    def charge(order: str) -> None:
        if done is not None:
            done.append(order)

    return charge


@pytest.mark.parametrize("is_intercepted", [False, True], ids=["bare", "intercepted"])
def test_actors_work_as_ever(rabbitmq: RabbitmqBroker, queue: str, *, is_intercepted: bool) -> None:
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


def test_each_thread_publishes_what_it_lacks(amqp_url: str, rabbitmq: RabbitmqBroker, queue: str) -> None:
    """Threads have connections of their own, from before and from later; released, they are bare again."""
    charge = actor(rabbitmq, queue)
    charge.send("early")
    assert got(amqp_url, queue)[0].message_id is None
    before = set(vars(rabbitmq))
    relatum.intercept(rabbitmq)

    def send() -> None:
        charge.send("later")

    for publish in (send, lambda: _in_thread(send)):
        publish()
        properties, body = got(amqp_url, queue)
        assert (properties.message_id is not None, b"later" in body) == (True, True)
    assert relatum.statistics(rabbitmq).published == 2
    relatum.release(rabbitmq)
    assert set(vars(rabbitmq)) == before
    for publish in (send, lambda: _in_thread(send)):
        publish()
        assert got(amqp_url, queue)[0].message_id is None


def _in_thread(act: Any) -> None:
    thread = threading.Thread(target=act)
    thread.start()
    thread.join()


def test_a_connection_that_was_lost_is_replaced_by_an_intercepted_one(
    amqp_url: str, rabbitmq: RabbitmqBroker, queue: str
) -> None:
    """Dramatiq connects anew and sends again."""
    relatum.intercept(rabbitmq)
    charge = actor(rabbitmq, queue)
    charge.send("o1")
    assert got(amqp_url, queue)[0].message_id is not None
    rabbitmq.connection.close()
    charge.send("o2")
    assert got(amqp_url, queue)[0].message_id is not None


class TimeIsUp(BaseException):
    """As dramatiq ends an actor that takes too long, wherever it is."""


# pika leaves open what it was connecting then.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_what_ends_the_first_message_leaves_no_bare_connection(amqp_url: str, queue: str) -> None:
    """The connection that was being intercepted is not used by the next message."""

    def end(*_: object) -> None:
        raise TimeIsUp

    rabbitmq = RabbitmqBroker(url=amqp_url)
    charge = actor(rabbitmq, queue)
    before = signal.signal(signal.SIGALRM, end)
    with Proxy.to(amqp_url) as proxy:
        proxy.mode = "blackhole"
        relatum.intercept(rabbitmq, broker_url=proxy.url(amqp_url), copy_to=f"{queue}-copies")
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
        assert got(amqp_url, queue)[0].message_id is not None
        relatum.release(rabbitmq)
    rabbitmq.close()
    delete_stream(amqp_url, f"{queue}-copies")
    # What is left open is found now, and not in the midst of another test.
    gc.collect()


@pytest.mark.parametrize("rabbitmq", [False], indirect=True)
def test_released_while_the_first_message_waits_it_is_bare(
    amqp_url: str, database_url: str, rabbitmq: RabbitmqBroker, queue: str
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
        relatum.intercept(rabbitmq, database=database_url, broker_url=proxy.url(amqp_url), copy_to=f"{queue}-copies")
        thread = threading.Thread(target=send)
        thread.start()
        wait_until(lambda: proxy.opened, what="a look at the stream of copies")
        relatum.release(rabbitmq)
        proxy.mode = "pass"
        thread.join()
        assert got(amqp_url, queue)[0].message_id is None
        assert "_relatum_interception" not in vars(held[0])
        assert not {thread.name for thread in threading.enumerate() if thread.name == "relatum-embedded"} - before
    delete_stream(amqp_url, f"{queue}-copies")


def test_each_process_has_its_own(amqp_url: str, rabbitmq: RabbitmqBroker, queue: str) -> None:
    """A process forked off before anything was sent publishes through an interception of its own."""
    relatum.intercept(rabbitmq)
    charge = actor(rabbitmq, queue)

    def publish() -> int:
        charge.send("from the child")
        return relatum.statistics(rabbitmq).published

    assert in_child(publish) == 1
    assert got(amqp_url, queue)[0].message_id is not None
    charge.send("from the parent")
    assert relatum.statistics(rabbitmq).published == 1


def test_a_value_that_cannot_be_recorded_is_an_error_before_sending(
    amqp_url: str, rabbitmq: RabbitmqBroker, queue: str
) -> None:
    """It is raised where the message was to be sent."""
    relatum.intercept(rabbitmq, keys=[KeyDefinition("order", lambda body: json.loads(body)["args"][0], type="integer")])
    charge = actor(rabbitmq, queue)
    charge.send(7)
    with pytest.raises(InvalidRelationshipKey):
        charge.send("no number")


@pytest.mark.parametrize("rabbitmq", [False], indirect=True)
def test_copies_make_messages_found(
    amqp_url: str, database_url: str, engine: sa.Engine, rabbitmq: RabbitmqBroker, queue: str
) -> None:
    """One line: each message to a queue has a copy in a stream, and what belongs to it is found."""
    stream = unique_name("copies")
    keys = [*preset("dramatiq"), KeyDefinition("order", "body:$.args[0]")]
    relatum.intercept(rabbitmq, database=database_url, keys=keys, copy_to=stream)
    charge = actor(rabbitmq, queue)
    first, second = charge.send("o1"), charge.send("o1")
    charge.send("o2")
    wait_recorded(amqp_url, engine, stream)
    properties, body = got(amqp_url, queue)
    assert "BCC" not in (properties.headers or {})
    with Relations(amqp_url, database_url) as relations:
        answer = relations.related((None, properties, body), by="order")
        assert answer.itself == ((stream, 0),)
        assert answer.ids == ((stream, 1),)
        (own,) = relations.find("dramatiq_id", first.message_id)
        assert relations.related(own, by="order").ids == answer.ids
        assert relations.find("dramatiq_id", second.message_id).ids == answer.ids
    relatum.release(rabbitmq)
    delete_stream(amqp_url, stream)


@pytest.mark.parametrize("rabbitmq", [False], indirect=True)
def test_copies_of_the_callers_own_stay(rabbitmq: RabbitmqBroker, amqp_url: str, database_url: str, queue: str) -> None:
    """A list of more routing keys is kept; what goes to the stream itself lies there once."""
    stream, another = unique_name("copies"), unique_name("another")
    relatum.intercept(rabbitmq, database=database_url, copy_to=stream)
    channel = rabbitmq.connection.channel()
    channel.queue_declare(queue, durable=True)
    channel.queue_declare(another)
    properties = BasicProperties(headers={"BCC": [another]})
    channel.basic_publish("", queue, b"to three", properties)
    assert properties.headers == {"BCC": [another]}
    channel.basic_publish("", stream, b"once")
    assert [got(amqp_url, each)[1] for each in (queue, another)] == [b"to three"] * 2
    with StreamReader.open(amqp_url) as reader:
        wait_until(lambda: reader.bounds(stream).last == 1, what="both")
        assert [each.body for each in reader.iterate(stream)] == [b"to three", b"once"]
    relatum.release(rabbitmq)
    channel.queue_delete(another)
    delete_stream(amqp_url, stream)


@pytest.mark.parametrize("rabbitmq", [True], indirect=True)
def test_copies_are_refused_where_confirms_tell_that_a_queue_is_gone(rabbitmq: RabbitmqBroker) -> None:
    """The copy would be delivered, and dramatiq would think the message was."""
    with pytest.raises(ConfigurationError, match="confirm_delivery"):
        relatum.intercept(rabbitmq, copy_to="copies")
    assert "_relatum_interception" not in vars(rabbitmq)
