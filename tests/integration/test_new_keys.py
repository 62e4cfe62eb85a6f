"""A key that is newer than what is recorded: answers name it, and the one command that looks at older messages."""

import json
import logging
import shlex
from collections.abc import Iterator

import pytest
import sqlalchemy as sa

from relatum.store import add_keys
from relatum_consumer import NewKey, Relations, Status
from tests.acceptance._command import Relatum
from tests.support import declare_stream, delete_stream, new_streams, publish_plain, record

CURE = "relatum backfill --keys customer"


@pytest.fixture
def streams(amqp_url: str, engine: sa.Engine) -> Iterator[list[str]]:
    """Three streams recorded by `order_id`, in the order of their names; then the key `customer` is defined."""
    with new_streams(amqp_url, 3) as made:
        orders, payments, parcels = names = sorted(made)
        publish_plain(amqp_url, orders, [(b"", {"order_id": n, "customer": "ann"}) for n in (1, 2)])
        publish_plain(amqp_url, orders, [(b"", {"order_id": 3}), (b"", {"order_id": 4, "customer": "bob"})])
        publish_plain(amqp_url, payments, [(b"", {"order_id": n}) for n in (1, 3)])
        publish_plain(amqp_url, parcels, [(b"", {"customer": "ann"})])
        for each in names:
            record(amqp_url, engine, each, keys=["order_id"])
        add_keys(engine, ["customer"])
        yield names


@pytest.fixture
def relatum(amqp_url: str, stream_url: str, database_url: str) -> Relatum:
    """The command."""
    return Relatum(amqp_url, stream_url, database_url)


def cured(relatum: Relatum, said: str) -> None:
    """Run the command that a text names last."""
    [_, command] = said.rsplit("relatum ", 1)
    relatum.ok(*shlex.split(command))


def test_a_trace_by_older_keys_stays_complete(relations: Relations, streams: list[str]) -> None:
    """It names the new key where a message has it; asked for by name, or for want of others, it counts."""
    orders, payments, _ = streams
    unseen = (NewKey("customer", tuple(streams)),)
    trace = relations.trace(("order_id", 1))
    assert [each.id for each in trace] == [(orders, 0), (payments, 0)]
    assert (trace.status, trace.new_keys, trace.unattended) == (Status.FOUND, unseen, ())
    assert trace.to_document()["new_keys"] == [{"key": "customer", "streams": streams}]
    names = ", ".join(map(repr, streams))
    told = f"'customer' is a new key: older messages of {names} were not looked at for it: {CURE}"
    assert trace.explanation == told
    # No message of it has the new key, or none that is meant: there is nothing to be named.
    for untouched in (relations.trace(("order_id", 3)), relations.trace(("order_id", 1), by="order_id")):
        assert (untouched.status, untouched.new_keys, untouched.explanation) == (Status.FOUND, (), "")
    # That there is nothing else would have to be proven.
    alone = relations.trace(relations.read(orders, 3))
    assert (alone.status, alone.new_keys) == (Status.NOT_RECORDED_YET, unseen)
    for asked in (relations.trace(("order_id", 1), by=["order_id", "customer"]), relations.trace(("customer", "ann"))):
        assert (asked.status, asked.new_keys, asked.unattended) == (Status.NOT_RECORDED_YET, unseen, ())
    whole = relations.trace(("order_id", 1), complete=True)
    assert (len(whole), whole.status, whole.new_keys) == (4, Status.FOUND, ())


