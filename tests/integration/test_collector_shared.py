"""What is the same behind both faces of the collector: limits of memory, streams, members, positions, threads."""

import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from itertools import count
from pathlib import Path
from typing import Any

import pika
import psycopg
import pytest
import sqlalchemy as sa
from pika.adapters.blocking_connection import BlockingChannel

from relatum import MessageId, errors
from relatum.collecting import (
    Bulk,
    Collected,
    ExecutorOptions,
    FlushReason,
    MessageCollector,
    Outcome,
    collector_status,
)
from relatum.collecting._collector_core import Advance
from relatum.errors import (
    StreamUnavailable,
)
from relatum.reading import Message, StreamBounds, StreamReader
from relatum.reading.following import Attached, Failed
from relatum.store.database import Database
from relatum.superstreams import Layout, add_partition
from tests.support import declare_stream, delete_stream, in_a_try, new_streams, unique_name, wait_until
from tests.support.collectors import (
    COLLECTED,
    DEAD,
    FAILED,
    FOREVER,
    FORWARDED,
    SUCCEEDED,
    UNKNOWN,
    Collecting,
    Consumer,
    Gate,
    StoreMember,
    is_attached,
    wait_status,
)
from tests.support.commits import commits_held, make_commits_wait
from tests.support.leases import LEASE_S, let_lapse
from tests.support.place import Place
from tests.support.threads import Threads

NOWHERE = "postgresql://nobody@127.0.0.1:1/nothing"

CRASHES_MAX = 10
"""Times a message is handed on without any result, beyond its attempts, before it is given up."""


@pytest.fixture
def collecting(place: Place) -> Collecting:
    return Collecting(place)


def test_too_many_active_bulks_flush_the_oldest(collecting: Collecting) -> None:
    """When a second bulk is begun where two are too many, the first is handed on; the second stays."""
    collecting.put("a")
    collecting.put("b", type_="parcel")
    orders, parcels = Consumer(), Consumer()
    collector = collecting.collector(orders, bulks_max=2, **FOREVER)
    collector.register_executor("parcel", parcels, ExecutorOptions(**FOREVER))
    with collector:
        wait_status(collector, SUCCEEDED, "a")
        assert collector.outcome("b").status is COLLECTED
    assert orders.bulks == [(FlushReason.ACTIVE_BULKS, ["a"])]
    assert parcels.bulks == [(FlushReason.STOP, ["b"])]


def test_spill_leaves_bodies_in_their_stream(collecting: Collecting) -> None:
    """With "spill", all is taken; what waits behind a full queue has no body in memory, and is read again in order."""
    bodies = [f"{n:03}" + "x" * 20_000 for n in range(40)]
    collecting.put(*bodies)
    gate = Gate()
    options: dict[str, Any] = {"bulk_messages": 4, "queue_bulks": 1, "when_full": "spill", "max_age_s": 1.0}
    with collecting.collector(gate, **options) as collector, gate.closed():
        wait_until(lambda: collector.statistics().held_messages == 40, what="all messages taken")
        wait_until(lambda: collector.statistics().held_bytes < 12 * 20_000, what="bodies left in the stream")
        gate.opened.set()
        wait_until(lambda: len(gate.bodies) == 40, what="all messages consumed")
    assert gate.bodies == bodies


def test_memory_ends_at_its_limit(collecting: Collecting) -> None:
    """However much is in the stream, no more is held than the limit and the message that reached it."""
    bodies = [f"{n:03}" + "x" * 50_000 for n in range(60)]
    collecting.put(*bodies)
    gate = Gate()
    options: dict[str, Any] = {"bulk_messages": 2, "queue_bulks": 100, "max_age_s": 1.0}
    with collecting.collector(gate, bytes_max=500_000, **options) as collector, gate.closed():
        wait_until(lambda: collector.statistics().held_bytes >= 500_000, what="the limit reached")
        assert collector.statistics().held_bytes < 500_000 + 52_000
        gate.opened.set()
        wait_until(lambda: len(gate.bodies) == 60, what="all messages consumed")
    assert gate.bodies == bodies


def test_a_message_that_waits_for_its_retry_says_so(collecting: Collecting) -> None:
    """Between two attempts a message is collected, with its attempts and reason; the next start continues with it."""
    collecting.put("a")
    with collecting.collector(lambda bulk: [ValueError("not yet")], backoff_s=2.0) as collector:
        outcome = wait_until(lambda: (seen := collector.outcome("a")).reason and seen, what="a failed attempt")
    assert (outcome.status, outcome.attempts, outcome.reason) == (COLLECTED, 1, "ValueError: not yet")
    with collecting.collector(Consumer()) as successor:
        [outcome] = wait_status(successor, SUCCEEDED, "a")
    assert outcome.attempts == 2


