"""Affinity sets, against a real broker and database: published by both faces, seen and changed from outside."""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pika
import pytest
from pika.adapters.blocking_connection import BlockingChannel
from pika.exceptions import UnroutableError
from typer.testing import CliRunner

import relatum
from relatum import errors
from relatum.contexts import AffinityOptions
from relatum.keys import KeyDefinition
from relatum.superstreams import Layout, unbind_partition
from relatum_cli.app import app
from tests.support import wait_until
from tests.support.affinity import CONTEXTS, Faces, Partitions
from tests.support.place import Place
from tests.support.raising import raising
from tests.support.routing import HeldMove, consumed, other_than, sleeping

NAMES = ["a1", "a2", "b1", "b2", "b3", "c1"]


@pytest.fixture
def faces(request: pytest.FixtureRequest, layout: Layout, amqp_url: str, database_url: str) -> Faces:
    """Blocking routers, or those of the face that is asked for."""
    return Faces(getattr(request, "param", "blocking"), amqp_url, layout, database_url)


each_face = pytest.mark.parametrize("faces", ["blocking", "asyncio"], indirect=True)


@pytest.fixture
def partitions(faces: Faces) -> Partitions:
    return faces.partitions


@pytest.fixture
def sets(layout: Layout, database_url: str, amqp_url: str, faces: Faces) -> Iterator[relatum.AffinitySets]:
    """The sets, seen from outside; a router has made them known."""
    with faces.opened() as router:
        router.publish(b"", "the first set", affinity_last=True)
    with relatum.AffinitySets(layout.super_stream, database_url, broker=amqp_url) as opened:
        yield opened


def in_set(name: str, **headers: bool) -> pika.BasicProperties:
    return pika.BasicProperties(headers={"affinity_set": name, **headers})


@each_face
def test_a_set_stays_where_its_first_message_went(faces: Faces, partitions: Partitions) -> None:
    """Sets are spread one after the other, and each is whole and in order in one partition."""
    with faces.opened() as router:
        for number in range(5):
            for name in ("s1", "s2", "s3"):
                router.publish(b"%d" % number, name)
    found = [partitions.of_set(name) for name in ("s1", "s2", "s3")]
    assert [list(each.values()) for each in found] == [[[b"0", b"1", b"2", b"3", b"4"]]] * 3
    assert len({stream for each in found for stream in each}) == 3


def test_new_sets_go_by_what_the_database_says(faces: Faces, sets: relatum.AffinitySets, layout: Layout) -> None:
    """Where the fewest are open, over all routers, or by stored weights; with one of no partition, none counts."""
    with faces.opened(balance=lambda _name, _candidates: 0) as crowding, faces.opened(balance="least_loaded") as router:
        for number in range(4):
            crowding.publish(b"", f"crowd {number}")
        for number in range(5):
            router.publish(b"", f"set {number}")
    assert sorted(sets.count().values()) == [2, 3, 4]
    assert sets.close_idle(1e-6) == 9
    first, second, third = (each.stream for each in layout)
    sets.set_weights({first: 2, second: 1, third: 0})
    with pytest.raises(errors.StreamNotFound):
        sets.set_weights({third: 7, "no-such-stream": 1})
    with faces.opened(balance="weighted") as router:
        for number in range(6):
            router.publish(b"", f"weighed {number}")
    assert sets.count() == {first: 4, second: 2, third: 0}


@each_face
def test_the_last_message_closes_its_set(faces: Faces, sets: relatum.AffinitySets, partitions: Partitions) -> None:
    """The confirmed last message of a set closes it, and the next message of its name opens another, in any router."""
    with faces.opened() as one, faces.opened() as other:
        one.publish(b"1", "s1")
        other.publish(b"2", "s1", affinity_last=None)
        first = sets.inspect("s1")
        one.publish(b"3", "s1", affinity_last=True)
        one.publish(b"4", "s1")
        second = sets.inspect("s1")
        assert second.epoch > first.epoch
        wait_until(lambda: other.publish(b"5", "s1") or sets.inspect("s1").epoch == second.epoch, what="the next set")
    assert partitions.of_set("s1")[first.partition][:3] == [b"1", b"2", b"3"]
    assert b"4" in partitions.of_set("s1")[second.partition]


