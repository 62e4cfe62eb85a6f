"""Whatever is told to stop does so while a server is away."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import sqlalchemy as sa

from relatum.collecting import AsyncMessageCollector, MessageCollector
from relatum.contexts import AsyncSerialConsumer, SerialConsumer, SerialOptions
from relatum.recording import Recorder
from tests.support import wait_until
from tests.support.leases import LEASE_S
from tests.support.proxy import Proxy
from tests.support.serial_consuming import SerialBed, serial_bed
from tests.support.standstill import in_time, locked

WAITS = """
SELECT 1 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()
"""


@pytest.fixture
def bed(amqp_url: str, engine: sa.Engine) -> Iterator[SerialBed]:
    """A super stream of one partition."""
    with serial_bed(amqp_url, engine, 1) as bed:
        yield bed


@contextmanager
def silent(database_url: str, proxy: Proxy) -> Iterator[None]:
    """PostgreSQL takes what is asked of positions, and answers nothing."""
    with locked(database_url, "serial_positions"):
        yield


@contextmanager
def refusing(database_url: str, proxy: Proxy) -> Iterator[None]:
    """PostgreSQL ends its connections, and takes no new one."""
    proxy.accepts = False
    proxy.cut()
    yield
    proxy.accepts = True


@pytest.mark.parametrize("away", [silent, refusing])
def test_a_serial_consumer_stops_while_the_database_is_away(
    away: Any, bed: SerialBed, database_url: str, amqp_url: str
) -> None:
    """The batch under way is not acknowledged, and is handed out again."""
    options, stop, batches = SerialOptions(lease_s=LEASE_S), threading.Event(), []
    bed.publish(0, "a", "a1", "a2")
    with Proxy.to(database_url) as proxy:
        database = proxy.url(database_url)
        with SerialConsumer(bed.name, "test", options, database=database, broker=amqp_url) as consumer:
            ended = threading.Event()

            def handle(batch: Any) -> None:
                batches.append(batch)
                begun.set()
                assert away_now.wait(90)
                stop.set()

            def running() -> None:
                consumer.run(handle, stop)
                ended.set()

            begun, away_now = threading.Event(), threading.Event()
            threading.Thread(target=running, daemon=True).start()
            assert begun.wait(90)
            with away(database_url, proxy):
                away_now.set()
                with in_time(2.0):
                    assert ended.wait(90)
            assert not batches[0].is_acknowledged
            again = consumer.next_batch(90)
            assert again is not None
            assert again.messages == batches[0].messages


@pytest.mark.parametrize("away", [silent, refusing])
def test_a_serial_consumer_in_a_loop_stops_while_the_database_is_away(
    away: Any, bed: SerialBed, database_url: str, amqp_url: str
) -> None:
    """The same, with asyncio."""

    async def main(database: str, proxy: Proxy) -> None:
        options, stop, batches = SerialOptions(lease_s=LEASE_S), asyncio.Event(), []
        async with AsyncSerialConsumer(bed.name, "test", options, database=database, broker=amqp_url) as consumer:
            begun, away_now = asyncio.Event(), asyncio.Event()

            async def handle(batch: Any) -> None:
                batches.append(batch)
                begun.set()
                await away_now.wait()
                stop.set()

            running = asyncio.create_task(consumer.run(handle, stop))
            await asyncio.wait_for(begun.wait(), 90)
            with away(database_url, proxy):
                away_now.set()
                with in_time(2.0):
                    await asyncio.wait_for(running, 90)
            assert not batches[0].is_acknowledged
            again = await consumer.next_batch(90)
            assert again is not None
            assert again.messages == batches[0].messages

    bed.publish(0, "a", "a1", "a2")
    with Proxy.to(database_url) as proxy:
        asyncio.run(main(proxy.url(database_url), proxy))


def recorder(stream: str, amqp_url: str, database_url: str) -> Callable[[threading.Event], object]:
    """Runs a recorder."""
    return Recorder(amqp_url, database_url, [stream], keys=["order_id"]).run


def collector(stream: str, amqp_url: str, database_url: str) -> Callable[[threading.Event], object]:
    """Runs a collector with threads."""
    made = MessageCollector("billing", database=database_url, broker=amqp_url, streams=[stream])
    made.register_executor("order", lambda bulk: None)
    return made.run


def collector_in_a_loop(stream: str, amqp_url: str, database_url: str) -> Callable[[threading.Event], object]:
    """Runs a collector with asyncio."""

    async def main(stop: threading.Event) -> None:
        made = AsyncMessageCollector("billing", database=database_url, broker=amqp_url, streams=[stream])
        made.register_executor("order", lambda bulk: None)
        told = asyncio.Event()
        running = asyncio.create_task(made.run(told))
        await asyncio.to_thread(stop.wait)
        told.set()
        await running

    return lambda stop: asyncio.run(main(stop))


@pytest.mark.parametrize("made", [recorder, collector, collector_in_a_loop])
def test_what_waits_for_a_database_to_start_stops(
    made: Callable[..., Any], stream_name: str, amqp_url: str, database_url: str, engine: sa.Engine
) -> None:
    """A statement that PostgreSQL does not answer has half a minute, and a second where its owner is to stop."""
    stop = threading.Event()

    def waits() -> bool:
        with engine.connect() as connection:
            return connection.execute(sa.text(WAITS)).first() is not None

    with locked(database_url, "keys", "collectors"):
        thread = threading.Thread(target=made(stream_name, amqp_url, database_url), args=[stop], daemon=True)
        thread.start()
        wait_until(waits, what="it waits")
        stop.set()
        with in_time(2.0):
            thread.join(90)
        assert not thread.is_alive()
