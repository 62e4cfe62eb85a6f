"""One message stops nobody: what no waiting cures is final for the message it is about, and all others go on."""

import asyncio
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pika
import pytest
import sqlalchemy as sa

from relatum.collecting import Bulk, ExecutorOptions, MessageCollector, OutcomeStatus
from relatum.errors import BrokerUnavailable, InvalidInput, PublishRejected
from relatum.membership import GROUP_KEY
from relatum.publishing import Burial, DeadLetters, DirectPublisher
from relatum.reading import BrokerAddress, Message, StreamReader
from relatum_consumer import AsyncRelations, Relations
from relatum_consumer.groups import GroupConsumer
from tests.support import (
    publish_plain,
    recording,
    wait_recorded,
    wait_until,
)
from tests.support._raw_publisher import RawPublisher, amqp_record
from tests.support.collectors import AsyncCollectorFace, a_loop
from tests.support.groups import group_id, of_group, whole_group
from tests.support.proxy import Proxy

SUCCEEDED, FAILED, DEAD = OutcomeStatus.SUCCEEDED, OutcomeStatus.FAILED, OutcomeStatus.DEAD

LARGE = {f"large-{number}": "x" * 32_000 for number in range(4)} | {"exact": "y" * 2_900, "small": 1}
"""Headers that fit into a frame of 131,072 bytes; with three more they do not."""


@pytest.fixture(params=["threads", "asyncio"])
def collector_of(
    request: pytest.FixtureRequest, amqp_url: str, database_url: str, stream_name: str
) -> Iterator[Callable[..., Any]]:
    """Makes durable collectors, of both faces, that follow the test's stream, and know one type."""
    options: dict[str, Any] = {"database": database_url, "broker": amqp_url, "streams": [stream_name]}
    options |= {"name": "billing", "type_of": lambda message: "order"}
    if request.param == "threads":
        yield lambda **more: MessageCollector(**options | more)
        return
    with a_loop() as loop:
        yield lambda **more: AsyncCollectorFace(loop, **options | more)


def read_all(amqp_url: str, stream: str) -> list[Message]:
    """All messages of a stream."""
    with StreamReader.open(amqp_url) as reader:
        return list(reader.iterate(stream))


def wait_final(collector: Any, *ids: str) -> dict[str, tuple[OutcomeStatus, str | None]]:
    """Wait until messages have a final status; gives it, and the reason."""
    wait_until(lambda: all(collector.outcome(each).is_final for each in ids), what=f"final: {ids}")
    return {each: (collector.outcome(each).status, collector.outcome(each).reason) for each in ids}


# --- dead letters that cannot be as the message was -----------------------------------------------------------------


def test_what_amqp_cannot_carry_is_left_out_of_a_dead_letter(
    amqp_url: str, stream_url: str, stream_name: str, dead_stream: str
) -> None:
    """The body, the place and the rest are there, and the dead letter names what is not."""
    with RawPublisher(stream_url, stream_name) as publisher:
        publisher.publish(amqp_record(b"body", message_id="m-1", correlation_id="c" * 300))
    [message] = read_all(amqp_url, stream_name)
    with DeadLetters(BrokerAddress.parse(amqp_url), dead_stream) as letters:
        letters.publish([message], "bad")
    [letter] = read_all(amqp_url, dead_stream)
    assert (letter.body, letter.properties.message_id, letter.properties.correlation_id) == (b"body", "m-1", None)
    assert dict(letter.headers) == {
        "relatum_dead_reason": "bad",
        "relatum_dead_stream": stream_name,
        "relatum_dead_offset": 0,
        "relatum_dead_left_out": "correlation_id",
    }


def test_headers_larger_than_a_frame_are_left_out_of_a_dead_letter(
    amqp_url: str, stream_name: str, dead_stream: str
) -> None:
    """The largest go, as few as will do: the broker would close the connection over the whole."""
    publish_plain(amqp_url, stream_name, [(b"body", pika.BasicProperties(headers=LARGE, correlation_id="c"))])
    [message] = read_all(amqp_url, stream_name)
    assert dict(message.headers) == LARGE
    with DeadLetters(BrokerAddress.parse(amqp_url), dead_stream) as letters:
        letters.publish([message], "bad " * 250)
    [letter] = read_all(amqp_url, dead_stream)
    left_out = str(letter.headers["relatum_dead_left_out"]).split(", ")
    assert len(left_out) == 1
    assert left_out[0].startswith("header large-")
    assert {f"header {name}" for name in LARGE.keys() - letter.headers.keys()} == set(left_out)
    assert (letter.headers["small"], letter.properties.correlation_id) == (1, "c")
    assert letter.headers["relatum_dead_offset"] == 0