@each_face
def test_a_message_that_was_not_taken_closes_nothing(faces: Faces, sets: relatum.AffinitySets) -> None:
    """Where the last message comes back, its set stays open."""
    with faces.opened() as router:
        router.publish(b"1", "s1")
        place = faces.layout.partition(sets.inspect("s1").partition)
        unbind_partition(faces.amqp_url, faces.layout.super_stream, place.stream)
        with pytest.raises((UnroutableError, errors.PublishUnroutable)):
            router.publish(b"2", "s1", affinity_last=True)
    assert sets.inspect("s1").partition == place.stream


@each_face
def test_idle_sets_are_closed_and_used_ones_are_not(faces: Faces, sets: relatum.AffinitySets, place: Place) -> None:
    """A set that is not used for `idle_s` is closed; one in use stays open, also if its router has no `idle_s`."""
    with faces.opened() as router:
        router.publish(b"", "quiet")
        router.publish(b"", "busy")
    epoch = sets.inspect("busy").epoch
    place.sql("UPDATE relatum.placements SET used_at = now() - interval '1 hour'")
    with faces.opened(idle_s=60) as closing:
        closing.publish(b"", "its own")
        with faces.opened() as using:
            # A closing router stores which sets it used, and closes the ended ones, at once.
            using.publish(b"", "busy")
    assert [(each.name, each.epoch == epoch) for each in sets.list()] == [("busy", True), ("its own", False)]


def test_a_set_in_use_is_not_closed_before_that_is_stored(
    faces: Faces, sets: relatum.AffinitySets, place: Place
) -> None:
    """A set in use is not taken for idle during the 15 seconds in which its router may not have stored that."""
    with faces.opened(idle_s=60) as using:
        using.publish(b"", "used")
        epoch = sets.inspect("used").epoch
        place.sql("UPDATE relatum.placements SET used_at = now() - interval '61 seconds'")
        using.publish(b"", "used")
        with faces.opened() as closing:
            closing.publish(b"", "its own")
        assert sets.inspect("used").epoch == epoch


def test_a_set_whose_move_does_not_end_stops_no_other(
    layout: Layout, sets: relatum.AffinitySets, place: Place, channel: BlockingChannel
) -> None:
    """While a message behind a fence waits for its set's move, other sets are reported as used, and closed."""
    used = "SELECT count(*) FROM relatum.placements WHERE name = 'busy' AND used_at > now() - interval '1 minute'"
    options = AffinityOptions(timeout_s=1.0, balance="hash")
    with relatum.AffinityRouter(layout.super_stream, place.database, options) as router:
        for name in ("stuck", "busy"):
            router.publish(channel, b"", in_set(name))
        target = other_than(layout, sets.inspect("stuck").partition)
        place.sql("UPDATE relatum.placements SET used_at = now() - interval '1 hour'")
        with HeldMove(sets, ["stuck"], target, "fenced", place.engine) as held:
            sleeping(channel, held.begin)
            with pytest.raises(errors.PublishOutcomeUnknown):
                router.publish(channel, b"", in_set("stuck"))
            router._sets._report_at = 0.0
            router.publish(channel, b"", in_set("busy"))
            router.publish(channel, b"", in_set("ended", affinity_last=True))
            wait_until(lambda: place.sql(used) == [(1,)], what="the report of the set's use")
            wait_until(lambda: [each.name for each in sets.list()] == ["busy", "stuck"], what="the set's end")


