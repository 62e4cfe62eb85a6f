"""Two brokers that have a stream of the same name, and one database: neither is taken for the other."""

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from uuid import UUID

import pytest
import sqlalchemy as sa
from click.testing import Result
from typer.testing import CliRunner

from relatum.command import complete_app
from relatum.errors import AnotherBroker, StreamReplaced
from relatum.local import LocalRabbitMQ
from relatum.reading import StreamReader, claimed_identity
from relatum.recording import Recorder, backfill, forget, forget_origin, status, verify
from relatum.wire import IDENTITY_STREAM
from relatum_consumer import Relations, Status
from tests.support import (
    declare_stream,
    delete_stream,
    publish_plain,
    record,
    recording,
    rows_of,
    unique_name,
    wait_recorded,
    wait_until,
)
from tests.support.tapped import add_users, as_user

pytestmark = pytest.mark.differs


@pytest.fixture
def stream(amqp_url: str, own_broker: LocalRabbitMQ) -> Iterator[str]:
    """A stream that both brokers have, with other messages in each."""
    name = unique_name("both")
    for url, count in ((amqp_url, 5), (own_broker.broker_url, 9)):
        declare_stream(url, name)
        publish_plain(url, name, [(b"%s %d" % (url.encode()[-8:], n), {"order_id": f"o{n}"}) for n in range(count)])
    yield name
    for url in (amqp_url, own_broker.broker_url):
        delete_stream(url, name)


def rows(engine: sa.Engine, stream: str) -> list[tuple[int, UUID | None]]:
    """The generations of a stream, each with its broker."""
    query = sa.text("SELECT generation, broker_id FROM relatum.streams WHERE name = :name ORDER BY generation")
    with engine.begin() as connection:
        return [(row[0], row[1]) for row in connection.execute(query, {"name": stream})]


def record_until_of(url: str, engine: sa.Engine, stream: str) -> None:
    """Record a stream until it is known to be that broker's."""
    of = id_of(url)
    assert of is not None
    with recording(url, engine, stream):
        wait_until(lambda: rows(engine, stream)[-1][1] == of, what="whose the stream is")


def id_of(url: str) -> UUID | None:
    """The id of the broker."""
    with StreamReader.open(url) as reader:
        return claimed_identity(reader).broker_id


@pytest.mark.parametrize("first_is_own", [True, False])
def test_another_brokers_stream_is_one_clear_error(
    amqp_url: str, own_broker: LocalRabbitMQ, engine: sa.Engine, stream: str, first_is_own: bool
) -> None:
    """The second broker's recorder, back-fill and comparison say so, name both, and write nothing."""
    one, other = (own_broker.broker_url, amqp_url) if first_is_own else (amqp_url, own_broker.broker_url)
    record(one, engine, stream, keys=["order_id"])
    before = rows_of(engine, stream)
    for ask in (
        lambda: Recorder(other, engine.url, [stream]).run(threading.Event()),
        lambda: backfill(other, engine.url, stream),
        lambda: verify(other, engine.url, [stream]),
    ):
        with pytest.raises(AnotherBroker) as caught:
            ask()
        for url in (one, other):
            assert str(id_of(url))[:8] in str(caught.value)
        assert caught.value.stream == stream
    assert rows_of(engine, stream) == before
    assert rows(engine, stream) == [(1, id_of(one))]
    assert verify(one, engine.url, [stream]).ok


@pytest.fixture
def shared(amqp_url: str, own_broker: LocalRabbitMQ, engine: sa.Engine, stream: str) -> Iterator[tuple[str, str]]:
    """The name of that stream, which is recorded from the other broker, and of one that is this broker's alone."""
    alone = unique_name("alone")
    declare_stream(amqp_url, alone)
    publish_plain(amqp_url, alone, [(b"mine", {"order_id": "o3"})])
    record(own_broker.broker_url, engine, stream, keys=["order_id"])
    record(amqp_url, engine, alone)
    yield stream, alone
    delete_stream(amqp_url, alone)


