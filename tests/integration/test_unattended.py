"""Answers that found nothing say why: the message has no value to look for, or nobody records."""

import json
import logging
import subprocess
import sys

import pytest
import sqlalchemy as sa

from relatum.keys import KeyDefinition
from relatum.recording import status
from relatum.store import add_keys
from relatum_consumer import Relations, Status
from tests.acceptance._command import Relatum
from tests.support import publish_plain, recording, wait_recorded
from tests.support.leases import record_as
from tests.support.place import Place


@pytest.fixture
def recorded(place: Place) -> str:
    """A stream of an order, a message of nothing and an impossible order, all recorded; nobody records it now."""
    place.put((b"", {"order_id": "a"}), (b"", {"ordr_id": "a"}), (b"", {"order_id": "x" * 2000}))
    place.record(keys=["order_id"])
    return place.stream


def test_a_message_without_the_key_is_told_from_one_without_relata(
    engine: sa.Engine, relations: Relations, recorded: str
) -> None:
    """Each look-up that takes the value from a message names the keys that it lacks, and why; the status stays."""
    add_keys(engine, [KeyDefinition("call", source="property:correlation_id")])
    order, other, impossible = (relations.read(recorded, offset) for offset in range(3))
    for answer in (
        relations.related(other, by="order_id"),
        relations.related(other, by="order_id", complete=True),
        relations.wait_related(other, by="order_id", timeout_s=60),
        relations.before(other, recorded, by="order_id"),
        relations.window(other, recorded, by="order_id", before_s=60),
    ):
        assert (answer.status, answer.lacking) == (Status.ABSENT, (("order_id", "no header:order_id"),))
        assert "no value of order_id (no header:order_id): nothing was looked for" in answer.explanation
        assert answer.explanation in repr(answer)
    assert [key for key, _ in relations.related(other).lacking] == ["order_id", "call"]
    [(key, reason)] = relations.related(impossible, by="order_id").lacking
    assert (key, reason) == ("order_id", "header:order_id cannot be a value: too_long")
    # A value that was looked for, with another key that the message lacks.
    answer = relations.related(order, by=["order_id", "call"])
    assert (answer.status, answer.lacking, answer.explanation) == (Status.ABSENT, (), "")


def test_nobody_records_is_told_from_a_recorder_behind(
    amqp_url: str, engine: sa.Engine, relations: Relations, recorded: str, caplog: pytest.LogCaptureFixture
) -> None:
    """What is not recorded yet and has no recorder is named; a wait for it says so once in the log."""
    publish_plain(amqp_url, recorded, [(b"", {"order_id": "b"})])
    order = relations.read(recorded, 0)
    for _ in range(2):
        # A wait that is too short for a proof says so.
        tried = (relations.wait_related(order, by="order_id", timeout_s=0.2) for _ in range(100))
        answer = next(each for each in tried if each.status is not Status.UNPROVEN)
        assert (answer.status, answer.unattended) == (Status.NOT_RECORDED_YET, (recorded,))
        assert answer.explanation == f"nobody records {recorded!r}: relatum record {recorded}"
    told = [each for each in caplog.records if each.name == "relatum.relations"]
    assert [(each.levelno, answer.explanation in each.getMessage()) for each in told] == [(logging.WARNING, True)]
    assert relations.find("order_id", "b").unattended == (recorded,)
    record_as(engine, "somebody")
    answer = relations.find("order_id", "b")
    assert (answer.status, answer.unattended, answer.explanation) == (Status.NOT_RECORDED_YET, (), "")


