"""Look-ups of messages that were consumed: as each client gives them, against what was read from the stream."""

import json
import subprocess
import sys
from collections.abc import Iterable, Iterator
from datetime import UTC, datetime
from typing import Any

import pika
import pytest
import sqlalchemy as sa

from relatum.errors import InvalidInput
from relatum.keys import KeyDefinition
from relatum.reading import StreamReader
from relatum_consumer import Relations, Status
from tests import support
from tests.support import broker_connection, unique_name, wait_until

KEYS = [
    KeyDefinition("order_id", type="integer"),
    KeyDefinition("when", type="timestamp"),
    KeyDefinition("from_table", "header:$.table.id or header:backup"),
    KeyDefinition("kind", "property:type"),
    KeyDefinition("item", "body:$.items[*]"),
    KeyDefinition("absent", "header:nobody-has-it"),
]
MOMENT = datetime(2026, 11, 23, 7, 30, tzinfo=UTC)


def run(*arguments: str) -> dict[str, Any]:
    """Run one of the consumers, and see what it was told."""
    command = [sys.executable, "-m", "tests.integration._consumers", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.fixture
def queue(amqp_url: str, stream_name: str) -> Iterator[str]:
    """A queue that gets each message of a topic exchange of its name, as the stream does."""
    name = unique_name("queue")
    with broker_connection(amqp_url) as connection:
        channel = connection.channel()
        channel.exchange_declare(name, "topic", durable=True)
        channel.queue_bind(stream_name, name, "#")
        channel.queue_declare(name, durable=True)
        channel.queue_bind(name, name, "#")
    yield name
    with broker_connection(amqp_url) as connection:
        connection.channel().queue_delete(name)
        connection.channel().exchange_delete(name)


def publish(amqp_url: str, exchange: str, *, ids: Iterable[str | None] = ("m-0", "m-1", "m-2", "m-3")) -> None:
    """The first shares something with each of the others, by another key each; the last is a stranger."""
    bodies = [["a", "b"], ["z"], ["b", "x"], ["y"]]
    headers: list[dict[str, Any]] = [
        {"order_id": 7, "when": MOMENT, "table": {"id": 1}, "backup": "B", "x-note": "n", "none": None},
        {"order_id": "7", "when": 5},
        {"backup": "B", "order_id": 8},
        {"order_id": 9},
    ]
    with broker_connection(amqp_url) as connection:
        channel = connection.channel()
        for number, (message_id, items, held) in enumerate(zip(ids, bodies, headers, strict=True)):
            properties = pika.BasicProperties(
                headers=held,
                message_id=message_id,
                content_type="application/json",
                type="order" if number != 3 else "other",
                timestamp=1_700_000_000 + number,
            )
            channel.basic_publish(exchange, "order.new", json.dumps({"items": items}).encode(), properties)


def record(amqp_url: str, engine: sa.Engine, stream: str, keys: Any, *, count: int) -> None:
    """Record what lies in the stream, once it is there."""
    with StreamReader.open(amqp_url) as reader:
        wait_until(lambda: reader.bounds(stream).last == count - 1, what=f"{count} messages")
    support.record(amqp_url, engine, stream, keys=keys)


def told_of_first(amqp_url: str, engine: sa.Engine, stream: str) -> dict[str, Any]:
    """What look-ups say of the stream's first message, read from there."""
    with Relations(amqp_url, engine.url) as relations:
        first = relations.read(stream, 0)
        answer, trace = relations.related(first), relations.trace(first)
    return {
        "status": str(answer.status),
        "hits": [list(place) for place in answer.ids],
        "keys": [list(hit.keys) for hit in answer.hits],
        "lacking": [list(each) for each in answer.lacking],
        "trace": sorted([*place, hops] for place, hops in trace.hops.items()),
    }


@pytest.mark.parametrize("client", ["pika", "pika_get", "aio_pika", "faststream"])
def test_a_message_of_a_queue_is_asked_about_as_it_is(
    amqp_url: str, database_url: str, engine: sa.Engine, stream_name: str, queue: str, client: str
) -> None:
    """Its values are those of the copy in the stream, of which the answer says that it is the message itself."""
    publish(amqp_url, queue)
    record(amqp_url, engine, stream_name, KEYS, count=4)
    told = run(client, amqp_url, database_url, queue)
    assert told.pop("itself") == [[stream_name, 0]]
    assert told == told_of_first(amqp_url, engine, stream_name)
    assert told["hits"] == [[stream_name, 1], [stream_name, 2]]
    assert told["keys"] == [["order_id", "kind"], ["from_table", "kind", "item"]]
    assert told["trace"] == [[stream_name, 0, 0], [stream_name, 1, 1], [stream_name, 2, 1]]


@pytest.mark.parametrize("client", ["pika", "aio_pika"])
def test_a_message_of_a_stream_is_not_its_own_relation(
    amqp_url: str, database_url: str, engine: sa.Engine, stream_name: str, queue: str, client: str
) -> None:
    """AMQP 0.9.1 tells its offset and not its stream: what is the same there is the message itself."""
    publish(amqp_url, queue, ids=[None] * 4)
    record(amqp_url, engine, stream_name, KEYS, count=4)
    told = run(client, amqp_url, database_url, stream_name, "x-stream-offset")
    assert told.pop("itself") == [[stream_name, 0]]
    assert told == told_of_first(amqp_url, engine, stream_name)


def test_a_message_of_rstream_lies_where_its_context_says(
    amqp_url: str, stream_url: str, database_url: str, engine: sa.Engine, stream_name: str, queue: str
) -> None:
    """Nothing has to be found out: the answer is that of the message read there."""
    publish(amqp_url, queue, ids=[None] * 4)
    record(amqp_url, engine, stream_name, KEYS, count=4)
    told = run("rstream", amqp_url, database_url, stream_name, stream_url)
    assert told.pop("itself") == []
    assert told == told_of_first(amqp_url, engine, stream_name)


# --- what is the message itself ---------------------------------------------------------------------------


def got(amqp_url: str, queue: str) -> Any:
    """A message of the queue, as pika gives it."""
    with broker_connection(amqp_url) as connection:
        return connection.channel().basic_get(queue, auto_ack=True)


def test_all_copies_are_left_out_and_a_limit_counts_others(
    amqp_url: str, engine: sa.Engine, relations: Relations, stream_name: str, other_stream: str, queue: str
) -> None:
    """Two streams have the first message; one of the others is still found by `limit=1`, recorded or not."""
    with broker_connection(amqp_url) as connection:
        connection.channel().queue_bind(other_stream, queue, "#")
    publish(amqp_url, queue)
    record(amqp_url, engine, stream_name, KEYS, count=4)
    record(amqp_url, engine, other_stream, KEYS, count=4)
    message = got(amqp_url, queue)
    answer = relations.related(message, by="order_id", limit=1)
    assert len(answer) == 1
    assert answer.ids[0].offset == 1
    assert answer.itself == tuple(sorted([(stream_name, 0), (other_stream, 0)]))
    assert relations.related(message, by="order_id", complete=True).itself == answer.itself
    assert relations.wait_related(message, by="order_id", timeout_s=0).itself == answer.itself
    trace = relations.trace(message, by="order_id")
    assert sorted((place, hops) for place, hops in trace.hops.items()) == sorted(
        ((stream, offset), offset) for stream in (stream_name, other_stream) for offset in (0, 1)
    )


def test_a_message_alone_has_no_relations_but_itself(
    amqp_url: str, engine: sa.Engine, relations: Relations, stream_name: str, queue: str
) -> None:
    """Found are its copies alone: that is no finding, and a wait goes on."""
    publish(amqp_url, queue)
    record(amqp_url, engine, stream_name, KEYS, count=4)
    for _ in range(3):
        message = got(amqp_url, queue)
    message = got(amqp_url, queue)
    answer = relations.related(message, by="order_id")
    assert (answer.status, answer.itself) == (Status.ABSENT, ((stream_name, 3),))
    answer = relations.wait_related(message, by="order_id", timeout_s=2)
    assert (answer.status, answer.itself) == (Status.ABSENT, ((stream_name, 3),))
    trace = relations.trace(message, by="order_id")
    assert (trace.status, dict(trace.hops)) == (Status.ABSENT, {(stream_name, 3): 0})


def test_an_id_said_twice_over_is_not_enough(
    amqp_url: str, engine: sa.Engine, relations: Relations, stream_name: str, queue: str
) -> None:
    """Publishers that count their ids anew have others of the same id: those say something else."""
    publish(amqp_url, queue, ids=["1", "1", "1", "1"])
    record(amqp_url, engine, stream_name, KEYS, count=4)
    answer = relations.related(got(amqp_url, queue), by=["order_id", "kind"])
    assert answer.itself == ((stream_name, 0),)
    assert [place.offset for place in answer.ids] == [1, 2]


def test_look_ups_by_time_take_its_moment(
    amqp_url: str, engine: sa.Engine, relations: Relations, stream_name: str, queue: str
) -> None:
    """What lies beside it; its own copies are found where an equal time is."""
    publish(amqp_url, queue)
    record(amqp_url, engine, stream_name, KEYS, count=4)
    message = got(amqp_url, queue)
    assert relations.after(message, stream_name).ids == ((stream_name, 1),)
    assert relations.after(message, stream_name, by="from_table").ids == ((stream_name, 2),)
    assert relations.around(message, stream_name, after_s=1.5).ids == ((stream_name, 0), (stream_name, 1))


@pytest.mark.parametrize(
    "wrong", [None, "message", 7, b"body", {}, (1, 2, 3), ("a", "b", "c"), pika.BasicProperties(), object()]
)
def test_what_is_no_message_is_told_what_is_taken(relations: Relations, wrong: Any) -> None:
    """One error, before anything is asked."""
    for ask in (relations.related, relations.trace):
        with pytest.raises(InvalidInput, match=r"needed, not .*pika .*aio-pika .*rstream"):
            ask(wrong)


def test_an_empty_queue_gave_no_message(relations: Relations) -> None:
    """What `basic_get` gives then says so."""
    with pytest.raises(InvalidInput, match="the queue was empty"):
        relations.related((None, None, None))