def test_lookups_name_another_brokers_stream_or_leave_it_out(
    relations: Relations, shared: tuple[str, str], own_broker: LocalRabbitMQ, engine: sa.Engine
) -> None:
    """Who names it gets the error; who names none gets an answer without it, which says so and is not proven."""
    stream, alone = shared
    for ask in (
        lambda: relations.find("order_id", "o3", streams=stream),
        lambda: relations.find("order_id", "o3", streams=[alone, stream]),
        lambda: relations.trace(("order_id", "o3"), streams=stream),
        lambda: relations.after(relations.find("order_id", "o3", streams=alone)[0], stream),
    ):
        with pytest.raises(AnotherBroker, match=stream):
            ask()
    found = relations.find("order_id", "o3")
    assert [message.body for message in found] == [b"mine"]
    assert (found.status, [each.stream for each in found.left_out]) == (Status.UNPROVEN, [stream])
    assert found.streams == (alone,)
    none = relations.find("order_id", "o8")
    assert (none.status, [each.stream for each in none.left_out]) == (Status.UNPROVEN, [stream])
    assert "another" in none.left_out[0].reason or "recorded from the broker" in none.left_out[0].reason
    traced = relations.trace(("order_id", "o3"))
    assert [each.stream for each in traced.left_out] == [stream]
    assert relations.find("order_id", "o3", streams=alone).status is Status.FOUND
    assert not relations.find("order_id", "o8", streams=alone)
    # Whose it is has no trouble.
    with Relations(own_broker.broker_url, engine.url) as others:
        assert others.find("order_id", "o8").status is Status.UNPROVEN
        assert others.find("order_id", "o8", streams=stream).status is Status.FOUND


def test_a_stream_that_was_forgotten_is_anybodys(
    amqp_url: str, own_broker: LocalRabbitMQ, engine: sa.Engine, stream: str
) -> None:
    """What was forgotten another broker records; where only the origin was, it begins a generation of its own."""
    record(own_broker.broker_url, engine, stream, keys=["order_id"])
    assert forget_origin(engine.url, [stream]) == [stream]
    record_until_of(amqp_url, engine, stream)
    assert rows(engine, stream) == [(1, None), (2, id_of(amqp_url))]
    forget(engine.url, [stream])
    record(own_broker.broker_url, engine, stream)
    assert rows(engine, stream)[-1][1] == id_of(own_broker.broker_url)
    assert verify(own_broker.broker_url, engine.url, [stream]).ok


def test_the_commands_say_whose_a_stream_is(
    amqp_url: str, own_broker: LocalRabbitMQ, database_url: str, engine: sa.Engine, stream: str
) -> None:
    """`record` ends with code 3, `status` names the broker, and `forget --origin` takes the stream for nobody's."""
    record(own_broker.broker_url, engine, stream, keys=["order_id"])
    environment = {"RELATUM_DATABASE_URL": database_url, "RELATUM_BROKER_URL": amqp_url, "COLUMNS": "500"}

    def run(*arguments: str) -> Result:
        return CliRunner().invoke(complete_app(), list(arguments), env=environment)

    for command in (["record", stream], ["find", "order_id", "o1", "--streams", stream], ["status", stream]):
        ended = run(*command)
        assert ended.exit_code == 3, (command, ended.output)
        assert str(id_of(own_broker.broker_url))[:8] in ended.output
    assert json.loads(run("forget", "--origin", stream, "--json").stdout) == [stream]
    assert rows(engine, stream) == [(1, None)]


