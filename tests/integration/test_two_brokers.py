"""Two brokers that have a stream of the same name, and one database: neither is taken for the other."""

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from uuid import UUID

import pytest
import sqlalchemy as sa
from click.testing import Result
from typer.testing import CliRunner

from relatum.common.ids import IDENTITY_STREAM
from relatum.errors import AnotherBroker, StreamReplaced
from relatum.keys import KeyDefinition
from relatum.local import LocalRabbitMQ
from relatum.reading import StreamReader, claimed_identity
from relatum.recording import Recorder, backfill, forget, forget_origin, prune, status, verify
from relatum.store.catalog import add_keys
from relatum_cli.app import app
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


@dataclass(frozen=True)
class Two:
    """Two brokers, the stream that both have, with other messages in each, and one that is here alone."""

    here: str
    there: str
    engine: sa.Engine
    stream: str
    alone: str

    def record(self, url: str, *streams: str) -> None:
        record(url, self.engine, *(streams or (self.stream,)), keys=["order_id"])

    def record_until_of(self, url: str) -> None:
        """Record the stream until it is known to be that broker's."""
        of = id_of(url)
        assert of is not None
        with recording(url, self.engine, self.stream):
            wait_until(lambda: self.generations()[-1][1] == of, what="whose the stream is")

    def generations(self) -> list[tuple[int, UUID | None]]:
        """The generations of the stream, each with its broker."""
        query = sa.text("SELECT generation, broker_id FROM relatum.streams WHERE name = :name ORDER BY generation")
        with self.engine.begin() as connection:
            return [(row[0], row[1]) for row in connection.execute(query, {"name": self.stream})]

    def refuses(self, url: str) -> None:
        with pytest.raises(AnotherBroker):
            Recorder(url, self.engine.url, [self.stream]).run(threading.Event())


@pytest.fixture
def two(amqp_url: str, own_broker: LocalRabbitMQ, engine: sa.Engine) -> Iterator[Two]:
    name, alone = unique_name("both"), unique_name("alone")
    for url, count in ((amqp_url, 5), (own_broker.broker_url, 9)):
        declare_stream(url, name)
        publish_plain(url, name, [(b"%s %d" % (url.encode()[-8:], n), {"order_id": f"o{n}"}) for n in range(count)])
    declare_stream(amqp_url, alone)
    publish_plain(amqp_url, alone, [(b"mine", {"order_id": "o3"})])
    yield Two(amqp_url, own_broker.broker_url, engine, name, alone)
    for url, stream in ((amqp_url, name), (own_broker.broker_url, name), (amqp_url, alone)):
        delete_stream(url, stream)


def id_of(url: str) -> UUID | None:
    with StreamReader.open(url) as reader:
        return claimed_identity(reader).broker_id


def test_another_brokers_stream_is_one_clear_error(two: Two, database_url: str) -> None:
    """The recorder, back-fill, comparison and commands of another broker name its owner, and write nothing."""
    one, other = two.there, two.here
    two.record(one)
    before = rows_of(two.engine, two.stream)
    for ask in (
        lambda: Recorder(other, two.engine.url, [two.stream]).run(threading.Event()),
        lambda: backfill(other, two.engine.url, two.stream),
        lambda: verify(other, two.engine.url, [two.stream]),
    ):
        with pytest.raises(AnotherBroker) as caught:
            ask()
        for url in (one, other):
            assert str(id_of(url))[:8] in str(caught.value)
        assert caught.value.stream == two.stream
    environment = {"RELATUM_DATABASE_URL": database_url, "RELATUM_BROKER_URL": other, "COLUMNS": "500"}

    def run(*arguments: str) -> Result:
        return CliRunner().invoke(app, list(arguments), env=environment)

    for command in (
        ["record", two.stream],
        ["find", "order_id", "o1", "--streams", two.stream],
        ["status", two.stream],
    ):
        ended = run(*command)
        assert ended.exit_code == 3, (command, ended.output)
        assert str(id_of(one))[:8] in ended.output
    assert rows_of(two.engine, two.stream) == before
    assert two.generations() == [(1, id_of(one))]
    assert verify(one, two.engine.url, [two.stream]).ok
    assert json.loads(run("forget", "--origin", two.stream, "--json").stdout) == [two.stream]
    assert two.generations() == [(1, None)]


