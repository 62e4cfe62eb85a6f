"""Traces against real streams and a real database; a walk over all says what is connected."""

import threading
from collections.abc import Mapping
from random import Random
from typing import Any

import pytest

from relatum import MessageId
from relatum.errors import InvalidInput, InvalidRelationshipKey, KeyNotDefined, NothingRecorded
from relatum.keys import KeyDefinition, moment
from relatum.reading import Message
from relatum.store.catalog import add_keys
from relatum.store.database import Database
from relatum_consumer import Relations, Status, Trace
from relatum_consumer.lookups.proof import Uncovered
from relatum_consumer.traces import Edge, Stop, StopReason
from tests.support import delete_stream, recording, wait_recorded
from tests.support.pages import blocks_of, run
from tests.support.place import Place
from tests.support.relations import questions

KEYS = ["order_id", "host", "id", *[KeyDefinition(name, names="id") for name in ("cause", "reply")]]
IDS = ["id", "cause", "reply"]
LEADS_TO = {name: [name] for name in ("order_id", "host")} | dict.fromkeys(IDS, IDS)
"""By which keys messages are sought that a value leads to: another description of what `names=` means."""


def said(at_us: int, **values: Any) -> tuple[bytes, dict[str, Any]]:
    return b"x", values | {"relatum_time": at_us}


def publish(place: Place, held: Mapping[str, list[Any]]) -> None:
    for stream, messages in held.items():
        place.put(*messages, to=stream)
    place.record(*held)


def reached(
    held: Mapping[MessageId, tuple[int, dict[str, str]]], start: MessageId, *, hops: int, limit: int, fan_out: int
) -> dict[MessageId, int]:
    """What is connected with a message, and by how many hops: a walk through each value, breadth first."""
    carriers: dict[tuple[str, str], list[MessageId]] = {}
    for where, (_, values) in held.items():
        for value in values.items():
            carriers.setdefault(value, []).append(where)
    distance, layer = {start: 0}, [start]
    for hop in range(1, hops + 1):
        led = [(other, value) for where in layer for key, value in held[where][1].items() for other in LEADS_TO[key]]
        found = [carriers.get(value, []) for value in led]
        beside = dict.fromkeys(where for wheres in found if len(wheres) <= fan_out for where in wheres)
        layer = [where for where in beside if where not in distance]
        distance.update(dict.fromkeys(layer, hop))
    ordered = sorted((hop, held[where][0], where) for where, hop in distance.items())
    return {where: hop for hop, _, where in ordered[:limit]}


def test_a_trace_is_what_is_connected(place: Place, relations: Relations, streams: list[str], chance: Random) -> None:
    """The same messages at the same distance, unbounded and by each bound; each arrow joins a cause and an effect."""
    held: dict[MessageId, tuple[int, dict[str, str]]] = {}
    messages: dict[str, list[Any]] = {stream: [] for stream in streams}
    for n in range(150):
        values = {
            "id": f"m{n}",
            "host": f"h{chance.choice([0, 0, *range(60)])}",
            "order_id": f"o{chance.randrange(80)}",
        }
        values = {key: value for key, value in values.items() if key == "id" or chance.random() < 0.6}
        for key, share in (("cause", 0.4), ("reply", 0.1)):
            if chance.random() < share:
                values[key] = f"m{chance.randrange(160)}"
        stream = chance.choice(streams)
        held[MessageId(stream, len(messages[stream]))] = n, values
        messages[stream].append(said(n, **values))
    publish(place, messages)
    variants = [
        {"hops": 100, "limit": 1_000, "fan_out": 200},
        {"hops": 100, "limit": 1_000, "fan_out": 3},
        {"hops": 2, "limit": 1_000, "fan_out": 200},
        {"hops": 100, "limit": 10, "fan_out": 20},
        {"hops": 1, "limit": 3, "fan_out": 2},
    ]
    for start in chance.sample(sorted(held), 4):
        message = relations.read(*start)
        inside = {where: row for where, row in held.items() if where == start or where.stream in streams[:2]}
        everything = {"hops": 100, "limit": 1_000, "fan_out": 20}
        trace = relations.trace(message, streams=streams[:2], **everything)
        assert (dict(trace.hops), start) == (reached(inside, start, **everything), start)
        assert trace.streams == tuple(sorted(streams[:2]))
        for bounds in variants:
            trace = relations.trace(message, **bounds)
            expected = reached(held, start, **bounds)
            assert (dict(trace.hops), start, bounds) == (expected, start, bounds)
            assert [each.id for each in trace] == sorted(expected, key=lambda where: (held[where][0], where))
            arrows = {(edge.cause, edge.effect) for edge in trace.edges if edge.cause is not None}
            assert arrows == {
                (cause, effect)
                for cause in expected
                for effect in expected
                if cause != effect and held[cause][1]["id"] in {held[effect][1].get(key) for key in IDS[1:]}
            }
            all_there = len(reached(held, start, hops=100, limit=1_000, fan_out=bounds["fan_out"])) == len(expected)
            assert all_there or {"hops", "limit"} & {stop.reason for stop in trace.stopped}


