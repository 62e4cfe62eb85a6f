"""Consumers that share groups: every complete group is given until it is acknowledged, to one member at a time."""

import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa
from pika.adapters.blocking_connection import BlockingChannel

from relatum import Broker, errors
from relatum.common.waiting import within
from relatum.membership import GROUP_KEY
from relatum.recording import prune, repair
from relatum.store.catalog import add_keys, remove_key
from relatum_consumer import AsyncRelations, Relations
from relatum_consumer.groups import GroupConsumer, SharedGroup
from relatum_consumer.lookups.proof import coverage_by_stream
from tests.support import declare_stream, delete_stream, unique_name, wait_until
from tests.support.groups import group_id, ids, of_group, shuffled, whole_group
from tests.support.leases import let_lapse
from tests.support.place import Place
from tests.support.proxy import Proxy
from tests.support.raising import raising
from tests.support.standstill import in_time

KEYS = [GROUP_KEY]

UPKEEP = Path(__file__).parents[2] / "docs" / "troubleshooting.md"


@pytest.fixture
def relations(place: Place) -> Iterator[Relations]:
    with Relations(place.amqp, place.database) as relations:
        yield relations


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


def letters_in(place: Place, stream: str) -> list[tuple[bytes, object]]:
    return [(letter.body, letter.headers["relatum_dead_reason"]) for letter in place.messages(stream)]