def test_a_set_whose_partition_is_gone_stops_no_other(
    layout: Layout, sets: relatum.AffinitySets, place: Place, channel: BlockingChannel
) -> None:
    """A message whose partition was deleted while its publisher slept can never be checked; other sets are closed."""
    router = relatum.AffinityRouter(layout.super_stream, place.database, AffinityOptions(timeout_s=1.0))
    router.publish(channel, b"", in_set("stuck"))
    stream, publish = sets.inspect("stuck").partition, channel.basic_publish

    def sleep_behind(*args: Any, **kwargs: Any) -> None:
        channel.basic_publish = publish
        publish(*args, **kwargs)
        sets.move(["stuck"], other_than(layout, stream))
        sets.retire(stream, delete=True)

    channel.basic_publish = sleep_behind
    with pytest.raises(errors.PublishOutcomeUnknown):
        router.publish(channel, b"", in_set("stuck"))
    router.publish(channel, b"", in_set("ended", affinity_last=True))
    wait_until(lambda: [each.name for each in sets.list()] == ["stuck"], what="the set's end")
    with pytest.raises(errors.StreamNotFound):
        router.close()


def test_sets_of_a_super_stream_are_closed_after_one_time(faces: Faces, sets: relatum.AffinitySets) -> None:
    """A router with another `idle_s` than the super stream's is refused; one without `idle_s` uses the stored one."""

    def publish(**options: float) -> None:
        with faces.opened(**options) as router:
            router.publish(b"", "s1")

    with faces.opened(idle_s=60) as first:
        first.publish(b"", "s1")
        with raising(errors.SuperStreamConflict, match="close after 60 s", reason="its idle_s is 60"):
            publish(idle_s=90)
        publish()
    sets.set_idle(90)
    publish(idle_s=90)
    sets.set_idle(None)
    publish(idle_s=120)
    for wrong in (0, 59.9, True, "60", float("inf")):
        with pytest.raises(errors.InvalidInput, match="idle_s"):
            sets.set_idle(wrong)  # type: ignore[arg-type]


def test_weights_outlast_a_layout_that_is_read_again(
    layout: Layout, sets: relatum.AffinitySets, place: Place, channel: BlockingChannel
) -> None:
    """Messages without a set avoid a partition of weight 0, also after a partition was found to be gone."""
    avoided = layout.partitions[0].stream
    before = len(place.messages(avoided))
    sets.set_weights({avoided: 0})
    with relatum.AffinityRouter(layout.super_stream, place.database, AffinityOptions(balance="weighted")) as router:
        router.open(channel)
        router._core.has_layout = False
        for _ in range(6):
            router.publish(channel, b"")
    assert len(place.messages(avoided)) == before


def test_only_so_many_sets_may_be_open(faces: Faces, sets: relatum.AffinitySets) -> None:
    """One more is refused before anything is sent, until another is closed."""
    with faces.opened(open_sets_max=2) as router:
        router.publish(b"", "s1")
        router.publish(b"", "s2")
        with raising(errors.TooManyOpenSets, open_sets=2, open_sets_max=2):
            router.publish(b"", "s3")
        router.publish(b"", "s1")
        sets.close_set("s2")
        router.publish(b"", "s3")


@each_face
def test_a_message_joins_the_set_of_its_predecessor(faces: Faces, partitions: Partitions) -> None:
    """A router puts a message into the set of its predecessor, found by the `message_id` that it published."""
    with faces.opened() as router:
        router.publish(b"1", "s1", message_id="m1")
        router.publish(b"other", "s2")
        router.publish(b"2", affinity_predecessor="m1", message_id="m2")
        router.publish(b"3", affinity_predecessor="m2", affinity_last=True)
    assert list(partitions.of_set("s1").values()) == [[b"1", b"2", b"3"]]


def test_a_predecessor_is_read_where_it_lies(faces: Faces, sets: relatum.AffinitySets, partitions: Partitions) -> None:
    """Another router finds it by partition and offset, and opens a closed set again in that partition."""
    with faces.opened() as router:
        router.publish(b"1", "s1", affinity_last=True)
    ((stream, _),) = partitions.of_set("s1").items()
    offset = next(each.offset for each in partitions.messages()[stream] if each.body == b"1")
    with faces.opened(balance="least_loaded") as router:
        router.publish(b"2", affinity_predecessor=f"{stream}:{offset}")
        with raising(errors.PredecessorNotFound, predecessor=f"{stream}:1000"):
            router.publish(b"3", affinity_predecessor=f"{stream}:1000")
        # Anything that does not name a place in a partition is an id, with colons or without.
        for text in (stream, f"{stream}:", f"{stream}:-1", f"{stream}:1.5", f"{stream}:²", "orders-2:17", "urn:uuid:7"):
            with pytest.raises(errors.PredecessorNotFound, match="no key has"):
                router.publish(b"3", affinity_predecessor=text)
    assert partitions.of_set("s1") == {stream: [b"1", b"2"]}