def test_causes_and_effects_are_told(place: Place, relations: Relations, streams: list[str]) -> None:
    """From the middle of a chain to what it came from and all that came from it; a cause that is nowhere is named."""
    orders, payments, letters = streams
    publish(
        place,
        {
            orders: [said(1, id="a", cause="nowhere"), said(2, id="b", cause="a"), said(3, id="z", cause="nowhere")],
            payments: [said(4, id="c", cause="b"), said(5, id="d", cause="b"), said(6, id="e", cause="d")],
            letters: [said(7, id="itself", cause="itself")],
        },
    )
    a, b, z = (MessageId(orders, n) for n in range(3))
    c, d, e = (MessageId(payments, n) for n in range(3))
    trace = relations.trace(relations.read(*d))
    assert [each.id for each in trace] == [a, b, z, c, d, e]
    assert [(edge.cause, edge.effect) for edge in trace.edges if edge.cause] == [(a, b), (b, c), (b, d), (d, e)]
    assert [(edge.effect, edge.key, edge.value) for edge in trace.edges if edge.cause is None] == [
        (a, "cause", "nowhere"),
        (z, "cause", "nowhere"),
    ]
    # Both name one that does not exist: that connects them.
    assert [(each.key, each.value, each.ids) for each in trace.shared] == [("cause", "nowhere", (a, z))]
    assert (trace.status, trace.steps[-1].status, trace.stopped) == (Status.FOUND, Status.ABSENT, ())
    # By a key that names another, the named key is followed, too; by a named key, only messages that share it.
    assert len(relations.trace(("cause", "b"), by="cause")) == 6
    assert [each.id for each in relations.trace(("id", "b"), by="id")] == [b]
    itself = MessageId(letters, 0)
    assert relations.trace(("id", "itself")).edges == (Edge(None, itself, "cause", "itself"),)


def test_a_value_of_too_many_messages_is_named_and_not_followed(
    place: Place, relations: Relations, streams: list[str]
) -> None:
    """A value of more messages than allowed is named and not followed; rows of other virtual hosts do not count."""
    messages = [said(n, host="hot", order_id="o" if n in (0, 1) else f"o{n}") for n in range(6)]
    publish(place, {streams[0]: messages})
    place.sql("INSERT INTO relatum.streams (vhost, name) VALUES ('elsewhere', 'a')")
    place.sql(
        "INSERT INTO relatum.relationships (stream_offset, time_us, stream_id, key_id, value) "
        "SELECT n, n, (SELECT stream_id FROM relatum.streams WHERE vhost = 'elsewhere'), key_id, 'hot' "
        "FROM relatum.keys, generate_series(1, 50) AS n WHERE name = 'host'"
    )
    assert [len(relations.trace(("host", "hot"), fan_out=fan_out)) for fan_out in (10, 6)] == [6, 6]
    start = relations.read(streams[0], 0)
    assert len(relations.trace(start, fan_out=6)) == 6
    trace = relations.trace(start, fan_out=5)
    assert [each.offset for each in trace] == [0, 1]
    assert trace.stopped == (Stop(StopReason.FAN_OUT, 6, "host", "hot"),)
    assert [(each.key, each.value) for each in trace.shared] == [("order_id", "o")]
    of_value = relations.trace(("host", "hot"), fan_out=5)
    assert (of_value.messages, of_value.status, len(of_value.stopped)) == ((), "found", 1)
    alone = relations.trace(relations.read(streams[0], 5), fan_out=5)
    assert (len(alone), alone.status) == (1, "found")


