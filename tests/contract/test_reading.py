"""What reading a stream promises, over every face."""

import contextlib
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import pytest
from pika.exceptions import ChannelClosedByBroker

from relatum import MessageId, errors
from relatum.reading import ChunkCache, Message, StreamBounds, StreamReader, TimeSource
from tests.contract._faces import Face, open_face, ways
from tests.support import LIMIT_S, broker_connection, delete_stream, new_streams, publish_plain, unique_name, wait_until
from tests.support._raw_publisher import RawPublisher, uncompressed
from tests.support.raising import raising

IDLE_S = 3.0
"""Seconds in which a message that is there surely comes."""

COUNT = 1000
LAST = COUNT - 1


def fill(amqp_url: str, stream: str, count: int, *, confirm: bool = False) -> None:
    """Publish `count` messages, each with its number as body and as header `n`."""
    publish_plain(amqp_url, stream, [(str(n).encode(), {"n": n}) for n in range(count)], confirm=confirm)
    with open_face("blocking", amqp_url) as reader:
        wait_until(lambda: len(reader.iterate(stream)) >= count, what="the messages in the stream")


@pytest.fixture(scope="module")
def numbered(amqp_url: str) -> Iterator[str]:
    with new_streams(amqp_url, 1) as (name,):
        fill(amqp_url, name, COUNT)
        yield name


@pytest.fixture(scope="module")
def streams(amqp_url: str) -> Iterator[list[str]]:
    """More streams than are asked for in one go, each with a message more than the one before."""
    with new_streams(amqp_url, 10) as names:
        for count, name in enumerate(names, 1):
            fill(amqp_url, name, count)
        yield names


@pytest.fixture
def classic(amqp_url: str) -> Iterator[str]:
    name = unique_name("classic")
    with broker_connection(amqp_url) as connection:
        connection.channel().queue_declare(name, durable=True)
    publish_plain(amqp_url, name, [b"mine"])
    yield name
    delete_stream(amqp_url, name)


def numbers(messages: list[Message]) -> list[int]:
    return [message.headers["n"] for message in messages]


def test_each_offset_gives_its_message(face: Face, numbered: str) -> None:
    """A message read at an offset is at that offset and is the one published there."""
    for offset in (*range(0, COUNT, 50), LAST):
        message = face.read(numbered, offset)
        assert (message.id, message.headers["n"]) == (MessageId(numbered, offset), offset)
        assert message.body == str(offset).encode()
    # Integers of other libraries are offsets, too.
    one: Any = np.int64(1)
    assert face.read(numbered, one).offset == 1
    assert [each.offset for each in face.read_many([MessageId(numbered, one)])] == [1]


def test_what_is_not_there_is_not_found_and_says_where_the_end_is(face: Face, numbered: str, stream_name: str) -> None:
    """After the last message, not an offset, or any of an empty stream: an error, not a wait; reading continues."""
    beyond = (COUNT, COUNT + 1000, 2**63 - 1)
    for stream, offset, last in (*((numbered, each, LAST) for each in beyond), (stream_name, 0, None)):
        with raising(errors.OffsetNotFound, stream=stream, offset=offset, last=last):
            face.read(stream, offset)
        assert face.read(numbered, 1).body == b"1"
    for offset in (-1, 2**63, 2**70):
        with pytest.raises(errors.OffsetNotFound):
            face.read(numbered, offset)


def test_a_missing_stream(face: Face, numbered: str) -> None:
    """A stream that does not exist is named in the error, and the next read answers."""
    name = unique_name("missing")
    for attempt in ways(face, name):
        with raising(errors.StreamNotFound, stream=name):
            attempt()
        assert face.read(numbered, 1).body == b"1"


def test_a_queue_is_not_a_stream(face: Face, amqp_url: str, classic: str) -> None:
    """A queue of another kind, or another connection's own, is distinguished from a missing stream and not touched."""
    with broker_connection(amqp_url) as connection:
        channel, others = connection.channel(), unique_name("others")
        channel.queue_declare(others, exclusive=True)
        for name in (classic, others):
            for attempt in ways(face, name):
                with pytest.raises(errors.NotAStream):
                    attempt()
            (result,) = face.read_many([MessageId(name, 0)])
            assert isinstance(result, errors.NotAStream)
        method, _, body = channel.basic_get(classic)
    assert (body, method.redelivered) == (b"mine", False)


@pytest.fixture
def restless_stream(amqp_url: str) -> Iterator[str]:
    name, ended = unique_name(), threading.Event()

    def declare_and_delete() -> None:
        with broker_connection(amqp_url) as connection:
            channel = connection.channel()
            while not ended.is_set():
                channel.queue_declare(name, durable=True, arguments={"x-queue-type": "stream"})
                channel.queue_delete(name)

    with ThreadPoolExecutor(1) as thread:
        declaring = thread.submit(declare_and_delete)
        yield name
        ended.set()
        declaring.result()