def test_a_lookup_by_a_new_key_names_it(
    amqp_url: str, relations: Relations, streams: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody needs to record; where something is not recorded at all, both are said."""
    orders = relations.read(streams[0], 0)
    unseen = (NewKey("customer", tuple(streams)),)
    for answer in (relations.find("customer", "ann"), relations.related(orders, by="customer")):
        assert (answer.status, answer.new_keys, answer.unattended) == (Status.NOT_RECORDED_YET, unseen, ())
        assert answer.words == f"not recorded yet: {answer.explanation}"
        assert answer.explanation.endswith(CURE)
    tried = (relations.wait_related(orders, by="customer", timeout_s=0.2) for _ in range(100))
    assert next(each for each in tried if each.status is not Status.UNPROVEN).new_keys == unseen
    told = [each.getMessage() for each in caplog.records if each.levelno == logging.WARNING]
    assert [each for each in told if each.endswith(CURE)] == [each for each in told if "waited in vain" in each] != []
    publish_plain(amqp_url, streams[1], [(b"", {"order_id": 9})])
    answer = relations.find("customer", "ann")
    assert (answer.new_keys, answer.unattended) == (unseen, (streams[1],))
    assert "nobody records" in answer.explanation
    assert answer.explanation.endswith(CURE)
    # By the older key nothing is new.
    assert relations.find("order_id", 99).new_keys == ()


def test_a_trace_that_found_something_does_not_say_that_this_is_all(
    amqp_url: str, relations: Relations, streams: list[str]
) -> None:
    """Where a stream is not recorded to its end there may be more, though the only hop found something."""
    assert relations.trace(("order_id", 3)).status is Status.FOUND
    publish_plain(amqp_url, streams[2], [(b"", {"order_id": 3})])
    trace = relations.trace(("order_id", 3))
    assert ([step.status for step in trace.steps], len(trace)) == ([Status.FOUND], 2)
    assert (trace.status, trace.unattended) == (Status.NOT_RECORDED_YET, (streams[2],))
    assert len(relations.trace(("order_id", 3), complete=True)) == 3


def test_the_commands_name_one_cure_and_it_cures(relatum: Relatum, relations: Relations, streams: list[str]) -> None:
    """`keys add`, `find` and `trace` end with the same command, which needs no stream's name."""
    said = relatum.ok("keys", "add", "customer")
    assert said.rstrip().endswith(CURE)
    found = relatum.run("find", "customer", "ann")
    assert (found.returncode, found.stdout.count(CURE)) == (8, 1)
    assert "obody records" not in found.stdout
    assert json.loads(relatum.run("find", "customer", "ann", "--json").stdout)["new_keys"] == [
        {"key": "customer", "streams": streams}
    ]
    traced = relatum.run("trace", streams[0], "0")
    assert (traced.returncode, traced.stdout.count("customer"), traced.stdout.count(CURE)) == (0, 2, 1)
    assert "obody records" not in traced.stdout
    by_new = relatum.run("trace", "customer", "ann")
    assert (by_new.returncode, by_new.stdout.count(CURE)) == (8, 1)
    cured(relatum, traced.stdout)
    relatum.ok("find", "customer", "ann")
    trace = relations.trace(("order_id", 1))
    assert (len(trace), trace.status, trace.new_keys) == (4, Status.FOUND, ())
    # Twice, it finds nothing to do.
    assert all(each["rows"] == 0 for each in relatum.json("backfill", "--keys", "customer"))


@pytest.mark.differs
def test_a_back_fill_of_all_passes_over_what_is_gone(
    amqp_url: str, relatum: Relatum, relations: Relations, streams: list[str]
) -> None:
    """A deleted stream is named, and a replaced one ends it with an error once the others had their turn."""
    orders, payments, _ = streams
    delete_stream(amqp_url, payments)
    assert "backfill" in relatum.ok("keys", "add", "customer")
    ended = relatum.run("backfill", "--keys", "customer")
    assert ended.returncode == 0
    assert f"{payments}: the broker has no such stream any more" in ended.stderr
    assert len(relations.find("customer", "ann")) == 3
    delete_stream(amqp_url, orders)
    declare_stream(amqp_url, orders)
    publish_plain(amqp_url, orders, [(b"other", {"customer": "ann"})])
    again = relatum.run("backfill")
    assert again.returncode != 0
    assert orders in again.stderr


def test_a_back_fill_of_nothing_says_so(relatum: Relatum) -> None:
    """Where nothing is recorded there is nothing to look at again."""
    relatum.ok("keys", "add", "customer")
    assert "relatum record STREAM" in relatum.ok("backfill")
