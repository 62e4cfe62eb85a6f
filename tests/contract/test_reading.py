"""What reading a stream promises, over every face."""

from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import pytest

from relatum import MessageId
from relatum.errors import (
    InvalidInput,
    NotAStream,
    OffsetExpired,
    OffsetNotFound,
    StreamNotFound,
    StreamUnavailable,
)
from relatum.reading import ATTACHES_MAX, Message, StreamBounds, StreamReader, TimeSource
from tests.contract._faces import FACES, Face, open_face
from tests.support import (
    LIMIT_S,
    broker_connection,
    declare_stream,
    delete_stream,
    publish_plain,
    unique_name,
    wait_until,
)
from tests.support._raw_publisher import RawPublisher, uncompressed

IDLE_S = 3.0
"""Seconds in which a message that is there surely comes."""


def fill(amqp_url: str, stream: str, count: int, *, confirm: bool = False) -> None:
    """Publish `count` messages, each with its number as body and as header `n`."""
    publish_plain(amqp_url, stream, [(str(n).encode(), {"n": n}) for n in range(count)], confirm=confirm)
    with open_face("blocking", amqp_url) as reader:
        wait_until(lambda: len(reader.iterate(stream)) >= count, what="the messages in the stream")


def numbers(messages: list[Message]) -> list[int]:
    """The number in each message."""
    return [message.headers["n"] for message in messages]


class TestOneMessage:
    """Reading one message."""

    def test_each_offset_gives_its_message(self, face: Face, amqp_url: str, stream_name: str) -> None:
        """A message read at an offset lies at that offset and is the one published there."""
        fill(amqp_url, stream_name, 20)
        offsets = [message.offset for message in face.iterate(stream_name)]
        for number, offset in enumerate(offsets):
            message = face.read(stream_name, offset)
            assert (message.id, message.headers["n"]) == (MessageId(stream_name, offset), number)
            assert message.body == str(number).encode()

    def test_past_the_end_is_not_found_and_says_where_the_end_is(
        self, face: Face, amqp_url: str, stream_name: str
    ) -> None:
        """An offset behind the last message is an error with the last offset, not a wait."""
        fill(amqp_url, stream_name, 3)
        last = face.bounds(stream_name).last
        assert last is not None
        for offset in (last + 1, last + 1000, 2**63 - 1):
            with pytest.raises(OffsetNotFound) as caught:
                face.read(stream_name, offset)
            assert (caught.value.stream, caught.value.offset, caught.value.last) == (stream_name, offset, last)

    def test_numbers_that_are_no_offsets(self, face: Face, amqp_url: str, stream_name: str) -> None:
        """A number outside 0 to 2^63-1 is not found, whatever the stream holds."""
        fill(amqp_url, stream_name, 1)
        for offset in (-1, 2**63, 2**70):
            with pytest.raises(OffsetNotFound):
                face.read(stream_name, offset)

    def test_an_empty_stream_has_no_message(self, face: Face, stream_name: str) -> None:
        """Reading an empty stream is an error at once, not a wait."""
        with pytest.raises(OffsetNotFound) as caught:
            face.read(stream_name, 0)
        assert caught.value.last is None

    def test_a_missing_stream(self, face: Face) -> None:
        """A stream that does not exist is named in the error."""
        name = unique_name("missing")
        for attempt in (
            lambda: face.read(name, 0),
            lambda: face.bounds(name),
            lambda: face.iterate(name),
            lambda: face.iterate(name, follow=True, idle_timeout_s=1),
        ):
            with pytest.raises(StreamNotFound) as caught:
                attempt()
            assert caught.value.stream == name

    def test_a_queue_is_not_a_stream(self, face: Face, amqp_url: str) -> None:
        """A queue of another kind is told apart from a missing stream, and its messages stay untouched."""
        name = unique_name("classic")
        with broker_connection(amqp_url) as connection:
            channel = connection.channel()
            channel.queue_declare(name, durable=True)
            channel.confirm_delivery()
            channel.basic_publish("", name, b"mine")
        try:
            for attempt in (lambda: face.read(name, 0), lambda: face.bounds(name), lambda: face.iterate(name)):
                with pytest.raises(NotAStream):
                    attempt()
            (result,) = face.read_many([MessageId(name, 0)])
            assert isinstance(result, NotAStream)
            with broker_connection(amqp_url) as connection:
                method, _, body = connection.channel().basic_get(name)
            assert (body, method.redelivered) == (b"mine", False)
        finally:
            delete_stream(amqp_url, name)

    def test_a_call_that_failed_leaves_the_reader_usable(self, face: Face, amqp_url: str, stream_name: str) -> None:
        """After each error the next read answers."""
        fill(amqp_url, stream_name, 2)
        for _ in range(3):
            with pytest.raises(StreamNotFound):
                face.read(unique_name("missing"), 0)
            with pytest.raises(OffsetNotFound):
                face.read(stream_name, 10**6)
            assert face.read(stream_name, 1).body == b"1"


