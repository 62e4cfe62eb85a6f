"""What a follower tells of streams."""

import logging
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from relatum.errors import ConfigurationError, NotAStream, StreamNotFound, UsedAfterFork
from relatum.following import Attached, CaughtUp, Event, Failed, Follower, FollowerOptions, Hole, Records, Replaced
from relatum.reading import Agreement, BrokerAddress, Position, StreamReader, position_of
from relatum.waiting import Outages, Server
from tests.support import (
    broker_connection,
    declare_stream,
    delete_stream,
    new_streams,
    publish_plain,
    unique_name,
    wait_until,
)
from tests.support.following import Taker
from tests.support.forking import in_child
from tests.support.proxy import Proxy

QUIET_S = 0.5
"""Seconds in which what is there has come."""


@pytest.fixture
def proxy(stream_url: str) -> Iterator[Proxy]:
    """What the follower's connections go through."""
    with Proxy.to(stream_url) as proxy:
        yield proxy


@pytest.fixture
def address(amqp_url: str, stream_url: str, proxy: Proxy) -> BrokerAddress:
    """The broker, through the proxy."""
    address = BrokerAddress.parse(amqp_url, stream_url)
    return replace(address, stream_host="127.0.0.1", stream_port=proxy.port)


@pytest.fixture
def taker(address: BrokerAddress) -> Iterator[Taker]:
    """An open follower, and who takes from it."""
    with Taker(Follower(address, options=FollowerOptions(heartbeat_s=1, timeout_s=2.0))) as taker:
        yield taker


@pytest.fixture
def stream(amqp_url: str) -> Iterator[str]:
    """A new stream."""
    name = unique_name()
    declare_stream(amqp_url, name)
    yield name
    delete_stream(amqp_url, name)


def known_at(address: BrokerAddress, stream: str, offset: int) -> Position:
    """What lies at an offset."""
    with StreamReader.open(address) as reader:
        return position_of(reader.read(stream, offset))


def test_all_of_a_stream_is_given_in_order_and_then_what_is_published(taker: Taker, amqp_url: str, stream: str) -> None:
    """Attached, the records, caught up, and then what comes."""
    publish_plain(amqp_url, stream, [b"%d" % number for number in range(300)], confirm=False)
    number = taker.follower.follow(stream, 0)
    taker.wait_bodies(stream, [b"%d" % number for number in range(300)])
    caught_up = taker.wait_event(stream, CaughtUp)
    assert (caught_up.following, caught_up.next_offset) == (number, 300)
    publish_plain(amqp_url, stream, [b"more"])
    taker.wait_bodies(stream, [*[b"%d" % number for number in range(300)], b"more"])
    assert taker.kinds(stream)[0] is Attached
    assert set(taker.kinds(stream)) == {Attached, Records, CaughtUp}


def test_a_stream_is_caught_up_behind_what_came_larger_than_before(taker: Taker, amqp_url: str, stream: str) -> None:
    """By a small chunk many more may come; the large one behind it leaves no room for another: nothing is asked for."""
    publish_plain(amqp_url, stream, [b"small"])
    publish_plain(amqp_url, stream, [b"large" * 40_000])
    taker.follower.follow(stream, 0)
    assert taker.wait_event(stream, CaughtUp).next_offset == 2


def test_a_stream_is_not_caught_up_as_long_as_the_taker_holds_up_the_rest(
    address: BrokerAddress, amqp_url: str, stream: str
) -> None:
    """The broker has more of it, which may not come yet."""
    publish_plain(amqp_url, stream, [b"%d" % number * 1_000 for number in range(200)])
    options = FollowerOptions(heartbeat_s=1, timeout_s=2.0, window_bytes=4_000)
    with Taker(Follower(address, options=options)) as taker:
        taker.follower.follow(stream, 0)
        held = list[Event]()
        wait_until(
            lambda: held.extend(taker.follower.take(0.2)) or any(type(each) is Records for each in held), what="records"
        )
        until = time.monotonic() + 4 * QUIET_S
        while time.monotonic() < until:
            held.extend(taker.follower.take(0.2))
        assert CaughtUp not in {type(each) for each in held}
        taker.follower.done(*held)
        assert taker.wait_event(stream, CaughtUp).next_offset == 200