def test_what_each_bound_left_out_is_told(place: Place, relations: Relations, streams: list[str]) -> None:
    """Hops, messages and time: where it stopped, and how much of it is known."""
    messages = [said(n, id=f"m{n}", cause=f"m{n - 1}") for n in range(1, 9)]
    publish(place, {streams[0]: messages})
    start = relations.read(streams[0], 0)

    def told(trace: Trace) -> tuple[list[int], list[tuple[str, int]]]:
        return [each.offset for each in trace], [(str(stop.reason), stop.count) for stop in trace.stopped]

    assert told(relations.trace(start, hops=2)) == ([0, 1, 2], [("hops", 3)])
    assert told(relations.trace(start, limit=3)) == ([0, 1, 2], [("limit", 1)])
    assert told(relations.trace(start, limit=8)) == (list(range(8)), [])
    assert told(relations.trace(start, until=moment(4))) == ([0, 1, 2], [("time", 1)])
    later = relations.trace(relations.read(streams[0], 4), since=moment(4), until=moment(7))
    assert told(later) == ([3, 4, 5], [("time", 1)] * 2)
    # More messages have the value than may be followed, but those in the span may be few enough.
    publish(place, {streams[1]: [said(n, host="hot") for n in range(10, 20)]})
    hot = relations.trace(("host", "hot"), fan_out=4, since=moment(12), until=moment(16))
    assert told(hot) == ([2, 3, 4, 5], [("time", 1)])
    hot = relations.trace(("host", "hot"), fan_out=3, since=moment(12), until=moment(16))
    assert told(hot) == ([], [("fan_out", 4)])


def test_what_is_not_recorded_is_said_and_read_where_asked(
    place: Place, relations: Relations, streams: list[str]
) -> None:
    """The start itself need not be recorded; without `complete` nobody says that there is no more."""
    publish(place, {streams[0]: [said(1, id="a", order_id="o")]})
    place.put(said(2, id="b", cause="a"), said(3, id="c", cause="b"), said(4, host="h"), to=streams[0])
    start = relations.read(streams[0], 1)
    trace = relations.trace(start)
    assert [each.offset for each in trace] == [0, 1]
    assert (trace.status, trace.unrecorded_streams) == (Status.NOT_RECORDED_YET, (streams[0],))
    assert trace.uncovered == (Uncovered(streams[0], 1, 4),)
    elsewhere = relations.trace(start, streams=streams[1:])
    assert (elsewhere.status, elsewhere.streams) == (Status.ABSENT, tuple(sorted(streams[1:])))
    trace = relations.trace(start, complete=True)
    assert [each.offset for each in trace] == [0, 1, 2]
    assert (trace.status, trace.steps[-1].status, trace.uncovered) == (Status.FOUND, Status.ABSENT, ())
    until = relations.trace(start, complete=True, until=moment(3))
    assert [each.offset for each in until] == [0, 1]
    assert [(str(stop.reason), stop.count, stop.value) for stop in until.stopped] == [("time", 1, "b")]