def test_a_dead_letter_of_many_headers_costs_no_more_than_each_of_them(amqp_url: str, dead_stream: str) -> None:
    """Stream clients write more headers than a frame holds. Adding all sizes up for each took 10 s of the processor."""
    headers = {f"header-{number}": "x" * 20 for number in range(60_000)}
    message = Message.from_amqp("orders", 7, pika.BasicProperties(headers=headers), b"body")
    with DeadLetters(BrokerAddress.parse(amqp_url), dead_stream) as letters:
        began_s = time.process_time()
        letters.publish([message], "bad")
        assert time.process_time() - began_s < 4
    [letter] = read_all(amqp_url, dead_stream)
    assert letter.headers["relatum_dead_offset"] == 7


@pytest.mark.parametrize(
    ("properties", "expected"),
    [({"expiration": "never"}, PublishRejected), ({"message_id": "x" * 256}, InvalidInput)],
)
def test_what_the_broker_takes_at_no_time_is_final(
    amqp_url: str, stream_name: str, properties: dict[str, Any], expected: type[Exception]
) -> None:
    """The error is no transient one, and the publisher goes on with the next message."""
    with DirectPublisher(BrokerAddress.parse(amqp_url), "a test message") as publisher:
        with pytest.raises(expected):
            publisher.publish(stream_name, b"bad", pika.BasicProperties(**properties))
        publisher.publish(stream_name, b"good", pika.BasicProperties())
    assert [message.body for message in read_all(amqp_url, stream_name)] == [b"good"]


def test_a_burial_that_is_repeated_publishes_nothing_twice(amqp_url: str, stream_name: str, dead_stream: str) -> None:
    """Where the broker goes away between two dead letters, only what was not confirmed is published again."""
    publish_plain(amqp_url, stream_name, [b"a", b"b"])
    messages = read_all(amqp_url, stream_name)
    with Proxy.to(amqp_url) as proxy:
        letters = DeadLetters(BrokerAddress.parse(proxy.url(amqp_url)), dead_stream, timeout_s=3)

        def reasons() -> Iterator[tuple[Message, str]]:
            yield messages[0], "one"
            yield messages[1], "two"

        burial = Burial(letters, reasons())
        letters.publish(messages[:1], "before")
        publish = letters.publish

        def cut(some: Any, reason: str, **headers: Any) -> None:
            if reason == "two" and proxy.mode == "pass":
                proxy.mode = "blackhole"
            publish(some, reason, **headers)

        letters.publish = cut  # type: ignore[method-assign]
        with pytest.raises(Exception, match="could not be published"):
            burial.run()
        letters.publish = publish  # type: ignore[method-assign]
        proxy.mode = "pass"
        assert burial.run() == {}
        letters.close()
    assert [each.headers["relatum_dead_reason"] for each in read_all(amqp_url, dead_stream)] == ["before", "one", "two"]


# --- the collector --------------------------------------------------------------------------------------------------


def test_a_dead_letter_that_cannot_be_encoded_stops_no_worker(
    amqp_url: str, stream_url: str, stream_name: str, dead_stream: str, collector_of: Callable[..., Any]
) -> None:
    """The message is dead, without what AMQP cannot carry, and the next ones are consumed."""
    with RawPublisher(stream_url, stream_name) as publisher:
        publisher.publish(amqp_record(b"bad", message_id="bad", correlation_id="c" * 300))
    publish_plain(amqp_url, stream_name, [(b"bad", pika.BasicProperties(headers=LARGE, message_id="large"))])
    publish_plain(amqp_url, stream_name, [(b"good", pika.BasicProperties(message_id="good"))])
    collector = collector_of(dead_letter_stream=dead_stream)

    def execute(bulk: Bulk) -> list[Any]:
        return [None if each.message.body == b"good" else ValueError("no") for each in bulk.messages]

    collector.register_executor("order", execute, ExecutorOptions(bulk_messages=1, attempts=1))
    with collector:
        found = wait_final(collector, "bad", "large", "good")
    assert found == {"bad": (DEAD, "ValueError: no"), "large": (DEAD, "ValueError: no"), "good": (SUCCEEDED, None)}
    assert len(read_all(amqp_url, dead_stream)) == 2


