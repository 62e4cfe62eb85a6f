"""Spans of lookups, recorders, collectors and consumers on real servers, and what they link to."""

import asyncio
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any
from unittest.mock import Mock

import pika
import pytest
from opentelemetry import propagate, trace
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.trace import SpanContext, SpanKind, StatusCode

from relatum.collecting import AsyncMessageCollector, ExecutorOptions
from relatum.contexts import SerialConsumer
from relatum.errors import DatabaseUnavailable, OffsetNotFound
from relatum.keys import KeyDefinition
from relatum.store.catalog import add_keys
from relatum_consumer import Relations
from relatum_consumer.expectations import Expectation
from tests.support import wait_until
from tests.support.collectors import FOREVER, Collecting, Gate
from tests.support.place import Place
from tests.support.serial_consuming import serial_bed
from tests.support.spans import Spans

NOW = datetime(2026, 1, 1, tzinfo=UTC)
PROCESS = {"messaging.system": "rabbitmq", "messaging.operation.name": "process", "messaging.operation.type": "process"}


def sender(spans: Spans, name: str = "send") -> tuple[SpanContext, dict[str, Any]]:
    """A span that sends a message, and the headers it gives that."""
    headers: dict[str, Any] = {}
    with spans.provider.get_tracer("app").start_as_current_span(name) as span:
        propagate.inject(headers)
    return span.get_span_context(), headers


def linked(span: ReadableSpan) -> list[int]:
    return [link.context.span_id for link in span.links]


def test_each_look_up_is_a_span_of_its_name(place: Place, relations: Relations, spans: Spans) -> None:
    """Each lookup is a span of its name below the current one, with its keys and status but no values."""
    place.put_recorded((b"", {"order_id": "zebra-9", "relatum_time": round(NOW.timestamp() * 1e6)}), keys=["order_id"])
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
    """The span of a lookup that failed has the error's class, and in words which server was away."""
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
    """The span of a transaction counts what it wrote and links to the senders of up to 128 messages."""
    senders = [sender(spans) for _ in range(200)]
    place.put(*[(b"", headers | {"order_id": "zebra-9"}) for _, headers in senders])
    place.put_recorded((b"", {"order_id": "none sent this"}), keys=["order_id"])
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
    # A back-fill has another name, and no links: its messages were sent long ago.
    add_keys(place.engine, ["another"])
    place.backfill()
    (span,) = [each for each in spans.ours if each.name == f"backfill {place.stream}"]
    assert span.attributes["messaging.operation.name"] == "backfill"
    assert span.attributes["messaging.batch.message_count"] == 201
    assert not span.links


def test_what_postgresql_refuses_is_the_transactions_error(place: Place, spans: Spans) -> None:
    """The span of a refused transaction has the error's class and nothing of the row."""
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
    for number, (_, headers) in enumerate(senders):
        made = pika.BasicProperties(type="order", message_id=f"m-{number}", correlation_id="c", headers=headers)
        place.put((b"x" * 10_000, made))
    return [each.span_id for each, _ in senders]


def bulks(spans: Spans) -> list[ReadableSpan]:
    return [each for each in spans.ours if "relatum.bulk.type" in each.attributes]


def bulk_of(place: Place, spans: Spans, execute: Callable[[Any], Any], **options: Any) -> ReadableSpan:
    with Collecting(place).collector(execute, **FOREVER | options):
        wait_until(lambda: bulks(spans), what="a bulk")
    (bulk,) = bulks(spans)
    return bulk


@pytest.mark.parametrize("joins", [False, True])
def test_a_bulk_is_a_span_above_what_its_executor_does(place: Place, spans: Spans, joins: bool) -> None:
    """The span of a bulk links to its messages' senders, counts their outcomes, and is the executor's parent."""
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
    """The span of a bulk has the class of its executor's error and no words of it; links name no ids."""
    published(place, spans, 1)

    def execute(bulk: Any) -> None:
        raise ValueError("card zebra-9")

    bulk = bulk_of(place, spans, execute, bulk_messages=1, attempts=1, joins_transaction=joins)
    assert bulk.attributes["error.type"] == "ValueError"
    assert bulk.status.status_code is StatusCode.ERROR
    assert "zebra-9" not in bulk.to_json()
    (link,) = bulk.links
    assert link.attributes.keys() == {"messaging.destination.name", "relatum.offset"}