def test_given_up_messages_go_to_the_dead_letter_stream(collecting: Collecting, dead_stream: str) -> None:
    """After its last attempt a message is in the dead-letter stream as it was, with the reason, and is dead."""
    given = {"content_type": "text/plain", "timestamp": 1_700_000_000, "priority": 4}
    collecting.put("a", headers={"order_id": 4711}, **given)
    options: dict[str, Any] = {"attempts": 2, "backoff_s": 0.01, "dead_letter_stream": dead_stream}
    with collecting.collector(lambda bulk: [ValueError("bad")], **options) as collector:
        [outcome] = wait_status(collector, DEAD, "a")
    [message], [letter] = collecting.place.messages(), collecting.place.messages(dead_stream)
    assert (outcome.attempts, outcome.reason) == (2, "ValueError: bad")
    assert (letter.body, letter.properties) == (b"a", message.properties)
    assert dict(letter.headers) == {
        "order_id": 4711,
        "relatum_dead_reason": "ValueError: bad",
        "relatum_dead_stream": collecting.place.stream,
        "relatum_dead_offset": 0,
    }


@pytest.mark.parametrize(("start", "expected"), [("first", "abcd"), ("next", "d"), (2, "cd")])
def test_a_stream_is_followed_from_where_it_is_told(collecting: Collecting, start: Any, expected: str) -> None:
    """A stream that was never followed is followed from its first message, from now on, or from an offset."""
    collecting.put(*"abc")
    consumer = Consumer()
    with collecting.collector(consumer, start=start) as collector:
        wait_until(lambda: is_attached(collector, collecting.place.stream), what="the stream followed")
        collecting.put("d")
        wait_status(collector, SUCCEEDED, "d")
    assert consumer.bodies == list(expected)


