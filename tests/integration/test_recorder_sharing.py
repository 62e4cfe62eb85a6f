"""Recorders of the same streams share them: each stream is one member's, and no row is written twice."""

from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import product
from typing import Any

import psycopg
import pytest
import sqlalchemy as sa
from pika import BasicProperties

from relatum.local import LocalRabbitMQ
from relatum.recording import Recorder, verify
from relatum.store.catalog import ensure_stream
from relatum.store.members import RECORDERS, Member, Share
from tests.support import broker_connection, declare_stream, new_streams, unique_name, wait_until
from tests.support._recording import running
from tests.support.leases import LEASE_S, let_lapse, record_as
from tests.support.place import Place
from tests.support.plans import EACH_MODE, nodes_of, plan_of_statement
from tests.support.proxy import Proxy
from tests.support.rabbitmq_tools import PASSWORD, add_users, as_user, evaluate

STREAMS = 6
KEY = "order_id"

pytestmark = pytest.mark.usefixtures("quick_rhythm")


@pytest.fixture
def names(amqp_url: str) -> Iterator[list[str]]:
    with new_streams(amqp_url, STREAMS) as names:
        yield names


@pytest.fixture
def quick_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("relatum.reading.following._follower.CUT_OFF_S", 1.0)
    monkeypatch.setattr("relatum.reading.following._follower.RETURN_S", 0.5)


class Members:
    """Recorders of the same streams, in threads."""

    def __init__(self, place: Place, names: list[str], stack: ExitStack) -> None:
        self._place, self._names, self._stack = place, names, stack
        self._members: dict[str, ExitStack] = {}
        self.published = 0

    def join(self, holder: str, broker_url: str | None = None) -> Recorder:
        url = broker_url or self._place.amqp
        recorder = Recorder(url, self._place.database, self._names, keys=[KEY], holder=holder, lease_s=LEASE_S)
        self._members[holder] = self._stack.enter_context(ExitStack())
        self._members[holder].enter_context(running(recorder))
        return recorder

    def leave(self, holder: str) -> None:
        self._members[holder].close()

    def shares(self) -> Counter[str]:
        holders = self._place.sql(
            "SELECT lease_holder FROM relatum.streams JOIN relatum.recorder_members AS member ON holder = lease_holder "
            "WHERE member.lease_expires_at >= clock_timestamp() AND streams.name = ANY(:names)",
            names=self._names,
        )
        return Counter(holder for (holder,) in holders)

    def wait_for(self, **shares: int) -> None:
        wait_until(lambda: self.shares() == Counter(shares), what=f"shares of {shares}")

    def settle(self, **shares: int) -> None:
        """Wait until the members have so many: what is published then is recorded."""
        self.wait_for(**shares)
        self.publish()

    def publish(self) -> None:
        with broker_connection(self._place.amqp) as connection:
            channel = connection.channel()
            for name, n in product(self._names, range(self.published, self.published + 3)):
                channel.basic_publish("", name, b"", BasicProperties(headers={KEY: f"o{n}"}))
        self.published += 3
        ends = "SELECT count(*) FROM relatum.coverage JOIN relatum.streams USING (stream_id) WHERE is_tail AND name = "
        given = {"names": self._names, "end": self.published}
        wait_until(
            lambda: self._place.sql(ends + "ANY(:names) AND to_offset >= :end", **given) == [(len(self._names),)],
            what="all recorded",
        )

    def check(self) -> None:
        for name in self._names:
            assert [value for _, value, _ in self._place.rows(name)] == [f"o{n}" for n in range(self.published)]
        assert verify(self._place.amqp, self._place.database, self._names).ok


@contextmanager
def members_of(place: Place, names: list[str]) -> Iterator[Members]:
    """Members that all end; what they have recorded is right."""
    with ExitStack() as stack:
        members = Members(place, names, stack)
        yield members
        if members.published:
            members.check()


