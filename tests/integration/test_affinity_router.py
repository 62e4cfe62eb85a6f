"""Publishing affinity sets through pika and aio-pika, against a real broker and database."""

import asyncio
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import aio_pika
import pika
import pytest
import sqlalchemy as sa
from pika.exceptions import UnroutableError

import relatum
from relatum.contexts import AffinityOptions, ContextOptions
from relatum.errors import (
    ConfigurationError,
    DatabaseUnavailable,
    InvalidInput,
    PredecessorNotFound,
    PublishOutcomeUnknown,
    PublishUnroutable,
    SuperStreamConflict,
    TooManyOpenSets,
)
from relatum.keys import KeyDefinition
from relatum.store import placements
from relatum.superstreams import Layout, unbind_partition
from tests.support import broker_connection, recording, until_answered, wait_recorded, wait_until
from tests.support.affinity import Faces, Partitions
from tests.support.proxy import Proxy


@pytest.fixture(params=["blocking", "asyncio"])
def faces(request: pytest.FixtureRequest, layout: Layout, amqp_url: str, database_url: str) -> Faces:
    """Routers of each face."""
    return Faces(request.param, amqp_url, layout.super_stream, database_url)


@pytest.fixture
def partitions(layout: Layout, amqp_url: str) -> Partitions:
    """What lies in the partitions."""
    return Partitions(amqp_url, layout)


@pytest.fixture
def sets(layout: Layout, database_url: str, amqp_url: str, faces: Faces) -> Iterator[relatum.AffinitySets]:
    """The sets, seen from outside; a router has made them known."""
    with faces.opened() as router:
        router.publish(b"", "the first set", affinity_last=True)
    with relatum.AffinitySets(layout.super_stream, database_url, broker=amqp_url) as opened:
        yield opened


# --- where messages go --------------------------------------------------------------------------------------------


def test_a_set_stays_where_its_first_message_went(faces: Faces, partitions: Partitions) -> None:
    """Sets are spread one after the other, and each lies whole and in order in one partition."""
    with faces.opened() as router:
        for number in range(5):
            for name in ("s1", "s2", "s3"):
                router.publish(b"%d" % number, name)
    found = [partitions.of_set(name) for name in ("s1", "s2", "s3")]
    assert [list(each.values()) for each in found] == [[[b"0", b"1", b"2", b"3", b"4"]]] * 3
    assert len({stream for each in found for stream in each}) == 3


def test_routers_agree_on_a_set_they_begin_together(layout: Layout, database_url: str, amqp_url: str) -> None:
    """Whoever sends a set's first messages at the same moment, they go to one partition."""
    publishers, names = 4, [f"set {number}" for number in range(10)]
    begin = threading.Barrier(publishers)

    def publish(number: int) -> None:
        faces = Faces("blocking", amqp_url, layout.super_stream, database_url)
        with faces.opened() as router:
            for name in names:
                begin.wait(90)
                router.publish(b"%d" % number, name)

    with ThreadPoolExecutor(publishers) as threads:
        list(threads.map(publish, range(publishers)))
    for name in names:
        (bodies,) = Partitions(amqp_url, layout).of_set(name).values()
        assert sorted(bodies) == [b"0", b"1", b"2", b"3"]


async def test_tasks_publish_a_set_in_the_order_they_began(
    layout: Layout, database_url: str, amqp_url: str, partitions: Partitions
) -> None:
    """Of many publishes under way at once, those of one set come in their order, in one partition."""
    connection = await aio_pika.connect(amqp_url)
    async with connection, relatum.AsyncAffinityRouter(layout.super_stream, database_url) as router:
        invoices = router.exchange(await connection.channel())
        messages = [
            aio_pika.Message(b"%02d" % number, headers={"affinity_set": f"s{number % 4}"}) for number in range(80)
        ]
        await asyncio.gather(*(invoices.publish(message) for message in messages))
    for name in range(4):
        (bodies,) = partitions.of_set(f"s{name}").values()
        assert bodies == [b"%02d" % number for number in range(name, 80, 4)]