class TestRetention:
    """What is no longer there."""

    def test_what_retention_dropped_has_expired(self, face: Face, amqp_url: str) -> None:
        """An offset below the first one retained has expired; the error says where the stream begins now."""
        name = unique_name("short")
        declare_stream(amqp_url, name, x_max_length_bytes=100_000, x_stream_max_segment_size_bytes=50_000)
        try:
            publish_plain(amqp_url, name, [b"x" * 1000 for _ in range(600)], confirm=True)
            first = wait_until(lambda: face.bounds(name).first, what="retention")
            with pytest.raises(OffsetExpired) as caught:
                face.read(name, 0)
            assert caught.value.first >= first > 0
            results = face.read_many([MessageId(name, 0), MessageId(name, 599)])
            assert isinstance(results[0], OffsetExpired)
            assert face.iterate(name, 0)[0].offset >= first
        finally:
            delete_stream(amqp_url, name)


class TestBounds:
    """First and last offset."""

    def test_of_an_empty_stream(self, face: Face, stream_name: str) -> None:
        """An empty stream has neither first nor last offset."""
        assert face.bounds(stream_name) == StreamBounds(None, None)

    def test_of_a_stream_that_retention_emptied(self, amqp_url: str, stream_url: str) -> None:
        """What the broker wrote for itself is counted there, and is no message."""
        name = unique_name("emptied")
        declare_stream(amqp_url, name, x_max_length_bytes=100_000, x_stream_max_segment_size_bytes=50_000)
        with RawPublisher(stream_url, name) as publisher:
            publisher.publish(uncompressed([b"\0\x53\x75\xb0" + (200_000).to_bytes(4) + bytes(200_000)]))
            publisher.store_offset("somebody", 0)
        try:
            with StreamReader.open(stream_url) as reader:
                wait_until(lambda: reader.bounds(name) == StreamBounds(None, None), what="retention")
                publish_plain(amqp_url, name, [b"more"])
                assert reader.bounds(name) == StreamBounds(2, 2)
        finally:
            delete_stream(amqp_url, name)

    def test_are_those_of_the_first_and_last_message(self, face: Face, amqp_url: str, stream_name: str) -> None:
        """First and last are offsets of messages that can be read."""
        fill(amqp_url, stream_name, 30)
        first, last = face.bounds(stream_name)
        assert first is not None
        assert last is not None
        assert face.read(stream_name, first).body == b"0"
        assert face.read(stream_name, last).body == b"29"


