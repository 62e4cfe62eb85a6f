"""What it takes to say `absent`: streams that prove it, named in the answer; and what is said where nothing can."""

import json
import random
from collections import Counter
from contextlib import closing
from typing import Any

import pytest
import sqlalchemy as sa
from click.testing import Result
from typer.testing import CliRunner

from relatum import errors
from relatum.local import LocalServers
from relatum.recording.pruning import prune_expired
from relatum.store.catalog import add_keys, streams_named
from relatum.store.parts import retain_from
from relatum_cli.app import app
from relatum_consumer import Answer, Relations, Status
from relatum_consumer.lookups.proof import coverage_by_stream
from tests.support import declare_stream, delete_stream, publish_plain, record, wait_until
from tests.support.place import FailingPlace, Place
from tests.support.relations import FACES, open_relations

KEYS = ["order_id"]
STREAMS = ("orders", "payments", "parcels", "letters")


def order(number: Any) -> tuple[bytes, dict[str, Any]]:
    """A message with a key, and a time that AMQP 0.9.1 shows as well."""
    return b"order", {"order_id": number, "relatum_time": 1_000_000}


def test_where_nothing_is_recorded_nothing_is_absent(place: Place, relations: Relations) -> None:
    """No key is defined, or some and no recorder ever ran: an error that says what to do, `complete` or not."""
    place.put(order("a"), (b"", {}))
    message, without_key = relations.read(place.stream, 0), relations.read(place.stream, 1)
    for ask in (relations.related, lambda each: relations.wait_related(each, timeout_s=0)):
        with pytest.raises(errors.KeyNotDefined, match="relatum keys add"):
            ask(message)
    add_keys(place.engine, KEYS)
    for ask in (
        lambda: relations.find("order_id", "a"),
        lambda: relations.find("order_id", "a", complete=True),
        lambda: relations.related(message),
        lambda: relations.related(without_key),
        lambda: relations.wait_related(message, timeout_s=0),
    ):
        with pytest.raises(errors.NothingRecorded, match="relatum record") as caught:
            ask()
        assert isinstance(caught.value, errors.ConfigurationError)
        assert caught.value.vhost == "/"


@pytest.mark.parametrize("face", FACES)
def test_a_virtual_host_without_records_is_an_error_that_names_those_with(place: Place, face: str) -> None:
    """The one forgotten in the URL, or mistyped: recorded streams of others are named; a missing one is refused."""
    place.put_recorded(order("a"))
    place.sql("UPDATE relatum.streams SET vhost = 'shop'")
    with (
        open_relations(face, place.amqp, place.database) as relations,
        pytest.raises(errors.NothingRecorded, match="'shop'"),
    ):
        relations.find("order_id", "a")
    missing = place.amqp.rstrip("/") + "/no-such-host"
    with open_relations(face, missing, place.database) as relations:
        with pytest.raises(errors.RelatumError) as caught:
            relations.find("order_id", "a")
        assert not isinstance(caught.value, errors.NothingRecorded), "the broker itself refuses it"


def test_every_answer_names_the_streams_it_holds_over(place: Place, relations: Relations, other_stream: str) -> None:
    """Found, absent and not recorded; of one stream, several, or all; by key and by time."""
    place.put(order("a"), order("a"), (b"", {}))
    place.put(order("b"), to=other_stream)
    place.record(place.stream, other_stream)
    both, one = tuple(sorted([place.stream, other_stream])), (place.stream,)
    message, without_key = relations.read(place.stream, 0), relations.read(place.stream, 2)

    def told(answer: Answer) -> tuple[Status, tuple[str, ...]]:
        return answer.status, answer.streams

    assert told(relations.find("order_id", "a")) == (Status.FOUND, both)
    assert told(relations.find("order_id", "a", streams=one)) == (Status.FOUND, one)
    assert told(relations.find("order_id", "a", streams=both[::-1])) == (Status.FOUND, both)
    assert told(relations.find("order_id", "a", complete=True)) == (Status.FOUND, both)
    assert told(relations.find("order_id", "z")) == (Status.ABSENT, both)
    assert told(relations.find("order_id", "z", streams=place.stream)) == (Status.ABSENT, one)
    assert told(relations.related(message)) == (Status.FOUND, both)
    assert told(relations.related(without_key)) == (Status.ABSENT, both)
    assert told(relations.related(without_key, to=place.stream)) == (Status.ABSENT, one)
    assert told(relations.wait_related(message, timeout_s=90)) == (Status.FOUND, both)
    assert told(relations.after(message, place.stream)) == (Status.FOUND, one)
    assert told(relations.before(message, place.stream)) == (Status.ABSENT, one)
    assert told(relations.before(without_key, place.stream, by="order_id")) == (Status.ABSENT, one)
    assert told(relations.nearest(message, other_stream)) == (Status.FOUND, (other_stream,))
    assert told(relations.window(message, place.stream, after_s=60)) == (Status.FOUND, one)
    place.put(order("c"))
    assert told(relations.find("order_id", "c")) == (Status.NOT_RECORDED_YET, both)


