"""Recorders that are told to record the same share it: each stream is one member's, and no row is written twice."""

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest
import sqlalchemy as sa

from relatum.local import LocalServers
from relatum.recording import Recorder, verify
from tests.support import (
    declare_stream,
    new_streams,
    publish_plain,
    rows_of,
    unique_name,
    wait_recorded,
    wait_until,
)
from tests.support.leases import LEASE_S, let_lapse, record_as
from tests.support.proxy import Proxy
from tests.support.rabbitmq_tools import evaluate
from tests.support.tapped import PASSWORD, add_users, as_user

STREAMS = 6
KEY = "order_id"

pytestmark = pytest.mark.usefixtures("quick_rhythm")


@pytest.fixture
def names(amqp_url: str) -> Iterator[list[str]]:
    """Some streams."""
    with new_streams(amqp_url, STREAMS) as names:
        yield names


class Members:
    """Recorders of the same streams, in threads."""

    def __init__(self, broker_url: str, engine: sa.Engine, names: list[str], stack: ExitStack) -> None:
        self._broker_url = broker_url
        self._engine = engine
        self._names = names
        self._stack = stack
        self._stops: dict[str, tuple[threading.Event, threading.Thread]] = {}
        self._published = 0

    def join(self, holder: str, broker_url: str | None = None) -> Recorder:
        """One more, by a way to the broker of its own."""
        recorder = Recorder(
            broker_url or self._broker_url, self._engine.url, self._names, keys=[KEY], holder=holder, lease_s=LEASE_S
        )
        stop = threading.Event()
        thread = threading.Thread(target=recorder.run, args=[stop], name=f"member {holder}")
        thread.start()
        self._stops[holder] = stop, thread
        self._stack.callback(self.leave, holder)
        return recorder

    def leave(self, holder: str) -> None:
        """One ends as it is told to."""
        stop, thread = self._stops[holder]
        stop.set()
        thread.join(90)
        assert not thread.is_alive()

    def shares(self) -> Counter[str]:
        """How many streams each has whose lease holds."""
        query = sa.text(
            "SELECT lease_holder FROM relatum.streams JOIN relatum.recorder_members ON holder = lease_holder "
            "WHERE lease_expires_at >= clock_timestamp() AND streams.name = ANY(:names)".replace(
                "lease_expires_at", "recorder_members.lease_expires_at"
            )
        )
        with self._engine.connect() as connection:
            return Counter(connection.execute(query, {"names": self._names}).scalars())

    def wait_for(self, **shares: int) -> None:
        """Wait until the members have so many."""
        wait_until(lambda: self.shares() == Counter(shares), what=f"shares of {shares}")

    def publish(self) -> None:
        """Some messages to each, and they are recorded."""
        for name in self._names:
            messages = [(b"", {KEY: f"o{self._published + n}"}) for n in range(3)]
            publish_plain(self._broker_url, name, messages)
        self._published += 3
        for name in self._names:
            wait_recorded(self._broker_url, self._engine, name)

    def check(self) -> None:
        """Each message's row is there, once."""
        for name in self._names:
            values = [value for _, value, _ in rows_of(self._engine, name)]
            assert values == [f"o{n}" for n in range(self._published)]
        assert verify(self._broker_url, self._engine.url, self._names).ok


@contextmanager
def members_of(broker_url: str, engine: sa.Engine, names: list[str]) -> Iterator[Members]:
    """Members that all end."""
    with ExitStack() as stack:
        yield Members(broker_url, engine, names, stack)


