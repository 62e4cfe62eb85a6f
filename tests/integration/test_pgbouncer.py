"""All components behind a pgbouncer that hands out sessions by transaction, and what it refuses."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from pathlib import Path

import pika
import psycopg
import pytest
import sqlalchemy as sa
from pika.adapters.blocking_connection import BlockingChannel

import relatum
from relatum.collecting import Bulk, ExecutorOptions
from relatum.contexts import SerialConsumer, SerialOptions
from relatum.errors import ConfigurationError, DatabaseUnavailable
from relatum.store.database import as_engine
from relatum.store.rows import copy_into
from relatum.store.translation import translated_errors
from relatum.superstreams import Layout
from relatum_consumer import AsyncRelations, Relations
from relatum_migrations import current, head, upgrade
from tests.support import recording, unique_name, wait_recorded, wait_until
from tests.support.collectors import SUCCEEDED
from tests.support.commits import written
from tests.support.pgbouncer import holds_statements, pgbouncer
from tests.support.place import Place
from tests.support.serial_consuming import serial_bed
from tests.support.threads import beside

PARTITIONS = 2

SESSIONS = 3
"""Sessions that all clients share."""


@pytest.fixture(params=["", "max_prepared_statements = 0"] if holds_statements() else [""])
def pooled_url(request: pytest.FixtureRequest, database_url: str, tmp_path: Path) -> Iterator[str]:
    """The test's database through pgbouncer, each of whose sessions holds statements of another psycopg."""
    with pgbouncer(database_url, tmp_path, pool_size=SESSIONS, more=request.param) as url:
        with ExitStack() as at_once:
            for _ in range(SESSIONS):
                session = at_once.enter_context(psycopg.connect(url, prepare_threshold=None))
                for number in range(10):
                    session.execute(f"PREPARE _pg3_{number} AS SELECT 'of another client'")
        yield url


def test_rows_and_answers_are_the_streams(
    place: Place, layout: Layout, pooled_url: str, channel: BlockingChannel
) -> None:
    """Routers, a recorder and lookups of many threads and tasks share three sessions, and every answer is right."""
    with ExitStack() as stack:
        streams = [partition.stream for partition in layout]
        engine = stack.enter_context(as_engine(pooled_url))
        stack.enter_context(recording(place.amqp, engine, *streams, keys=["order_id", "host"]))
        with relatum.AffinityRouter(layout.super_stream, pooled_url) as router:
            for number in range(60):
                headers = {"affinity_set": f"set {number % 6}", "order_id": number % 20, "host": f"h{number % 2}"}
                router.publish(channel, b"%d" % number, pika.BasicProperties(headers=headers))
        for stream in streams:
            wait_recorded(place.amqp, engine, stream)
        expected = {order: {b"%d" % number for number in range(order, 60, 20)} for order in range(20)}
        relations = stack.enter_context(Relations(place.amqp, pooled_url, timeout_s=240))

        def found(order: int) -> set[bytes]:
            ids = relations.find("order_id", order, streams=streams).ids
            assert len(relations.find("host", f"h{order % 2}", streams=streams).ids) == 30
            return {message.body for message in relations.read_many(ids)}

        with ThreadPoolExecutor(8) as threads:
            asked = [order for order in range(20) for _ in range(5)]
            assert list(threads.map(found, asked)) == [expected[order] for order in asked]

        async def found_by_tasks() -> list[int]:
            async with AsyncRelations(place.amqp, pooled_url, timeout_s=240) as relations:
                asked = [relations.find("order_id", number % 20, streams=streams) for number in range(100)]
                return [len(answer.ids) for answer in await asyncio.gather(*asked)]

        assert asyncio.run(found_by_tasks()) == [3] * 100


def test_each_message_counts_once_for_a_serial_consumer(place: Place, pooled_url: str) -> None:
    """Each message counts once for a serial consumer, whose position moves with the application's rows."""
    written.create(place.engine)
    with as_engine(pooled_url) as pooled, serial_bed(place.amqp, pooled) as bed:
        for number in range(40):
            bed.publish(number % 2, f"context {number % 4}", str(number))
        options = SerialOptions(lease_s=60.0, batch_messages=3)
        with SerialConsumer(bed.name, "test", options, database=pooled_url, broker=place.amqp) as consumer:
            while len(_bodies(place.engine)) < 40:
                batch = consumer.next_batch(90.0)
                assert batch is not None
                with batch.transaction() as connection:
                    connection.execute(sa.insert(written), [{"body": message.body.decode()} for message in batch])
    bodies = _bodies(place.engine)
    assert sorted(bodies, key=int) == [str(number) for number in range(40)]
    assert [body for body in bodies if int(body) % 4 == 1] == [str(number) for number in range(1, 40, 4)]


def _bodies(engine: sa.Engine) -> list[str]:
    with engine.connect() as connection:
        return list(connection.scalars(sa.select(written.c.body).order_by(written.c.id)))