async def test_an_executor_of_asyncio_is_below_its_bulk(place: Place, spans: Spans) -> None:
    """A coroutine function that a collector calls has the bulk's span as its current one."""
    published(place, spans, 1)
    seen: list[int] = []

    async def execute(bulk: Any) -> None:
        await asyncio.sleep(0)
        seen.append(trace.get_current_span().get_span_context().span_id)

    collector = Collecting(place, AsyncMessageCollector).collector()
    collector.register_executor("order", execute, ExecutorOptions(bulk_messages=1))
    async with collector:
        await asyncio.to_thread(wait_until, lambda: bulks(spans), what="a bulk")
    assert seen == [bulks(spans)[0].context.span_id]


def test_messages_that_were_left_in_their_stream_are_linked_once_they_are_read(place: Place, spans: Spans) -> None:
    """A message that a collector had left in its stream is linked to its sender once it is read."""
    senders, gate = published(place, spans, 12), Gate()
    options = {"bulk_messages": 2, "queue_bulks": 1, "when_full": "spill"}
    with Collecting(place).collector(gate, **FOREVER | options) as collector:
        with gate.closed():
            wait_until(lambda: collector.statistics().held_messages == 12, what="all messages taken")
            wait_until(lambda: collector.statistics().held_bytes < 12 * 10_000, what="bodies left in the stream")
        wait_until(lambda: len(bulks(spans)) == 6, what="all bulks")
    assert [each for bulk in bulks(spans) for each in linked(bulk)] == senders


def test_a_batch_that_a_function_is_given_is_a_span(place: Place, spans: Spans) -> None:
    """The span of a batch is the parent of its function's spans, with links to the senders and the error's class."""
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


def test_values_of_keys_are_told_nowhere(place: Place, relations: Relations, spans: Spans) -> None:
    """Spans name the keys that a lookup searches for, and never show a value."""
    place.put((b"", {"person": "zebra-9", "order_id": "17"}))
    keys = [KeyDefinition("person", masked=True), KeyDefinition("user", "header:person"), "order_id"]
    place.record(keys=keys)
    relations.related(relations.read(place.stream, 0))
    relations.find("person", "zebra-9")
    told = repr([each.to_json() for each in spans.ours])
    assert "zebra-9" not in told
    assert sorted(spans.ours[-2].attributes["relatum.keys"]) == ["order_id", "person", "user"]


@pytest.mark.parametrize("broken", [("should_sample",), ("on_start", "on_end", "extract")], ids=["sampler", "others"])
def test_no_row_no_answer_and_no_bulk_is_lost_to_what_raises_in_a_span(
    place: Place, relations: Relations, spans: Spans, broken: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lookups, recorders and collectors work as without OpenTelemetry when its sampler or processor raises."""
    processor = SpanProcessor()
    spans.provider.add_span_processor(processor)
    of = {"should_sample": spans.provider.sampler, "extract": propagate.get_global_textmap()}
    for name in broken:
        monkeypatch.setattr(of.get(name, processor), name, Mock(side_effect=ValueError("broken")))
    carrier = {"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", "order_id": "17"}
    place.put_recorded(*[(b"", pika.BasicProperties(type="order", headers=carrier))] * 5, keys=["order_id"])
    found = relations.find("order_id", "17")
    assert [each.offset for each in found] == [0, 1, 2, 3, 4]
    assert len(relations.trace(found[0])) == 5
    with pytest.raises(OffsetNotFound):
        relations.read(place.stream, 7)
    done: list[int] = []
    options = FOREVER | {"bulk_messages": 5}
    with Collecting(place).collector(lambda bulk: done.append(len(bulk)), **options) as collector:
        wait_until(lambda: collector.statistics().held_messages == 0 and done, what="a bulk")
    assert done == [5]
