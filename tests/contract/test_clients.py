"""Connections of each client, intercepted: what is published, what is refused, and what errors say."""

import copy
import logging
import pickle
import time
from collections.abc import Iterator
from typing import Any

import pytest

import relatum
from relatum import Broker, errors
from relatum.common.uuid7 import time_us_of, uuid7
from relatum.reading import StreamReader
from tests.contract._clients import CLIENTS, CONFIRMING, Line, Queue, new_queue, open_line
from tests.support import unique_name
from tests.support.proxy import Proxy
from tests.support.raising import raising


@pytest.fixture(params=CLIENTS)
def line(request: pytest.FixtureRequest, amqp_url: str) -> Iterator[Line]:
    with open_line(request.param, amqp_url) as line:
        yield line


confirming = pytest.mark.parametrize("line", CONFIRMING, indirect=True)
"""Only clients whose publish ends when the broker has answered."""


@pytest.fixture
def queue(amqp_url: str) -> Iterator[Queue]:
    with new_queue(amqp_url) as queue:
        yield queue


@pytest.fixture
def full(queue: Queue) -> Iterator[str]:
    """The name of a queue that takes one message, and rejects others."""
    name = f"{queue.name}-full"
    queue.channel.queue_declare(name, arguments={"x-max-length": 1, "x-overflow": "reject-publish"})
    yield name
    queue.channel.queue_delete(name)


def twice(error: Exception, theirs: type[Exception], ours: type[errors.PublishError]) -> list[Any]:
    """An error of the client's class and of ours, which says the same in another process; and what arrives there."""
    again = pickle.loads(pickle.dumps(error))
    for each in (error, again):
        assert isinstance(each, theirs)
        assert isinstance(each, ours)
        assert str(each) == str(error)
    assert type(again) is type(error)
    assert not hasattr(again, "settle")
    return [error, again]


def is_now(time_us: int | None) -> bool:
    return time_us is not None and abs(time_us - time.time() * 1e6) < 60e6


def test_the_connection_stays_what_it_is(line: Line, queue: Queue) -> None:
    """An intercepted connection stays what it is, its open channels are covered, and other options are an error."""
    early, kind = line.channel(), type(line.connection)
    for _ in range(2):
        assert line.intercept(keys=["a"]) is line.connection
        assert type(line.connection) is kind
    assert type(line.channel()) is type(early)
    line.publish(early, line.message(), queue.name)
    assert is_now(time_us_of(queue.get()[0].message_id))
    assert relatum.statistics(line.connection).published == 1
    with pytest.raises(errors.ConfigurationError):
        line.intercept(keys=["b"])


def test_messages_get_what_they_lack(line: Line, queue: Queue) -> None:
    """An id that says the time; body, headers and other properties arrive as they were, and the caller's stay so."""
    line.intercept(keys=["order_id"])
    channel = line.channel()
    message = line.message(b"body", headers={"order_id": "1", "n": {"a": [1]}}, type="made", app_id="shop")
    before = copy.deepcopy(line.state(message))
    for _ in range(2):
        line.publish(channel, message, queue.name)
    assert line.state(message) == before
    ids = set()
    for _ in range(2):
        properties, body = queue.get()
        assert (body, properties.headers) == (b"body", {"order_id": "1", "n": {"a": [1]}})
        assert (properties.type, properties.app_id) == ("made", "shop")
        assert is_now(time_us_of(properties.message_id))
        ids.add(properties.message_id)
    assert len(ids) == 2
    assert relatum.statistics(line.connection).published == 2


def test_a_message_without_headers_gets_none(line: Line, queue: Queue) -> None:
    """Beside the id it arrives as if nobody had intercepted the connection, over each way to have no headers."""
    given: list[dict[str, Any]] = [{}, {"headers": {}}, {"type": "t"}]
    bare, channel = [], line.channel()
    for fields in given:
        line.publish(channel, line.message(**fields), queue.name)
        bare.append(queue.get()[0])
    line.intercept(keys=["order_id"])
    for fields, expected in zip(given, bare, strict=True):
        line.publish(channel, line.message(**fields), queue.name)
        got, _ = queue.get()
        assert time_us_of(got.message_id)
        # aiormq gives each message its own id.
        got.message_id = expected.message_id = None
        assert got == expected


def test_a_message_of_an_id_of_the_callers_gets_a_time(line: Line, queue: Queue) -> None:
    """Also where it was given to another message before: its time is the other's."""
    line.intercept()
    channel = line.channel()
    for message_id in ("mine", uuid7(1)):
        line.publish(channel, line.message(message_id=message_id), queue.name)
        got, _ = queue.get()
        assert got.message_id == message_id
        assert is_now(got.headers["relatum_time"])


