"""What a follower tells of streams."""

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from relatum import Broker
from relatum.errors import ConfigurationError, NotAStream, StreamNotFound, UsedAfterFork
from relatum.following import Attached, CaughtUp, Event, Failed, Hole, Records, Replaced
from relatum.reading import Agreement, Position, StreamReader, position_of
from relatum.waiting import Outages, Server
from tests.support import (
    broker_connection,
    declare_stream,
    delete_stream,
    new_streams,
    publish_plain,
    server_version,
    unique_name,
    wait_until,
)
from tests.support.following import Follower, Taker
from tests.support.forking import in_child
from tests.support.proxy import Proxy

QUIET_S = 0.5
"""Seconds in which what is there has come."""

QUICK = {"heartbeat_s": 1, "timeout_s": 2.0}


@dataclass(frozen=True)
class Bed:
    """A stream of a broker that is followed through a proxy.

    Attributes:
        amqp: The broker's URL.
        stream: A new stream.
        proxy: What the follower's connections go through.
        broker: The broker, through the proxy.
    """

    amqp: str
    stream: str
    proxy: Proxy
    broker: Broker

    def put(self, *bodies: bytes, to: str | None = None, confirm: bool = True) -> None:
        """Publish messages."""
        publish_plain(self.amqp, to or self.stream, bodies, confirm=confirm)

    def known_at(self, offset: int) -> Position:
        """What lies at an offset."""
        with StreamReader.open(self.broker) as reader:
            return position_of(reader.read(self.stream, offset))

    def declare_anew(self) -> None:
        """Replace the stream by an empty one of its name."""
        delete_stream(self.amqp, self.stream)
        declare_stream(self.amqp, self.stream)

    def taker(self, outages: Outages | None = None, **options: Any) -> Taker:
        """A follower of these options, to be opened, and who takes from it."""
        return Taker(Follower(self.broker, outages=outages, **options))


@pytest.fixture
def bed(amqp_url: str, stream_url: str, stream_name: str) -> Iterator[Bed]:
    """A stream, and the way to it."""
    with Proxy.to(stream_url) as proxy:
        yield Bed(amqp_url, stream_name, proxy, Broker(amqp_url, stream_url=proxy.url(stream_url)))


@pytest.fixture
def taker(bed: Bed) -> Iterator[Taker]:
    """An open follower, and who takes from it."""
    with bed.taker(**QUICK) as taker:
        yield taker


def texts(*numbers: int) -> list[bytes]:
    """Bodies that are numbers."""
    return [b"%d" % number for number in numbers]


def test_all_of_a_stream_is_given_in_order_and_then_what_is_published(taker: Taker, bed: Bed) -> None:
    """Attached, the records, caught up, and then what comes."""
    bed.put(*texts(*range(300)), confirm=False)
    number = taker.follower.follow(bed.stream, 0)
    taker.wait_bodies(bed.stream, texts(*range(300)))
    caught_up = taker.wait_event(bed.stream, CaughtUp)
    assert (caught_up.following, caught_up.next_offset) == (number, 300)
    bed.put(b"300")
    taker.wait_bodies(bed.stream, texts(*range(301)))
    assert taker.kinds(bed.stream)[0] is Attached
    assert set(taker.kinds(bed.stream)) == {Attached, Records, CaughtUp}


def test_a_stream_is_caught_up_behind_what_came_larger_than_before(taker: Taker, bed: Bed) -> None:
    """By a small chunk many more may come; the large one behind it leaves no room for another: nothing is asked for."""
    bed.put(b"small")
    bed.put(b"large" * 40_000)
    taker.follower.follow(bed.stream, 0)
    assert taker.wait_event(bed.stream, CaughtUp).next_offset == 2


def test_a_stream_is_not_caught_up_as_long_as_the_taker_holds_up_the_rest(bed: Bed) -> None:
    """The broker has more of it, which may not come yet."""
    bed.put(*(text * 1_000 for text in texts(*range(200))))
    with bed.taker(window_bytes=4_000, **QUICK) as taker:
        taker.follower.follow(bed.stream, 0)
        held = list[Event]()
        wait_until(
            lambda: held.extend(taker.follower.take(0.2)) or any(type(each) is Records for each in held), what="records"
        )
        until = time.monotonic() + 4 * QUIET_S
        while time.monotonic() < until:
            held.extend(taker.follower.take(0.2))
        assert CaughtUp not in {type(each) for each in held}
        taker.follower.done(*held)
        assert taker.wait_event(bed.stream, CaughtUp).next_offset == 200


def test_many_lone_messages_are_held_for_a_taker_who_looks_seldom(taker: Taker, bed: Bed) -> None:
    """A thousand chunks of one message each, though the taker is done with none: a page looks five times a second."""
    bed.put(*texts(*range(1_000)))
    taker.follower.follow(bed.stream, 0)
    wait_until(lambda: taker.follower.statistics().held >= 1_000, what="all of them")


