"""Spans of look-ups, recorders, collectors and consumers on real servers, and what they link to."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any
from unittest.mock import Mock

import pika
import pytest
from opentelemetry import propagate, trace
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.trace import SpanContext, SpanKind, StatusCode

from relatum import otel
from relatum.collecting import AsyncMessageCollector, ExecutorOptions, MessageCollector
from relatum.contexts import SerialConsumer
from relatum.errors import DatabaseUnavailable, OffsetNotFound
from relatum.keys import KeyDefinition
from relatum.store.catalog import add_keys
from relatum_consumer import Relations
from relatum_consumer.expectations import Expectation
from tests.support import wait_until
from tests.support.collectors import a_loop
from tests.support.place import Place
from tests.support.serial_consuming import serial_bed
from tests.support.spans import Spans, collected_spans

NOW = datetime(2026, 1, 1, tzinfo=UTC)
PROCESS = {"messaging.system": "rabbitmq", "messaging.operation.name": "process", "messaging.operation.type": "process"}


@pytest.fixture
def spans() -> Iterator[Spans]:
    with collected_spans() as spans:
        yield spans
    otel.configure()


def sender(spans: Spans, name: str = "send") -> tuple[SpanContext, dict[str, Any]]:
    """A span that sends a message, and the headers it gives that."""
    headers: dict[str, Any] = {}
    with spans.provider.get_tracer("app").start_as_current_span(name) as span:
        propagate.inject(headers)
    return span.get_span_context(), headers


def linked(span: ReadableSpan) -> list[int]:
    return [link.context.span_id for link in span.links]


def test_each_look_up_is_a_span_of_its_name(place: Place, relations: Relations, spans: Spans) -> None:
    """By whichever face; with what came of it, below the span that is current, and above those of what it asks."""
    headers = {"order_id": "zebra-9", "relatum_time": round(NOW.timestamp() * 1e6)}
    place.put((b"", headers))
    place.record(keys=["order_id"])
    spans.clear()
    message = relations.read(place.stream, 0)
    later = NOW + timedelta(seconds=1)
    expectation = Expectation("shipped", place.stream, "order_id", place.stream, 1)
    calls: dict[str, Callable[[], Any]] = {
        "keys": relations.keys,
        "streams": relations.streams,
        "values": lambda: relations.values("order_id"),
        "related": lambda: relations.related(message),
        "find": lambda: relations.find("order_id", "zebra-9"),
        "wait_related": lambda: relations.wait_related(message, timeout_s=0),
        "trace": lambda: relations.trace(message),
        "after": lambda: relations.after(NOW, place.stream),
        "before": lambda: relations.before(later, place.stream),
        "nearest": lambda: relations.nearest(later, place.stream),
        "window": lambda: relations.window(NOW, place.stream, after_s=1),
        "around": lambda: relations.around(NOW, after_s=1),
        "expectations": relations.expectations,
        "missing": lambda: relations.missing(expectation, since=NOW, until=later),
        "group_consumers": relations.group_consumers,
    }
    with spans.provider.get_tracer("app").start_as_current_span("request") as request:
        for call in calls.values():
            call()
    assert spans.names == ["relatum read", *(f"relatum {name}" for name in calls)]
    by_name = {each.attributes["relatum.lookup"]: each for each in spans.ours}
    assert {each.parent.span_id for each in spans.ours[1:]} == {request.get_span_context().span_id}
    assert by_name["find"].kind is SpanKind.INTERNAL
    found = {"relatum.lookup": "find", "relatum.keys": ("order_id",), "relatum.status": "found"}
    assert by_name["find"].attributes == found | {
        "messaging.system": "rabbitmq",
        "messaging.destination.name": place.stream,
        "messaging.batch.message_count": 1,
    }
    assert by_name["related"].attributes["relatum.status"] == "absent"
    assert by_name["read"].attributes["messaging.destination.name"] == place.stream
    assert "zebra-9" not in repr([each.to_json() for each in spans.ours])


def test_a_look_up_that_fails_says_by_what(place: Place, spans: Spans) -> None:
    """Its error's class; what was away in words."""
    with Relations(place.amqp, place.database) as relations, pytest.raises(OffsetNotFound):
        relations.read(place.stream, 7)
    with Relations(place.amqp, "postgresql://nobody@127.0.0.1:1/none") as relations, pytest.raises(DatabaseUnavailable):
        relations.keys()
    read, keys = spans.ours
    assert read.attributes["error.type"] == "relatum.errors.OffsetNotFound"
    assert read.status.description is None
    assert keys.attributes["error.type"] == "relatum.errors.DatabaseUnavailable"
    assert keys.status.status_code is StatusCode.ERROR
    assert "127.0.0.1" in (keys.status.description or "")
    assert not [*read.events, *keys.events]


