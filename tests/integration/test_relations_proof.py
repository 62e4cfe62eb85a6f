"""What it takes to say `absent`: streams that prove it, named in the answer; and what is said where nothing can."""

import json
from functools import partial
from typing import Any

import pytest
import sqlalchemy as sa

from relatum.errors import BrokerUnavailable, ConfigurationError, KeyNotDefined, NothingRecorded, RelatumError
from relatum.local import LocalServers
from relatum.store import add_keys
from relatum_consumer import Answer, Relations, Status
from tests import support
from tests.acceptance._command import Relatum
from tests.support import declare_stream, delete_stream, publish_plain
from tests.support.relations import FACES, open_relations
from tests.support.super_streams import super_stream

NOBODY_LISTENS = "amqp://guest:guest@127.0.0.1:129/"


record = partial(support.record, keys=["order_id"])
"""Records all that is in some streams."""


def order(number: Any) -> tuple[bytes, dict[str, Any]]:
    """A message with a key, and a time that AMQP 0.9.1 shows as well."""
    return b"order", {"order_id": number, "relatum_time": 1_000_000}


# --- nothing recorded -------------------------------------------------------------------------------------


def test_where_nothing_is_recorded_nothing_is_absent(
    amqp_url: str, engine: sa.Engine, relations: Relations, stream_name: str
) -> None:
    """Keys are defined and no recorder ever ran: an error that says what to do, `complete` or not."""
    add_keys(engine, ["order_id"])
    publish_plain(amqp_url, stream_name, [order("a"), (b"", {})])
    message, without_key = relations.read(stream_name, 0), relations.read(stream_name, 1)
    for ask in (
        lambda: relations.find("order_id", "a"),
        lambda: relations.find("order_id", "a", complete=True),
        lambda: relations.related(message),
        lambda: relations.related(without_key),
        lambda: relations.wait_related(message, timeout_s=0),
    ):
        with pytest.raises(NothingRecorded, match="relatum record") as caught:
            ask()
        assert isinstance(caught.value, ConfigurationError)
        assert caught.value.vhost == "/"


def test_where_no_key_is_defined_nothing_is_absent(
    amqp_url: str, engine: sa.Engine, relations: Relations, stream_name: str
) -> None:
    """By every key defined, of which there is none, nobody can look anything up."""
    publish_plain(amqp_url, stream_name, [order("a")])
    message = relations.read(stream_name, 0)
    for ask in (relations.related, lambda each: relations.wait_related(each, timeout_s=0)):
        with pytest.raises(KeyNotDefined, match="relatum keys add"):
            ask(message)


@pytest.mark.parametrize("face", FACES)
def test_a_virtual_host_without_records_is_an_error_that_names_those_with(
    amqp_url: str, stream_url: str, engine: sa.Engine, database_url: str, face: str, stream_name: str
) -> None:
    """The one forgotten in the URL, or mistyped: recorded streams of others are told; a missing one is refused."""
    publish_plain(amqp_url, stream_name, [order("a")])
    record(amqp_url, engine, stream_name)
    with engine.begin() as connection:
        connection.execute(sa.text("UPDATE relatum.streams SET vhost = 'shop'"))
    with open_relations(face, amqp_url, database_url) as relations, pytest.raises(NothingRecorded, match="'shop'"):
        relations.find("order_id", "a")
    missing = amqp_url.rstrip("/") + "/no-such-host"
    with open_relations(face, missing, database_url) as relations:
        with pytest.raises(RelatumError) as caught:
            relations.find("order_id", "a")
        assert not isinstance(caught.value, NothingRecorded), "the broker itself refuses it"


@pytest.mark.parametrize("face", FACES)
def test_a_broker_that_is_down_is_said_to_be_down(
    amqp_url: str, engine: sa.Engine, database_url: str, face: str, stream_name: str
) -> None:
    """Whether something is recorded or not: there is no proof without the broker."""
    add_keys(engine, ["order_id"])
    with open_relations(face, NOBODY_LISTENS, database_url, timeout_s=5) as relations:
        for complete in (False, True):
            with pytest.raises(BrokerUnavailable):
                relations.find("order_id", "a", complete=complete)
        record(amqp_url, engine, stream_name)
        for complete in (False, True):
            with pytest.raises(BrokerUnavailable):
                relations.find("order_id", "a", complete=complete)


def test_streams_that_are_all_gone_prove_nothing(
    amqp_url: str, engine: sa.Engine, relations: Relations, other_stream: str
) -> None:
    """What lay there was deleted; of the rest nobody can say anything, for no stream is left."""
    publish_plain(amqp_url, other_stream, [order("a")])
    record(amqp_url, engine, other_stream)
    delete_stream(amqp_url, other_stream)
    answer = relations.find("order_id", "a")
    assert (answer.status, answer.streams) == (Status.DELETED, (other_stream,))
    with pytest.raises(NothingRecorded):
        relations.find("order_id", "b")


# --- over which streams -----------------------------------------------------------------------------------