class TestIterate:
    """Reading on from a point."""

    def test_from_first_gives_all_in_order(self, face: Face, amqp_url: str, stream_name: str) -> None:
        """All messages come, each once, with ascending offsets, and the iteration ends at the end."""
        fill(amqp_url, stream_name, 1000)
        messages = face.iterate(stream_name)
        assert numbers(messages) == list(range(1000))
        offsets = [message.offset for message in messages]
        assert offsets == sorted(set(offsets))

    def test_from_an_offset_to_an_offset(self, face: Face, amqp_url: str, stream_name: str) -> None:
        """It begins at the offset itself, also inside a chunk, and ends before the other."""
        fill(amqp_url, stream_name, 50)
        assert numbers(face.iterate(stream_name, 17, stop=23)) == list(range(17, 23))
        assert numbers(face.iterate(stream_name, 17, stop=23, follow=True)) == list(range(17, 23))
        assert numbers(face.iterate(stream_name, 49)) == [49]
        assert face.iterate(stream_name, 50) == []
        assert face.iterate(stream_name, 10, stop=10) == []
        assert face.iterate(stream_name, 10**9) == []

    def test_from_last_gives_the_newest_chunk(self, face: Face, amqp_url: str, stream_name: str) -> None:
        """From "last" on come the messages of the newest chunk, the last message among them."""
        fill(amqp_url, stream_name, 5, confirm=True)
        assert numbers(face.iterate(stream_name, "last")) == [4]

    def test_an_empty_stream(self, face: Face, stream_name: str) -> None:
        """Nothing comes of an empty stream, from wherever."""
        for start in ("first", "last", "next", 0, 5, datetime.now(UTC)):
            assert face.iterate(stream_name, start) == []

    def test_from_a_moment(self, face: Face, amqp_url: str, stream_name: str) -> None:
        """From a moment before all messages come all, from one after them none."""
        fill(amqp_url, stream_name, 5)
        now = datetime.now(UTC)
        assert numbers(face.iterate(stream_name, now - timedelta(hours=1))) == list(range(5))
        assert face.iterate(stream_name, now + timedelta(hours=1)) == []

    def test_following_gives_what_is_published_later(self, face: Face, amqp_url: str, stream_name: str) -> None:
        """With `follow` the end of the stream is no end: it waits, and ends after its time-out."""
        fill(amqp_url, stream_name, 2)
        assert numbers(face.iterate(stream_name, follow=True, take=2)) == [0, 1]
        assert numbers(face.iterate(stream_name, 1, follow=True, idle_timeout_s=IDLE_S)) == [1]
        assert face.iterate(stream_name, "next", follow=True, idle_timeout_s=0.3) == []

    def test_an_iteration_given_up_leaves_the_reader_usable(self, face: Face, amqp_url: str, stream_name: str) -> None:
        """Leaving an iteration in the middle harms neither the reader nor, on 3.10, the connection."""
        fill(amqp_url, stream_name, 500)
        for _ in range(3):
            assert numbers(face.iterate(stream_name, take=3)) == [0, 1, 2]
            assert face.read(stream_name, 400).headers["n"] == 400

    def test_a_deleted_stream_ends_following(self, face: Face, amqp_url: str) -> None:
        """A reader that waits learns that its stream was deleted."""
        name = unique_name("deleted")
        declare_stream(amqp_url, name)
        fill(amqp_url, name, 1)
        with pytest.raises(StreamUnavailable):
            face.follow(name, lambda _: delete_stream(amqp_url, name), idle_timeout_s=LIMIT_S)

    def test_starts_that_are_none(self, face: Face, stream_name: str) -> None:
        """A start that is no offset, moment or known name is refused before anything is sent."""
        for start in (-1, 2**63, "middle", 1.5, None, True):
            with pytest.raises(InvalidInput):
                face.iterate(stream_name, start)