def test_each_complete_group_is_given_until_it_is_acknowledged(
    place: Place, relations: Relations, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Complete groups come in the order of their first messages, each until it is acknowledged for this consumer."""
    monkeypatch.setattr("relatum_consumer.groups._finding.SCAN_OFFSETS", 2)
    messages = [*whole_group(1, 3), *whole_group(2, 2), of_group(3, 1), of_group(3, 3, last=True)]
    mixed = shuffled(messages, 1)
    place.put_recorded(*mixed)
    firsts = [body for body, headers in mixed if headers["group_sequence"] == 1 and not body.startswith(b"3-")]
    with relations.groups(place.stream, consumer="billing") as groups:
        found = list(groups)
        assert [group[0].body for group in found] == firsts
        for group in found:
            assert [int(message.body.split(b"-")[1]) for message in group] == [*range(1, len(group) + 1)]
        found[0].acknowledge()
        found[0].acknowledge()
    with raising(errors.ClaimLost, group_id=found[1].group_id):
        found[1].acknowledge()
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
    """A group is given once it is complete over all streams, with its messages in the order of their numbers."""
    first, second, _ = streams
    place.put(of_group(1, 2, time_us=20), of_group(2, 1, last=True, time_us=5), to=second)
    place.record(*streams)
    assert given(relations, streams) == ids(2)
    place.put(of_group(1, 1, time_us=10), of_group(1, 3, last=True, time_us=30), to=first)
    place.record(*streams)
    with relations.groups(streams, consumer="billing") as groups:
        (group,) = groups
    assert [(each.stream, each.body) for each in group] == [(first, b"1-1"), (second, b"1-2"), (first, b"1-3")]


def test_a_stream_that_lookups_leave_out_for_a_while_costs_no_group(
    place: Place, relations: Relations, streams: list[str]
) -> None:
    """A group that is completed while lookups leave out its other stream, which a recorder then corrects, is given."""
    first, second, _ = streams
    place.put(of_group(1, 1), to=first)
    place.record(*streams)
    assert given(relations, None) == []
    # As if `first` had lost its tail: the row of another message.
    wrong = f"{group_id(9)}|1|false"
    place.sql(
        f"INSERT INTO relatum.relationships SELECT 0, 0, stream_id, (SELECT key_id FROM relatum.keys), '{wrong}' "
        f"FROM relatum.streams WHERE name = '{first}'"
    )
    assert [each.stream for each in relations.grouped(group_id(9), 1).unreadable_streams] == [first]
    place.sql(f"DELETE FROM relatum.relationships WHERE value = '{wrong}'")
    place.put(of_group(1, 2, last=True), to=second)
    place.record(second)
    assert given(relations, None) == ids(1)


def test_what_is_back_filled_later_is_given(place: Place, relations: Relations) -> None:
    """A group that was published before its key was recorded is given once it is back-filled."""
    place.put_recorded(*whole_group(1, 2), keys=())
    place.put_recorded(b"between", *whole_group(2, 2))
    assert given(relations, place.stream) == ids(2)
    place.backfill()
    assert given(relations, place.stream) == ids(1)


def test_groups_are_found_again_after_their_key_was_defined_anew(place: Place, relations: Relations) -> None:
    """A group is given whose first message was scanned by an earlier definition; what is done stays done."""
    place.put_recorded(of_group(1, 1), *whole_group(2, 2))
    assert given(relations, place.stream) == ids(2)
    remove_key(place.engine, GROUP_KEY.name)
    add_keys(place.engine, [GROUP_KEY])
    place.put_recorded(of_group(1, 2, last=True))
    with Relations(place.amqp, place.database) as afterwards:
        assert given(afterwards, place.stream) == []
        place.backfill()
        assert given(afterwards, place.stream) == ids(1)


def test_a_view_older_than_a_stream_ends_no_state(
    place: Place, relations: Relations, streams: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another member finds a group in a stream that is recorded after this member's scan began: it stays as it is."""
    first, second, _ = streams
    place.put(of_group(1, 2, last=True), to=first)
    place.record(first)

    def and_another_member(*arguments: Any) -> Any:
        monkeypatch.undo()
        place.put(of_group(1, 1), to=second)
        place.record(second)
        place.sql(
            "INSERT INTO relatum.group_states (rank, first_offset, consumer_id, stream_id, state, group_id) "
            f"SELECT 0, 0, consumer_id, stream_id, 'done', '{group_id(1)}' "
            f"FROM relatum.group_consumers, relatum.streams s WHERE s.name = '{second}'"
        )
        return coverage_by_stream(*arguments)

    monkeypatch.setattr("relatum_consumer.groups._finding.coverage_by_stream", and_another_member)
    assert given(relations, None) == []
    assert given(relations, None) == []
    assert states(place) == {1: "done"}


def test_postgresql_ends_the_transaction_of_a_scan_that_is_frozen(place: Place, relations: Relations) -> None:
    """Repairs, and the scans of all members, would wait for it."""
    place.put_recorded(*whole_group(1, 3))
    place.sql(
        "CREATE FUNCTION relatum.check_limit() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
        "ASSERT current_setting('idle_in_transaction_session_timeout') <> '0'; RETURN NULL; END $$"
    )
    place.sql("CREATE TRIGGER limited AFTER INSERT ON relatum.group_scans EXECUTE FUNCTION relatum.check_limit()")
    assert given(relations, place.stream) == ids(1)


@pytest.mark.parametrize("level", ["read committed", "repeatable read"])
def test_a_group_that_is_repaired_during_a_scan_is_given(place: Place, level: str) -> None:
    """A scan that waits for a repair does not count as scanned, whatever the database's default isolation level is."""
    place.put_recorded(*whole_group(1, 3))
    place.sql("DELETE FROM relatum.relationships WHERE value LIKE '%|2|%'")
    place.sql(f'ALTER DATABASE "{place.engine.url.database}" SET default_transaction_isolation = "{level}"')
    place.engine.dispose()
    report = place.verify()
    waiting = "SELECT FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
    with Relations(place.amqp, place.database) as relations, ThreadPoolExecutor(2) as pool:
        with place.engine.begin() as holder:
            holder.execute(sa.text("SELECT FROM relatum.table_parts FOR UPDATE"))
            repaired = pool.submit(repair, report, place.database, dry_run=False)
            wait_until(lambda: len(place.sql(waiting)) == 1, what="the repair has removed the rows")
            first = pool.submit(given, relations, place.stream)
            wait_until(lambda: len(place.sql(waiting)) == 2, what="the scan waits for the repair")
        assert len(repaired.result(60)) == 1
        assert first.result(60) + given(relations, place.stream) == ids(1)


@pytest.mark.parametrize(("step", "is_found"), [("coverage_by_stream", False), ("scanned_of", True)])
def test_a_stream_newer_than_a_view_costs_no_group(
    place: Place, relations: Relations, streams: list[str], monkeypatch: pytest.MonkeyPatch, step: str, is_found: bool
) -> None:
    """A group that begins in a stream which is recorded during this member's scan is given, whoever finds it."""
    first, second, _ = streams
    place.put(b"before", to=first)
    place.record(first)

    def and_another_member(*arguments: Any) -> Any:
        monkeypatch.undo()
        place.put(of_group(1, 1), to=second)
        place.record(second)
        with Relations(place.amqp, place.database) as others:
            assert given(others, None) == []
            place.put(of_group(1, 2, last=True), to=first)
            place.record(first)
            if is_found:
                with others.groups(None, consumer="billing") as groups:
                    assert next(groups).group_id == group_id(1)
        return resolve_name(f"relatum_consumer.groups._finding:{step}")(*arguments)

    monkeypatch.setattr(f"relatum_consumer.groups._finding.{step}", and_another_member)
    assert given(relations, None) + given(relations, None) == ids(1)
    assert states(place) == {1: "done"}


def test_members_of_a_deleted_consumer_do_not_wait(place: Place, relations: Relations) -> None:
    """They raise an error once there is something to scan."""
    with relations.groups(place.stream, consumer="billing", follow=True) as groups:
        place.put_recorded(*whole_group(1, 2))
        next(groups).acknowledge()
        place.sql("DELETE FROM relatum.group_consumers")
        place.put_recorded(*whole_group(2, 2))
        with pytest.raises(errors.NotFound):
            next(groups)


def test_where_a_new_consumer_starts(place: Place, relations: Relations) -> None:
    """A group that stands before the start is none of the consumer's, one behind it is, wherever its other messages."""
    place.put_recorded(
        *whole_group(1, 1), of_group(2, 1), of_group(3, 2, last=True), of_group(2, 2, last=True), of_group(3, 1)
    )
    assert given(relations, place.stream, start=2) == ids(3)
    assert given(relations, place.stream) == [], "the start is that of the consumer's name, once for all"
    assert given(relations, place.stream, "all") == ids(1, 2, 3)


def test_physical_order(place: Place, relations: Relations) -> None:
    """A consumer of physical order gets groups and their messages as they arrived."""
    place.put_recorded(of_group(2, 2, last=True), *whole_group(1, 1), of_group(2, 1))
    with relations.groups(place.stream, order="physical", consumer="billing") as groups:
        assert [[message.body for message in group] for group in groups] == [[b"2-2", b"2-1"], [b"1-1"]]


def test_a_group_is_at_one_member_at_a_time(place: Place, relations: Relations) -> None:
    """What one member has and has not acknowledged is not given to another, however long that takes."""
    place.put_recorded(*whole_group(1, 1), *whole_group(2, 1))
    consumer = GroupConsumer("billing", lease_s=10, prefetch=1)
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
    """A group whose lease ran out goes to another member, and the first member's acknowledgement is refused."""
    place.put_recorded(*whole_group(1, 2))
    with relations.groups(place.stream, consumer=GroupConsumer("billing", lease_s=60)) as mine:
        first = next(mine)
        let_lapse(place.engine)
        with Relations(place.amqp, place.database) as other:
            theirs = other.groups(place.stream, consumer="billing")
            second = next(theirs)
            assert (second.group_id, second.deliveries) == (first.group_id, 2)
            with pytest.raises(errors.ClaimLost):
                first.acknowledge()
            second.acknowledge()
        with pytest.raises(errors.ClaimLost):
            first.acknowledge()
    assert states(place) == {1: "done"}


def test_an_acknowledgement_ends_with_its_call(place: Place, relations: Relations) -> None:
    """It is not repeated after the deadline of the call that it is part of."""
    place.put_recorded(*whole_group(1, 2))
    with relations.groups(place.stream, consumer=GroupConsumer("billing", lease_s=60)) as groups:
        group = next(groups)
        with in_time(1.0), within(0.0), pytest.raises(errors.DatabaseUnavailable):
            group.acknowledge()
        group.acknowledge()


def test_a_member_gets_back_what_it_had(place: Place) -> None:
    """A member that returns under its name gets its groups without waiting for the lease of its last process."""
    place.put_recorded(*whole_group(1, 2))
    consumer = GroupConsumer("billing", member="host-1", lease_s=600)
    with Relations(place.amqp, place.database) as died, Relations(place.amqp, place.database) as again:
        next(died.groups(place.stream, consumer=consumer))
        assert given(again, place.stream, "billing") == []
        assert given(again, place.stream, consumer) == ids(1)


class _EndedElsewhere(dict[str, Any]):
    """Claims of which another thread ends each between two steps of this one."""

    def get(self, key: str, default: Any = None) -> Any:
        return super().pop(key, default)


def test_two_threads_may_end_a_claim_at_once(place: Place, relations: Relations) -> None:
    """A renewal and an acknowledgement that both find a claim ended do not fail."""
    place.put_recorded(*whole_group(1, 1))
    with relations.groups(place.stream, consumer="billing") as groups:
        (group,) = groups
        groups._claims.held = _EndedElsewhere(groups._claims.held)
        groups._claims.forget(group._claim)
        assert not groups._claims.held


def test_members_must_agree(place: Place, relations: Relations, streams: list[str]) -> None:
    """A consumer reads the same streams in the same order, for every member."""
    place.record(*streams)
    assert given(relations, streams) == []
    assert given(relations, list(reversed(streams))) == []
    with pytest.raises(errors.ConfigurationError, match="billing"):
        given(relations, streams[0])
    with pytest.raises(errors.ConfigurationError, match="logical"):
        given(relations, streams, order="physical")


def test_what_cannot_be_meant_is_refused(relations: Relations, place: Place) -> None:
    """Options past their limits or without another one are refused, and so is a consumer without the key of groups."""
    for options in ({"complete": False}, {"consumer": ""}, {"consumer": 5}, {"on_conflict": "dead_letter"}):
        with pytest.raises(errors.InvalidInput):
            relations.groups("any", **{"consumer": "billing"} | options)
    limits = {"lease_s": 0.5, "prefetch": 1_001, "member": "", "dead_letter_stream": "", "deliveries_max": 1_000_001}
    for option, value in limits.items():
        with pytest.raises(errors.InvalidInput):
            GroupConsumer("billing", **{option: value})  # type: ignore[arg-type]
    place.record(keys=["order_id"])
    with pytest.raises(errors.KeyNotDefined, match="message_group"):
        next(relations.groups(place.stream, consumer="billing"))


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
        with pytest.raises(errors.ClaimLost):
            await group.acknowledge()
    assert found == ids(1, 2)
    with Relations(place.amqp, place.database) as relations:
        assert given(relations, place.stream) == ids(2, 3, 4)


UNSOUND = [*whole_group(1, 2), of_group(1, 3), *whole_group(2, 1)]
"""A group with a number past its last, and one that is sound."""


def test_an_unsound_group_raises_and_stays(place: Place, relations: Relations) -> None:
    """An unsound group is an error for every member until one of them skips it."""
    place.put_recorded(*UNSOUND)
    with raising(errors.GroupConflict, group_id=group_id(1), anomaly="past_last"):
        given(relations, place.stream)
    assert given(relations, place.stream, on_conflict="skip") == ids(2)
    assert states(place) == {1: "dead", 2: "done"}


def test_dead_letters_must_have_a_place(place: Place, relations: Relations, channel: BlockingChannel) -> None:
    """A missing dead-letter stream is refused before anything is written, and a classic queue is accepted."""
    place.put_recorded(*whole_group(1, 1))
    name = unique_name("dead")
    consumer = GroupConsumer("billing", dead_letter_stream=name)
    with pytest.raises(errors.StreamNotFound, match="dead_letter_stream="):
        next(relations.groups(place.stream, consumer=consumer))
    assert states(place) == {}
    channel.queue_declare(name)
    assert given(relations, place.stream, consumer) == ids(1)
    channel.queue_delete(name)


def test_dead_letters_that_are_not_taken_give_the_group_back(
    place: Place, relations: Relations, dead_stream: str
) -> None:
    """A group whose dead letters were not taken is ready for another member, which publishes them."""
    place.put_recorded(*whole_group(2, 1), *UNSOUND[:-1])
    consumer = GroupConsumer("billing", dead_letter_stream=dead_stream)
    with relations.groups(place.stream, consumer=consumer, on_conflict="dead_letter") as mine:
        next(mine).acknowledge()
        delete_stream(place.amqp, dead_stream)
        with pytest.raises(errors.PublishUnroutable, match=dead_stream):
            next(mine)
        assert states(place) == {1: "ready", 2: "done"}
        declare_stream(place.amqp, dead_stream)
        assert given(relations, place.stream, consumer, on_conflict="dead_letter") == []
    assert states(place) == {1: "dead", 2: "done"}
    assert letters_in(place, dead_stream) == [(body, "past_last") for body in (b"1-1", b"1-2", b"1-3")]


def test_who_follows_waits_with_dead_letters_for_the_broker(place: Place, dead_stream: str) -> None:
    """A follower waits for the broker with its dead letters; without following the error comes at once."""
    place.put_recorded(*UNSOUND)
    consumer = GroupConsumer("billing", dead_letter_stream=dead_stream)
    with (
        Proxy.to(place.amqp) as proxy,
        Relations(Broker(proxy.url(place.amqp), stream_url=place.stream_url), place.database) as relations,
    ):
        proxy.accepts = False
        groups = relations.groups(place.stream, consumer=consumer, on_conflict="dead_letter")
        with groups, pytest.raises(errors.BrokerUnavailable):
            next(groups)
        back = threading.Timer(1, setattr, (proxy, "accepts", True))
        back.start()
        found: list[str] = []

        def has_ended() -> bool:
            found.extend(
                given(relations, place.stream, consumer, follow=True, idle_timeout_s=1, on_conflict="dead_letter")
            )
            return states(place) == {1: "dead", 2: "done"}

        wait_until(has_ended, what="the dead letters")
        back.join()
    assert found == ids(2)


def fail(relations: Relations, stream: str, consumer: GroupConsumer) -> list[str | None]:
    """Give all groups to a member that ends at group 2 without acknowledging it; returns the ids it was given."""
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
    """A group that was given to its limit is dead and logged, and those claimed beside it count as not given."""
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
    (revival,) = re.findall(r"```sql\n([^`]*state = 'dead'[^`]*)```", UPKEEP.read_text())
    place.sql(revival)
    assert fail(relations, place.stream, consumer) == ids(2), "it is counted anew"
    assert given(relations, place.stream) == ids(2), "who sets no limit is given it again and again"


async def test_a_group_given_too_often_becomes_dead_letters(
    place: Place, relations: Relations, dead_stream: str
) -> None:
    """The messages of a group that was given to its limit become dead letters, through the asyncio face too."""
    place.put_recorded(*whole_group(2, 2))
    consumer = GroupConsumer("billing", deliveries_max=1, dead_letter_stream=dead_stream)
    assert fail(relations, place.stream, consumer) == ids(2)
    async with AsyncRelations(place.amqp, place.engine.url) as asynchronous:
        assert [group async for group in asynchronous.groups(place.stream, consumer=consumer)] == []
        counts = (await asynchronous.group_consumer_status("billing")).counts
    assert counts == {"open": 0, "ready": 0, "claimed": 0, "done": 0, "dead": 1}
    assert letters_in(place, dead_stream) == [(body, "never_acknowledged") for body in (b"2-1", b"2-2")]
    assert states(place) == {2: "dead"}


def test_duplicates_by_policy(place: Place, relations: Relations) -> None:
    """A consumer takes the first message of a number, unless duplicates are an error."""
    place.put_recorded(of_group(1, 1), *whole_group(1, 2))
    for on_conflict in ("raise", "skip"):
        with pytest.raises(errors.GroupConflict, match="same number"):
            given(relations, place.stream, on_duplicate="raise", on_conflict=on_conflict)
    with relations.groups(place.stream, consumer="billing") as groups:
        (group,) = groups
    assert [message.offset for message in group] == [0, 2]
    assert [message.offset for message in group.duplicates] == [1]


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
        # The second one is found ready, and stays ready.
        next(groups)
    assert states(place) == {1: "done", 2: "ready", 3: "open"}
    place.put(*((b"x" * 10_000, {}) for _ in range(60)), to=stream)
    place.put(of_group(1, 2, last=True), to=stream)
    wait_until(lambda: (place.bounds(stream).first or 0) > 4, what="retention")
    place.record(stream)
    prune(place.amqp, place.engine.url)
    assert states(place) == {1: "done", 2: "ready"}, "a message of the first is retained"
    with raising(errors.GroupConflict, group_id=group_id(2), anomaly="expired"):
        given(relations, stream)
    assert given(relations, stream, on_conflict="skip") == []
    prune(place.amqp, place.engine.url)
    assert states(place) == {1: "done"}


@pytest.mark.differs
def test_pruned_rows_end_a_group_although_a_new_leader_retains_its_messages(place: Place, relations: Relations) -> None:
    """The former leader had dropped message 1, so its row was pruned: the group is expired, not incomplete for ever."""
    place.put_recorded(*whole_group(1, 2))
    with relations.groups(place.stream, consumer="billing") as groups:
        next(groups)
    place.sql("UPDATE relatum.streams SET retained_from = 1")
    place.sql("DELETE FROM relatum.relationships WHERE stream_offset = 0")
    with raising(errors.GroupConflict, anomaly="expired"):
        given(relations, place.stream)
    assert given(relations, place.stream, on_conflict="skip") == []
    assert states(place) == {1: "dead"}


@pytest.mark.differs
def test_a_copy_that_retention_has_dropped_leaves_the_other(
    place: Place, relations: Relations, fleeting: Place
) -> None:
    """A message that was routed to two streams is given as long as one of them retains it."""
    short, now = fleeting.stream, time.time_ns() // 1_000
    assert short < place.stream, "of equal times, the copy in the first stream is chosen"
    for stream in (short, place.stream):
        place.put(of_group(1, 1, time_us=now), to=stream)
    place.put(of_group(1, 2, last=True, time_us=now + 1))
    place.record(short, place.stream)
    place.put(*((b"x" * 10_000, {}) for _ in range(60)), to=short)
    wait_until(lambda: (place.bounds(short).first or 0) > 0, what="retention")
    with relations.groups([short, place.stream], consumer="billing") as groups:
        assert [[message.id for message in group] for group in groups] == [[(place.stream, 0), (place.stream, 1)]]


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
    """A follower waits until it is back; claims and acknowledgements continue where they were."""
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