def test_dead_letters_are_published_once_though_the_broker_goes_away_among_them(
    amqp_url: str,
    stream_name: str,
    dead_stream: str,
    collector_of: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a bulk's dead letters those that were confirmed are not published again when the others are."""
    publish_plain(amqp_url, stream_name, [(each, pika.BasicProperties(message_id=each)) for each in ("a", "b", "c")])
    publish, failures = DeadLetters.publish, [BrokerUnavailable("away"), BrokerUnavailable("away")]

    def failing(self: DeadLetters, messages: Sequence[Message], reason: str, **headers: Any) -> None:
        if messages[0].offset == 2 and failures:
            raise failures.pop()
        publish(self, messages, reason, **headers)

    monkeypatch.setattr(DeadLetters, "publish", failing)
    collector = collector_of(dead_letter_stream=dead_stream)

    def execute(bulk: Bulk) -> list[Any]:
        return [ValueError("no") for _ in bulk.messages]

    collector.register_executor("order", execute, ExecutorOptions(bulk_messages=3, attempts=1))
    with collector:
        found = wait_final(collector, "a", "b", "c")
    assert found == dict.fromkeys(("a", "b", "c"), (DEAD, "ValueError: no"))
    assert not failures
    assert [each.headers["relatum_dead_offset"] for each in read_all(amqp_url, dead_stream)] == [0, 1, 2]


@pytest.mark.parametrize("joins", [False, True])
def test_a_message_that_no_dead_letter_stream_takes_has_failed(
    amqp_url: str, stream_name: str, database_url: str, dead_stream: str, collector_of: Callable[..., Any], joins: bool
) -> None:
    """Its status is final, with both reasons, and those beside it keep their results."""
    publish_plain(amqp_url, stream_name, [(each, pika.BasicProperties(message_id=each)) for each in ("bad", "good")])
    collector = collector_of(dead_letter_stream=dead_stream)

    class Refusing(DirectPublisher):
        def publish(self, stream: str, body: bytes, properties: pika.BasicProperties) -> None:
            # The broker itself is asked with what it takes at no time.
            properties.expiration = "never"
            super().publish(stream, body, properties)

    collector._dead_letters._publisher = Refusing(BrokerAddress.parse(amqp_url), "a dead letter")

    def execute(bulk: Bulk) -> list[Any]:
        return [None if each.message.body == b"good" else ValueError("no") for each in bulk.messages]

    collector.register_executor("order", execute, ExecutorOptions(max_age_s=0.2, attempts=1, joins_transaction=joins))
    with collector:
        found = wait_final(collector, "bad", "good")
    assert found["good"] == (SUCCEEDED, None)
    status, reason = found["bad"]
    assert status is FAILED
    assert str(reason).startswith("ValueError: no; no dead letter: PublishRejected: ")


def test_a_message_id_that_no_index_holds_stops_no_collector(
    stream_url: str, stream_name: str, collector_of: Callable[..., Any]
) -> None:
    """The message is known by its place, is consumed, and so are the next ones."""
    long = secrets.token_urlsafe(2100)
    with RawPublisher(stream_url, stream_name) as publisher:
        publisher.publish(amqp_record(b"bad", message_id=long), amqp_record(b"good", message_id="good"))
    collector = collector_of()
    collector.register_executor("order", lambda bulk: None, ExecutorOptions(max_age_s=0.05))
    place = f"{stream_name}:0"
    with collector:
        assert wait_final(collector, place, "good") == {place: (SUCCEEDED, None), "good": (SUCCEEDED, None)}


def test_a_message_whose_type_cannot_be_told_is_passed_over(
    amqp_url: str, stream_name: str, collector_of: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    """It is named in the log and counted, whatever the application's function does, and the stream goes on."""
    publish_plain(amqp_url, stream_name, [b"raises", b"lies", (b"good", pika.BasicProperties(message_id="good"))])

    def type_of(message: Message) -> Any:
        if message.body == b"raises":
            raise KeyError("kind")
        return 7 if message.body == b"lies" else "order"

    collector = collector_of(type_of=type_of)
    collector.register_executor("order", lambda bulk: None, ExecutorOptions(max_age_s=0.05))
    with collector:
        assert wait_final(collector, "good") == {"good": (SUCCEEDED, None)}
        assert collector.passed_over == 2
    said = [record.getMessage() for record in caplog.records if "passed over" in record.getMessage()]
    assert [stream_name in each for each in said] == [True, True]


# --- what an executor can do to its bulk ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        lambda bulk: setattr(bulk, "messages", ()),
        lambda bulk: setattr(bulk, "taken", ()),
        lambda bulk: setattr(bulk, "id", 1),
        lambda bulk: setattr(bulk, "type", "other"),
        lambda bulk: setattr(bulk, "connection", None),
        lambda bulk: setattr(bulk.messages[0], "place", None),
        lambda bulk: setattr(bulk.messages[0], "message_id", "other"),
        lambda bulk: setattr(bulk.messages[0], "body", None),
        lambda bulk: setattr(bulk.messages[0], "attempts", 0),
    ],
)
def test_an_executor_cannot_take_messages_out_of_its_bulk(
    amqp_url: str, stream_name: str, database_url: str, change: Callable[[Bulk], None]
) -> None:
    """Each message has a final status, and the executor's error says why."""
    publish_plain(amqp_url, stream_name, [(each, pika.BasicProperties(message_id=each)) for each in "ab"])
    collector = MessageCollector(
        "billing", database=database_url, broker=amqp_url, streams=[stream_name], type_of=lambda message: "order"
    )
    collector.register_executor("order", change, ExecutorOptions(max_age_s=0.05, attempts=1))
    with collector:
        found = wait_final(collector, "a", "b")
        wait_until(lambda: collector.held_messages == 0, what="nothing held")
    assert {status for status, _ in found.values()} == {FAILED}
    assert all(str(reason).startswith("FrozenInstanceError: ") for _, reason in found.values())