def test_a_recorders_transaction_links_to_who_published(place: Place, spans: Spans) -> None:
    """A span for each transaction: how much it wrote, and a link to the span of each message, up to 128."""
    senders = [sender(spans) for _ in range(200)]
    place.put(*[(b"", headers | {"order_id": "zebra-9"}) for _, headers in senders])
    place.put((b"", {"order_id": "none sent this"}))
    place.record(keys=["order_id"])
    recorded = [each for each in spans.ours if each.name == f"record {place.stream}"]
    assert sum(each.attributes["messaging.batch.message_count"] for each in recorded) == 201
    assert sum(each.attributes["relatum.rows"] for each in recorded) == 201
    first = recorded[0]
    count = min(first.attributes["messaging.batch.message_count"], 128)
    assert linked(first) == [each.span_id for each, _ in senders[:count]]
    assert first.kind is SpanKind.CONSUMER
    assert first.parent is None
    counted = {"messaging.batch.message_count", "relatum.rows"}
    of_record = {"messaging.operation.name": "record", "relatum.stream_count": 1}
    of_copy = {"db.system.name": "postgresql", "db.operation.name": "COPY"}
    assert {name: value for name, value in first.attributes.items() if name not in counted} == {
        **(PROCESS | of_record | of_copy),
        "messaging.destination.name": place.stream,
    }
    assert "zebra-9" not in repr([each.to_json() for each in spans.ours])
    # A back-fill has another name, and no links: what it writes was sent long ago.
    add_keys(place.engine, ["another"])
    place.backfill()
    (span,) = [each for each in spans.ours if each.name == f"backfill {place.stream}"]
    assert span.attributes["messaging.operation.name"] == "backfill"
    assert span.attributes["messaging.batch.message_count"] == 201
    assert not span.links


def test_what_postgresql_refuses_is_the_transactions_error(place: Place, spans: Spans) -> None:
    """By its class; the refused row is not told."""
    place.put((b"", {"order_id": "zebra-9"}))
    place.sql("ALTER TABLE relatum.relationships ADD CHECK (value <> 'zebra-9')")
    with place.recording(keys=["order_id"]):
        wait_until(lambda: spans.ours, what="a transaction")
    assert spans.ours[0].attributes["error.type"] == "relatum.errors.RowRefused"
    assert spans.ours[0].status.status_code is StatusCode.ERROR
    assert "zebra-9" not in spans.ours[0].to_json()


def published(place: Place, spans: Spans, count: int) -> list[int]:
    """Publish messages for a collector, each sent by a span; gives the ids of those."""
    senders = [sender(spans) for _ in range(count)]
    properties = [
        pika.BasicProperties(type="order", message_id=f"m-{n}", correlation_id="c", headers=headers)
        for n, (_, headers) in enumerate(senders)
    ]
    place.put(*[(b"x" * 10_000, each) for each in properties])
    return [each.span_id for each, _ in senders]


def bulks(spans: Spans) -> list[ReadableSpan]:
    return [each for each in spans.ours if "relatum.bulk.type" in each.attributes]


@contextmanager
def collecting(place: Place, execute: Callable[[Any], Any], **options: Any) -> Iterator[MessageCollector]:
    collector = MessageCollector("billing", database=place.database, broker=place.amqp, streams=[place.stream])
    collector.register_executor("order", execute, ExecutorOptions(**options))
    with collector:
        yield collector