def test_another_brokers_retention_prunes_nothing(two: Two) -> None:
    """`prune` of another broker, whose stream of that name begins later, names the owner and deletes no row."""
    two.record(two.here)
    assert id_of(two.there) != id_of(two.here)
    delete_stream(two.there, two.stream)
    declare_stream(two.there, two.stream, x_max_length_bytes=200_000, x_stream_max_segment_size_bytes=50_000)
    publish_plain(two.there, two.stream, [b"x" * 10_000] * 60)
    with StreamReader.open(two.there) as reader:
        wait_until(lambda: (reader.bounds(two.stream).first or 0) > 5, what="retention")
    before = rows_of(two.engine, two.stream)
    report = prune(two.there, two.engine.url)
    assert isinstance(report.failed[two.stream], AnotherBroker)
    assert rows_of(two.engine, two.stream) == before
    assert prune(two.here, two.engine.url).failed == {}


def test_lookups_name_another_brokers_stream_or_leave_it_out(two: Two) -> None:
    """A lookup that names another broker's stream is an error; one of all streams names it and is unproven."""
    stream, alone = two.stream, two.alone
    two.record(two.there)
    two.record(two.here, alone)
    with Relations(two.here, two.engine.url) as relations:
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
        none, traced = relations.find("order_id", "o8"), relations.trace(("order_id", "o3"))
        for answer in (found, none):
            assert (answer.status, [each.stream for each in answer.unreadable_streams]) == (Status.UNPROVEN, [stream])
        assert found.streams == (alone,)
        assert [each.stream for each in traced.unreadable_streams] == [stream]
        assert relations.find("order_id", "o3", streams=alone).status is Status.FOUND
        assert not relations.find("order_id", "o8", streams=alone)
    # The broker that owns it is not affected.
    with Relations(two.there, two.engine.url) as others:
        assert others.find("order_id", "o8").status is Status.UNPROVEN
        assert others.find("order_id", "o8", streams=stream).status is Status.FOUND


def test_a_stream_that_was_forgotten_is_anybodys(two: Two) -> None:
    """Another broker records a forgotten stream; where only the origin was forgotten, as a new generation."""
    two.record(two.there)
    assert forget_origin(two.engine.url, [two.stream]) == [two.stream]
    ours = [(generation, id_of(two.here)) for generation in (1, 2)]
    with recording(two.here, two.engine, two.stream):
        wait_until(lambda: two.generations() == ours, what="a generation of its own")
    forget(two.engine.url, [two.stream])
    two.record(two.there)
    assert two.generations()[-1][1] == id_of(two.there)
    assert verify(two.there, two.engine.url, [two.stream]).ok


def test_a_recorder_of_others_goes_on_beside_another_brokers_stream(two: Two, caplog: pytest.LogCaptureFixture) -> None:
    """A recorder of several streams records its own, and leaves another broker's to that one, with a log line."""
    two.record(two.there)
    before = rows_of(two.engine, two.stream)
    with recording(two.here, two.engine, two.stream, two.alone):
        publish_plain(two.here, two.alone, [(b"more", {"order_id": "o4"})])
        wait_recorded(two.here, two.engine, two.alone)
        wait_until(lambda: "recorded from the broker" in caplog.text, what="a line about the other broker")
        # Its own broker may still use it.
        publish_plain(two.there, two.stream, [(b"more", {"order_id": "o9"})])
        two.record(two.there)
    assert len(rows_of(two.engine, two.stream)) == len(before) + 1
    assert two.generations() == [(1, id_of(two.there))]
    shown = {each.stream: each for each in status(two.here, two.engine.url)}
    assert (shown[two.stream].state, type(shown[two.stream].error)) == ("another_broker", AnotherBroker)
    assert str(id_of(two.there))[:8] in str(shown[two.stream].broker)
    assert shown[two.alone].state in ("recording", "unattended")


