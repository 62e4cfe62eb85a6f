"""The keys of libraries, read out of what the libraries themselves publish."""

import json
from collections.abc import Iterator
from typing import Any

import pika
import pytest
from pika.adapters.blocking_connection import BlockingChannel

from relatum.keys import preset
from relatum_consumer import Relations
from tests.support import run_python, unique_name, wait_until
from tests.support.place import Place


@pytest.fixture
def exchange(place: Place, channel: BlockingChannel) -> Iterator[str]:
    """A topic exchange, of which the stream gets every message."""
    name = unique_name("exchange")
    channel.exchange_declare(name, "topic", durable=True)
    channel.queue_bind(place.stream, name, "#")
    yield name
    channel.exchange_delete(name)


def run(*arguments: str) -> dict[str, Any]:
    """Run one of the programs; gives what it printed."""
    return dict(json.loads(run_python("-m", "tests.integration._libraries", *arguments).stdout.splitlines()[-1]))


def record(place: Place, name: str, *, count: int) -> None:
    """Record the stream's messages by a preset's keys, once there are so many."""
    wait_until(lambda: place.bounds().last == count - 1, what=f"{count} messages")
    place.record(keys=preset(name))


def test_what_belongs_to_a_task_of_celery(place: Place, exchange: str, relations: Relations) -> None:
    """The tasks of a chain are a line of causes, and those of a chord and what follows them share a group."""
    told = run("celery", place.amqp, exchange)
    assert told["sums"] == [10, 6]
    record(place, "celery", count=6)
    (last,) = relations.find("celery_id", told["chain"][-1]).messages
    trace = relations.trace(last)
    ids = {message.id: message.headers["id"] for message in trace.messages}
    assert list(ids.values()) == told["chain"]
    causes = [(ids[edge.cause], ids[edge.effect]) for edge in trace.edges if edge.cause is not None]
    assert causes == list(zip(told["chain"][:-1], told["chain"][1:], strict=True))
    assert [m.headers["id"] for m in relations.find("celery_root", told["chain"][0])] == told["chain"]
    (group,) = {relations.read(place.stream, offset).headers["group"] for offset in (3, 4, 5)}
    assert [m.offset for m in relations.find("celery_group", group)] == [3, 4, 5]


def test_the_answer_of_a_task_names_it(place: Place, relations: Relations) -> None:
    """The result that Celery's backend `rpc://` sends is an effect of its task."""
    place.put((b"[[1,2],{},{}]", {"id": "t-1", "task": "add"}))
    run("answer", place.amqp, place.stream)
    record(place, "celery", count=2)
    (edge,) = relations.trace(relations.read(place.stream, 0)).edges
    assert (edge.cause and edge.cause.offset, edge.effect.offset, edge.key) == (0, 1, "celery_result")


def test_the_messages_of_dramatiq(place: Place, relations: Relations, channel: BlockingChannel) -> None:
    """A message of dramatiq and the one before it in a pipeline are found by ids in their bodies."""
    queue, taken = unique_name("dramatiq"), []
    told = run("dramatiq", place.amqp, queue)
    # dramatiq publishes to the default exchange: its message is put into the stream unchanged.
    wait_until(lambda: channel.queue_declare(queue, passive=True).method.message_count == 2, what="both messages")
    for _ in range(2):
        _, properties, body = channel.basic_get(queue, auto_ack=True)
        taken.append((body, pika.BasicProperties(**vars(properties))))
    for name in (queue, f"{queue}.DQ", f"{queue}.XQ"):
        channel.queue_delete(name)
    place.put(*taken)
    record(place, "dramatiq", count=2)
    assert [m.offset for m in relations.find("dramatiq_id", told["alone"])] == [0]
    assert [m.offset for m in relations.find("dramatiq_next", told["following"])] == [1]


def test_the_messages_of_faststream(place: Place, exchange: str, relations: Relations) -> None:
    """A request of FastStream and its handler's answer share the correlation."""
    told = run("faststream", place.amqp, exchange)
    record(place, "faststream", count=2)
    found = relations.find("faststream_correlation", told["correlation"]).messages
    assert [message.offset for message in found] == [0, 1]
    assert relations.related(found[0]).ids == (found[1].id,)
    assert [m.offset for m in relations.find("faststream_id", found[1].properties.message_id)] == [1]