def test_every_answer_names_the_streams_it_holds_over(
    amqp_url: str, engine: sa.Engine, relations: Relations, stream_name: str, other_stream: str
) -> None:
    """Found, absent and not recorded; of one stream, several, or all; by key and by time."""
    publish_plain(amqp_url, stream_name, [order("a"), order("a"), (b"", {})])
    publish_plain(amqp_url, other_stream, [order("b")])
    record(amqp_url, engine, stream_name, other_stream)
    both, one = tuple(sorted([stream_name, other_stream])), (stream_name,)
    message, without_key = relations.read(stream_name, 0), relations.read(stream_name, 2)

    def told(answer: Answer) -> tuple[Status, tuple[str, ...]]:
        return answer.status, answer.streams

    assert told(relations.find("order_id", "a")) == (Status.FOUND, both)
    assert told(relations.find("order_id", "a", streams=one)) == (Status.FOUND, one)
    assert told(relations.find("order_id", "a", streams=both[::-1])) == (Status.FOUND, both)
    assert told(relations.find("order_id", "a", complete=True)) == (Status.FOUND, both)
    assert told(relations.find("order_id", "z")) == (Status.ABSENT, both)
    assert told(relations.find("order_id", "z", streams=stream_name)) == (Status.ABSENT, one)
    assert told(relations.related(message)) == (Status.FOUND, both)
    assert told(relations.related(without_key)) == (Status.ABSENT, both)
    assert told(relations.related(without_key, to=stream_name)) == (Status.ABSENT, one)
    assert told(relations.wait_related(message, timeout_s=90)) == (Status.FOUND, both)
    assert told(relations.after(message, stream_name)) == (Status.FOUND, one)
    assert told(relations.before(message, stream_name)) == (Status.ABSENT, one)
    assert told(relations.before(without_key, stream_name, by="order_id")) == (Status.ABSENT, one)
    assert told(relations.nearest(message, other_stream)) == (Status.FOUND, (other_stream,))
    assert told(relations.window(message, stream_name, after_s=60)) == (Status.FOUND, one)
    publish_plain(amqp_url, stream_name, [order("c")])
    assert told(relations.find("order_id", "c")) == (Status.NOT_RECORDED_YET, both)


def test_a_super_stream_is_named_by_its_partitions(
    amqp_url: str, stream_url: str, engine: sa.Engine, relations: Relations
) -> None:
    """One that is not recorded is named where the answer holds for it, too: not by what is found in the table."""
    with super_stream(amqp_url, stream_url, partitions=3) as layout:
        name, partitions = layout.super_stream, [each.stream for each in layout]
        publish_plain(amqp_url, partitions[0], [order("a")])
        record(amqp_url, engine, *partitions[:2])
        with engine.begin() as connection:
            connection.execute(sa.text("UPDATE relatum.streams SET super_stream = :name"), {"name": name})
        assert relations.find("order_id", "a", streams=name).streams == tuple(partitions[:2])
        assert relations.find("order_id", "b", streams=name).streams == tuple(partitions)


# --- what AMQP 0.9.1 could not prove -----------------------------------------------------------------------


@pytest.mark.differs
def test_what_was_recorded_over_amqp_proves_nothing(
    amqp_url: str, engine: sa.Engine, relations: Relations, stream_name: str
) -> None:
    """Compressed batches are not seen over it: what is found counts, what is not may be there until it is read."""
    publish_plain(amqp_url, stream_name, [order("a")])
    record(amqp_url, engine, stream_name)
    with engine.begin() as connection:
        connection.execute(sa.text("UPDATE relatum.coverage SET over_amqp = true"))
    assert relations.find("order_id", "a").status is Status.FOUND
    assert relations.find("order_id", "b").status is Status.NOT_RECORDED_YET
    assert relations.find("order_id", "b", complete=True).status is Status.ABSENT
    assert relations.before(relations.read(stream_name, 0), stream_name).status is Status.NOT_RECORDED_YET


# --- the command ------------------------------------------------------------------------------------------


def test_the_command_says_what_a_new_user_has_to_do(
    amqp_url: str, stream_url: str, database_url: str, engine: sa.Engine, stream_name: str
) -> None:
    """`migrate`, `keys add`, `find`: one line that says to record, and the code of configuration."""
    relatum = Relatum(amqp_url, stream_url, database_url)
    relatum.ok("keys", "add", "order_id")
    for more in ([], ["--complete"], ["--json"]):
        ended = relatum.run("find", "order_id", "4711", *more)
        assert (ended.returncode, ended.stdout) == (3, ""), ended.stderr
        assert "relatum record" in ended.stderr
    publish_plain(amqp_url, stream_name, [order("a")])
    record(amqp_url, engine, stream_name)
    for value, code in (("a", 0), ("b", 6)):
        ended = relatum.run("find", "order_id", value, "--json")
        assert ended.returncode == code, ended.stderr
        document = json.loads(ended.stdout)
        assert (document["streams"], document["streams_count"]) == ([stream_name], 1)
        assert stream_name in relatum.run("find", "order_id", value).stdout.splitlines()[-1]


def test_a_broker_that_goes_away_is_noticed_by_the_next_question(
    private_servers: LocalServers, database_url: str, engine: sa.Engine
) -> None:
    """Also where the connection is open already: nothing is absent by a broker that was asked before."""
    url = private_servers.broker_url
    declare_stream(url, "s")
    with Relations(url, database_url, timeout_s=20) as relations:
        publish_plain(url, "s", [order("a")])
        record(url, engine, "s")
        assert relations.find("order_id", "b").status is Status.ABSENT
        private_servers.rabbitmq.stop()
        with pytest.raises(BrokerUnavailable):
            relations.find("order_id", "b")
