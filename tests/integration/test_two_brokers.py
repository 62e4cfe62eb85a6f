"""Two brokers that have a stream of the same name, and one database: neither is taken for the other."""

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from uuid import UUID

import pytest
from click.testing import Result
from typer.testing import CliRunner

from relatum.common.ids import IDENTITY_STREAM
from relatum.errors import AnotherBroker, StreamReplaced
from relatum.keys import KeyDefinition
from relatum.local import LocalRabbitMQ
from relatum.reading import StreamReader, claimed_identity
from relatum.recording import Recorder, forget, forget_origin, prune, status
from relatum.store.catalog import add_keys
from relatum_cli.app import app
from relatum_consumer import Relations, Status
from tests.support import declare_stream, delete_stream, new_streams, wait_until
from tests.support.place import Place
from tests.support.rabbitmq_tools import add_users, as_user

pytestmark = pytest.mark.differs


@dataclass(frozen=True)
class Two:
    """A stream of the same name at two brokers, with other messages in each, and one that is here alone."""

    here: Place
    there: Place
    alone: str

    def record_until_of(self, at: Place) -> None:
        """Record the stream until it is known to be that broker's."""
        of = id_of(at)
        assert of is not None
        with at.recording():
            wait_until(lambda: self.generations()[-1][1] == of, what="whose the stream is")

    def generations(self) -> list[tuple[int, UUID | None]]:
        """The generations of the stream, each with its broker."""
        query = "SELECT generation, broker_id FROM relatum.streams WHERE name = :name ORDER BY generation"
        return [(row[0], row[1]) for row in self.here.sql(query, name=self.here.stream)]


def refuses(at: Place) -> None:
    with pytest.raises(AnotherBroker):
        Recorder(at.amqp, at.engine.url, [at.stream]).run(threading.Event())


@pytest.fixture
def two(place: Place, own_broker: LocalRabbitMQ) -> Iterator[Two]:
    here = replace(place, keys=["order_id"])
    there = replace(here, amqp=own_broker.broker_url, stream_url=own_broker.stream_url)
    declare_stream(there.amqp, there.stream)
    for at, count in ((here, 5), (there, 9)):
        at.put(*((b"%s %d" % (at.amqp.encode()[-8:], n), {"order_id": f"o{n}"}) for n in range(count)))
    with new_streams(here.amqp, 1) as (alone,):
        here.put((b"mine", {"order_id": "o3"}), to=alone)
        yield Two(here, there, alone)
    delete_stream(there.amqp, there.stream)


def id_of(at: Place) -> UUID | None:
    with StreamReader.open(at.amqp) as reader:
        return claimed_identity(reader).broker_id


def test_another_brokers_stream_is_one_clear_error(two: Two) -> None:
    """The recorder, back-fill, comparison and commands of another broker name its owner, and write nothing."""
    one, other, stream = two.there, two.here, two.here.stream
    one.record()
    before = one.rows()
    recorder = Recorder(other.amqp, other.engine.url, [stream])
    for ask in (lambda: recorder.run(threading.Event()), other.backfill, other.verify):
        with pytest.raises(AnotherBroker) as caught:
            ask()
        for at in (one, other):
            assert str(id_of(at))[:8] in str(caught.value)
        assert caught.value.stream == stream
    environment = {"RELATUM_DATABASE_URL": other.database, "RELATUM_BROKER_URL": other.amqp, "COLUMNS": "500"}

    def run(*arguments: str) -> Result:
        return CliRunner().invoke(app, list(arguments), env=environment)

    for command in (["record", stream], ["find", "order_id", "o1", "--streams", stream], ["status", stream]):
        ended = run(*command)
        assert ended.exit_code == 3, (command, ended.output)
        assert str(id_of(one))[:8] in ended.output
    assert one.rows() == before
    assert two.generations() == [(1, id_of(one))]
    assert one.verify().ok
    assert json.loads(run("forget", "--origin", stream, "--json").stdout) == [stream]
    assert two.generations() == [(1, None)]


def test_another_brokers_retention_prunes_nothing(two: Two) -> None:
    """`prune` of another broker, whose stream of that name begins later, names the owner and deletes no row."""
    here, there = two.here, two.there
    here.record()
    assert id_of(there) != id_of(here)
    there.declare_again(x_max_length_bytes=200_000, x_stream_max_segment_size_bytes=50_000)
    there.put(*[b"x" * 10_000] * 60)
    wait_until(lambda: (there.bounds().first or 0) > 5, what="retention")
    before = here.rows()
    report = prune(there.amqp, there.engine.url)
    assert isinstance(report.failed[there.stream], AnotherBroker)
    assert here.rows() == before
    assert prune(here.amqp, here.engine.url).failed == {}


def test_lookups_name_another_brokers_stream_or_leave_it_out(two: Two) -> None:
    """A lookup that names another broker's stream is an error; one of all streams names it and is unproven."""
    stream, alone = two.here.stream, two.alone
    two.there.record()
    two.here.record(alone)
    with Relations(two.here.amqp, two.here.database) as relations:
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
    with Relations(two.there.amqp, two.there.database) as others:
        assert others.find("order_id", "o8").status is Status.UNPROVEN
        assert others.find("order_id", "o8", streams=stream).status is Status.FOUND