def test_an_executor_that_commits_by_itself_is_told(
    amqp_url: str, stream_name: str, engine: sa.Engine, collector_of: Callable[..., Any]
) -> None:
    """What it wrote is not joined with its results: they are failures that say so."""
    publish_plain(amqp_url, stream_name, [(b"a", pika.BasicProperties(message_id="a"))])
    collector = collector_of()

    def execute(bulk: Bulk) -> None:
        assert bulk.connection is not None
        bulk.connection.execute(sa.text("SELECT 1"))
        bulk.connection.commit()

    collector.register_executor("order", execute, ExecutorOptions(max_age_s=0.05, attempts=1, joins_transaction=True))
    with collector:
        status, reason = wait_final(collector, "a")["a"]
    assert status is FAILED
    assert "ended the transaction" in str(reason)


# --- groups ---------------------------------------------------------------------------------------------------------


def unsound(number: int, **headers: Any) -> list[tuple[bytes, dict[str, Any]]]:
    """A group with a number past its last."""
    messages = [*whole_group(number, 1), of_group(number, 2)]
    return [(body, {**given, **headers}) for body, given in messages]


@pytest.mark.parametrize("face", ["blocking", "asyncio"])
def test_dead_letters_of_a_group_that_cannot_be_encoded_stop_no_consumer(
    amqp_url: str, database_url: str, engine: sa.Engine, stream_name: str, dead_stream: str, face: str
) -> None:
    """The group is dead, without what AMQP cannot carry, and the next one is given."""
    large = {name: value for name, value in LARGE.items() if name != "exact"} | {"exact": "y" * 2_700}
    publish_plain(amqp_url, stream_name, [*unsound(1, **large), *whole_group(2, 1)])
    with recording(amqp_url, engine, stream_name, keys=[GROUP_KEY]):
        wait_recorded(amqp_url, engine, stream_name)
    consumer = GroupConsumer("billing", dead_letter_stream=dead_stream)
    options: dict[str, Any] = {"consumer": consumer, "on_conflict": "dead_letter", "follow": True}
    found = first_group(face, amqp_url, database_url, stream_name, **options)
    assert found == group_id(2)
    assert [message.body for message in read_all(amqp_url, dead_stream)] == [b"1-1", b"1-2"]


def first_group(
    face: str, amqp_url: str, database_url: str, stream: str, *, stream_url: str | None = None, **options: Any
) -> str:
    """The first group that is given by one of the faces, within half a minute."""
    options |= {"idle_timeout_s": 30}
    if face == "blocking":
        with (
            Relations(amqp_url, database_url, stream_url=stream_url) as relations,
            relations.groups(stream, **options) as groups,
        ):
            return str(next(groups).group_id)

    async def first() -> str:
        async with (
            AsyncRelations(amqp_url, database_url, stream_url=stream_url) as relations,
            relations.groups(stream, **options) as groups,
        ):
            return str((await anext(groups)).group_id)

    return asyncio.run(asyncio.wait_for(first(), 240))
