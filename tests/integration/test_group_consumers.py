"""Consumers that share groups: every complete group is given until it is acknowledged, to one member at a time."""

import asyncio
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa

from relatum import Broker
from relatum.errors import (
    BrokerUnavailable,
    ClaimLost,
    ConfigurationError,
    GroupConflict,
    InvalidInput,
    KeyNotDefined,
    PublishUnroutable,
    StreamNotFound,
)
from relatum.membership import GROUP_KEY
from relatum.reading import StreamReader
from relatum.recording import prune
from relatum_consumer import AsyncRelations, Relations
from relatum_consumer.groups import GroupConsumer, SharedGroup
from tests.support import (
    broker_connection,
    declare_stream,
    delete_stream,
    new_streams,
    unique_name,
    wait_until,
)
from tests.support.groups import group_id, ids, of_group, shuffled, whole_group
from tests.support.place import Place
from tests.support.proxy import Proxy

KEYS = [GROUP_KEY]

UPKEEP = Path(__file__).parents[2] / "docs" / "troubleshooting.md"


@pytest.fixture
def relations(place: Place) -> Iterator[Relations]:
    with Relations(place.amqp, place.database) as relations:
        yield relations


@pytest.fixture
def streams(amqp_url: str) -> Iterator[list[str]]:
    with new_streams(amqp_url, 2) as names:
        yield names


def given(relations: Relations, streams: Any, consumer: str | GroupConsumer = "billing", **options: Any) -> list[str]:
    """The ids of all groups there are for a consumer, each acknowledged."""
    found = []
    for group in relations.groups(streams, consumer=consumer, **options):
        found.append(group.group_id)
        group.acknowledge()
    return found


def states(place: Place) -> dict[int, str]:
    """The state of each group a consumer has seen, by the group's number."""
    return {int(id_, 16): state for id_, state in place.sql("SELECT group_id, state FROM relatum.group_states")}


def given_until(
    is_so: Callable[[], object], relations: Relations, stream: str, consumer: GroupConsumer, **options: Any
) -> list[str]:
    """The same of one who follows, by the time that something has come true."""
    found: list[str] = []

    def has_come() -> object:
        found.extend(given(relations, stream, consumer, follow=True, idle_timeout_s=1, **options))
        return is_so()

    wait_until(has_come, what="what who follows does")
    return found


# --- giving and acknowledging -----------------------------------------------------------------------------


