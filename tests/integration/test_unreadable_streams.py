"""One stream that cannot be read does not affect the others, and is named by every answer that leaves it out."""

from datetime import datetime

import pytest
import sqlalchemy as sa
from typer.testing import CliRunner

from relatum.errors import AccessRefused, NotAStream, StreamNotFound
from relatum.local import LocalRabbitMQ
from relatum.membership import GROUP_KEY
from relatum.reading import StreamReader
from relatum.recording import backfill, prune, status, verify
from relatum.recording.embedded import EmbeddedRecorder
from relatum.store.catalog import add_keys
from relatum_cli.app import app
from relatum_cli.exits import ExitCode
from relatum_consumer import Relations, Status
from relatum_consumer.web import WebOptions
from tests.support import (
    broker_connection,
    declare_stream,
    delete_stream,
    in_a_try,
    new_streams,
    publish_plain,
    record,
    recorded_to,
    recording,
    unique_name,
    wait_until,
)
from tests.support.groups import group_id, whole_group
from tests.support.parts import Parts
from tests.support.place import Place
from tests.support.rabbitmq_tools import add_users, as_user
from tests.support.relations import FACES, open_relations
from tests.support.web import asking

OPEN, CLOSED = "open-orders", "closed-orders"


@pytest.fixture(scope="module")
def owner_url(own_broker: LocalRabbitMQ) -> str:
    """The URL of a broker of this module, with a user "reader" who may read the streams "open-…" alone."""
    add_users(own_broker, {"reader": ("^$", "^$", "^open-.*$")})
    for name in (OPEN, CLOSED):
        declare_stream(own_broker.broker_url, name)
        messages = [(b"", {"order_id": "both"}), (b"", {"order_id": f"only {name}"})]
        publish_plain(own_broker.broker_url, name, [*messages, *whole_group(1 if name == OPEN else 2, 3)])
    return own_broker.broker_url


@pytest.fixture
def reader_url(owner_url: str, engine: sa.Engine) -> str:
    """The URL of the user who may not read all that is recorded."""
    add_keys(engine, ["order_id", GROUP_KEY])
    for name in (OPEN, CLOSED):
        backfill(owner_url, engine.url, name)
    return as_user(owner_url, "reader")


def test_status_prune_and_verify_go_on_with_the_others(reader_url: str, owner_url: str, engine: sa.Engine) -> None:
    """A stream that this user may not read has a row with its reason, and does not affect the other one."""
    closed, opened = status(reader_url, engine.url)
    assert (closed.stream, closed.state, closed.lag_offsets, closed.last) == (CLOSED, "refused", None, None)
    assert isinstance(closed.error, AccessRefused)
    assert closed.rows > 0
    assert (opened.stream, opened.state, opened.lag_offsets, opened.error) == (OPEN, "unattended", 0, None)
    # As if retention had dropped them: the streams begin at 0.
    Parts(engine).sql("UPDATE relatum.relationships SET stream_offset = -1 WHERE value = 'both'")
    pruned = prune(reader_url, engine.url)
    assert (pruned.rows, list(pruned.failed)) == ({OPEN: 1}, [CLOSED])
    servers = ["--broker", reader_url, "--database", str(engine.url.render_as_string(hide_password=False))]
    ended = CliRunner().invoke(app, ["prune", CLOSED, *servers])
    assert (ended.exit_code, ended.stdout.strip()) == (ExitCode.CONFIGURATION, "Nothing was deleted.")
    report = verify(reader_url, engine.url, [CLOSED, OPEN])
    assert ([each.stream for each in report.streams], list(report.failed)) == ([OPEN], [CLOSED])
    assert not report.ok
    with pytest.raises(AccessRefused, match=CLOSED):
        verify(reader_url, engine.url, [CLOSED])


def test_a_publishers_recorder_that_is_closed_records_the_others_to_their_end(
    reader_url: str, owner_url: str, engine: sa.Engine
) -> None:
    """An embedded recorder that is closed records readable streams to their end although another is unreadable."""

    def leaves_nothing() -> bool:
        recorder = EmbeddedRecorder(reader_url, engine.url)
        publish_plain(owner_url, OPEN, [(b"", {"order_id": "last"})])
        for name in (CLOSED, OPEN):
            recorder.watch("", name)
        recorder.close()
        with StreamReader.open(owner_url) as reader:
            return recorded_to(engine, OPEN) == reader.bounds(OPEN).end

    in_a_try(leaves_nothing, what="recorded before the end")