@pytest.mark.parametrize("balance", ["round_robin", "least_loaded"])
def test_messages_of_no_set_are_balanced_without_the_database(
    faces: Faces, partitions: Partitions, database_url: str, balance: Any
) -> None:
    """Where nothing answers in place of PostgreSQL, messages of no set are published all the same, and spread."""
    with Proxy.to(database_url) as proxy:
        url = proxy.url(database_url)
    with faces.opened(url, balance=balance) as router:
        for number in range(9):
            router.publish(b"%d" % number)
        with pytest.raises(DatabaseUnavailable):
            router.publish(b"of a set", "s1")
    assert Counter(len(messages) for messages in partitions.messages().values()) == {3: 3}


def test_least_loaded_counts_the_open_sets_of_all(faces: Faces, sets: relatum.AffinitySets) -> None:
    """New sets go where the fewest are open, whoever opened them."""
    with faces.opened(balance=lambda _name, _candidates: 0) as crowding, faces.opened(balance="least_loaded") as router:
        for number in range(4):
            crowding.publish(b"", f"crowd {number}")
        for number in range(5):
            router.publish(b"", f"set {number}")
        assert sorted(sets.count().values()) == [2, 3, 4]


def test_weights_of_the_database(faces: Faces, sets: relatum.AffinitySets, layout: Layout) -> None:
    """Sets are placed in proportion to the weights that are stored."""
    first, second, third = (each.stream for each in layout)
    sets.set_weights({first: 2, second: 1, third: 0})
    with faces.opened(balance="weighted") as router:
        for number in range(6):
            router.publish(b"", f"set {number}")
    assert sets.count() == {first: 4, second: 2, third: 0}


# --- the end of sets ----------------------------------------------------------------------------------------------


def test_the_last_message_closes_its_set(faces: Faces, sets: relatum.AffinitySets, partitions: Partitions) -> None:
    """Once it is confirmed the set is closed, and the next message of its name begins another, here and elsewhere."""
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


def test_a_message_that_was_not_taken_closes_nothing(
    faces: Faces, sets: relatum.AffinitySets, layout: Layout, amqp_url: str
) -> None:
    """Where the last message comes back, its set stays open."""
    with faces.opened() as router:
        router.publish(b"1", "s1")
        place = layout.partition(sets.inspect("s1").partition)
        unbind_partition(amqp_url, layout.super_stream, place.stream)
        with pytest.raises((UnroutableError, PublishUnroutable)):
            router.publish(b"2", "s1", affinity_last=True)
    assert sets.inspect("s1").partition == place.stream


def test_a_closed_set_is_noticed_and_not_used(faces: Faces, sets: relatum.AffinitySets) -> None:
    """A router that remembers a set learns that it was closed, and opens another."""
    with faces.opened() as router:
        router.publish(b"1", "s1")
        closed = sets.close_set("s1")

        def is_open_again() -> bool:
            router.publish(b"2", "s1")
            return bool(sets.list("s1"))

        wait_until(is_open_again, what="another set of the name")
        assert sets.inspect("s1").epoch > closed.epoch


def test_a_moved_set_is_followed(
    faces: Faces, sets: relatum.AffinitySets, layout: Layout, partitions: Partitions
) -> None:
    """After a move its messages go to the other partition, and none lies behind the fence in the old one."""
    with faces.opened() as router:
        router.publish(b"1", "s1")
        source = sets.inspect("s1").partition
        target = next(each.stream for each in layout if each.stream != source)
        (move,) = sets.move(["s1"], target)
        assert str(move.state) == "switched"
        router.publish(b"2", "s1")
    assert partitions.of_set("s1") == {source: [b"1"], target: [b"2"]}


def test_idle_sets_are_closed_and_used_ones_are_not(
    faces: Faces, sets: relatum.AffinitySets, engine: sa.Engine
) -> None:
    """A set nobody used for `idle_s` is closed; one in use stays, also where its router was told nothing of that."""
    with faces.opened() as router:
        router.publish(b"", "quiet")
        router.publish(b"", "busy")
    epoch = sets.inspect("busy").epoch
    with engine.begin() as connection:
        connection.execute(sa.update(placements).values(used_at=sa.func.now() - timedelta(hours=1)))
    with faces.opened(idle_s=60) as closing:
        closing.publish(b"", "its own")
        with faces.opened() as using:
            # A router that is closed writes down which sets it used, and closes the others, at once.
            using.publish(b"", "busy")
    assert [(each.name, each.epoch == epoch) for each in sets.list()] == [("busy", True), ("its own", False)]