def test_more_streams_than_connections_hold_is_no_outage(
    bed: Bed, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is told of the stream that has no room, which gets it when another one is left."""
    monkeypatch.setattr("relatum.following._subscriptions.SUBSCRIPTIONS", 2)
    outages = Outages(logging.getLogger("relatum.test-following"), broker="b:1")
    with new_streams(bed.amqp, 3) as streams, bed.taker(outages, connections_max=1) as taker:
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


@pytest.mark.parametrize("lets_in", [True, False])
def test_streams_are_spread_where_they_wait_for_each_other(
    taker: Taker, bed: Bed, monkeypatch: pytest.MonkeyPatch, lets_in: bool
) -> None:
    """One connection has room for all with a broker that does not have them wait, or that lets no other in."""
    monkeypatch.setattr("relatum.following._subscriptions.CROWD", 2 if lets_in else 1)
    with new_streams(bed.amqp, 5) as streams:
        taker.follower.follow(streams[0], 0)
        taker.wait_event(streams[0], CaughtUp)
        bed.proxy.accepts = lets_in
        for name in streams[1:]:
            taker.follower.follow(name, 0)
        for name in streams:
            taker.wait_event(name, CaughtUp)
        waits = server_version(bed.amqp) < (4, 2, 1)
        assert taker.follower.statistics().connections == (3 if waits and lets_in else 1)
        assert not any(taker.of(name, Failed) for name in [*streams, None])


def test_a_stream_goes_on_behind_what_is_known(taker: Taker, bed: Bed) -> None:
    """What lies before the position is not given again; with nothing new, no message has to come."""
    bed.put(*texts(*range(10)))
    taker.follower.follow(bed.stream, 7, known=bed.known_at(6))
    taker.wait_bodies(bed.stream, texts(7, 8, 9))
    assert taker.kinds(bed.stream)[:2] == [Attached, Records]
    with bed.taker(**QUICK) as other:
        other.follower.follow(bed.stream, 10, known=bed.known_at(9))
        assert other.wait_event(bed.stream, Attached).next_offset == 10
        assert other.wait_event(bed.stream, CaughtUp).next_offset == 10
        bed.put(b"10")
        other.wait_bodies(bed.stream, [b"10"])


@pytest.mark.parametrize(
    ("count", "others", "found"), [(2, 3, Agreement.OTHER), (5, 1, Agreement.ENDS_BEFORE)], ids=["other", "shorter"]
)
def test_a_stream_that_is_another_is_replaced(
    taker: Taker, bed: Bed, count: int, others: int, found: Agreement
) -> None:
    """Another message at the known place proves it, and an end before it, where the leader says so; none is given."""
    bed.put(*texts(*range(count)))
    known = bed.known_at(count - 1)
    bed.declare_anew()
    another = [b"another %d" % number for number in range(others)]
    bed.put(*another)
    number = taker.follower.follow(bed.stream, count, known=known)
    replaced = taker.wait_event(bed.stream, Replaced)
    assert (replaced.following, replaced.known, replaced.found) == (number, known, found)
    assert replaced.bounds == ((0, 0) if found is Agreement.ENDS_BEFORE else None)
    assert not taker.offsets(bed.stream)
    taker.follower.follow(bed.stream, 0)
    taker.wait_bodies(bed.stream, another)


def test_a_stream_that_is_declared_anew_while_it_is_followed_is_replaced(taker: Taker, bed: Bed) -> None:
    """Its end is told, and that what comes then is another stream."""
    bed.put(*texts(0, 1))
    taker.follower.follow(bed.stream, 0)
    taker.wait_bodies(bed.stream, texts(0, 1))
    delete_stream(bed.amqp, bed.stream)
    taker.wait_failed(bed.stream, StreamNotFound)
    declare_stream(bed.amqp, bed.stream)
    bed.put(b"another 0", b"another 1")
    assert taker.wait_event(bed.stream, Replaced).known.offset == 1
    assert taker.bodies(bed.stream) == texts(0, 1)


def test_what_retention_took_is_a_hole(taker: Taker, bed: Bed) -> None:
    """The hole reaches from what was to be read to what is there, and is told before the records behind it."""
    delete_stream(bed.amqp, bed.stream)
    declare_stream(bed.amqp, bed.stream, x_max_length_bytes=100_000, x_stream_max_segment_size_bytes=50_000)
    first: int | None = None
    with StreamReader.open(bed.broker) as reader:
        while not first:
            bed.put(*[b"x" * 1_000] * 200, confirm=False)
            bed.put(b"last")
            first = reader.bounds(bed.stream).first
    taker.follower.follow(bed.stream, 3, known=Position(2, 12345, None))
    hole = taker.wait_event(bed.stream, Hole)
    records = taker.wait_event(bed.stream, Records)
    # Retention may have gone on since the reader asked.
    assert (hole.from_offset, hole.to_offset) == (3, records.batch.first_offset)
    assert hole.to_offset >= first
    assert taker.offsets(bed.stream)[0] == hole.to_offset
    assert taker.kinds(bed.stream)[:3] == [Attached, Hole, Records]


def test_a_stream_that_is_not_there_is_waited_for(taker: Taker, bed: Bed) -> None:
    """It is told that there is none, and when it is declared it is followed; a queue is named as none."""
    delete_stream(bed.amqp, bed.stream)
    with new_streams(bed.amqp, 1) as (there,), broker_connection(bed.amqp) as connection:
        queue = unique_name()
        channel = connection.channel()
        channel.queue_declare(queue, durable=True)
        for name in (bed.stream, there, queue):
            taker.follower.follow(name, 0)
        taker.wait_failed(bed.stream, StreamNotFound)
        taker.wait_failed(queue, NotAStream)
        channel.queue_delete(queue)
        declare_stream(bed.amqp, bed.stream)
        for name in (bed.stream, there):
            bed.put(name.encode(), to=name)
            taker.wait_bodies(name, [name.encode()])


def test_a_lost_connection_is_made_again_and_nothing_is_lost_or_doubled(taker: Taker, bed: Bed) -> None:
    """Records go on where they ended."""
    bed.put(*texts(0, 1))
    taker.follower.follow(bed.stream, 0)
    taker.wait_bodies(bed.stream, texts(0, 1))
    for number in range(2, 5):
        bed.proxy.reset()
        bed.put(*texts(number))
        taker.wait_bodies(bed.stream, texts(*range(number + 1)))
    assert len(taker.of(bed.stream, Attached)) > 1


def test_a_silent_link_is_given_up(taker: Taker, bed: Bed) -> None:
    """A broker of which nothing comes any more is noticed by its heartbeats, told once, and returned to."""
    bed.put(b"0")
    taker.follower.follow(bed.stream, 0)
    taker.wait_bodies(bed.stream, [b"0"])
    bed.proxy.mode = "blackhole_replies"
    bed.put(b"1")
    taker.until(lambda: taker.of(None, Failed), what="the silence noticed")
    bed.proxy.mode = "pass"
    taker.wait_bodies(bed.stream, texts(0, 1))


def test_nothing_is_given_of_a_stream_that_was_left(taker: Taker, bed: Bed) -> None:
    """Also not what had come before, and was not taken; what was taken is held until the taker is done with it."""
    bed.put(b"0")
    taker.follower.follow(bed.stream, 0)
    taken = list[Event]()
    wait_until(lambda: taken.extend(taker.follower.take(0.2)) or CaughtUp in map(type, taken), what="the first")
    bed.put(b"1")
    wait_until(lambda: taker.follower.statistics().held == 2, what="another chunk")
    taker.follower.leave(bed.stream)
    assert taker.follower.statistics().held == 1
    taker.follower.done(*taken)
    assert taker.follower.statistics().held == 0
    with new_streams(bed.amqp, 1) as (other,):
        taker.follower.follow(other, 0)
        bed.put(b"1")
        bed.put(b"other", to=other)
        taker.wait_bodies(other, [b"other"])
    assert not taker.events[bed.stream]


def test_a_taker_that_is_slow_is_waited_for(bed: Bed) -> None:
    """What is held is bounded, whatever is in the stream, and all of it comes when it is taken."""
    for _ in range(20):
        bed.put(*[b"x" * 50_000] * 10, confirm=False)
    with bed.taker(bytes_max=1 << 20) as taker:
        taker.follower.follow(bed.stream, 0)
        held: list[Event] = []
        while not held:
            held += taker.follower.take(1.0)
        assert taker.follower.statistics().held_bytes < 5 << 20
        taker.follower.done(*held)
        taker.events[bed.stream] += held
        taker.until(lambda: len(taker.offsets(bed.stream)) == 200, what="all messages")
        assert taker.offsets(bed.stream) == list(range(200))
        assert taker.follower.statistics().held_bytes == 0


def test_a_stream_of_which_much_comes_starves_no_other(taker: Taker, bed: Bed) -> None:
    """One of few messages is given at once, however much of another waits."""
    for _ in range(30):
        bed.put(*[b"x" * 10_000] * 100, confirm=False)
    with new_streams(bed.amqp, 1) as (cold,):
        taker.follower.follow(bed.stream, 0)
        wait_until(lambda: taker.follower.statistics().held > 0, what="a chunk")
        bed.put(b"cold", to=cold)
        taker.follower.follow(cold, 0)
        taker.wait_bodies(cold, [b"cold"])
        assert len(taker.offsets(bed.stream)) < 3_000
        taker.until(lambda: len(taker.offsets(bed.stream)) == 3_000, what="the others")
        assert taker.offsets(bed.stream) == list(range(3_000))


def test_a_child_of_a_fork_has_no_follower(taker: Taker, bed: Bed) -> None:
    """It says so there, and the parent's goes on undisturbed."""
    bed.put(b"0")
    taker.follower.follow(bed.stream, 0)
    taker.wait_bodies(bed.stream, [b"0"])

    def use() -> None:
        with pytest.raises(UsedAfterFork):
            taker.follower.follow(bed.stream, 0)
        taker.follower.close()

    in_child(use)
    bed.put(b"1")
    taker.wait_bodies(bed.stream, texts(0, 1))
    assert len(taker.of(bed.stream, Attached)) == 1