def test_a_stream_that_was_forgotten_is_anybodys(two: Two) -> None:
    """Another broker records a forgotten stream; where only the origin was forgotten, as a new generation."""
    here, there = two.here, two.there
    there.record()
    assert forget_origin(here.database, [here.stream]) == [here.stream]
    ours = [(generation, id_of(here)) for generation in (1, 2)]
    with here.recording():
        wait_until(lambda: two.generations() == ours, what="a generation of its own")
    forget(here.database, [here.stream])
    there.record()
    assert two.generations()[-1][1] == id_of(there)
    assert there.verify().ok


def test_a_recorder_of_others_goes_on_beside_another_brokers_stream(two: Two, caplog: pytest.LogCaptureFixture) -> None:
    """A recorder of several streams records its own, and leaves another broker's to that one, with a log line."""
    here, there = two.here, two.there
    there.record()
    before = there.rows()
    with here.recording(here.stream, two.alone):
        here.put((b"more", {"order_id": "o4"}), to=two.alone)
        here.wait_recorded(two.alone)
        wait_until(lambda: "recorded from the broker" in caplog.text, what="a line about the other broker")
        # Its own broker may still use it.
        there.put_recorded((b"more", {"order_id": "o9"}))
    assert len(there.rows()) == len(before) + 1
    assert two.generations() == [(1, id_of(there))]
    shown = {each.stream: each for each in status(here.amqp, here.engine.url)}
    assert (shown[here.stream].state, type(shown[here.stream].error)) == ("another_broker", AnotherBroker)
    assert str(id_of(there))[:8] in str(shown[here.stream].broker)
    assert shown[two.alone].state in ("recording", "unattended")


def test_a_broker_that_has_lost_its_id_is_another_one_until_somebody_says_so(two: Two) -> None:
    """A broker that lost its id gets its streams back, with all that was recorded, once their origin is forgotten."""
    there = two.there
    there.record()
    before, rows = id_of(there), there.rows()
    delete_stream(there.amqp, IDENTITY_STREAM)
    refuses(there)
    forget_origin(there.database, [there.stream])
    two.record_until_of(there)
    assert two.generations() == [(1, id_of(there))] != [(1, before)]
    assert there.rows() == rows


def test_a_stream_that_is_declared_again_is_replaced(two: Two) -> None:
    """A stream declared again on its broker is a new generation of that broker, which open lookups follow."""
    here, stream = two.here, two.here.stream
    here.record()
    with Relations(here.amqp, here.database) as relations:
        assert relations.find("order_id", "o3", streams=stream).ids == ((stream, 3),)
        here.declare_again()
        here.put(*((b"again", {"order_id": each}) for each in ("o6", "o3")))
        with pytest.raises(StreamReplaced):
            relations.find("order_id", "o2", streams=stream)
        with here.recording():
            wait_until(lambda: len(two.generations()) == 2, what="another generation")
            here.wait_recorded()
        assert relations.find("order_id", "o6", streams=stream).ids == ((stream, 0),)
        assert relations.find("order_id", "o3", streams=stream).ids == ((stream, 1),)
        wait_until(lambda: relations.find("order_id", "o5").status is Status.ABSENT, what="its use")
    assert two.generations() == [(1, id_of(here)), (2, id_of(here))]


def test_who_has_no_rights_to_the_id_records_as_before(two: Two, own_broker: LocalRabbitMQ) -> None:
    """Without rights to its id a broker is unknown and recorded anyway, until a recorder that has them comes."""
    there, may = two.there, f"^{two.there.stream}"
    add_users(own_broker, {"narrow": (may, may, may)})
    narrow = replace(there, amqp=as_user(there.amqp, "narrow"))
    delete_stream(there.amqp, IDENTITY_STREAM)
    assert id_of(narrow) is None
    narrow.record()
    assert two.generations() == [(1, None)]
    assert there.sql("SELECT FROM relatum.brokers") == []
    assert id_of(there) is not None
    assert id_of(narrow) is None
    two.record_until_of(there)
    refuses(two.here)
    there.put((b"more", {"order_id": "o9"}))
    narrow.record()
    assert two.generations() == [(1, id_of(there))]
    with Relations(narrow.amqp, narrow.database) as relations:
        assert relations.find("order_id", "o9").status is Status.FOUND


def test_a_back_fill_of_all_streams_passes_over_another_brokers(two: Two) -> None:
    """The streams behind another broker's are back-filled, and the command ends with the code of its error."""
    here = two.here
    two.there.record()
    with new_streams(here.amqp, 1) as (later,):
        here.put_recorded((b"", {"order_id": "o1", "host": "a"}), to=later)
        add_keys(here.engine, [KeyDefinition("host")])
        environment = {"RELATUM_DATABASE_URL": here.database, "RELATUM_BROKER_URL": here.amqp}
        ended = CliRunner().invoke(app, ["backfill", "--json"], env=environment)
        filled = [(each["stream"], each["rows"]) for each in json.loads(ended.stdout)]
        assert (ended.exit_code, filled) == (3, [(later, 1)])