def test_members_share_as_they_come_and_go(place: Place, names: list[str], caplog: pytest.LogCaptureFixture) -> None:
    """Members share the streams evenly as they join and leave, and no row is lost or doubled."""
    caplog.set_level("INFO", "relatum.recorder")
    with members_of(place, names) as members:
        first = members.join("a")
        members.settle(a=6)
        members.join("b")
        members.settle(a=3, b=3)
        members.join("c")
        members.settle(a=2, b=2, c=2)
        members.leave("b")
        members.settle(a=3, c=3)
        told = [first.statistics().streams[name].is_recording for name in names]
        assert sum(told) == 3
        lags = [first.statistics().streams[name].lag_s for name in names]
        assert [lag is None for lag in lags] == [not each for each in told], "of what others record they tell the lag"
    lines = [record.getMessage() for record in caplog.records]
    assert "recording 3 streams; 3 are recorded by a" in lines


def test_what_one_had_that_is_silent_is_taken_over_and_its_return_harms_nothing(place: Place, names: list[str]) -> None:
    """A member that was suspended for longer than its lease is replaced, and joins again."""
    with members_of(place, names) as members:
        members.join("a")
        members.join("b")
        members.settle(a=3, b=3)
        for holder in ("a", "b", "a"):
            let_lapse(place.engine, holder)
            members.publish()
        members.settle(a=3, b=3)