@pytest.mark.parametrize("ask", ["trace", "find"])
def test_a_stream_that_is_begun_anew_meanwhile_is_no_longer_answered_for(
    place: Place, streams: list[str], ask: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The index leaves out what was recorded of it, so the proof from before says nothing of it."""
    publish(place, {streams[0]: [said(0, order_id="17")], streams[1]: [said(1, order_id="18")]})

    rows, interrupted = Database.rows, threading.Event()

    def rows_of(database: Database, statement: Any, parameters: Any) -> Any:
        if "relationships" in str(statement) and not interrupted.is_set():
            interrupted.set()
            place.sql("UPDATE relatum.streams SET replaced_at = now() WHERE name = :name", name=streams[0])
        return rows(database, statement, parameters)

    monkeypatch.setattr(Database, "rows", rows_of)
    with Relations(place.amqp, place.database) as relations:
        found = (
            relations.trace(("order_id", "17")) if ask == "trace" else relations.find("order_id", "17", complete=True)
        )
    assert (found.status, found.streams) == (Status.ABSENT, (streams[1],))


def test_a_message_from_elsewhere_may_be_the_start(place: Place, relations: Relations, streams: list[str]) -> None:
    """One that a client received, of a stream that nobody records; one without values leads nowhere, and says why."""
    publish(place, {streams[0]: [said(1, order_id="o"), said(2, other="o")], streams[1]: [said(3, order_id="o")]})
    place.put(said(4, order_id="o"), to=streams[2])
    received = relations.read(streams[2], 0)
    assert isinstance(received, Message)
    assert [each.stream for each in relations.trace(received)] == streams
    trace = relations.trace(relations.read(streams[0], 1))
    assert (len(trace), trace.status, trace.steps) == (1, Status.ABSENT, ())
    assert {each.key for each in trace.missing_keys} == LEADS_TO.keys()
    # Recorded messages of a deleted stream are reported as deleted; the others are still found.
    delete_stream(place.amqp, streams[1])
    trace = relations.trace(("order_id", "o"))
    assert ([each.id for each in trace], trace.deleted) == ([(streams[0], 0)], ((streams[1], 0),))
    assert (trace.status, trace.expired) == (Status.FOUND, ())


def test_wrong_questions_are_refused(place: Place, relations: Relations) -> None:
    """Each impossible question is one error, before anything is read."""
    add_keys(place.engine, KEYS)
    wrong: list[tuple[dict[str, Any], type[Exception]]] = [
        ({"since": moment(2), "until": moment(1)}, InvalidInput),
        ({"by": "nonsense"}, KeyNotDefined),
        ({"start": MessageId("s", 1)}, InvalidInput),
        ({"start": "order_id"}, InvalidInput),
        ({"start": ("nonsense", 1)}, KeyNotDefined),
        ({"start": ("order_id", 1.5)}, InvalidRelationshipKey),
        ({}, NothingRecorded),
    ]
    for options, error in wrong:
        with pytest.raises(error):
            relations.trace(**{"start": ("order_id", "o")} | options)


def test_each_question_is_logged(place: Place, relations: Relations, streams: list[str]) -> None:
    """By either face: statements with rows, reads with messages, and what proves an absence."""
    publish(place, {stream: [said(n, order_id="o") for n in range(5)] for stream in streams})
    place.put(*[said(9, order_id="late") for _ in range(5)], to=streams[1])
    with questions() as asked:
        assert len(relations.find("order_id", "o", streams=streams[0])) == 5
    statement, read = asked[-2:]
    assert (statement["name"], statement["rows"]) == ("rows", 5)
    assert "relationships" in statement["about"]
    assert (read["name"], read["rows"], read["about"]) == ("read", 5, streams[0])
    assert all(each["ms"] > 0 for each in asked)
    with questions() as asked:
        assert relations.find("order_id", "none").status is Status.NOT_RECORDED_YET
    ends, identity = (next(each for each in asked if each["name"] == name) for name in ("all_bounds", "agreements"))
    assert (ends["about"], ends["rows"], identity["rows"]) == (", ".join(sorted(streams)), 3, 3)
    with questions() as asked:
        assert len(relations.find("order_id", "late", complete=True)) == 5
    (scan,) = [each for each in asked if each["name"] == "scan"]
    assert scan["about"] == f"{streams[1]} from 5 to 9"


@pytest.mark.parametrize("one_face", ["blocking"])
def test_where_a_stream_begins_is_asked_only_where_a_proof_needs_it(
    place: Place, relations: Relations, streams: list[str], short_stream: str
) -> None:
    """Of several streams: not where all is recorded, nor for a tail; what retention took is never called unrecorded."""
    held = [short_stream, *streams[:2]]
    for stream in held[1:]:
        place.put(said(1, order_id="o"), to=stream)
    with recording(place.amqp, place.engine, *held, keys=KEYS):
        place.put(said(1, order_id="o"), to=short_stream)
        wait_recorded(place.amqp, place.engine, short_stream)
        place.put(*[b"x" * 10_000] * 60, to=short_stream)
        for stream in held:
            wait_recorded(place.amqp, place.engine, stream)
    first, last = place.bounds(short_stream)
    assert first is not None
    assert last is not None
    assert first > 0
    assert relations.find("order_id", "none").status is Status.ABSENT
    with questions() as asked:
        assert relations.find("order_id", "none", streams=streams[:2]).status is Status.ABSENT
    assert [each["name"] for each in asked].count("all_bounds") == 1

    place.put(said(2, order_id="late"), to=streams[0])
    with questions() as asked:
        assert relations.find("order_id", "none", streams=streams[:2]).status is Status.NOT_RECORDED_YET
    assert [each["name"] for each in asked].count("all_bounds") == 1

    add_keys(place.engine, ["another"])
    with questions() as asked:
        found = relations.trace(("another", "a"))
    ends = {short_stream: (first, last + 1), streams[0]: (0, 2), streams[1]: (0, 1)}
    assert set(found.uncovered) == {Uncovered(stream, *each) for stream, each in ends.items()}
    assert [each["name"] for each in asked].count("all_bounds") == 2


def test_what_the_page_shows_works(
    place: Place, streams: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each block of docs/traces.md, unchanged, with names of our own."""
    publish(place, {streams[0]: [said(1, id="a", order_id=4711), said(2, order_id=4711, cause="a")]})
    monkeypatch.setenv("RELATUM_BROKER_URL", place.amqp)
    monkeypatch.setenv("RELATUM_DATABASE_URL", place.database)
    [block] = blocks_of("traces.md", renamed={"orders": streams[0]})
    names: dict[str, Any] = {}
    run("traces.md", block, names)
    assert "led to" in capsys.readouterr().out
    assert len(names["same"]) == len(names["trace"]) == 2
