"""Affinity sets seen and changed from outside: by `AffinitySets`, and by the command."""

import json
from collections.abc import Iterator
from typing import Any

import pika
import pytest
from typer.testing import CliRunner

import relatum
from relatum.command import complete_app
from relatum.errors import InvalidInput, PlacementNotFound, StreamNotFound, SuperStreamConflict, SuperStreamNotFound
from relatum.superstreams import Layout
from tests.support import broker_connection
from tests.support.affinity import Partitions
from tests.support.routing import consumed

NAMES = ["a1", "a2", "b1", "b2", "b3", "c1"]


@pytest.fixture
def router(layout: Layout, database_url: str) -> Iterator[relatum.AffinityRouter]:
    """A router."""
    with relatum.AffinityRouter(layout.super_stream, database_url) as opened:
        yield opened


@pytest.fixture
def sets(layout: Layout, router: Any, database_url: str, amqp_url: str) -> Iterator[relatum.AffinitySets]:
    """Six sets that are open, two in each partition."""
    publish(router, amqp_url, b"1", *NAMES)
    with relatum.AffinitySets(layout.super_stream, database_url, broker=amqp_url) as opened:
        yield opened


def publish(router: relatum.AffinityRouter, amqp_url: str, body: bytes, *names: str) -> None:
    """Publish a message of each set."""
    with broker_connection(amqp_url) as connection:
        channel = connection.channel()
        channel.confirm_delivery()
        for name in names:
            router.publish(channel, body, pika.BasicProperties(headers={"affinity_set": name}))


def test_sets_are_listed_by_name_prefix_and_partition(sets: relatum.AffinitySets, layout: Layout) -> None:
    """Lists are in the order of names, whole or up to a limit."""
    assert [each.name for each in sets.list()] == NAMES
    assert [each.name for each in sets.list("b")] == ["b1", "b2", "b3"]
    assert [each.name for each in sets.list("b2")] == ["b2"]
    assert [each.name for each in sets.list(limit=2)] == ["a1", "a2"]
    assert sets.list("d") == []
    of_partitions = [each.name for part in layout for each in sets.list(partition=part.stream)]
    assert sorted(of_partitions) == NAMES
    with pytest.raises(InvalidInput):
        sets.list(limit=0)


def test_sets_are_counted_and_inspected(sets: relatum.AffinitySets, layout: Layout) -> None:
    """Each partition has its number; a set tells where it is and since when."""
    assert sets.count() == {part.stream: 2 for part in layout}
    found = sets.inspect("b2")
    assert (found.name, found.state, found.move_id) == ("b2", "open", None)
    assert found.opened_at is not None
    with pytest.raises(PlacementNotFound):
        sets.inspect("b")


def test_sets_are_closed(sets: relatum.AffinitySets) -> None:
    """By name, or because nobody used them; one that is closed is nowhere."""
    assert sets.close_set("a1").name == "a1"
    with pytest.raises(PlacementNotFound):
        sets.close_set("a1")
    assert sets.close_idle(3600) == 0
    assert sets.close_idle(1e-6) == 5
    assert sum(sets.count().values()) == 0
    with pytest.raises(InvalidInput):
        sets.close_idle(0)


def test_moved_sets_are_consumed_in_order(
    sets: relatum.AffinitySets, router: relatum.AffinityRouter, layout: Layout, database_url: str, amqp_url: str
) -> None:
    """A serial consumer gets each set's messages in their order, on both sides of a move."""
    target = layout.partitions[0].stream
    elsewhere = [each.name for each in sets.list() if each.partition != target]
    sets.move(elsewhere, target)
    publish(router, amqp_url, b"2", *NAMES)
    assert sets.count()[target] == len(NAMES)
    assert set(Partitions(amqp_url, layout).of_set(elsewhere[0])) > {target}
    found = consumed(layout.super_stream, database_url, amqp_url, 2 * len(NAMES))
    assert found == {name: [b"1", b"2"] for name in NAMES}


def test_what_is_not_there_is_told(sets: relatum.AffinitySets, database_url: str) -> None:
    """A set, a partition, or a super stream that does not exist is an error of its own."""
    with pytest.raises(PlacementNotFound):
        sets.move(["a1", "nobody"], sets.inspect("a1").partition)
    with pytest.raises(StreamNotFound):
        sets.move(["a1"], "no-such-stream")
    with pytest.raises(StreamNotFound):
        sets.set_weights({"no-such-stream": 1})
    with pytest.raises(SuperStreamNotFound):
        relatum.AffinitySets("no-such-super-stream", database_url)


def test_contexts_are_not_closed_as_sets(layout: Layout, database_url: str, amqp_url: str) -> None:
    """A context that is closed would be placed anew, and nothing would keep its order: neither way of closing does."""
    with broker_connection(amqp_url) as connection, relatum.ContextRouter(layout.super_stream, database_url) as router:
        channel = connection.channel()
        channel.confirm_delivery()
        router.publish(channel, b"1", pika.BasicProperties(headers={"serialization_context": "c1"}))
    with relatum.AffinitySets(layout.super_stream, database_url) as opened:
        with pytest.raises(SuperStreamConflict, match="contexts are placed in"):
            opened.close_set("c1")
        with pytest.raises(SuperStreamConflict, match="contexts are placed in"):
            opened.close_idle(0.000_001)
        assert opened.inspect("c1").state == "open"


def test_the_command_lists_closes_and_moves(
    sets: relatum.AffinitySets, layout: Layout, database_url: str, amqp_url: str
) -> None:
    """`relatum affinity` does all of it, for people and for programs."""

    def run(command: str, *arguments: str) -> str:
        options = ["--database", database_url, "--broker", amqp_url]
        ended = CliRunner().invoke(complete_app(), ["affinity", command, layout.super_stream, *arguments, *options])
        assert ended.exit_code == 0, ended.output
        return ended.stdout

    assert [each["name"] for each in json.loads(run("list", "--prefix", "b", "--json"))] == ["b1", "b2", "b3"]
    assert json.loads(run("show", "c1", "--json"))["partition"] == sets.inspect("c1").partition
    assert "c1" in run("list")
    assert "open" in run("show", "c1")
    target, source = layout.partitions[0].stream, layout.partitions[1].stream
    (move,) = json.loads(run("move", "--from", source, "--to", target, "--json"))
    assert (move["source"], move["target"], move["state"], move["contexts"]) == (source, target, "switched", 2)
    run("weight", f"{target}=2.5")
    assert json.loads(run("close", "a1", "a2", "--json")) == {"closed": 2}
    assert run("close", "--idle", "1h").strip() == "0 closed"
    assert [each.name for each in sets.list("a")] == []