def test_members_share_as_they_come_and_go(
    amqp_url: str, engine: sa.Engine, names: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """The second takes its half, the third its third, and who leaves gives its own back; nothing is lost or doubled."""
    caplog.set_level("INFO", "relatum.recorder")
    with members_of(amqp_url, engine, names) as members:
        first = members.join("a")
        members.wait_for(a=6)
        members.publish()
        members.join("b")
        members.wait_for(a=3, b=3)
        members.publish()
        members.join("c")
        members.wait_for(a=2, b=2, c=2)
        members.publish()
        members.leave("b")
        members.wait_for(a=3, c=3)
        members.publish()
        told = [first.statistics().streams[name].is_recording for name in names]
        assert sum(told) == 3
        lags = [first.statistics().streams[name].lag_s for name in names]
        assert [lag is None for lag in lags] == [not each for each in told], "of what others record they tell the lag"
        members.check()
    lines = [record.getMessage() for record in caplog.records]
    assert "recording 3 streams; 3 are recorded by a" in lines


def test_what_one_had_that_is_silent_is_taken_over_and_its_return_harms_nothing(
    amqp_url: str, engine: sa.Engine, names: list[str]
) -> None:
    """A member that stood still for longer than its lease goes on as one that has just come."""
    with members_of(amqp_url, engine, names) as members:
        members.join("a")
        members.join("b")
        members.wait_for(a=3, b=3)
        for holder in ("a", "b", "a"):
            let_lapse(engine, holder)
            members.publish()
        members.wait_for(a=3, b=3)
        members.publish()
        members.check()


@pytest.mark.parametrize("streams", [STREAMS, 1])
def test_what_one_had_that_is_cut_off_from_the_broker_is_taken_over(
    streams: int, amqp_url: str, stream_url: str, engine: sa.Engine, names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A member that lives, and reaches the database alone, keeps no stream from those who reach the broker, too."""
    monkeypatch.setattr("relatum.following._reach.CUT_OFF_S", 1.0)
    monkeypatch.setattr("relatum.following._reach.RETURN_S", 0.5)
    del names[streams:]
    with Proxy.to(stream_url) as proxy, members_of(amqp_url, engine, names) as members:
        cut_off = members.join("a", proxy.url(stream_url))
        members.wait_for(a=streams)
        members.publish()
        members.join("b")
        if streams > 1:
            members.wait_for(a=streams // 2, b=streams // 2)
        members.publish()
        proxy.accepts = False
        proxy.cut()
        members.wait_for(b=streams)
        members.publish()
        wait_until(
            lambda: all(cut_off.statistics().streams[name].lag_s is None for name in names),
            what="the lag is told by who records",
        )
        assert not cut_off.statistics().is_broker_up
        proxy.accepts = True
        wait_until(lambda: cut_off.statistics().is_broker_up, what="the broker is back")
        if streams > 1:
            members.wait_for(a=streams // 2, b=streams // 2)
        members.publish()
        members.check()


def test_what_one_had_whose_password_is_refused_is_taken_over(
    private_servers: LocalServers, engine: sa.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A member whose password was changed keeps no stream from those whom the broker lets in, and comes back."""
    monkeypatch.setattr("relatum.following._reach.CUT_OFF_S", 1.0)
    monkeypatch.setattr("relatum.following._reach.RETURN_S", 0.5)
    server, names = private_servers.rabbitmq, [unique_name("rotated") for _ in range(2)]
    add_users(server, {names[0]: (".*", ".*", ".*")})
    password = 'ok = rabbit_auth_backend_internal:change_password(<<"{}">>, <<"{}">>, <<"x">>)'
    for name in names:
        declare_stream(server.broker_url, name)
    with Proxy.to(server.stream_url) as proxy, members_of(server.broker_url, engine, names) as members:
        members.join("a", as_user(proxy.url(server.stream_url), names[0]))
        members.wait_for(a=2)
        members.join("b")
        members.wait_for(a=1, b=1)
        evaluate(server, password.format(names[0], "another"))
        proxy.cut()
        members.wait_for(b=2)
        members.publish()
        evaluate(server, password.format(names[0], PASSWORD))
        members.wait_for(a=1, b=1)
        members.publish()
        members.check()


def test_who_died_is_replaced(amqp_url: str, engine: sa.Engine, names: list[str]) -> None:
    """Streams that somebody of another name records are left to it, until its lease runs out."""
    with members_of(amqp_url, engine, names) as members:
        members.join("a")
        members.wait_for(a=6)
        members.publish()
        members.leave("a")
        record_as(engine, "stranger", *names[:4])
        members.join("b")
        members.wait_for(b=2, stranger=4)
        let_lapse(engine, "stranger")
        members.wait_for(b=6)
        members.publish()
        members.check()


def test_one_that_begins_again_by_its_name_with_other_streams_keeps_none_of_the_former(
    amqp_url: str, engine: sa.Engine, names: list[str]
) -> None:
    """What a member of that name had that was killed is free for others, though the name lives."""
    with members_of(amqp_url, engine, names) as members, members_of(amqp_url, engine, names[:2]) as fewer:
        members.join("a")
        members.wait_for(a=6)
        members.leave("a")
        record_as(engine, "a", *names)
        let_lapse(engine, "a")
        fewer.join("a")
        fewer.wait_for(a=2)
        members.join("b")
        members.wait_for(a=2, b=4)
        members.publish()
        members.check()


def test_two_that_both_believe_to_have_a_stream_write_each_row_once(
    amqp_url: str, engine: sa.Engine, names: list[str]
) -> None:
    """Two names know nothing of each other, and somebody tampers with who holds what, again and again."""
    with members_of(amqp_url, engine, names) as members, members_of(amqp_url, engine, names[:4]) as others:
        members.join("a")
        members.publish()
        others.join("x")
        for holder in ("x", "a", "x", "a"):
            with engine.begin() as connection:
                tampering = sa.text("UPDATE relatum.streams SET lease_holder = :holder WHERE name = ANY(:names)")
                connection.execute(tampering, {"holder": holder, "names": names[:4]})
            members.publish()
        members.check()


def test_a_member_with_nothing_to_do_says_so_once(
    amqp_url: str, engine: sa.Engine, names: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Of one stream and two members, one stands by."""
    caplog.set_level("INFO", "relatum.recorder")

    def said(part: str) -> int:
        return sum(part in record.getMessage() for record in caplog.records)

    with members_of(amqp_url, engine, names[:1]) as members:
        members.join("a")
        members.publish()
        members.join("b")
        wait_until(lambda: said("standing by: all 1 streams are recorded by a") == 1, what="one that stands by")
        members.publish()
        members.leave("a")
        members.wait_for(b=1)
        members.publish()
        assert said("standing by: ") == 1
        assert said("the recorder has ended, as it was told to") == 1
        members.check()
