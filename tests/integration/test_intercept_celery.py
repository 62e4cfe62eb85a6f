"""Intercepted Celery apps against a real broker: what their processes publish, and what others do beside them."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import billiard
import pytest
from celery import Celery
from celery.local import Proxy
from kombu import Connection, Producer, pools

import relatum
from relatum.errors import KeyDefinitionConflict
from relatum.keys import preset
from relatum_consumer import Relations
from tests.support import run_python, unique_name
from tests.support.forking import in_child
from tests.support.place import Place


@pytest.fixture
def queue(amqp_url: str) -> Iterator[str]:
    """The name of a queue for tasks, which nobody works off."""
    name = unique_name("celery")
    yield name
    with Connection(amqp_url) as connection:
        connection.default_channel.queue_delete(name)
        connection.default_channel.exchange_delete(name)
    pools.reset()


def new_app(queue: str, url: str | None) -> Celery:
    app = Celery("tests", broker=url, set_as_current=False)
    app.conf.update(task_default_queue=queue, broker_transport_options={"confirm_publish": True})

    @app.task(name="add", shared=False)
    def add(x: int, y: int) -> int:
        return x + y

    return app


def send(app: Celery) -> str:
    return str(app.tasks["add"].delay(1, 2).id)


def taken(url: str, queue: str) -> Any:
    """The next task message of its queue; None if there is none."""
    with Connection(url) as connection:
        return connection.default_channel.basic_get(queue, no_ack=True)


@pytest.mark.parametrize("is_current", [False, True])
def test_an_app_is_intercepted_before_it_has_settings(amqp_url: str, queue: str, is_current: bool) -> None:
    """An app or its proxy is intercepted before it has settings, and its messages then have ids until the release."""
    app = new_app(queue, None)
    given = Proxy(lambda: app) if is_current else app
    assert relatum.intercept(given) is given
    assert type(app) is Celery
    app.conf.broker_url = amqp_url
    task = send(app)
    message = taken(amqp_url, queue)
    assert message.headers["id"] == message.properties["correlation_id"] == task
    assert message.properties["message_id"]
    assert "BCC" not in message.headers
    assert relatum.statistics(given).published == relatum.statistics(app).published == 1
    relatum.release(given)
    send(app)
    assert "message_id" not in taken(amqp_url, queue).properties


def test_other_apps_and_released_ones_publish_bare(amqp_url: str, database_url: str, queue: str) -> None:
    """Apps that share a pool, released apps and their producers, and apps in memory publish as without interception."""
    ours, others = new_app(queue, amqp_url), new_app(queue, amqp_url)

    def are_stamped() -> list[bool]:
        stamped = []
        for app in (ours, others, ours):
            send(app)
            stamped.append("message_id" in taken(amqp_url, queue).properties)
        return stamped

    assert are_stamped() == [False, False, False]
    before = set(vars(ours))
    relatum.intercept(ours)
    assert are_stamped() == [True, False, True]
    assert relatum.release(ours) is ours
    assert set(vars(ours)) == before
    assert are_stamped() == [False, False, False]
    assert ours.pool is others.pool
    threads = {thread.name for thread in threading.enumerate()}
    relatum.intercept(ours, database=database_url)
    with ours.producer_or_acquire() as producer:
        assert isinstance(producer, Producer)
        for is_stamped in (True, False):
            # The last positional argument is the exchange.
            producer.publish(b"", queue, 2, False, False, 0, None, None, None, None, None, "")
            properties = taken(amqp_url, queue).properties
            assert ("message_id" in properties, properties["delivery_mode"]) == (is_stamped, 2)
            relatum.release(ours)
    # The connecting threads belong to the process, and end when they are idle.
    assert {thread.name for thread in threading.enumerate()} <= threads | {"relatum-connecting"}
    assert relatum.statistics(ours).published == 1
    in_memory = relatum.intercept(new_app(queue, "memory://"), copy_to="celery.tasks")
    in_memory.conf.broker_transport_options = {}
    assert send(in_memory)
    relatum.release(in_memory)


def test_a_producer_that_two_calls_use_is_intercepted_until_both_end(amqp_url: str, queue: str) -> None:
    """The end of one call leaves a producer that was passed to another one intercepted."""
    ours, others = relatum.intercept(new_app(queue, amqp_url)), new_app(queue, amqp_url)
    send(ours)
    taken(amqp_url, queue)
    with others.producer_or_acquire() as producer, ExitStack() as first:
        first.enter_context(ours.producer_or_acquire(producer))
        with ours.producer_or_acquire(producer=producer):
            first.close()
            producer.publish(b"", queue)
            assert "message_id" in taken(amqp_url, queue).properties
        assert "publish" not in vars(producer)
    relatum.release(ours)


def test_other_definitions_in_the_database_are_told_before_a_task_is_sent(place: Place, queue: str) -> None:
    """Every publish with other key definitions than the database's is refused, and the queue stays empty."""
    first = relatum.intercept(new_app(queue, place.amqp), database=place.database, keys=["id"])
    send(first)
    relatum.release(first)
    taken(place.amqp, queue)
    other = relatum.KeyDefinition("id", "property:correlation_id")
    app = relatum.intercept(new_app(queue, place.amqp), database=place.database, keys=[other])
    for _ in range(2):
        with pytest.raises(KeyDefinitionConflict):
            send(app)
    relatum.release(app)
    assert taken(place.amqp, queue) is None