def bulk_of(place: Place, spans: Spans, execute: Callable[[Any], Any], **options: Any) -> ReadableSpan:
    with collecting(place, execute, **options):
        wait_until(lambda: bulks(spans), what="a bulk")
    (bulk,) = bulks(spans)
    return bulk


@pytest.mark.parametrize("joins", [False, True])
def test_a_bulk_is_a_span_above_what_its_executor_does(place: Place, spans: Spans, joins: bool) -> None:
    """With links to those who sent its messages, and what became of them; the executor's own spans belong to it."""
    senders = published(place, spans, 3)

    def execute(bulk: Any) -> None:
        with spans.provider.get_tracer("app").start_as_current_span("charge"):
            bulk.failed(bulk.messages[0], "no money", retry=False)

    bulk = bulk_of(place, spans, execute, bulk_messages=3, joins_transaction=joins)
    (charge,) = [each for each in spans.all if each.name == "charge"]
    assert charge.parent.span_id == bulk.context.span_id
    assert linked(bulk) == senders
    where = {"messaging.destination.name": place.stream}
    assert [link.attributes for link in bulk.links] == [where | {"relatum.offset": n} for n in range(3)]
    assert (bulk.name, bulk.kind) == (f"process {place.stream}", SpanKind.CONSUMER)
    assert bulk.attributes == {
        **PROCESS,
        "messaging.batch.message_count": 3,
        "messaging.destination.name": place.stream,
        "messaging.consumer.group.name": "billing",
        "relatum.bulk.type": "order",
        "relatum.bulk.reason": "messages",
        "relatum.bulk.succeeded": 2,
        "relatum.bulk.failed": 1,
        "relatum.bulk.dead": 0,
    }
    assert bulk.status.status_code is StatusCode.UNSET


@pytest.mark.parametrize("joins", [False, True])
def test_an_executor_that_raises_is_the_bulks_error(place: Place, spans: Spans, joins: bool) -> None:
    """By the class: what it says may be anything. Where ids are allowed, a link names its message's."""
    otel.configure(ids=True)
    published(place, spans, 1)

    def execute(bulk: Any) -> None:
        raise ValueError("card zebra-9")

    bulk = bulk_of(place, spans, execute, bulk_messages=1, attempts=1, joins_transaction=joins)
    assert bulk.attributes["error.type"] == "ValueError"
    assert bulk.status.status_code is StatusCode.ERROR
    assert "zebra-9" not in bulk.to_json()
    (link,) = bulk.links
    assert link.attributes["messaging.message.id"] == "m-0"
    assert link.attributes["messaging.message.conversation_id"] == "c"


def test_an_executor_of_asyncio_is_below_its_bulk(place: Place, spans: Spans) -> None:
    """A coroutine function in the collector's loop has the bulk's span as its own."""
    published(place, spans, 1)
    seen: list[int] = []

    async def execute(bulk: Any) -> None:
        await asyncio.sleep(0)
        seen.append(trace.get_current_span().get_span_context().span_id)

    async def scenario() -> None:
        collector = AsyncMessageCollector("billing", database=place.database, broker=place.amqp, streams=[place.stream])
        collector.register_executor("order", execute, ExecutorOptions(bulk_messages=1))
        async with collector:
            await asyncio.to_thread(wait_until, lambda: bulks(spans), what="a bulk")

    with a_loop() as loop:
        loop.run(scenario())
    assert seen == [bulks(spans)[0].context.span_id]


def test_messages_that_were_left_in_their_stream_are_linked_once_they_are_read(place: Place, spans: Spans) -> None:
    """What a collector has no memory for is read when its turn comes: then it is known who sent it."""
    senders = published(place, spans, 12)
    gate = threading.Event()

    def execute(bulk: Any) -> None:
        assert gate.wait(90)

    with collecting(place, execute, bulk_messages=2, queue_bulks=1, when_full="spill") as collector:
        try:
            wait_until(lambda: collector.statistics().held_messages == 12, what="all messages taken")
            wait_until(lambda: collector.statistics().held_bytes < 12 * 10_000, what="bodies left in the stream")
        finally:
            gate.set()
        wait_until(lambda: len(bulks(spans)) == 6, what="all bulks")
    assert [each for bulk in bulks(spans) for each in linked(bulk)] == senders