def test_a_broker_that_has_lost_its_id_is_another_one_until_somebody_says_so(two: Two) -> None:
    """A broker that lost its id gets its streams back, with all that was recorded, once their origin is forgotten."""
    two.record(two.there)
    before, rows = id_of(two.there), rows_of(two.engine, two.stream)
    delete_stream(two.there, IDENTITY_STREAM)
    two.refuses(two.there)
    forget_origin(two.engine.url, [two.stream])
    two.record_until_of(two.there)
    assert two.generations() == [(1, id_of(two.there))] != [(1, before)]
    assert rows_of(two.engine, two.stream) == rows


def test_a_stream_that_is_declared_again_is_replaced(two: Two) -> None:
    """A stream declared again on its broker is a new generation of that broker, which open lookups follow."""
    two.record(two.here)
    with Relations(two.here, two.engine.url) as relations:
        assert relations.find("order_id", "o3", streams=two.stream).ids == ((two.stream, 3),)
        delete_stream(two.here, two.stream)
        declare_stream(two.here, two.stream)
        publish_plain(two.here, two.stream, [(b"again", {"order_id": each}) for each in ("o6", "o3")])
        with pytest.raises(StreamReplaced):
            relations.find("order_id", "o2", streams=two.stream)
        with recording(two.here, two.engine, two.stream):
            wait_until(lambda: len(two.generations()) == 2, what="another generation")
            wait_recorded(two.here, two.engine, two.stream)
        assert relations.find("order_id", "o6", streams=two.stream).ids == ((two.stream, 0),)
        assert relations.find("order_id", "o3", streams=two.stream).ids == ((two.stream, 1),)
        wait_until(lambda: relations.find("order_id", "o5").status is Status.ABSENT, what="its use")
    assert two.generations() == [(1, id_of(two.here)), (2, id_of(two.here))]


def test_who_has_no_rights_to_the_id_records_as_before(two: Two, own_broker: LocalRabbitMQ) -> None:
    """Without rights to its id a broker is unknown and recorded anyway, until a recorder that has them comes."""
    add_users(own_broker, {"narrow": ("^both", "^both", "^both")})
    narrow = as_user(two.there, "narrow")
    delete_stream(two.there, IDENTITY_STREAM)
    assert id_of(narrow) is None
    two.record(narrow)
    assert two.generations() == [(1, None)]
    with two.engine.connect() as connection:
        assert connection.execute(sa.text("SELECT FROM relatum.brokers")).all() == []
    assert id_of(two.there) is not None
    assert id_of(narrow) is None
    two.record_until_of(two.there)
    two.refuses(two.here)
    publish_plain(two.there, two.stream, [(b"more", {"order_id": "o9"})])
    two.record(narrow)
    assert two.generations() == [(1, id_of(two.there))]
    with Relations(narrow, two.engine.url) as relations:
        assert relations.find("order_id", "o9").status is Status.FOUND


def test_a_back_fill_of_all_streams_passes_over_another_brokers(two: Two, database_url: str) -> None:
    """The streams behind another broker's are back-filled, and the command ends with the code of its error."""
    later = unique_name("later")
    two.record(two.there)
    declare_stream(two.here, later)
    try:
        publish_plain(two.here, later, [(b"", {"order_id": "o1", "host": "a"})])
        two.record(two.here, later)
        add_keys(two.engine, [KeyDefinition("host")])
        environment = {"RELATUM_DATABASE_URL": database_url, "RELATUM_BROKER_URL": two.here}
        ended = CliRunner().invoke(app, ["backfill", "--json"], env=environment)
        assert (ended.exit_code, [(each["stream"], each["rows"]) for each in json.loads(ended.stdout)]) == (
            3,
            [(later, 1)],
        )
    finally:
        delete_stream(two.here, later)
