"""One message stops nobody: what no waiting cures is final for the message it is about, and all others continue."""

import asyncio
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import FrozenInstanceError
from functools import partial
from typing import Any

import pika
import pytest
import sqlalchemy as sa

from relatum.collecting import Bulk, ExecutorOptions, OutcomeStatus
from relatum.common.ids import fingerprint
from relatum.errors import (
    BrokerUnavailable,
    InvalidInput,
    PublishNacked,
    PublishRejected,
    PublishUnroutable,
    UndecodableMessage,
)
from relatum.membership import GROUP_KEY
from relatum.own_messages import DeadLetters, DirectPublisher
from relatum.reading import BrokerAddress, Message, Position, position_of
from relatum_cli.show import message_document
from relatum_consumer import Relations
from relatum_consumer.groups import GroupConsumer
from relatum_consumer.web import WebOptions
from tests.support import until_answered, wait_until
from tests.support._raw_publisher import RawPublisher, amqp_record
from tests.support.collectors import COLLECTOR_FACES, DEAD, FAILED, SUCCEEDED, Collecting, collectors_of
from tests.support.groups import group_id, of_group, whole_group
from tests.support.place import Place
from tests.support.proxy import Proxy
from tests.support.web import asking

LARGE = {f"large-{number}": "x" * 32_000 for number in range(4)} | {"exact": "y" * 2_900, "small": 1}
"""Headers that fit into a frame of 131,072 bytes; with three more they do not."""


@pytest.fixture(params=COLLECTOR_FACES)
def collector_of(place: Place, request: pytest.FixtureRequest) -> Iterator[Callable[..., Any]]:
    """Makes durable collectors, of both faces, that follow the test's stream, and know one type."""
    with collectors_of(request.param) as make:
        yield partial(Collecting(place, make).collector, type_of=lambda message: "order")


def identified(*ids: str) -> list[tuple[bytes, pika.BasicProperties]]:
    """Messages with ids, which are their bodies, too."""
    return [(each.encode(), pika.BasicProperties(message_id=each)) for each in ids]


def collected(
    collector: Any, execute: Callable[[Bulk], Any], *ids: str, **options: Any
) -> dict[str, tuple[OutcomeStatus, str | None]]:
    """Collect until messages have a final status; gives it, and the reason."""
    collector.register_executor("order", execute, ExecutorOptions(**{"max_age_s": 0.05, "attempts": 1} | options))
    with collector:
        wait_until(lambda: all(collector.outcome(each).is_final for each in ids), what=f"final: {ids}")
        return {each: (collector.outcome(each).status, collector.outcome(each).reason) for each in ids}


def refuse(bulk: Bulk) -> list[Any]:
    return [None if each.message.body == b"good" else ValueError("no") for each in bulk.messages]


def buried(place: Place, dead_stream: str, reason: str, messages: list[Message] | None = None) -> list[Message]:
    """The dead letters of all messages of the stream, or of others."""
    with DeadLetters(BrokerAddress.parse(place.amqp), dead_stream) as letters:
        for message in place.messages() if messages is None else messages:
            letters.publish(message, reason)
    return place.messages(dead_stream)


def unpublished(patch: pytest.MonkeyPatch, offset: int, *failures: Exception) -> list[Exception]:
    """Let publishing the dead letter of an offset fail so often; give the failures that are left."""
    left, publish = list(failures), DeadLetters.publish

    def failing(self: DeadLetters, message: Message, reason: str, **headers: Any) -> None:
        if message.offset == offset and left:
            raise left.pop()
        publish(self, message, reason, **headers)

    patch.setattr(DeadLetters, "publish", failing)
    return left


def test_headers_larger_than_a_frame_are_left_out_of_a_dead_letter(place: Place, dead_stream: str) -> None:
    """A dead letter leaves out the headers that no longer fit into a frame."""
    place.put((b"body", pika.BasicProperties(headers=LARGE, correlation_id="c")))
    assert [dict(message.headers) for message in place.messages()] == [LARGE]
    [letter] = buried(place, dead_stream, "bad " * 250)
    [left_out] = str(letter.headers["relatum_dead_left_out"]).split(", ")
    assert left_out.startswith("header large-")
    assert {f"header {name}" for name in LARGE.keys() - letter.headers.keys()} == {left_out}
    assert (letter.headers["small"], letter.properties.correlation_id) == (1, "c")
    assert letter.headers["relatum_dead_offset"] == 0