def test_the_messages_used_last_are_remembered_as_predecessors(faces: Faces) -> None:
    """At most so many: those that were published, or named as a predecessor, last."""
    with faces.opened(predecessors_max=2) as router:
        for number in range(2):
            router.publish(b"", "s1", message_id=f"m{number}")
        router.publish(b"", affinity_predecessor="m0")
        router.publish(b"", "s1", message_id="m2")
        router.publish(b"", affinity_predecessor="m0")
        with pytest.raises(errors.PredecessorNotFound, match="did not publish it"):
            router.publish(b"", affinity_predecessor="m1")
    with faces.opened(predecessors_max=0) as router:
        router.publish(b"", "s1", message_id="m1")
        with pytest.raises(errors.PredecessorNotFound):
            router.publish(b"", affinity_predecessor="m1")


@each_face
def test_a_predecessor_is_found_by_the_table(faces: Faces, place: Place) -> None:
    """Another router finds the newest message with the predecessor's `message_id`, once that is recorded as a key."""
    streams = [each.stream for each in faces.layout]
    with faces.opened() as router, faces.opened() as other:
        router.publish(b"old", "s0", message_id="m1")
        router.publish(b"1", "s1", message_id="m1")
        with pytest.raises(errors.PredecessorNotFound, match="no key has"):
            other.publish(b"too early", affinity_predecessor="m1")
        with place.recording(*streams, keys=[KeyDefinition("id", source="property:message_id")]):
            for stream in streams:
                place.wait_recorded(stream)
            other.publish(b"2", affinity_predecessor="m1")
            with pytest.raises(errors.PredecessorNotFound, match="not recorded"):
                other.publish(b"3", affinity_predecessor="m7")
            for stream in streams:
                place.wait_recorded(stream)
    assert list(faces.partitions.of_set("s1").values()) == [[b"1", b"2"]]


def test_a_predecessor_of_no_set_makes_none(faces: Faces, sets: relatum.AffinitySets, partitions: Partitions) -> None:
    """The message goes to the same partition, and no set is opened."""
    with faces.opened() as router:
        for number in range(4):
            router.publish(b"%d" % number, message_id=f"m{number}")
        for number in range(4):
            router.publish(b"after %d" % number, affinity_predecessor=f"m{number}")
    for number in range(4):
        assert partitions.where(b"after %d" % number) == partitions.where(b"%d" % number)
    assert not sets.list()


@pytest.fixture
def six(faces: Faces, sets: relatum.AffinitySets) -> relatum.AffinitySets:
    """Six sets that are open, two in each partition."""
    with faces.opened() as router:
        for name in NAMES:
            router.publish(b"1", name)
    return sets


def test_sets_are_seen_and_closed(six: relatum.AffinitySets, layout: Layout, database_url: str) -> None:
    """Sets are listed, counted, inspected and closed; a name that does not exist is an error."""
    for asked, names in {"": NAMES, "b": NAMES[2:5], "b2": ["b2"], "d": []}.items():
        assert [each.name for each in six.list(asked)] == names
    assert [each.name for each in six.list(limit=2)] == NAMES[:2]
    assert sorted(each.name for part in layout for each in six.list(partition=part.stream)) == NAMES
    assert six.count() == {part.stream: 2 for part in layout}
    found = six.inspect("b2")
    assert (found.name, found.state, found.move_id) == ("b2", "open", None)
    assert found.opened_at is not None
    for error, ask in (
        (errors.InvalidInput, lambda: six.list(limit=0)),
        (errors.InvalidInput, lambda: six.close_idle(0)),
        (errors.PlacementNotFound, lambda: six.inspect("b")),
        (errors.PlacementNotFound, lambda: six.move(["a1", "nobody"], found.partition)),
        (errors.StreamNotFound, lambda: six.move(["a1"], "no-such-stream")),
        (errors.StreamNotFound, lambda: six.set_weights({"no-such-stream": 1})),
        (errors.SuperStreamNotFound, lambda: relatum.AffinitySets("no-such-super-stream", database_url)),
    ):
        with pytest.raises(error):
            ask()
    assert six.close_set("a1").name == "a1"
    with pytest.raises(errors.PlacementNotFound):
        six.close_set("a1")
    assert six.close_idle(3600) == 0
    assert six.close_idle(1e-6) == 5
    assert sum(six.count().values()) == 0