@pytest.mark.parametrize("streams", [STREAMS, 1])
def test_what_one_had_that_is_cut_off_from_the_broker_is_taken_over(
    streams: int, place: Place, names: list[str], quick_reach: None
) -> None:
    """A member that reaches the database alone leaves its streams to those that reach the broker, too."""
    del names[streams:]
    with Proxy.to(place.stream_url) as proxy, members_of(place, names) as members:
        cut_off = members.join("a", proxy.url(place.stream_url))
        members.settle(a=streams)
        members.join("b")
        if streams > 1:
            members.settle(a=streams // 2, b=streams // 2)
        proxy.accepts = False
        proxy.cut()
        members.settle(b=streams)
        wait_until(
            lambda: all(each.lag_s is None for each in cut_off.statistics().streams.values()),
            what="the lag is told by who records",
        )
        assert not cut_off.statistics().is_broker_up
        proxy.accepts = True
        wait_until(lambda: cut_off.statistics().is_broker_up, what="the broker is back")
        if streams > 1:
            members.settle(a=streams // 2, b=streams // 2)


def test_what_one_had_whose_password_is_refused_is_taken_over(
    own_broker: LocalRabbitMQ, place: Place, quick_reach: None
) -> None:
    """A member whose password the broker refuses leaves its streams to others until it is let in again."""
    server, names = own_broker, [unique_name("rotated") for _ in range(2)]
    add_users(server, {names[0]: (".*", ".*", ".*")})
    password = 'ok = rabbit_auth_backend_internal:change_password(<<"{}">>, <<"{}">>, <<"x">>)'
    for name in names:
        declare_stream(server.broker_url, name)
    there = replace(place, amqp=server.broker_url)
    with Proxy.to(server.stream_url) as proxy, members_of(there, names) as members:
        members.join("a", as_user(proxy.url(server.stream_url), names[0]))
        members.settle(a=2)
        members.join("b")
        members.settle(a=1, b=1)
        evaluate(server, password.format(names[0], "another"))
        proxy.cut()
        members.settle(b=2)
        evaluate(server, password.format(names[0], PASSWORD))
        members.settle(a=1, b=1)


def test_who_died_is_replaced(place: Place, names: list[str]) -> None:
    """Streams of another recorder are left to it until its lease runs out."""
    with members_of(place, names) as members:
        members.join("a")
        members.settle(a=6)
        members.leave("a")
        record_as(place.engine, "stranger", *names[:4])
        members.join("b")
        members.wait_for(b=2, stranger=4)
        let_lapse(place.engine, "stranger")
        members.settle(b=6)


def test_one_that_begins_again_by_its_name_with_other_streams_keeps_none_of_the_former(
    place: Place, names: list[str]
) -> None:
    """A member that was killed and comes back with fewer streams leaves the other ones free."""
    with members_of(place, names) as members, members_of(place, names[:2]) as fewer:
        members.join("a")
        members.settle(a=6)
        members.leave("a")
        record_as(place.engine, "a", *names)
        let_lapse(place.engine, "a")
        fewer.join("a")
        fewer.wait_for(a=2)
        members.join("b")
        members.settle(a=2, b=4)


def test_two_that_both_believe_to_have_a_stream_write_each_row_once(place: Place, names: list[str]) -> None:
    """Each row is written once although the holder of a stream is changed under its recorders again and again."""
    with members_of(place, names) as members, members_of(place, names[:4]) as others:
        members.join("a")
        members.publish()
        others.join("x")
        for holder in ("x", "a", "x", "a"):
            tampered = {"holder": holder, "names": names[:4]}
            place.sql("UPDATE relatum.streams SET lease_holder = :holder WHERE name = ANY(:names)", **tampered)
            members.publish()


def test_a_stream_whose_id_another_stream_got_is_recorded_under_a_new_one(place: Place, names: list[str]) -> None:
    """A standby that is promoted without a stream's row assigns the row's id again, also to another stream."""
    one, other = names[:2]
    for name in (one, other):
        place.put(*[(b"", {KEY: f"{name} {n}"}) for n in range(3)], to=name)
    with place.recording(one, keys=[KEY]):
        place.wait_recorded(one)
        [(stream_id,)] = place.sql("SELECT stream_id FROM relatum.streams WHERE name = :name", name=one)
        with place.engine.begin() as connection:
            for table in ("coverage", "relationships", "time_blocks", "checkpoints"):
                connection.execute(sa.text(f"DELETE FROM relatum.{table} WHERE stream_id = {stream_id}"))
            given_to = "UPDATE relatum.streams SET name = :name, lease_holder = NULL WHERE stream_id = :id"
            connection.execute(sa.text(given_to), {"name": other, "id": stream_id})
        with place.recording(other, keys=[KEY]):
            place.wait_recorded(other)
            place.wait_recorded(one)
    for name in (one, other):
        assert [value for _, value, _ in place.rows(name)] == [f"{name} {n}" for n in range(3)]
    assert verify(place.amqp, place.database, [one, other]).ok


def test_a_member_with_nothing_to_do_says_so_once(
    place: Place, names: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """The second member of one stream logs once that it stands by, and takes over."""
    caplog.set_level("INFO", "relatum.recorder")

    def said(part: str) -> int:
        return sum(part in record.getMessage() for record in caplog.records)

    with members_of(place, names[:1]) as members:
        members.join("a")
        members.publish()
        members.join("b")
        wait_until(lambda: said("standing by: all 1 streams are recorded by a") == 1, what="one that stands by")
        members.publish()
        members.leave("a")
        members.settle(b=1)
        assert said("standing by: ") == 1
        assert said("the recorder has stopped, as requested") == 1


FILL = """
INSERT INTO relatum.streams (name, lease_holder) SELECT 's' || n, 'm' || n % 2000 FROM generate_series(1, 50000) n;
INSERT INTO relatum.recorder_members (name, holder, lease_expires_at)
  SELECT 'n' || n % 500, 'm' || n, now() + interval '1 hour' FROM generate_series(1, 10000) n;
"""
"""Many recorders and streams."""


@pytest.fixture
def ids(engine: sa.Engine) -> list[int]:
    with engine.begin() as connection:
        return [ensure_stream(connection, "/", f"s-{n}").stream_id for n in range(10)]


def beat(engine: sa.Engine, member: Member, wanted: Collection[int]) -> Share:
    with engine.begin() as connection:
        return member.beat(connection, wanted)


def recorder(name: str = "one", holder: str | None = None) -> Member:
    """A member whose lease does not run out by itself while a test runs."""
    return Member(RECORDERS, name, lease_s=600.0, holder=holder)


def test_a_lease_that_ran_out_while_nobody_minded_is_taken_anew(engine: sa.Engine, ids: list[int]) -> None:
    """A member whose lease lapsed unnoticed becomes another member and takes the streams that are still free."""
    member = recorder()
    beat(engine, member, ids)
    before = member.holder
    let_lapse(engine)
    share = beat(engine, member, ids)
    assert (share.holder != before, share.held) == (True, frozenset(ids))


def test_a_name_that_was_given_is_kept(engine: sa.Engine, ids: list[int]) -> None:
    """A process that is started again under its name takes its streams back at once."""
    beat(engine, recorder(holder="me"), ids)
    again = recorder(holder="me")
    assert beat(engine, again, ids).held == frozenset(ids)
    let_lapse(engine)
    assert beat(engine, again, ids).holder == "me"


def test_who_takes_at_the_same_time_waits_for_nobody(engine: sa.Engine, ids: list[int]) -> None:
    """Of two members that see the same streams free, one takes them and the other takes none without a wait."""
    first, second = recorder(), recorder()
    with engine.connect() as one, engine.connect() as other:
        assert first.beat(one, ids).held == frozenset(ids)
        assert second.beat(other, ids).held == frozenset()
        one.commit()
        other.commit()
    look = beat(engine, second, ids)
    assert (look.held, set(look.others.values())) == (frozenset(), {first.holder})


def test_what_was_seen_free_is_not_taken_from_who_was_quicker(engine: sa.Engine, ids: list[int]) -> None:
    """Taking is a compare-and-set on the holder that was seen, so a stream that was taken since is left."""
    first, second = recorder(), recorder()
    with engine.connect() as later:
        later.execution_options(isolation_level="REPEATABLE READ")
        seen = {"keys": ids, "holders": [None] * len(ids), "at_most": 10, "within": "one", "holder": second.holder}
        later.commit()
        beat(engine, first, ids)
        assert later.scalars(RECORDERS.take, seen).all() == []
        later.rollback()


def test_streams_that_are_gone_are_named(engine: sa.Engine, ids: list[int]) -> None:
    """A stream that is unknown or was replaced is missing, and is not held."""
    with engine.begin() as connection:
        connection.execute(sa.text(f"UPDATE relatum.streams SET replaced_at = now() WHERE stream_id = {ids[0]}"))
    share = beat(engine, recorder(), [*ids, 10**6])
    assert (share.held, share.missing) == (frozenset(ids[1:]), {ids[0], 10**6})


def test_two_thousand_streams_are_held_by_one_row(engine: sa.Engine) -> None:
    """A beat that holds two thousand streams writes one row in four statements."""
    with engine.begin() as connection:
        named = "INSERT INTO relatum.streams (name) SELECT 's' || n FROM generate_series(1, 2000) n RETURNING stream_id"
        ids = connection.scalars(sa.text(named)).all()
    member = recorder()
    written: list[tuple[str, int]] = []
    assert len(beat(engine, member, ids).held) == 2000

    def count(_connection: Any, cursor: Any, statement: str, *_: Any) -> None:
        written.append((statement, cursor.rowcount))

    sa.event.listen(engine, "after_cursor_execute", count)
    assert len(beat(engine, member, ids).held) == 2000
    assert [rows for statement, rows in written if statement.startswith(("UPDATE", "INSERT", "DELETE"))] == [1, 0]
    assert len(written) == 4


ME = {"within": "n7", "holder": "m7"}
IDS = list(range(100, 300))
STATEMENTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "renew": (RECORDERS.renew, {**ME, "lease_s": 4.0}),
    "bury": (RECORDERS.bury, ME),
    "alive": (RECORDERS.alive, ME),
    "look": (RECORDERS.look, {**ME, "keys": IDS}),
    "take": (RECORDERS.take, {**ME, "keys": IDS, "holders": [f"m{n}" for n in IDS], "at_most": 50}),
    "release": (RECORDERS.release, {**ME, "keys": IDS}),
    "holders": (RECORDERS.holders, {"keys": IDS}),
    "leave": (RECORDERS.leave, ME),
}


@EACH_MODE
@pytest.mark.parametrize("name", STATEMENTS)
def test_each_statement_finds_its_rows_by_an_index(filled: psycopg.Connection[Any], name: str, mode: str) -> None:
    """Each statement of members finds its rows by an index and scans no large table."""
    plan = plan_of_statement(filled, mode, *STATEMENTS[name])
    of_tables = [node for node in nodes_of(plan) if node.get("Relation Name") in ("streams", "recorder_members")]
    assert of_tables, plan
    assert not [node for node in of_tables if node["Node Type"] == "Seq Scan"], plan
    # Otherwise each row would be compared with each key.
    assert not [node for node in of_tables if "ANY" in node.get("Filter", "")], plan