def test_a_dead_letter_of_many_headers_costs_no_more_than_each_of_them(place: Place, dead_stream: str) -> None:
    """A dead letter of 60,000 headers and a long reason costs seconds of processor time and fits into a stream."""
    headers = {f"header-{number}": "x" * 20 for number in range(60_000)}
    message = Message.from_amqp("orders", 7, pika.BasicProperties(headers=headers), b"body")
    began_s = time.process_time()
    [letter] = buried(place, dead_stream, "é" * 100_000, [message])
    assert time.process_time() - began_s < 4
    assert (letter.headers["relatum_dead_reason"], letter.headers["relatum_dead_offset"]) == ("é" * 1_000, 7)


def test_what_the_broker_takes_at_no_time_is_final(place: Place) -> None:
    """A message that the broker never accepts is a permanent error, and the next message is published."""
    never, too_long = pika.BasicProperties(expiration="never"), pika.BasicProperties(message_id="x" * 256)
    with DirectPublisher(BrokerAddress.parse(place.amqp), "a test message") as publisher:
        for properties, expected in ((never, PublishRejected), (too_long, InvalidInput)):
            with pytest.raises(expected):
                publisher.publish(place.stream, b"bad", properties)
            publisher.close()  # publishing again opens another connection
            publisher.publish(place.stream, b"good", pika.BasicProperties())
    assert [message.body for message in place.messages()] == [b"good"] * 2