def test_a_batch_that_a_function_is_given_is_a_span(place: Place, spans: Spans) -> None:
    """Above what the function does, with links to those who sent its messages, and by what it raised."""
    sent, headers = sender(spans)

    def handle(batch: Any) -> None:
        with spans.provider.get_tracer("app").start_as_current_span("charge"):
            raise KeyError(batch.messages[0].body)

    with (
        serial_bed(place.amqp, place.engine, 1) as bed,
        SerialConsumer(bed.name, "till", database=place.database, broker=place.amqp) as consumer,
    ):
        place.put((b"zebra-9", headers), to=bed.streams[0])
        with pytest.raises(KeyError, match="zebra-9"):
            consumer.run(handle)
    (span,) = spans.ours
    (charge,) = [each for each in spans.all if each.name == "charge"]
    assert charge.parent.span_id == span.context.span_id
    assert linked(span) == [sent.span_id]
    assert (span.name, span.kind) == (f"process {bed.name}", SpanKind.CONSUMER)
    assert span.attributes == {
        **PROCESS,
        "messaging.destination.name": bed.name,
        "messaging.destination.partition.id": bed.streams[0],
        "messaging.consumer.group.name": "till",
        "messaging.batch.message_count": 1,
        "error.type": "KeyError",
    }
    assert "zebra-9" not in span.to_json()


def test_values_of_masked_keys_are_told_nowhere(place: Place, relations: Relations, spans: Spans) -> None:
    """Also where somebody allowed the key, and under the name of another key that is taken from the same place."""
    otel.configure(values_of=["person", "user", "order_id"])
    place.put((b"", {"person": "zebra-9", "order_id": "17"}))
    keys = [KeyDefinition("person", masked=True), KeyDefinition("user", "header:person"), "order_id"]
    place.record(keys=keys)
    relations.related(relations.read(place.stream, 0))
    relations.find("person", "zebra-9")
    told = repr([each.to_json() for each in spans.ours])
    assert "zebra-9" not in told
    related = spans.ours[-2].attributes
    assert sorted(related["relatum.keys"]) == ["order_id", "person", "user"]
    assert {name: each for name, each in related.items() if name.startswith("relatum.key.")} == {
        "relatum.key.order_id": ("17",)
    }


@pytest.mark.parametrize("broken", [("should_sample",), ("on_start", "on_end", "extract")], ids=["sampler", "others"])
def test_no_row_no_answer_and_no_bulk_is_lost_to_what_raises_in_a_span(
    place: Place, relations: Relations, spans: Spans, broken: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Look-ups answer, a recorder records all, and a collector's bulks succeed, as without OpenTelemetry."""
    processor = SpanProcessor()
    spans.provider.add_span_processor(processor)
    of = {"should_sample": spans.provider.sampler, "extract": propagate.get_global_textmap()}
    for name in broken:
        monkeypatch.setattr(of.get(name, processor), name, Mock(side_effect=ValueError("broken")))
    carrier = {"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", "order_id": "17"}
    place.put(*[(b"", pika.BasicProperties(type="order", headers=carrier))] * 5)
    place.record(keys=["order_id"])
    found = relations.find("order_id", "17")
    assert [each.offset for each in found] == [0, 1, 2, 3, 4]
    assert len(relations.trace(found[0])) == 5
    with pytest.raises(OffsetNotFound):
        relations.read(place.stream, 7)
    done: list[int] = []
    with collecting(place, lambda bulk: done.append(len(bulk)), bulk_messages=5) as collector:
        wait_until(lambda: collector.statistics().held_messages == 0 and done, what="a bulk")
    assert done == [5]