def test_skipped_values_are_published(line: Line, queue: Queue, caplog: pytest.LogCaptureFixture) -> None:
    """With on_invalid="skip" the message goes out as it is, and the value is counted."""
    line.intercept(keys=["order_id"], on_invalid="skip")
    with caplog.at_level(logging.WARNING):
        line.publish(line.channel(), line.message(headers={"order_id": {"a": 1}}), queue.name)
    assert queue.get()[0].headers["order_id"] == {"a": 1}
    assert relatum.statistics(line.connection).skipped == {"nested": 1}
    assert "order_id" in caplog.text


def test_release_leaves_no_trace(line: Line, queue: Queue) -> None:
    """Afterwards connection and channels have the attributes they had, and messages go out bare."""
    early = line.channel(confirms=False)
    before = set(vars(line.connection)), set(vars(early))
    line.intercept()
    late = line.channel(confirms=False)
    line.publish(early, line.message(), queue.name)
    assert is_now(time_us_of(queue.get()[0].message_id))
    assert relatum.release(line.connection) is line.connection
    assert (set(vars(line.connection)), set(vars(early))) == before
    for channel in (early, late, line.channel(confirms=False)):
        line.publish(channel, line.message(), queue.name)
        got, _ = queue.get()
        assert (time_us_of(got.message_id), got.headers or {}) == (None, {})
    relatum.release(line.connection)


def test_bad_keys_and_header_bombs_are_refused_before_anything_is_sent(line: Line, queue: Queue) -> None:
    """Nothing of them reaches the broker, and the channel stays usable."""
    line.intercept(keys=["order_id"])
    channel = line.channel()
    deep: dict[str, Any] = {}
    for _ in range(2000):
        deep = {"in": deep}
    with pytest.raises(errors.InvalidRelationshipKey):
        line.publish(channel, line.message(headers={"order_id": [1]}), queue.name)
    for headers in (deep, {"a": "x" * 200_000}, {str(n): n for n in range(5000)}):
        with pytest.raises(errors.HeadersRefused):
            line.publish(channel, line.message(headers=headers), queue.name)
    line.publish(channel, line.message(b"good"), queue.name)
    assert queue.get()[1] == b"good"
    assert relatum.statistics(line.connection).published == 1