def test_each_message_is_collected_once(place: Place, pooled_url: str, channel: BlockingChannel) -> None:
    """Each message is written once, in the transaction of its result, and its publisher learns the outcome."""
    written.create(place.engine)

    def write(bulk: Bulk) -> None:
        assert bulk.connection is not None
        rows = [{"body": each.message.body.decode()} for each in bulk.messages]
        bulk.connection.execute(sa.insert(written), rows)

    def publish(number: int) -> relatum.Receipt:
        properties = pika.BasicProperties(type="order", headers={"customer": number})
        return relatum.publish(channel, "", place.stream, b"%d" % number, properties)

    name = unique_name("collector")
    collector = relatum.MessageCollector(name, database=pooled_url, broker=place.amqp, streams=[place.stream])
    collector.register_executor("order", write, ExecutorOptions(bulk_messages=7, max_age_s=0.1, joins_transaction=True))
    relatum.intercept(channel.connection, database=pooled_url, keys=["customer"])
    with collector:
        receipts = [publish(number) for number in range(30)]
        outcomes = [receipt.outcome(timeout_s=60, collector=name).status for receipt in receipts]
        assert outcomes == [SUCCEEDED] * 30
        wait_until(lambda: receipts[-1].wait(90), what="the last message is recorded")
    relatum.release(channel.connection)
    assert sorted(map(int, _bodies(place.engine))) == list(range(30))


def test_the_schema_is_made_through_a_pooler(empty_database_url: str, tmp_path: Path) -> None:
    """The schema can be made through a pooler, by several at once."""
    with pgbouncer(empty_database_url, tmp_path, pool_size=1) as url:
        with ThreadPoolExecutor(3) as threads:
            list(threads.map(upgrade, [url] * 3))
        assert current(url) == head()


def test_statements_are_prepared_where_no_pooler_is(database_url: str, tmp_path: Path) -> None:
    """Sessions keep psycopg's threshold, and those of a pooler prepare nothing, unless the URL says otherwise."""
    with pgbouncer(database_url, tmp_path) as url:
        prepared = {database_url: 5, f"{database_url}?pgbouncer=true": None, url: None, f"{url}?pgbouncer=false": 5}
        for each, expected in prepared.items():
            with as_engine(each) as engine, engine.connect() as connection:
                driver = connection.connection.driver_connection
                assert isinstance(driver, psycopg.Connection)
                assert driver.prepare_threshold == expected


def test_a_callers_engine_that_prepares_is_told_what_to_do(pooled_url: str) -> None:
    """An engine that prepares statements behind a pooler gets an error that says what to set, and then works."""
    for arguments, outcome in (
        ({}, pytest.raises(ConfigurationError, match="pgbouncer=true")),
        ({"prepare_threshold": None}, nullcontext()),
    ):
        theirs = sa.create_engine(pooled_url.replace("postgresql:", "postgresql+psycopg:"), connect_args=arguments)
        with outcome, translated_errors(), theirs.connect() as connection:
            for _ in range(20):
                connection.execute(sa.text("SELECT :number + 1"), {"number": 1})
        theirs.dispose()


@pytest.mark.parametrize("held_by", ["LOCK TABLE copied", "SELECT pg_advisory_xact_lock(1)"], ids=["begins", "ends"])
def test_a_session_that_ends_during_a_copy_is_unavailability(pooled_url: str, database_url: str, held_by: str) -> None:
    """PostgreSQL ends the session of a COPY that begins, or whose rows are written: the pooler adds its own error."""
    with (
        psycopg.connect(database_url, autocommit=True) as other,
        psycopg.connect(database_url) as holder,
        as_engine(pooled_url) as engine,
    ):
        other.execute("CREATE TABLE copied (number integer, waited text DEFAULT pg_advisory_xact_lock(1)::text)")
        holder.execute(held_by.encode())

        def end() -> bool:
            waiting = "pg_stat_activity WHERE query LIKE 'COPY copied%' AND wait_event_type = 'Lock'"
            return bool(other.execute(f"SELECT pg_terminate_backend(pid, 5000) FROM {waiting}".encode()).fetchall())

        with (
            beside(lambda: wait_until(end, what="a COPY that waits")),
            pytest.raises(DatabaseUnavailable),
            translated_errors(),
            engine.begin() as connection,
        ):
            copy_into(connection, "copied (number)", b"1\n")


def test_what_a_pooler_refuses_at_the_start_is_named(database_url: str, tmp_path: Path) -> None:
    """A parameter that a pooler refuses at the start is a configuration error that names it."""
    with pgbouncer(database_url, tmp_path) as url:
        for query, said in (("?options=-csearch_path%3Dx", "startup parameter"), ("?replication=true", "replication")):
            with as_engine(url + query) as engine, pytest.raises(ConfigurationError, match=said), translated_errors():
                engine.connect()


def test_a_pooler_that_takes_no_more_clients_is_waited_for(database_url: str, tmp_path: Path) -> None:
    """A pooler without room for a client is a transient error with that reason."""
    with pgbouncer(database_url, tmp_path, clients_max=1) as url, psycopg.connect(url), as_engine(url) as engine:
        with pytest.raises(DatabaseUnavailable) as refused, translated_errors():
            engine.connect()
        assert refused.value.reason == "connections"