@pytest.mark.parametrize("face", FACES)
def test_look_ups_go_on_with_the_others_and_say_no_false_absent(face: str, reader_url: str, database_url: str) -> None:
    """Lookups find what is in readable streams, are unproven where an unreadable one may have more, and name it."""
    with open_relations(face, reader_url, database_url) as relations:
        found = relations.find("order_id", f"only {OPEN}")
        assert (found.status, [each.stream for each in found.ids]) == (Status.FOUND, [OPEN])
        for complete in (False, True):
            part = relations.find("order_id", "both", complete=complete)
            assert (part.status, [each.stream for each in part.ids]) == (Status.UNPROVEN, [OPEN])
            assert [each.stream for each in part.unread] == [CLOSED]
            unread = relations.find("order_id", f"only {CLOSED}", complete=complete)
            assert (unread.status, [each.stream for each in unread.unread]) == (Status.UNPROVEN, [CLOSED])
            nothing = relations.find("order_id", "nowhere", complete=complete)
            assert (nothing.status, nothing.streams) == (Status.UNPROVEN, (OPEN,))
            ((unreadable_streams, reason),) = nothing.unreadable_streams
            assert unreadable_streams == CLOSED
            assert "does not let" in reason
        message = relations.read(OPEN, 1)
        assert relations.related(message).unreadable_streams == nothing.unreadable_streams
        # A wait that is too short to look names nothing.
        tried = (relations.wait_related(message, timeout_s=2) for _ in range(30))
        waited = next(each for each in tried if each.unreadable_streams)
        assert (waited.status, waited.unreadable_streams) == (Status.UNPROVEN, nothing.unreadable_streams)
        around = relations.around(datetime(1970, 1, 1), before_s=1e12, after_s=1e12)
        assert {each.stream for each in around.ids} == {OPEN}
        assert (around.status, {each.stream for each in around.unread}) == (Status.UNPROVEN, {CLOSED})
        # By its name, it is requested explicitly: that it cannot be read is an error.
        for value in ("nowhere", "both"):
            with pytest.raises(AccessRefused, match=CLOSED):
                relations.find("order_id", value, streams=[OPEN, CLOSED])


def test_groups_go_on_with_the_others(
    one_face: str, reader_url: str, database_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Groups of readable streams are given whole, and a position that leaves out a stream says so."""
    with open_relations(one_face, reader_url, database_url) as relations:
        assert [group.group_id for group in relations.groups(follow=False)] == [group_id(1)]
        assert f"{CLOSED!r} is left out" in caplog.text
        position = relations.group_position(group_id(1))
        assert (position.is_complete, position.is_of_all, position.is_proven) == (True, False, False)
        assert CLOSED not in position.streams


def test_a_stream_that_this_user_may_not_read_is_not_written(
    reader_url: str, owner_url: str, engine: sa.Engine, caplog: pytest.LogCaptureFixture
) -> None:
    """A recorder that may not read a stream logs that and does not add it to the table."""
    name = unique_name("closed")
    declare_stream(owner_url, name)
    with recording(reader_url, engine, name):
        wait_until(lambda: f"reading of stream {name!r} is waiting" in caplog.text, what="the refusal is told")
    assert name not in [each.stream for each in status(owner_url, engine.url)]


@pytest.mark.differs
def test_a_recorded_stream_that_is_a_queue_now_stops_no_other(place: Place) -> None:
    """A recorded stream that is a queue now is shown with its reason, and lookups treat it as deleted."""
    with new_streams(place.amqp, 1) as (name,), broker_connection(place.amqp) as connection:
        for each in (name, place.stream):
            place.put((b"", {"order_id": each}), to=each)
        place.record(name, place.stream, keys=["order_id"])
        delete_stream(place.amqp, name)
        connection.channel().queue_declare(name, durable=True)
        found = {each.stream: each for each in status(place.amqp, place.database)}
        assert (found[name].state, found[place.stream].state) == ("not_a_stream", "unattended")
        assert isinstance(found[name].error, NotAStream)
        assert list(prune(place.amqp, place.database).failed) == [name]
        with Relations(place.amqp, place.database) as relations:
            assert relations.find("order_id", place.stream).status is Status.FOUND
            assert relations.find("order_id", name).status is Status.DELETED
            assert relations.find("order_id", "nowhere").streams == (place.stream,)
            with pytest.raises((NotAStream, StreamNotFound), match=name):
                relations.find("order_id", "nowhere", streams=name)


def test_the_page_shows_the_latest_messages_of_the_others(owner_url: str, engine: sa.Engine, database_url: str) -> None:
    """An unreadable stream is left out, unless it was named."""
    record(owner_url, engine, OPEN, CLOSED, keys=["order_id"])
    with asking(WebOptions(as_user(owner_url, "reader"), database_url, timeout_s=60)) as page:
        answer = page.answer("/live")
        assert {row["stream"] for row in answer["results"]} == {OPEN}
        assert (answer["streams"], answer["streams_count"]) == ([OPEN], 2)
        assert page.get(f"/api/live?stream={CLOSED}").status_code == 403
