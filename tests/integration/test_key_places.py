"""Keys out of bodies and of tables in headers, from the publisher to the answer: all read a message in the same way."""

import json
from typing import Any

import pika
import pytest
from pika.adapters.blocking_connection import BlockingChannel

import relatum
from relatum.errors import InvalidInput
from relatum.keys import KeyDefinition
from relatum.store.catalog import add_keys, key_definitions
from relatum_consumer import Relations
from tests.support.place import Place

KEYS = [
    KeyDefinition("order", source="body:$.order.id or header:order_id"),
    KeyDefinition("sku", source="body:$.items[*].sku"),
    KeyDefinition("cause", source="body:$.cause", names="order"),
    KeyDefinition("both", source=("body:$.order.id", "property:correlation_id")),
    KeyDefinition("deep", source="header:$.x-table.a[1]"),
]


def json_message(body: Any, **properties: Any) -> tuple[bytes, Any]:
    return json.dumps(body).encode(), pika.BasicProperties(content_type="application/json", **properties)


MESSAGES = [
    json_message({"order": {"id": "o1"}, "items": [{"sku": "a"}, {"sku": "b"}]}, correlation_id="c"),
    json_message({"order": {"id": 2}, "items": [{"sku": "b"}, {"sku": "c"}, {"sku": 1.5}], "cause": "o1"}),
    (b"no JSON", pika.BasicProperties(headers={"order_id": "o1", "x-table": {"a": ["p", "q"]}})),
    json_message({"order": {}, "items": [{"sku": "a"}]}),
    (b'{"order": {"id": broken', pika.BasicProperties(content_type="application/json")),
    (b"\x00\xff", pika.BasicProperties()),
]
ROWS = {
    ("order", "o1", 0),
    ("order", "2", 1),
    ("order", "o1", 2),
    ("both", "o1|c", 0),
    ("sku", "a", 0),
    ("sku", "b", 0),
    ("sku", "b", 1),
    ("sku", "c", 1),
    ("sku", "a", 3),
    ("cause", "o1", 1),
}


def expected(broker_version: tuple[int, ...]) -> set[tuple[str, str, int]]:
    """The rows there must be: RabbitMQ drops tables in headers up to 3.12, and keeps those named `x-…` later."""
    return ROWS | ({("deep", "q", 2)} if broker_version >= (3, 13) else set())


def test_rows_are_those_of_what_lies_at_the_path(place: Place, broker_version: tuple[int, ...]) -> None:
    """A recorder makes a row of each value at a key's path, and count what cannot be a value."""
    place.put_recorded(*MESSAGES)
    assert sorted(place.rows()) == sorted(expected(broker_version))
    assert place.status().skipped == {"sku": {"float": 1}, "order": {"not_json": 1}, "both": {"not_json": 1}}
    assert place.verify().ok
    with place.engine.connect() as connection:
        stored = [(key.name, key.sources) for key in key_definitions(connection)]
    assert stored == [(key.name, key.sources) for key in KEYS]


def test_a_back_fill_reads_bodies_too(place: Place, broker_version: tuple[int, ...]) -> None:
    """A back-fill makes the rows of keys from bodies that were defined after the messages were recorded."""
    place.put_recorded(*MESSAGES, keys=["order_id"])
    add_keys(place.engine, KEYS)
    place.backfill()
    assert set(place.rows()) - {("order_id", "o1", 2)} == expected(broker_version)


def test_answers_follow_each_value(place: Place, relations: Relations) -> None:
    """A message is found by each value of a key, from its row or, in a complete answer, from its unrecorded body."""
    place.put_recorded(*MESSAGES[:1])
    place.put(*MESSAGES[1:])
    assert [each.offset for each in relations.find("sku", "b").messages] == [0]
    assert [each.offset for each in relations.find("sku", "b", complete=True).messages] == [0, 1]
    place.record()
    assert [each.offset for each in relations.find("sku", "b").messages] == [0, 1]
    assert [each.offset for each in relations.find("order", 2).messages] == [1]
    first, second = relations.read(place.stream, 0), relations.read(place.stream, 1)
    answer = relations.related(first, by="sku")
    assert [each.offset for each in answer.messages] == [1, 3]
    assert [hit.keys for hit in answer.hits] == [("sku",), ("sku",)]
    found = relations.related(second, by="cause", complete=True)
    assert found.status == "absent"
    trace = relations.trace(second, by=["cause", "order"])
    assert {each.offset for each in trace.messages} == {0, 1, 2}
    assert [(edge.cause and edge.cause.offset, edge.effect.offset) for edge in trace.edges] == [(0, 1), (2, 1)]
    assert relations.find("sku", "z", complete=True).status == "absent"
    with pytest.raises(InvalidInput, match="2 values of the key 'sku'"):
        relations.after(first, place.stream, by="sku")


def test_a_publisher_records_what_its_bodies_say(place: Place, relations: Relations, channel: BlockingChannel) -> None:
    """A publisher sends bodies as they are and records their values, but no row for a value that is not a key."""
    relatum.intercept(channel.connection, database=place.database, keys=KEYS[:2])
    body, properties = MESSAGES[0]
    receipt = relatum.publish(channel, "", place.stream, body, properties)
    assert receipt.wait(60)[0].offset == 0
    channel.basic_publish("", place.stream, b'{"order": {"id": 1.5}}')
    relatum.release(channel.connection)
    assert set(place.rows()) == {("order", "o1", 0), ("sku", "a", 0), ("sku", "b", 0)}
    assert relations.read(place.stream, 0).body == body
    assert relations.read(place.stream, 0).headers.keys() <= {"relatum_receipt", "relatum_time"}
