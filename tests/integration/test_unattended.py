"""Answers that found nothing say why: a message has no value to look for, nobody records, or a key is newer."""

import json
import logging
import shlex
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import sqlalchemy as sa
from typer.testing import CliRunner

from relatum import release, statistics
from relatum.errors import BrokerUnavailable, StreamUnavailable
from relatum.keys import KeyDefinition
from relatum.reading import Message, StreamReader
from relatum.recording.overview import recorded_status
from relatum.store.catalog import add_keys
from relatum_cli.app import app
from relatum_consumer import Answer, NewKey, Relations, Status
from tests.acceptance._command import Relatum
from tests.contract._clients import open_line
from tests.support import declare_stream, delete_stream, new_streams, run_python, unique_name, wait_until
from tests.support.leases import record_as
from tests.support.place import FailingPlace, Place
from tests.support.standstill import in_time

CURE = "relatum backfill --keys customer"


class InProcess(Relatum):
    """The command, without a process of its own: what it says is the same."""

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        ended = CliRunner().invoke(app, arguments, env=self.environment)
        return subprocess.CompletedProcess(arguments, ended.exit_code, ended.stdout, ended.stderr)


@pytest.fixture
def relatum(place: Place) -> Relatum:
    return InProcess(place.amqp, place.stream_url, place.database)


def waited(relations: Relations, message: Message, by: str) -> Answer:
    tried = (relations.wait_related(message, by=by, timeout_s=1.0) for _ in range(100))
    return next(each for each in tried if each.status is not Status.UNPROVEN)


@pytest.fixture
def recorded(place: Place) -> str:
    """A stream of an order, a message of nothing and an impossible order, all recorded; nobody records it now."""
    place.put((b"", {"order_id": "a"}), (b"", {"ordr_id": "a"}), (b"", {"order_id": "x" * 2000}))
    place.record(keys=["order_id"])
    return place.stream


def test_the_status_of_many_streams_takes_as_many_statements_as_that_of_one(place: Place, recorded: str) -> None:
    """Events, skips, coverage and recorders are each asked for once, in all streams; each stream has its own."""
    place.sql("INSERT INTO relatum.events (stream_id, kind) SELECT stream_id, 'hole' FROM relatum.streams")
    for n in range(3):
        place.sql("INSERT INTO relatum.streams (vhost, name) VALUES ('/', :name)", name=f"{recorded}-{n}")
    taken: list[str] = []
    sa.event.listen(place.engine, "before_cursor_execute", lambda *told: taken.append(told[2]))
    counts = []
    for names in ([recorded], [recorded, *(f"{recorded}-{n}" for n in range(3))]):
        taken.clear()
        found = recorded_status(place.engine, "/", names, BrokerUnavailable("away"))
        counts.append(len(taken))
        first, *others = sorted(found, key=lambda each: each.stream)
        assert (first.skipped, [each.kind for each in first.events]) == ({"order_id": {"too_long": 1}}, ["hole"])
        assert [(each.skipped, each.events) for each in others] == [({}, [])] * (len(names) - 1)
    assert counts[0] == counts[1]