def test_what_is_published_after_the_start_is_next(
    collecting: Collecting, layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From "next" on, a stream is read from its end at the start; a new stream or partition from its first message."""
    monkeypatch.setattr("relatum.collecting._following.PARTITIONS_S", 0.05)
    url, name, consumer = collecting.place.amqp, layout.super_stream, Consumer()
    missing, partition = unique_name(), f"{name}-new"
    collecting.put("old")
    with collecting.collector(consumer, start="next", streams=[collecting.place.stream, missing, name]) as collector:
        collecting.put("a")
        for stream, body in ((missing, "b"), (partition, "c")):
            declare_stream(url, stream)
            collecting.put(body, to=stream)
        add_partition(url, name, binding_key="new")
        wait_status(collector, SUCCEEDED, "a", "b", "c")
    delete_stream(url, missing)
    assert sorted(consumer.bodies) == ["a", "b", "c"]


def test_a_stream_that_cannot_be_read_does_not_stop_the_start(
    collecting: Collecting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its end is unknown at the start. The other streams are collected."""
    other, bounds = unique_name(), StreamReader.bounds

    def bounds_of(reader: StreamReader, stream: str) -> StreamBounds:
        if stream == other:
            raise errors.ChunkCorrupt("damaged", stream=stream)
        return bounds(reader, stream)

    monkeypatch.setattr(StreamReader, "bounds", bounds_of)
    with collecting.collector(Consumer(), start="next", streams=[collecting.place.stream, other]) as collector:
        collecting.put("a")
        wait_status(collector, SUCCEEDED, "a")


@pytest.mark.parametrize("start", ["next", 3])
def test_a_stream_is_recognised_before_its_first_message_was_collected(collecting: Collecting, start: Any) -> None:
    """A stream that is followed from its end on, and declared again before another message, is begun anew."""
    collecting.put(*"abc")
    consumer, stream = Consumer(), collecting.place.stream
    for _ in range(2):
        with collecting.collector(consumer, start=start) as collector:
            wait_until(lambda collector=collector: is_attached(collector, stream), what="the stream followed")
    collecting.place.declare_again()
    collecting.put("d")
    with collecting.collector(consumer, start=start) as collector:
        wait_status(collector, SUCCEEDED, "d")
    assert consumer.bodies == ["d"]


def test_a_stream_that_lost_its_end_and_then_the_rest_is_collected(collecting: Collecting) -> None:
    """A position that was set back belongs to the message before it, as any other."""
    consumer, stream = Consumer(), collecting.place.stream
    position = "SELECT position FROM relatum.collector_sources WHERE replaced_at IS NULL"
    collecting.put(*"abcd")
    with collecting.collector(consumer) as collector:
        wait_status(collector, SUCCEEDED, *"abcd")
    collecting.place.declare_again()
    collecting.put(*"ab")
    with collecting.collector(consumer) as again:
        wait_until(lambda: collecting.place.sql(position) == [(2,)], what="the position set back")
        wait_until(lambda: is_attached(again, stream), what="the stream followed")
        collecting.place.declare_again()
        collecting.put("x")
        wait_status(again, SUCCEEDED, "x")
    assert consumer.bodies == [*"abcd", "x"]


BEGIN_ANEW = """
UPDATE relatum.collector_sources SET replaced_at = now(), member_id = NULL
WHERE stream = :stream AND replaced_at IS NULL
  AND collector_id IN (SELECT collector_id FROM relatum.collectors WHERE name = :collector)
"""
"""What the page of the collector says."""


def test_it_is_said_that_start_does_not_count(collecting: Collecting, caplog: pytest.LogCaptureFixture) -> None:
    """A stored position overrides `start=`, which is logged; without one the collector begins at `start=`."""
    collecting.put("a", "b")
    stream = collecting.place.stream

    def consume() -> tuple[int, list[str]]:
        caplog.clear()
        consumer = Consumer()
        with caplog.at_level("INFO", "relatum.collector"), collecting.collector(consumer, start=1) as collector:
            wait_until(lambda: is_attached(collector, stream), what="the stream followed")
            wait_status(collector, SUCCEEDED, "b")
        return sum("start= is only for" in record.getMessage() for record in caplog.records), consumer.bodies

    assert consume() == (0, ["b"])
    assert consume() == (1, [])
    collecting.place.sql(BEGIN_ANEW, collector="billing", stream=stream)
    assert consume() == (0, ["b"])


@pytest.mark.parametrize(
    ("before", "after", "consumed"),
    [(["a", "b"], ["c", "d", "e"], "abcde"), ([*"abcdef"], [*"abcd", "g"], "abcdefg")],
    ids=["another", "lost its end"],
)
def test_a_stream_declared_again_is_collected_from_where_both_agree(
    collecting: Collecting, before: list[str], after: list[str], consumed: str
) -> None:
    """Messages that are the same in the new stream are not consumed again; all other messages are."""
    consumer = Consumer()
    collecting.put(*before)
    with collecting.collector(consumer) as collector:
        wait_status(collector, SUCCEEDED, *before)
    collecting.place.declare_again()
    collecting.put(*after)
    with collecting.collector(consumer) as again:
        wait_status(again, SUCCEEDED, *after)
        wait_status(again, SUCCEEDED, *before)
    assert consumer.bodies == list(consumed)


def test_a_stream_is_set_back_by_its_leaders_word_alone(
    collecting: Collecting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the leader is unreachable, another node that has fewer messages discards none of those collected."""
    collecting.put("a", "b")
    with collecting.collector(Consumer()) as collector:
        wait_status(collector, SUCCEEDED, "a", "b")
        stream = collector._shared.following.streams[collecting.place.stream]
        monkeypatch.setattr(StreamReader, "bounds", lambda _reader, _stream: StreamBounds(0, 0))
        with pytest.raises(StreamUnavailable):
            stream._set_back(collector._shared.member)
    sources = "SELECT position, replaced_at FROM relatum.collector_sources"
    assert collecting.place.sql(sources) == [(2, None)]


def test_a_stream_is_begun_by_its_leaders_word_alone(collecting: Collecting, monkeypatch: pytest.MonkeyPatch) -> None:
    """While the leader is unreachable, no message is passed over that another node has dropped."""
    collecting.put("a", "b", "c")
    monkeypatch.setattr(StreamReader, "bounds", lambda _reader, _stream: StreamBounds(2, 2))
    consumer = Consumer()
    with collecting.collector(consumer) as collector:
        wait_status(collector, SUCCEEDED, "c")
    assert consumer.bodies == ["a", "b", "c"]


@pytest.mark.usefixtures("quick_rhythm")
@pytest.mark.parametrize(
    "tamper",
    [
        None,
        "UPDATE relatum.collector_sources SET member_id = NULL",
        "UPDATE relatum.collector_sources SET member_id = NULL; DELETE FROM relatum.collector_members",
    ],
    ids=["declared again", "another's", "another's, and the member is gone"],
)
def test_a_stream_that_is_not_what_it_was_is_begun_anew_while_it_is_followed(
    collecting: Collecting, tamper: str | None
) -> None:
    """A collector that follows a replaced stream, or loses its membership, consumes each new message once."""
    consumer = Consumer()
    with collecting.collector(consumer, lease_s=LEASE_S) as collector:
        for body in "ab":
            collecting.put(body)
            wait_status(collector, SUCCEEDED, body)
        collecting.place.sql(tamper) if tamper else collecting.place.declare_again()
        for body in "cd":
            collecting.put(body)
            wait_status(collector, SUCCEEDED, body)
    assert consumer.bodies == list("abcd")


@pytest.mark.usefixtures("quick_rhythm")
@pytest.mark.parametrize("collected", [0, 1])
def test_a_stream_that_another_member_began_anew_is_collected_whatever_is_held(
    collecting: Collecting, collected: int
) -> None:
    """Held messages of the old stream are dropped, and those at the same offsets of the new one consumed."""
    stream, consumer = collecting.place.stream, Consumer()
    collecting.put(*"abc")
    with collecting.collector(consumer, lease_s=LEASE_S, **FOREVER) as collector:
        wait_status(collector, COLLECTED, *"abc")
        # It has more types, so the first one has to release the stream to it.
        other = StoreMember(collecting.place.database, types=["order", "mail"])
        collecting.put("d")
        wait_until(lambda: other.follow(stream, 0), what="the stream left to the other member")
        collecting.place.declare_again()
        other.rewind(stream, 0, is_new=True)
        assert other.follow(stream, 0) is not None
        collecting.put(*"xyz")
        entries = [Collected(MessageId(stream, n), "xyz"[n], "order", 1, None) for n in range(collected)]
        other.add(entries, Advance(stream, 0, collected))
        other.close()
        wait_status(collector, COLLECTED, *"xyz")
        wait_until(lambda: collector.flush() or len(consumer.bodies) == 3, what="all consumed")
    assert sorted(consumer.bodies) == list("xyz")
    wait_status(other, SUCCEEDED, *"xyz")


@pytest.mark.parametrize("of_all", [False, True])
def test_a_stream_that_cannot_be_read_is_another_member_s_to_try(
    collecting: Collecting, of_all: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is left, which is said, and followed again after a pause; what came behind that is released."""
    stream, left, released = collecting.place.stream, list[str](), list[object]()
    with caplog.at_level("WARNING", "relatum.collector"), collecting.collector(Consumer()) as collector:
        wait_until(lambda: is_attached(collector, stream), what="the stream followed")
        following, store = collector._shared.following, collector._shared.store
        unfollow, done = store.unfollow, following.follower.done
        monkeypatch.setattr(store, "unfollow", lambda member, name: left.append(name) or unfollow(member, name))
        monkeypatch.setattr(following.follower, "done", lambda *events: released.extend(events) or done(*events))
        events = [Failed(None if of_all else stream, 0, errors.BrokerUnavailable("away")), Attached(stream, 0, 0)]
        collector._shared.loop.call(lambda: list(map(following._on_event, events)))
        wait_until(lambda: left and is_attached(collector, stream), what="the stream left, and followed again")
        collecting.put("a")
        wait_status(collector, SUCCEEDED, "a")
    assert (left[0], events[1] in released) == (stream, True)
    assert "is unavailable; retrying" in caplog.text


def test_retention_that_was_faster_is_noticed(collecting: Collecting, caplog: pytest.LogCaptureFixture) -> None:
    """A warning names the offsets of messages that retention dropped before they were collected."""
    place, numbers = collecting.place, count()
    place.declare_again(x_max_length_bytes=2000, x_stream_max_segment_size_bytes=1000)
    member = StoreMember(place.database, lease_s=0.2)
    member.follow(place.stream, 0)
    member.close()

    def first_offset() -> int:
        collecting.put(f"{next(numbers):03}" + "x" * 500)
        return place.bounds().first or 0

    wait_until(lambda: first_offset() > 0, what="messages dropped by retention")
    newest, consumer = f"{next(numbers) - 1:03}", Consumer()
    with caplog.at_level("WARNING", "relatum.collector"), collecting.collector(consumer) as collector:
        wait_until(lambda: consumer.bodies and consumer.bodies[-1].startswith(newest))
        first = collector.outcome(consumer.bodies[0][:200]).offset
    [record] = [record for record in caplog.records if "retention" in record.getMessage()]
    assert (vars(record)["from"], vars(record)["to"]) == (0, first)


def test_a_queue_is_refused_and_a_missing_stream_waited_for(
    collecting: Collecting, channel: BlockingChannel, copies: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A collector refuses to follow a queue; it waits for a missing stream and logs the name once."""
    place, queue = collecting.place, unique_name("queue")
    channel.queue_declare(queue, exclusive=False, auto_delete=True, durable=True)
    with pytest.raises(errors.NotAStream, match=queue):
        collecting.collector(Consumer(), streams=[place.stream, queue]).start()
    channel.queue_delete(queue)

    def warnings() -> list[str]:
        records = [record.getMessage() for record in caplog.records if record.name == "relatum.collector"]
        return [message for message in records if f"There is no stream {copies!r}" in message]

    collector = collecting.collector(Consumer(), streams=[copies])
    with caplog.at_level("WARNING", "relatum.collector"), collector:
        wait_until(warnings, what="a warning")
        declare_stream(place.amqp, copies)
        collecting.put("a", to=copies)
        wait_status(collector, SUCCEEDED, "a")
    assert len(warnings()) == 1


def test_what_cannot_work_is_refused(collecting: Collecting, layout: Layout) -> None:
    """A collector is refused without a broker, executor or dead-letter stream, or with a wrong one, or its own."""
    for options in ({"streams": ["orders"]}, {"dead_letter_stream": "dead"}):
        with pytest.raises(errors.ConfigurationError, match="broker"):
            MessageCollector("billing", database=NOWHERE, **options)  # type: ignore[arg-type]
    with pytest.raises(errors.ConfigurationError, match="amqp"):
        MessageCollector("billing", database=NOWHERE, broker="rabbitmq-stream://localhost/", dead_letter_stream="dead")
    alone = MessageCollector("billing", database=NOWHERE)
    with pytest.raises(errors.ConfigurationError, match="broker"):
        alone.register_executor("order", Consumer(), ExecutorOptions(when_full="spill"))
    with pytest.raises(errors.InvalidInput, match="called"):
        alone.register_executor("order", "no executor")  # type: ignore[arg-type]
    alone.register_executor("order", Consumer())
    with pytest.raises(errors.InvalidInput, match="already"):
        alone.register_executor("order", Consumer())
    with pytest.raises(errors.ConfigurationError, match="executor"):
        collecting.collector().start()
    with pytest.raises(errors.StreamNotFound):
        collecting.collector(Consumer(), dead_letter_stream=unique_name("missing")).start()
    with pytest.raises(errors.ConfigurationError, match="forever"):
        collecting.collector(dead_letter_stream=collecting.place.stream)
    partition = layout.partitions[0].stream
    collector = collecting.collector(Consumer(), streams=[layout.super_stream], dead_letter_stream=partition)
    with pytest.raises(errors.ConfigurationError, match="forever"):
        collector.start()


@pytest.mark.usefixtures("quick_rhythm")
def test_a_member_with_more_types_takes_over(collecting: Collecting) -> None:
    """A new version that knows another type follows from the first such message on; none is passed over, or doubled."""
    consumer = Consumer()
    first, second = (collecting.collector(consumer, lease_s=LEASE_S) for _ in range(2))
    second.register_executor("mail", consumer, ExecutorOptions(max_age_s=0.01))
    with first:
        collecting.put("nobody's", type_="mail")
        collecting.put("a")
        wait_status(first, SUCCEEDED, "a")
        with second:
            collecting.put(*"bc", type_="mail")
            collecting.put(*"de")
            wait_status(first, SUCCEEDED, *"bcde")
        collecting.put("late", type_="mail")
        collecting.put("f")
        wait_status(first, SUCCEEDED, "f")
        assert {first.outcome(each).status for each in ("nobody's", "late")} == {UNKNOWN}
    assert sorted(consumer.bodies) == list("abcdef")


@pytest.mark.usefixtures("quick_rhythm")
def test_messages_of_a_dead_member_are_taken_over(collecting: Collecting, engine: sa.Engine, dead_stream: str) -> None:
    """They are consumed again; those that are gone fail, and those that seem to kill collectors are given up."""
    collecting.put(*"abcde")
    stream, dead = collecting.place.stream, StoreMember(collecting.place.database, lease_s=LEASE_S)
    places = [MessageId(stream, offset) for offset in (0, 1, 2, 3, 4, 99)]
    names = ("a", "b", "c", "another", "e", "dropped")
    entries = [Collected(each, name, "order", 1, None) for each, name in zip(places, names, strict=True)]
    assert dead.follow(stream, 0) is not None
    dead.add(entries, Advance(stream, 0, 100))
    dead.forward(7, places[:2])
    most = 3 + CRASHES_MAX
    for name, attempts in (("b", most - 1), ("e", most)):
        set_attempts = "UPDATE relatum.collected_messages SET attempts = :attempts WHERE message_id = :name"
        collecting.place.sql(set_attempts, attempts=attempts, name=name)
    let_lapse(engine)
    consumer = Consumer()
    with collecting.collector(consumer, streams=[], attempts=3, dead_letter_stream=dead_stream) as collector:
        outcomes = wait_status(collector, SUCCEEDED, *"abc")
        failed = wait_status(collector, FAILED, "another", "dropped")
        [given_up] = wait_status(collector, DEAD, "e")
    assert sorted(consumer.bodies) == ["a", "b", "c"]
    assert [outcome.attempts for outcome in outcomes] == [2, most, 1]
    assert (failed[0].reason, (failed[1].reason or "")[:9]) == ("expired: another message is there now", "expired: ")
    assert "died" in (given_up.reason or "")
    assert [each.body for each in collecting.place.messages(dead_stream)] == [b"e"]


def test_messages_of_collect_that_are_not_stored_are_lost_to_no_stream(
    collecting: Collecting, caplog: pytest.LogCaptureFixture
) -> None:
    """A collector that closes before it stored messages of `collect` names them; its stream collects them later."""
    collector, stream = collecting.collector(Consumer()), collecting.place.stream
    properties = pika.BasicProperties(type="order", message_id="a")
    given = [Message.from_amqp(name, 0, properties, b"a") for name in ("  first", stream)]
    add = "INSERT INTO relatum.collector_sources (collector_id, stream) SELECT collector_id, %s FROM relatum.collectors"
    with psycopg.connect(collecting.place.database) as gate:
        collector.start()
        wait_until(lambda: is_attached(collector, stream), what="the stream followed")
        gate.execute(add, ["  first"])
        assert collector.collect_many(given) == [True, True]
        collecting.put("a")
        assert not collector.close(0)
        gate.rollback()
    assert f"could not store 2 messages:   first@0, {stream}@0: the collector was closed" in caplog.text
    with collecting.collector(Consumer()) as heir:
        wait_status(heir, SUCCEEDED, "a")


@pytest.mark.usefixtures("quick_rhythm")
def test_a_commit_in_doubt_leaves_no_message_to_nobody(collecting: Collecting, monkeypatch: pytest.MonkeyPatch) -> None:
    """A message is consumed whose commit was not answered before another member followed the stream."""
    collector, other = collecting.collector(Consumer(), lease_s=LEASE_S), StoreMember(collecting.place.database)
    store = collector._shared.store
    add = store.add

    def add_in_doubt(*given: Any) -> None:
        monkeypatch.setattr(store, "add", add)
        add(*given)
        collecting.place.sql("UPDATE relatum.collector_sources SET member_id = :member", member=other.member)
        raise errors.DatabaseUnavailable("no answer")

    with collector:
        wait_until(lambda: is_attached(collector, collecting.place.stream), what="the stream followed")
        monkeypatch.setattr(store, "add", add_in_doubt)
        collecting.put("a")
        wait_status(collector, SUCCEEDED, "a")


@pytest.mark.usefixtures("quick_rhythm")
def test_a_stream_that_is_unavailable_holds_up_no_other(
    collecting: Collecting, copies: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Messages whose bodies cannot be read now wait, and those of other streams are consumed; that is logged once."""
    place, read_all = collecting.place, StreamReader.read_all
    declare_stream(place.amqp, copies)
    collecting.put("a")
    collecting.put("b", to=copies)
    dead = StoreMember(place.database)
    for name, stream in (("b", copies), ("a", place.stream)):
        dead.add([Collected(MessageId(stream, 0), name, "order", 1, None)])
    dead.close()

    def read_some(reader: StreamReader, ids: Any, **options: Any) -> Any:
        if copies in {stream for stream, _ in ids}:
            raise errors.StreamUnavailable("no leader", stream=copies)
        return read_all(reader, ids, **options)

    with monkeypatch.context() as patch, caplog.at_level("INFO", "relatum.collector"):
        patch.setattr(StreamReader, "read_all", read_some)
        with collecting.collector(Consumer(), streams=[], max_age_s=0.2) as collector:
            wait_status(collector, SUCCEEDED, "a")
            assert collector.outcome("b").status is COLLECTED
            patch.undo()
            wait_status(collector, SUCCEEDED, "b")
    reading = f"reading messages of stream {copies!r}"
    said = [record.getMessage() for record in caplog.records if reading in record.getMessage()]
    assert ["will retry" in each for each in said] == [True, False]


def test_a_stream_that_cannot_be_read_hides_no_status(collecting: Collecting, channel: BlockingChannel) -> None:
    """Its lag is unknown; all else is shown."""
    place, queue = collecting.place, unique_name("queue")
    channel.queue_declare(queue, exclusive=False, auto_delete=True, durable=True)
    collecting.put("a")
    member = StoreMember(place.database)
    for stream in (queue, place.stream):
        member.follow(stream, 0)
    [status] = collector_status(place.database, broker=place.amqp)
    assert {each.stream: each.lag_offsets for each in status.sources} == {queue: None, place.stream: 1}


@pytest.mark.usefixtures("quick_rhythm")
def test_without_a_broker_nothing_is_taken_over(collecting: Collecting, engine: sa.Engine) -> None:
    """A member that cannot read the bodies of a dead member's messages leaves them to one that can."""
    collecting.put("a")
    stream, dead = collecting.place.stream, StoreMember(collecting.place.database, lease_s=LEASE_S)
    dead.add([Collected(MessageId(stream, 0), "a", "order", 1, None)])
    let_lapse(engine)
    options: dict[str, Any] = {"streams": [], "lease_s": LEASE_S, "backoff_s": 0.0}
    leases, lease = set[Any](), "SELECT max(lease_expires_at) FROM relatum.collector_members"
    with collecting.collector(Consumer(), broker=None, **options) as collector:
        wait_until(lambda: leases.update(collecting.place.sql(lease)) or len(leases) > 5, what="time to take it over")
        outcome = collector.outcome("a")
    assert (outcome.status, outcome.attempts) == (COLLECTED, 0)
    with collecting.collector(Consumer(), **options) as collector:
        wait_status(collector, SUCCEEDED, "a")


@pytest.mark.parametrize("where", ["executor", "collected", "succeeded"])
def test_it_may_be_closed_from_inside(collecting: Collecting, where: str) -> None:
    """`close` from an executor or a handler returns False, and closes in the background once the message is stored."""
    collecting.put("a")
    answers: list[bool] = []

    def close_at(place: str) -> None:
        if place == where:
            answers.append(collector.close(timeout_s=90))

    collector = collecting.collector(lambda bulk: close_at("executor"), max_age_s=0.05)
    collector.register_result_handler(lambda outcome: close_at(outcome.status.value))
    collector.start()
    wait_until(lambda: answers == [False], what="closed from inside")
    assert collector.close(timeout_s=90)
    assert collecting.place.sql("SELECT state FROM relatum.collected_messages") == [("succeeded",)]


def test_a_handler_of_collected_does_not_wait_for_what_comes_after_it(collecting: Collecting) -> None:
    """Storing continues after the handler only: flushing there, and giving messages to a full type, must not wait."""
    collecting.put(*"abcdef")
    first, *others = collecting.place.messages()
    given: list[bool] = []

    def give(outcome: Outcome) -> None:
        if outcome.status is COLLECTED and not given:
            given.extend(collector.collect(message) for message in others)
            collector.flush()

    collector = collecting.collector(lambda bulk: None, streams=[], bulk_messages=1, queue_bulks=2, max_age_s=1.0)
    collector.register_result_handler(give)
    with collector:
        assert collector.collect(first)
        wait_until(lambda: len(given) == 5, what="all messages offered")
        wait_until(lambda: collector.statistics().held_messages == 0, what="what was taken is consumed")
        assert given == [True, False, False, False, False]


def test_a_handler_that_exits_ends_no_thread(collecting: Collecting) -> None:
    """`SystemExit` would end the thread that stores, and nobody would notice."""
    told: list[str] = []

    def leave(outcome: Outcome) -> None:
        told.append(f"{outcome.message_id} {outcome.status.value}")
        sys.exit(3)

    collector = collecting.collector(lambda bulk: None, max_age_s=0.05)
    collector.register_result_handler(leave)
    with collector:
        for body in "ab":
            collecting.put(body)
            wait_until(lambda each=body: f"{each} succeeded" in told, what="the message consumed")


RUN_UNTIL_INTERRUPTED = """
import signal, sys, threading
from relatum import MessageCollector
from relatum.collecting import ExecutorOptions
# A shell has what it starts in the background ignore it.
signal.signal(signal.SIGINT, signal.default_int_handler)
collector = MessageCollector("billing", database=sys.argv[1], broker=sys.argv[2], streams=[sys.argv[3]])
collector.register_executor("order", lambda bulk: None, ExecutorOptions(max_age_s=600.0))
collector.register_result_handler(lambda outcome: print(outcome.status.value, flush=True))
try:
    collector.run(threading.Event())
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


def test_running_until_interrupted_closes(collecting: Collecting) -> None:
    """Ctrl-C is an orderly stop: what is in a bulk is consumed before."""
    collecting.put("a")
    place = collecting.place
    arguments = [sys.executable, "-c", RUN_UNTIL_INTERRUPTED, place.database, place.amqp, place.stream]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "collected\n"
            process.send_signal(signal.SIGINT)
            assert process.communicate(timeout=90)[0].split() == ["succeeded", "interrupted"]
        finally:
            process.kill()


def test_a_collector_closes_although_its_database_was_closed_first(
    collecting: Collecting, caplog: pytest.LogCaptureFixture
) -> None:
    """The lease cannot be released, which is logged, and all else is closed."""
    with closing(Database(collecting.place.database)) as database:
        collector = collecting.collector(Consumer(), database=database)
        collector.start()
        reader = collector._streams._reader
    with caplog.at_level("INFO", "relatum.collector"):
        assert collector.close()
    assert "could not release its lease" in caplog.text
    assert reader._nodes.pool.is_closed


@pytest.mark.usefixtures("quick_rhythm")
def test_a_lease_that_was_released_is_not_renewed(collecting: Collecting, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others take over at once what a collector leaves behind, however long its connections take to close."""
    collecting.put("a")
    with collecting.collector(lambda bulk: [ValueError("not yet")], backoff_s=60.0, lease_s=LEASE_S) as collector:
        wait_until(lambda: collector.outcome("a").reason, what="a failed attempt")
        close = collector._streams.close
        # Not a wait for a condition: time for several renewals.
        monkeypatch.setattr(collector._streams, "close", lambda: time.sleep(1.0) or close())
    assert collecting.place.sql("SELECT lease_expires_at < now() FROM relatum.collector_members") == [(True,)]


def test_joined_executors_do_not_keep_the_lease_from_being_renewed(collecting: Collecting) -> None:
    """Any number of joined executors hold a connection each while they run."""
    workers, gate = 24, Gate()
    collecting.put(*map(str, range(workers)))

    def wait(bulk: Bulk) -> None:
        assert bulk.connection is not None
        bulk.connection.execute(sa.text("SELECT 1"))
        gate(bulk)

    options = {"bulk_messages": 1, "workers": workers, "queue_bulks": workers, "joins_transaction": True}
    with collecting.collector(wait, **options) as collector, gate.closed():
        wait_until(lambda: len(gate.bulks) == workers, what="all executors at once")
        assert collector.outcome("0").status is FORWARDED


@pytest.mark.usefixtures("quick_rhythm")
def test_messages_that_cannot_be_deleted_now_cost_no_lease(collecting: Collecting) -> None:
    """The lease is renewed while the deletion of finished messages waits, for example for another member's."""
    collecting.put("a")
    leases, lease = set[Any](), "SELECT lease_expires_at FROM relatum.collector_members"
    with collecting.collector(Consumer(), keep_s=60, lease_s=LEASE_S) as collector:
        wait_status(collector, SUCCEEDED, "a")
        make_commits_wait(collecting.place.engine, "DELETE ON relatum.collected_messages")
        with commits_held(collecting.place.engine):
            collecting.place.sql("UPDATE relatum.collected_messages SET finished_at = now() - interval '1 hour'")
            wait_until(lambda: leases.update(collecting.place.sql(lease)) or len(leases) > 8, what="renewals")
        wait_until(lambda: collector.outcome("a").status is UNKNOWN, what="the message deleted")


@pytest.mark.usefixtures("quick_rhythm")
def test_joined_executors_that_hold_all_connections_cost_no_lease(collecting: Collecting) -> None:
    """The lease is renewed and other results are stored while joined executors use all connections of a `Database`."""
    collecting.put("a", "b")
    collecting.put("c", type_="mail")
    gate = Gate()
    members, leases = "SELECT member_id, lease_expires_at FROM relatum.collector_members", set[Any]()
    options = {"bulk_messages": 1, "workers": 2, "joins_transaction": True, "lease_s": LEASE_S}
    with closing(Database(collecting.place.database, connections_max=2)) as database:
        collector = collecting.collector(gate, database=database, **options)
        collector.register_executor("mail", gate.wait, ExecutorOptions(max_age_s=0.01))
        with collector:
            with gate.closed():
                wait_until(lambda: len(gate.bulks) == 2, what="both executors at once")
                wait_until(lambda: leases.update(collecting.place.sql(members)) or len(leases) > 3, what="renewals")
                assert len({member for member, _ in leases}) == 1
                assert database.pool.in_use >= 2
            outcomes = wait_status(collector, SUCCEEDED, *"abc")
    assert [outcome.attempts for outcome in outcomes] == [1, 1, 1]


def test_executors_that_keep_the_interpreter_busy_cost_no_lease(collecting: Collecting) -> None:
    """The loop and the lease have to wait for their turn, and have it in time: nobody takes over what they consume."""
    workers, lease_s = 4, 2.0

    def calculate(bulk: Bulk) -> None:
        until = time.monotonic() + 2 * lease_s
        while time.monotonic() < until:
            sum(range(1000))

    options = {"bulk_messages": 1, "workers": workers, "queue_bulks": workers, "lease_s": lease_s}

    def is_kept() -> bool:
        taken, names = Consumer(), [unique_name() for _ in range(workers)]
        collecting.put(*names)
        with collecting.collector(calculate, **options) as collector, collecting.collector(taken, lease_s=lease_s):
            outcomes = wait_status(collector, SUCCEEDED, *names)
        return ({outcome.attempts for outcome in outcomes}, taken.bodies) == ({1}, [])

    in_a_try(is_kept, 3, what="the lease kept")


def test_streams_have_no_threads_of_their_own(collecting: Collecting) -> None:
    """Twelve streams are followed by the same kinds of threads as one is, and each is collected."""
    told: list[str] = []

    def threads(streams: list[str], what: str) -> Counter[str]:
        collector = collecting.collector(lambda bulk: None, name=what, streams=streams, max_age_s=0.05)
        collector.register_result_handler(lambda outcome: told.append(f"{outcome.message_id} {outcome.status.value}"))
        before = Threads()
        with collector:
            wait_until(lambda: {f"{name} succeeded" for name in streams} <= set(told), what="all consumed")
            return Counter(each.name.replace(what, "") for each in before.begun())

    def lasting(begun: Counter[str]) -> set[str]:
        # The others end when they have nothing to do.
        return {
            name for name in begun if not name.endswith(("-asks", "-resolving", "-stores", "-order", "-connecting"))
        }

    with new_streams(collecting.place.amqp, 12) as names:
        for name in names:
            collecting.put(name, to=name)
        few, many = threads(names[:1], "few"), threads(names, "many")
        assert lasting(few) == lasting(many)
        # How many threads of a kind have begun depends on the moment, but there are fewer than streams.
        assert max(many.values()) < len(names)


@pytest.mark.usefixtures("quick_rhythm")
def test_a_broker_that_hangs_costs_no_lease(collecting: Collecting, monkeypatch: pytest.MonkeyPatch) -> None:
    """Partitions are looked for beside what renews the lease."""
    looked, gate, renewed = threading.Event(), threading.Event(), []

    def look() -> list[str]:
        looked.set()
        assert gate.wait(90)
        return []

    monkeypatch.setattr("relatum.collecting._following.PARTITIONS_S", 0.05)
    collector = collecting.collector(lambda bulk: None, lease_s=LEASE_S)
    renew: Callable[[int], bool] = collector._shared.store.renew
    monkeypatch.setattr(collector._shared.store, "renew", lambda member: renewed.append(member) or renew(member))
    with collector:
        monkeypatch.setattr(collector._streams, "find", look)
        assert looked.wait(90)
        before = len(renewed)
        wait_until(lambda: len(renewed) > before + 2, what="the lease renewed")
        gate.set()
    assert len(set(renewed)) == 1