def test_a_recorder_of_others_goes_on_beside_another_brokers_stream(
    amqp_url: str,
    own_broker: LocalRabbitMQ,
    engine: sa.Engine,
    shared: tuple[str, str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It records the others, names that one in its log once, and takes nothing of it."""
    stream, alone = shared
    before = rows_of(engine, stream)
    with recording(amqp_url, engine, stream, alone):
        publish_plain(amqp_url, alone, [(b"more", {"order_id": "o4"})])
        wait_recorded(amqp_url, engine, alone)
        wait_until(lambda: "recorded from the broker" in caplog.text, what="a line about the other broker")
        # The one it is of is not kept from it.
        publish_plain(own_broker.broker_url, stream, [(b"more", {"order_id": "o9"})])
        record(own_broker.broker_url, engine, stream)
    assert len(rows_of(engine, stream)) == len(before) + 1
    assert rows(engine, stream) == [(1, id_of(own_broker.broker_url))]
    shown = {each.stream: each for each in status(amqp_url, engine.url)}
    assert (shown[stream].state, type(shown[stream].error)) == ("another_broker", AnotherBroker)
    assert str(id_of(own_broker.broker_url))[:8] in str(shown[stream].broker)
    assert shown[alone].state in ("recording", "unattended")


def test_rows_of_before_are_adopted_by_who_has_the_messages(
    amqp_url: str, own_broker: LocalRabbitMQ, engine: sa.Engine, stream: str
) -> None:
    """A stream recorded by the release before is of the broker whose messages agree, and of no other from then on."""
    record(own_broker.broker_url, engine, stream, keys=["order_id"])
    with engine.begin() as connection:
        connection.execute(sa.text("UPDATE relatum.streams SET broker_id = NULL"))
        connection.execute(sa.text("DELETE FROM relatum.brokers"))
    record_until_of(own_broker.broker_url, engine, stream)
    assert len(rows(engine, stream)) == 1
    with pytest.raises(AnotherBroker):
        Recorder(amqp_url, engine.url, [stream]).run(threading.Event())


def test_a_broker_that_has_lost_its_id_has_its_messages_still(
    own_broker: LocalRabbitMQ, engine: sa.Engine, stream: str
) -> None:
    """It gets another id, and the streams are its own again; what was redeclared meanwhile is another broker's."""
    url = own_broker.broker_url
    other = unique_name("other")
    declare_stream(url, other)
    publish_plain(url, other, [(b"before", {"order_id": "o1"})])
    record(url, engine, stream, other, keys=["order_id"])
    before = id_of(url)
    delete_stream(url, IDENTITY_STREAM)
    delete_stream(url, other)
    declare_stream(url, other)
    publish_plain(url, other, [(b"after", {"order_id": "o1"})])
    record_until_of(url, engine, stream)
    after = id_of(url)
    assert after not in (None, before)
    assert rows(engine, stream) == [(1, after)]
    assert verify(url, engine.url, [stream]).ok
    with pytest.raises(AnotherBroker):
        Recorder(url, engine.url, [other]).run(threading.Event())
    delete_stream(url, other)


def test_a_stream_that_is_declared_again_is_replaced(amqp_url: str, engine: sa.Engine, stream_name: str) -> None:
    """On the same broker it is not taken for another one's; lookups that do not name it leave it out until then."""
    alone = unique_name("alone")
    declare_stream(amqp_url, alone)
    for name in (stream_name, alone):
        publish_plain(amqp_url, name, [(b"first", {"order_id": "o1"}), (b"second", {"order_id": "o2"})])
    record(amqp_url, engine, stream_name, alone, keys=["order_id"])
    delete_stream(amqp_url, stream_name)
    declare_stream(amqp_url, stream_name)
    publish_plain(amqp_url, stream_name, [(b"again", {"order_id": "o3"}), (b"again", {"order_id": "o4"})])
    with Relations(amqp_url, engine.url) as relations:
        with pytest.raises(StreamReplaced):
            relations.find("order_id", "o2", streams=stream_name)
        for value, count in (("o2", 1), ("o5", 0)):
            found = relations.find("order_id", value)
            assert (found.status, len(found)) == (Status.UNPROVEN, count)
            assert [each.stream for each in found.left_out] == [stream_name]
        assert [each.stream for each in relations.trace(("order_id", "o2")).left_out] == [stream_name]
        with recording(amqp_url, engine, stream_name):
            wait_until(lambda: len(rows(engine, stream_name)) == 2, what="another generation")
            wait_recorded(amqp_url, engine, stream_name)
        assert relations.find("order_id", "o3", streams=stream_name).status is Status.FOUND
        wait_until(lambda: relations.find("order_id", "o5").status is Status.ABSENT, what="its use")
    assert rows(engine, stream_name) == [(1, id_of(amqp_url)), (2, id_of(amqp_url))]
    delete_stream(amqp_url, alone)


def test_who_has_no_rights_to_the_id_records_as_before(
    own_broker: LocalRabbitMQ, engine: sa.Engine, stream: str
) -> None:
    """The broker is not known then, which speaks against nothing: neither when recording, nor when looking up."""
    add_users(own_broker, {"narrow": ("^both", "^both", "^both")})
    narrow = as_user(own_broker.broker_url, "narrow")
    delete_stream(own_broker.broker_url, IDENTITY_STREAM)
    assert id_of(narrow) is None
    record(narrow, engine, stream, keys=["order_id"])
    assert rows(engine, stream) == [(1, None)]
    assert id_of(own_broker.broker_url) is not None
    assert id_of(narrow) is None
    record_until_of(own_broker.broker_url, engine, stream)
    publish_plain(own_broker.broker_url, stream, [(b"more", {"order_id": "o9"})])
    record(narrow, engine, stream)
    assert rows(engine, stream) == [(1, id_of(own_broker.broker_url))]
    with Relations(narrow, engine.url) as relations:
        assert relations.find("order_id", "o9").status is Status.FOUND


def test_recorders_that_come_first_at_once_agree(own_broker: LocalRabbitMQ) -> None:
    """However many give the broker an id, it has one."""
    for _ in range(3):
        delete_stream(own_broker.broker_url, IDENTITY_STREAM)
        with ThreadPoolExecutor(6) as threads:
            found = set(threads.map(id_of, [own_broker.broker_url] * 6))
        assert None not in found
        assert len(found) == 1
