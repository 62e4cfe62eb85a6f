"""Intercepted Celery apps against a real broker: what their processes publish, and what others do beside them."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import billiard
import pytest
from celery import Celery
from celery.local import Proxy
from kombu import Connection, pools

import relatum
from relatum.errors import KeyDefinitionConflict
from relatum.keys import preset
from relatum_consumer import Relations
from tests.support import unique_name
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
    """An app with one task, `add`."""
    app = Celery("tests", broker=url, set_as_current=False)
    app.conf.update(task_default_queue=queue, broker_transport_options={"confirm_publish": True})

    @app.task(name="add", shared=False)
    def add(x: int, y: int) -> int:
        return x + y

    return app


def send(app: Celery) -> str:
    """Send a task; gives its id."""
    return str(app.tasks["add"].delay(1, 2).id)


def taken(url: str, queue: str) -> Any:
    """The next task message, as it lies in its queue."""
    with Connection(url) as connection:
        message = connection.default_channel.basic_get(queue, no_ack=True)
        assert message is not None
        return message


@pytest.mark.parametrize("is_current", [False, True])
def test_an_app_is_intercepted_before_it_has_settings(amqp_url: str, queue: str, is_current: bool) -> None:
    """Nothing is opened by the line itself; what the app publishes then has an id, and else is as Celery made it.

    Celery's `current_app` stands for the app.
    """
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
    """Equal settings have one pool in Celery; the other app's tasks are sent as they are.

    What is published by a producer that is held goes as it is once the app is released, and starts no recorder that
    nobody would end. A broker in memory is left alone: an app's own tests go on as they were.
    """
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
        for is_stamped in (True, False):
            producer.publish(b"", routing_key=queue)
            assert ("message_id" in taken(amqp_url, queue).properties) == is_stamped
            relatum.release(ours)
    # Threads that resolve names are the process's, and end when idle.
    assert {thread.name for thread in threading.enumerate()} <= threads | {"relatum-resolving"}
    assert relatum.statistics(ours).published == 1
    in_memory = relatum.intercept(new_app(queue, "memory://"), copy_to="celery.tasks")
    in_memory.conf.broker_transport_options = {}
    assert send(in_memory)
    relatum.release(in_memory)


def test_other_definitions_in_the_database_are_told_before_a_task_is_sent(place: Place, queue: str) -> None:
    """Each publish says so, and the queue stays empty."""
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
    with Connection(place.amqp) as connection:
        assert connection.default_channel.basic_get(queue) is None


def test_a_process_that_may_fork_has_imported_what_its_children_need() -> None:
    """Else each child of a worker would take half a second for it, with the first task that it sends."""
    program = (
        "import sys, celery, relatum\n"
        "relatum.intercept(celery.Celery(), database='postgresql://nobody@127.0.0.1:1/none')\n"
        "before = set(sys.modules)\n"
        "import relatum.recording.embedded\n"
        "assert set(sys.modules) == before"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=90)


def test_each_process_records_what_it_publishes(place: Place, queue: str, copies: str) -> None:
    """A child goes on with the app that its parent intercepted and used; both find all tasks."""
    app = relatum.intercept(new_app(queue, place.amqp), database=place.database, keys=preset("celery"), copy_to=copies)
    tasks = [in_child(lambda: send(app)), send(app), unique_name("task")]
    # As a worker forks: Celery then drops its pools in the child.
    child = billiard.Process(target=app.tasks["add"].apply_async, args=((1, 2),), kwargs={"task_id": tasks[-1]})
    child.start()
    child.join(90)
    assert child.exitcode == 0
    tasks.append(send(app))
    place.wait_recorded(copies)
    with Relations(place.amqp, place.database) as relations:
        for offset, task in enumerate(tasks):
            assert [message.offset for message in relations.find("celery_id", task)] == [offset]
    relatum.release(app)


def test_what_a_terminated_pool_process_published_a_recorder_of_its_own_has(
    place: Place, queue: str, copies: str
) -> None:
    """As docs/celery.md says to do: such a process can neither record what it published last, nor say so."""
    options: dict[str, Any] = {"database": place.database, "keys": preset("celery"), "copy_to": copies}
    app = relatum.intercept(new_app(queue, place.amqp), recorder="external", **options)

    def publish_and_die(task: str) -> None:
        app.tasks["add"].apply_async((1, 2), task_id=task)
        os.kill(os.getpid(), signal.SIGKILL)

    with place.recording(copies, keys=preset("celery")), Relations(place.amqp, place.database) as relations:
        task = unique_name("task")
        child = billiard.Process(target=publish_and_die, args=(task,))
        child.start()
        child.join(90)
        assert child.exitcode == -signal.SIGKILL
        place.wait_recorded(copies)
        assert [message.stream for message in relations.find("celery_id", task)] == [copies]
    relatum.release(app)
