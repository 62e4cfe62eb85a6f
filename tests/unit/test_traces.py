"""What is told of a trace, without any server: links, and graphs that hostile text cannot break out of."""

import json
import re

import pytest
from pika import BasicProperties

from relatum import MessageId
from relatum.keys import KeyDefinition
from relatum.reading import Message
from relatum_consumer import Status, Trace
from relatum_consumer.traces import Edge, Shared, Step, Stop, StopReason
from relatum_consumer.traces._links import Directions

A, B, C = (MessageId("s", n) for n in range(3))
KEYS = [
    KeyDefinition(name, names=names, key_id=n)
    for n, (name, names) in enumerate(
        [("id", None), ("cause", "id"), ("reply", "id"), ("host", None), ("lost", "none")]
    )
]
ID, CAUSE, REPLY, HOST, LOST = range(5)


def test_a_value_leads_to_what_names_it_and_to_what_it_names() -> None:
    """And to what else names the same message; a key that names one that is not there leads to itself."""
    directions = Directions(KEYS)
    assert set(directions.sought([(ID, "a")])) == {(ID, "a"), (CAUSE, "a"), (REPLY, "a")}
    assert set(directions.sought([(REPLY, "a")])) == {(ID, "a"), (CAUSE, "a"), (REPLY, "a")}
    assert set(directions.sought([(HOST, "h"), (LOST, "x")])) == {(HOST, "h"), (LOST, "x")}


def test_links_join_causes_with_effects_and_who_shares_a_value() -> None:
    """Never a message with itself; not again those whose cause is there; not those of a value that was not followed."""
    values = {
        A: ((ID, "a"), (CAUSE, "a"), (HOST, "h")),
        B: ((ID, "b"), (CAUSE, "a"), (HOST, "h")),
        C: ((REPLY, "a"), (LOST, "x")),
    }
    edges, shared = Directions(KEYS).links(values, [])
    assert edges == (Edge(None, A, "cause", "a"), Edge(A, B, "cause", "a"), Edge(A, C, "reply", "a"))
    assert shared == (Shared("host", "h", (A, B)),)
    assert Directions(KEYS).links(values, [(HOST, "h")])[1] == ()


HOSTILE = [
    '"] ; x -> y [label="',
    "a\nb",
    "<script>alert(1)</script>",
    "\\",
    'x"]\nclick m0 "javascript:x"',
    "]",
    "%%{init}%%",
]


@pytest.mark.parametrize("text", HOSTILE)
def test_no_text_breaks_out_of_a_graph(text: str) -> None:
    """Names of streams, keys and values stay labels: the lines are those of the graph of harmless ones."""

    def drawn(text: str) -> Trace:
        one = Message.from_amqp(text, 1, BasicProperties(), b"")
        return Trace((one,), {one.id: 0}, (Edge(None, one.id, text, text),), (Shared(text, text, (one.id, one.id)),))

    hostile, harmless = drawn(text).to_mermaid(), drawn("name").to_mermaid()
    label = re.compile(r'"(?:[^"\\]|\\.)*"')
    assert label.sub("L", hostile) == label.sub("L", harmless)
    assert "<script" not in hostile


def test_a_trace_is_as_sure_as_its_worst_step() -> None:
    """Found where something was and each step is sure; what may lack is worse than that."""

    def status(*steps: Status) -> Status:
        return Trace((), {}, steps=tuple(Step(n, 1, 0, each) for n, each in enumerate(steps))).status

    assert status() is Status.ABSENT
    assert status(Status.FOUND, Status.ABSENT) is Status.FOUND
    assert status(Status.FOUND, Status.EXPIRED) is Status.FOUND
    assert status(Status.EXPIRED, Status.ABSENT) is Status.EXPIRED
    assert status(Status.FOUND, Status.NOT_RECORDED_YET) is Status.NOT_RECORDED_YET
    assert status(Status.NOT_RECORDED_YET, Status.UNPROVEN) is Status.UNPROVEN


def test_a_trace_is_one_json_document() -> None:
    """All but bodies, with names of fields as they are in Python."""
    message = Message.from_amqp("s", 1, BasicProperties(), b"secret")
    edge, stop = Edge(None, message.id, "cause", "x"), Stop(StopReason.HOPS, 2)
    found = json.loads(Trace((message,), {message.id: 0}, (edge,), stopped=(stop,)).to_json())
    assert found["messages"] == [{"stream": "s", "offset": 1, "time": None, "hop": 0}]
    assert found["edges"] == [{"cause": None, "effect": {"stream": "s", "offset": 1}, "key": "cause", "value": "x"}]
    assert found["stopped"] == [{"reason": "hops", "count": 2, "key": None, "value": None}]
    assert "secret" not in json.dumps(found)