def test_the_command_says_why_there_is_nothing(
    amqp_url: str, stream_url: str, database_url: str, recorded: str
) -> None:
    """`related` of a message without the key, and `find` of what nobody records: as text and as JSON."""
    relatum = Relatum(amqp_url, stream_url, database_url)
    ended = relatum.run("related", recorded, "1", "--by", "order_id")
    assert (ended.returncode, ended.stderr) == (6, "")
    assert ended.stdout.startswith("absent: this message has no value of order_id (no header:order_id): nothing was")
    document = json.loads(relatum.run("related", recorded, "1", "--by", "order_id", "--json").stdout)
    assert document["lacking"] == [{"key": "order_id", "reason": "no header:order_id"}]
    publish_plain(amqp_url, recorded, [(b"", {"order_id": "b"})])
    ended = relatum.run("find", "order_id", "b")
    assert ended.returncode == 8
    assert f"nobody records {recorded!r}: relatum record {recorded}" in ended.stdout
    assert json.loads(relatum.run("find", "order_id", "b", "--json").stdout)["unattended"] == [recorded]


def test_a_status_begins_with_who_records(
    amqp_url: str, stream_url: str, database_url: str, engine: sa.Engine, recorded: str
) -> None:
    """`recording` is said while somebody does; else the first line says that nobody does."""
    [found] = status(amqp_url, engine.url)
    assert (found.state, found.recorder) == ("unattended", None)
    shown = Relatum(amqp_url, stream_url, database_url).ok("status", recorded)
    assert shown.startswith(f"{recorded}: unattended: nobody records it now; relatum record {recorded}"), shown
    with recording(amqp_url, engine, recorded):
        publish_plain(amqp_url, recorded, [(b"", {})])
        wait_recorded(amqp_url, engine, recorded)
        [found] = status(amqp_url, engine.url)
    assert found.state == "recording"
    assert found.recorder is not None


def test_keys_are_told_as_they_are_defined(
    amqp_url: str, stream_url: str, database_url: str, engine: sa.Engine, caplog: pytest.LogCaptureFixture
) -> None:
    """A new key is a line in the log; a header named like a property is hinted at; a conflict says how to go on."""
    with caplog.at_level(logging.INFO, "relatum.keys"):
        for _ in range(2):
            add_keys(engine, ["orderid"])
    assert [each.getMessage() for each in caplog.records if each.name == "relatum.keys"] == [
        "defined key 'orderid' (new): header:orderid, text"
    ]
    relatum = Relatum(amqp_url, stream_url, database_url)
    ended = relatum.run("keys", "add", "call", "--source", "correlation_id", "--json")
    assert (ended.returncode, json.loads(ended.stdout)[0]["source"]) == (0, ["header:correlation_id"])
    assert "--source property:correlation_id" in ended.stderr
    ended = relatum.run("keys", "add", "call", "--source", "property:correlation_id")
    assert ended.returncode == 2
    assert "as header:correlation_id, text, and was asked for now as property:correlation_id, text" in ended.stderr
    assert "KeyDefinition('call', source='header:correlation_id')" in ended.stderr


_PUBLISHER = """
import sys, pika, relatum
broker, database, stream, ending = sys.argv[1:]
connection = pika.BlockingConnection(pika.URLParameters(broker))
relatum.intercept(connection, database=database)
channel = connection.channel()
if ending == "close":
    channel.basic_publish("", stream, b"")
elif ending == "wait":
    relatum.publish(channel, "", stream, b"").wait(timeout_s=90)
else:
    channel.basic_publish("", stream, b"")
    relatum.release(connection)
connection.close()
"""


def test_a_process_says_what_it_leaves_unrecorded(place: Place) -> None:
    """A publisher that only closes its connection is told of `release`; one that releases, or has waited, is not."""

    def publish(ending: str) -> str:
        command = [sys.executable, "-c", _PUBLISHER, place.amqp, place.database, place.stream, ending]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=90).stderr

    with place.engine.begin() as connection:
        # Nothing can be recorded meanwhile.
        connection.execute(sa.text("LOCK TABLE relatum.coverage"))
        told = publish("close")
    assert "the process ends with messages that are not recorded" in told
    assert repr(place.stream) in told
    assert "relatum.release(…)" in told
    assert publish("wait") == ""
    assert publish("release") == ""