def test_an_interrupted_message_confirms_no_other(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C ends a publish before its confirm, which does not count for the next message."""

    def interrupt(*_: Any) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    with DirectPublisher(BrokerAddress.parse(place.amqp), "a test message") as publisher:
        publisher.publish(place.stream, b"0", pika.BasicProperties())
        monkeypatch.setattr(publisher._channel, "_flush_output", interrupt)
        with pytest.raises(KeyboardInterrupt):
            publisher.publish(place.stream, b"interrupted", pika.BasicProperties())
        with pytest.raises(PublishUnroutable):
            publisher.publish("no stream", b"1", pika.BasicProperties())


def test_a_broker_that_does_not_answer_counts_as_away(place: Place) -> None:
    """Publishing and closing end in time while no confirm comes, and continue once the broker answers."""
    with Proxy.to(place.amqp) as proxy:
        address = BrokerAddress.parse(proxy.url(place.amqp))
        with DirectPublisher(address, "a test message", timeout_s=2.0) as publisher:
            until_answered(lambda: publisher.publish(place.stream, b"0", pika.BasicProperties()))
            proxy.mode = "blackhole"
            for _ in range(2):
                with pytest.raises(BrokerUnavailable):
                    publisher.publish(place.stream, b"lost", pika.BasicProperties())
            proxy.mode = "pass"
            until_answered(lambda: publisher.publish(place.stream, b"1", pika.BasicProperties()))
            proxy.mode = "blackhole"
    # The message that was answered too late was published again.
    assert list(dict.fromkeys(message.body for message in place.messages())) == [b"0", b"1"]
    away = DirectPublisher(BrokerAddress.parse("amqp://user:secret@127.0.0.1:1/"), "a test message")
    with away, pytest.raises(BrokerUnavailable) as caught:
        away.publish(place.stream, b"lost", pika.BasicProperties())
    assert "secret" not in str(caught.value)


def test_a_dead_letter_that_cannot_be_encoded_stops_no_worker(
    place: Place, dead_stream: str, collector_of: Callable[..., Any]
) -> None:
    """A dead letter names what AMQP cannot carry of its message, and the next messages are consumed."""
    with RawPublisher(place.stream_url, place.stream) as publisher:
        publisher.publish(amqp_record(b"bad", message_id="bad", correlation_id="c" * 300))
    place.put((b"bad", pika.BasicProperties(headers=LARGE, message_id="large")))
    place.put(*identified("good"))
    collector = collector_of(dead_letter_stream=dead_stream)
    found = collected(collector, refuse, "bad", "large", "good", bulk_messages=1)
    assert found == {"bad": (DEAD, "ValueError: no"), "large": (DEAD, "ValueError: no"), "good": (SUCCEEDED, None)}
    letter, _ = place.messages(dead_stream)
    assert (letter.body, letter.properties.message_id, letter.properties.correlation_id) == (b"bad", "bad", None)
    told = {"reason": "ValueError: no", "stream": place.stream, "offset": 0, "left_out": "correlation_id"}
    assert letter.headers.items() >= {f"relatum_dead_{name}": value for name, value in told.items()}.items()


def test_dead_letters_are_published_once_though_the_broker_goes_away_among_them(
    place: Place, dead_stream: str, collector_of: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bulk's confirmed dead letters are not published again when the others are."""
    place.put(*identified("a", "b", "c"))
    failures = unpublished(monkeypatch, 2, BrokerUnavailable("away"), BrokerUnavailable("away"))
    found = collected(collector_of(dead_letter_stream=dead_stream), refuse, "a", "b", "c", bulk_messages=3)
    assert found == dict.fromkeys(("a", "b", "c"), (DEAD, "ValueError: no"))
    assert not failures
    assert [each.headers["relatum_dead_offset"] for each in place.messages(dead_stream)] == [0, 1, 2]


@pytest.mark.parametrize("error", [BrokerUnavailable("away"), PublishNacked("full")])
def test_a_dead_letter_that_has_to_wait_fails_no_other_message_of_a_joined_bulk(
    place: Place, dead_stream: str, collector_of: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """A joined attempt whose dead letters cannot be published now is repeated, and counts for none."""
    place.put(*identified("bad", "good"))
    left = unpublished(monkeypatch, 0, error)
    options = {"bulk_messages": 2, "max_age_s": 3.0, "joins_transaction": True}
    found = collected(collector_of(dead_letter_stream=dead_stream), refuse, "bad", "good", **options)
    assert found == {"bad": (DEAD, "ValueError: no"), "good": (SUCCEEDED, None)}
    assert not left
    assert [each.body for each in place.messages(dead_stream)] == [b"bad"]


@pytest.mark.parametrize("joins", [False, True])
def test_a_message_that_no_dead_letter_stream_takes_has_failed(
    place: Place, dead_stream: str, collector_of: Callable[..., Any], joins: bool
) -> None:
    """A message whose dead letter is rejected has failed for both reasons, and others keep their results."""
    place.put(*identified("bad", "good"))
    collector = collector_of(dead_letter_stream=dead_stream)

    class Refusing(DirectPublisher):
        def publish(self, stream: str, body: bytes, properties: pika.BasicProperties) -> None:
            # The broker itself is asked, with a message that it never accepts.
            properties.expiration = "never"
            super().publish(stream, body, properties)

    collector._streams.dead_letters._publisher = Refusing(BrokerAddress.parse(place.amqp), "a dead letter")
    found = collected(collector, refuse, "bad", "good", max_age_s=0.2, joins_transaction=joins)
    assert found["good"] == (SUCCEEDED, None)
    status, reason = found["bad"]
    assert status is FAILED
    assert str(reason).startswith("ValueError: no; no dead letter: PublishRejected: ")


def test_a_message_id_that_no_index_holds_stops_no_collector(place: Place, collector_of: Callable[..., Any]) -> None:
    """A message whose id is too long for an index is consumed under its place, and so are the next ones."""
    long, where = secrets.token_urlsafe(2100), f"{place.stream}:0"
    with RawPublisher(place.stream_url, place.stream) as publisher:
        publisher.publish(amqp_record(b"bad", message_id=long), amqp_record(b"good", message_id="good"))
    found = collected(collector_of(), lambda bulk: None, where, "good")
    assert found == {where: (SUCCEEDED, None), "good": (SUCCEEDED, None)}


def test_a_message_whose_type_cannot_be_told_is_passed_over(
    place: Place, collector_of: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    """A message for which `type_of` raises or returns no text is logged and counted, and the next are consumed."""
    place.put(b"raises", b"cancels", b"lies", *identified("good"))

    def type_of(message: Message) -> Any:
        if message.body in (b"raises", b"cancels"):
            raise KeyError("kind") if message.body == b"raises" else asyncio.CancelledError
        return 7 if message.body == b"lies" else "order"

    collector = collector_of(type_of=type_of)
    assert collected(collector, lambda bulk: None, "good") == {"good": (SUCCEEDED, None)}
    assert collector.statistics().passed_over == 3
    said = [record.getMessage() for record in caplog.records if "passed over" in record.getMessage()]
    assert [place.stream in each for each in said] == [True, True, True]


def test_a_batch_that_cannot_be_unpacked_is_no_empty_message(
    place: Place, collector_of: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Its messages raise an error instead of an empty body; a collector names and counts them, and the page goes on."""
    with RawPublisher(place.stream_url, place.stream) as publisher:
        publisher.publish((1, 2, 50, b"not gzip"), amqp_record(b"good", message_id="good"))
    for message in place.messages()[:2]:
        assert (message.stream, dict(message.headers)) == (place.stream, {})
        assert position_of(message) == Position(message.offset, fingerprint(None, b""), message.chunk_ms)
        with pytest.raises(UndecodableMessage, match="not gzip") as raised:
            _ = message.body
        assert (raised.value.stream, raised.value.offset) == (place.stream, message.offset)
    collector = collector_of()
    assert collected(collector, lambda bulk: None, "good") == {"good": (SUCCEEDED, None)}
    assert collector.statistics().passed_over == 2
    (said,) = [record.getMessage() for record in caplog.records if "passed over" in record.getMessage()]
    assert f"{place.stream}@0" in said
    place.record()
    with asking(WebOptions(place.amqp, place.database, timeout_s=60)) as page:
        assert [row["bytes"] for row in page.answer("/live", stream=place.stream)["results"]] == [4, 0, 0]
        assert page.answer("/message", stream=place.stream, offset=0)["body"]["kind"] == "unreadable"
    document = message_document(place.messages()[0])
    assert (document["body"], "not gzip" in document["error"]) == (None, True)


def test_an_executor_cannot_take_messages_out_of_its_bulk(place: Place, collector_of: Callable[..., Any]) -> None:
    """An executor cannot change a bulk or its messages, and the error it raises is the reason of each."""
    place.put(*identified("a", "b"))
    collector = collector_of()

    def change(bulk: Bulk) -> None:
        changes: list[tuple[Any, str]] = [(bulk, name) for name in ("messages", "reason", "id", "type", "connection")]
        changes += [(bulk.messages[0], name) for name in ("place", "message_id", "body", "attempts")]
        for changed, name in changes:
            with pytest.raises(FrozenInstanceError):
                setattr(changed, name, None)
        bulk.messages = ()  # type: ignore[misc]

    found = collected(collector, change, "a", "b")
    wait_until(lambda: collector.statistics().held_messages == 0, what="nothing held")
    assert {status for status, _ in found.values()} == {FAILED}
    assert all(str(reason).startswith("FrozenInstanceError: ") for _, reason in found.values())


@pytest.mark.parametrize("end", [sa.Connection.commit, sa.Connection.close])
def test_an_executor_that_ends_its_transaction_is_told(
    place: Place, collector_of: Callable[..., Any], end: Callable[[sa.Connection], None]
) -> None:
    """The results of an executor that commits or closes the joined connection are failures with that reason."""
    place.put(*identified("a"))

    def execute(bulk: Bulk) -> None:
        assert bulk.connection is not None
        bulk.connection.execute(sa.text("SELECT 1"))
        end(bulk.connection)

    status, reason = collected(collector_of(), execute, "a", joins_transaction=True)["a"]
    assert status is FAILED
    assert "ended the transaction" in str(reason)


def test_a_connection_lost_in_a_with_block_fails_no_message(place: Place, collector_of: Callable[..., Any]) -> None:
    """An executor that closes a joined connection which was lost is called again in the same attempt."""
    place.put(*identified("a"))
    attempts: list[int] = []

    def execute(bulk: Bulk) -> None:
        attempts.append(bulk.messages[0].attempts)
        assert bulk.connection is not None
        if len(attempts) == 1:
            with bulk.connection as connection:
                connection.execute(sa.text("SELECT pg_terminate_backend(pg_backend_pid())"))

    assert collected(collector_of(), execute, "a", joins_transaction=True) == {"a": (SUCCEEDED, None)}
    assert attempts == [1, 1]


def unsound(number: int, **headers: Any) -> list[tuple[bytes, dict[str, Any]]]:
    """A group with a number past its last."""
    messages = [*whole_group(number, 1), of_group(number, 2)]
    return [(body, {**given, **headers}) for body, given in messages]


def test_dead_letters_of_a_group_that_cannot_be_encoded_stop_no_consumer(place: Place, dead_stream: str) -> None:
    """A group becomes dead letters without what AMQP cannot carry, and the next group is given."""
    large = LARGE | {"exact": "y" * 2_700}
    place.put_recorded(*unsound(1, **large), *whole_group(2, 1), keys=[GROUP_KEY])
    consumer = GroupConsumer("billing", dead_letter_stream=dead_stream)
    with Relations(place.amqp, place.database) as relations:
        groups = relations.groups(place.stream, consumer=consumer, on_conflict="dead_letter", follow=False)
        assert [group.group_id for group in groups] == [group_id(2)]
    assert [message.body for message in place.messages(dead_stream)] == [b"1-1", b"1-2"]
