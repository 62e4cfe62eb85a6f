"""Each component counts what happened, and reports it to Prometheus under its labels."""

import urllib.request
from contextlib import closing, suppress
from typing import Any

import pika
import pytest
import sqlalchemy as sa
from pika.adapters.blocking_connection import BlockingChannel, BlockingConnection
from prometheus_client.parser import text_string_to_metric_families

import relatum
from relatum import GROUP_KEY, metrics
from relatum.collecting import ExecutorOptions, Failure, MessageCollector
from relatum.contexts import AffinityOptions, SerialOptions
from relatum.errors import ConfigurationError, KeyNotDefined, PublishNacked, PublishUnroutable
from relatum.reading import Message
from relatum.recording.embedded import EmbeddedRecorder
from relatum.superstreams import Layout
from relatum_consumer import Relations
from tests.support import unique_name, wait_until
from tests.support.following import Owner
from tests.support.groups import whole_group
from tests.support.pages import blocks_of, run
from tests.support.place import Place
from tests.support.ports import free_port
from tests.support.serial_consuming import serial_bed

PARTITIONS = 2
"""Of the fixture `layout`."""


def told(name: str, /, page: str | None = None, **labels: str) -> float:
    """A series' value on a page, or now; 0.0 where there is none."""
    families = text_string_to_metric_families(metrics.exposition() if page is None else page)
    samples = (sample for family in families for sample in family.samples)
    return float(sum(each.value for each in samples if (each.name, each.labels) == (name, labels)))


class Growth:
    """How much counters of the process have grown, which count for all tests."""

    def __init__(self, **labels: str) -> None:
        self._labels = labels
        self._before = metrics.exposition()

    def of(self, name: str, **labels: str) -> float:
        wanted = self._labels | labels
        return told(name, **wanted) - told(name, page=self._before, **wanted)


def test_a_connection_counts_what_became_of_its_messages(place: Place, connection: BlockingConnection) -> None:
    """A connection's statistics and the exposition agree on what was sent, refused, skipped and received."""
    growth = Growth(client="pika")
    servers = {"database": place.database, "broker": place.broker}
    channel = relatum.intercept(connection, keys=["order_id"], on_invalid="skip", **servers).channel()
    relatum.publish(channel, "", place.stream, b"").wait()
    channel.basic_publish("", place.stream, b"", pika.BasicProperties(headers={"order_id": "x" * 5000}))
    with pytest.raises(PublishUnroutable):
        channel.basic_publish("", unique_name(), b"", mandatory=True)
    full = unique_name()
    channel.queue_declare(full, exclusive=True, arguments={"x-max-length": 1, "x-overflow": "reject-publish"})

    def fill_up() -> None:
        while True:
            channel.basic_publish("", full, b"")

    with pytest.raises(PublishNacked):
        fill_up()
    seen = relatum.statistics(connection)
    assert seen.errors == {"unroutable": 1, "nacked": 1}
    assert seen.skipped == {"too_long": 1}
    assert (seen.connections, seen.receipt_s.count) == (1, 1)
    assert growth.of("relatum_publisher_published_total") == seen.published >= 4
    intercepted = told("relatum_publisher_connections", client="pika")
    assert intercepted >= 1
    relatum.release(connection)
    assert relatum.statistics(connection).connections == 0
    with pytest.raises(ConfigurationError):
        relatum.statistics(object())
    assert told("relatum_publisher_connections", client="pika") < intercepted
    assert growth.of("relatum_publisher_published_total") == seen.published
    assert growth.of("relatum_publisher_errors_total", reason="nacked") == 1
    assert growth.of("relatum_publisher_receipt_seconds_count") == 1


def test_a_publisher_that_has_published_nothing_reports_no_server_as_away(place: Place) -> None:
    """No alert fires for servers that an embedded recorder has had no reason to ask."""
    with closing(EmbeddedRecorder(place.broker, place.database)) as idle:
        seen = idle.statistics()
        assert (seen.is_broker_up, seen.is_database_up) == (None, None)
        idle.watch("", place.stream)
        wait_until(lambda: idle.statistics().streams, what="the stream is known")
        wait_until(lambda: (up := idle.statistics()).is_broker_up and up.is_database_up, what="both have answered")


