"""What a follower reports about streams; and how it survives defects, forks, frozen nodes and restarts."""

import gc
import logging
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from relatum import Broker
from relatum.common.waiting import Outages, Server
from relatum.errors import (
    ChunkCorrupt,
    ConfigurationError,
    NotAStream,
    StreamNotFound,
    StreamUnavailable,
    UsedAfterFork,
)
from relatum.reading import Position, StreamReader, position_of
from relatum.reading.following import Attached, CaughtUp, Event, Failed, Hole, Records, Replaced
from relatum.wire.frames import Start
from tests.contract._node import OneChunk
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
from tests.support.following import Owner
from tests.support.forking import in_child
from tests.support.proxy import Proxy
from tests.support.standstill import in_time
from tests.support.tls import TlsBroker

QUIET_S = 0.5
"""Seconds in which what is there has come."""

QUICK = {"heartbeat_s": 1, "timeout_s": 2.0}

STREAMS = 130
"""Streams that lose their connection together: more than one connection has of them with an old broker."""


@dataclass(frozen=True)
class Bed:
    """A new stream of a broker, which is followed through a proxy: `broker` leads through it, `amqp` does not."""

    amqp: str
    stream: str
    proxy: Proxy
    broker: Broker

    def put(self, *bodies: bytes, to: str | None = None, confirm: bool = True) -> None:
        publish_plain(self.amqp, to or self.stream, bodies, confirm=confirm)

    def known_at(self, offset: int) -> Position:
        with StreamReader.open(self.broker) as reader:
            return position_of(reader.read(self.stream, offset))

    def declare_anew(self) -> None:
        delete_stream(self.amqp, self.stream)
        declare_stream(self.amqp, self.stream)

    def owner(self, **options: Any) -> Owner:
        return Owner(self.broker, **QUICK | options)


@pytest.fixture
def bed(amqp_url: str, stream_url: str, stream_name: str) -> Iterator[Bed]:
    with Proxy.to(stream_url) as proxy:
        yield Bed(amqp_url, stream_name, proxy, Broker(amqp_url, stream_url=proxy.url(stream_url)))


@pytest.fixture
def owner(bed: Bed) -> Iterator[Owner]:
    with bed.owner() as owner:
        yield owner


def texts(*numbers: int) -> list[bytes]:
    return [b"%d" % number for number in numbers]


def test_all_of_a_stream_is_given_in_order_and_then_what_is_published(owner: Owner, bed: Bed) -> None:
    """Attached, the records, caught up, and then what comes."""
    bed.put(*texts(*range(300)), confirm=False)
    owner.follow(bed.stream)
    owner.wait_bodies(bed.stream, texts(*range(300)))
    assert owner.wait_event(bed.stream, CaughtUp).next_offset == 300
    bed.put(b"300")
    owner.wait_bodies(bed.stream, texts(*range(301)))
    assert owner.kinds(bed.stream)[0] is Attached
    assert set(owner.kinds(bed.stream)) == {Attached, Records, CaughtUp}


def test_a_stream_is_caught_up_behind_what_came_larger_than_before(owner: Owner, bed: Bed) -> None:
    """By a small chunk many more may come; the large one behind it leaves no room for another: nothing is asked for."""
    bed.put(b"small")
    bed.put(b"large" * 40_000)
    owner.follow(bed.stream)
    assert owner.wait_event(bed.stream, CaughtUp).next_offset == 2