class TestReadMany:
    """Reading by many ids."""

    def test_results_come_in_the_order_asked_for(self, face: Face, amqp_url: str, stream_name: str) -> None:
        """Any order, repeats, and ids without a message: one result each, in that order."""
        fill(amqp_url, stream_name, 300)
        wanted = [299, 0, 150, 150, 10**6, 1, 2, 3, 298, -1, 0]
        results = face.read_many([MessageId(stream_name, offset) for offset in wanted])
        assert len(results) == len(wanted)
        for offset, result in zip(wanted, results, strict=True):
            if 0 <= offset < 300:
                assert isinstance(result, Message)
                assert (result.offset, result.headers["n"]) == (offset, offset)
            else:
                assert isinstance(result, OffsetNotFound)
                assert result.offset == offset

    def test_several_streams_and_one_missing(self, face: Face, amqp_url: str, stream_name: str) -> None:
        """Ids of several streams may be mixed; one that does not exist spoils its own ids only."""
        other, missing = unique_name("other"), unique_name("missing")
        declare_stream(amqp_url, other)
        try:
            fill(amqp_url, stream_name, 10)
            fill(amqp_url, other, 10)
            results = face.read_many(
                [MessageId(other, 3), MessageId(missing, 0), MessageId(stream_name, 7), MessageId(missing, 1)]
            )
            assert [results[0].id, results[2].id] == [MessageId(other, 3), MessageId(stream_name, 7)]
            assert [type(results[1]), type(results[3])] == [StreamNotFound, StreamNotFound]
        finally:
            delete_stream(amqp_url, other)

    def test_small_windows_give_the_same(self, face: Face, amqp_url: str, stream_name: str) -> None:
        """The window bounds memory, not results."""
        fill(amqp_url, stream_name, 40)
        ids = [MessageId(stream_name, offset) for offset in (5, 39, 6, 7, 0, 38, 5)]
        for window in (1, 2, 3, 7, 100):
            assert [result.id for result in face.read_many(ids, window=window)] == ids

    @pytest.mark.parametrize("name", FACES)
    def test_a_worn_connection_is_replaced_on_the_way(self, amqp_url: str, stream_name: str, name: str) -> None:
        """More attaches than a connection should have give the same results."""
        fill(amqp_url, stream_name, 10)
        ids = [MessageId(stream_name, number % 10) for number in range(ATTACHES_MAX + 20)]
        with open_face(name, amqp_url) as reader:
            assert [result.id for result in reader.read_many(ids, window=1)] == ids
            assert [result.id for result in reader.read_many(ids, window=len(ids))] == ids
            assert reader.read(stream_name, 9).offset == 9

    @pytest.mark.parametrize("name", FACES)
    def test_what_is_left_early_stays_attached_to_nothing(self, amqp_url: str, name: str) -> None:
        """Its connection's subscriptions come round to the same numbers, and are free then."""
        streams = [unique_name() for _ in range(4)]
        try:
            for stream in streams:
                declare_stream(amqp_url, stream)
                fill(amqp_url, stream, 120)
            ids = [MessageId(stream, offset) for stream in streams for offset in range(0, 120, 9)]
            with open_face(name, amqp_url) as reader:
                for _ in range(120):
                    assert [result.id for result in reader.read_many(ids, take=1)] == ids[:1]
        finally:
            for stream in streams:
                delete_stream(amqp_url, stream)

    def test_nothing_asked_for(self, face: Face) -> None:
        """No ids, no results."""
        assert face.read_many([]) == []


class TestBatches:
    """What a recorder reads."""

    def test_hold_every_message_once(self, face: Face, amqp_url: str, stream_name: str) -> None:
        """Batches from an offset on hold each message once, in order, as `Message`s of the same content."""
        fill(amqp_url, stream_name, 400)
        batches = face.batches(stream_name, 100, follow=False)
        messages = [message for batch in batches for message in batch.each_message()]
        assert numbers(messages) == list(range(100, 400))
        assert all(batch.first_offset == batch.offsets[0] for batch in batches)
        assert messages == face.iterate(stream_name, 100)

    def test_wake_up_while_nothing_comes(self, face: Face, stream_name: str) -> None:
        """A reader that waits is woken with None each time nothing came."""
        assert face.batches(stream_name, idle_s=0.05, take=3) == [None, None, None]

    def test_say_when_the_chunk_was_written(self, face: Face, amqp_url: str, stream_name: str) -> None:
        """The stream protocol gives chunk time and epoch, AMQP 0.9.1 cannot."""
        fill(amqp_url, stream_name, 1)
        (batch,) = face.batches(stream_name, follow=False)
        (message,) = batch.each_message()
        assert abs(batch.chunk_ms / 1000 - datetime.now(UTC).timestamp()) < 60
        assert batch.epoch >= 1
        assert message.time_source is TimeSource.CHUNK