def test_routers_count_by_super_stream(channel: BlockingChannel, layout: Layout, database_url: str) -> None:
    """A router counts messages with and without a context, and reports its known names while it is open."""
    name, labels = layout.super_stream, {"super_stream": layout.super_stream, "kind": "context"}
    with relatum.ContextRouter(name, database_url) as router:
        for context in ("a", "b", "a"):
            router.publish(channel, b"", pika.BasicProperties(headers={"serialization_context": context}))
        router.publish(channel, b"")
        seen = router.statistics()
        assert (seen.published, seen.unnamed, seen.known_names, seen.unchecked) == (3, 1, 2, 0)
        assert told("relatum_router_known_names", **labels) == 2
    affinity = relatum.AffinityRouter(name, database_url, AffinityOptions(header="set"))
    with affinity, suppress(ConfigurationError):
        affinity.publish(channel, b"")
    assert told("relatum_router_published_total", **labels) == 3
    assert told("relatum_router_known_names", **labels) == 0
    assert told("relatum_router_unnamed_total", **(labels | {"kind": "affinity"})) == 1


def test_collectors_count_by_type(database_url: str) -> None:
    """A collector counts messages, outcomes, retries and bulk times of the types that have an executor."""
    name = unique_name()
    answers = iter([[None, ValueError("once"), Failure("no", retry=False)], [None]])
    collector = MessageCollector(name, database=database_url)
    collector.register_executor(
        "order", lambda bulk: next(answers), ExecutorOptions(bulk_messages=3, max_age_s=0.01, backoff_s=0.01)
    )
    orders = pika.BasicProperties(type="order")
    with collector:
        assert collector.collect(Message.from_amqp("made", 9, pika.BasicProperties(type="of nobody"), b"")) is False
        collector.collect_many([Message.from_amqp("made", offset, orders, b"") for offset in range(3)])
        wait_until(lambda: collector.statistics().held_messages == 0, what="all outcomes")
        seen = collector.statistics()
        (orders_seen,) = seen.types.values()
    assert (seen.passed_over, seen.refused) == (1, 0)
    assert (orders_seen.collected, orders_seen.outcomes, orders_seen.retries) == (3, {"succeeded": 2, "failed": 1}, 1)
    assert orders_seen.bulk_s.count == 2
    of_type = {"collector": name, "type": "order"}
    assert told("relatum_collector_outcomes_total", **of_type, status="succeeded") == 2
    assert told("relatum_collector_bulk_seconds_count", **of_type) == 2


def test_serial_consumers_count_what_they_deliver(amqp_url: str, engine: sa.Engine) -> None:
    """A batch that was given back counts as delivered again, and is acknowledged once."""
    options = SerialOptions(batch_s=0.0)
    with (
        serial_bed(amqp_url, engine) as bed,
        relatum.SerialConsumer(bed.name, "billing", options, database=engine.url, broker=amqp_url) as consumer,
    ):
        labels = {"super_stream": bed.name, "consumer": "billing"}
        bed.publish(0, "a", "1", "2")
        batch = consumer.next_batch()
        assert batch is not None
        first = len(batch)
        batch.give_back()
        acknowledged = 0
        while acknowledged < 2:
            batch = consumer.next_batch()
            assert batch is not None
            batch.acknowledge()
            acknowledged += len(batch)
        seen = consumer.statistics()
        assert (seen.delivered, seen.acknowledged, seen.held_messages) == (2 + first, 2, 0)
        wait_until(lambda: told("relatum_serial_partitions", **labels) == 2, what="both partitions")
    assert told("relatum_serial_acknowledged_total", **labels) == 2
    assert told("relatum_serial_partitions", **labels) == 0


def test_followers_count_what_they_give(place: Place) -> None:
    """A follower counts its records, and its streams for as long as they are followed."""
    growth = Growth()
    place.put(*[(b"%d" % number, {}) for number in range(5)])
    with Owner(place.amqp) as owner:
        owner.follow(place.stream)
        wait_until(lambda: len(owner.offsets(place.stream)) == 5, what="the records")
        assert owner.statistics().records == 5
        followed = told("relatum_follower_streams")
        assert followed >= 1
    assert growth.of("relatum_follower_records_total") == 5
    assert told("relatum_follower_streams") < followed