def test_a_stream_is_not_caught_up_as_long_as_the_owner_holds_up_the_rest(
    bed: Bed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The broker has more of it, which may not come yet."""
    bed.put(*(text * 1_000 for text in texts(*range(200))))
    monkeypatch.setattr("relatum.reading.following._connection.WINDOW_BYTES", 4_000)
    with bed.owner(holds=True) as owner:
        owner.follow(bed.stream)
        owner.wait_event(bed.stream, Records)
        time.sleep(4 * QUIET_S)
        assert CaughtUp not in owner.kinds(bed.stream)
        owner.release()
        assert owner.wait_event(bed.stream, CaughtUp).next_offset == 200


def test_many_lone_messages_are_held_for_an_owner_who_is_seldom_done(bed: Bed) -> None:
    """A thousand chunks of one message each, though the owner is done with none."""
    bed.put(*texts(*range(1_000)))
    with bed.owner(holds=True) as owner:
        owner.follow(bed.stream)
        wait_until(lambda: owner.statistics().held >= 1_000, what="all of them")


def test_more_streams_than_connections_hold_is_no_outage(
    bed: Bed, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The stream without room is reported, and is followed once another one is left."""
    monkeypatch.setattr("relatum.reading.following._connection.SUBSCRIPTIONS", 2)
    monkeypatch.setattr("relatum.reading.following._connections.CONNECTIONS_MAX", 1)
    outages = Outages(logging.getLogger("relatum.test-following"), broker="b:1")
    with new_streams(bed.amqp, 3) as streams, bed.owner(outages=outages) as owner:
        for name in streams[:2]:
            owner.follow(name)
            owner.wait_event(name, Attached)
        owner.follow(streams[2])
        assert "more than 1 connections" in str(owner.wait_failed(streams[2], ConfigurationError).error)
        assert outages.is_up(Server.BROKER)
        assert "is unavailable; retrying" not in caplog.text
        assert owner.follower.may_log_in
        owner.leave(streams[0])
        owner.wait_event(streams[2], Attached)


@pytest.mark.parametrize("lets_in", [True, False])
def test_streams_are_spread_where_they_wait_for_each_other(
    owner: Owner, bed: Bed, monkeypatch: pytest.MonkeyPatch, lets_in: bool
) -> None:
    """One connection has room for all with a broker that does not have them wait, or that lets no other in."""
    monkeypatch.setattr("relatum.reading.following._connection.CROWDED_STREAMS", 2 if lets_in else 1)
    with new_streams(bed.amqp, 5) as streams:
        owner.follow(streams[0])
        owner.wait_event(streams[0], CaughtUp)
        bed.proxy.accepts = lets_in
        for name in streams[1:]:
            owner.follow(name)
        for name in streams:
            owner.wait_event(name, CaughtUp)
        waits = server_version(bed.amqp) < (4, 2, 1)
        assert owner.statistics().connections == (3 if waits and lets_in else 1)
        assert not any(owner.of(name, Failed) for name in [*streams, None])


def test_a_stream_goes_on_behind_what_is_known(owner: Owner, bed: Bed) -> None:
    """What is before the position is not given again; with nothing new, no message has to come."""
    bed.put(*texts(*range(10)))
    owner.follow(bed.stream, start=7, known=bed.known_at(6))
    owner.wait_bodies(bed.stream, texts(7, 8, 9))
    assert owner.kinds(bed.stream)[:2] == [Attached, Records]
    with bed.owner() as other:
        other.follow(bed.stream, start=10, known=bed.known_at(9))
        assert other.wait_event(bed.stream, Attached).next_offset == 10
        assert other.wait_event(bed.stream, CaughtUp).next_offset == 10
        bed.put(b"10")
        other.wait_bodies(bed.stream, [b"10"])


@pytest.mark.parametrize(("count", "others"), [(2, 3), (5, 1)], ids=["other", "shorter"])
def test_a_stream_that_is_another_is_replaced(owner: Owner, bed: Bed, count: int, others: int) -> None:
    """Another message at the known place proves it, and an end before it, where the leader says so; none is given."""
    bed.put(*texts(*range(count)))
    known = bed.known_at(count - 1)
    bed.declare_anew()
    another = [b"another %d" % number for number in range(others)]
    bed.put(*another)
    owner.follow(bed.stream, start=count, known=known)
    owner.wait_event(bed.stream, Replaced)
    assert not owner.offsets(bed.stream)
    owner.follow(bed.stream)
    owner.wait_bodies(bed.stream, another)


def test_a_stream_that_is_declared_anew_while_it_is_followed_is_replaced(owner: Owner, bed: Bed) -> None:
    """Its end is reported, and that the next stream is another one."""
    bed.put(*texts(0, 1))
    owner.follow(bed.stream)
    owner.wait_bodies(bed.stream, texts(0, 1))
    delete_stream(bed.amqp, bed.stream)
    owner.wait_failed(bed.stream, StreamNotFound)
    declare_stream(bed.amqp, bed.stream)
    bed.put(b"another 0", b"another 1")
    owner.wait_event(bed.stream, Replaced)
    assert owner.bodies(bed.stream) == texts(0, 1)


def test_what_retention_took_is_a_hole(owner: Owner, bed: Bed) -> None:
    """The hole reaches from the wanted offset to the first one, and is reported before the records behind it."""
    delete_stream(bed.amqp, bed.stream)
    declare_stream(bed.amqp, bed.stream, x_max_length_bytes=100_000, x_stream_max_segment_size_bytes=50_000)
    first: int | None = None
    with StreamReader.open(bed.broker) as reader:
        while not first:
            bed.put(*[b"x" * 1_000] * 200, confirm=False)
            bed.put(b"last")
            first = reader.bounds(bed.stream).first
    owner.follow(bed.stream, start=3, known=Position(2, 12345, None))
    hole = owner.wait_event(bed.stream, Hole)
    records = owner.wait_event(bed.stream, Records)
    # Retention may have dropped more since the reader asked.
    assert (hole.from_offset, hole.to_offset) == (3, records.batch.first_offset)
    assert hole.to_offset >= first
    assert owner.offsets(bed.stream)[0] == hole.to_offset
    assert owner.kinds(bed.stream)[:3] == [Attached, Hole, Records]


def url_of(node: OneChunk) -> str:
    return f"rabbitmq-stream://u:p@127.0.0.1:{node.port}"


def test_a_hole_is_reported_if_retention_took_the_rest_since() -> None:
    """A gap is a hole also if the stream is empty when its leader is asked for its first message."""
    with OneChunk(100, 1, Start.OFFSET) as node, Owner(url_of(node), **QUICK) as owner:
        owner.follow("orders", start=3)
        owner.wait_event("orders", Records)
        assert owner.kinds("orders")[:3] == [Attached, Hole, Records]
        assert owner.offsets("orders") == [owner.of("orders", Hole)[0].to_offset] == [100]


@pytest.mark.parametrize("has_replica", [False, True])
def test_what_only_another_replica_has_dropped_is_read_from_the_leader(has_replica: bool) -> None:
    """Each node applies retention on its own: each replica that has a gap is tried, and the leader last."""
    with (
        OneChunk(3, 98) as leader,
        OneChunk(100, 1, leader_port=leader.port) as replica,
        OneChunk(100, 1, leader_port=leader.port, between=replica.port if has_replica else 0) as node,
        Owner(url_of(node), **QUICK) as owner,
    ):
        owner.follow("orders", start=3)
        owner.wait_event("orders", Records)
        assert owner.offsets("orders") == list(range(3, 101))


def test_a_hole_ends_where_the_leader_begins() -> None:
    """A replica that has dropped more than its leader makes the hole no larger, also if the leader dropped some."""
    with (
        OneChunk(50, 51) as leader,
        OneChunk(100, 1, leader_port=leader.port) as node,
        Owner(url_of(node), **QUICK) as owner,
    ):
        owner.follow("orders", start=3)
        owner.wait_event("orders", Records)
        [hole] = owner.of("orders", Hole)
        assert (hole.from_offset, hole.to_offset) == (3, 50)
        assert owner.offsets("orders") == list(range(50, 101))


def test_what_a_replica_has_dropped_is_no_hole_while_its_leader_is_unreachable() -> None:
    """Each node applies retention on its own: only the leader shows what the stream has lost."""
    with OneChunk(100, 1, leader_port=1) as node, Owner(url_of(node), **QUICK) as owner:
        owner.follow("orders", start=3)
        wait_until(lambda: owner.of("orders", Failed) or owner.of("orders", Hole), what="an answer")
        assert owner.kinds("orders") == [Failed]
        assert isinstance(owner.of("orders", Failed)[0].error, StreamUnavailable)


def test_what_one_node_has_damaged_is_read_from_another() -> None:
    """A damaged chunk ends the reading of a stream only if no node has it undamaged."""
    with (
        OneChunk(3, 98) as leader,
        OneChunk(3, 98, leader_port=leader.port) as node,
        Owner(url_of(node), **QUICK) as owner,
    ):
        node.damage()
        owner.follow("orders", start=3)
        owner.wait_event("orders", Records)
        assert owner.offsets("orders") == list(range(3, 101))
        with StreamReader.open(url_of(node)) as reader:
            for _ in range(2):
                with pytest.raises(ChunkCorrupt):
                    reader.read("orders", 3)
            assert reader.statistics().opened == 1, "a damaged chunk costs no connection"


def test_a_stream_that_is_not_there_is_waited_for(owner: Owner, bed: Bed) -> None:
    """It is reported as missing, and followed once it is declared; a queue is reported as not a stream."""
    delete_stream(bed.amqp, bed.stream)
    with new_streams(bed.amqp, 1) as (there,), broker_connection(bed.amqp) as connection:
        queue = unique_name()
        channel = connection.channel()
        channel.queue_declare(queue, durable=True)
        for name in (bed.stream, there, queue):
            owner.follow(name)
        owner.wait_failed(bed.stream, StreamNotFound)
        owner.wait_failed(queue, NotAStream)
        channel.queue_delete(queue)
        declare_stream(bed.amqp, bed.stream)
        for name in (bed.stream, there):
            bed.put(name.encode(), to=name)
            owner.wait_bodies(name, [name.encode()])


def test_a_lost_connection_is_made_again_and_nothing_is_lost_or_doubled(owner: Owner, bed: Bed) -> None:
    """Records continue where they ended."""
    bed.put(*texts(0, 1))
    owner.follow(bed.stream)
    owner.wait_bodies(bed.stream, texts(0, 1))
    for number in range(2, 5):
        bed.proxy.reset()
        bed.put(*texts(number))
        owner.wait_bodies(bed.stream, texts(*range(number + 1)))
    assert len(owner.of(bed.stream, Attached)) > 1


def test_a_silent_link_is_given_up(owner: Owner, bed: Bed) -> None:
    """A broker that falls silent is noticed by its heartbeats, reported once, and used again later."""
    bed.put(b"0")
    owner.follow(bed.stream)
    owner.wait_bodies(bed.stream, [b"0"])
    bed.proxy.mode = "blackhole_replies"
    bed.put(b"1")
    owner.wait_event(None, Failed)
    bed.proxy.mode = "pass"
    owner.wait_bodies(bed.stream, texts(0, 1))


def test_nothing_is_given_of_a_stream_that_was_left(bed: Bed) -> None:
    """What was given is held until the owner is done with it."""
    bed.put(b"0")
    with new_streams(bed.amqp, 1) as (other,), bed.owner(holds=True) as owner:
        owner.follow(bed.stream)
        owner.wait_event(bed.stream, CaughtUp)
        owner.leave(bed.stream)
        assert owner.statistics().held == 1
        owner.release()
        assert owner.statistics().held == 0
        owner.follow(other)
        bed.put(b"1")
        bed.put(b"other", to=other)
        owner.wait_bodies(other, [b"other"])
        assert owner.bodies(bed.stream) == [b"0"]


def test_an_owner_that_is_slow_is_waited_for(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is held is bounded, whatever is in the stream, and all of it comes when the owner is done."""
    for _ in range(20):
        bed.put(*[b"x" * 50_000] * 10, confirm=False)
    monkeypatch.setattr("relatum.reading.following._delivery.BYTES_MAX", 1 << 20)
    with bed.owner(holds=True) as owner:
        owner.follow(bed.stream)
        owner.wait_event(bed.stream, Records)
        time.sleep(QUIET_S)
        assert owner.statistics().held_bytes < 5 << 20
        owner.release()
        wait_until(lambda: len(owner.offsets(bed.stream)) == 200, what="all messages")
        assert (owner.offsets(bed.stream), owner.statistics().held_bytes) == (list(range(200)), 0)


def test_a_stream_of_which_much_comes_starves_no_other(bed: Bed) -> None:
    """One of few messages is given at once, however much of another waits."""
    for _ in range(30):
        bed.put(*[b"x" * 10_000] * 100, confirm=False)
    with new_streams(bed.amqp, 1) as (cold,), bed.owner(holds=True) as owner:
        owner.follow(bed.stream)
        owner.wait_event(bed.stream, Records)
        bed.put(b"cold", to=cold)
        owner.follow(cold)
        owner.wait_bodies(cold, [b"cold"])
        assert len(owner.offsets(bed.stream)) < 3_000
        owner.release()
        wait_until(lambda: len(owner.offsets(bed.stream)) == 3_000, what="the others")
        assert owner.offsets(bed.stream) == list(range(3_000))


def test_a_busy_stream_delays_no_other_of_its_connection(bed: Bed) -> None:
    """A broker before 4.2.1 sends of no other stream while one with credit gets a message every millisecond."""
    is_over = threading.Event()

    def publish_busily() -> None:
        with broker_connection(bed.amqp) as connection:
            channel = connection.channel()
            while not is_over.wait(0.001):
                channel.basic_publish("", bed.stream, b"")

    overtaken_by = []
    with new_streams(bed.amqp, 1) as (cold,), bed.owner() as owner, ThreadPoolExecutor(1) as threads:
        owner.follow(bed.stream, cold)
        publishing = threads.submit(publish_busily)
        try:
            for number in range(1, 10):
                bed.put(b"", to=cold)
                before = len(owner.offsets(bed.stream))
                wait_until(lambda least=number: len(owner.offsets(cold)) == least, what="the lone message")
                overtaken_by.append(len(owner.offsets(bed.stream)) - before)
        finally:
            is_over.set()
        publishing.result()
    assert sorted(overtaken_by)[4] < 200


def test_a_parent_goes_on_whatever_its_child_does(bed: Bed) -> None:
    """The child closes, drops and collects all it has a copy of."""
    owners = [bed.owner()]
    with owners[0] as owner:
        owner.follow(bed.stream)
        bed.put(b"0")
        owner.wait_event(bed.stream, CaughtUp)

        def end() -> None:
            copied = owners.pop()
            with pytest.raises(UsedAfterFork):
                copied.follower.follow(bed.stream, 0)
            coroutine = copied.follower.close()
            with pytest.raises(StopIteration):
                coroutine.send(None)
            assert copied.loop.stop(0)
            assert copied.loop.run(copied.follower.close) is None
            vars(copied).clear()
            del copied
            gc.collect()

        in_child(end)
        bed.put(b"1")
        wait_until(lambda: owner.offsets(bed.stream) == [0, 1], what="the next message")
        assert len(owner.of(bed.stream, Attached)) == 1


@pytest.mark.parametrize("kind", [Attached, Records, CaughtUp, Failed])
def test_a_defect_of_its_owner_ends_nothing(bed: Bed, kind: type, caplog: pytest.LogCaptureFixture) -> None:
    """It is logged, and all is given nevertheless, in order."""
    raised = list[Event]()

    def on_event(event: Event) -> None:
        if isinstance(event, kind) and not raised:
            raised.append(event)
            raise ZeroDivisionError

    bed.put(*texts(*range(100)))
    with bed.owner(on_event=on_event) as owner, caplog.at_level(logging.CRITICAL, "relatum.follower"):
        owner.follow(bed.stream)
        owner.wait_event(bed.stream, CaughtUp)
        bed.proxy.reset()
        bed.put(b"100")
        wait_until(lambda: len(owner.offsets(bed.stream)) >= 101, what="the last message")
        assert owner.offsets(bed.stream) == list(range(101))
        assert raised


def test_the_reader_is_closed_also_if_the_loop_ends_while_all_threads_are_busy(bed: Bed) -> None:
    """Closing it waits for a thread then, and is not given up with the task that waits."""
    gate = threading.Event()
    with bed.owner() as owner:
        reader = owner.follower.reader
        reader.missing([])
        assert reader.statistics().idle == 1
        for _ in range(owner.follower._threads.most):
            owner.follower._threads.submit(gate.wait, 60)
        assert owner.loop.run(owner.follower.close) is not None
        wait_until(lambda: owner.follower.is_closed, what="the end")
        assert owner.loop.stop(30)
        gate.set()
        wait_until(lambda: reader.statistics().idle == 0, what="a closed reader")


def test_a_frozen_node_is_noticed_and_its_connection_closed(owner: Owner, bed: Bed) -> None:
    """By its silence; closing waits for nothing that it would have to read."""
    owner.follow(bed.stream)
    owner.wait_event(bed.stream, CaughtUp)
    bed.proxy.mode = "frozen"
    with in_time(10):
        owner.wait_event(None, Failed)
    assert owner.statistics().connections == 0
    # A call that waits for the broker stops waiting, and closes its connection properly.
    with in_time(3):
        assert owner.close(30)
    bed.proxy.mode = "pass"


def test_streams_are_followed_over_tls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what TLS has unpacked already, which makes no socket readable, and what comes after a pause."""
    with TlsBroker(tmp_path) as tls:
        stream = unique_name()
        declare_stream(tls.server.broker_url, stream)
        for _ in range(8):
            publish_plain(tls.server.broker_url, stream, [b"x" * 50_000] * 20)
        url = tls.url("rabbitmq-stream+tls://{login}{secure_streams}?{ca}")
        monkeypatch.setattr("relatum.reading.following._delivery.BYTES_MAX", 1 << 20)
        with Owner(url, heartbeat_s=1) as owner:
            owner.follow(stream)
            owner.wait_event(stream, CaughtUp)
            assert owner.offsets(stream) == list(range(160))
            publish_plain(tls.server.broker_url, stream, [b"last"])
            wait_until(lambda: len(owner.offsets(stream)) == 161, what="the last message")


def test_many_streams_that_lose_the_broker_together_tell_so_once(bed: Bed, caplog: pytest.LogCaptureFixture) -> None:
    """One line in the log, no failure of a stream, a subscription for each, and few connections."""
    logger = logging.getLogger("relatum.test-following")
    outages = Outages(logger, broker="b:1")
    with new_streams(bed.amqp, STREAMS) as streams, bed.owner(outages=outages) as owner:
        owner.follow(*streams)
        wait_until(lambda: all(owner.of(each, CaughtUp) for each in streams), what="all streams read")
        opened = bed.proxy.opened
        bed.proxy.accepts = False
        bed.proxy.reset()
        wait_until(lambda: not outages.is_up(Server.BROKER), what="the broker away")
        bed.proxy.accepts = True
        wait_until(lambda: all(len(owner.of(each, CaughtUp)) == 2 for each in streams), what="all streams read again")
        lines = [each for each in caplog.records if each.name == logger.name and each.levelno >= logging.WARNING]
        assert len(lines) == 1
        assert not any(owner.of(each, Failed) for each in streams)
        assert all(len(owner.of(each, Attached)) == 2 for each in streams)
        assert len(owner.of(None, Failed)) <= 8
        assert bed.proxy.opened - opened <= 8