def test_many_lone_messages_are_held_for_a_taker_who_looks_seldom(taker: Taker, amqp_url: str, stream: str) -> None:
    """A thousand chunks of one message each, though the taker is done with none: a page looks five times a second."""
    publish_plain(amqp_url, stream, [b"%d" % number for number in range(1_000)])
    taker.follower.follow(stream, 0)
    wait_until(lambda: taker.follower.statistics().held >= 1_000, what="all of them")


def test_more_streams_than_connections_hold_is_no_outage(
    address: BrokerAddress,
    amqp_url: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It is told of the stream that has no room, which gets it when another one is left."""
    monkeypatch.setattr("relatum.following._subscriptions.SUBSCRIPTIONS", 2)
    outages = Outages(logging.getLogger("relatum.test-following"), broker="b:1")
    options = FollowerOptions(connections_max=1)
    with new_streams(amqp_url, 3) as streams, Taker(Follower(address, options=options, outages=outages)) as taker:
        for name in streams[:2]:
            taker.follower.follow(name, 0)
            taker.wait_event(name, Attached)
        taker.follower.follow(streams[2], 0)
        assert "connections_max=1" in str(taker.wait_failed(streams[2], ConfigurationError).error)
        assert outages.is_up(Server.BROKER)
        assert "is away" not in caplog.text
        assert taker.follower.is_let_in
        taker.follower.leave(streams[0])
        taker.wait_event(streams[2], Attached)


def test_a_stream_goes_on_behind_what_is_known(
    taker: Taker, address: BrokerAddress, amqp_url: str, stream: str
) -> None:
    """What lies before the position is not given again."""
    publish_plain(amqp_url, stream, [b"%d" % number for number in range(10)])
    taker.follower.follow(stream, 7, known=known_at(address, stream, 6))
    taker.wait_bodies(stream, [b"7", b"8", b"9"])
    assert taker.kinds(stream)[:2] == [Attached, Records]


def test_a_stream_with_nothing_new_is_attached_by_what_is_known(
    taker: Taker, address: BrokerAddress, amqp_url: str, stream: str
) -> None:
    """No message has to come for a stream to be known again."""
    publish_plain(amqp_url, stream, [b"0", b"1"])
    taker.follower.follow(stream, 2, known=known_at(address, stream, 1))
    assert taker.wait_event(stream, Attached).next_offset == 2
    assert taker.wait_event(stream, CaughtUp).next_offset == 2
    publish_plain(amqp_url, stream, [b"2"])
    taker.wait_bodies(stream, [b"2"])


def test_a_stream_that_holds_something_else_is_replaced(
    taker: Taker, address: BrokerAddress, amqp_url: str, stream: str
) -> None:
    """Another message at the place that is known proves another stream; nothing of it is given."""
    publish_plain(amqp_url, stream, [b"0", b"1"])
    known = known_at(address, stream, 1)
    delete_stream(amqp_url, stream)
    declare_stream(amqp_url, stream)
    publish_plain(amqp_url, stream, [b"another 0", b"another 1", b"another 2"])
    number = taker.follower.follow(stream, 2, known=known)
    replaced = taker.wait_event(stream, Replaced)
    assert (replaced.following, replaced.known, replaced.found) == (number, known, Agreement.OTHER)
    assert not taker.offsets(stream)
    taker.follower.follow(stream, 0)
    taker.wait_bodies(stream, [b"another 0", b"another 1", b"another 2"])


def test_a_stream_that_is_shorter_than_known_is_replaced_where_its_leader_says_so(
    taker: Taker, address: BrokerAddress, amqp_url: str, stream: str
) -> None:
    """The leader is asked: a node that has less may be behind."""
    publish_plain(amqp_url, stream, [b"%d" % number for number in range(5)])
    known = known_at(address, stream, 4)
    delete_stream(amqp_url, stream)
    declare_stream(amqp_url, stream)
    publish_plain(amqp_url, stream, [b"another"])
    taker.follower.follow(stream, 5, known=known)
    replaced = taker.wait_event(stream, Replaced)
    assert replaced.found is Agreement.ENDS_BEFORE
    assert replaced.bounds == (0, 0)
    assert not taker.offsets(stream)


def test_what_retention_took_is_a_hole(taker: Taker, address: BrokerAddress, amqp_url: str, stream: str) -> None:
    """The hole reaches from what was to be read to what is there, and is told before the records behind it."""
    declared = unique_name()
    declare_stream(amqp_url, declared, x_max_length_bytes=100_000, x_stream_max_segment_size_bytes=50_000)
    with StreamReader.open(address) as reader:
        first: int | None = None
        while not first:
            publish_plain(amqp_url, declared, [b"x" * 1_000] * 200, confirm=False)
            publish_plain(amqp_url, declared, [b"last"])
            first = reader.bounds(declared).first
    known = Position(2, 12345, None)
    taker.follower.follow(declared, 3, known=known)
    hole = taker.wait_event(declared, Hole)
    records = taker.wait_event(declared, Records)
    # Retention may have gone on since the reader asked.
    assert (hole.from_offset, hole.to_offset) == (3, records.batch.first_offset)
    assert hole.to_offset >= first
    assert taker.offsets(declared)[0] == hole.to_offset
    assert taker.kinds(declared)[:3] == [Attached, Hole, Records]
    delete_stream(amqp_url, declared)


def test_a_stream_that_is_not_there_is_waited_for(taker: Taker, amqp_url: str, stream: str) -> None:
    """It is told that there is none, and when it is declared it is followed."""
    missing = unique_name()
    taker.follower.follow(missing, 0)
    taker.follower.follow(stream, 0)
    taker.wait_failed(missing, StreamNotFound)
    declare_stream(amqp_url, missing)
    publish_plain(amqp_url, missing, [b"here"])
    publish_plain(amqp_url, stream, [b"there"])
    taker.wait_bodies(missing, [b"here"])
    taker.wait_bodies(stream, [b"there"])
    delete_stream(amqp_url, missing)


def test_a_queue_is_no_stream(taker: Taker, amqp_url: str) -> None:
    """A queue of another kind is named as one."""
    name = unique_name()
    with broker_connection(amqp_url) as connection:
        connection.channel().queue_declare(name, durable=True)
        taker.follower.follow(name, 0)
        taker.wait_failed(name, NotAStream)
        connection.channel().queue_delete(name)


def test_a_stream_that_is_declared_anew_while_it_is_followed_is_replaced(
    taker: Taker, amqp_url: str, stream: str
) -> None:
    """Its end is told, and that what comes then is another stream."""
    publish_plain(amqp_url, stream, [b"0", b"1"])
    taker.follower.follow(stream, 0)
    taker.wait_bodies(stream, [b"0", b"1"])
    delete_stream(amqp_url, stream)
    taker.wait_failed(stream, StreamNotFound)
    declare_stream(amqp_url, stream)
    publish_plain(amqp_url, stream, [b"another 0", b"another 1"])
    replaced = taker.wait_event(stream, Replaced)
    assert replaced.known.offset == 1
    assert taker.bodies(stream) == [b"0", b"1"]


def test_a_lost_connection_is_made_again_and_nothing_is_lost_or_doubled(
    taker: Taker, proxy: Proxy, amqp_url: str, stream: str
) -> None:
    """Records go on where they ended."""
    publish_plain(amqp_url, stream, [b"0", b"1"])
    taker.follower.follow(stream, 0)
    taker.wait_bodies(stream, [b"0", b"1"])
    for number in range(2, 5):
        proxy.reset()
        publish_plain(amqp_url, stream, [b"%d" % number])
        taker.wait_bodies(stream, [b"%d" % each for each in range(number + 1)])
    assert len(taker.of(stream, Attached)) > 1


def test_a_silent_link_is_given_up(taker: Taker, proxy: Proxy, amqp_url: str, stream: str) -> None:
    """A broker of which nothing comes any more is noticed by its heartbeats, told once, and returned to."""
    publish_plain(amqp_url, stream, [b"0"])
    taker.follower.follow(stream, 0)
    taker.wait_bodies(stream, [b"0"])
    proxy.mode = "blackhole_replies"
    publish_plain(amqp_url, stream, [b"1"])
    taker.until(lambda: taker.of(None, Failed), what="the silence noticed")
    proxy.mode = "pass"
    taker.wait_bodies(stream, [b"0", b"1"])


def test_nothing_is_given_of_a_stream_that_was_left(taker: Taker, amqp_url: str, stream: str) -> None:
    """Also not what had come before, and was not taken."""
    other = unique_name()
    declare_stream(amqp_url, other)
    publish_plain(amqp_url, stream, [b"0"])
    taker.follower.follow(stream, 0)
    wait_until(lambda: taker.follower.statistics().held > 0, what="a chunk")
    taker.follower.leave(stream)
    assert taker.follower.statistics().held == 0
    taker.follower.follow(other, 0)
    publish_plain(amqp_url, stream, [b"1"])
    publish_plain(amqp_url, other, [b"other"])
    taker.wait_bodies(other, [b"other"])
    assert not taker.events[stream]
    delete_stream(amqp_url, other)


def test_a_taker_that_is_slow_is_waited_for(address: BrokerAddress, amqp_url: str, stream: str) -> None:
    """What is held is bounded, whatever is in the stream, and all of it comes when it is taken."""
    body = b"x" * 50_000
    for _ in range(20):
        publish_plain(amqp_url, stream, [body] * 10, confirm=False)
    options = FollowerOptions(bytes_max=1 << 20)
    with Taker(Follower(address, options=options)) as taker:
        taker.follower.follow(stream, 0)
        held: list[object] = []
        while not held:
            held += taker.follower.take(1.0)
        assert taker.follower.statistics().held_bytes < 5 << 20
        taker.follower.done(*held)
        for event in held:
            taker.events[event.stream].append(event)
        taker.until(lambda: len(taker.offsets(stream)) == 200, what="all messages")
        assert taker.offsets(stream) == list(range(200))
        assert taker.follower.statistics().held_bytes == 0


def test_a_stream_of_which_much_comes_starves_no_other(taker: Taker, amqp_url: str) -> None:
    """One of few messages is given at once, however much of another waits."""
    hot, cold = unique_name(), unique_name()
    for name in (hot, cold):
        declare_stream(amqp_url, name)
    for _ in range(30):
        publish_plain(amqp_url, hot, [b"x" * 10_000] * 100, confirm=False)
    taker.follower.follow(hot, 0)
    wait_until(lambda: taker.follower.statistics().held > 0, what="a chunk")
    publish_plain(amqp_url, cold, [b"cold"])
    taker.follower.follow(cold, 0)
    taker.wait_bodies(cold, [b"cold"])
    assert len(taker.offsets(hot)) < 3_000
    taker.until(lambda: len(taker.offsets(hot)) == 3_000, what="the others")
    for name in (hot, cold):
        delete_stream(amqp_url, name)


def test_a_child_of_a_fork_has_no_follower(taker: Taker, amqp_url: str, stream: str) -> None:
    """It says so there, and the parent's goes on undisturbed."""
    publish_plain(amqp_url, stream, [b"0"])
    taker.follower.follow(stream, 0)
    taker.wait_bodies(stream, [b"0"])

    def use() -> str:
        try:
            taker.follower.follow(stream, 0)
        except UsedAfterFork as error:
            taker.follower.close()
            return type(error).__name__
        return "it was used"

    assert in_child(use) == "UsedAfterFork"
    publish_plain(amqp_url, stream, [b"1"])
    taker.wait_bodies(stream, [b"0", b"1"])
    assert len(taker.of(stream, Attached)) == 1