def test_moved_sets_are_followed_and_consumed_in_order(faces: Faces, sets: relatum.AffinitySets) -> None:
    """A router sends messages of a moved set to its new partition, and consumers get each set in order."""
    target = faces.layout.partitions[0].stream
    with faces.opened() as router:
        for name in NAMES:
            router.publish(b"1", name)
        sources = {each.name: each.partition for each in sets.list() if each.partition != target}
        assert {str(move.state) for move in sets.move(list(sources), target)} == {"switched"}
        for name in NAMES:
            router.publish(b"2", name)
    assert sets.count()[target] == len(NAMES)
    for name, source in sources.items():
        assert faces.partitions.of_set(name) == {source: [b"1"], target: [b"2"]}
    found = consumed(faces.layout.super_stream, faces.database_url, faces.amqp_url, 2 * len(NAMES) + 1)
    assert found == {"the first set": [b""], **{name: [b"1", b"2"] for name in NAMES}}


def test_contexts_are_not_closed_as_sets(faces: Faces) -> None:
    """Closing a context as a set is refused: it would be placed again, and lose its order."""
    with replace(faces, header=CONTEXTS).opened() as router:
        router.publish(b"1", "c1")
    with relatum.AffinitySets(faces.layout.super_stream, faces.database_url) as opened:
        with pytest.raises(errors.SuperStreamConflict, match="has serialization contexts"):
            opened.close_set("c1")
        with pytest.raises(errors.SuperStreamConflict, match="has serialization contexts"):
            opened.close_idle(0.000_001)
        assert opened.inspect("c1").state == "open"


def test_the_command_lists_closes_and_moves(six: relatum.AffinitySets, layout: Layout, place: Place) -> None:
    """`relatum affinity` lists, shows, moves, weights and closes sets; `prune` forgets sets closed long ago."""
    options = ["--database", place.database, "--broker", place.amqp]

    def run(command: str, *arguments: str) -> str:
        ended = CliRunner().invoke(app, ["affinity", command, layout.super_stream, *arguments, *options])
        assert ended.exit_code == 0, ended.output
        return ended.stdout

    assert [each["name"] for each in json.loads(run("list", "--prefix", "b", "--json"))] == ["b1", "b2", "b3"]
    shown = json.loads(run("show", "c1", "--json"))
    assert shown["partition"] == six.inspect("c1").partition
    assert list(shown) == ["name", "partition", "epoch", "state", "move_id", "opened_at", "used_at"]
    assert "c1" in run("list")
    assert "open" in run("show", "c1")
    target, source = layout.partitions[0].stream, layout.partitions[1].stream
    (move,) = json.loads(run("move", "--from", source, "--to", target, "--json"))
    assert (move["source"], move["target"], move["state"], move["contexts"]) == (source, target, "switched", 2)
    run("weight", f"{target}=2.5")
    assert json.loads(run("close", "a1", "a2", "--json")) == {"closed": 2}
    assert run("close", "--idle", "1h").strip() == "0 closed"
    assert [each.name for each in six.list("a")] == []
    place.sql("UPDATE relatum.placements SET released_at = now() - interval '61 minutes' WHERE name = 'a1'")
    pruned = CliRunner().invoke(app, ["prune", "--json", *options])
    assert json.loads(pruned.stdout) == {"": 1}