def test_each_complete_group_is_given_until_it_is_acknowledged(
    place: Place, relations: Relations, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the order of their first messages; what was acknowledged is not given again, and incomplete ones never."""
    monkeypatch.setattr("relatum_consumer.groups._scanning.WINDOW_OFFSETS", 2)
    messages = [*whole_group(1, 3), *whole_group(2, 2), of_group(3, 1), of_group(3, 3, last=True)]
    mixed = shuffled(messages, 1)
    place.put_recorded(*mixed)
    firsts = [body for body, headers in mixed if headers["group_sequence"] == 1 and not body.startswith(b"3-")]
    with relations.groups(place.stream, consumer="billing") as groups:
        found = list(groups)
        assert [group[0].body for group in found] == firsts
        assert [[message.body.split(b"-")[1] for message in group] for group in found] == [
            [b"%d" % number for number in range(1, len(group) + 1)] for group in found
        ]
        found[0].acknowledge()
        found[0].acknowledge()
    with pytest.raises(ClaimLost) as lost:
        found[1].acknowledge()
    assert lost.value.group_id == found[1].group_id
    with relations.groups(place.stream, consumer="billing") as groups:
        (again,) = groups
        assert (again.group_id, again.deliveries) == (found[1].group_id, 2)
        again.acknowledge()
    assert given(relations, place.stream) == []
    assert sorted(given(relations, place.stream, "shipping")) == ids(1, 2), "another name has a position of its own"


def test_a_group_completed_behind_the_position_is_given(place: Place, relations: Relations) -> None:
    """The hole of browsing: a group that stands before others that were given; a repeated message opens none again."""
    place.put_recorded(of_group(1, 1), *whole_group(2, 2))
    assert given(relations, place.stream) == ids(2)
    place.put_recorded(of_group(1, 2, last=True), *whole_group(2, 2), *whole_group(3, 1))
    assert given(relations, place.stream) == ids(1, 3)
    assert states(place) == dict.fromkeys((1, 2, 3), "done")


def test_groups_over_several_streams_are_one_consumer_s(place: Place, relations: Relations, streams: list[str]) -> None:
    """A group is given once it is complete with all streams, and its messages are in the order of their numbers."""
    first, second = streams
    place.put(of_group(1, 2, time_us=20), of_group(2, 1, last=True, time_us=5), to=second)
    place.record(first, second)
    assert given(relations, streams) == ids(2)
    place.put(of_group(1, 1, time_us=10), of_group(1, 3, last=True, time_us=30), to=first)
    place.record(first, second)
    with relations.groups(streams, consumer="billing") as groups:
        (group,) = groups
    assert [(each.stream, each.body) for each in group] == [(first, b"1-1"), (second, b"1-2"), (first, b"1-3")]


def test_what_is_back_filled_later_is_given(place: Place, relations: Relations) -> None:
    """Groups that lie before the part a recorder began with are found once that is back-filled."""
    place.put(*whole_group(1, 2))
    place.record(keys=())
    place.put_recorded(b"between")
    place.put_recorded(*whole_group(2, 2))
    assert given(relations, place.stream) == ids(2)
    place.backfill()
    assert given(relations, place.stream) == ids(1)


def test_where_a_new_consumer_starts(place: Place, relations: Relations) -> None:
    """A group that stands before the start is none of the consumer's, one behind it is, wherever its other messages."""
    place.put_recorded(
        *whole_group(1, 1), of_group(2, 1), of_group(3, 2, last=True), of_group(2, 2, last=True), of_group(3, 1)
    )
    assert given(relations, place.stream, start=2) == ids(3)
    assert given(relations, place.stream) == [], "the start is that of the consumer's name, once for all"
    assert given(relations, place.stream, "all") == ids(1, 2, 3)


def test_physical_order(place: Place, relations: Relations) -> None:
    """Groups and their messages in the order of arrival."""
    place.put_recorded(of_group(2, 2, last=True), *whole_group(1, 1), of_group(2, 1))
    with relations.groups(place.stream, order="physical", consumer="billing") as groups:
        assert [[message.body for message in group] for group in groups] == [[b"2-2", b"2-1"], [b"1-1"]]


# --- members ----------------------------------------------------------------------------------------------


def test_a_group_is_at_one_member_at_a_time(place: Place, relations: Relations) -> None:
    """What one member has and has not acknowledged is not given to another, however long that takes."""
    place.put_recorded(*whole_group(1, 1), *whole_group(2, 1))
    consumer = GroupConsumer("billing", lease_s=4, prefetch=1)
    lapsed = sa.text("SELECT count(*) FROM relatum.group_states WHERE :at < now() AND lease_expires_at > now()")
    with relations.groups(place.stream, consumer=consumer) as mine, place.engine.connect() as connection:
        first = next(mine)
        leased = connection.scalar(sa.text("SELECT max(lease_expires_at) FROM relatum.group_states"))
        connection.rollback()

        def is_renewed() -> object:
            connection.rollback()
            return connection.scalar(lapsed, {"at": leased})

        wait_until(is_renewed, what="a lease that would have lapsed")
        with Relations(place.amqp, place.database) as other:
            assert given(other, place.stream, consumer) == ids(2)
        first.acknowledge()


def test_a_lapsed_lease_gives_the_group_to_another(place: Place, relations: Relations) -> None:
    """Who could not renew loses the group: another gets it, and the first's acknowledgement is refused."""
    place.put_recorded(*whole_group(1, 2))
    with relations.groups(place.stream, consumer=GroupConsumer("billing", lease_s=60)) as mine:
        first = next(mine)
        # As time does to a member that is frozen.
        place.sql("UPDATE relatum.group_states SET lease_expires_at = now() - interval '1 s'")
        with Relations(place.amqp, place.database) as other:
            theirs = other.groups(place.stream, consumer="billing")
            second = next(theirs)
            assert (second.group_id, second.deliveries) == (first.group_id, 2)
            with pytest.raises(ClaimLost):
                first.acknowledge()
            second.acknowledge()
        with pytest.raises(ClaimLost):
            first.acknowledge()
    assert states(place) == {1: "done"}


def test_a_member_gets_back_what_it_had(place: Place) -> None:
    """A process that comes back under its name need not wait for the lease of the one that died."""
    place.put_recorded(*whole_group(1, 2))
    consumer = GroupConsumer("billing", member="host-1", lease_s=600)
    with Relations(place.amqp, place.database) as died, Relations(place.amqp, place.database) as again:
        next(died.groups(place.stream, consumer=consumer))
        assert given(again, place.stream, "billing") == []
        assert given(again, place.stream, consumer) == ids(1)


def test_members_must_agree(place: Place, relations: Relations, streams: list[str]) -> None:
    """A consumer reads the same streams in the same order, whoever asks."""
    place.record(*streams)
    assert given(relations, streams) == []
    assert given(relations, list(reversed(streams))) == []
    with pytest.raises(ConfigurationError, match="billing"):
        given(relations, streams[0])
    with pytest.raises(ConfigurationError, match="logical"):
        given(relations, streams, order="physical")


def test_what_cannot_be_meant_is_refused(relations: Relations) -> None:
    """At once, before anything is asked: options of a consumer at their limits, and what needs another option."""
    for options in ({"complete": False}, {"consumer": ""}, {"consumer": 5}, {"on_conflict": "dead_letter"}):
        with pytest.raises(InvalidInput):
            relations.groups("any", **{"consumer": "billing"} | options)
    limits = {"lease_s": 0.5, "prefetch": 1_001, "member": "", "dead_letter_stream": "", "deliveries_max": 1_000_001}
    for option, value in limits.items():
        with pytest.raises(InvalidInput):
            GroupConsumer("billing", **{option: value})  # type: ignore[arg-type]


def test_the_key_must_be_defined(place: Place, relations: Relations) -> None:
    """Without it nothing is found, which is said."""
    place.record(keys=["order_id"])
    with pytest.raises(KeyNotDefined, match="message_group"):
        next(relations.groups(place.stream, consumer="billing"))


# --- what is not recorded ----------------------------------------------------------------------------------


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    """The lines about groups; a recorder that waits for a busy machine has its own."""
    return [each.getMessage() for each in caplog.records if each.name == "relatum.groups"]


async def test_the_asyncio_face_shares_with_the_blocking_one(place: Place) -> None:
    """Both are members of one consumer, and acknowledge alike."""
    place.put_recorded(*(m for n in range(1, 5) for m in whole_group(n, 2)))
    found = []
    async with AsyncRelations(place.amqp, place.database) as relations:
        async with relations.groups(place.stream, consumer=GroupConsumer("billing", prefetch=1)) as groups:
            async for group in groups:
                found.append(group.group_id)
                if len(found) == 2:
                    break
                await group.acknowledge()
        with pytest.raises(ClaimLost):
            await group.acknowledge()
    assert found == ids(1, 2)
    with Relations(place.amqp, place.database) as relations:
        assert given(relations, place.stream) == ids(2, 3, 4)


# --- groups that are not sound ----------------------------------------------------------------------------


UNSOUND = [*whole_group(1, 2), of_group(1, 3), *whole_group(2, 1)]
"""A group with a number past its last, and one that is sound."""


def test_an_unsound_group_raises_and_stays(place: Place, relations: Relations) -> None:
    """It is nobody's until somebody decides; "skip" does."""
    place.put_recorded(*UNSOUND)
    with pytest.raises(GroupConflict) as caught:
        given(relations, place.stream)
    assert (caught.value.group_id, caught.value.anomaly) == (group_id(1), "past_last")
    assert given(relations, place.stream, on_conflict="skip") == ids(2)
    assert states(place) == {1: "dead", 2: "done"}


def test_dead_letters_must_have_a_place(place: Place, relations: Relations) -> None:
    """A stream that is missing is noticed at the start, before anything is written; a queue will do."""
    place.put_recorded(*whole_group(1, 1))
    missing = GroupConsumer("billing", dead_letter_stream=unique_name("missing"))
    with pytest.raises(StreamNotFound, match="dead_letter_stream="):
        next(relations.groups(place.stream, consumer=missing))
    assert states(place) == {}
    queue = unique_name("queue")
    with broker_connection(place.amqp) as connection:
        channel = connection.channel()
        channel.queue_declare(queue)
        try:
            assert given(relations, place.stream, GroupConsumer("billing", dead_letter_stream=queue)) == ids(1)
        finally:
            channel.queue_delete(queue)


def test_dead_letters_that_are_not_taken_give_the_group_back(
    place: Place, relations: Relations, dead_stream: str
) -> None:
    """Another member deals with it, while this one is still open: its messages are there, with what is wrong."""
    stream, dead = place.stream, dead_stream
    place.put_recorded(*whole_group(2, 1), *UNSOUND[:-1], to=stream)
    consumer = GroupConsumer("billing", dead_letter_stream=dead)
    with relations.groups(stream, consumer=consumer, on_conflict="dead_letter") as mine:
        next(mine).acknowledge()
        delete_stream(place.amqp, dead)
        with pytest.raises(PublishUnroutable, match=dead):
            next(mine)
        assert states(place) == {1: "ready", 2: "done"}
        declare_stream(place.amqp, dead)
        assert given(relations, stream, consumer, on_conflict="dead_letter") == []
    assert states(place) == {1: "dead", 2: "done"}
    letters = place.messages(dead)
    assert [letter.body for letter in letters] == [b"1-1", b"1-2", b"1-3"]
    assert {letter.headers["relatum_dead_reason"] for letter in letters} == {"past_last"}


def test_who_follows_waits_with_dead_letters_for_the_broker(place: Place, dead_stream: str) -> None:
    """Others get the error at once; the group is a dead letter when the broker is there again."""
    stream, dead = place.stream, dead_stream
    place.put_recorded(*UNSOUND, to=stream)
    consumer = GroupConsumer("billing", dead_letter_stream=dead)
    with (
        Proxy.to(place.amqp) as proxy,
        Relations(Broker(proxy.url(place.amqp), stream_url=place.stream_url), place.database) as relations,
    ):
        proxy.accepts = False
        groups = relations.groups(stream, consumer=consumer, on_conflict="dead_letter")
        with groups, pytest.raises(BrokerUnavailable):
            next(groups)
        back = threading.Timer(1, setattr, (proxy, "accepts", True))
        back.start()
        ended = {1: "dead", 2: "done"}
        options = {"on_conflict": "dead_letter"}
        assert given_until(lambda: states(place) == ended, relations, stream, consumer, **options) == ids(2)
        back.join()


def fail(relations: Relations, stream: str, consumer: GroupConsumer) -> list[str | None]:
    """A member that is given all groups, and ends at the first one of number 2; what it was given."""
    found = []
    with relations.groups(stream, consumer=consumer) as groups:
        for group in groups:
            found.append(group.group_id)
            if group.group_id == group_id(2):
                break
            group.acknowledge()
    return found


def test_a_group_that_ends_its_members_is_dead_after_so_many_deliveries(
    place: Place, relations: Relations, caplog: pytest.LogCaptureFixture
) -> None:
    """It is told of; what was only claimed along with it counts as not given, and is given when it is gone."""
    place.put_recorded(*(message for number in (1, 2, 3) for message in whole_group(number, 2)))
    consumer = GroupConsumer("billing", deliveries_max=2)
    assert fail(relations, place.stream, consumer) == ids(1, 2)
    assert fail(relations, place.stream, consumer) == ids(2)
    assert states(place) == {1: "done", 2: "ready", 3: "ready"}
    assert not told(caplog)
    with relations.groups(place.stream, consumer=consumer) as groups:
        (third,) = groups
        assert (third.group_id, third.deliveries) == (group_id(3), 3)
    (line,) = told(caplog)
    assert group_id(2) in line
    assert "2 times" in line
    assert states(place) == {1: "done", 2: "dead", 3: "ready"}
    assert given(relations, place.stream) == ids(3)
    place.sql(revival())
    assert fail(relations, place.stream, consumer) == ids(2), "it is counted anew"
    assert given(relations, place.stream) == ids(2), "who sets no limit is given it again and again"


def revival() -> str:
    """The statement of the operator's page by which dead groups are given again."""
    statements = re.findall(r"```sql\n(.*?)```", UPKEEP.read_text(), re.DOTALL)
    return next(statement for statement in statements if "state = 'dead'" in statement)


def test_a_group_given_too_often_becomes_dead_letters(place: Place, relations: Relations, dead_stream: str) -> None:
    """Where there is a dead-letter stream, its messages lie there; for the asyncio face, too."""
    stream, dead = place.stream, dead_stream
    place.put_recorded(*whole_group(2, 2), to=stream)
    consumer = GroupConsumer("billing", deliveries_max=1, dead_letter_stream=dead)
    assert fail(relations, stream, consumer) == ids(2)

    async def rest() -> tuple[list[str | None], Mapping[str, int]]:
        async with AsyncRelations(place.amqp, place.engine.url) as asynchronous:
            found = [group.group_id async for group in asynchronous.groups(stream, consumer=consumer)]
            return found, (await asynchronous.group_consumer_status("billing")).counts

    assert asyncio.run(rest()) == ([], {"open": 0, "ready": 0, "claimed": 0, "done": 0, "dead": 1})
    letters = place.messages(dead)
    assert [letter.body for letter in letters] == [b"2-1", b"2-2"]
    assert {letter.headers["relatum_dead_reason"] for letter in letters} == {"never_acknowledged"}
    assert states(place) == {2: "dead"}


def test_duplicates_by_policy(place: Place, relations: Relations) -> None:
    """The first counts, unless duplicates are an error."""
    place.put_recorded(of_group(1, 1), *whole_group(1, 2))
    with pytest.raises(GroupConflict, match="one number"):
        given(relations, place.stream, on_duplicate="raise")
    with relations.groups(place.stream, consumer="billing") as groups:
        (group,) = groups
    assert [message.offset for message in group] == [0, 2]
    assert [message.offset for message in group.duplicates] == [1]


# --- streams that change ----------------------------------------------------------------------------------


@pytest.mark.differs
def test_a_stream_declared_again_begins_anew(place: Place, relations: Relations) -> None:
    """Its groups are others, whatever became of groups of the same ids before."""
    place.put_recorded(*whole_group(1, 2), of_group(2, 1))
    assert given(relations, place.stream) == ids(1)
    place.declare_again()
    place.put_recorded(b"other", *whole_group(1, 3), *whole_group(2, 2))
    assert given(relations, place.stream) == ids(1, 2)
    assert given(relations, place.stream) == []
    prune(place.amqp, place.engine.url)
    assert place.sql("SELECT count(DISTINCT stream_id) FROM relatum.group_scans") == [(1,)]
    assert given(relations, place.stream) == []


@pytest.mark.differs
def test_what_retention_has_dropped_is_named_and_pruned(place: Place, relations: Relations, short_stream: str) -> None:
    """A group that lost a message is never given smaller; a state goes when nothing of its group is left."""
    stream = short_stream
    place.put_recorded(*whole_group(1, 2), *whole_group(2, 2), of_group(3, 1), to=stream)
    consumer = GroupConsumer("billing", prefetch=1)
    with relations.groups(stream, consumer=consumer) as groups:
        next(groups).acknowledge()
        # The second is found ready, and stays so.
        next(groups)
    assert states(place) == {1: "done", 2: "ready", 3: "open"}
    place.put(*((b"x" * 10_000, {}) for _ in range(60)), to=stream)
    place.put(of_group(1, 2, last=True), to=stream)
    with StreamReader.open(place.amqp) as reader:
        wait_until(lambda: (reader.bounds(stream).first or 0) > 4, what="retention")
    place.record(stream)
    prune(place.amqp, place.engine.url)
    assert states(place) == {1: "done", 2: "ready"}, "a message of the first is retained"
    with pytest.raises(GroupConflict) as caught:
        given(relations, stream)
    assert (caught.value.group_id, caught.value.anomaly) == (group_id(2), "expired")
    assert given(relations, stream, on_conflict="skip") == []
    prune(place.amqp, place.engine.url)
    assert states(place) == {1: "done"}


@pytest.mark.differs
def test_a_copy_that_retention_has_dropped_leaves_the_other(place: Place, relations: Relations) -> None:
    """A message that lies in two streams, as by fan-out, is there as long as one of them has it."""
    short = f"a-{unique_name()}"
    assert short < place.stream, "of equal times, the copy in the first stream is chosen"
    declare_stream(place.amqp, short, x_max_length_bytes=100_000, x_stream_max_segment_size_bytes=50_000)
    try:
        now = time.time_ns() // 1_000
        for stream in (short, place.stream):
            place.put(of_group(1, 1, time_us=now), to=stream)
        place.put(of_group(1, 2, last=True, time_us=now + 1))
        place.record(short, place.stream)
        place.put(*((b"x" * 10_000, {}) for _ in range(60)), to=short)
        with StreamReader.open(place.amqp) as reader:
            wait_until(lambda: (reader.bounds(short).first or 0) > 0, what="retention")
        with relations.groups([short, place.stream], consumer="billing") as groups:
            assert [[message.id for message in group] for group in groups] == [[(place.stream, 0), (place.stream, 1)]]
    finally:
        delete_stream(place.amqp, short)


def test_a_consumer_may_keep_its_own_books(place: Place) -> None:
    """The role `relatum_consumer` suffices to share groups."""
    place.put_recorded(*whole_group(1, 2))
    with psycopg.connect(place.database) as connection:
        if connection.execute("SELECT FROM pg_roles WHERE rolname = 'relatum_consumer'").rowcount == 0:
            pytest.skip("this server's user may not make roles")
    as_consumer = f"{place.database}?options=-c%20role%3Drelatum_consumer"
    with Relations(place.amqp, as_consumer) as limited:
        assert given(limited, place.stream) == ids(1)


def test_the_database_may_be_away_in_between(place: Place) -> None:
    """Who follows waits until it is there again; claims and acknowledgements go on where they were."""
    place.put_recorded(*(message for number in range(1, 6) for message in whole_group(number, 2)))
    found: list[str | None] = []
    with Proxy.to(place.database) as line, Relations(place.amqp, line.url(place.database)) as relations:
        consumer = GroupConsumer("billing", prefetch=2, lease_s=600)
        groups: Iterator[SharedGroup] = relations.groups(place.stream, consumer=consumer, follow=True)
        for is_away in (True, False, True, False, False):
            group = next(groups)
            back = threading.Timer(1, setattr, (line, "accepts", True))
            if is_away:
                line.accepts = False
                line.cut()
                back.start()
            group.acknowledge()
            found.append(group.group_id)
            back.cancel()
    assert found == ids(1, 2, 3, 4, 5)
    assert states(place) == dict.fromkeys(range(1, 6), "done")