class TestRouting:
    """Which streams there are."""

    def test_streams_of_an_exchange(
        self, face: Face, amqp_url: str, stream_name: str, broker_version: tuple[int, ...]
    ) -> None:
        """The streams a key is routed to are known over the stream protocol, and unknown, not empty, over AMQP.

        Unknown as well on a broker that crashes over the question; which streams are bound harms none.
        """
        exchange = unique_name("exchange")
        with broker_connection(amqp_url) as connection:
            channel = connection.channel()
            channel.exchange_declare(exchange, "topic")
            channel.queue_bind(stream_name, exchange, "a.*")
            routed = [face.routes(exchange, "a.b"), face.routes(exchange, "c"), face.routes("", stream_name)]
            bound = face.partitions(exchange)
            channel.exchange_delete(exchange)
        assert routed == (
            [[stream_name], [], [stream_name]] if broker_version >= (4, 3) else [None, None, [stream_name]]
        )
        assert bound == [stream_name]

    def test_partitions_that_a_broker_still_recovers_are_waited_for(
        self, face: Face, amqp_url: str, stream_name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """RabbitMQ 3.10 answers while it starts, and names what it has so far: keys would go to other partitions."""
        exchange = unique_name("exchange")
        answers = [["o-0"], ["o-0", "o-2"], ["o-0", "o-1", "o-2"], ["o-0", "o-1", "o-2"]]
        asked = iter([*answers, answers[-1]])
        operations = "relatum.reading._operations.StreamOperations"
        monkeypatch.setattr(f"{operations}._version", "3.10.8")
        monkeypatch.setattr(f"{operations}._strings", lambda *_: next(asked))
        with broker_connection(amqp_url) as connection:
            channel = connection.channel()
            channel.exchange_declare(exchange, "direct")
            assert face.partitions(exchange) == answers[-1]
            assert len(list(asked)) == 1, "asked until two answers are the same"
            asked = iter([answers[-1]])
            assert face.partitions(exchange) == answers[-1], "and once only, by the same connection"
            channel.exchange_delete(exchange)

    def test_what_is_no_stream_leads_nowhere(self, face: Face) -> None:
        """Names of no stream, of a direct reply-to, and such as no queue can have: no stream, and no harm."""
        wrong = ["nobody", "amq.rabbitmq.reply-to.g1h2AA5yZXBseUA4", "x" * 300, "x" * 70_000, ""]
        assert [face.routes("", name) for name in wrong] == [[]] * len(wrong)
        assert face.partitions("amq.rabbitmq.trace") == []

    def test_no_super_stream(self, face: Face) -> None:
        """A name that is no super stream has no partitions."""
        assert face.partitions(unique_name("super")) == []


class TestArguments:
    """What is given is one clear error, before anything is asked, or can be used."""

    def test_a_time_is_refused_by_the_name_it_was_given_under(self, face: Face) -> None:
        """Following and reading in batches have one each."""
        with pytest.raises(InvalidInput, match=r"^idle_timeout_s= takes"):
            face.iterate("s", follow=True, idle_timeout_s=-1)
        with pytest.raises(InvalidInput, match=r"^idle_s= takes"):
            face.batches("s", idle_s=-1)

    @pytest.mark.parametrize("value", ["1", 1.0, None, b"1"], ids=ascii)
    def test_an_offset_is_an_integer(self, face: Face, amqp_url: str, stream_name: str, value: Any) -> None:
        """Whatever else is given is our error, alone and among many; integers of other libraries are taken."""
        fill(amqp_url, stream_name, 2)
        with pytest.raises(InvalidInput, match="An offset is an integer"):
            face.read(stream_name, value)
        with pytest.raises(InvalidInput, match="An offset is an integer"):
            face.read_many([MessageId(stream_name, 0), MessageId(stream_name, value)])
        assert face.read(stream_name, np.int64(1)).offset == 1  # type: ignore[arg-type]
        assert [each.offset for each in face.read_many([MessageId(stream_name, np.int64(1))])] == [1]  # type: ignore[arg-type]