def test_a_status_does_not_need_the_brokers_id(place: Place, recorded: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams that can be read have their status while the stream with the broker's id has no leader."""

    def identity(_: StreamReader) -> None:
        raise StreamUnavailable("no leader", stream="relatum.broker")

    with monkeypatch.context() as patched:
        patched.setattr(StreamReader, "identity", identity)
        found = place.status(recorded)
    assert (found.state, found.last, found.error) == ("unattended", 2, None)


def test_a_key_that_is_called_time_has_its_own_ranges(place: Place, recorded: str) -> None:
    """The status shows where a key with the name `time` is recorded, not where messages' times are."""
    assert place.status(recorded).covered["time"] == [(0, 3)]
    add_keys(place.engine, ["time"])
    assert place.status(recorded).covered["time"] == []


def test_a_message_without_the_key_is_told_from_one_without_relata(
    place: Place, relations: Relations, relatum: Relatum, recorded: str
) -> None:
    """Each lookup that takes a value from a message, and the command, name the keys that it lacks, and why."""
    add_keys(place.engine, [KeyDefinition("call", source="property:correlation_id")])
    order, other, impossible = (relations.read(recorded, offset) for offset in range(3))
    for answer in (
        relations.related(other, by="order_id"),
        relations.related(other, by="order_id", complete=True),
        relations.wait_related(other, by="order_id", timeout_s=60),
        relations.before(other, recorded, by="order_id"),
        relations.window(other, recorded, by="order_id", before_s=60),
    ):
        assert (answer.status, answer.missing_keys) == (Status.ABSENT, (("order_id", "no header:order_id"),))
        assert "no value of order_id (no header:order_id): nothing was searched" in answer.explanation
        assert answer.explanation in repr(answer)
    assert [key for key, _ in relations.related(other).missing_keys] == ["order_id", "call"]
    [(key, reason)] = relations.related(impossible, by="order_id").missing_keys
    assert (key, reason) == ("order_id", "header:order_id is not a valid value: too_long")
    # A value that was searched for, and another key that the message lacks.
    answer = relations.related(order, by=["order_id", "call"])
    assert (answer.status, answer.missing_keys, answer.explanation) == (Status.ABSENT, (), "")
    asked = "related", recorded, "1", "--by", "order_id"
    ended = relatum.run(*asked)
    assert (ended.returncode, ended.stderr) == (6, "")
    assert ended.stdout.startswith("absent: this message has no value of order_id (no header:order_id): nothing was")
    assert relatum.json(*asked)["missing_keys"] == [{"key": "order_id", "reason": "no header:order_id"}]


def test_nobody_records_is_told_from_a_recorder_behind(
    place: Place, relations: Relations, relatum: Relatum, recorded: str
) -> None:
    """A stream that is behind and has no recorder is named by lookups, after a wait, and by the command."""
    place.put((b"", {"order_id": "b"}))
    order = relations.read(recorded, 0)
    answer = waited(relations, order, "order_id")
    assert (answer.status, answer.unrecorded_streams) == (Status.NOT_RECORDED_YET, (recorded,))
    assert answer.explanation == f"no recorder runs for {recorded!r}: relatum record {recorded}"
    assert relations.find("order_id", "b").unrecorded_streams == (recorded,)
    ended = relatum.run("find", "order_id", "b")
    assert ended.returncode == 8
    assert answer.explanation in ended.stdout
    assert relatum.json("find", "order_id", "b")["unrecorded_streams"] == [recorded]
    record_as(place.engine, "somebody")
    answer = relations.find("order_id", "b")
    assert (answer.status, answer.unrecorded_streams, answer.explanation) == (Status.NOT_RECORDED_YET, (), "")


@pytest.mark.differs
def test_no_recorder_is_asked_for_what_was_pruned(
    place: Place, relations: Relations, relatum: Relatum, recorded: str
) -> None:
    """A new leader retains what the former one had dropped, and its rows were pruned: only reading finds it."""
    place.sql("UPDATE relatum.streams SET retained_from = 1")
    place.sql("DELETE FROM relatum.relationships")
    answer = relations.find("order_id", "a")
    assert (answer.status, answer.unrecorded_streams, answer.explanation) == (Status.NOT_RECORDED_YET, (), "")
    assert "--complete reads that part" in relatum.run("find", "order_id", "a").stdout
    assert relations.find("order_id", "a", complete=True).ids == ((recorded, 0),)
    place.put((b"", {"order_id": "b"}))
    assert relations.find("order_id", "b").unrecorded_streams == (recorded,)


def test_a_status_begins_with_who_records(place: Place, relatum: Relatum, recorded: str) -> None:
    """`recording` is said while somebody does; else the first line says that nobody does."""
    found = place.status()
    assert (found.state, found.recorder) == ("unattended", None)
    shown = relatum.ok("status", recorded)
    assert shown.startswith(f"{recorded}: unattended: no recorder follows it now; relatum record {recorded}"), shown
    with place.recording():
        place.put((b"", {}))
        place.wait_recorded()
        found = place.status()
    assert found.state == "recording"
    assert found.recorder is not None


def test_keys_are_told_as_they_are_defined(place: Place, relatum: Relatum, caplog: pytest.LogCaptureFixture) -> None:
    """A new key is logged, and names like properties, conflicts and a back-fill of nothing say how to continue."""
    with caplog.at_level(logging.INFO, "relatum.keys"):
        for _ in range(2):
            add_keys(place.engine, ["orderid"])
    assert [each.getMessage() for each in caplog.records if each.name == "relatum.keys"] == [
        "defined key 'orderid' (new): header:orderid, text"
    ]
    ended = relatum.run("keys", "add", "call", "--source", "correlation_id", "--json")
    assert (ended.returncode, json.loads(ended.stdout)[0]["source"]) == (0, ["header:correlation_id"])
    assert "--source property:correlation_id" in ended.stderr
    ended = relatum.run("keys", "add", "call", "--source", "property:correlation_id")
    assert ended.returncode == 2
    assert "as header:correlation_id, text, not as property:correlation_id, text" in ended.stderr
    assert "KeyDefinition('call', source='header:correlation_id')" in ended.stderr
    assert "relatum record STREAM" in relatum.ok("backfill")


_PUBLISHER = """
import sys, pika, relatum
broker, database, stream, ending = sys.argv[1:]
connection = pika.BlockingConnection(pika.URLParameters(broker))
relatum.intercept(connection, database=database)
channel = connection.channel()
if ending == "wait":
    relatum.publish(channel, "", stream, b"").wait(timeout_s=90)
else:
    channel.basic_publish("", stream, b"")
if ending == "release":
    relatum.release(connection)
connection.close()
"""


def test_a_process_says_what_it_leaves_unrecorded(place: Place) -> None:
    """A publisher that only closes its connection gets a hint at `release`; one that releases or waits does not."""

    def publish(ending: str) -> str:
        return run_python("-c", _PUBLISHER, place.amqp, place.database, place.stream, ending).stderr

    with place.engine.begin() as connection:
        # Nothing can be recorded during this.
        connection.execute(sa.text("LOCK TABLE relatum.coverage"))
        told = publish("close")
    assert "the process ends with messages that are not recorded" in told
    assert repr(place.stream) in told
    assert "relatum.release(…)" in told
    assert publish("wait") == publish("release") == ""


@pytest.fixture
def streams(place: Place) -> Iterator[list[str]]:
    """Three streams recorded by `order_id`, in the order of their names; then the key `customer` is defined."""
    with new_streams(place.amqp, 3) as made:
        orders, payments, parcels = names = sorted(made)
        place.put(*[(b"", {"order_id": n, "customer": "ann"}) for n in (1, 2)], to=orders)
        place.put((b"", {"order_id": 3}), (b"", {"order_id": 4, "customer": "bob"}), to=orders)
        place.put(*[(b"", {"order_id": n}) for n in (1, 3)], to=payments)
        place.put((b"", {"customer": "ann"}), to=parcels)
        for each in names:
            place.record(each, keys=["order_id"])
        add_keys(place.engine, ["customer"])
        yield names


def test_a_trace_says_where_there_may_be_more(place: Place, relations: Relations, streams: list[str]) -> None:
    """A trace names a new key that its messages have, and is unproven by that key or by a stream's unrecorded end."""
    orders, payments, parcels = streams
    unseen = (NewKey("customer", tuple(streams)),)
    trace = relations.trace(("order_id", 1))
    assert [each.id for each in trace] == [(orders, 0), (payments, 0)]
    assert (trace.status, trace.new_keys, trace.unrecorded_streams) == (Status.FOUND, unseen, ())
    assert trace.to_document()["new_keys"] == [{"key": "customer", "streams": streams}]
    names = ", ".join(map(repr, streams))
    told = f"'customer' is a new key: older messages of {names} are not recorded for it: {CURE}"
    assert trace.explanation == told
    # No message of it has the new key, or that key is not searched: there is nothing to name.
    for untouched in (relations.trace(("order_id", 3)), relations.trace(("order_id", 1), by="order_id")):
        assert (untouched.status, untouched.new_keys, untouched.explanation) == (Status.FOUND, (), "")
    # It would have to be proven that there is nothing else.
    alone = relations.trace(relations.read(orders, 3))
    assert (alone.status, alone.new_keys) == (Status.NOT_RECORDED_YET, unseen)
    for asked in (relations.trace(("order_id", 1), by=["order_id", "customer"]), relations.trace(("customer", "ann"))):
        assert (asked.status, asked.new_keys, asked.unrecorded_streams) == (Status.NOT_RECORDED_YET, unseen, ())
    whole = relations.trace(("order_id", 1), complete=True)
    assert (len(whole), whole.status, whole.new_keys) == (4, Status.FOUND, ())
    place.put((b"", {"order_id": 3}), to=parcels)
    trace = relations.trace(("order_id", 3))
    assert ([step.status for step in trace.steps], len(trace)) == ([Status.FOUND], 2)
    assert (trace.status, trace.unrecorded_streams) == (Status.NOT_RECORDED_YET, (parcels,))
    assert len(relations.trace(("order_id", 3), complete=True)) == 3


def test_a_lookup_by_a_new_key_names_it(place: Place, relations: Relations, streams: list[str]) -> None:
    """A lookup by a new key names the key, is unproven without `complete`, and names unrecorded streams as well."""
    orders = relations.read(streams[0], 0)
    unseen = (NewKey("customer", tuple(streams)),)
    found = relations.find("customer", "ann", complete=True)
    assert sorted(found.ids) == [(streams[0], 0), (streams[0], 1), (streams[2], 0)]
    assert relations.find("customer", "zoe", complete=True).status is Status.ABSENT
    assert relations.find("order_id", 99).status is Status.ABSENT
    for answer in (relations.find("customer", "ann"), relations.related(orders, by="customer")):
        assert (answer.status, answer.new_keys, answer.unrecorded_streams) == (Status.NOT_RECORDED_YET, unseen, ())
        assert answer.words == f"not recorded yet: {answer.explanation}"
        assert answer.explanation.endswith(CURE)
    assert waited(relations, orders, "customer").new_keys == unseen
    place.put((b"", {"order_id": 9}), to=streams[1])
    answer = relations.find("customer", "ann")
    assert (answer.new_keys, answer.unrecorded_streams) == (unseen, (streams[1],))
    assert "no recorder runs for" in answer.explanation
    assert answer.explanation.endswith(CURE)
    # By the older key, nothing is new.
    assert relations.find("order_id", 99).new_keys == ()


def test_the_commands_name_one_cure_and_it_cures(relations: Relations, relatum: Relatum, streams: list[str]) -> None:
    """`keys add`, `find` and `trace` end with the same command, which back-fills the key in all streams."""
    said = relatum.ok("keys", "add", "customer")
    assert said.rstrip().endswith(CURE)
    found = relatum.run("find", "customer", "ann")
    assert (found.returncode, found.stdout.count(CURE)) == (8, 1)
    assert "obody records" not in found.stdout
    assert relatum.json("find", "customer", "ann")["new_keys"] == [{"key": "customer", "streams": streams}]
    traced = relatum.run("trace", streams[0], "0")
    assert (traced.returncode, traced.stdout.count("customer"), traced.stdout.count(CURE)) == (0, 2, 1)
    assert "obody records" not in traced.stdout
    by_new = relatum.run("trace", "customer", "ann")
    assert (by_new.returncode, by_new.stdout.count(CURE)) == (8, 1)
    relatum.ok(*shlex.split(traced.stdout.rsplit("relatum ", 1)[1]))
    trace = relations.trace(("order_id", 1))
    assert (len(trace), trace.status, trace.new_keys) == (4, Status.FOUND, ())
    assert len(relations.find("customer", "ann")) == 3
    assert relations.find("customer", "zoe").status is Status.ABSENT
    # A second call finds nothing to do.
    assert all(each["rows"] == 0 for each in relatum.json("backfill", "--keys", "customer"))


@pytest.mark.differs
def test_a_back_fill_of_all_passes_over_what_is_gone(place: Place, relatum: Relatum, streams: list[str]) -> None:
    """A deleted stream is named, and a replaced one ends it with an error once the others had their turn."""
    orders, payments, _ = streams
    delete_stream(place.amqp, payments)
    assert "backfill" in relatum.ok("keys", "add", "customer")
    ended = relatum.run("backfill", "--keys", "customer")
    assert ended.returncode == 0
    assert f"{payments}: skipped, because the broker no longer has this stream" in ended.stderr
    with Relations(place.amqp, place.database) as relations:
        assert len(relations.find("customer", "ann")) == 3
    delete_stream(place.amqp, orders)
    declare_stream(place.amqp, orders)
    place.put((b"other", {"customer": "ann"}), to=orders)
    again = relatum.run("backfill")
    assert again.returncode != 0
    assert orders in again.stderr
    for stream in streams:
        delete_stream(place.amqp, stream)
    assert "No stream is recorded" not in relatum.ok("backfill")


def test_times_are_switched_with_the_database_alone(place: Place, recorded: str) -> None:
    """Where the stream is known to the database, no broker need be named."""
    arguments = ["keys", "time", recorded, "--off", "--database", place.database]
    ended = CliRunner().invoke(app, arguments, env={"RELATUM_BROKER_URL": None})
    assert ended.exit_code == 0, ended.output
    assert place.sql("SELECT record_time FROM relatum.streams WHERE name = :name", name=recorded) == [(False,)]


RELEASE_S = 2.0
"""What `release` takes at most, as its documentation says."""

TROUBLES = ("database refused", "database frozen", "locked coverage")
"""PostgreSQL is not there; it answers nothing; somebody else holds a table that is written to."""

CLIENTS = ("pika", "aio-pika robust")


@pytest.fixture
def failing(place: Place) -> Iterator[FailingPlace]:
    made = FailingPlace(place, "blocking")
    yield made
    made.close()


def left_by(client: str, at: FailingPlace, *acts: str | Callable[[], object], **options: Any) -> Any:
    """Publish an order for each text, call the rest, release the connection, and give what that left."""
    with open_line(client, at.place.amqp) as line:
        line.intercept(database=at.database, broker=at.place.broker, keys=["order_id"], **options)
        channel = line.channel()
        for act in acts:
            if callable(act):
                act()
            else:
                line.publish(channel, line.message(headers={"order_id": act}), at.place.stream)
        with in_time(RELEASE_S):
            assert release(line.connection) is line.connection
        return statistics(line.connection).left


def wait_first(place: Place) -> None:
    wait_until(lambda: place.recorded_to() == 1, what="the first message recorded")


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What was said of messages that are not recorded."""
    lines = [each.getMessage() for each in caplog.records if each.name == "relatum.recorder"]
    return [line for line in lines if "ends with messages that are not recorded" in line]


@pytest.mark.parametrize("trouble", TROUBLES)
@pytest.mark.parametrize("client", CLIENTS)
def test_what_is_left_is_said_and_recorded_next(
    failing: FailingPlace, place: Place, caplog: pytest.LogCaptureFixture, client: str, trouble: str
) -> None:
    """A warning and `statistics` say how many messages of a stream are left, and a later recorder has all, once."""
    with ExitStack() as stack:

        def begin() -> None:
            wait_first(place)
            stack.enter_context(failing.fault(trouble))

        assert left_by(client, failing, "a", begin, "b", "c") == {place.stream: 2}
    [line] = said(caplog)
    assert f"2 of {place.stream!r}" in line
    place.record()
    assert place.rows() == [("order_id", each, n) for n, each in enumerate("abc")]


@pytest.mark.parametrize(("client", "trouble"), list(zip((*CLIENTS, CLIENTS[0]), TROUBLES, strict=True)))
def test_what_was_never_looked_at_is_said(
    failing: FailingPlace, place: Place, caplog: pytest.LogCaptureFixture, client: str, trouble: str
) -> None:
    """Where PostgreSQL never answered, the stream is named without the number of its messages."""
    with failing.fault(trouble):
        assert left_by(client, failing, "a", "b") == {place.stream: None}
    [line] = said(caplog)
    assert repr(place.stream) in line
    place.record(keys=["order_id"])
    assert place.rows() == [("order_id", "a", 0), ("order_id", "b", 1)]


@pytest.mark.parametrize("client", CLIENTS)
def test_nothing_is_said_where_nothing_is_left(
    failing: FailingPlace, place: Place, caplog: pytest.LogCaptureFixture, client: str
) -> None:
    """Nothing is said where all is recorded before PostgreSQL stops, nor of a stream that was deleted."""
    gone = unique_name()
    declare_stream(place.amqp, gone)
    with ExitStack() as stack:

        def stop_when_recorded() -> None:
            wait_first(place)
            delete_stream(place.amqp, gone)
            wait_until(lambda: f"There is no stream {gone!r}" in caplog.text, what="the stream is missed")
            stack.enter_context(failing.fault("database refused"))

        assert left_by(client, failing, "a", stop_when_recorded, streams=[gone]) == {}
    assert not said(caplog)