@pytest.mark.parametrize("confirms", [True, False])
def test_a_string_that_is_too_long_is_refused_as_by_a_bare_client(line: Line, queue: Queue, confirms: bool) -> None:
    """Property by property, and names of headers: the same class and the same words, and nothing is sent."""
    channel = line.channel(confirms=confirms)

    def refused(**fields: Any) -> tuple[type[BaseException], str] | None:
        try:
            line.publish(channel, line.message(b"too long", **fields), queue.name)
        except Exception as error:
            return type(error), str(error)
        return None

    texts = ("x" * 256, "ü" * 128)
    given = [{name: text} for text in texts for name in line.short_strings]
    named = [{"headers": {name: "v"}} for name in (*texts, "x" * 129)]
    bare = [refused(**fields) for fields in (*given, *named)]
    line.intercept()
    ours = [refused(**fields) for fields in (*given, *named)]
    assert ours == bare
    assert None not in ours[: len(given)]
    # aiormq truncates names that are longer than 128 bytes.
    sent = [list(queue.get()[0].headers) for each in (*bare, *ours) if each is None]
    assert sent[: len(sent) // 2] == sent[len(sent) // 2 :]
    line.publish(channel, line.message(b"sent", app_id="x" * 255), queue.name)
    assert queue.get()[1] == b"sent"
    assert relatum.statistics(line.connection).errors == {}


@confirming
@pytest.mark.parametrize(
    ("theirs", "ours", "fields", "exchange"),
    [
        ("unroutable", errors.PublishUnroutable, {}, ""),
        ("nacked", errors.PublishNacked, {}, ""),
        ("refused", errors.PublishRejected, {"user_id": "somebody else"}, ""),
        ("refused", errors.PublishRejected, {}, "not there"),
    ],
    ids=["unroutable", "nacked", "406", "404"],
)
def test_what_the_broker_does_not_take_is_the_clients_error_and_ours(
    line: Line, full: str, theirs: str, ours: type[errors.PublishError], fields: dict[str, Any], exchange: str
) -> None:
    """What the broker refuses raises the client's error and ours, also pickled, and is in no stream."""
    line.intercept()
    channel, kind = line.channel(), getattr(line.errors, theirs)

    def publish() -> None:
        for _ in range(10):
            to = full if theirs == "nacked" else unique_name()
            line.publish(channel, line.message(**fields), to, exchange=exchange)

    with pytest.raises(kind) as caught:
        publish()
    assert str(caught.value) == str(caught.value.__cause__)
    for error in twice(caught.value, kind, ours):
        assert error.in_stream is False


@confirming
def test_an_unroutable_message_comes_back_as_it_was_sent(line: Line) -> None:
    """The error has the message with the id it was sent with, also in another process."""
    line.intercept()
    channel = line.channel()
    given: list[dict[str, Any]] = [{}, {"headers": {"a": 1}}, {"message_id": "mine"}]
    for fields in given:
        with pytest.raises(line.errors.unroutable) as caught:
            line.publish(channel, line.message(**fields), unique_name())
        assert type(caught.value.__cause__) is line.errors.unroutable
        for error in twice(caught.value, line.errors.unroutable, errors.PublishUnroutable):
            returned = line.returned(error)
            if "message_id" in fields:
                assert (returned.message_id, list(returned.headers)) == ("mine", ["relatum_time"])
            else:
                assert time_us_of(returned.message_id) is not None
                assert (returned.headers or {}) == fields.get("headers", {})


@pytest.mark.parametrize("client", CONFIRMING)
@pytest.mark.parametrize("arrives", [True, False])
def test_half_open_links_are_settled_by_streams(broker: Broker, stream_name: str, client: str, arrives: bool) -> None:
    """The message arrived and its confirm did not: it is found. It never arrived: in the end it is surely nowhere."""
    with Proxy.to(broker.url) as proxy, open_line(client, proxy.url(broker.url), heartbeat_s=2) as line:
        line.intercept(broker=broker)
        channel = line.channel()
        line.publish(channel, line.message(b"first"), stream_name)
        proxy.mode = "blackhole_replies" if arrives else "blackhole"
        with pytest.raises(line.errors.lost) as caught:
            line.publish(channel, line.message(b"second"), stream_name)
        for error in twice(caught.value, line.errors.lost, errors.PublishOutcomeUnknown):
            assert error.in_stream is None
        error: Any = caught.value
        if arrives:
            assert [(place.stream, place.offset) for place in line.result(error.settle())] == [(stream_name, 1)]
        else:
            # On a busy machine even the connection to the broker takes longer than that.
            with pytest.raises((errors.PublishOutcomeUnknown, errors.BrokerUnavailable)):
                line.result(error.settle(0.05))
            with raising(errors.PublishRejected, in_stream=False):
                line.result(error.settle())
        proxy.mode = "pass"


@pytest.fixture
def recorded(line: Line, database_url: str, broker: Broker) -> Iterator[Line]:
    line.intercept(database=database_url, keys=["order_id"], broker=broker)
    yield line
    relatum.release(line.connection)


def test_a_receipt_gives_the_place_of_its_message(recorded: Line, stream_url: str, stream_name: str) -> None:
    """Among other messages, each its own; it may be asked again; the caller's messages stay as they were."""
    channel = recorded.channel()
    receipts = []
    for number in range(20):
        message = recorded.message(b"%d" % number, headers={"order_id": "1"})
        before = copy.deepcopy(recorded.state(message))
        receipts.append(recorded.receipt(channel, message, stream_name))
        recorded.publish(channel, message, stream_name)
        assert recorded.state(message) == before
    with StreamReader.open(stream_url) as reader:
        for number, receipt in enumerate(receipts):
            for _ in range(2):
                (place,) = recorded.result(receipt.wait())
                assert place == (stream_name, 2 * number)
            read = reader.read(*place)
            assert (read.body, read.properties.message_id) == (b"%d" % number, receipt.message_id)
    assert recorded.result(receipts[-1].settle()) == (place,)


def test_a_receipt_says_what_was_not_taken(recorded: Line, queue: Queue, full: str) -> None:
    """A receipt raises what the broker did not take, or a bad key, counted once, and the channel stays usable."""
    channel = recorded.channel()
    with pytest.raises(errors.InvalidRelationshipKey):
        recorded.receipt(channel, recorded.message(headers={"order_id": 1.5}), queue.name)

    def publish(to: str, count: int) -> None:
        for _ in range(count):
            recorded.result(recorded.receipt(channel, recorded.message(), to).wait())

    for to, count, error in ((unique_name(), 1, errors.PublishUnroutable), (full, 10, errors.PublishNacked)):
        with raising(error, in_stream=False):
            publish(to, count)
    publish(queue.name, 1)
    counted = relatum.statistics(recorded.connection).errors
    assert (counted["unroutable"], counted.keys()) == (1, {"unroutable", "nacked"})


def test_a_receipt_needs_interception_and_a_database(line: Line, stream_name: str) -> None:
    """Without either, nothing is sent, and the error says what is missing."""
    for needed in ("not intercepted", "database"):
        with pytest.raises(errors.ConfigurationError, match=needed):
            line.receipt(line.channel(), line.message(), stream_name)
        line.intercept()