def test_a_stream_that_is_declared_again(face: Face, restless_stream: str, is_long: bool) -> None:
    """A stream that is deleted and declared again is there, missing or unavailable, and never another kind of queue."""
    limit, questions = time.monotonic() + (10.0 if is_long else 1.0), 0
    while time.monotonic() < limit:
        questions += 1
        with contextlib.suppress(errors.StreamNotFound, errors.Transient):
            face.bounds(restless_stream)
    assert questions


@pytest.mark.parametrize(
    ("code", "text", "kind"),
    [
        (404, "NOT_FOUND - no queue 's' in vhost '/'", errors.StreamNotFound),
        (404, "NOT_FOUND - home node 'r1@h' of durable queue 's' is down or inaccessible", errors.StreamUnavailable),
        (406, "PRECONDITION_FAILED - queue 's' does not have a replica on the local node", errors.Transient),
        (406, "PRECONDITION_FAILED - stream queue 's' in vhost '/' does not have a running replica", errors.Transient),
        (406, "PRECONDITION_FAILED - invalid arg 'x-stream-offset' for queue 's'", errors.NotAStream),
        (405, "RESOURCE_LOCKED - cannot obtain exclusive access to locked queue 's'", errors.NotAStream),
    ],
)
def test_what_a_node_says_of_a_stream(
    face_name: str, amqp_url: str, code: int, text: str, kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only "no queue" says that there is no such stream; nodes that start give other reasons, seen on 3.10 and 4.3."""

    @contextlib.contextmanager
    def refused(*_: object) -> Iterator[None]:
        raise ChannelClosedByBroker(code, text)
        yield

    monkeypatch.setattr("relatum.reading._amqp.asking", refused)
    with open_face(face_name, amqp_url, timeout_s=3.0) as face, pytest.raises(kind):
        face.bounds(unique_name())


def test_what_retention_dropped_has_expired(face: Face, amqp_url: str, short_stream: str) -> None:
    """An offset below the first one retained has expired; the error says where the stream begins now."""
    publish_plain(amqp_url, short_stream, [b"x" * 1000 for _ in range(600)], confirm=True)
    first = wait_until(lambda: face.bounds(short_stream).first, what="retention")
    with pytest.raises(errors.OffsetExpired) as caught:
        face.read(short_stream, 0)
    assert caught.value.first >= first > 0
    results = face.read_many([MessageId(short_stream, 0), MessageId(short_stream, 599)])
    assert isinstance(results[0], errors.OffsetExpired)
    assert face.iterate(short_stream, 0)[0].offset >= first


def test_bounds_of_streams(face: Face, numbered: str, streams: list[str], stream_name: str, classic: str) -> None:
    """Bounds are the same asked for one by one or together, which leaves out what is empty, missing or no stream."""
    assert face.bounds(numbered) == StreamBounds(0, LAST)
    assert face.bounds(stream_name) == StreamBounds(None, None)
    found = face.all_bounds([streams[0], unique_name("missing"), stream_name, classic, *streams[1:]])
    assert found == {name: face.bounds(name) for name in streams}
    assert found == {name: StreamBounds(0, last) for last, name in enumerate(streams)}
    assert face.all_bounds([]) == {}
    # For the last offsets alone: the first offset is 0, since it was not requested.
    lasts = face.all_bounds(streams, lasts=streams[1:])
    assert lasts == found
    assert all(bounds.is_proven for bounds in lasts.values())


def test_the_bounds_of_a_stream_that_retention_emptied(amqp_url: str, stream_url: str, short_stream: str) -> None:
    """The broker's own entries are counted there, and are not messages."""
    with RawPublisher(stream_url, short_stream) as publisher:
        publisher.publish(uncompressed([b"\0\x53\x75\xb0" + (200_000).to_bytes(4) + bytes(200_000)]))
        publisher.store_offset("somebody", 0)
    with StreamReader.open(stream_url) as reader:
        wait_until(lambda: reader.bounds(short_stream) == StreamBounds(None, None), what="retention")
        publish_plain(amqp_url, short_stream, [b"more"])
        assert reader.bounds(short_stream) == StreamBounds(2, 2)


def test_an_iteration_gives_what_is_between_its_ends(face: Face, numbered: str) -> None:
    """An iteration gives each message between its ends once and in order, and can be left in the middle."""
    now = datetime.now(UTC)
    everything = face.iterate(numbered)
    assert [message.offset for message in everything] == numbers(everything) == list(range(COUNT))
    for start, options, expected in (
        (17, {"stop": 23}, range(17, 23)),
        (17, {"stop": 23, "follow": True}, range(17, 23)),
        (10, {"stop": 10}, []),
        (LAST, {}, [LAST]),
        (COUNT, {}, []),
        (10**9, {}, []),
        (now - timedelta(hours=1), {}, range(COUNT)),
        (now + timedelta(hours=1), {}, []),
        ("first", {"follow": True, "take": 2}, [0, 1]),
        (LAST, {"follow": True, "idle_timeout_s": IDLE_S}, [LAST]),
        ("next", {"follow": True, "idle_timeout_s": 0.3}, []),
    ):
        given: Any = options
        assert numbers(face.iterate(numbered, start, **given)) == list(expected), (start, options)
    # Leaving an iteration in the middle harms neither the reader nor, on 3.10, the connection.
    for _ in range(3):
        assert numbers(face.iterate(numbered, take=3)) == [0, 1, 2]
        assert face.read(numbered, 400).headers["n"] == 400


def test_from_last_gives_the_newest_chunk(face: Face, amqp_url: str, stream_name: str) -> None:
    """From "last" on come the messages of the newest chunk; of an empty stream nothing comes, from wherever."""
    for start in ("first", "last", "next", 0, 5, datetime.now(UTC)):
        assert face.iterate(stream_name, start) == []
    fill(amqp_url, stream_name, 5, confirm=True)
    assert numbers(face.iterate(stream_name, "last")) == [4]


def test_a_deleted_stream_ends_following(face: Face, amqp_url: str, stream_name: str) -> None:
    """A reader that waits learns that its stream was deleted."""
    fill(amqp_url, stream_name, 1)
    with pytest.raises(errors.StreamUnavailable):
        face.follow(stream_name, lambda _: delete_stream(amqp_url, stream_name), idle_timeout_s=LIMIT_S)


def test_batches_hold_every_message_once(face: Face, numbered: str, stream_name: str) -> None:
    """Batches have each message once and in order, with its chunk's time and epoch; None means that nothing came."""
    batches = face.batches(numbered, 100, follow=False)
    messages = [message for batch in batches for message in batch.each_message()]
    assert numbers(messages) == list(range(100, COUNT))
    assert all(batch.first_offset == batch.offsets[0] for batch in batches)
    assert messages == face.iterate(numbered, 100)
    assert all(abs(batch.chunk_ms / 1000 - datetime.now(UTC).timestamp()) < 600 for batch in batches)
    assert all(batch.epoch >= 1 for batch in batches)
    assert messages[0].time_source is TimeSource.CHUNK
    assert face.batches(stream_name, idle_s=0.05, take=3) == [None, None, None]


def test_results_come_in_the_order_asked_for(face: Face, numbered: str, streams: list[str]) -> None:
    """Each id has one result in the order asked for, whatever the window; what is missing spoils its own ids only."""
    wanted = [LAST, 0, 150, 150, 10**6, 1, 2, 3, 298, -1, 0]
    for options in ({}, *({"window": window} for window in (1, 2, 3, 7, 100))):
        results = face.read_many([MessageId(numbered, offset) for offset in wanted], **options)
        assert [result.offset for result in results] == wanted
        for offset, result in zip(wanted, results, strict=True):
            assert isinstance(result, Message if 0 <= offset < COUNT else errors.OffsetNotFound)
            assert not isinstance(result, Message) or result.headers["n"] == offset
    assert face.read_many([]) == []
    missing = unique_name("missing")
    ids = [MessageId(streams[4], 3), MessageId(missing, 0), MessageId(numbered, 7), MessageId(missing, 1)]
    results = face.read_many(ids)
    assert [results[0].id, results[2].id] == [ids[0], ids[2]]
    assert [type(results[1]), type(results[3])] == [errors.StreamNotFound, errors.StreamNotFound]


def test_a_worn_connection_is_replaced(face: Face, streams: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """More attaches than a connection should have give the same results."""
    monkeypatch.setattr("relatum.wire.session.ATTACHES_MAX", 50)
    ids = [MessageId(streams[9], number % 10) for number in range(70)]
    assert [result.id for result in face.read_many(ids, window=1)] == ids
    assert [result.id for result in face.read_many(ids, window=len(ids))] == ids
    assert face.read(streams[9], 9).offset == 9


def test_what_is_left_early_stays_attached_to_nothing(face: Face, amqp_url: str) -> None:
    """Its connection's subscriptions come round to the same numbers, and are free then."""
    with new_streams(amqp_url, 4) as streams:
        for stream in streams:
            fill(amqp_url, stream, 120)
        ids = [MessageId(stream, offset) for stream in streams for offset in range(0, 120, 9)]
        for _ in range(120):
            assert [result.id for result in face.read_many(ids, take=1)] == ids[:1]


def test_many_attaches_go_over_several_connections(face: Face, streams: list[str]) -> None:
    """Reads of many streams have all results in order, also after a read that was cut short."""
    ids = [MessageId(stream, 0) for stream in [*streams, *reversed(streams)]]
    for _ in range(2):
        assert [each.id for each in face.read_all(ids)] == ids
        assert [each.id for each in face.read_many(ids, take=3)] == ids[:3]


def test_what_is_kept_is_not_asked_for_again(face: Face, amqp_url: str, stream_name: str) -> None:
    """Neither by another order nor beside what is new: also when the stream is gone, its chunks are there."""
    fill(amqp_url, stream_name, 50)
    kept = ChunkCache()
    ids = [message.id for message in face.iterate(stream_name)]
    face.read_all(ids[10:20], kept=kept)
    found = face.read_all(reversed(ids), kept=kept)
    assert [message.id for message in found] == ids[::-1]
    nowhere = MessageId(stream_name, ids[-1].offset + 1)
    (missing,) = face.read_all([nowhere], kept=kept)
    assert isinstance(missing, errors.OffsetNotFound)
    fill(amqp_url, stream_name, 1)
    assert face.read_all([ids[3], nowhere, ids[3]], kept=kept)[1].headers["n"] == 0
    delete_stream(amqp_url, stream_name)
    assert {type(each) for each in face.read_all(ids, kept=kept)} == {Message}
    assert {type(each) for each in face.read_all(ids)} == {errors.StreamNotFound}


def test_who_keeps_chunks_reads_ahead(face: Face, amqp_url: str, stream_name: str) -> None:
    """So that the next round finds there what follows, without asking the broker."""
    # Each message has a chunk of its own: for one that is kept already, nothing is read, and so nothing ahead of it.
    fill(amqp_url, stream_name, 40, confirm=True)
    kept = ChunkCache()
    ids = [message.id for message in face.iterate(stream_name)]
    face.read_all(ids[:1], kept=kept)
    face.read_all(ids[20:21], kept=kept)
    delete_stream(amqp_url, stream_name)
    assert [each.id for each in face.read_all(ids[21:32], kept=kept)] == ids[21:32]


def test_streams_of_an_exchange(face: Face, amqp_url: str, stream_name: str, broker_version: tuple[int, ...]) -> None:
    """The streams of an exchange are known, and those of a routing key where the broker can be asked for them."""
    exchange = unique_name("exchange")
    with broker_connection(amqp_url) as connection:
        channel = connection.channel()
        channel.exchange_declare(exchange, "topic")
        channel.queue_bind(stream_name, exchange, "a.*")
        routed = [face.routes(exchange, "a.b"), face.routes(exchange, "c"), face.routes("", stream_name)]
        bound = face.partitions(exchange)
        channel.exchange_delete(exchange)
    assert routed == ([[stream_name], [], [stream_name]] if broker_version >= (4, 3) else [None, None, [stream_name]])
    assert bound == [stream_name]


def test_recovering_partitions_are_waited_for(face: Face, amqp_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """RabbitMQ 3.10 answers while it starts, and names what it has so far: keys would go to other partitions."""
    exchange = unique_name("exchange")
    answers = [["o-0"], ["o-0", "o-2"], ["o-0", "o-1", "o-2"], ["o-0", "o-1", "o-2"]]
    asked = iter([*answers, answers[-1]])
    monkeypatch.setattr("relatum.reading._exchanges.RECOVERED_SINCE", (99,))
    monkeypatch.setattr("relatum.reading._exchanges._strings", lambda *_: next(asked))
    with broker_connection(amqp_url) as connection:
        channel = connection.channel()
        channel.exchange_declare(exchange, "direct")
        assert face.partitions(exchange) == answers[-1]
        assert len(list(asked)) == 1, "asked until two answers are the same"
        asked = iter([answers[-1]])
        assert face.partitions(exchange) == answers[-1], "and once only, by the same connection"
        channel.exchange_delete(exchange)


def test_what_is_no_stream_leads_nowhere(face: Face) -> None:
    """Names of no stream, of a direct reply-to, and such as no queue can have: no stream, and no harm."""
    wrong = ["nobody", "amq.rabbitmq.reply-to.g1h2AA5yZXBseUA4", "x" * 300, "x" * 70_000, ""]
    assert [face.routes("", name) for name in wrong] == [[]] * len(wrong)
    assert [face.partitions(name) for name in ("amq.rabbitmq.trace", unique_name("super"))] == [[], []]