def test_a_set_in_use_is_not_closed_before_that_is_written_down(
    faces: Faces, sets: relatum.AffinitySets, engine: sa.Engine
) -> None:
    """A router says within 15 seconds that it uses a set: until then others do not take it for idle."""
    with faces.opened(idle_s=60) as using:
        using.publish(b"", "used")
        epoch = sets.inspect("used").epoch
        with engine.begin() as connection:
            connection.execute(sa.update(placements).values(used_at=sa.func.now() - timedelta(seconds=61)))
        using.publish(b"", "used")
        with faces.opened() as closing:
            closing.publish(b"", "its own")
        assert sets.inspect("used").epoch == epoch


def test_sets_of_a_super_stream_are_closed_after_one_time(faces: Faces, sets: relatum.AffinitySets) -> None:
    """Who names another `idle_s` than the first is refused, and told which it is; who names none goes by that."""
    with faces.opened(idle_s=60) as first:
        first.publish(b"", "s1")
        with pytest.raises(SuperStreamConflict, match="closed after 60 s") as refused, faces.opened(idle_s=90) as other:
            other.publish(b"", "s1")
        assert refused.value.reason == "its idle_s is 60"
        with faces.opened() as other:
            other.publish(b"", "s1")
    sets.set_idle(90)
    with faces.opened(idle_s=90) as other:
        other.publish(b"", "s1")
    sets.set_idle(None)
    with faces.opened(idle_s=120) as other:
        other.publish(b"", "s1")
    for wrong in (0, 59.9, True, "60", float("inf")):
        with pytest.raises(InvalidInput, match="idle_s"):
            sets.set_idle(wrong)  # type: ignore[arg-type]


def test_only_so_many_sets_may_be_open(faces: Faces, sets: relatum.AffinitySets) -> None:
    """One more is refused before anything is sent, until another is closed."""
    with faces.opened(open_sets_max=2) as router:
        router.publish(b"", "s1")
        router.publish(b"", "s2")
        with pytest.raises(TooManyOpenSets) as refused:
            router.publish(b"", "s3")
        assert (refused.value.open_sets, refused.value.open_sets_max) == (2, 2)
        router.publish(b"", "s1")
        sets.close_set("s2")
        router.publish(b"", "s3")


# --- predecessors -------------------------------------------------------------------------------------------------


def test_a_message_joins_the_set_of_its_predecessor(faces: Faces, partitions: Partitions) -> None:
    """By its `message_id` where this router published it; the joining one can be joined in turn."""
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
        with pytest.raises(PredecessorNotFound) as missing:
            router.publish(b"3", affinity_predecessor=f"{stream}:1000")
        assert missing.value.predecessor == f"{stream}:1000"
        # Whatever else names no place in a partition is an id, colons or not.
        for text in (stream, f"{stream}:", f"{stream}:-1", f"{stream}:1.5", f"{stream}:²", "orders-2:17", "urn:uuid:7"):
            with pytest.raises(PredecessorNotFound, match="no key is taken"):
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
        with pytest.raises(PredecessorNotFound, match="has not published it"):
            router.publish(b"", affinity_predecessor="m1")
    with faces.opened(predecessors_max=0) as router:
        router.publish(b"", "s1", message_id="m1")
        with pytest.raises(PredecessorNotFound):
            router.publish(b"", affinity_predecessor="m1")


def test_a_predecessor_is_found_by_the_table(
    faces: Faces, partitions: Partitions, layout: Layout, amqp_url: str, engine: sa.Engine
) -> None:
    """Another router finds it by its `message_id` where a key is taken from that; of several, the newest counts."""
    streams = [each.stream for each in layout]
    with faces.opened() as router, faces.opened() as other:
        router.publish(b"old", "s0", message_id="m1")
        router.publish(b"1", "s1", message_id="m1")
        with pytest.raises(PredecessorNotFound, match="no key is taken"):
            other.publish(b"too early", affinity_predecessor="m1")
        with recording(amqp_url, engine, *streams, keys=[KeyDefinition("id", source="property:message_id")]):
            for stream in streams:
                wait_recorded(amqp_url, engine, stream)
            other.publish(b"2", affinity_predecessor="m1")
            with pytest.raises(PredecessorNotFound, match="not recorded"):
                other.publish(b"3", affinity_predecessor="m7")
            for stream in streams:
                wait_recorded(amqp_url, engine, stream)
    assert list(partitions.of_set("s1").values()) == [[b"1", b"2"]]


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