def test_lookups_count_what_was_asked(place: Place) -> None:
    """Lookups count their number, times and errors, and the reader counts their connections."""
    growth = Growth()
    place.put_recorded((b"", {"order_id": "1"}), keys=["order_id"])
    with Relations(place.amqp, place.database) as relations:
        assert len(relations.find("order_id", "1")) == 1
        with pytest.raises(KeyNotDefined):
            relations.find("nobody's", "1")
        seen = relations.statistics()
        assert (seen.lookup_s.count, seen.errors) == (2, {"KeyNotDefined": 1})
        assert seen.opened >= 1
        assert growth.of("relatum_reader_connections_opened_total") >= seen.opened
    assert growth.of("relatum_lookup_seconds_count") == 2
    assert growth.of("relatum_lookup_errors_total", error="KeyNotDefined") == 1
    assert growth.of("relatum_reader_connections_idle") <= 0


def test_consumers_of_groups_count_groups(place: Place) -> None:
    """A group counts as held until it is acknowledged, and as acknowledged once however often that is done."""
    name = unique_name()
    place.put_recorded(*whole_group(1, 2), *whole_group(2, 2), keys=[GROUP_KEY])
    with Relations(place.amqp, place.database) as relations:
        with relations.groups(place.stream, consumer=name) as groups:
            first, _ = next(groups), next(groups)
            first.acknowledge()
            first.acknowledge()
            seen = groups.statistics()
            assert (seen.given, seen.redelivered, seen.acknowledged, seen.held) == (2, 0, 1, 1)
            assert told("relatum_group_consumer_held_groups", consumer=name) == 1
        with relations.groups(place.stream, consumer=name) as groups:
            next(groups)
            assert groups.statistics().given == 1
    assert told("relatum_group_consumer_given_total", consumer=name) == 3


def test_each_metric_is_told_by_something(place: Place, layout: Layout, connection: BlockingConnection) -> None:
    """Every declared metric is exposed while a component of each kind runs, except those counted by reason."""
    collector = MessageCollector(unique_name(), database=place.database)
    collector.register_executor("order", lambda bulk: None)
    with (
        place.recording(keys=["order_id"]),
        relatum.ContextRouter(layout.super_stream, place.database) as router,
        relatum.SerialConsumer(layout.super_stream, "billing", database=place.database, broker=place.amqp),
        Owner(place.amqp),
        Relations(place.amqp, place.database) as relations,
        collector,
    ):
        relatum.intercept(connection)
        router.open(connection)
        place.put((b"", {"order_id": "a"}))
        place.wait_recorded()
        with relations.groups(place.stream, consumer="billing"):
            families = {family.name for family in text_string_to_metric_families(metrics.exposition())}
        relatum.release(connection)
    names = {each.name for each in metrics.declared() if not each.name.startswith("relatum_tried")}
    by_reason = {"relatum_publisher_errors_total", "relatum_publisher_skipped_values_total"}
    by_reason |= {"relatum_skipped_values_total", "relatum_lookup_errors_total", "relatum_collector_outcomes_total"}
    assert {name.removesuffix("_total") for name in names - by_reason} <= families


def test_what_the_page_shows_runs(connection: BlockingConnection) -> None:
    """Each Python block of docs/metrics.md runs after the one before, and the page is served with what was counted."""
    port = free_port([0])
    names: dict[str, Any] = {"connection": relatum.intercept(connection), "relatum": relatum}
    for block in blocks_of("metrics.md"):
        # The process's own registry also serves its other tests; and the port is a free one.
        here = block.replace("import REGISTRY", "import CollectorRegistry; REGISTRY = CollectorRegistry()")
        run("metrics.md", here.replace("metrics.serve(9400)", f"end = metrics.serve({port})"), names)
    relatum.release(connection)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=90) as answer:
        assert "relatum_publisher_published_total" in answer.read().decode()
    assert "relatum_publisher_published_total" in names["page"]
    names["end"]()