def test_a_process_that_may_fork_has_imported_what_its_children_need() -> None:
    """A process that intercepts an app has imported all that its forked children need to record."""
    program = (
        "import sys, celery, relatum\n"
        "relatum.intercept(celery.Celery(), database='postgresql://nobody@127.0.0.1:1/none')\n"
        "before = set(sys.modules)\n"
        "import relatum.recording.embedded\n"
        "assert set(sys.modules) == before"
    )
    run_python("-c", program)


def exit_code_of_child(target: Callable[[], object]) -> int | None:
    """Fork as a worker does: Celery then drops its pools in the child."""
    child = billiard.Process(target=target)
    child.start()
    child.join(90)
    return child.exitcode  # type: ignore[no-any-return]


def test_each_process_records_what_it_publishes(place: Place, queue: str, copies: str) -> None:
    """A parent and its forked children record what they publish through an app that the parent intercepted."""
    app = relatum.intercept(new_app(queue, place.amqp), database=place.database, keys=preset("celery"), copy_to=copies)
    tasks = [in_child(lambda: send(app)), send(app), unique_name("task")]
    send_task = app.tasks["add"].apply_async
    assert exit_code_of_child(lambda: send_task((1, 2), task_id=tasks[-1])) == 0
    tasks.append(send(app))
    place.wait_recorded(copies)
    with Relations(place.amqp, place.database) as relations:
        for offset, task in enumerate(tasks):
            assert [message.offset for message in relations.find("celery_id", task)] == [offset]
    relatum.release(app)


def test_what_a_terminated_pool_process_published_a_recorder_of_its_own_has(
    place: Place, queue: str, copies: str
) -> None:
    """A recorder of its own records what a pool process published before it was killed."""
    options: dict[str, Any] = {"database": place.database, "keys": preset("celery"), "copy_to": copies}
    app, task = relatum.intercept(new_app(queue, place.amqp), recorder="external", **options), unique_name("task")

    def publish_and_die() -> None:
        app.tasks["add"].apply_async((1, 2), task_id=task)
        os.kill(os.getpid(), signal.SIGKILL)

    with place.recording(copies, keys=preset("celery")), Relations(place.amqp, place.database) as relations:
        assert exit_code_of_child(publish_and_die) == -signal.SIGKILL
        place.wait_recorded(copies)
        assert [message.stream for message in relations.find("celery_id", task)] == [copies]
    relatum.release(app)