# --- what is refused ----------------------------------------------------------------------------------------------


def test_sets_need_confirms(layout: Layout, database_url: str, amqp_url: str, partitions: Partitions) -> None:
    """Without them nothing of a set is sent; messages of no set are."""
    with broker_connection(amqp_url) as connection, relatum.AffinityRouter(layout.super_stream, database_url) as router:
        channel = connection.channel()
        with pytest.raises(ConfigurationError, match="confirm_delivery"):
            router.publish(channel, b"1", pika.BasicProperties(headers={"affinity_set": "s1"}))
        router.publish(channel, b"2")
        wait_until(lambda: sum(map(len, partitions.messages().values())) == 1, what="the message of no set")


def test_one_header_names_the_sets_of_a_super_stream(faces: Faces, sets: relatum.AffinitySets) -> None:
    """A router that names them by another is refused, and nothing is sent."""
    assert sets.list() == []
    with faces.opened(header="invoice") as router, pytest.raises(SuperStreamConflict):
        router.publish(b"", invoice="i1")


def test_headers_that_make_no_sense_are_refused(faces: Faces, partitions: Partitions) -> None:
    """The publish is one clear error, and nothing is sent."""
    with faces.opened() as router:
        for headers in ({"affinity_set": 7}, {"affinity_last": True}, {"affinity_predecessor": ""}):
            with pytest.raises(InvalidInput, match="nothing was sent"):
                router.publish(b"", **headers)
    assert not any(partitions.messages().values())


@pytest.mark.parametrize(
    "option",
    [
        {"balance": "fairest"},
        {"check_s": 0.05},
        {"idle_s": 59.9},
        {"open_sets_max": 0},
        {"known_sets_max": 0},
        {"predecessors_max": -1},
        {"when_database_away": "sleep"},
        {"header": ""},
    ],
)
def test_options_that_cannot_be_are_refused(option: dict[str, Any]) -> None:
    """A wrong option is one error, before a router is made."""
    with pytest.raises(ConfigurationError):
        AffinityOptions(**option)


@pytest.mark.parametrize("router", [relatum.AffinityRouter, relatum.AsyncAffinityRouter])
def test_options_of_another_kind_are_refused(router: Any, database_url: str) -> None:
    """Those of routers of contexts say nothing of affinity sets."""
    with pytest.raises(ConfigurationError, match="AffinityOptions"):
        router("orders", database_url, ContextOptions())


# --- the database is away -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("when_away", "goes_on"), [("known", True), ("wait", False), ("fail", False)])
def test_known_sets_go_on_without_the_database(
    faces: Faces, partitions: Partitions, database_url: str, when_away: Any, goes_on: bool
) -> None:
    """By default a known set's messages are published, a new one's are a retryable error; afterwards all is well."""
    with Proxy.to(database_url) as proxy:
        options = {"when_database_away": when_away, "timeout_s": 0.5}
        with faces.opened(proxy.url(database_url), **options) as router:
            until_answered(lambda: router.publish(b"1", "s1"))
            proxy.accepts = False
            proxy.reset()
            if goes_on:
                router.publish(b"2", "s1")
            with pytest.raises(DatabaseUnavailable):
                router.publish(b"x", "s2")
            if not goes_on:
                # One may be confirmed before its database is seen to be away: then it is not known where it belongs.
                with pytest.raises((DatabaseUnavailable, PublishOutcomeUnknown)):
                    wait_until(lambda: router.publish(b"2", "s1") and False, what="the end of what was read before")
            proxy.accepts = True
            until_answered(lambda: router.publish(b"3", "s1"))
            until_answered(lambda: router.publish(b"4", "s2", affinity_last=True))
    (bodies,) = partitions.of_set("s1").values()
    assert (bodies[0], bodies[-1]) == (b"1", b"3")
    assert (b"2" in bodies) or not goes_on
    assert list(partitions.of_set("s2").values()) == [[b"4"]]