@pytest.mark.differs
def test_messages_that_only_a_new_leader_retains_are_not_absent(
    place: Place, relations: Relations, other_stream: str
) -> None:
    """Rows that were pruned by the first offset of a former leader prove nothing; `complete` reads their messages."""
    place.put_recorded(order("a"), order("b"))
    place.put_recorded(order("c"), to=other_stream)
    with place.engine.begin() as connection:
        (stream,) = streams_named(connection, "/", [place.stream])
        with place.engine.connect() as locking:
            locking.execute(sa.text("SELECT FROM relatum.streams FOR UPDATE"))
            retain_from(connection, {stream.stream_id: 1})
    assert sum(prune_expired(place.engine, stream)) == 0, "lookups do not know yet that rows may be missing"
    with place.engine.begin() as connection:
        retain_from(connection, {stream.stream_id: 1})
    assert sum(prune_expired(place.engine, stream)) > 0
    for names in (place.stream, None):
        for value in ("a", "z"):
            assert relations.find("order_id", value, streams=names).status is Status.NOT_RECORDED_YET
        assert relations.find("order_id", "a", streams=names, complete=True).ids == ((place.stream, 0),)
        assert relations.find("order_id", "z", streams=names, complete=True).status is Status.ABSENT
        assert relations.find("order_id", "b", streams=names).status is Status.FOUND
    assert relations.find("order_id", "z", streams=other_stream).status is Status.ABSENT


@pytest.mark.differs
def test_rows_that_are_pruned_during_a_lookup_prove_nothing(
    place: Place, relations: Relations, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the first offset of a former leader, they are deleted after the lookup has read what is recorded."""
    place.put_recorded(order("a"), order("b"))

    def coverage(*arguments: Any) -> Any:
        found = coverage_by_stream(*arguments)
        with place.engine.begin() as connection:
            (stream,) = streams_named(connection, "/", [place.stream])
            retain_from(connection, {stream.stream_id: 1})
        list(prune_expired(place.engine, stream))
        return found

    monkeypatch.setattr("relatum_consumer.lookups.proof.coverage_by_stream", coverage)
    assert relations.find("order_id", "a", streams=place.stream, complete=True).ids == ((place.stream, 0),)


def test_a_stream_that_is_deleted_during_a_lookup_fails_no_lookup_that_does_not_name_it(
    place: Place, relations: Relations, other_stream: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is deleted after the lookup has learned its end, and before it reads its unrecorded messages."""
    place.put(order("a"))
    place.put(order("a"), to=other_stream)
    place.record(place.stream, other_stream)
    place.put(order("b"), to=other_stream)

    def coverage(*arguments: Any) -> Any:
        delete_stream(place.amqp, other_stream)
        return coverage_by_stream(*arguments)

    monkeypatch.setattr("relatum_consumer.lookups.proof.coverage_by_stream", coverage)
    assert relations.find("order_id", "b", complete=True).status is Status.ABSENT


def test_the_command_says_what_a_new_user_has_to_do(place: Place) -> None:
    """`migrate`, `keys add`, `find`: one line that says to record, and the code of configuration."""
    environment = {"RELATUM_DATABASE_URL": place.database, "RELATUM_BROKER_URL": place.amqp, "COLUMNS": "200"}

    def run(*arguments: str, ends: int) -> Result:
        ended = CliRunner().invoke(app, [*arguments, "--stream-url", place.stream_url], env=environment)
        assert ended.exit_code == ends, ended.output
        return ended

    add_keys(place.engine, KEYS)
    for more in ([], ["--complete"], ["--json"]):
        ended = run("find", "order_id", "4711", *more, ends=3)
        assert ended.stdout == ""
        assert "relatum record" in ended.stderr
    place.put_recorded(order("a"))
    for value, code in (("a", 0), ("b", 6)):
        document = json.loads(run("find", "order_id", value, "--json", ends=code).stdout)
        assert (document["streams"], document["streams_count"]) == ([place.stream], 1)
        assert place.stream in run("find", "order_id", value, ends=code).stdout.splitlines()[-1]


@pytest.mark.parametrize("face", FACES)
def test_a_broker_that_goes_away_is_said_to_be_away_by_the_next_question(place: Place, face: str) -> None:
    """Recorded or not, and where the connection is open already: nothing is absent by one that was asked before."""
    add_keys(place.engine, KEYS)
    place.put(order("a"))
    with closing(FailingPlace(place, face)) as failing:
        relations = failing.enter(open_relations(face, failing.broker, place.database, timeout_s=20))
        for is_recorded in (False, True):
            if is_recorded:
                place.record()
                assert relations.find("order_id", "b").status is Status.ABSENT
            for complete in (False, True):
                with failing.fault("broker refused", errors.BrokerUnavailable):
                    relations.find("order_id", "b", complete=complete)


def test_while_a_broker_boots_no_answer_is_a_part(
    private_servers: LocalServers, engine: sa.Engine, is_long: bool
) -> None:
    """One message in each of four streams: all four are found, or the answer is an error that says to repeat it."""
    chance, server = random.Random(14), private_servers.rabbitmq
    for stream in STREAMS:
        declare_stream(server.broker_url, stream)
        publish_plain(server.broker_url, stream, [order("a")])
    record(server.broker_url, engine, *STREAMS, keys=KEYS)
    told: Counter[str] = Counter()

    def ask() -> bool:
        names = chance.choice([None, STREAMS])
        try:
            with Relations(server.broker_url, engine.url, timeout_s=5) as relations:
                answer = relations.find("order_id", "a", streams=names, complete=chance.random() < 0.3)
        except errors.Transient:
            told["to be repeated"] += 1
            return False
        except errors.RelatumError as error:
            told[type(error).__name__] += 1
            return False
        told[f"{answer.status} {len(answer) + len(answer.unread)} of {len(STREAMS)}"] += 1
        return answer.status is Status.FOUND

    for _ in range(50 if is_long else 2):
        server.kill()
        assert not ask()
        server.launch()
        wait_until(ask, limit_s=120, every_s=0.0, what="an answer")
        server.await_answer()
    print(f"\n{dict(told)}")
    wrong = set(told) - {"to be repeated", "found 4 of 4", "unproven 4 of 4"}
    assert not wrong, told
