"""Lookups of messages that were consumed: as each client gives them, against what was read from the stream."""

import json
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from typing import Any

import pika
import pytest
from pika.adapters.blocking_connection import BlockingChannel, BlockingConnection

from relatum.keys import KeyDefinition
from relatum_consumer import Relations, Status
from tests.integration._consumers import told
from tests.support import run_python, unique_name
from tests.support.place import Place

KEYS = [
    KeyDefinition("order_id", type="integer"),
    KeyDefinition("when", type="timestamp"),
    KeyDefinition("from_table", "header:$.table.id or header:backup"),
    KeyDefinition("kind", "property:type"),
    KeyDefinition("item", "body:$.items[*]"),
    KeyDefinition("absent", "header:nobody-has-it"),
]
MOMENT = datetime(2026, 11, 23, 7, 30, tzinfo=UTC)


def run(place: Place, *consumed: str) -> dict[str, Any]:
    """Run consumers one after the other, and return what each printed."""
    done = run_python("-m", "tests.integration._consumers", place.amqp, place.database, *consumed, timeout_s=400)
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.fixture
def channel(_stream_maker: BlockingConnection) -> Iterator[BlockingChannel]:
    """A channel in confirm mode whose connection has no heartbeat: it is idle while other processes consume."""
    with _stream_maker.channel() as channel:
        channel.confirm_delivery()
        yield channel


@pytest.fixture
def queue(channel: BlockingChannel, stream_name: str) -> Iterator[str]:
    """A queue that gets each message of a topic exchange of its name, as the stream does."""
    name = unique_name("queue")
    channel.exchange_declare(name, "topic", durable=True)
    channel.queue_bind(stream_name, name, "#")
    channel.queue_declare(name, durable=True)
    channel.queue_bind(name, name, "#")
    yield name
    channel.queue_delete(name)
    channel.exchange_delete(name)


def publish(
    channel: BlockingChannel, exchange: str, *, ids: Iterable[str | None] = ("m-0", "m-1", "m-2", "m-3")
) -> None:
    """The first shares something with each of the others, by another key each; the last is a stranger."""
    bodies = [["a", "b"], ["z"], ["b", "x"], ["y"]]
    headers: list[dict[str, Any]] = [
        {"order_id": 7, "when": MOMENT, "table": {"id": 1}, "backup": "B", "x-note": "n", "none": None},
        {"order_id": "7", "when": 5},
        {"backup": "B", "order_id": 8},
        {"order_id": 9},
    ]
    for number, (message_id, items, held) in enumerate(zip(ids, bodies, headers, strict=True)):
        properties = pika.BasicProperties(
            headers=held,
            message_id=message_id,
            content_type="application/json",
            type="order" if number != 3 else "other",
            timestamp=1_700_000_000 + number,
        )
        channel.basic_publish(exchange, "order.new", json.dumps({"items": items}).encode(), properties)


def told_of_first(place: Place) -> dict[str, Any]:
    """What lookups say of the stream's first message, read from there."""
    with Relations(place.amqp, place.database) as relations:
        first = relations.read(place.stream, 0)
        return told(relations.related(first), relations.trace(first)) | {"itself": []}


def test_a_message_of_a_queue_is_asked_about_as_it_is(place: Place, channel: BlockingChannel, queue: str) -> None:
    """Lookups by a queue's message use the values of its copy in the stream, and name that copy as the message."""
    clients = ("pika", "pika_get", "aio_pika", "faststream")
    for client in clients:
        channel.queue_declare(f"{queue}-{client}", durable=True)
        channel.queue_bind(f"{queue}-{client}", queue, "#")
    publish(channel, queue)
    place.record()
    answers = run(place, *(f"{client},{queue}-{client}" for client in clients))
    for client in clients:
        channel.queue_delete(f"{queue}-{client}")
    expected = told_of_first(place) | {"itself": [[place.stream, 0]]}
    assert answers == dict.fromkeys(clients, expected)
    assert expected["hits"] == [[place.stream, 1], [place.stream, 2]]
    assert expected["keys"] == [["order_id", "kind"], ["from_table", "kind", "item"]]
    assert expected["trace"] == [[place.stream, 0, 0], [place.stream, 1, 1], [place.stream, 2, 1]]


def test_a_message_of_a_stream_is_not_its_own_relation(place: Place, channel: BlockingChannel, queue: str) -> None:
    """A stream's message is left out of its relations: AMQP 0.9.1 gives its offset alone, rstream also its stream."""
    publish(channel, queue, ids=[None] * 4)
    place.record()
    itself: dict[str, list[list[Any]]] = {client: [[place.stream, 0]] for client in ("pika", "aio_pika")}
    by_offset = (f"{client},{place.stream},x-stream-offset" for client in itself)
    answers = run(place, *by_offset, f"rstream,{place.stream},{place.stream_url}")
    expected = told_of_first(place)
    assert answers == {client: expected | {"itself": of} for client, of in (itself | {"rstream": []}).items()}


def test_all_copies_are_left_out_and_a_limit_counts_others(
    place: Place, relations: Relations, other_stream: str, channel: BlockingChannel, queue: str
) -> None:
    """Copies of a message in two streams are left out of its relations, and do not count for `limit=1`."""
    channel.queue_bind(other_stream, queue, "#")
    publish(channel, queue)
    place.record(place.stream, other_stream)
    message = channel.basic_get(queue, auto_ack=True)
    answer = relations.related(message, by="order_id", limit=1)
    assert len(answer) == 1
    assert answer.ids[0].offset == 1
    assert answer.self_ids == tuple(sorted([(place.stream, 0), (other_stream, 0)]))
    assert relations.related(message, by="order_id", complete=True).self_ids == answer.self_ids
    assert relations.wait_related(message, by="order_id", timeout_s=0).self_ids == answer.self_ids
    trace = relations.trace(message, by="order_id")
    assert sorted((at, hops) for at, hops in trace.hops.items()) == sorted(
        ((stream, offset), offset) for stream in (place.stream, other_stream) for offset in (0, 1)
    )


def test_a_message_alone_has_no_relations_but_itself(
    place: Place, relations: Relations, channel: BlockingChannel, queue: str
) -> None:
    """Copies of a message are not relations of it, and end no wait; lookups by time find them."""
    publish(channel, queue)
    place.record()
    first, *_, message = (channel.basic_get(queue, auto_ack=True) for _ in range(4))
    assert relations.after(first, place.stream).ids == ((place.stream, 1),)
    assert relations.after(first, place.stream, by="from_table").ids == ((place.stream, 2),)
    assert relations.around(first, place.stream, after_s=1.5).ids == ((place.stream, 0), (place.stream, 1))
    answer = relations.related(message, by="order_id")
    assert (answer.status, answer.self_ids) == (Status.ABSENT, ((place.stream, 3),))
    answer = relations.wait_related(message, by="order_id", timeout_s=2)
    assert (answer.status, answer.self_ids) == (Status.ABSENT, ((place.stream, 3),))
    trace = relations.trace(message, by="order_id")
    assert (trace.status, dict(trace.hops)) == (Status.ABSENT, {(place.stream, 3): 0})


def test_an_id_said_twice_over_is_not_enough(
    place: Place, relations: Relations, channel: BlockingChannel, queue: str
) -> None:
    """Other messages with the same `message_id` are not taken for copies."""
    publish(channel, queue, ids=["1"] * 4)
    place.record()
    answer = relations.related(channel.basic_get(queue, auto_ack=True), by=["order_id", "kind"])
    assert answer.self_ids == ((place.stream, 0),)
    assert [at.offset for at in answer.ids] == [1, 2]
